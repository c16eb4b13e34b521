"""Everybody at work through two brokers while something befalls their database; at the end the verdict.

Shared and ordered groups, retries, dead letters, delayed messages. The brokers reach the database by `url`,
which may lead through what is harmed; whoever judges it goes by `safe`.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import postroom
from postroom.testing.check import Event
from tests.chaos.crew import Crew
from tests.chaos.stage import drained, make_topic, recovered, until
from tests.servers.places import free_port
from tests.storm.verdicts import judged

__all__ = ["Load", "under_load"]

TOPICS = {"orders": {"billing": False, "ledger": True}, "later": {"billing": False}}
"""By topic, its groups, and whether they are ordered."""
_LEASE_S = 5.0
_LATE_NS = 500_000_000  # what a database confirmed and forgets is noted a moment later: brokers pass it on
_ENOUGH = 50  # messages of a topic, for a verdict


class Load:
    def __init__(self, crew: Crew, folder: Path) -> None:
        self._crew, self._folder = crew, folder

    async def befalls(
        self, what: str, trouble: Callable[[], Awaitable[None]], *, crash: bool = False
    ) -> None:
        """Returns when everybody is at work again after it. `crash`: it may forget what is lazily kept."""
        begin = time.time_ns()
        await trouble()
        self._crew.outages.append(Event(begin, "outage", until=time.time_ns() + _LATE_NS, crash=crash))
        try:
            await recovered(self._crew, what, time.monotonic())
        except TimeoutError as stuck:
            raise TimeoutError(f"{stuck}; they said:\n{self._said()[-4000:]}") from None

    async def says(self, *words: str) -> None:
        """Returns when a broker, or one of its clients, has logged one of these, in the words for people."""
        try:
            await until(lambda: any(one in self._said() for one in words), f"somebody says {words}")
        except TimeoutError as silent:
            raise TimeoutError(f"{silent}; they said:\n{self._said()[-4000:]}") from None

    def _said(self) -> str:
        return "".join(path.read_text() for path in self._folder.glob("*.errors"))


@asynccontextmanager
async def under_load(url: str, safe: str, folder: Path) -> AsyncIterator[Load]:
    async with postroom.connect(safe, migrate=True) as mq:
        for topic, groups in TOPICS.items():
            await make_topic(mq, topic, lease=_LEASE_S, groups=groups)
    ports = [free_port(), free_port()]
    address = f"postroom://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    with Crew(url, folder, served=address) as crew:
        for port in ports:
            crew.serve(port)
        for topic, groups in TOPICS.items():
            for group, ordered in groups.items():
                crew.consume(topic, group, members=2, ordered=ordered)
        crew.produce("orders", "p0", pause_s=0.3)
        crew.produce("orders", "p1", pause_s=0.3)
        crew.produce("later", "r0", delays=(0.1, 1.5), pause_s=0.3)
        await recovered(crew, "the beginning", time.monotonic())
        load = Load(crew, folder)
        yield load
        for topic in TOPICS:
            await until(lambda topic=topic: crew.count("confirmed", topic) > _ENOUGH, "enough is confirmed")
        crew.dismiss("producer")
        async with postroom.connect(safe) as mq:
            await _judge(mq, crew)


async def _judge(mq: postroom.Connection, crew: Crew) -> None:
    for topic in TOPICS:
        await drained(mq, topic)
    for role in ("consumer", "broker"):
        crew.dismiss(role)
    for topic, groups in TOPICS.items():
        for verdict in await judged(mq, crew, topic, groups, _LEASE_S):
            print(verdict)
            assert not verdict.faults, verdict
