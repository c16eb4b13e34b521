"""Connections and transactions, the same for every database.

A session has two lanes: `LOG` (batches, catalog; every commit flushed) and `PROGRESS` (cursors,
deliveries; flushed only where I8 asks). They never share a transaction. Each thread has its own
connection per lane. What differs between databases is in a `Dialect`.
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, Protocol

from ..errors import ClosedError, StoreError
from .contract import Watcher

__all__ = ["Dialect", "Lane", "Session", "Transaction"]

Row = tuple[Any, ...]


class Lane(Enum):
    LOG = "log"
    PROGRESS = "progress"


class Dialect(Protocol):
    """What one kind of database does differently."""

    blob: str  # type of a column of bytes
    serial: str  # type of a primary key that counts by itself
    offset: str  # type of an integer primary key that is given
    for_update: str  # suffix that locks the rows a SELECT returns

    def connect(self, lane: Lane) -> Any: ...

    def reading(self, lane: Lane) -> AbstractContextManager[None]:
        """Held around statements that only read."""

    def begin(self, connection: Any, lane: Lane, *, flush: bool) -> None:
        """Start a write transaction; durable at commit if `flush`."""

    def end(self, connection: Any, lane: Lane, *, commit: bool) -> None: ...

    def sql(self, text: str) -> str:
        """`?` parameters in the driver's own style."""

    def upsert(self, table: str, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
        """Insert a row (values in the order key, columns), or change the columns of the one with that key."""

    def now_ms(self, connection: Any) -> int: ...

    def has_table(self, tx: Transaction, name: str) -> bool: ...

    def watch(self) -> Watcher:
        """A way to learn of commits by others."""

    def error(self, error: Exception, lane: Lane) -> StoreError | None:
        """The error of our tree for a driver's error; None if it is not the driver's."""

    def close(self) -> None: ...


class Transaction:
    """Statements on one connection. Small on purpose: SQL is written where it is used."""

    __slots__ = ("_connection", "_dialect")

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self._connection = connection
        self._dialect = dialect

    def one(self, sql: str, *args: Any) -> Row | None:
        row: Row | None = self._connection.execute(self._dialect.sql(sql), args).fetchone()
        return row

    def all(self, sql: str, *args: Any) -> list[Row]:
        rows: list[Row] = self._connection.execute(self._dialect.sql(sql), args).fetchall()
        return rows

    def stream(self, sql: str, *args: Any) -> Generator[Row, None, None]:
        """Rows one by one, so that no more are read than are taken."""
        cursor = self._connection.execute(self._dialect.sql(sql), args)
        try:
            yield from cursor
        finally:
            cursor.close()

    def run(self, sql: str, *args: Any) -> int:
        count: int = self._connection.execute(self._dialect.sql(sql), args).rowcount
        return count

    def many(self, sql: str, rows: Sequence[Row]) -> None:
        self._connection.executemany(self._dialect.sql(sql), rows)

    def insert(self, sql: str, *args: Any) -> int:
        """Insert one row and return the id it was given."""
        row_id: int = self._connection.execute(self._dialect.sql(sql), args).lastrowid
        return row_id

    def now_ms(self) -> int:
        return self._dialect.now_ms(self._connection)


class Session:
    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._mine = threading.local()
        self._opened: list[Any] = []
        self._guard = threading.Lock()
        self._closed = False

    def now_ms(self) -> int:
        with self.read(Lane.LOG) as tx:
            return tx.now_ms()

    @contextmanager
    def read(self, lane: Lane) -> Iterator[Transaction]:
        """Statements that change nothing; each sees what was committed when it started."""
        with self._mapped(lane), self.dialect.reading(lane):
            yield Transaction(self._connection(lane), self.dialect)

    @contextmanager
    def write(self, lane: Lane, *, flush: bool = True) -> Iterator[Transaction]:
        """One transaction: committed at the end, rolled back if the block raises."""
        with self._mapped(lane):
            connection = self._connection(lane)
            self.dialect.begin(connection, lane, flush=flush)
            try:
                yield Transaction(connection, self.dialect)
            except BaseException:
                self.dialect.end(connection, lane, commit=False)
                raise
            self.dialect.end(connection, lane, commit=True)

    @contextmanager
    def _mapped(self, lane: Lane) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            mapped = self.dialect.error(error, lane)
            if mapped is None:
                raise
            raise mapped from error

    def _connection(self, lane: Lane) -> Any:
        if self._closed:
            raise ClosedError("this connection is closed; call penstock.connect again")
        connection = getattr(self._mine, lane.value, None)
        if connection is None:
            connection = self.dialect.connect(lane)
            with self._guard:
                self._opened.append(connection)
            setattr(self._mine, lane.value, connection)
        return connection

    def close(self) -> None:
        with self._guard:
            self._closed = True
            opened, self._opened = self._opened, []
        for connection in opened:
            connection.close()
        self.dialect.close()
