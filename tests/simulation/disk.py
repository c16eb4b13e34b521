"""SQLite on a simulated disk: statements take turns, and what was not flushed is forgotten in a crash.

The files are real, in memory, and so is SQLite. Two of its connections per file serve all processes, one for
the transaction that is under way, one for what only reads: a statement outside of a transaction leaves
nothing behind, so nobody can tell. That others have a file locked, or have changed it, is therefore answered
here. Write-ahead logs are never copied into their databases, so a file at any earlier commit is the same
file with a shorter log: a machine that loses power comes back with a log that ends anywhere behind its last
flushed commit, even in the middle of a frame. A disk may also be full, fail, or be slow.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from postroom.client import databases
from postroom.client.forward import outbox_source, outbox_table, spool_file
from postroom.files import open_private
from postroom.store.dialects import sqlite as dialect

from .standard import Over
from .world import Process, World, current_world, here

__all__ = ["Disk", "PlainConnection", "SimEvents", "connect", "install"]

_SWITCH = 0.3  # how often another fiber runs between two statements
_AREAS = ("", ".progress", ".volatile")
_WRITES = ("INSERT", "UPDATE", "DELETE", "CREATE", "DROP", "ALTER")


class _File:
    """A database, with what all processes together know of it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.owner: SimConnection | None = None  # whose transaction is under way
        self.version = 0  # counts commits
        self.flushed = 0  # bytes of its log that a crash keeps

    def log_bytes(self) -> int:
        try:
            return os.stat(f"{self.path}-wal").st_size
        except OSError:
            return 0

    @cached_property
    def reader(self) -> sqlite3.Connection:
        return _opened(self.path)

    @cached_property
    def writer(self) -> sqlite3.Connection:
        return _opened(self.path)

    def close(self) -> None:
        for name in ("reader", "writer"):
            connection = self.__dict__.pop(name, None)
            if connection is not None:
                connection.close()


def _opened(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=0, cached_statements=1000
    )
    if not path.endswith(".progress"):
        connection.execute(f"PRAGMA page_size={dialect._LOG_PAGE_BYTES}")
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA wal_autocheckpoint=0")
    connection.execute("PRAGMA synchronous=OFF")  # what is flushed is decided here
    return connection


class Disk:
    """The disk of one machine, with the files of one queue."""

    def __init__(self, world: World, folder: Path, template: Path | None = None) -> None:
        self._world, self.folder = world, folder
        self.path = folder / "queue.db"
        self.connections: list[SimConnection] = []
        self.events: list[SimEvents] = []
        self.full_until_ns = self.failing_until_ns = self.slow_until_ns = self.away_until_ns = 0
        self.away = ""  # the files whose paths begin so fail until then, and others do not
        self.flush_s = 0.001
        self.fatal_in = 0  # whoever makes this one of the next commits is killed right after it; 0: nobody is
        self.glitch_in = 0  # this one of the next commits fails; 0: none does
        self.kill: Callable[[Process], None] = lambda process: None
        self._files: dict[str, _File] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if template is not None:
            for file in template.parent.glob("*.db*"):
                shutil.copyfile(file, folder / file.name)

    def file(self, path: str) -> _File:
        found = self._files.get(path)
        if found is None:
            found = self._files[path] = _File(path)
        return found

    def close_of(self, process: Process) -> None:
        """A process that died: its transactions are rolled back, its locks released."""
        for connection in [one for one in self.connections if one.process is process]:
            connection.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def crash(self, process_kill: Callable[[], object]) -> dict[str, tuple[int, int]]:
        """Power is lost. Returns, by file, the log's bytes that were kept, and those that there were."""
        process_kill()
        for connection in list(self.connections):
            connection.close()
        kept: dict[str, tuple[int, int]] = {}
        saved: dict[str, tuple[bytes, bytes]] = {}
        for area in _AREAS:
            self.file(f"{self.path}{area}")
        for file in [one for one in self._files.values() if os.path.exists(one.path)]:
            now = file.log_bytes()
            least = min(now, file.flushed)
            cut = least + int(self._world.draw.random() * (now - least + 1))
            kept[file.path.removeprefix(str(self.folder))] = (cut, now)
            log = Path(f"{file.path}-wal").read_bytes()[:cut] if now else b""
            saved[file.path] = (Path(file.path).read_bytes(), log)
        self.close()  # the last to close a file empties its log
        for path, (database, log) in saved.items():
            Path(f"{path}-shm").unlink(missing_ok=True)
            Path(path).write_bytes(database)
            Path(f"{path}-wal").write_bytes(log)
            self.file(path).flushed = len(log)
        return kept

    def committed(self, connection: SimConnection) -> None:
        file = connection.file
        if connection.synchronous == "FULL":
            file.flushed = file.log_bytes()
        if connection.wrote:
            file.version += 1
            connection.own += 1
            for events in self.events:
                events.told(file.path)


