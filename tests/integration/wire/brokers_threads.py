"""Brokers that run in threads of their own, each with its own event loop, as if they were processes.

stop()    as an operator stops it: requests under way end
abort()   as if it were killed: its connections break, and it says goodbye to nobody
start()   once more, on the same port
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import Any, Self

import postroom
from postroom.broker.access import Gatekeeper
from postroom.clock import SystemClock
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer
from tests.integration.wire.wire_raw import broker_of

__all__ = ["ThreadedBroker"]


class ThreadedBroker:
    def __init__(self, url: str, *, port: int = 0, advertise: str = "") -> None:
        self.url, self.port, self._advertise = url, port, advertise
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="broker", daemon=True)
        self._thread.start()
        self.server: WireServer | None = None
        self.mq: postroom.Connection | None = None
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Something done in the broker's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=30)

    def start(self) -> None:
        async def begin() -> None:
            if self.mq is None:
                self.mq = await postroom.connect(self.url)
            broker = broker_of(self.mq)
            door = Gatekeeper(broker.store, broker.in_thread, SystemClock(), dev=True)
            self.server = WireServer(broker, Listening(port=self.port, advertise=self._advertise), door)
            await self.server.start()
            self.port = self.server.port

        self.call(begin())

    def stop(self) -> None:
        async def end() -> None:
            assert self.server is not None
            await self.server.stop()

        self.call(end())
        self.server = None

    def abort(self) -> None:
        """What it had entered in the store stays there, as that of a process that was killed."""

        async def die() -> None:
            server = self.server
            assert server is not None
            assert server._server is not None
            server._server.close()
            for duty in server._duties:
                duty.cancel()
            for connection in list(server.connections):
                connection.abort()
            await asyncio.gather(*server._duties, return_exceptions=True)

        self.call(die())
        self.server = None

    def now(self, function: Callable[[], Any]) -> Any:
        async def work() -> Any:
            return function()

        return self.call(work())

    def close(self) -> None:
        async def end() -> None:
            if self.server is not None:
                await self.server.stop(grace_ms=500)
            if self.mq is not None:
                await self.mq.close()

        self.call(end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
