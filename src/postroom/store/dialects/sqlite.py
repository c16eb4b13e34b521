"""SQLite: three files, WAL, one writer at a time per file.

The log file is flushed at every commit (`synchronous=FULL`), the progress file only where it is asked for
(I8), the file of volatile topics never. The files are never attached to each other. If the progress file
is lost, every group starts again from its start: messages come twice, none is missing (R15). Before BEGIN
IMMEDIATE a writer takes a `FileLock`, which makes many processes on one file fair; SQLite's lock is what
keeps the data right (I19).
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from ...clock import Clock, SteadyClock
from ...config import DEFAULTS, Limits
from ...errors import StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from ...files import closed, make_private, open_private, opened, refuse_inherited
from ..contract import Watcher
from ..sql.log.lone_append import ADVANCE, INSERT, INSERTED, REMEMBER, LoneAppend, SentLone
from ..sql.schema import log_table
from ..sql.session import Area, Row, Session, Transaction, by_key
from .watchers import open_events
from .write_ahead import PAGES, Ballast, Checkpoints

__all__ = ["FileLock", "SqliteDialect"]


try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None  # type: ignore[assignment]


class FileLock:
    """Lets one writer in at a time: threads by a lock, processes by an advisory lock on a side file.

    It is for fairness only: SQLite's own lock is what keeps the data right, but its busy handler sleeps and
    starves some of many processes (I19). Waiting is bounded: a process stopped while it holds the side lock
    must not hang the others; after the limit they go on to BEGIN IMMEDIATE, whose own time-out gives a clear
    error, and threads behind them give up by themselves (I15).
    """

    def __init__(self, path: Path | None, limits: Limits, beside: Path | None = None) -> None:
        """`beside`: whoever may read that file may have the lock."""
        self._lock = threading.RLock()
        self._limits = limits
        self._path = path if fcntl is not None else None
        self._beside = beside
        self._descriptor: int | None = None

    def acquire(self, *, at_once: bool = False) -> bool:
        """False if another thread of this process had it for too long; `at_once`: if anybody has it now."""
        if not self._lock.acquire(timeout=0 if at_once else self._limits.busy_timeout_ms / 1000):
            return False
        if self._path is not None:
            try:
                if self._descriptor is None:
                    self._descriptor = open_private(self._path, self._beside)
                if at_once:
                    fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                else:
                    self._wait_for_processes(self._descriptor)
            except BlockingIOError:
                self._lock.release()
                return False
            except OSError:
                pass  # only fairness is lost; BEGIN IMMEDIATE still excludes
            except BaseException:
                self._lock.release()
                raise
        return True

    def _wait_for_processes(self, descriptor: int) -> None:
        deadline: float | None = None
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                now = time.monotonic()
                if deadline is None:
                    deadline = now + self._limits.side_lock_ms / 1000
                elif now > deadline:
                    return None
                time.sleep(self._limits.tuning.store.file_lock_pause_s)

    def release(self) -> None:
        try:
            if self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None


_LOG_PAGE_BYTES = 8192
_JOURNAL_BYTES = 64 * 1024 * 1024
_UNWRITABLE = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_PERM)


_SYNCHRONOUS = {
    (Area.LOG, True): "FULL",
    (Area.LOG, False): "FULL",
    (Area.PROGRESS, True): "FULL",
    (Area.PROGRESS, False): "NORMAL",  # I8
    (Area.VOLATILE, True): "OFF",
    (Area.VOLATILE, False): "OFF",
}
"""How a commit is flushed: by area, and whether the transaction asked for it."""


@lru_cache(maxsize=10_000)
def _insert_lone(partition_id: int) -> str:
    return f"{INSERT} VALUES ({INSERTED})".format(log=log_table(partition_id))


class _Connection(sqlite3.Connection):
    synchronous: str = ""  # what it was last set to
    thrifty: bool = False  # deleted pages are not written over, see `_save_room`
    secure: int = 0  # whether they are otherwise
    of_file: tuple[int, int] | None = None  # which has one connection more while this is open

    def close(self) -> None:
        key, self.of_file = self.of_file, None
        super().close()
        if key is not None:
            closed(key)


class SqliteDialect:
    kind = "sqlite"
    blob = hash = "BLOB"
    table = ""
    areas = tuple(Area)
    pooled = False
    shows_flushed = True
    quick = True
    commits_lone = False
    serial = "INTEGER PRIMARY KEY AUTOINCREMENT"  # AUTOINCREMENT: ids are never used again (I11)
    offset = "INTEGER"  # INTEGER PRIMARY KEY is the row's own id: no second index
    indexes_by_table = False
    for_update = ""  # BEGIN IMMEDIATE locks the file

    def __init__(self, path: Path | None, clock: Clock, limits: Limits = DEFAULTS) -> None:
        path = path and path.absolute()  # the same file, wherever the process goes to
        self.path = path  # None: in memory
        self.one_connection = path is None
        self.clock: Clock | None = clock
        self.time_ms = clock.now_ms
        self._limits, self.tuning = limits, limits.tuning.store
        self._locks = {area: FileLock(self._lock_file(area), limits, path) for area in Area}
        self._memory: dict[Area, _Connection] = {}
        self._ballast = None if path is None else Ballast(path, self.tuning)
        self._checkpoints: Checkpoints | None = None
        if self._ballast is not None:
            self._checkpoints = Checkpoints(self.connect, self._locks, self._ballast.scarce, self.tuning)
        self.opened_ms = 0  # first since the machine was started: what was not flushed before is forgotten
        self._commits = dict.fromkeys(Area, 0)  # in memory; a file has its own count

    def file(self, area: Area) -> Path | None:
        if self.path is None or area is Area.LOG:
            return self.path
        return self.path.with_name(f"{self.path.name}.{area.value}")

    def _lock_file(self, area: Area) -> Path | None:
        file = self.file(area)
        return None if file is None else file.with_name(f"{file.name}.lock")

    # ---- connections ----

    def connect(self, area: Area, *, at_once: bool = False) -> Any:
        file = self.file(area)
        if file is None:
            return self._shared_memory(area)
        connection = None
        make_private(file, like=None if area is Area.LOG else self.path)  # SQLite's own beside it are like it
        refuse_inherited(file)
        try:
            connection = self._open(str(file))
            connection.of_file = opened(file)
            self._prepare(connection, area)
            if at_once:
                connection.execute("PRAGMA busy_timeout=0")
                connection.execute("PRAGMA wal_autocheckpoint=0")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            if connection is not None:
                connection.close()
            raise self._cannot_open(file, error, area) from error
        return connection

    def _open(self, path: str) -> _Connection:
        return sqlite3.connect(
            path,
            isolation_level=None,
            check_same_thread=False,
            timeout=self._limits.busy_timeout_ms / 1000,
            cached_statements=256,
            factory=_Connection,
        )

    def _shared_memory(self, area: Area) -> _Connection:
        self._lock(area)
        try:
            if area not in self._memory:
                self._memory[area] = self._open(":memory:")
            return self._memory[area]
        finally:
            self._locks[area].release()

    def _prepare(self, connection: _Connection, area: Area) -> None:
        if area is not Area.PROGRESS:  # of a new file; batches are read three times as fast as with 4 KiB
            connection.execute(f"PRAGMA page_size={_LOG_PAGE_BYTES}")
        self._use_wal(connection)
        connection.execute(f"PRAGMA wal_autocheckpoint={PAGES}")
        connection.execute(f"PRAGMA journal_size_limit={_JOURNAL_BYTES}")
        _set_flush(connection, area, flush=True)

    def discard(self, area: Area) -> None:
        """Remove an area's file."""
        file = self.file(area)
        if file is not None:
            for ending in ("", "-wal", "-shm"):
                file.with_name(f"{file.name}{ending}").unlink(missing_ok=True)

    def cut(self, connection: _Connection) -> None:
        """There is no server that could hang."""

    def usable(self, connection: _Connection) -> bool:
        return True

    def _use_wal(self, connection: _Connection) -> None:
        """Processes that open a new file at once are refused without the busy time-out: ask again."""
        deadline = time.monotonic() + self._limits.busy_timeout_ms / 1000
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                return
            except sqlite3.OperationalError as error:
                if _code(error) != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                    raise
                time.sleep(self.tuning.wal_pause_s)

    # ---- transactions ----

    def begin_read(self, area: Area) -> None:
        """In memory all threads share a connection, so a reader must not see a transaction under way."""
        self._lock(area)

    def end_read(self, area: Area) -> None:
        self._locks[area].release()

    def _lock(self, area: Area) -> None:
        if not self._locks[area].acquire():
            raise self._busy(area)

    def begin(self, connection: _Connection, area: Area, *, flush: bool, at_once: bool = False) -> None:
        if not self._locks[area].acquire(at_once=at_once):
            raise self._busy(area)
        try:
            if self.path is not None and connection.synchronous != _SYNCHRONOUS[area, flush]:
                _set_flush(connection, area, flush=flush)
            if self._ballast is not None and self._ballast.released != connection.thrifty:
                self._save_room(connection, self._ballast.released)
            connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            self._locks[area].release()
            raise

    def end(self, connection: _Connection, area: Area, *, commit: bool) -> None:
        try:
            if commit:
                connection.execute("COMMIT")
                self._commits[area] += 1
                if self._checkpoints is not None:
                    self._checkpoints.committed(area)
            elif connection.in_transaction:
                connection.execute("ROLLBACK")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        finally:
            self._locks[area].release()

    def end_stuck(self) -> None:
        """Whoever has the file has it until it goes on: the busy time-out tells."""

    # ---- statements ----

    ask = do = staticmethod(_Connection.execute)  # the driver's own calls: nothing is to be done beside them
    many = staticmethod(_Connection.executemany)

    def insert(self, connection: _Connection, sql: str, args: Sequence[Any]) -> int:
        row_id = connection.execute(sql, args).lastrowid
        assert row_id is not None, "an insert gives an id"
        return row_id

    def locked(
        self,
        connection: _Connection,
        sql: str,
        each: Sequence[Sequence[Any]],
        then: Sequence[tuple[str, Sequence[Any]]],
    ) -> tuple[list[Row | None], list[Row], int]:
        execute = connection.execute
        rows = [execute(sql, args).fetchone() for args in each]
        found: list[Row] = []
        for query, args in then:
            found += execute(query, args)
        return rows, found, self.time_ms()

    def seems_gone(self, connection: _Connection) -> bool:
        return False  # there is no server

    def version(self, connection: _Connection) -> Hashable:
        if self.path is None:  # all share the connection
            return tuple(self._commits.values())
        return id(connection), connection.execute("PRAGMA data_version").fetchone()[0]

    def send_lone(self, connection: _Connection, lone: LoneAppend) -> SentLone | None:
        return None  # there is no server

    def append_lone(self, connection: _Connection, lone: LoneAppend) -> int | None:
        execute, at = connection.execute, max(lone.appended_at, self.time_ms())
        ends, producer, batch = lone.arguments(at)
        if execute(ADVANCE, ends).rowcount != 1 or execute(REMEMBER, producer).rowcount != 1:
            return None
        execute(_insert_lone(lone.partition_id), batch)
        return at

    @cache  # noqa: B019 - one dialect per store, a handful of statements
    def upsert(self, table: str, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
        names = (*key, *columns)
        changes = ", ".join(f"{column} = excluded.{column}" for column in columns)
        return (
            f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"
        )

    @cache  # noqa: B019
    def newest(self, sql: str, table: str, key: tuple[str, ...]) -> str:
        return sql + by_key(key)

    at_newest = newest

    def now_ms(self, connection: _Connection) -> int:
        return self.time_ms()

    def stepped_ms(self) -> int:
        return self.clock.stepped_ms if isinstance(self.clock, SteadyClock) else 0

    def started_ms(self, connection: _Connection) -> int:
        return self.opened_ms

    # ---- schema ----

    def has_table(self, tx: Transaction, name: str) -> bool:
        return tx.one("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", name) is not None

    def tables(self, tx: Transaction) -> list[str]:
        return [name for (name,) in tx.all("SELECT name FROM sqlite_master WHERE type = 'table'")]

    def migrating(self, connection: _Connection) -> AbstractContextManager[None]:
        return nullcontext()  # BEGIN IMMEDIATE locks the file

    def change(self, tx: Transaction, statement: str) -> None:
        tx.do(statement)

    def create_log(self, tx: Transaction, statement: str, table: str, *, volatile: bool) -> None:
        tx.do(statement)

    # ---- a full disk ----

    def admit(self) -> None:
        if self._ballast is not None and not self._ballast.admits():
            full = StoreFull(
                f"no space left for {self.path}: what room there is is used to delete purged and expired "
                "messages; free some space, or purge a topic, then try again; nothing was stored"
            )
            full.nothing_done = True
            raise full

    def _save_room(self, connection: _Connection, thrifty: bool) -> None:
        """Some builds of SQLite write zeros over what is deleted: a full disk has no room for them."""
        if thrifty:
            connection.secure = connection.execute("PRAGMA secure_delete").fetchone()[0]
        connection.execute(f"PRAGMA secure_delete={'FAST' if thrifty else int(connection.secure)}")
        connection.thrifty = thrifty

    def make_room(self, *, emptying: bool) -> bool:
        return self._ballast is not None and self._ballast.make_room(emptying=emptying)

    # ---- wake-ups ----

    def announce(self, area: Area) -> None:
        pass  # whoever watches looks at the file

    def stored(self, area: Area, size: int) -> None:
        if self._checkpoints is not None and size >= _LOG_PAGE_BYTES:
            self._checkpoints.stored(area, size, _LOG_PAGE_BYTES)

    def watch(self, session: Session) -> Watcher:
        return _FileWatcher(self) if self.path is not None else _MemoryWatcher(self._commits)

    def close(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.close()
        for connection in self._memory.values():
            connection.close()
        for lock in self._locks.values():
            lock.close()

    # ---- errors ----

    def error(self, error: Exception, area: Area) -> StoreError | None:
        if isinstance(error, sqlite3.ProgrammingError) and "closed database" in str(error):
            return StoreUnavailable("the connection was closed while in use; call postroom.connect again")
        if isinstance(error, UnicodeDecodeError):  # SQLite's own message quotes what it could not read
            return self._unsound(area, "its schema cannot be read")
        if not isinstance(error, sqlite3.DatabaseError):
            return None
        file, code = self.file(area), _code(error)
        if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and self._disk_is_full()):
            return StoreFull(f"no space left for {file}: free some space, then try again; nothing was stored")
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL):
            return self._busy(area)
        if code == sqlite3.SQLITE_SCHEMA:
            return StoreBusy(f"{file}: topics are made there faster than their tables can be read; try again")
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return self._unsound(area, str(error))
        if code in _UNWRITABLE:
            return StoreUnavailable(
                f"{file} cannot be written ({error}); check that file, folder and disk are there and writable"
            )
        return StoreError(f"{file}: {error}")

    def _unsound(self, area: Area, why: str) -> StoreCorrupt:
        return StoreCorrupt(f"{self.file(area)} is not a sound database ({why}); {_CURES[area]}", area=area)

    def undone(self, error: Exception) -> bool:
        """Tables that are made while a statement begins, one after the other, undo it before it has begun."""
        changed = isinstance(error, sqlite3.Error) and _code(error) == sqlite3.SQLITE_SCHEMA
        return changed or isinstance(error, sqlite3.IntegrityError)

    def _busy(self, area: Area) -> StoreBusy:
        return StoreBusy(
            f"{self.file(area) or 'the store in memory'} was locked by others for more than "
            f"{self._limits.busy_timeout_ms / 1000:g} s; find who holds a transaction open, then try again"
        )

    def _disk_is_full(self) -> bool:
        if self.path is None:
            return False
        try:
            space = os.statvfs(self.path.parent)
        except OSError:
            return False
        return space.f_bavail * space.f_frsize < 1024 * 1024

    def _cannot_open(self, file: Path, error: Exception, area: Area) -> StoreError:
        if not file.parent.exists():
            return StoreUnavailable(
                f"the folder {file.parent} does not exist; create it, or correct the path in the URL"
            )
        mapped = self.error(error, area)
        if isinstance(mapped, StoreUnavailable) or mapped is None:
            return StoreUnavailable(
                f"{file} cannot be opened for writing ({error}); check the path and its permissions"
            )
        return mapped