class _Rows:
    """What a statement found; all of it, so that nothing is left open."""

    __slots__ = ("_at", "_rows")
    rowcount = -1
    lastrowid = None

    def __init__(self, rows: list[Any]) -> None:
        self._rows, self._at = rows, 0

    def fetchone(self) -> Any:
        at = self._at
        if at < len(self._rows):
            self._at = at + 1
            return self._rows[at]
        return None

    def fetchall(self) -> list[Any]:
        rows, self._rows = self._rows[self._at :] if self._at else self._rows, []
        return rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetchall())


class SimConnection:
    """What a process has of a file; made in place of the dialect's `_Connection`."""

    synchronous = ""
    thrifty = False
    secure = 0
    of_file = None

    def __init__(self, disk: Disk, path: str, process: Process, patience_s: float) -> None:
        self.disk, self.process, self.patience_s = disk, process, patience_s
        self.file = disk.file(path)
        self.own = 0  # commits of its own, which are no news
        self.wrote = self.ended = False
        disk.connections.append(self)

    def __hash__(self) -> int:
        return 1

    @property
    def in_transaction(self) -> bool:
        return self.file.owner is self

    def execute(self, sql: str, args: Any = (), /) -> Any:
        return _execute(self, sql, args)

    def executemany(self, sql: str, rows: Any, /) -> Any:
        _before(self, sql)
        assert self.in_transaction, f"outside of a transaction: {sql}"
        self.wrote = True
        return self.file.writer.executemany(sql, rows)

    def close(self) -> None:
        if not self.ended:
            self.ended = True
            self.disk.connections.remove(self)
            if self.in_transaction:
                self.end("ROLLBACK")

    # ---- transactions ----

    def begin(self) -> None:
        """Wait for whoever has the file, for as long as the busy time-out."""
        world, file = current_world(), self.file
        until = world.now_ns + int(self.patience_s * 1e9)
        while file.owner is not None:
            if world.now_ns >= until or world.current is None:
                raise _error("database is locked", sqlite3.SQLITE_BUSY)
            world.sleep(0.001 + 0.02 * world.draw.random())
        file.writer.execute("BEGIN IMMEDIATE")
        file.owner, self.wrote = self, False

    def end(self, sql: str) -> None:
        self.file.writer.execute(sql)
        self.file.owner = None

    def commit(self) -> None:
        world = current_world()
        if self.synchronous == "FULL" and world.current is not None:
            world.sleep(self.disk.flush_s * (0.3 + world.draw.random()))  # until then nobody sees it
            self._fail_perhaps()
        self.end("COMMIT")
        self.disk.committed(self)
        _die_perhaps(world, self)
        world.step()  # a process may die here: committed, and nobody was told

    def _fail_perhaps(self) -> None:
        if self.disk.glitch_in:
            self.disk.glitch_in -= 1
            if not self.disk.glitch_in:
                raise _error("disk I/O error", sqlite3.SQLITE_IOERR)

    def pragma(self, sql: str) -> Any:
        name, _, value = sql[7:].partition("=")
        if name == "data_version":
            return _Rows([(self.file.version - self.own,)])
        if name == "busy_timeout":
            self.patience_s = int(value) / 1000
        elif not value:
            return self.file.reader.execute(sql)
        return None  # whatever is set is so already, or is decided here


