"""What one operation costs: processor time and rate of one message at a time, beside others in one run.

On each store: Postroom, and a queue of the usual kind with one row per message. On SQLite also the floor: the
statements of an append by hand, through one thread. Beside them Redis, whose client is measured alone, since
its work is the server's; so it is on database servers. Every commit is flushed, but for the floor and the
lines below it, which are in memory, so that the disk does not hide the processor.

    python -m bench ops [--store sqlite|postgresql|mariadb|all] [--seconds 2]
"""

from __future__ import annotations

import asyncio
import os
import queue
import sqlite3
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

import postroom

from . import throughput
from .grounds import Ground
from .measure import timed
from .peers.peer import NotInstalled
from .peers.redis_streams import RedisStreams

__all__ = ["Operation", "beside_redis", "in_memory", "on_store", "table"]

_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
_VALUE, _LIST = b"x" * 100, 1_000
_IDLE_S = 3.0
_TABLES = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "CREATE TABLE part (id INTEGER PRIMARY KEY, state TEXT, next_offset INT, next_bytes INT, at INT)",
    "INSERT INTO part VALUES (1, 'open', 0, 0, 0)",
    """CREATE TABLE log (base INTEGER PRIMARY KEY, records INT, bytes INT, before INT, at INT, first INT,
       last INT, ids BLOB, batch BLOB)""",
    "CREATE TABLE seq (p INT, part INT, state BLOB, seen INT, PRIMARY KEY (p, part)) WITHOUT ROWID",
)


@dataclass(frozen=True)
class Operation:
    where: str
    what: str
    contender: str
    cpu_us: float  # of this process
    per_s: float = 0.0  # 0: it is not a rate


async def on_store(ground: Ground, seconds: float) -> AsyncIterator[Operation]:
    """One message a call, one call at a time, every commit flushed."""
    found = throughput.run(ground.contenders, seconds=seconds, sizes=(100,), shapes=((1, 1),))
    async for one in found:
        yield Operation(ground.store, one.what, one.contender, one.cpu_s_per_million, one.per_s)


async def beside_redis(seconds: float) -> AsyncIterator[Operation]:
    peer = RedisStreams()
    try:
        with peer.serve() as address:
            await peer.create(address, "bench")
            publisher = await peer.publisher(address, "bench", paced=True)
            sent, took, cpu = await timed(seconds, 1_000_000, lambda: publisher.publish([_VALUE]))
            await publisher.close()
            yield Operation("redis", "publish", "redis", cpu / sent * 1e6, sent / took)
    except NotInstalled:
        return


async def in_memory(seconds: float) -> AsyncIterator[Operation]:
    """The processor's part alone: the floor, single sends, lists, poll and ack of one, an idle consumer."""
    with tempfile.TemporaryDirectory(prefix="postroom-bench-", dir=_MEMORY) as folder:
        floor = _Floor(Path(folder))
        yield await _measured("publish", "floor", seconds, floor.append)
        floor.close()
        async with postroom.connect(f"sqlite:///{folder}/postroom.db") as mq:
            await mq.create_topic("t")

            async def send() -> int:
                await mq.send("t", _VALUE, key=b"k")
                return 1

            yield await _measured("publish", "postroom", seconds, send)
            for what, keyed in (("a message of a list", False), ("a message of a list with keys", True)):
                many = [postroom.Message(_VALUE, key=b"%d" % i if keyed else None) for i in range(_LIST)]

                async def send_many(many: list[postroom.Message] = many) -> int:
                    return len(await mq.send_many("t", many))

                yield await _measured(what, "postroom", seconds, send_many)
            async with mq.consumer("t", group="g", start="earliest") as consumer:

                async def poll_and_ack() -> int:
                    found = await consumer.poll(max_messages=1, wait=2)
                    await consumer.ack(found)
                    return len(found)

                yield await _measured("poll and ack of one", "postroom", seconds, poll_and_ack)
            async with mq.consumer("t", group="idle", start="latest"):
                await asyncio.sleep(0.5)
                before = time.process_time()
                await asyncio.sleep(_IDLE_S)
                used = (time.process_time() - before) / _IDLE_S
                yield Operation("memory", "an idle consumer, a second", "postroom", used * 1e6)


async def _measured(
    what: str, contender: str, seconds: float, step: Callable[[], Awaitable[int]]
) -> Operation:
    count, took, cpu = await timed(seconds, 1_000_000, step)
    return Operation("memory", what, contender, cpu / count * 1e6, count / took)


class _Floor:
    """The six statements of an append, through one writer's thread."""

    def __init__(self, folder: Path) -> None:
        self._connection = sqlite3.connect(folder / "floor.db", isolation_level=None, check_same_thread=False)
        for statement in _TABLES:
            self._connection.execute(statement)
        self._loop = asyncio.get_running_loop()
        self._jobs: queue.SimpleQueue[asyncio.Future[int] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    async def append(self) -> int:
        done = self._loop.create_future()
        self._jobs.put(done)
        await done
        return 1

    def _write(self) -> None:
        do, batch = self._connection.execute, bytes(170)
        while (done := self._jobs.get()) is not None:
            do("BEGIN IMMEDIATE")
            offset, size = do("SELECT next_offset, next_bytes FROM part WHERE id = ?", (1,)).fetchone()
            do("SELECT state FROM seq WHERE p = ? AND part = ?", (7, 1)).fetchone()
            row = (offset, 1, len(batch), size, 1, 1, 1, None, batch)
            do("INSERT INTO log VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            do("UPDATE part SET next_offset = ?, next_bytes = ? WHERE id = ?", (offset + 1, size + 170, 1))
            do("INSERT INTO seq VALUES (?, ?, ?, ?) ON CONFLICT DO UPDATE SET state = excluded.state",
               (7, 1, bytes(131), 1))  # fmt: skip
            do("COMMIT")
            self._loop.call_soon_threadsafe(done.set_result, offset)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
        self._connection.close()


def table(found: list[Operation]) -> Table:
    """Ratios are to what stands first beside it: the row queue of the store, or the floor."""
    shown = Table("where", "operation", "who", title="What one operation costs")
    for name in ("CPU us", "a second", "CPU x", "rate x"):
        shown.add_column(name, justify="right")
    for one in found:
        other = _beside(one, found)
        ratios = ("", "")
        if other is not None:
            rate = f"{one.per_s / other.per_s:.2f}" if one.per_s and other.per_s else ""
            ratios = f"{one.cpu_us / other.cpu_us:.1f}", rate
        rate = f"{one.per_s:,.0f}" if one.per_s else ""
        shown.add_row(one.where, one.what, one.contender, f"{one.cpu_us:,.1f}", rate, *ratios)
    return shown


def _beside(one: Operation, found: list[Operation]) -> Operation | None:
    if one.contender != "postroom":
        return None
    if one.what == "a message of a list with keys":
        return next(other for other in found if other.what == "a message of a list")
    if one.what == "poll and ack of one":
        return next((other for other in found if other.contender == "floor"), None)
    same = (other for other in found if (other.where, other.what) == (one.where, one.what))
    return next((other for other in same if other is not one), None)
