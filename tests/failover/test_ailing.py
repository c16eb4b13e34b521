"""A database that ails and recovers, under load: cut off, read-only, full, or behind a pool that is led on.

Nothing that was confirmed is lost or stored twice, keys stay in order, everybody goes on by himself when it
is over, and the brokers' log names what was wrong (R1, R6, R34, I2, I15).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Literal

import pytest

from tests.ready import both
from tests.servers import MariaServer, MissingServer, PgBouncer, PostgresServer, Proxy
from tests.servers.server import Server
from tests.servers.small_disk import MariaOnSmallDisk, NoMount, OnSmallDisk, PostgresOnSmallDisk

from .load import under_load
from .pairs import PostgresPair

pytestmark = [
    pytest.mark.slow("harms servers of its own for seconds, under many processes"),
    pytest.mark.timeout(300),
]

_SILENT_S = 16.0  # longer than a broker waits for an answer, and for a new connection
_HARMED_S = 3.0


@pytest.fixture
def server(kind: str, request: pytest.FixtureRequest) -> Server:
    own: Server = request.getfixturevalue(f"own_{kind}")
    return own


@both
async def test_the_network_to_the_database_is_cut_and_heals(
    server: Server, proxy_to: Callable[[int], Proxy], tmp_path: Path
) -> None:
    """Nobody hangs up. What was under way arrives when it heals, also what was given up long since (I2)."""
    name, proxy = server.create_database(), proxy_to(server.port)

    async def silence(seconds: float) -> None:
        await asyncio.to_thread(proxy.deaf)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(proxy.heal)

    async with under_load(server.url(name, port=proxy.port), server.url(name), tmp_path) as load:
        await load.befalls("the network was cut", lambda: silence(_SILENT_S))
        await load.says("cannot be reached")


@both
async def test_the_database_takes_no_writes_for_a_while(server: Server, tmp_path: Path) -> None:
    assert isinstance(server, PostgresServer | MariaServer)
    name = server.create_database()
    async with under_load(server.url(name), server.url(name), tmp_path) as load:

        async def read_only() -> None:
            await asyncio.to_thread(server.take_writes, False)
            await load.says("takes no writes")
            await asyncio.sleep(_HARMED_S)
            await asyncio.to_thread(server.take_writes, True)

        await load.befalls("it took no writes", read_only)


@pytest.fixture
def small(kind: str) -> Iterator[OnSmallDisk]:
    try:
        with PostgresOnSmallDisk() if kind == "postgres" else MariaOnSmallDisk() as server:
            yield server
    except (NoMount, MissingServer) as missing:
        pytest.skip(str(missing))


@both
async def test_the_disk_of_the_database_fills_and_is_freed(
    kind: str, small: OnSmallDisk, tmp_path: Path
) -> None:
    """PostgreSQL says so, and goes on by itself. MariaDB may end for it before it has told anybody, or wait
    without a word until there is room, a minute at a time; it is started again."""
    name = small.create_database()
    told = ("has no space left", *(("cannot be reached",) if kind == "mariadb" else ()))
    async with under_load(small.url(name), small.url(name), tmp_path) as load:

        async def full() -> None:
            await asyncio.to_thread(small.fill)
            await load.says(*told)
            await asyncio.sleep(_HARMED_S)
            await asyncio.to_thread(small.free)
            if kind == "mariadb" or not small.runs:
                await asyncio.to_thread(small.start_again)

        await load.befalls("the disk was full", full, crash=True)


@pytest.mark.parametrize("mode", ["session", "transaction"])
async def test_the_primary_dies_behind_a_pool_which_is_led_to_the_standby(
    mode: Literal["session", "transaction"], tmp_path: Path
) -> None:
    with ExitStack() as stack:
        pair = PostgresPair(stack)
        pool = stack.enter_context(_pool(pair.primary, mode))
        await asyncio.to_thread(pair.confirm)

        async def fail_over() -> None:
            await asyncio.to_thread(pair.fail_over)
            await asyncio.to_thread(pool.lead_to, pair.primary)

        async with under_load(pool.url(pair.database), pair.url, tmp_path) as load:
            try:
                await load.befalls("the primary died behind PgBouncer", fail_over, crash=True)
            except TimeoutError as stuck:
                raise TimeoutError(f"{stuck}; PgBouncer said:\n{pool.said()[-4000:]}") from None


def _pool(server: PostgresServer, mode: Literal["session", "transaction"]) -> PgBouncer:
    try:
        return PgBouncer(server, mode=mode, pool=60 if mode == "session" else 10)
    except MissingServer as missing:
        pytest.skip(str(missing))