def _before(connection: SimConnection, sql: str) -> None:
    """Others run, or the disk fails."""
    if connection.ended:
        raise sqlite3.ProgrammingError("Cannot operate on a closed database.")
    world = current_world()
    if world.current is None:
        return
    if world.draw.random() < _SWITCH:
        world.step()
    disk = connection.disk
    if world.now_ns < disk.failing_until_ns and sql != "ROLLBACK":
        raise _error("disk I/O error", sqlite3.SQLITE_IOERR)
    if world.now_ns < disk.away_until_ns and connection.file.path.startswith(disk.away) and sql != "ROLLBACK":
        raise _error("disk I/O error", sqlite3.SQLITE_IOERR)
    if world.now_ns < disk.full_until_ns and sql.startswith(("INSERT", "UPDATE", "CREATE", "COMMIT")):
        raise _error("database or disk is full", sqlite3.SQLITE_FULL)


def _error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


def _execute(connection: SimConnection, sql: str, args: Any = ()) -> Any:
    if sql.startswith("PRAGMA"):
        return connection.pragma(sql)
    _before(connection, sql)
    file = connection.file
    if file.owner is connection:
        if sql == "COMMIT":
            return connection.commit()
        if sql == "ROLLBACK":
            return connection.end(sql)
        found = file.writer.execute(sql, args)
        if found.description is None and found.rowcount:
            connection.wrote = True
    elif sql == "BEGIN IMMEDIATE":
        return connection.begin()
    else:
        assert not sql.startswith(_WRITES), f"outside of a transaction: {sql}"
        found = file.reader.execute(sql, args)
    return found if found.description is None else _Rows(found.fetchall())


def _die_perhaps(world: World, connection: SimConnection) -> None:
    disk = connection.disk
    if disk.fatal_in and connection.synchronous == "FULL" and world.current is not None:
        disk.fatal_in -= 1
        if not disk.fatal_in:
            world.call_later(0, lambda: disk.kill(connection.process))
            world.sleep(0.001)


class _Cursor(_Rows):
    """What a user's program has of a statement; of one that changes something, how many rows it met."""

    __slots__ = ("_connection", "row_factory", "rowcount")

    def __init__(self, connection: PlainConnection, rows: list[Any], rowcount: int = -1) -> None:
        super().__init__(rows)
        self._connection, self.rowcount = connection, rowcount

    def execute(self, sql: str, args: Any = ()) -> _Cursor:
        found = self._connection.execute(sql, args)
        self._rows, self._at, self.rowcount = found._rows, 0, found.rowcount
        return self

    def executemany(self, sql: str, rows: Any) -> _Cursor:
        self._connection.executemany(sql, rows)
        return self

    def close(self) -> None:
        pass


class PlainConnection(SimConnection):
    """In place of `sqlite3.Connection`, with `isolation_level=None`: of users' databases, and of spools."""

    synchronous = "FULL"
    isolation_level = None
    autocommit = -1

    def execute(self, sql: str, args: Any = (), /) -> _Cursor:
        sql = sql.strip()
        if sql.startswith("PRAGMA") or sql in ("BEGIN IMMEDIATE", "COMMIT", "ROLLBACK"):
            found = _execute(self, sql.replace(" = ", "="), args)
        elif self.in_transaction or not sql.startswith(_WRITES):
            found = _execute(self, sql, args)
        else:  # a transaction of its own
            with self:
                found = _execute(self, sql, args)
        if found is None or isinstance(found, _Rows):
            return _Cursor(self, found.fetchall() if found is not None else [])
        return _Cursor(self, found.fetchall(), found.rowcount)

    def cursor(self) -> _Cursor:
        return _Cursor(self, [])

    def commit(self) -> None:
        if self.in_transaction:
            _before(self, "COMMIT")
            super().commit()

    def rollback(self) -> None:
        if self.in_transaction:
            self.end("ROLLBACK")

    def __enter__(self) -> PlainConnection:
        _execute(self, "BEGIN IMMEDIATE")
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is not None:
            self.rollback()
            return
        try:
            _execute(self, "COMMIT")
        except sqlite3.Error:
            self.rollback()
            raise


