"""A database of the user's, for tests of guards: with their tables, and one that counts effects."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

import pytest

from postroom import guards
from postroom.address import parse
from postroom.client.message import NO_HEADERS, Received

__all__ = [
    "SCOPE",
    "Delivered",
    "Place",
    "connect_to",
    "database_of",
    "delivered",
    "effects",
    "empty",
    "note",
    "prepare",
]

SCOPE = "orders/billing"


@dataclass(frozen=True)
class Place:
    """`url` as in `postroom.connect`; of a file or a database on a server."""

    kind: str
    url: str

    def connect(self) -> Any:
        return connect_to(self.url)


def database_of(request: pytest.FixtureRequest, paths: pytest.TempPathFactory) -> Place:
    """One of its kind for all tests of a module: to make one takes longer than a test."""
    kind: str = request.param
    if kind == "sqlite":
        found = Place(kind, f"sqlite:///{paths.mktemp('guards')}/books.db")
    else:
        server = request.getfixturevalue({"postgres": "postgres_server", "mysql": "mariadb_server"}[kind])
        name = server.create_database()
        request.addfinalizer(lambda: server.drop_database(name))
        found = Place(kind, server.url(name))
    connection = found.connect()
    prepare(connection)
    connection.close()
    return found


def empty(place: Place) -> None:
    connection = place.connect()
    for table in ("effects", "postroom_guards_seen", "postroom_guards_entities", "postroom_guards_waiting"):
        connection.cursor().execute(f"DELETE FROM {table}")
    connection.commit()
    connection.close()


def connect_to(url: str) -> Any:
    """A connection of the driver, that begins a transaction by itself."""
    address = parse(url)
    if address.kind == "sqlite":
        return sqlite3.connect(str(address.path), timeout=30)
    if address.kind == "postgresql":
        import psycopg

        return psycopg.connect(address.dsn)
    import pymysql

    return pymysql.connect(**dict(address.server))


def prepare(connection: Any) -> None:
    guards.create_tables(connection)
    cursor = connection.cursor()
    cursor.execute("CREATE TABLE effects (number INTEGER, entity VARCHAR(20))")
    connection.commit()


def note(connection: Any, number: int, entity: str = "") -> None:
    """The effect of a handler."""
    connection.cursor().execute(f"INSERT INTO effects (number, entity) VALUES ({int(number)}, '{entity}')")


def effects(place: Place) -> list[int]:
    """Sorted: rows have no order of their own."""
    connection = place.connect()
    cursor = connection.cursor()
    cursor.execute("SELECT number FROM effects ORDER BY number")
    found = [row[0] for row in cursor.fetchall()]
    connection.close()
    return found


@dataclass(frozen=True)
class Delivered:
    """Stands for a delivery of a queue that is not there."""

    topic: str = "orders"
    partition: int = 0
    partition_id: int = 1
    attempt: int = 1

    async def settle(self, *_: Any, **__: Any) -> None:
        raise AssertionError("nobody settles here")

    async def extend(self, position: int) -> None:
        raise AssertionError("nobody extends here")


def delivered(
    offset: int = 0,
    *,
    key: str | None = "42",
    id: str | None = None,
    attempt: int = 1,
    value: bytes = b"",
    **headers: object,
) -> Received:
    """A message as a handler gets it; headers by name."""
    raw = {name: str(text).encode() for name, text in headers.items()}
    return Received(
        value or b"%d" % offset, None if key is None else key.encode(), raw or NO_HEADERS, "", None, None,
        1_700_000_000_000 + offset, offset, id, Delivered(attempt=attempt), offset,
    )  # fmt: skip
