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
the disk or much to read, it raises WouldWaitError, and the verb is left to a thread. A session keeps
connections of their own for such verbs.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from ...clock import Clock
from ...config import StoreTuning
from ...errors import ClosedError, StoreBusy, StoreError, StoreFull, StoreUnavailable
from ..contract import Watcher
from ..contract.values import WouldWaitError

if TYPE_CHECKING:
    from .log.lone_append import LoneAppend, SentLone

__all__ = ["Area", "Dialect", "Row", "Session", "Transaction", "by_key", "empties", "verbs"]

Row = tuple[Any, ...]
C = TypeVar("C", bound=type)
V = TypeVar("V", bound=Callable[..., Any])

_TRIES = 8  # of a verb whose transaction was undone


class Area(Enum):
    LOG = "log"
    PROGRESS = "progress"
    VOLATILE = "volatile"

    __hash__ = object.__hash__  # each is there once; it is a key on the way of every message


class Dialect(Protocol):
    """One kind of database: all that it does differently from the others."""

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
    commits_lone: bool  # a lone append is a transaction by itself, undone if something is otherwise
    one_connection: bool  # all threads share it: whoever reads has to keep writers out
    clock: Clock | None  # what time goes by; None: the server's clock
    tuning: StoreTuning

    def connect(self, area: Area, *, at_once: bool = False) -> Any:
        """`at_once`: one that waits for nobody, and leaves to others what takes its time."""

    def cut(self, connection: Any) -> None:
        """End a connection to the server that another thread is using."""

    def usable(self, connection: Any) -> bool:
        """Return whether a connection may be used again after an error, or by the next who asks."""

    def begin_read(self, area: Area) -> None:
        """Keep writers out until `end_read`; called only if there is but `one_connection`."""

    def end_read(self, area: Area) -> None: ...

    def begin(self, connection: Any, area: Area, *, flush: bool, at_once: bool = False) -> None:
        """Start a write transaction; durable at commit if `flush`."""

    def end(self, connection: Any, area: Area, *, commit: bool) -> None: ...

    def end_stuck(self) -> None:
        """A lock was not had in time: end transactions that stand still, where no limit does (I15)."""

    # Statements have `?` for their parameters; a dialect knows its driver's own style.

    def ask(self, connection: Any, sql: str, args: Sequence[Any]) -> Any:
        """Run a statement and return a cursor that has its answer: the rows, or how many it met."""

    def do(self, connection: Any, sql: str, args: Sequence[Any]) -> Any:
        """Run a statement whose answer nobody needs: some databases send it with the next that is asked."""

    def many(self, connection: Any, sql: str, rows: Sequence[Row]) -> Any: ...

    def insert(self, connection: Any, sql: str, args: Sequence[Any]) -> int:
        """Insert a row and return the id it was given."""

    def locked(
        self,
        connection: Any,
        sql: str,
        each: Sequence[Sequence[Any]],
        then: Sequence[tuple[str, Sequence[Any]]],
    ) -> tuple[list[Row | None], list[Row], int]:
        """Lock what a SELECT of one row finds, for each in that order, then run the queries behind the locks.

        Return the locked rows, those of the queries, and the time after that (I1, I16)."""

    def seems_gone(self, connection: Any) -> bool:
        """Return whether the server has ended a connection that nobody used, as far as one sees from here."""

    def version(self, connection: Any) -> Hashable:
        """Return what is another value after a commit on any other connection to its area; asked only where
        verbs may be `quick`."""

    def append_lone(self, connection: Any, lone: LoneAppend) -> int | None:
        """Append a batch if all is as it says, and return the time it was stored at; None: something is
        otherwise, and what was written is to be undone. Within a write transaction, unless it
        `commits_lone` ones."""

    def send_lone(self, connection: Any, lone: LoneAppend) -> SentLone | None:
        """Send what `append_lone` does, without waiting for anything. None: that would take more."""

    def upsert(self, table: str, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
        """Insert a row (values in the order key, columns), or change the columns of the one with that key."""

    def newest(self, sql: str, table: str, key: tuple[str, ...]) -> str:
        """Complete a SELECT, which ends in WHERE, of a row that changes all the time, by its key.

        The last value of the key is given twice. Past versions of the row are not stepped over (I19).
        """

    def at_newest(self, sql: str, table: str, key: tuple[str, ...]) -> str:
        """Complete an UPDATE of such a row, which is locked already."""

    def now_ms(self, connection: Any) -> int:
        """Read the server's clock; called only if there is no `clock`."""

    def time_ms(self) -> int | None:
        """Return the store's time from memory, within a few milliseconds; None: it has to be read once."""

    def admit(self) -> None:
        """StoreFull if nothing is to be appended now, since what room there is is for deletes."""

    def make_room(self, *, emptying: bool) -> bool:
        """After StoreFull: whether it is worth another try; `emptying`: to delete something."""

    def stepped_ms(self) -> int:
        """The shard's time when it was last seen that its clock was set, or that another server took over; 0:
        never, as far as known here."""

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

    def stored(self, area: Area, size: int) -> None:
        """A commit has stored batches of so many bytes there."""

    def watch(self, session: Session) -> Watcher:
        """A way to learn of commits by others."""

    def error(self, error: Exception, area: Area) -> StoreError | None:
        """Return the error of our tree for a driver's error; None if it is not the driver's."""

    def undone(self, error: Exception) -> bool:
        """Return whether a transaction that met this error was undone, and would succeed if run again."""

    def started_ms(self, connection: Any) -> int:
        """Return when the server was started, if progress that was not flushed may be lost since; else 0."""

    def close(self) -> None: ...


class Transaction:
    """Statements on one connection. Small on purpose: SQL is written where it is used."""

    __slots__ = ("_now", "announced", "connection", "dialect")

    def __init__(self, dialect: Dialect, connection: Any) -> None:
        self.dialect = dialect
        self.connection = connection
        self._now: int | None = None
        self.announced: set[Area] = set()

    def one(self, sql: str, *args: Any) -> Row | None:
        row: Row | None = self.dialect.ask(self.connection, sql, args).fetchone()
        return row

    def all(self, sql: str, *args: Any) -> list[Row]:
        return list(self.dialect.ask(self.connection, sql, args).fetchall())

    def locked(self, sql: str, *args: Any) -> Row | None:
        """Lock one row, and read the clock after that: `now_ms` answers with it from then on."""
        rows, _, self._now = self.dialect.locked(self.connection, sql, (args,), ())
        return rows[0]

    def locked_each(
        self, sql: str, each: Sequence[Sequence[Any]], then: Sequence[tuple[str, Sequence[Any]]]
    ) -> tuple[list[Row | None], list[Row]]:
        """Lock several rows one after the other, run the queries behind the locks, and read the clock: in one
        round trip where that can be. Return the locked rows, and those that the queries found."""
        rows, found, self._now = self.dialect.locked(self.connection, sql, each, then)
        return rows, found

    def run(self, sql: str, *args: Any) -> int:
        """Run a statement and return how many rows it met."""
        return int(self.dialect.ask(self.connection, sql, args).rowcount)

    def do(self, sql: str, *args: Any) -> None:
        """Run a statement where nobody asks for the count: some databases then need not answer at once."""
        self.dialect.do(self.connection, sql, args)

    def many(self, sql: str, rows: Sequence[Row]) -> None:
        self.dialect.many(self.connection, sql, rows)

    def insert(self, sql: str, *args: Any) -> int:
        """Insert one row and return the id it was given."""
        return self.dialect.insert(self.connection, sql, args)

    def now_ms(self) -> int:
        if self._now is not None:
            return self._now
        clock = self.dialect.clock
        return self.dialect.now_ms(self.connection) if clock is None else clock.now_ms()

    def started_ms(self) -> int:
        return self.dialect.started_ms(self.connection)

    def announce(self, area: Area) -> None:
        """Tell those who wait, once this is committed."""
        self.announced.add(area)


class _Pooled(Transaction):
    """A transaction on a connection of its session's pool, from `with` to the end of the block.

    What only reads has no transaction of its own: each statement sees what was committed when it started.
    What writes is committed at the end, or rolled back if the block raises.
    """

    __slots__ = ("_area", "_flush", "_pool", "_session")

    def __init__(self, session: Session, area: Area, flush: bool | None) -> None:
        """`flush`: None if it only reads."""
        self.dialect = session.dialect
        self._session, self._area, self._flush = session, area, flush
        self._now = None
        self.announced = set()

    def __enter__(self) -> Transaction:
        session, dialect, area = self._session, self.dialect, self._area
        at_once = session._mood.at_once
        pool = self._pool = session._pools[area, at_once]
        try:
            with session._guard:
                connection, since = pool.pop() if pool else _NONE
            if connection is None or (dialect.pooled and time.monotonic() - since >= session._idle_s):
                connection = session._fresh(area, connection, at_once)
            session._used.add(connection)
            self.connection = connection
            try:
                if self._flush is not None:
                    dialect.begin(connection, area, flush=self._flush, at_once=at_once)
                elif dialect.one_connection:
                    dialect.begin_read(area)
            except BaseException:
                session._drop(area, pool, connection)
                raise
        except Exception as error:
            explained = session._explained(error, area)
            if explained is error:
                raise
            raise explained from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        session, dialect, connection, area = self._session, self.dialect, self.connection, self._area
        error = raised
        try:
            if self._flush is None:
                if dialect.one_connection:
                    dialect.end_read(area)
            elif raised is None:
                session._commit(connection, area)
            else:
                dialect.end(connection, area, commit=False)
        except BaseException as failed:
            error = failed
        if error is None:
            session._used.discard(connection)
            session._give(self._pool, connection)
            for announced in self.announced:
                dialect.announce(announced)
            return
        session._drop(area, self._pool, connection)
        explained = session._explained(error, area) if isinstance(error, Exception) else error
        if explained is not error:
            raise explained from error
        if error is not raised:
            raise error


_Pool = list[tuple[Any, float]]
"""Connections that nobody has now, and since when."""

_NONE = (None, 0.0)


class _Mood(threading.local):
    """How the verbs of a thread are run."""

    at_once = False
    emptying = False


class _AtOnce:
    """Holds nothing itself: all verbs of a session share it."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def __enter__(self) -> None:
        self._session._mood.at_once = True

    def __exit__(self, *raised: object) -> None:
        self._session._mood.at_once = False


class Session:
    def __init__(self, dialect: Dialect) -> None:
        self.dialect, self.tuning = dialect, dialect.tuning
        self._idle_s = dialect.tuning.pooled_idle_s
        self.now_ms = self._server_ms if dialect.clock is None else dialect.clock.now_ms
        self._pools: dict[tuple[Area, bool], _Pool] = {
            (area, at_once): [] for area in Area for at_once in (False, True)
        }
        self._mood, self._at_once = _Mood(), _AtOnce(self)
        self._used: set[Any] = set()  # connections that somebody has now
        self._refusing: StoreUnavailable | None = None  # it hangs: nobody is to wait for it
        self._guard = threading.Lock()
        self._closed = False
        # as far as somebody asked: `lookups.area_of`
        self.partition_areas: dict[int, Area] = {}
        self.counted: set[tuple[int, int]] = set()  # topics and partitions whose delayed messages are counted

    def _server_ms(self) -> int:
        known = self.dialect.time_ms()
        if known is not None:
            return known
        with self.read(Area.LOG) as tx:
            return tx.now_ms()

    def stored_in(self, area: Area) -> Area:
        """Return the area whose tables know a log's partitions: the log's own where it has tables."""
        return area if area in self.dialect.areas else Area.LOG

    def version(self, areas: Sequence[Area] = (Area.LOG, Area.PROGRESS)) -> Hashable | None:
        """Return what a commit on any other connection changes, to verbs that wait for nothing: on theirs
        nothing is committed but what their callers know."""
        if not self._mood.at_once:
            return None
        found = []
        for area in areas:
            with self.read(area) as tx:
                found.append(self.dialect.version(tx.connection))
        return tuple(found)

    def at_once(self) -> AbstractContextManager[None]:
        """Verbs of this thread wait for nothing within it."""
        return self._at_once

    @contextmanager
    def emptying(self) -> Iterator[None]:
        """Verbs of this thread delete: they may use the room that is kept for that."""
        self._mood.emptying = True
        try:
            yield
        finally:
            self._mood.emptying = False

    def takes_time(self) -> None:
        """Refuse to go on for a caller who must not wait: what comes now may take long."""
        if self._mood.at_once:
            raise WouldWaitError("it takes its time: leave it to a thread")

    def read(self, area: Area) -> AbstractContextManager[Transaction]:
        """Statements that change nothing; each sees what was committed when it started."""
        return _Pooled(self, area, None)

    def write(
        self, area: Area, *, flush: bool = True, brief: bool = False
    ) -> AbstractContextManager[Transaction]:
        """One transaction: committed at the end, rolled back if the block raises.

        `brief`: the disk may be waited for even by who must not wait otherwise."""
        if flush and not brief:
            self.takes_time()
        return _Pooled(self, area, flush)

    @contextmanager
    def migrating(self, area: Area) -> Iterator[Transaction]:
        """Make tables: one process at a time, and in one transaction where the database can."""
        with self.read(area) as tx, self.dialect.migrating(tx.connection):
            self.dialect.begin(tx.connection, area, flush=True)
            try:
                yield tx
            except BaseException:
                self.dialect.end(tx.connection, area, commit=False)
                raise
            self._commit(tx.connection, area)

    def _commit(self, connection: Any, area: Area) -> None:
        try:
            self.dialect.end(connection, area, commit=True)
        except Exception as error:
            if hasattr(error, "before_commit"):  # of a statement that was deferred until then
                raise
            error.in_doubt = True  # type: ignore[attr-defined]
            if not self.dialect.usable(connection):  # lost on its way: it may have been committed
                error.run_once = True  # type: ignore[attr-defined]
            raise

    def _explained(self, error: Exception, area: Area) -> Exception:
        """Return the error of our tree for what went wrong in a transaction, or the error itself."""
        at_once, mapped = self._mood.at_once, self.dialect.error(error, area)
        if at_once and isinstance(mapped or error, StoreBusy):
            return WouldWaitError("others are at work there: leave it to a thread")
        if mapped is None:
            if isinstance(error, StoreError) and "nothing_done" not in vars(error):
                error.nothing_done = not hasattr(error, "in_doubt")
            return error
        mapped.nothing_done = not hasattr(error, "in_doubt")
        mapped.undone = self.dialect.undone(error) and not hasattr(error, "run_once")
        if isinstance(mapped, StoreBusy) and not mapped.undone:
            self.dialect.end_stuck()
        if isinstance(mapped, StoreFull) and not at_once:
            # also at a commit: no file took its last frame, and what there was is rolled back
            mapped.undone = self.dialect.make_room(emptying=self._mood.emptying)
        if isinstance(mapped, StoreUnavailable) and self.dialect.pooled:
            self.forget(area)  # also of a server that has become read-only: the address may name others
        return mapped

    # ---- connections ----

    def break_off(self, why: StoreUnavailable) -> None:
        """Whoever waits for an answer is told so, and so are all who come, until a `knock` is answered."""
        self._refusing = why
        for connection in tuple(self._used):
            self.dialect.cut(connection)
        for area in Area:
            self.forget(area)

    def knock(self) -> None:
        """See whether the database takes connections (again)."""
        try:
            connection = self._connect(Area.LOG, at_once=False)
        except Exception as error:
            explained = self._explained(error, Area.LOG)
            if explained is error:
                raise
            raise explained from error
        self._refusing = None
        self._give(self._pools[Area.LOG, False], connection)

    def lend(self, area: Area) -> Any | None:
        """Take a connection that is there, for a caller who must not wait for one; `take_back` is its end.
        None: there is none, or it may have gone stale."""
        pool = self._pools[area, False]
        with self._guard:
            if not pool or time.monotonic() - pool[-1][1] >= self._idle_s:
                return None
            connection = pool.pop()[0]
        self._used.add(connection)
        return connection

    def take_back(self, area: Area, connection: Any) -> None:
        self._drop(area, self._pools[area, False], connection)

    def _fresh(self, area: Area, stale: Any, at_once: bool) -> Any:
        """Connect, instead of a connection that nobody has used for long; those below it are older still."""
        if stale is not None:
            stale.close()
            self.forget(area)
        if self._closed:
            raise ClosedError("this connection is closed; call postroom.connect again")
        if self._refusing is not None:
            raise StoreUnavailable(str(self._refusing), **self._refusing.details)
        return self._connect(area, at_once)

    def _connect(self, area: Area, at_once: bool) -> Any:
        try:
            return self.dialect.connect(area, at_once=at_once)
        except Exception as error:
            error.run_once = True  # type: ignore[attr-defined]  # each try may take the whole time-out
            raise

    def _give(self, pool: _Pool, connection: Any) -> None:
        """Keep a connection for the next. There are none in the pools while it is closed, or hangs."""
        with self._guard:
            if not self._closed and self._refusing is None:
                pool.append((connection, time.monotonic()))
                return
        connection.close()

    def _drop(self, area: Area, pool: _Pool, connection: Any) -> None:
        """Give back a connection that met an error, unless it is broken."""
        self._used.discard(connection)
        if self.dialect.usable(connection):
            self._give(pool, connection)
        else:
            connection.close()
            self.forget(area)

    def forget(self, area: Area) -> None:
        """Throw away the area's connections: one was lost, and the others of its time likely too."""
        with self._guard:
            pools = self._pools[area, False], self._pools[area, True]
            stale = [connection for pool in pools for connection, _ in pool]
            for pool in pools:
                pool.clear()
        for connection in stale:
            connection.close()

    def close(self) -> None:
        with self._guard:
            self._closed = True
        for area in Area:
            self.forget(area)
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
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        for tried in range(_TRIES):
            try:
                return verb(self, *args, **kwargs)
            except StoreError as error:
                if not error.undone or tried == _TRIES - 1:
                    raise
            time.sleep(self._session.tuning.undone_pause_s * 2**tried)
        raise AssertionError("the last try returns or raises")

    return run
