"""Queues of the usual kind on a server: one row per message, written as well as such a queue can be.

One statement for a batch, one flushed transaction for a step, prepared statements, several connections, no
ORM, and no index on a column that changes: rows are taken in the order of their key, and leased ones are
stepped over. Two ways to consume:

    lease    take rows under a visibility time, commit, handle them, then delete them. A consumer that dies
             loses nothing. This is what a queue with acks does, and the fair comparison.
    delete   take rows and delete them in one transaction. Less work, but what was taken and not handled is
             lost with its consumer.

How PostgreSQL takes a batch was measured, too. `INSERT … SELECT unnest` was the fastest, far ahead of a
pipelined `executemany` and mostly ahead of COPY. It counts as plain; the other two are there to show it.
CPU seconds are those of the client alone: the server is another process.

`python -m bench.server_rows [SECONDS]` starts both servers and measures every variant.
"""

from __future__ import annotations

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Literal, TypeVar
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql

from tests.servers import MariaServer, PostgresServer

from . import throughput
from .contenders import Contender

__all__ = ["MariaRowQueue", "PostgresRowQueue", "ServerRowQueue", "variants"]

Consuming = Literal["lease", "delete"]
Publishing = Literal["unnest", "executemany", "copy"]
Rows = Sequence[tuple[int, bytes]]
T = TypeVar("T")

CONNECTIONS = 8
LEASE_MS = 30_000
DEADLOCK = 1213  # MariaDB's number for it


def variants(postgres_url: str, mysql_url: str) -> list[Callable[[], Contender]]:
    """Every queue here, the fair ones first; each wants a database for itself."""
    return [
        partial(PostgresRowQueue, postgres_url),
        partial(MariaRowQueue, mysql_url),
        partial(PostgresRowQueue, postgres_url, "delete"),
        partial(MariaRowQueue, mysql_url, "delete"),
        partial(PostgresRowQueue, postgres_url, publishing="executemany"),
        partial(PostgresRowQueue, postgres_url, publishing="copy"),
    ]


class ServerRowQueue(ABC):
    """Blocking drivers in a few threads, each step on a connection of its own."""

    name: str

    def __init__(self, url: str, consuming: Consuming = "lease") -> None:
        self._url = url
        self._consuming = consuming

    async def open(self, folder: Path) -> None:
        self._threads = ThreadPoolExecutor(CONNECTIONS)
        self._idle: SimpleQueue[Any] = SimpleQueue()
        for _ in range(CONNECTIONS):
            self._idle.put(self._connect())
        await self._run(self._create)

    async def publish(self, values: list[bytes]) -> int:
        await self._run(self._insert, values)
        return len(values)

    async def start_consuming(self, batch: int) -> None:
        """Connections are there since `open`."""
        return

    async def consume(self, batch: int) -> int:
        rows = await self._run(self._lease if self._consuming == "lease" else self._remove, batch)
        for _, value in rows:
            assert value
        if rows and self._consuming == "lease":
            await self._run(self._ack, [row_id for row_id, _ in rows])
        return len(rows)

    async def close(self) -> None:
        self._threads.shutdown()
        while not self._idle.empty():
            self._idle.get().close()

    async def _run(self, step: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._borrow, step, *args)

    def _borrow(self, step: Callable[..., T], *args: object) -> T:
        connection = self._idle.get()
        try:
            return step(connection, *args)
        finally:
            self._idle.put(connection)

    @abstractmethod
    def _connect(self) -> Any: ...

    @abstractmethod
    def _create(self, connection: Any) -> None:
        """The table, empty."""

    @abstractmethod
    def _insert(self, connection: Any, values: list[bytes]) -> None: ...

    @abstractmethod
    def _lease(self, connection: Any, batch: int) -> Rows: ...

    @abstractmethod
    def _ack(self, connection: Any, ids: list[int]) -> None: ...

    @abstractmethod
    def _remove(self, connection: Any, batch: int) -> Rows:
        """Taken and gone, in one transaction."""


