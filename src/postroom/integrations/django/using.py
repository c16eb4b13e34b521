"""The queue of a Django project, as its settings say. Must never be read before settings are configured."""

from __future__ import annotations

from typing import Any

from django.conf import settings

from ...errors import UsageError
from ...sync import Connection
from ..process import PerProcess

__all__ = ["address", "queue"]

_connections: PerProcess | None = None


def address() -> tuple[str, dict[str, Any]]:
    """What `postroom.connect` takes: an address and options."""
    url = getattr(settings, "POSTROOM_URL", None)
    if not url:
        raise UsageError(
            "the settings have no POSTROOM_URL: set it, such as POSTROOM_URL = 'sqlite:////var/lib/shop/queue.db'"
        )
    return str(url), dict(getattr(settings, "POSTROOM_OPTIONS", None) or {})


def queue() -> Connection:
    """The connection of this process, without await; opened when it is first asked for.

    In an async view: `await sync_to_async(lambda: queue().send(…))()`.
    """
    global _connections
    url, options = address()
    if _connections is None or (_connections.url, _connections.options) != (url, options):
        if _connections is not None:  # other settings, as in tests
            _connections.close()
        _connections = PerProcess(url, options)
    return _connections.get()
