"""Shards go away under load and come back: stopped, killed -9, deaf (R6, R22, I3, I4).

What has no key goes on with the others from the first failure, one send after the other. What has one waits
for its partition. Nothing that was confirmed is lost, nothing is stored twice, keys stay in order.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import postroom
from postroom.testing.check import Event
from tests.ready import opened
from tests.servers import MariaServer, PostgresServer, Proxy
from tests.servers.server import Server

from .crew import Crew
from .stage import LONG, SECONDS, drained, hire, judge, make_topic, until

_WAYS = ("fast", "deaf", "kill")
_FREE = {"free": False}
_KEYED = {"ledger": True}
_PRODUCERS = 2  # of messages without a key
_MORE = 30  # messages that each of them has to send while a shard is away


class Shards:
    """`b` is on a server of its own, which is stopped and killed; before `c` is a proxy that goes deaf."""

    def __init__(self, stopped: Server, proxied: Server, proxy: Proxy) -> None:
        self._stopped, self._proxy = stopped, proxy
        there = stopped.url(stopped.create_database())
        name = proxied.create_database()
        for url in (there, proxied.url(name)):
            opened(url, make_tables=True).close()
        self.urls = {"b": there, "c": proxied.url(name, port=proxy.port)}

    def go_away(self, way: str) -> None:
        if way == "deaf":
            self._proxy.deaf()
        elif way == "kill":
            self._stopped.kill()
        else:
            self._stopped.stop()

    def come_back(self, way: str) -> None:
        if way == "deaf":
            self._proxy.heal()
        else:
            self._stopped.start()


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 400)
async def test_shards_go_away_and_come_back(
    own_mariadb: MariaServer,
    postgres_server: PostgresServer,
    proxy_to: Callable[[int], Proxy],
    tmp_path: Path,
) -> None:
    shards = Shards(own_mariadb, postgres_server, proxy_to(postgres_server.port))
    url = f"sqlite:///{tmp_path}/queue.db"
    with Crew(url, tmp_path, shards.urls) as crew:
        async with postroom.connect(url, shards=shards.urls) as mq:
            await make_topic(mq, "keyed", lease=3, groups=_KEYED)
            await make_topic(mq, "keyless", lease=6, groups=_FREE)
            await hire(crew, "keyed", groups=_KEYED, pause_s=0.1)
            crew.consume("keyless", "free", members=2)
            for number in range(_PRODUCERS):
                crew.produce("keyless", f"f{number}", pause_s=0.02, keyless=True)
            await _go_on(crew, "before any trouble")
            await _trouble(shards, crew)
            crew.dismiss("producer")
            for topic in ("keyed", "keyless"):  # who settles waits for the shard of each in turn
                await drained(mq, topic, seconds=240)
            crew.dismiss("consumer")
            await judge(mq, crew, "keyed", groups=_KEYED)
            await judge(mq, crew, "keyless", groups=_FREE)
    _judge_failures(crew)


async def _trouble(shards: Shards, crew: Crew) -> None:
    end = time.monotonic() + SECONDS
    for way in itertools.cycle(_WAYS):
        await _fail(shards, way, crew)
        if len(crew.outages) >= len(_WAYS) and time.monotonic() > end:
            return


async def _fail(shards: Shards, way: str, crew: Crew) -> None:
    """Returns when everybody is at work again, with the shard that was away."""
    begin = time.time_ns()
    await asyncio.to_thread(shards.go_away, way)
    await _go_on(crew, way)
    await asyncio.sleep(random.uniform(1, 3) if LONG else 0.5)
    await asyncio.to_thread(shards.come_back, way)
    crew.outages.append(Event(begin, "outage", until=time.time_ns(), crash=way == "kill"))
    settled, stored = crew.count("settled", "keyed"), crew.count("confirmed", "keyed")
    await until(
        lambda: crew.count("settled", "keyed") > settled + 50 and crew.count("confirmed", "keyed") > stored,
        f"keys go on after {way}",
    )


async def _go_on(crew: Crew, way: str) -> None:
    """Every producer of messages without a key."""
    began, before = time.monotonic(), crew.notes("producer", "confirmed")
    free = [pid for pid, worker in crew.at_work.items() if worker.job.topic == "keyless" and pid in before]

    def went_on() -> bool:
        now = crew.notes("producer", "confirmed")
        return all(now[pid] >= before[pid] + _MORE for pid in free)

    await until(went_on, f"messages without a key go on ({way})")
    print(f"{way}: {_MORE} messages without a key took {time.monotonic() - began:.1f} s")


def _judge_failures(crew: Crew) -> None:
    """A commit may be on its way when a shard goes away, and one that is deaf has to be found out: that costs
    each producer a send or two. What is known not to be stored goes elsewhere."""
    failed, unknown = crew.values("producer-keyless", "failed"), crew.values("producer-keyless", "unknown")
    print(f"without a key: {len(failed)} failed, {len(unknown)} of unknown fate, {len(crew.outages)} outages")
    assert len(failed) + len(unknown) <= 2 * _PRODUCERS * len(crew.outages)