class PostgresRowQueue(ServerRowQueue):
    def __init__(
        self, url: str, consuming: Consuming = "lease", *, publishing: Publishing = "unnest"
    ) -> None:
        super().__init__(url, consuming)
        self._publishing = publishing
        self.name = f"PostgreSQL rows, {consuming}" + ("" if publishing == "unnest" else f", {publishing}")

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self._url, autocommit=True)

    def _create(self, connection: psycopg.Connection[tuple[Any, ...]]) -> None:
        # Pages that are half full keep a leased row's new version beside the old one, off the index.
        fill_percent = 50 if self._consuming == "lease" else 100
        connection.execute("DROP TABLE IF EXISTS messages")
        connection.execute(
            f"""CREATE TABLE messages (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
                visible_at timestamptz NOT NULL DEFAULT now(), attempts int NOT NULL DEFAULT 0,
                value bytea NOT NULL) WITH (fillfactor = {fill_percent})"""
        )

    def _insert(self, connection: psycopg.Connection[tuple[Any, ...]], values: list[bytes]) -> None:
        if self._publishing == "unnest":
            connection.execute("INSERT INTO messages (value) SELECT unnest(%b::bytea[])", (values,))
            return
        rows = [(value,) for value in values]
        with connection.transaction(), connection.cursor() as cursor:
            if self._publishing == "executemany":
                cursor.executemany("INSERT INTO messages (value) VALUES (%b)", rows)
                return
            with cursor.copy("COPY messages (value) FROM STDIN BINARY") as copy:
                for row in rows:
                    copy.write_row(row)

    def _lease(self, connection: psycopg.Connection[tuple[Any, ...]], batch: int) -> Rows:
        # ARRAY(…) is evaluated once; with IN the planner may choose to take rows again and again.
        return connection.execute(
            """UPDATE messages SET visible_at = now() + %s * interval '1 ms', attempts = attempts + 1
               WHERE id = ANY(ARRAY(SELECT id FROM messages WHERE visible_at <= now()
                                    ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED)) RETURNING id, value""",
            (LEASE_MS, batch),
            binary=True,
        ).fetchall()

    def _ack(self, connection: psycopg.Connection[tuple[Any, ...]], ids: list[int]) -> None:
        connection.execute("DELETE FROM messages WHERE id = ANY(%b)", (ids,))

    def _remove(self, connection: psycopg.Connection[tuple[Any, ...]], batch: int) -> Rows:
        return connection.execute(
            """DELETE FROM messages WHERE id = ANY(ARRAY(SELECT id FROM messages ORDER BY id LIMIT %s
               FOR UPDATE SKIP LOCKED)) RETURNING id, value""",
            (batch,),
            binary=True,
        ).fetchall()


class MariaRowQueue(ServerRowQueue):
    """MariaDB updates without RETURNING and knows no LIMIT in `IN (SELECT …)`: it selects, then writes."""

    def __init__(self, url: str, consuming: Consuming = "lease") -> None:
        super().__init__(url, consuming)
        self.name = f"MariaDB rows, {consuming}"

    def _connect(self) -> Any:
        url = urlsplit(self._url)
        return pymysql.connect(
            host=url.hostname,
            port=url.port or 3306,
            user=unquote(url.username or ""),
            password=unquote(url.password or ""),
            database=url.path[1:],
            autocommit=True,
            init_command="SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED",  # or gaps are locked, too
        )

    def _borrow(self, step: Callable[..., T], *args: object) -> T:
        """Two that write by lists of keys can end in a deadlock; the one it refuses is to try again."""
        while True:
            try:
                return super()._borrow(step, *args)
            except pymysql.err.OperationalError as error:  # its transaction is rolled back
                if error.args[0] != DEADLOCK:
                    raise

    def _create(self, connection: Any) -> None:
        with connection.cursor() as cursor:
            cursor.execute("DROP TABLE IF EXISTS messages")
            cursor.execute(
                """CREATE TABLE messages (id BIGINT AUTO_INCREMENT PRIMARY KEY,
                   visible_at BIGINT NOT NULL DEFAULT 0, attempts INT NOT NULL DEFAULT 0,
                   value LONGBLOB NOT NULL) ENGINE=InnoDB"""
            )

    def _insert(self, connection: Any, values: list[bytes]) -> None:
        with connection.cursor() as cursor:  # one statement; the driver's executemany is a third slower
            cursor.execute("INSERT INTO messages (value) VALUES " + ",".join(["(%s)"] * len(values)), values)

    def _lease(self, connection: Any, batch: int) -> Rows:
        now = time.time_ns() // 1_000_000
        update = "UPDATE messages SET visible_at = %s, attempts = attempts + 1 WHERE id IN %s"
        return self._select_then(connection, batch, now, update, now + LEASE_MS)

    def _ack(self, connection: Any, ids: list[int]) -> None:
        with connection.cursor() as cursor:
            cursor.execute("DELETE FROM messages WHERE id IN %s", (ids,))

    def _remove(self, connection: Any, batch: int) -> Rows:
        now = time.time_ns() // 1_000_000
        return self._select_then(connection, batch, now, "DELETE FROM messages WHERE id IN %s")

    def _select_then(self, connection: Any, batch: int, now: int, write: str, *args: int) -> Rows:
        connection.begin()
        with connection.cursor() as cursor:
            cursor.execute(
                """SELECT id, value FROM messages WHERE visible_at <= %s
                   ORDER BY id LIMIT %s FOR UPDATE SKIP LOCKED""",
                (now, batch),
            )
            rows: Rows = cursor.fetchall()
            if rows:
                cursor.execute(write, (*args, [row_id for row_id, _ in rows]))
        connection.commit()
        return rows


async def _measure(seconds: float) -> None:
    with PostgresServer() as postgres, MariaServer() as maria:
        urls = (postgres.url(postgres.create_database()), maria.url(maria.create_database()))
        async for result in throughput.run(variants(*urls), seconds=seconds):
            print(
                f"{result.contender:36} {result.what:14} batch {result.batch:5} x{result.at_once:<3} "
                f"{result.size:5} B  {result.per_s:10,.0f}/s",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(_measure(float(sys.argv[1]) if len(sys.argv) > 1 else 2.0))
