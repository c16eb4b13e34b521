"""The queue of a Django project, as its settings say. Must never be read before settings are configured."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.http import HttpRequest, JsonResponse

from ...client.app.app import App
from ...client.app.program import load_app
from ...client.app.supervisor import AppHealth
from ...errors import UsageError
from ...sync import Connection
from ..process import PerProcess, seen

__all__ = ["address", "health", "health_view", "queue"]

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


def health(app: App | None = None) -> AppHealth:
    """How the handlers of an app (else: of POSTROOM_APP) are doing in their worker."""
    if app is None:
        target = getattr(settings, "POSTROOM_APP", None)
        if not target:
            raise UsageError("the settings have no POSTROOM_APP: set it, such as 'shop.messages:app'")
        app = load_app(target)
    return seen(queue, app)


def health_view(request: HttpRequest) -> JsonResponse:
    """A view for probes: 200 if every handler of POSTROOM_APP runs, else 503."""
    found = health()
    return JsonResponse(found.as_dict(), status=200 if found.ok else 503)
