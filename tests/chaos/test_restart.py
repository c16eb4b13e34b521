"""The database goes away under load and comes back: stopped in order, stopped at once, killed -9 (R6, R34).

Producers and consumers just go on. Nothing that was confirmed is lost or stored twice, keys stay in order,
and what was settled stays settled; only a crash may forget the acks of the moment before it (I8, R15).
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from pathlib import Path

import pytest

import postroom
from postroom.testing.check import Event
from tests.ready import both, ready
from tests.servers.server import Server

from .crew import Crew
from .stage import LONG, SECONDS, finish, hire, judge, make_topic, until

_WAYS = ("fast", "immediate", "kill") if LONG else ("fast", "kill")


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 180)
@both
async def test_a_restart_of_the_database(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    server: Server = request.getfixturevalue(f"own_{kind}")
    with ready(server) as ground, Crew(ground.url, tmp_path) as crew:
        async with postroom.connect(ground.url) as mq:
            await make_topic(mq, "orders", lease=3)
            await hire(crew, "orders")
            end = time.monotonic() + SECONDS
            for way in itertools.cycle(_WAYS):
                await _fail(server, way, crew)
                if len(crew.outages) >= len(_WAYS) and time.monotonic() > end:
                    break
            await finish(mq, crew, "orders")
            await judge(mq, crew, "orders")


async def _fail(server: Server, way: str, crew: Crew) -> None:
    """Returns when everybody is at work again."""
    begin = time.time_ns()
    await asyncio.to_thread(server.kill if way == "kill" else lambda: server.stop(way))
    crew.outages.append(Event(begin, "outage", until=time.time_ns(), crash=way != "fast"))
    before = crew.count("settled")
    await asyncio.sleep(random.uniform(1, 3) if LONG else 1)
    await asyncio.to_thread(server.start)
    up = time.monotonic()
    await until(lambda: crew.count("settled") > before + 50, f"work goes on after {way}")
    print(f"{server.kind}, {way}: at work again {time.monotonic() - up:.2f} s after it was up")
