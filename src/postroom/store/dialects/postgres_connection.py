"""A connection of psycopg that does not wait for ever, and sends statements past its cursors.

A cursor of psycopg adapts every value, keeps a state and looks at the socket for each statement: 25 us of CPU
more than one needs. Here what belongs together is queued and sent in one go, up to the statement whose answer
somebody needs (`Statements`); a lone append is one statement that whoever reads the socket when there is
something to read can wait for (`Sent`). Statements are prepared from their second time on.
"""

from __future__ import annotations

import select
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import psycopg
from psycopg.adapt import Transformer
from psycopg.errors import InvalidSqlStatementName, error_from_result
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult

from ..sql.session import Row

__all__ = ["ImpatientConnection", "Reply", "Sent", "Statements"]

_MOST_NAMES = 500  # statements that a connection has prepared
_UNPREPARED = b""
_INT, _BIGINT, _BYTES, _TEXT, _FLOAT, _UNKNOWN = 23, 20, 17, 25, 701, 0  # by their numbers in the catalog
_INT_END = 1 << 31  # what does not fit into an integer is a bigint
_DONE = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)

Types = tuple[int, ...]
"""Of a statement's values: it is prepared for these."""


class ImpatientConnection(psycopg.Connection[Any]):  # type: ignore[misc, unused-ignore]
    """A connection to PostgreSQL that does not wait for ever.

    TCP notices a peer that is gone (keepalives, user time-out), but not one that takes our bytes and never
    answers: a server that hangs, a proxy with nothing behind it. Whoever waits for longer than `patience_s`
    is told so, and the connection is given up: what it was waiting for is of unknown fate (I15, I2).
    """

    patience_s = 3600.0  # for one answer
    prepares = True  # what it runs again; behind PgBouncer nothing is kept in a session
    migrating = False  # tables are being made: one process at a time

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._names: dict[tuple[str, Types], bytes] = {}  # of what was run, and how it is prepared
        self._numbers = count()
        self._found: PGresult | None = None  # of an answer, as far as it has come
        self.statements: Statements | None = None  # of the transaction that is under way
        self.transformer = Transformer(self)

    def wait(self, gen: Generator[Any, Any, Any], *args: Any, **kwargs: Any) -> Any:
        return super().wait(self._limited(gen), *args, **kwargs)

    def _limited(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Take the same steps; those who run them also look in when nothing has come for a while."""
        deadline = time.monotonic() + self.patience_s
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() > deadline:
                    self._give_up()
                wanted = gen.send(ready)
        except StopIteration as done:
            return done.value

    def _give_up(self) -> None:
        self.pgconn.finish()
        raise psycopg.OperationalError(f"no answer for {self.patience_s:g} s")

    def ask(self, sql: str, args: Sequence[Any] = ()) -> Reply:
        """Run a statement outside of a transaction, or that is one by itself; return what it is answered."""
        assert self.statements is None, "its answer would wait behind those that are not sent"
        types, values, formats = _packed(args)
        known = self.known(sql, types)
        reply = Reply(self)
        if known is not None:
            try:
                name = known or self._prepare(sql, types)
                self.pgconn.send_query_prepared(name, values, formats, Format.BINARY)
                reply.result = self._answer()
                return reply
            except InvalidSqlStatementName:  # somebody has dropped all that was prepared: nothing was run
                self._names.clear()
        self.make_room()
        self.note(sql, types)
        self.pgconn.send_query_params(_numbered(sql), values, types, formats, Format.BINARY)
        reply.result = self._answer()
        return reply

    def start(self, sql: str, args: Sequence[int | bytes]) -> bool:
        """Send a statement that is prepared already, as far as that goes without waiting; return whether it
        is. `Sent` goes on with it."""
        types, values, formats = _packed(args)
        name = self._names.get((sql, types))
        if name:
            self.pgconn.send_query_prepared(name, values, formats)
        return bool(name)

    def _prepare(self, sql: str, types: Types) -> bytes:
        name = self.new_name()
        self.pgconn.send_prepare(name, _numbered(sql), types)
        self._answer()
        self._names[sql, types] = name
        return name

    def new_name(self) -> bytes:
        return b"postroom_%d" % next(self._numbers)

    def known(self, sql: str, types: Types) -> bytes | None:
        """Return the name under which a statement is prepared; empty if it was run once, None if never."""
        return self._names.get((sql, types))

    def note(self, sql: str, types: Types, name: bytes = _UNPREPARED) -> None:
        if self.prepares:
            self._names[sql, types] = name

    def forget(self, prepared: Iterable[tuple[str, Types]] | None = None) -> None:
        """These are not prepared after all; None: nothing is."""
        if prepared is None:
            self._names.clear()
            return
        for one in prepared:
            self._names.pop(one, None)

    def make_room(self) -> None:
        """To be called where no transaction is under way: what is dropped may be gone already."""
        while len(self._names) >= _MOST_NAMES:
            oldest = self._names.pop(next(iter(self._names)))
            if oldest:
                self.pgconn.send_query(b"DEALLOCATE " + oldest)
                try:
                    self._answer()
                except InvalidSqlStatementName:  # with all others, as said above
                    self._names.clear()

    def until(self, come: Callable[[], bool]) -> None:
        """Send what is left, and read, until all has `come` that is waited for."""
        pgconn, deadline = self.pgconn, time.monotonic() + self.patience_s
        asked = select.poll()
        asked.register(pgconn.socket, select.POLLIN)
        while (unsent := pgconn.flush()) or not come():
            asked.modify(pgconn.socket, select.POLLIN | select.POLLOUT if unsent else select.POLLIN)
            ready = asked.poll(max(0.0, deadline - time.monotonic()) * 1000)
            if not ready:
                self._give_up()
            if ready[0][1] != select.POLLOUT:
                pgconn.consume_input()

    def _answer(self) -> PGresult:
        """Return the answer to what was sent, or raise the error that it is."""
        self.until(self.has_come)
        return self.answer()

    def has_come(self) -> bool:
        """Take what was read of the answer, without waiting; return whether that is all."""
        while not self.pgconn.is_busy():
            found = self.pgconn.get_result()
            if found is None:
                return True
            self._found = self._found or found
        return False

    def answer(self) -> PGresult:
        """Return the answer that has come, or raise the error that it is."""
        answer, self._found = self._found, None
        if answer is None:
            raise psycopg.OperationalError("the connection is lost")
        if answer.status not in _DONE:
            raise error_from_result(answer)
        return answer


class Reply:
    """What a statement is answered, once it is: as much of a cursor as is used here."""

    __slots__ = ("_connection", "_rows", "prepared", "result")

    def __init__(self, connection: ImpatientConnection, *, prepared: bool = False) -> None:
        self._connection, self.prepared = connection, prepared  # just before: that is answered first
        self.result: PGresult | None = None
        self._rows: Iterator[Row] | None = None

    @property
    def rowcount(self) -> int:
        assert self.result is not None, "its answer was asked for"
        return self.result.command_tuples or 0

    @property
    def status(self) -> bytes:
        return b"" if self.result is None else self.result.command_status or b""

    def __iter__(self) -> Iterator[Row]:
        if self._rows is None:
            assert self.result is not None, "its answer was asked for"
            if not self.result.nfields:
                raise psycopg.ProgrammingError("this statement returns no rows")
            transformer = self._connection.transformer
            transformer.set_pgresult(self.result)
            self._rows = iter(transformer.load_rows(0, self.result.ntuples, tuple))
        return self._rows

    def fetchone(self) -> Row | None:
        return next(iter(self), None)

    def fetchall(self) -> list[Row]:
        return [*self]


class Statements:
    """The statements of a transaction. They run in their order; after one that fails none is run."""

    def __init__(self, connection: ImpatientConnection) -> None:
        connection.make_room()
        self._connection, self._pgconn = connection, connection.pgconn
        self._queued: list[Reply] = []  # not answered
        self._answered = 0  # of those
        self._new: deque[tuple[str, Types]] = deque()  # what is being prepared with them
        self._first = True  # of the answers to one, which may have that of its preparation in front
        self._failed: psycopg.Error | None = None
        self._pgconn.enter_pipeline_mode()

    def add(self, sql: str, args: Sequence[Any] = ()) -> Reply:
        """Queue a statement with `?` for its values; its answer is there after the next `sync`."""
        types, values, formats = _packed(args)
        connection, pgconn = self._connection, self._pgconn
        name = connection.known(sql, types)
        prepared = name == _UNPREPARED
        if prepared:
            name = connection.new_name()
            pgconn.send_prepare(name, _numbered(sql), types)
            connection.note(sql, types, name)
            self._new.append((sql, types))
        if name:
            pgconn.send_query_prepared(name, values, formats, Format.BINARY)
        else:
            connection.note(sql, types)
            pgconn.send_query_params(_numbered(sql), values, types, formats, Format.BINARY)
        reply = Reply(connection, prepared=prepared)
        self._queued.append(reply)
        return reply

    def sync(self) -> None:
        """Send what is queued and wait for its answers; raise the first error among them.

        With a Sync behind what was sent: without one a session whose client stands still is "active", not
        idle in its transaction, and no limit of the server would ever end its locks (I15)."""
        self._pgconn.pipeline_sync()
        lost: psycopg.Error | None = None
        try:
            self._connection.until(self._has_come)
        except psycopg.Error as error:
            lost = error
        failed, self._failed = self._failed or lost, None
        self._queued, self._answered, self._first = [], 0, True
        if failed is not None:
            self._connection.forget(None if isinstance(failed, InvalidSqlStatementName) else self._new)
            self._new.clear()
            raise failed

    def _has_come(self) -> bool:
        """Take what was read of the answers, without waiting; return whether that is all."""
        pgconn = self._pgconn
        while not pgconn.is_busy():
            found = pgconn.get_result()
            if found is not None and found.status == ExecStatus.PIPELINE_SYNC:
                return True
            if self._answered >= len(self._queued):
                raise psycopg.OperationalError("the connection is lost")
            reply = self._queued[self._answered]
            preparing = self._first and reply.prepared
            if found is None:  # the end of an answer
                self._first = not preparing
                self._answered += not preparing
            elif found.status not in _DONE:
                self._failed = self._failed or error_from_result(found)
            elif preparing:
                self._new.popleft()  # it stays, whatever becomes of the transaction
            else:
                reply.result = found
        return False

    def leave(self) -> None:
        """Out of the pipeline: nothing may be queued or unanswered."""
        self._pgconn.exit_pipeline_mode()


class Sent:
    """A statement that was started on a connection. Implements `SentLone`."""

    def __init__(self, connection: ImpatientConnection, at: int) -> None:
        self._connection, self.at, self.patience_s = connection, at, connection.patience_s
        self._socket = int(connection.pgconn.socket)  # kept: a connection that is lost has none
        self.unsent = bool(connection.pgconn.flush())

    def fileno(self) -> int:
        return self._socket

    def answered(self) -> bool:
        pgconn = self._connection.pgconn
        pgconn.consume_input()
        self.unsent = bool(pgconn.flush())
        return not self.unsent and self._connection.has_come()

    def stored(self) -> bool:
        try:
            return bool(self._connection.answer().command_tuples)
        except InvalidSqlStatementName:  # see `ask`
            self._connection.forget()
            return False


def _packed(args: Sequence[Any]) -> tuple[Types, list[bytes | None], list[int]]:
    """Return the types of values, and the values as they are sent: bytes as they are, the others as text."""
    types: list[int] = []
    values: list[bytes | None] = []
    formats: list[int] = []
    for arg in args:
        kind = _UNKNOWN
        shape = Format.TEXT
        value: bytes | None
        if arg is None:
            value = None
        elif isinstance(arg, int):
            kind = (
                _INT if -_INT_END <= arg < _INT_END else _BIGINT
            )  # functions do not take more than they need
            value = b"%d" % arg
        elif isinstance(arg, bytes | bytearray | memoryview):
            kind, value, shape = _BYTES, bytes(arg), Format.BINARY
        elif isinstance(arg, str):
            kind, value = _TEXT, arg.encode()
        elif isinstance(arg, float):
            kind, value = _FLOAT, repr(arg).encode()
        else:
            raise psycopg.ProgrammingError(f"no value of a statement: {type(arg).__name__}")
        types.append(kind)
        values.append(value)
        formats.append(shape)
    return tuple(types), values, formats


@lru_cache(maxsize=10_000)
def _numbered(sql: str) -> bytes:
    """Return a statement with PostgreSQL's own marks: $1, $2 …"""
    first, *others = sql.encode().split(b"?")
    return b"".join([first, *(b"$%d%s" % one for one in enumerate(others, start=1))])
