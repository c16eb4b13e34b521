"""FastAPI: the queue as a parameter of a path operation.

    messages = postroom.App("sqlite:///queue.db")
    api = FastAPI(lifespan=messages.lifespan)

    @api.post("/orders", status_code=202)
    async def order(mq: Queue) -> dict[str, str]:
        receipt = await mq.send("orders", b"…")

The app's lifespan opens the connection, and runs its handlers in the event loop of the web server, if it has
any. Decides nothing else. Must never open a connection for a request.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends
from starlette.requests import HTTPConnection

from ..client.connection import Connection
from ..errors import UsageError

__all__ = ["Queue", "queue"]


def queue(request: HTTPConnection) -> Connection:
    """The connection of the app whose lifespan this web application has."""
    found = getattr(request.state, "postroom", None)
    if not isinstance(found, Connection):
        raise UsageError(
            "this application has no queue: make it with FastAPI(lifespan=app.lifespan), app being a "
            "postroom.App; in tests, run the lifespan too: `with TestClient(api) as client`"
        )
    return found


Queue = Annotated[Connection, Depends(queue)]
"""Annotate a parameter with it."""
