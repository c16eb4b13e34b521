"""SQLite: two files, WAL, one writer at a time per file.

The log file is flushed at every commit (`synchronous=FULL`), the progress file only where it is asked
for (I8). The files are never attached to each other. Before BEGIN IMMEDIATE a writer takes a side lock:
with many processes on one file it makes them take turns, where SQLite's own busy handler sleeps and
starves some (I19). It is for fairness only; SQLite's lock is what keeps the data right.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from ..clock import Clock
from ..config import DEFAULTS
from ..errors import StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreUnavailable
from .contract import Watcher
from .session import Lane, Transaction

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["SqliteDialect"]

_CHECKPOINT_PAGES = 4000
_TURN_PAUSE_S = 0.0005


class SqliteDialect:
    blob = "BLOB"
    serial = "INTEGER PRIMARY KEY AUTOINCREMENT"  # AUTOINCREMENT: ids are never used again (I11)
    offset = "INTEGER"  # INTEGER PRIMARY KEY is the row's own id: no second index
    for_update = ""  # BEGIN IMMEDIATE locks the file

    def __init__(self, path: Path | None, clock: Clock) -> None:
        self.path = path  # None: in memory
        self._clock = clock
        self._turns = {lane: _Turn(self._lock_file(lane)) for lane in Lane}
        self._memory: dict[Lane, sqlite3.Connection] = {}
        self._flushing: dict[int, bool] = {}  # connection → whether it flushes now
        self._commits = dict.fromkeys(Lane, 0)  # in memory; a file has its own count

    def file(self, lane: Lane) -> Path | None:
        if self.path is None or lane is Lane.LOG:
            return self.path
        return self.path.with_name(f"{self.path.name}.progress")

    def _lock_file(self, lane: Lane) -> Path | None:
        file = self.file(lane)
        return None if file is None else file.with_name(f"{file.name}.lock")

    # ---- connections ----

    def connect(self, lane: Lane) -> Any:
        file = self.file(lane)
        if file is None:
            return self._shared_memory(lane)
        try:
            connection = _open(str(file))
            self._prepare(connection, lane)
        except sqlite3.Error as error:
            raise self._cannot_open(file, error) from error
        return connection

    def _shared_memory(self, lane: Lane) -> sqlite3.Connection:
        with self._turns[lane]:
            if lane not in self._memory:
                self._memory[lane] = _open(":memory:")
            return self._memory[lane]

    def _prepare(self, connection: sqlite3.Connection, lane: Lane) -> None:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit={64 * 1024 * 1024}")
        self._set_flush(connection, lane is Lane.LOG)

    def _set_flush(self, connection: sqlite3.Connection, flush: bool) -> None:
        if self._flushing.get(id(connection)) is not flush:
            connection.execute(f"PRAGMA synchronous={'FULL' if flush else 'NORMAL'}")
            self._flushing[id(connection)] = flush

    # ---- transactions ----

    def reading(self, lane: Lane) -> AbstractContextManager[None]:
        """In memory all threads share a connection, so a reader must not see a transaction under way."""
        return self._turns[lane] if self.path is None else nullcontext()

    def begin(self, connection: sqlite3.Connection, lane: Lane, *, flush: bool) -> None:
        turn = self._turns[lane]
        turn.acquire()
        try:
            if self.path is not None:
                self._set_flush(connection, flush or lane is Lane.LOG)
            connection.execute("BEGIN IMMEDIATE")
        except BaseException:
            turn.release()
            raise

    def end(self, connection: sqlite3.Connection, lane: Lane, *, commit: bool) -> None:
        try:
            if commit:
                connection.execute("COMMIT")
                self._commits[lane] += 1
            elif connection.in_transaction:
                connection.execute("ROLLBACK")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise
        finally:
            self._turns[lane].release()

    def sql(self, text: str) -> str:
        return text

    @cache  # noqa: B019 - one dialect per store, a handful of statements
    def upsert(self, table: str, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
        names = (*key, *columns)
        changes = ", ".join(f"{column} = excluded.{column}" for column in columns)
        return (
            f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"ON CONFLICT ({', '.join(key)}) DO UPDATE SET {changes}"
        )

    def now_ms(self, connection: sqlite3.Connection) -> int:
        return self._clock.now_ms()

    def has_table(self, tx: Transaction, name: str) -> bool:
        return tx.one("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", name) is not None

    # ---- wake-ups ----

    def watch(self) -> Watcher:
        return _FileWatcher(self) if self.path is not None else _MemoryWatcher(self._commits)

    def close(self) -> None:
        for connection in self._memory.values():
            connection.close()
        for turn in self._turns.values():
            turn.close()

    # ---- errors ----

    def error(self, error: Exception) -> StoreError | None:
        if isinstance(error, sqlite3.ProgrammingError) and "closed database" in str(error):
            return StoreUnavailable("the connection was closed while in use; call penstock.connect again")
        if not isinstance(error, sqlite3.DatabaseError):
            return None
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code == sqlite3.SQLITE_FULL:
            return StoreFull(
                f"no space left for {self.path}: free some space, then try again; nothing was stored"
            )
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            return StoreBusy(
                f"{self.path} was locked for {DEFAULTS.busy_timeout_ms // 1000} s by another process; "
                "find the one that holds a transaction open, then try again"
            )
        if code == sqlite3.SQLITE_IOERR and self._disk_is_full():
            return StoreFull(
                f"no space left for {self.path}: free some space, then try again; nothing was stored"
            )
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            return StoreCorrupt(f"{self.path} is not a sound database ({error}); restore it from a backup")
        if code in (
            sqlite3.SQLITE_READONLY,
            sqlite3.SQLITE_CANTOPEN,
            sqlite3.SQLITE_IOERR,
            sqlite3.SQLITE_PERM,
        ):
            return StoreUnavailable(
                f"{self.path} cannot be written ({error}); check that file, folder and disk are there and writable"
            )
        return StoreError(f"{self.path}: {error}")

    def _disk_is_full(self) -> bool:
        if self.path is None:
            return False
        try:
            space = os.statvfs(self.path.parent)
        except OSError:
            return False
        return space.f_bavail * space.f_frsize < 1024 * 1024

    def _cannot_open(self, file: Path, error: sqlite3.Error) -> StoreError:
        if not file.parent.exists():
            return StoreUnavailable(
                f"the folder {file.parent} does not exist; create it, or correct the path in the URL"
            )
        mapped = self.error(error)
        if isinstance(mapped, StoreUnavailable) or mapped is None:
            return StoreUnavailable(
                f"{file} cannot be opened for writing ({error}); check the path and its permissions"
            )
        return mapped


class _FileWatcher:
    """`PRAGMA data_version` on a connection of its own per file: it moves when another one commits."""

    def __init__(self, dialect: SqliteDialect) -> None:
        self._connections = {lane: dialect.connect(lane) for lane in Lane}
        self._seen: dict[Lane, int] = {}

    def changed(self) -> tuple[bool, bool]:
        return self._moved(Lane.LOG), self._moved(Lane.PROGRESS)

    def _moved(self, lane: Lane) -> bool:
        version = self._connections[lane].execute("PRAGMA data_version").fetchone()[0]
        before, self._seen[lane] = self._seen.get(lane), version
        return bool(version != before)

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()


class _MemoryWatcher:
    def __init__(self, commits: dict[Lane, int]) -> None:
        self._commits = commits
        self._seen: dict[Lane, int] = {}

    def changed(self) -> tuple[bool, bool]:
        before, self._seen = self._seen, dict(self._commits)
        return self._seen[Lane.LOG] != before.get(Lane.LOG), self._seen[Lane.PROGRESS] != before.get(
            Lane.PROGRESS
        )

    def close(self) -> None:
        pass


def _open(path: str) -> sqlite3.Connection:
    return sqlite3.connect(
        path,
        isolation_level=None,
        check_same_thread=False,
        timeout=DEFAULTS.busy_timeout_ms / 1000,
        cached_statements=256,
    )


class _Turn:
    """One writer at a time: threads by a lock, processes by an advisory lock on a side file.

    Waiting is bounded: a process stopped while it holds the side lock must not hang the others; after
    the limit they go on to BEGIN IMMEDIATE, whose own time-out gives a clear error (I15).
    """

    def __init__(self, path: Path | None) -> None:
        self._lock = threading.RLock()
        self._path = path if fcntl is not None else None
        self._descriptor: int | None = None

    def acquire(self) -> None:
        self._lock.acquire()
        if self._path is None:
            return
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            self._wait_for_processes(self._descriptor)
        except OSError:
            pass  # only fairness is lost; BEGIN IMMEDIATE still excludes

    def _wait_for_processes(self, descriptor: int) -> None:
        deadline = time.monotonic() + DEFAULTS.side_lock_ms / 1000
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_TURN_PAUSE_S)

    def release(self) -> None:
        try:
            if self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        finally:
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def close(self) -> None:
        with self._lock:
            if self._descriptor is not None:
                os.close(self._descriptor)
                self._descriptor = None