_CURES = {
    Area.LOG: "restore it, and the progress file beside it, from a backup",
    Area.PROGRESS: "restore it from the same backup as the log, or remove it: groups then start again",
    Area.VOLATILE: "remove it: the messages of volatile topics are lost, nothing else",
}


class _FileWatcher:
    """`PRAGMA data_version` on a connection of its own per file: it moves when any other one commits.

    Every commit writes to a file's write-ahead log, and Linux tells of that: where nothing was committed for
    a while, it is waited for.
    """

    def __init__(self, dialect: SqliteDialect) -> None:
        self._dialect, self._tuning = dialect, dialect.tuning
        self._connections = {area: dialect.connect(area) for area in Area}
        self._seen: dict[Area, int] = {}
        self._quiet_at = 0.0  # when nothing will have been committed for a while
        self._events = open_events(f"{dialect.file(area)}-wal" for area in Area)

    def changed(self) -> tuple[bool, bool]:
        found = self._moved()
        if any(found):
            self._quiet_at = time.monotonic() + self._tuning.watch_quiet_s
            return found
        if self._events is None or time.monotonic() < self._quiet_at:
            return found
        told = self._events.wait(self._tuning.watch_patience_s)
        if told:  # the log is written before the commit is done
            self._quiet_at = time.monotonic() + self._tuning.watch_quiet_s
            time.sleep(self._tuning.watch_commit_s)
        found = self._moved()
        if any(found) and not told:  # this file system does not tell
            self._events.close()
            self._events = None
        return found

    def wake(self) -> None:
        if self._events is not None:
            self._events.wake()

    def _moved(self) -> tuple[bool, bool]:
        log = progress = False
        for area, connection in self._connections.items():
            try:
                version = connection.execute("PRAGMA data_version").fetchone()[0]
            except sqlite3.Error as error:
                raise self._dialect.error(error, area) or error from error
            if version != self._seen.get(area):
                self._seen[area] = version
                if area is Area.PROGRESS:
                    progress = True
                else:
                    log = True
        return log, progress

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        if self._events is not None:
            self._events.close()
            self._events = None


class _MemoryWatcher:
    def __init__(self, commits: dict[Area, int]) -> None:
        self._commits = commits
        self._seen: dict[Area, int] = {}

    def changed(self) -> tuple[bool, bool]:
        before, self._seen = self._seen, dict(self._commits)
        moved = {area: self._seen[area] != before.get(area) for area in Area}
        return moved[Area.LOG] or moved[Area.VOLATILE], moved[Area.PROGRESS]

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _set_flush(connection: _Connection, area: Area, *, flush: bool) -> None:
    wanted = _SYNCHRONOUS[area, flush]
    connection.execute(f"PRAGMA synchronous={wanted}")
    connection.synchronous = wanted
