"""Celery on Postroom: a transport for kombu, so that an app runs by its broker URL.

    import postroom.integrations.celery      # makes the scheme `postroom` known to kombu

    app = Celery("shop", broker="postroom+sqlite:///queue.db")      # postroom+postgresql://…, postroom+mysql://…
    app = Celery("shop", broker="postroom://queue-1:7070")          # a broker; its token: POSTROOM_TOKEN

Without a line of code: `broker_transport="postroom.integrations.celery:Transport"` beside `broker_url` in the
configuration. Decides nothing: see `transport`. Results are not kept: see `results`.
"""

from __future__ import annotations

from ...errors import UsageError, how_to_install

try:
    from kombu.transport import TRANSPORT_ALIASES
except ImportError as error:
    raise UsageError(f"kombu is not installed: {how_to_install('celery')}") from error

from .transport import Transport

__all__ = ["Transport"]

TRANSPORT_ALIASES.setdefault("postroom", "postroom.integrations.celery:Transport")
