"""What the handlers of one app share: the broker, who may use it, connections to send with, and its end.

Each principal has a connection of its own on the broker in this process, so that batching, ids and routing
are the SDK's code, limits are counted for each, and concurrent sends of one principal share batches.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Annotated, Any, NamedTuple, TypeVar, cast

from fastapi import Depends, Request

from ..broker.access import Gatekeeper
from ..broker.served import Servable, figures_of, measured
from ..client.connection import Connection
from ..errors import BrokerUnavailable
from ..model.access import ANONYMOUS, Principal
from ..tasks import end
from ..wire.server.answers import Answers
from ..wire.server.listening import Listening
from ..wire.server.server import WireServer
from .access import Logins, Permitted

__all__ = ["OPEN", "Caller", "Service", "Who"]

OPEN = ("/health", "/ready", "/docs", "/openapi.json")
"""What anybody may ask: nothing of it is about the queue."""

T = TypeVar("T")

_MOST = 256  # connections: that of the principal who has been silent longest is closed


class Caller(NamedTuple):
    """Who asks, and what it asks with."""

    broker: Permitted
    mq: Connection
    service: Service

    @property
    def principal(self) -> Principal:
        return self.broker.principal

    @property
    def member(self) -> str:
        """The member of a group that it is, if it does not say."""
        return f"http-{self.principal.name}"


def _room() -> Answers:
    limits = Listening()
    return Answers(limits.all_answer_bytes, limits.answer_bytes, limits.answer_wait_ms)


class Service:
    def __init__(self, broker: Servable, gatekeeper: Gatekeeper, server: WireServer | None) -> None:
        self.broker = measured(broker)
        figures = figures_of(self.broker)
        assert figures is not None, "it was just measured"
        self.figures = figures
        self.gatekeeper, self.server = gatekeeper, server
        self.answers = _room() if server is None else server.answers  # one budget, with those of the wire
        self.stopping = False
        self.open = set(OPEN)  # paths that need no principal
        self.logins: Logins | None = None  # of browsers, if there is a console
        self.background: list[Callable[[], Coroutine[Any, Any, None]]] = []  # runs as long as the app
        self._callers: dict[str, Caller] = {}
        self._waiting: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[None]] = set()

    def caller(self, principal: Principal) -> Caller:
        found = self._callers.pop(principal.name, None)
        if found is None:
            permitted = Permitted(self.broker, self.gatekeeper, principal)
            client = "http" if principal is ANONYMOUS else principal.name
            found = Caller(permitted, Connection(permitted, client), self)
            self._make_room()
        found.broker.principal = principal
        self._callers[principal.name] = found  # the latest last
        return found

    def _make_room(self) -> None:
        if len(self._callers) >= _MOST:
            oldest = self._callers.pop(next(iter(self._callers)))
            closing = asyncio.create_task(oldest.mq.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def waiting(self, request: Request, work: Coroutine[Any, Any, T]) -> T:
        """Work that may wait for long: it is cancelled if the client goes away, or the broker stops."""
        task = asyncio.create_task(work)
        gone = asyncio.create_task(_gone(request))
        self._waiting.add(task)
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            return await task
        except asyncio.CancelledError:
            if not self.stopping and not gone.done():
                raise
            raise BrokerUnavailable("this broker is stopping: ask another, or again in a moment") from None
        finally:
            task.cancel()
            gone.cancel()
            self._waiting.discard(task)

    def stop(self) -> None:
        """Nothing new is begun, and nobody is made to wait any longer."""
        self.stopping = True
        for task in self._waiting:
            task.cancel()

    async def close(self) -> None:
        self.stop()
        closing = [caller.mq.close() for caller in self._callers.values()]
        await asyncio.gather(*closing, *self._closing, return_exceptions=True)

    @asynccontextmanager
    async def lifespan(self, app: Any) -> AsyncIterator[None]:
        running = [asyncio.create_task(work()) for work in self.background]
        try:
            yield
        finally:
            await end(running)
            await self.close()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _caller(request: Request) -> Caller:
    service = cast(Service, request.app.state.service)
    return service.caller(request.scope["state"]["principal"])


Who = Annotated[Caller, Depends(_caller)]
"""Of a handler: who asks."""
