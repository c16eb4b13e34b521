"""kill -9 between every two steps of outbox and relay, on every database (I12, I21).

Whatever was committed becomes one message, in order per key; what was not, none. Also of a relay that stood
still for longer than its lease, and goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.client.forward.outbox_source import OutboxSource
from postroom.store.sql.log.log import SqlLog
from postroom.store.sql.outbox import Drawing
from tests.integration.outbox.outbox_world import KINDS, Database, database_of, eventually, received
from tests.integration.processes.children import Connection, child
from tests.integration.processes.children import received as told

RELAYING = ["taken", "stamping", "stamped", "stored", "deleting", "deleted"]
DRAWING = ["taken", "locked", "removed", "committed"]  # the last three: of the append's own transaction
LEASE_S = 0.3
EACH = 6  # messages before each crash


# ---- in the child ----


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def write(database: Database, first: int, point: str, pipe: Connection) -> None:
    outbox, connection = postroom.Outbox(), database.connect()
    for number in range(first, first + EACH):
        outbox.send(connection, "orders", b"%d" % number, key=f"k{number % 3}")
    if point == "written":
        die()
    connection.commit()
    die()


def relay(queue: str, database: Database, point: str, pipe: Connection) -> None:
    """Dies at that point."""
    break_in(point, die)
    break_into_drawing(point, die)
    asyncio.run(_relay(queue, database))


def stand_still(queue: str, database: Database, point: str, pipe: Connection) -> None:
    """Says when it is at that point for the first time, and goes on when it is told to."""
    waited = False

    def wait() -> None:
        nonlocal waited
        if not waited:
            waited = True
            pipe.send("here")
            pipe.recv()

    break_in(point, wait)
    asyncio.run(_relay(queue, database, pipe))


async def _relay(queue: str, database: Database, pipe: Connection | None = None) -> None:
    async with (
        postroom.connect(queue) as mq,
        postroom.Outbox().relay(mq, database.url, lease=LEASE_S) as running,
    ):
        await eventually(lambda: running.leading)
        await eventually(lambda: not running.leading)  # until another one leads
        if pipe is not None:
            pipe.send("lost")
        await asyncio.sleep(60)


def break_in(point: str, reached: Callable[[], None]) -> None:
    stamp, finish, write = OutboxSource.stamp, OutboxSource.finish, OutboxSource._write
    within = ""

    def at(here: str) -> None:
        if here == point:
            reached()

    def stamping(self: OutboxSource, batches: Any) -> None:
        nonlocal within
        at("taken")
        within = "stamping"
        stamp(self, batches)
        at("stamped")

    def finishing(self: OutboxSource, stored: Any, refused: Any) -> None:
        nonlocal within
        at("stored")
        within = "deleting"
        finish(self, stored, refused)
        at("deleted")

    def writing(self: OutboxSource, theirs: Any, column: str, value: bytes | None) -> None:
        write(self, theirs, column, value)
        at(within)

    OutboxSource.stamp, OutboxSource.finish = stamping, finishing  # type: ignore[method-assign]
    OutboxSource._write = writing  # type: ignore[method-assign]


def break_into_drawing(point: str, reached: Callable[[], None]) -> None:
    lock, remove, append = Drawing.__init__, Drawing.write, SqlLog.append

    def locking(self: Drawing, tx: Any, appends: Any) -> None:
        lock(self, tx, appends)
        if self._leads and point == "locked":
            reached()

    def removing(self: Drawing) -> None:
        remove(self)
        if self._gone and point == "removed":
            reached()

    def appending(self: SqlLog, appends: Any) -> Any:
        found = append(self, appends)
        if any(one.drawn for one in appends) and point == "committed":
            reached()
        return found

    Drawing.__init__, Drawing.write = locking, removing  # type: ignore[method-assign]
    SqlLog.append = appending  # type: ignore[method-assign]


# ---- here ----


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    found = database_of(request.param, request, tmp_path)
    connection = found.connect()
    postroom.Outbox().create_table(connection)
    connection.close()
    return found


@pytest.fixture(params=["of its own", "the same"])
async def queue(request: pytest.FixtureRequest, database: Database, tmp_path: Path) -> str:
    """The queue's address: its database is another one, or the outbox's."""
    url = f"sqlite:///{tmp_path}/queue.db" if request.param == "of its own" else database.url
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("orders", partitions=2)
    return url


def killed(work: Callable[..., None], *args: Any) -> None:
    with child(work, *args) as (process, _):
        process.join(60)
        assert process.exitcode == -signal.SIGKILL, f"{args[-1]}: it was not there"


def committed(database: Database, first: int) -> int:
    connection, outbox = database.connect(), postroom.Outbox()
    with outbox.transaction(connection):
        for number in range(first, first + EACH):
            outbox.send(connection, "orders", b"%d" % number, key=f"k{number % 3}")
    connection.close()
    return first + EACH


async def check_all(queue: str, database: Database, count: int) -> None:
    """Each once, and those of a key in their order."""
    async with postroom.connect(queue) as mq:
        async with postroom.Outbox().relay(mq, database.url):
            await eventually(lambda: not database.values())
        found = await received(mq, "orders", count)
        async with mq.consumer("orders", group="all") as consumer:
            found += await consumer.poll(wait=0)
    numbers = [int(message.value) for message in found]
    assert sorted(numbers) == list(range(count))
    for key in {message.key for message in found}:
        mine = [int(message.value) for message in found if message.key == key]
        assert mine == sorted(mine)


async def test_a_relay_that_is_killed_at_every_step(database: Database, queue: str) -> None:
    points = DRAWING if queue == database.url else RELAYING
    count = 0
    for point in points:
        count = await asyncio.to_thread(committed, database, count)
        await asyncio.to_thread(killed, relay, queue, database, point)
    await check_all(queue, database, count)


async def test_a_caller_that_is_killed_before_and_after_its_commit(
    database: Database, tmp_path: Path
) -> None:
    queue = f"sqlite:///{tmp_path}/queue.db"
    async with postroom.connect(queue) as mq:
        await mq.create_topic("orders", partitions=2)
    await asyncio.to_thread(killed, write, database, 1000, "written")
    await asyncio.to_thread(killed, write, database, 0, "committed")
    await check_all(queue, database, EACH)


@pytest.mark.parametrize(
    ("queue", "point"),
    [("of its own", "taken"), ("of its own", "stamped"), ("of its own", "stored"), ("the same", "stamped")],
    indirect=["queue"],
)
async def test_a_relay_that_stands_still_for_longer_than_its_lease(
    database: Database, queue: str, point: str
) -> None:
    """It goes on with what another relay has done meanwhile, and that is not done twice."""
    await _stands_still(database, queue, point)


@pytest.mark.slow("the server ends a transaction after seconds")
@pytest.mark.parametrize("database", ["postgres"], indirect=True)
@pytest.mark.parametrize("queue", ["of its own"], indirect=True)
async def test_a_relay_that_stands_still_within_a_transaction(database: Database, queue: str) -> None:
    """It holds the lease's row: the server ends that after some seconds (I15)."""
    await _stands_still(database, queue, "stamping")


async def _stands_still(database: Database, queue: str, point: str) -> None:
    count = committed(database, 0)
    with child(stand_still, queue, database, point) as (process, pipe):
        assert await asyncio.to_thread(told, pipe, 60) == "here"
        os.kill(process.pid, signal.SIGSTOP)
        async with postroom.connect(queue) as mq, postroom.Outbox().relay(mq, database.url) as relay:
            await eventually(lambda: relay.leading)
            await eventually(lambda: not database.values())
            os.kill(process.pid, signal.SIGCONT)
            pipe.send("go on")
            assert await asyncio.to_thread(told, pipe, 60) == "lost"
            count = await asyncio.to_thread(committed, database, count)
            await eventually(lambda: not database.values())
    await check_all(queue, database, count)
