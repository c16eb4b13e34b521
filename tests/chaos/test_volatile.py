"""Volatile topics: what kills of processes and a crash of the server may take, and what they may not (R3).

On SQLite a killed process takes nothing with it: what it wrote is the system's to keep. A crash of PostgreSQL
empties volatile topics, and everything goes on: what is sent afterwards is handled, nothing waits for what is
lost, and durable topics beside them have lost nothing.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import postroom
from postroom.testing.check import Event
from tests.ready import ready
from tests.servers import PostgresServer

from .crew import Crew
from .stage import LONG, SECONDS, drained, finish, hire, judge, kill_at_random, make_topic, until


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 120)
async def test_kills_of_processes_lose_nothing_on_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    with Crew(url, tmp_path) as crew:
        async with postroom.connect(url) as mq:
            await make_topic(mq, "ticks", storage="volatile")
            await hire(crew, "ticks")
            await kill_at_random(crew)
            await finish(mq, crew, "ticks")
            await judge(mq, crew, "ticks")


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 180)
async def test_everything_goes_on_after_a_crash_of_postgres(
    own_postgres: PostgresServer, tmp_path: Path
) -> None:
    with ready(own_postgres) as ground, Crew(ground.url, tmp_path) as crew:
        async with postroom.connect(ground.url) as mq:
            for topic, storage in (("orders", "durable"), ("ticks", "volatile")):
                await make_topic(mq, topic, storage=storage, lease=3)
                await hire(crew, topic, members=2 if LONG else 1)
            end = time.monotonic() + SECONDS
            while not crew.outages or time.monotonic() < end:
                await asyncio.sleep(1)
                await _crash(own_postgres, crew)
            again = time.time_ns()
            for topic in ("orders", "ticks"):
                await _sent_again(crew, topic)
            crew.dismiss("producer")
            for topic in ("orders", "ticks"):
                await drained(mq, topic)
            crew.dismiss("consumer")
            await judge(mq, crew, "orders")
            await judge(mq, crew, "ticks", since_ns=again)


async def _sent_again(crew: Crew, topic: str) -> None:
    began, confirmed = time.monotonic(), crew.count("confirmed", topic)
    await until(lambda: crew.count("confirmed", topic) > confirmed + 100, f"{topic} takes messages again")
    print(f"{topic}: 100 more messages {time.monotonic() - began:.1f} s after the crash")


async def _crash(server: PostgresServer, crew: Crew) -> None:
    begin = time.time_ns()
    await asyncio.to_thread(server.kill)
    crew.outages.append(Event(begin, "outage", until=time.time_ns(), crash=True))
    await asyncio.to_thread(server.start)
