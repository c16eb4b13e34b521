"""The caller's own database in tests of the outbox: one of each kind, and every way to connect to it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.client.databases import opening

__all__ = ["KINDS", "Database", "database_of", "eventually", "received"]

KINDS = ["sqlite", "postgres", "mysql"]
PATIENCE_S = 60
_DRIVERS = {"postgres": ("postgresql", "postgresql+psycopg"), "mysql": ("mysql", "mysql+pymysql")}


@dataclass(frozen=True)
class Database:
    kind: str
    url: str

    def connect(self, *, autocommit: bool = False) -> Any:
        """As programs have them: a transaction begins by itself, unless it is told otherwise."""
        if self.kind == "sqlite":
            path = self.url.removeprefix("sqlite:///")
            return sqlite3.connect(path, isolation_level=None if autocommit else "", timeout=20)
        connection = opening(self.url)()
        if self.kind == "postgres":
            connection.autocommit = autocommit
        else:
            connection.autocommit(autocommit)
        return connection

    def engine(self) -> Any:
        import sqlalchemy  # not needed by processes that only relay

        plain, driver = _DRIVERS.get(self.kind, ("", ""))
        return sqlalchemy.create_engine(self.url.replace(plain, driver, 1), poolclass=sqlalchemy.NullPool)

    def values(self, table: str = "postroom_outbox") -> list[bytes]:
        """Of what was committed."""
        connection = self.connect()
        cursor = connection.cursor()
        cursor.execute(f"SELECT message_value FROM {table} ORDER BY id")
        found = [bytes(row[0]) for row in cursor.fetchall()]
        connection.close()
        return found


def database_of(
    kind: str, request: pytest.FixtureRequest, folder: Path, *, durable: bool = False
) -> Database:
    if kind == "sqlite":
        return Database(kind, f"sqlite:///{folder}/shop.db")
    return Database(kind, request.getfixturevalue(f"spare_{kind}_url" if durable else f"{kind}_url"))


async def eventually(look: Callable[[], bool | Awaitable[bool]]) -> None:
    """Until it is so; the pauses only save the machine work."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            found = look()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.01)


async def received(mq: postroom.Connection, topic: str, count: int) -> list[postroom.Received]:
    """So many messages; those of one partition in their order."""
    found: list[postroom.Received] = []
    async with asyncio.timeout(PATIENCE_S):
        async with mq.consumer(topic, group="all") as consumer:
            while len(found) < count:
                messages = await consumer.poll(wait=1)
                await consumer.ack(messages)
                found += messages
    return found
