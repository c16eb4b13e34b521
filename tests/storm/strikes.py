"""What a fault does, and what heals it. Whatever may excuse a repeat is noted for the checkers."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import ClassVar, TypeVar

from postroom.testing.check import Event
from tests.chaos.crew import Crew
from tests.servers import Proxy

from .burners import overloaded
from .disk import SlowDisk
from .plan import Fault
from .stores import Files, OnServer

__all__ = ["Strikes"]

T = TypeVar("T")

_LATE_NS = 500_000_000  # what a database confirmed and forgets is noted a moment later: brokers pass it on
_WRITES = 40  # in a second, by a slow disk
_SLOW_S = 0.1  # an answer of a server that is slow


class Strikes:
    """`ways`: the proxies between clients and brokers."""

    def __init__(self, store: Files | OnServer, crew: Crew, ways: Sequence[Proxy]) -> None:
        self._store, self._crew, self._ways = store, crew, ways
        self._disk = SlowDisk.of(store.folder)
        self._noted = crew.folder / "faults.log"  # begin, end and kind of each, for who looks into a verdict
        self.done: Counter[str] = Counter()
        self.paused: set[int] = set()

    @property
    def disk(self) -> str:
        """Say how it is slowed."""
        if self._disk is not None:
            return "cgroup"
        return "proxy" if isinstance(self._store, OnServer) else "not at all"

    async def strike(self, fault: Fault) -> None:
        """Returns when it is over."""
        self.done[fault.kind] += 1
        begin = time.time_ns()
        try:
            await self._STRIKES[fault.kind](self, fault)
        finally:
            with self._noted.open("a") as file:
                file.write(f"{begin} {time.time_ns()} {fault.kind}\n")

    # ---- processes ----

    async def _kill(self, fault: Fault) -> None:
        """Anybody but who stands still: that would be another one when it goes on."""
        alive = sorted(set(self._crew.at_work) - self.paused)
        self._crew.kill(_one(alive, fault))

    async def _pause_role(self, role: str, fault: Fault) -> None:
        pid = _one(sorted(set(self._crew.of(role)) - self.paused), fault)
        title, begin = self._crew.at_work[pid].title, time.time_ns()
        self.paused.add(pid)
        self._crew.pause(pid, True)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            self._crew.pause(pid, False)
            self.paused.discard(pid)
            self._crew.outages.append(Event(begin, "paused", title, until=time.time_ns()))

    async def _pause_member(self, fault: Fault) -> None:
        await self._pause_role("consumer", fault)

    async def _pause_producer(self, fault: Fault) -> None:
        await self._pause_role("producer", fault)

    async def _pause_broker(self, fault: Fault) -> None:
        """Who is connected to it cannot say that it is still at work."""
        begin = time.time_ns()
        await self._pause_role("broker", fault)
        self._outage(begin)

    async def _kill_brokers(self, fault: Fault) -> None:
        for pid in sorted(set(self._crew.of("broker")) - self.paused):
            self._crew.kill(pid)

    # ---- networks ----

    async def _broken(self, fault: Fault, ways: Sequence[Proxy], harm: Callable[[Proxy], None]) -> None:
        begin = time.time_ns()
        try:
            for way in ways:
                await asyncio.to_thread(harm, way)
            await asyncio.sleep(fault.seconds)
        finally:
            for way in ways:
                await asyncio.to_thread(_mend, way)
            self._outage(begin)

    async def _cut_clients(self, fault: Fault) -> None:
        await self._broken(fault, self._ways, _cut)

    async def _silence_clients(self, fault: Fault) -> None:
        await self._broken(fault, [_one(self._ways, fault)], Proxy.deaf)

    async def _cut_database(self, fault: Fault) -> None:
        await self._broken(fault, [self._server.proxy], _cut)

    async def _silence_database(self, fault: Fault) -> None:
        await self._broken(fault, [self._server.proxy], Proxy.deaf)

    async def _lose_answers(self, fault: Fault) -> None:
        """It has committed, and nobody knows."""
        await self._broken(fault, [self._server.proxy], lambda way: way.deaf("answers"))

    async def _slow_way(self, fault: Fault) -> None:
        await self._broken(fault, [self._server.proxy], lambda way: way.slow(_SLOW_S))

    # ---- the database and its machine ----

    async def _restart(self, fault: Fault) -> None:
        await self._gone(fault, self._server.server.stop, crash=False)

    async def _crash(self, fault: Fault) -> None:
        await self._gone(fault, self._server.server.kill, crash=True)

    async def _gone(self, fault: Fault, end: Callable[[], None], *, crash: bool) -> None:
        begin = time.time_ns()
        await asyncio.to_thread(end)
        self._outage(begin, late=_LATE_NS, crash=crash)
        await asyncio.sleep(min(fault.seconds, 3))
        await asyncio.to_thread(self._server.server.start)
        self._outage(begin)

    async def _hold_lock(self, fault: Fault) -> None:
        assert isinstance(self._store, Files)
        await asyncio.to_thread(self._store.hold_lock, min(fault.seconds, 3))

    async def _slow_disk(self, fault: Fault) -> None:
        """Of the server; of files: of those who write to them."""
        if self._disk is None:
            if isinstance(self._store, OnServer):
                await self._slow_way(fault)
            return
        writers = self._store.writers() or list(self._crew.at_work)
        try:
            self._disk.hold(writers, writes=_WRITES)
            await asyncio.sleep(fault.seconds)
        finally:
            self._disk.release()

    async def _overload(self, fault: Fault) -> None:
        with overloaded():
            await asyncio.sleep(fault.seconds)

    @property
    def _server(self) -> OnServer:
        assert isinstance(self._store, OnServer)
        return self._store

    def _outage(self, begin: int, *, late: int = 0, crash: bool = False) -> None:
        self._crew.outages.append(Event(begin, "outage", until=time.time_ns() + late, crash=crash))

    _STRIKES: ClassVar[dict[str, Callable[[Strikes, Fault], Awaitable[None]]]] = {
        "kill": _kill,
        "pause a member": _pause_member,
        "pause a producer": _pause_producer,
        "pause a broker": _pause_broker,
        "kill all brokers": _kill_brokers,
        "cut clients off": _cut_clients,
        "silence clients": _silence_clients,
        "cut the database off": _cut_database,
        "silence the database": _silence_database,
        "lose its answers": _lose_answers,
        "slow the way to it": _slow_way,
        "restart the database": _restart,
        "crash the database": _crash,
        "hold the lock": _hold_lock,
        "slow the disk": _slow_disk,
        "overload": _overload,
    }


def _one(among: Sequence[T], fault: Fault) -> T:
    return among[int(fault.pick * len(among))]


def _cut(way: Proxy) -> None:
    way.refuse()
    way.cut()


def _mend(way: Proxy) -> None:
    """What was under way when it broke is lost, as after any break that lasts."""
    with suppress(OSError):
        way.cut()
    way.heal()
