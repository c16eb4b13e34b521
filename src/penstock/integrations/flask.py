"""Flask: the queue of an application, and its context around handlers.

    queue = Penstock()
    queue.init_app(app)              # PENSTOCK_URL of the app's configuration, or of the environment
    queue.mq.send("orders", b"…")    # in a view

Decides where the address comes from. Handlers run in a worker beside the web server (`penstock worker`),
never in it. Must never open a connection before it is used: the server may fork after the program was loaded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from ..errors import UsageError
from ..sync import Connection
from .process import PerProcess

__all__ = ["Penstock"]


class Penstock:
    def __init__(self, app: Any = None) -> None:
        self._app: Any = None
        self._connections: PerProcess | None = None
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Any) -> None:
        """Settings: PENSTOCK_URL, and PENSTOCK_OPTIONS, a dict with options of `penstock.connect`."""
        url = app.config.setdefault("PENSTOCK_URL", os.environ.get("PENSTOCK_URL"))
        if not url:
            raise UsageError(
                "there is no PENSTOCK_URL in the app's configuration or the environment: set it, such as "
                'app.config["PENSTOCK_URL"] = "sqlite:////var/lib/shop/queue.db"'
            )
        self._app = app
        self._connections = PerProcess(url, app.config.get("PENSTOCK_OPTIONS"))
        app.extensions["penstock"] = self

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

    def close(self) -> None:
        if self._connections is not None:
            self._connections.close()
