"""The relay: sends what is committed in the outbox, in the order of ids per key, and deletes it then (R30,
I21).

Any number of processes may have one; whichever has the lease leads, and the others look now and then
whether it still does. Decides its own life: what is wrong from the start (no table, no connection) is
raised there; later the relay goes on by itself, with a new connection and a new identity, whatever happened
to the old ones. Must never send anything itself: the forwarder does, under a stamp (I12).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from ...backoff import SLOW
from ...errors import LeaseLost, UsageError
from ...tasks import end
from ..databases import Opening
from .forwarder import Forwarder, Trouble
from .outbox_source import DrawingEndpoint, OutboxSource
from .outbox_table import Table

if TYPE_CHECKING:
    from ..connection import Connection


__all__ = ["Relay", "RelaySettings", "make_relay"]


log = logging.getLogger("postroom.outbox")

_GRACE_S = 5.0  # for what is on its way when it is stopped


@dataclass(frozen=True, slots=True)
class RelaySettings:
    table: Table
    opening: Opening
    lease_ms: int
    poll_ms: int


class Relay:
    """Made by `Outbox.relay`; use it as `async with`."""

    def __init__(self, mq: Connection, settings: RelaySettings, wakers: list[Callable[[], None]]) -> None:
        self._mq, self._settings, self._wakers = mq, settings, wakers
        self._source: OutboxSource | None = None
        self._forwarder: Forwarder | None = None
        self._task: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._forwarded = 0  # by forwarders before this one

    @property
    def leading(self) -> bool:
        """Whether this is the relay that sends."""
        return self._source is not None and self._source.leading

    @property
    def forwarded(self) -> int:
        """Messages that this relay has sent."""
        return self._forwarded + (self._forwarder.forwarded if self._forwarder is not None else 0)

    @property
    def troubles(self) -> dict[str, Trouble]:
        """By topic, why its messages wait."""
        return {} if self._forwarder is None else self._forwarder.troubles

    def wake(self) -> None:
        """There may be messages. From any thread."""
        forwarder = self._forwarder
        if forwarder is not None:
            forwarder.wake()

    # ---- life ----

    async def start(self) -> None:
        """SchemaMismatch: the table is missing or old. What the driver says, if it cannot connect."""
        self._mq._guard.check()
        if self._task is not None:
            raise UsageError("this relay runs already: make another with outbox.relay(…)")
        settings = self._settings
        await asyncio.to_thread(OutboxSource(settings.table, settings.opening, settings.lease_ms, "").check)
        self._task = asyncio.create_task(self._run())
        self._wakers.append(self.wake)

    async def stop(self) -> None:
        """At any step; gives the lease back. Once more is harmless."""
        if self._task is None:
            return
        with suppress(ValueError):
            self._wakers.remove(self.wake)
        self._stopping.set()
        await asyncio.shield(self._task)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _run(self) -> None:
        tries = 0
        while not self._stopping.is_set():
            before = self.forwarded
            error = await self._forward()
            if isinstance(error, LeaseLost):
                log.info("another relay leads the outbox %s now", self._settings.table.name)
            elif error is not None:
                tries = 1 if self.forwarded > before else tries + 1
                log.warning("the relay of %s starts again: %r", self._settings.table.name, error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(SLOW.after(tries)):
                        await self._stopping.wait()

    async def _forward(self) -> BaseException | None:
        """Until it is told to stop, or something ends it: that is returned."""
        settings, holder = self._settings, secrets.token_hex(16)
        way = DrawingEndpoint.over(self._mq._endpoint, settings.table.name, holder)
        source = OutboxSource(settings.table, settings.opening, settings.lease_ms, holder, way)
        forwarder = Forwarder(
            way or self._mq._endpoint, source, client=self._mq.client_id, look_ms=settings.poll_ms
        )
        self._source, self._forwarder = source, forwarder
        running, stopping = (asyncio.create_task(one) for one in (forwarder.run(), self._stopping.wait()))
        try:
            await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
            source.stopping = True
            if not running.done():  # what is on its way: the next relay would finish it all the same
                await asyncio.to_thread(source.idle.wait, _GRACE_S)
            return running.exception() if running.done() else None
        finally:
            await end((running, stopping))
            self._forwarded, self._forwarder = self.forwarded, None
            await _let_go(forwarder, source)


async def _let_go(forwarder: Forwarder, source: OutboxSource) -> None:
    """In the forwarder's own thread, which the connection belongs to."""
    try:
        await forwarder._ask(source.leave)
    except Exception as error:  # it may be that the connection is what failed; the lease ends by itself
        log.debug("the lease of a relay was not given back: %r", error)
    await asyncio.to_thread(forwarder.let_go)


def make_relay(mq: Any, settings: RelaySettings, wakers: list[Callable[[], None]]) -> Any:
    """Of a connection, or of one of `postroom.sync`: then it is used without await."""
    portal = getattr(mq, "_portal", None)
    if portal is None:
        return Relay(mq, settings, wakers)

    async def make() -> Relay:
        return Relay(mq._target, settings, wakers)

    return portal.call(make)
