"""Flask: the queue of an application, and its context around handlers.

    queue = Postroom()
    queue.init_app(app)              # POSTROOM_URL of the app's configuration, or of the environment
    queue.mq.send("orders", b"…")    # in a view

Decides where the address comes from. Handlers run in a worker beside the web server (`postroom worker`),
never in it. Must never open a connection before it is used: the server may fork after the program was loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..client.app.app import App
from ..client.app.supervisor import AppHealth
from ..errors import UsageError
from ..sync import Connection
from .process import PerProcess, seen

__all__ = ["Postroom"]


class Postroom:
    def __init__(self, app: Any = None) -> None:
        self._app: Any = None
        self._connections: PerProcess | None = None
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Any) -> None:
        """Settings: POSTROOM_URL, and POSTROOM_OPTIONS, a dict with options of `postroom.connect`."""
        url = app.config.setdefault("POSTROOM_URL", os.environ.get("POSTROOM_URL"))
        if not url:
            raise UsageError(
                "there is no POSTROOM_URL in the app's configuration or the environment: set it, such as "
                'app.config["POSTROOM_URL"] = "sqlite:////var/lib/shop/queue.db"'
            )
        self._app = app
        self._connections = PerProcess(url, app.config.get("POSTROOM_OPTIONS"))
        app.extensions["postroom"] = self

    @property
    def mq(self) -> Connection:
        """The connection of this process."""
        if self._connections is None:
            raise UsageError("this queue has no application: call init_app(app) first")
        return self._connections.get()

    def context(self, message: Any) -> Iterator[None]:
        """Middleware for handlers that use the application: `app.middleware(queue.context)`."""
        if self._app is None:
            raise UsageError("this queue has no application: call init_app(app) first")
        with self._app.app_context():
            yield

    def health(self, messages: App) -> AppHealth:
        """How the handlers of that app are doing in their worker; a view returns `found.as_dict()`."""
        return seen(lambda: self.mq, messages)

    def close(self) -> None:
        if self._connections is not None:
            self._connections.close()
