"""Transactions on the caller's own connection, whatever its kind: begun here only where the caller asks for
it.

Decides what `outbox.transaction` does: what is open on the connection belongs to it, leaving the block
commits, an error rolls back and goes on. A block within a block is a savepoint. Must never swallow an error
of the block, nor commit after one.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from ...errors import UsageError
from .. import databases

__all__ = [
    "Block",
    "Hooks",
    "OwnConnection",
    "begun",
    "is_awaited",
    "joined",
    "resolved",
]


_MYSQL_IN_TRANSACTION = 1  # the bit of the server's status


def is_awaited(connection: Any) -> bool:
    """An async session or connection of SQLAlchemy."""
    return databases.is_async(connection) and hasattr(connection, "run_sync")


class _Ends(Protocol):
    def commit(self) -> None: ...
    def rollback(self) -> None: ...


def resolved(connection: Any) -> Any:
    """The connection itself, or Django's for an alias such as "default"."""
    if not isinstance(connection, str):
        return connection
    from django.db import connections

    return connections[connection]


@contextmanager
def begun(connection: Any, depth: int = 0) -> Iterator[None]:
    """`depth`: how many blocks are open around this one."""
    if databases.library(connection) == "django":
        from django.db import transaction

        with transaction.atomic(using=connection.alias):
            yield
        return
    ends = _begin(connection, depth)
    try:
        yield
        ends.commit()  # one that fails may leave the transaction open: the next block would commit it
    except BaseException:
        with suppress(Exception):  # it is lost, and its transaction with it; the first error says more
            ends.rollback()
        raise


@asynccontextmanager
async def begun_async(connection: Any, depth: int = 0) -> AsyncIterator[None]:
    ends = await connection.begin_nested() if depth else connection
    try:
        yield
        await ends.commit()
    except BaseException:
        with suppress(Exception):
            await ends.rollback()
        raise


def _begin(connection: Any, depth: int) -> _Ends:
    library = databases.library(connection)
    ends: _Ends = connection
    if library == "sqlalchemy":
        ends = connection.begin_nested() if depth else connection
        return ends
    if depth:
        return _Savepoint(databases.of(connection), f"postroom_{depth}")
    if library == "sqlite3":
        if not connection.in_transaction:
            connection.execute("BEGIN IMMEDIATE")  # it is going to write: better wait now than fail then
    elif library == "psycopg":
        if connection.autocommit and connection.info.transaction_status.name == "IDLE":
            connection.execute("BEGIN")
    elif not databases.of(connection).in_transaction:
        connection.begin()
    return ends


class _Savepoint:
    def __init__(self, theirs: databases.Theirs, name: str) -> None:
        self._theirs, self._name = theirs, name
        theirs.run(f"SAVEPOINT {name}")

    def commit(self) -> None:
        self._theirs.run(f"RELEASE SAVEPOINT {self._name}")

    def rollback(self) -> None:
        self._theirs.run(f"ROLLBACK TO SAVEPOINT {self._name}")
        self.commit()


def joined(connection: Any) -> AbstractContextManager[None]:
    """The transaction that is open on the connection, or else one of its own."""
    return nullcontext() if _is_open(connection) else begun(connection)


def _is_open(connection: Any) -> bool:
    library = databases.library(connection)
    if library == "sqlalchemy":
        return bool(connection.in_transaction())
    if library == "django":
        return bool(connection.in_atomic_block)
    if library == "psycopg":
        return bool(connection.info.transaction_status.name != "IDLE")
    if library == "sqlite3":
        return bool(connection.in_transaction)
    return bool(connection.server_status & _MYSQL_IN_TRANSACTION)