PlainConnection.__module__ = "sqlite3"  # `databases.library` tells whose it is by that


def connect(path: Any, *, timeout: float = 5.0, **how: Any) -> PlainConnection:
    """`sqlite3.connect`, as far as it is used here."""
    fiber = here()
    assert fiber is not None, "a process opens files"
    return PlainConnection(_disk(), str(path), fiber.process, timeout)


class SimEvents:
    """What inotify tells, at once and always."""

    def __init__(self, disk: Disk, files: set[str]) -> None:
        self._disk, self._files = disk, files
        self._news = self._woken = False
        self._waiting: Any = None
        disk.events.append(self)
        fiber = here()
        if fiber is not None:
            fiber.process.on_death.append(self.close)

    def told(self, file: str) -> None:
        if f"{file}-wal" in self._files:
            self._news = True
            self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            current_world().wake(self._waiting)

    def wait(self, seconds: float) -> bool:
        if not self._news and not self._woken:
            self._waiting = here()
            current_world().block(seconds)
            self._waiting = None
        news, self._news = self._news, False
        return news

    def wake(self) -> None:
        self._woken = True
        self._wake()

    def close(self) -> None:
        if self in self._disk.events:
            self._disk.events.remove(self)


class _NoBallast:
    released = False

    def __init__(self, *args: Any) -> None:
        pass

    def admits(self) -> bool:
        return True

    def scarce(self) -> bool:
        return False

    def make_room(self, *, emptying: bool) -> bool:
        return False


def install() -> None:
    """Have Postroom's files on the disk of the machine whose process opens them; for good."""
    nothing: Callable[..., None] = lambda *args, **how: None  # noqa: E731
    dialect.SqliteDialect.ask = dialect.SqliteDialect.do = staticmethod(_execute)  # type: ignore[assignment]
    dialect.SqliteDialect.many = staticmethod(SimConnection.executemany)  # type: ignore[assignment]
    dialect.SqliteDialect._open = _open  # type: ignore[method-assign]
    dialect.Ballast = _NoBallast  # type: ignore[misc, assignment]
    dialect.make_private = dialect.refuse_inherited = dialect.opened = nothing  # type: ignore[assignment]
    dialect.open_events = _open_events  # type: ignore[assignment]
    dialect.open_private = _open_private
    dialect.os = Over(os, close=_close)  # type: ignore[assignment]
    theirs = Over(sqlite3, connect=connect, Connection=PlainConnection)
    databases.sqlite3 = spool_file.sqlite3 = theirs  # type: ignore[assignment]
    spool_file.open_private = _open_private
    spool_file.os = Over(spool_file.os, close=_close)  # type: ignore[assignment]
    outbox_table.now_ms = outbox_source.now_ms = _now_ms


def _now_ms(theirs: Any) -> int:
    """SQLite's clock, which is that of its machine."""
    return current_world().wall_ns() // 1_000_000


def _disk() -> Disk:
    world, fiber = current_world(), here()
    assert fiber is not None, "a process opens files"
    disks: dict[str, Disk] = world.disks  # type: ignore[attr-defined]
    return disks[fiber.process.machine]


def _open(self: Any, path: str) -> Any:
    fiber = here()
    assert fiber is not None
    return SimConnection(_disk(), path, fiber.process, self._limits.busy_timeout_ms / 1000)


def _open_private(path: Path, like: Path | None = None) -> int:
    """The file of a lock: whoever dies lets go of it."""
    descriptor, fiber = open_private(path, like), here()
    assert fiber is not None
    owner = fiber.process
    _locks[descriptor] = owner
    owner.on_death.append(lambda: _close(descriptor) if _locks.get(descriptor) is owner else None)
    return descriptor


_locks: dict[int, Process] = {}  # files of locks that are open, by descriptor


def _close(descriptor: int) -> None:
    _locks.pop(descriptor, None)
    os.close(descriptor)


def _open_events(files: Any) -> SimEvents:
    return SimEvents(_disk(), set(files))
