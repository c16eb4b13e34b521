"""Two brokers on one database, and clients that know both: one is killed, stopped, the database restarted.

Producers and consumers just go on (R2, R14, R34): nothing that was confirmed is lost or stored twice, keys
stay in order, and nothing is handled twice but what a crash of the database has forgotten (I8). How long it
takes until work goes on is printed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import postroom
from postroom.testing.check import Event
from tests.ready import both, ready
from tests.servers.places import free_port
from tests.servers.server import Server

from .crew import Crew
from .stage import LONG, SECONDS, finish, hire, judge, make_topic, recovered

_STOPPED_S = 20.0 if LONG else 8.0  # longer than it takes clients to notice
_LEASE_S = 20  # and longer than that, so that nothing is handed to others meanwhile


@asynccontextmanager
async def served(url: str, tmp_path: Path) -> AsyncIterator[tuple[Crew, postroom.Connection]]:
    """Two brokers, and everybody at work through them; at the end the verdict."""
    ports = [free_port(), free_port()]
    address = f"postroom://127.0.0.1:{ports[0]},127.0.0.1:{ports[1]}"
    with Crew(url, tmp_path, served=address) as crew:
        async with postroom.connect(url, migrate=True) as mq:
            await make_topic(mq, "orders", lease=_LEASE_S)
            for port in ports:
                crew.serve(port)
            await hire(crew, "orders")
            yield crew, mq
            await finish(mq, crew, "orders")
            crew.dismiss("broker")
            await judge(mq, crew, "orders")


async def kill_one(crew: Crew) -> None:
    since = time.monotonic()
    crew.kill(random.choice(crew.of("broker")))
    await recovered(crew, "kill -9 of a broker", since)


async def stop_one(crew: Crew) -> None:
    pid, since = random.choice(crew.of("broker")), time.monotonic()
    crew.pause(pid, True)
    try:
        await asyncio.gather(recovered(crew, "a broker that stands still", since), asyncio.sleep(_STOPPED_S))
    finally:
        crew.pause(pid, False)
    await recovered(crew, "it went on", time.monotonic())


async def _repeatedly(crew: Crew, trouble: Callable[[Crew], Awaitable[None]]) -> None:
    end = time.monotonic() + SECONDS
    while True:
        await trouble(crew)
        if time.monotonic() > end:
            return
        await asyncio.sleep(random.uniform(0.2, 1.0))


def _skip_all_but_postgres(store_url: str) -> None:
    if not LONG and not store_url.startswith("postgresql"):
        pytest.skip("short runs harm brokers on PostgreSQL only")


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 180)
async def test_a_broker_is_killed(store_url: str, tmp_path: Path) -> None:
    _skip_all_but_postgres(store_url)
    async with served(store_url, tmp_path) as (crew, _):
        await _repeatedly(crew, kill_one)


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 240)
async def test_a_broker_stands_still(store_url: str, tmp_path: Path) -> None:
    _skip_all_but_postgres(store_url)
    async with served(store_url, tmp_path) as (crew, _):
        await _repeatedly(crew, stop_one)


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 180)
@both
async def test_the_database_restarts_under_brokers(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    server: Server = request.getfixturevalue(f"own_{kind}")

    async def restart(crew: Crew) -> None:
        begin, crash = time.time_ns(), random.random() < 0.5
        await asyncio.to_thread(server.kill if crash else lambda: server.stop("fast"))
        # what the database has confirmed and forgets may be noted a moment later: brokers pass it on
        crew.outages.append(Event(begin, "outage", until=time.time_ns() + 500_000_000, crash=crash))
        await asyncio.sleep(1)
        await asyncio.to_thread(server.start)
        how = "killed" if crash else "restarted"
        await recovered(crew, f"{kind} was {how}, and is up", time.monotonic())

    with ready(server) as ground:
        async with served(ground.url, tmp_path) as (crew, _):
            await _repeatedly(crew, restart)
