"""The queues that are compared: Postroom through its public API, and on SQLite a queue of the usual kind.

Both are on one store on the same disk, with every commit of a message flushed (`server_rows` has the
usual kind on servers). The usual kind is one row per message: publish inserts rows, consume marks rows as
taken under a visibility time and acks by deleting them. It is written as well as such a queue can be: one
statement and one transaction per batch, the index it needs, and no ORM.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol, TypeVar

import postroom

T = TypeVar("T")

__all__ = ["Contender", "PostroomQueue", "RowQueue"]


class Contender(Protocol):
    name: str

    async def open(self, folder: Path) -> None: ...

    async def publish(self, values: list[bytes]) -> int: ...

    async def start_consuming(self, batch: int) -> None: ...

    async def consume(self, batch: int) -> int:
        """Take up to `batch` messages, read each value, ack them; how many."""

    async def close(self) -> None: ...


class PostroomQueue:
    name = "postroom"

    def __init__(
        self, fresh: Callable[[Path], str] = lambda folder: f"sqlite:///{folder / 'bench.db'}"
    ) -> None:
        self._fresh = fresh  # the address of a new store

    async def open(self, folder: Path) -> None:
        self.mq = await postroom.connect(self._fresh(folder), migrate=True)
        await self.mq.create_topic("bench", partitions=1)
        await self.mq.create_group("bench", "bench")

    async def publish(self, values: list[bytes]) -> int:
        if len(values) == 1:
            await self.mq.send("bench", values[0])
            return 1
        return len(await self.mq.send_many("bench", [postroom.Message(value) for value in values]))

    async def start_consuming(self, batch: int) -> None:
        self.consumer = self.mq.consumer("bench", group="bench", window=max(1000, 2 * batch))
        await self.consumer.__aenter__()

    async def consume(self, batch: int) -> int:
        messages = await self.consumer.poll(max_messages=batch, wait=1)
        for message in messages:
            assert message.value
        if len(messages) == 1:
            await messages[0].ack()
        else:
            await self.consumer.ack(messages)
        return len(messages)

    async def close(self) -> None:
        if hasattr(self, "consumer"):
            await self.consumer.__aexit__(None, None, None)
        await self.mq.close()


class RowQueue:
    name = "one row per message"

    async def open(self, folder: Path) -> None:
        self._pool = ThreadPoolExecutor(1)  # one writer: SQLite has one anyway
        await self._run(self._create, folder / "rows.db")

    def _create(self, path: Path) -> None:
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(
            """CREATE TABLE messages (id INTEGER PRIMARY KEY AUTOINCREMENT, value BLOB NOT NULL,
               visible_at INTEGER NOT NULL, token INTEGER, attempts INTEGER NOT NULL DEFAULT 0)"""
        )
        self._db.execute("CREATE INDEX due ON messages (visible_at, id)")

    async def _run(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *args)

    async def publish(self, values: list[bytes]) -> int:
        return await self._run(self._publish, values)

    def _publish(self, values: list[bytes]) -> int:
        now = time.time_ns() // 1_000_000
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany(
            "INSERT INTO messages (value, visible_at) VALUES (?, ?)", [(v, now) for v in values]
        )
        self._db.execute("COMMIT")
        return len(values)

    async def start_consuming(self, batch: int) -> None:
        pass

    async def consume(self, batch: int) -> int:
        taken = await self._run(self._take, batch)
        for _, value in taken:
            assert value
        await self._run(self._ack, [row_id for row_id, _ in taken])
        return len(taken)

    def _take(self, batch: int) -> list[tuple[int, bytes]]:
        now = time.time_ns() // 1_000_000
        return self._db.execute(
            """UPDATE messages SET visible_at = ?, token = ?, attempts = attempts + 1
               WHERE id IN (SELECT id FROM messages WHERE visible_at <= ? ORDER BY visible_at, id LIMIT ?)
               RETURNING id, value""",
            (now + 30_000, secrets.randbits(62), now, batch),
        ).fetchall()

    def _ack(self, ids: list[int]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        self._db.executemany("DELETE FROM messages WHERE id = ?", [(row_id,) for row_id in ids])
        self._db.execute("COMMIT")

    async def close(self) -> None:
        await self._run(self._db.close)
        self._pool.shutdown()
