"""FastAPI: the queue as a parameter of a path operation.

    messages = postroom.App("sqlite:///queue.db")
    api = FastAPI(lifespan=messages.lifespan)

    @api.post("/orders", status_code=202)
    async def order(mq: Queue) -> dict[str, str]:
        receipt = await mq.send("orders", b"…")

    api.add_api_route("/health", health)     # 200 if every handler runs, else 503; who is not well is in it

The app's lifespan opens the connection, and runs its handlers in the event loop of the web server, if it has
any. Decides nothing else. Must never open a connection for a request.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request
from fastapi.responses import JSONResponse
from starlette.requests import HTTPConnection

from ..client.app.app import App
from ..client.app.supervisor import AppHealth
from ..client.connection import Connection
from ..errors import UsageError

__all__ = ["Health", "Queue", "app_health", "health", "queue"]

_NONE = (
    "this application has no queue: make it with FastAPI(lifespan=app.lifespan), app being a postroom.App; "
    "in tests, run the lifespan too: `with TestClient(api) as client`"
)


def queue(request: HTTPConnection) -> Connection:
    """The connection of the app whose lifespan this web application has."""
    found = getattr(request.state, "postroom", None)
    if not isinstance(found, Connection):
        raise UsageError(_NONE)
    return found


def app_health(request: HTTPConnection) -> AppHealth:
    """How the handlers of that app are doing."""
    found = getattr(request.state, "postroom_app", None)
    if not isinstance(found, App):
        raise UsageError(_NONE)
    return found.health()


async def health(request: Request) -> JSONResponse:
    """A path operation for probes: 200 if the app runs and every handler does, else 503."""
    found = app_health(request)
    return JSONResponse(found.as_dict(), status_code=200 if found.ok else 503)


Queue = Annotated[Connection, Depends(queue)]
"""Annotate a parameter with it."""
Health = Annotated[AppHealth, Depends(app_health)]
"""The same for the health of the app's handlers."""