class Block:
    """What `outbox.transaction` returns: `with`, or `async with` for what is awaited."""

    def __init__(self, connection: Any, depths: dict[int, int], wake: Callable[[], None]) -> None:
        """`depths` are the open blocks by connection, and `wake` is called when the outermost has ended."""
        self._connection, self._depths, self._wake = connection, depths, wake
        self._block: Any = None

    def _enter(self) -> int:
        depth = self._depths.get(id(self._connection), 0)
        self._depths[id(self._connection)] = depth + 1
        return depth

    def _leave(self) -> None:
        depth = self._depths.pop(id(self._connection)) - 1
        if depth:
            self._depths[id(self._connection)] = depth
        else:
            self._wake()

    def __enter__(self) -> Any:
        if is_awaited(self._connection):
            raise UsageError(
                "this is an async session or connection: write `async with outbox.transaction(…)`"
            )
        self._block = begun(self._connection, self._enter())
        try:
            self._block.__enter__()
        except BaseException:
            self._leave()
            raise
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._block.__exit__(kind, error, trace)
        finally:
            self._leave()

    async def __aenter__(self) -> Any:
        if not is_awaited(self._connection):
            return self.__enter__()
        self._block = begun_async(self._connection, self._enter())
        try:
            await self._block.__aenter__()
        except BaseException:
            self._leave()
            raise
        return self._connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not is_awaited(self._connection):
            return self.__exit__(kind, error, trace)
        try:
            await self._block.__aexit__(kind, error, trace)
        finally:
            self._leave()


class OwnConnection:
    """A connection that is opened for one block, `with` or `async with`, and closed when that is left.

    `connect` opens it, or is an alias of Django, which opens and closes by itself.
    """

    def __init__(self, connect: Any) -> None:
        self._connect = connect
        self._connection: Any = None

    def __enter__(self) -> Any:
        connect = self._connect
        self._connection = resolved(connect if isinstance(connect, str) else connect())
        return self._connection

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if databases.library(self._connection) != "django":
            self._connection.close()

    async def __aenter__(self) -> Any:
        connection = self.__enter__()
        return await connection.__aenter__() if hasattr(connection, "__aexit__") else connection

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if hasattr(self._connection, "__aexit__"):
            await self._connection.__aexit__(kind, error, trace)
        else:
            self.__exit__(kind, error, trace)


class Hooks:
    """What an outbox does when the caller commits, where the caller's library tells of it.

    SQLAlchemy's `after_commit` also comes for a savepoint that is released while the transaction around it
    may still be rolled back, and a connection's `commit` comes just before: so from here the relay is woken,
    and nothing is ever sent (I21). Plain DB-API connections tell nobody: `outbox.transaction` does, or the
    relay looks by itself. A send that was begun on an async session and not awaited is found here too: its
    commit is refused. `wake` is harmless, quick, and may be called from any thread.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._begun: WeakKeyDictionary[Any, set[object]] = WeakKeyDictionary()  # sends, by session

    def wrote(self, connection: Any) -> None:
        """A message was written on it."""
        library = databases.library(connection)
        if library == "sqlalchemy":
            self._listen(connection)
        elif library == "django" and connection.in_atomic_block:
            connection.on_commit(self._wake)

    def begin(self, connection: Any) -> Callable[[], None]:
        """A send on an async session or connection is about to be awaited; returns what ends it."""
        inner = getattr(connection, "sync_session", None) or getattr(connection, "sync_connection", None)
        if inner is None:
            return lambda: None  # not started: awaiting it says so
        begun, send = self._listen(inner), object()
        begun.add(send)
        return lambda: begun.discard(send)

    def _listen(self, inner: Any) -> set[object]:
        known = self._begun.get(inner)
        if known is not None:
            return known
        from sqlalchemy import event

        begun = self._begun[inner] = set()
        wake = self._wake

        def refuse(it: Any) -> None:
            if begun:
                begun.clear()
                if not hasattr(it, "flush"):  # it thinks itself done with after an error here
                    it.connection.rollback()
                raise UsageError(
                    "a message was not awaited before the commit: write `await outbox.send(…)` for an async "
                    "session or connection"
                )

        if hasattr(inner, "flush"):  # a session
            event.listen(inner, "before_commit", refuse)
            event.listen(inner, "after_commit", lambda _: wake())
            event.listen(inner, "after_rollback", lambda _: begun.clear())
        else:
            event.listen(inner, "commit", refuse)
            event.listen(inner, "commit", lambda _: wake())
            event.listen(inner, "rollback", lambda _: begun.clear())
        return begun
