"""Connections and transactions, the same for every database.

A session has areas: `LOG` (batches, catalog, schedule; every commit flushed), `PROGRESS` (cursors,
deliveries; flushed only where I8 asks) and `VOLATILE` (batches of volatile topics; never flushed). They
never share a transaction. On SQLite each area is a file of its own, elsewhere all are one database.
Connections are kept in a pool per area; a broken one is thrown away. What differs between databases is in
a `Dialect`.

A transaction that surely was undone for a passing reason (a deadlock, a connection that had gone stale,
two that insert the same key) is run again by `verbs`, which every class of verbs is marked with. A commit
of unknown fate never is: that is for whoever knows how to ask (I2).

Who must not wait, since others wait for it, runs a verb `at_once`: where it would have to wait for a lock,
the disk or much to read, it raises WouldWaitError, and the verb is left to a thread.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, Protocol, TypeVar, cast

from ...errors import ClosedError, StoreBusy, StoreError, StoreFull, StoreUnavailable
from ..contract import Watcher
from ..contract.values import WouldWaitError

__all__ = ["Area", "Dialect", "Row", "Session", "Transaction", "by_key", "empties", "verbs"]

Row = tuple[Any, ...]
C = TypeVar("C", bound=type)
V = TypeVar("V", bound=Callable[..., Any])

_TRIES = 8  # of a verb whose transaction was undone
_PAUSE_S = 0.002  # before the second one; doubled for each further one
_IDLE_S = 10.0  # a connection that was not used for longer is replaced


class Area(Enum):
    LOG = "log"
    PROGRESS = "progress"
    VOLATILE = "volatile"


class Dialect(Protocol):
    """What one kind of database does differently."""

    kind: str  # as in an address
    blob: str  # type of a column of bytes
    hash: str  # type of a column of 16 bytes that can be indexed
    serial: str  # type of a primary key that counts by itself
    offset: str  # type of an integer primary key that is given
    table: str  # what follows the closing bracket of CREATE TABLE
    indexes_by_table: bool  # an index is named together with its table
    for_update: str  # suffix that locks the rows a SELECT returns
    areas: tuple[Area, ...]  # areas that have tables of their own
    pooled: bool  # connections go stale when they are not used
    shows_flushed: bool  # nobody sees a commit that a crash could take back
    quick: bool  # without a server: a verb may be run `at_once`

    def connect(self, area: Area, *, at_once: bool = False) -> Any:
        """`at_once`: one that waits for nobody, and leaves to others what takes its time."""

    def cut(self, connection: Any) -> None:
        """End the conversation with the server, under the hands of whoever has it in another thread."""

    def usable(self, connection: Any) -> bool:
        """Whether a connection may be used again after an error, or by the next who asks."""

    def reading(self, area: Area) -> AbstractContextManager[None]:
        """Held around statements that only read."""

    def begin(self, connection: Any, area: Area, *, flush: bool, at_once: bool = False) -> None:
        """Start a write transaction; durable at commit if `flush`."""

    def end(self, connection: Any, area: Area, *, commit: bool) -> None: ...

    def end_stuck(self) -> None:
        """A lock was not had in time: end transactions that stand still, where no limit does (I15)."""

    def sql(self, text: str) -> str:
        """`?` parameters in the driver's own style."""

    def execute(self, connection: Any, sql: str, args: Sequence[Any]) -> Any:
        """A cursor with the result."""

    def ask(self, connection: Any, sql: str, args: Sequence[Any]) -> Any:
        """The same for an answer that is read at once."""

    def run(self, connection: Any, sql: str, args: Sequence[Any]) -> int:
        """How many rows a statement met."""

    def many(self, connection: Any, sql: str, rows: Sequence[Row]) -> None: ...

    def insert(self, connection: Any, sql: str, args: Sequence[Any]) -> int:
        """Insert a row and return the id it was given."""

    def locked(
        self, connection: Any, sql: str, each: Sequence[Sequence[Any]]
    ) -> tuple[list[Row | None], int]:
        """The rows of a SELECT that locks one, run for each, in that order; and the time after (I1, I16)."""

    def upsert(self, table: str, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
        """Insert a row (values in the order key, columns), or change the columns of the one with that key."""

    def newest(self, table: str, key: tuple[str, ...]) -> str:
        """What follows WHERE in a SELECT of a row that changes all the time, by its key.

        The last value of the key is given twice. Past versions of the row are not stepped over (I19).
        """

    def at_newest(self, table: str, key: tuple[str, ...]) -> str:
        """The same in an UPDATE of that row, which is locked already."""

    def now_ms(self, connection: Any) -> int:
        """The shard's clock."""

    def time_ms(self) -> int | None:
        """The same from memory, within a few milliseconds; None: it has to be read once."""

    def admit(self) -> None:
        """StoreFull if nothing is to be appended now, since what room there is is for deletes."""

    def make_room(self, *, emptying: bool) -> bool:
        """After StoreFull: whether it is worth another try; `emptying`: to delete something."""

    def stepped_ms(self) -> int:
        """The shard's time when it was last seen that its clock was set; 0: never, as far as known here."""

    def has_table(self, tx: Transaction, name: str) -> bool: ...

    def tables(self, tx: Transaction) -> list[str]:
        """All tables there are, those of others too."""

    def migrating(self, connection: Any) -> AbstractContextManager[None]:
        """Held while tables are made: one process at a time."""

    def change(self, tx: Transaction, statement: str) -> None:
        """Run a statement of a migration; may find it done, by one that was cut off."""

    def create_log(self, tx: Transaction, statement: str, table: str, *, volatile: bool) -> None: ...

    def announce(self, area: Area) -> None:
        """Something was committed that others may wait for."""

    def watch(self, session: Session) -> Watcher:
        """A way to learn of commits by others."""

    def error(self, error: Exception, area: Area) -> StoreError | None:
        """The error of our tree for a driver's error; None if it is not the driver's."""

    def undone(self, error: Exception) -> bool:
        """Whether the transaction that met this error was undone and would succeed if it were run again."""

    def started_ms(self, connection: Any) -> int:
        """When the server was started, if progress that was not flushed may have been lost then; else 0."""

    def close(self) -> None: ...


class Transaction:
    """Statements on one connection. Small on purpose: SQL is written where it is used."""

    __slots__ = ("_connection", "_dialect", "_now", "announced")

    def __init__(self, connection: Any, dialect: Dialect) -> None:
        self._connection = connection
        self._dialect = dialect
        self._now: int | None = None
        self.announced: set[Area] = set()

    @property
    def dialect(self) -> Dialect:
        return self._dialect

    def one(self, sql: str, *args: Any) -> Row | None:
        row: Row | None = self._ask(sql, args).fetchone()
        return row

    def all(self, sql: str, *args: Any) -> list[Row]:
        return list(self._ask(sql, args).fetchall())

    def locked(self, sql: str, *args: Any) -> Row | None:
        """Lock one row, and read the clock after that: `now_ms` answers with it from then on."""
        return self.locked_each(sql, [args])[0]

    def locked_each(self, sql: str, each: Sequence[Sequence[Any]]) -> list[Row | None]:
        """The same for several, one after the other, in one round trip where that can be."""
        text = self._dialect.sql(sql + self._dialect.for_update)
        rows, self._now = self._dialect.locked(self._connection, text, each)
        return rows

    def run(self, sql: str, *args: Any) -> int:
        """Returns how many rows it met."""
        return self._dialect.run(self._connection, self._dialect.sql(sql), args)

    def do(self, sql: str, *args: Any) -> None:
        """Like `run` where nobody asks for the count: some databases then need not answer at once."""
        self._execute(sql, args)

    def many(self, sql: str, rows: Sequence[Row]) -> None:
        self._dialect.many(self._connection, self._dialect.sql(sql), rows)

    def insert(self, sql: str, *args: Any) -> int:
        """Insert one row and return the id it was given."""
        return self._dialect.insert(self._connection, self._dialect.sql(sql), args)

    def now_ms(self) -> int:
        return self._dialect.now_ms(self._connection) if self._now is None else self._now

    def started_ms(self) -> int:
        return self._dialect.started_ms(self._connection)

    def announce(self, area: Area) -> None:
        """Tell those who wait, once this is committed."""
        self.announced.add(area)

    def _ask(self, sql: str, args: Sequence[Any]) -> Any:
        return self._dialect.ask(self._connection, self._dialect.sql(sql), args)

    def _execute(self, sql: str, args: Sequence[Any]) -> Any:
        return self._dialect.execute(self._connection, self._dialect.sql(sql), args)


class Session:
    def __init__(self, dialect: Dialect) -> None:
        self.dialect = dialect
        self._idle: dict[tuple[Area, bool], list[tuple[Any, float]]] = {
            (area, at_once): [] for area in Area for at_once in (False, True)
        }
        self._mood = threading.local()
        self._used: set[Any] = set()  # connections that somebody has now
        self._refusing: StoreUnavailable | None = None  # it hangs: nobody is to wait for it
        self._guard = threading.Lock()
        self._closed = False
        self.partition_areas: dict[
            int, Area
        ] = {}  # of partitions, as far as somebody asked: `lookups.area_of`
        self.counted: set[tuple[int, int]] = set()  # topics and partitions whose delayed messages are counted

    def now_ms(self) -> int:
        known = self.dialect.time_ms()
        if known is not None:
            return known
        with self.read(Area.LOG) as tx:
            return tx.now_ms()

    def log_area(self, volatile: bool) -> Area:
        return Area.VOLATILE if volatile else Area.LOG

    def stored_in(self, area: Area) -> Area:
        """The area whose tables know a log's partition: its own where it has a place of its own."""
        return area if area in self.dialect.areas else Area.LOG

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Verbs of this thread wait for nothing within it."""
        self._mood.at_once = True
        try:
            yield
        finally:
            self._mood.at_once = False

    @contextmanager
    def emptying(self) -> Iterator[None]:
        """Verbs of this thread delete: they may use the room that is kept for that."""
        self._mood.emptying = True
        try:
            yield
        finally:
            self._mood.emptying = False

    @property
    def _at_once(self) -> bool:
        return getattr(self._mood, "at_once", False)

    def takes_time(self) -> None:
        """What comes now may take long, and is not for whoever must not wait."""
        if self._at_once:
            raise WouldWaitError("it takes its time: leave it to a thread")

    @contextmanager
    def read(self, area: Area) -> Iterator[Transaction]:
        """Statements that change nothing; each sees what was committed when it started."""
        with self._mapped(area), self._borrowed(area) as connection, self.dialect.reading(area):
            yield Transaction(connection, self.dialect)

    @contextmanager
    def write(self, area: Area, *, flush: bool = True) -> Iterator[Transaction]:
        """One transaction: committed at the end, rolled back if the block raises."""
        if flush:
            self.takes_time()
        with self._mapped(area), self._borrowed(area) as connection:
            self.dialect.begin(connection, area, flush=flush, at_once=self._at_once)
            tx = Transaction(connection, self.dialect)
            try:
                yield tx
            except BaseException:
                self.dialect.end(connection, area, commit=False)
                raise
            self._commit(connection, area)
        for announced in tx.announced:
            self.dialect.announce(announced)

    @contextmanager
    def migrating(self, area: Area) -> Iterator[Transaction]:
        """Make tables: one process at a time, and in one transaction where the database can."""
        with self._mapped(area), self._borrowed(area) as connection, self.dialect.migrating(connection):
            self.dialect.begin(connection, area, flush=True)
            try:
                yield Transaction(connection, self.dialect)
            except BaseException:
                self.dialect.end(connection, area, commit=False)
                raise
            self._commit(connection, area)

    def _commit(self, connection: Any, area: Area) -> None:
        try:
            self.dialect.end(connection, area, commit=True)
        except Exception as error:
            error.in_doubt = True  # type: ignore[attr-defined]
            if not self.dialect.usable(connection):  # lost on its way: it may have been committed
                error.run_once = True  # type: ignore[attr-defined]
            raise

    @contextmanager
    def _mapped(self, area: Area) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            mapped = self.dialect.error(error, area)
            if self._at_once and isinstance(mapped or error, StoreBusy):
                raise WouldWaitError("others are at work there: leave it to a thread") from error
            if mapped is None:
                if isinstance(error, StoreError) and "nothing_done" not in vars(error):
                    error.nothing_done = not hasattr(error, "in_doubt")
                raise
            mapped.nothing_done = not hasattr(error, "in_doubt")
            mapped.undone = self.dialect.undone(error) and not hasattr(error, "run_once")
            if isinstance(mapped, StoreBusy) and not mapped.undone:
                self.dialect.end_stuck()
            if isinstance(mapped, StoreFull) and not self._at_once:
                emptying = getattr(self._mood, "emptying", False)
                # also at a commit: no file took its last frame, and what there was is rolled back
                mapped.undone = self.dialect.make_room(emptying=emptying)
            if isinstance(mapped, StoreUnavailable) and self.dialect.pooled:
                self.forget(area)  # also of a server that has become read-only: the address may name others
            raise mapped from error

    @contextmanager
    def _borrowed(self, area: Area) -> Iterator[Any]:
        connection = self._take(area)
        self._used.add(connection)
        try:
            yield connection
        except BaseException:
            self._used.discard(connection)
            if self.dialect.usable(connection):
                self._give(area, connection)
            else:
                connection.close()
                self.forget(area)
            raise
        self._used.discard(connection)
        self._give(area, connection)

    def break_off(self, why: StoreUnavailable) -> None:
        """Whoever waits for an answer is told so, and so are all who come, until a `knock` is answered."""
        self._refusing = why
        for connection in tuple(self._used):
            self.dialect.cut(connection)
        for area in Area:
            self.forget(area)

    def knock(self) -> None:
        """See whether the database takes connections (again)."""
        with self._mapped(Area.LOG):
            connection = self._connect(Area.LOG)
            self._refusing = None
            self._give(Area.LOG, connection)

    def _take(self, area: Area) -> Any:
        while True:
            with self._guard:
                if self._closed:
                    raise ClosedError("this connection is closed; call postroom.connect again")
                if self._refusing is not None:
                    raise StoreUnavailable(str(self._refusing), **self._refusing.details)
                idle = self._idle[area, self._at_once]
                found = idle.pop() if idle else None
            if found is None:
                return self._connect(area)
            connection, since = found
            if not self.dialect.pooled or time.monotonic() - since < _IDLE_S:
                return connection
            connection.close()

    def _connect(self, area: Area) -> Any:
        try:
            return self.dialect.connect(area, at_once=self._at_once)
        except Exception as error:
            error.run_once = True  # type: ignore[attr-defined]  # each try may take the whole time-out
            raise

    def _give(self, area: Area, connection: Any) -> None:
        with self._guard:
            if not self._closed:
                self._idle[area, self._at_once].append((connection, time.monotonic()))
                return
        connection.close()

    def forget(self, area: Area) -> None:
        """Throw away the area's connections: one was lost, and the others of its time likely too."""
        with self._guard:
            stale = [*self._idle[area, False], *self._idle[area, True]]
            self._idle[area, False], self._idle[area, True] = [], []
        for connection, _ in stale:
            connection.close()

    def close(self) -> None:
        with self._guard:
            self._closed = True
            idle = [connection for some in self._idle.values() for connection, _ in some]
            for some in self._idle.values():
                some.clear()
        for connection in idle:
            connection.close()
        self.dialect.close()


def by_key(key: tuple[str, ...]) -> str:
    """`Dialect.newest` and `at_newest` where past versions of a row are not in the way."""
    return " AND ".join(f"{column} = ?" for column in (*key, key[-1]))


def verbs(kind: C) -> C:
    """A class whose public methods are verbs: one that was undone for a passing reason is run again."""
    for name, member in list(vars(kind).items()):
        if callable(member) and not name.startswith("_"):
            setattr(kind, name, _again(member))
    return kind


def empties(verb: V) -> V:
    """A verb that deletes: on a full disk it may use the room that is kept for that."""

    @functools.wraps(verb)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self._session.emptying():
            return verb(self, *args, **kwargs)

    return cast(V, run)


def _again(verb: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(verb)
    def run(*args: Any, **kwargs: Any) -> Any:
        for tried in range(_TRIES):
            try:
                return verb(*args, **kwargs)
            except StoreError as error:
                if not error.undone or tried == _TRIES - 1:
                    raise
            time.sleep(_PAUSE_S * 2**tried)
        raise AssertionError("the last try returns or raises")

    return run
