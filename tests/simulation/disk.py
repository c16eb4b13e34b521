"""SQLite on a simulated disk: statements take turns, and what was not flushed is forgotten in a crash.

The files are real, in memory, and so is SQLite. Write-ahead logs are never copied into their databases, so
a file at any earlier commit is the same file with a shorter log: a machine that loses power comes back with
a log that ends anywhere behind its last flushed commit, even in the middle of a frame. A disk may also be
full, fail, or be slow.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from postroom.files import open_private
from postroom.store.dialects import sqlite as dialect

from .standard import Over
from .world import Process, World, current_world, here

__all__ = ["Disk", "SimEvents", "install"]

_raw = sqlite3.Connection.execute
_raw_many = sqlite3.Connection.executemany
_SWITCH = 0.3  # how often another fiber runs between two statements
_AREAS = ("", ".progress", ".volatile")


class Disk:
    """The disk of one machine, with the files of one queue."""

    def __init__(self, world: World, folder: Path, template: Path | None = None) -> None:
        self._world, self.folder = world, folder
        self.path = folder / "queue.db"
        self.connections: list[Any] = []
        self.events: list[SimEvents] = []
        self.flushed: dict[str, int] = {}  # by file, bytes of its log that a crash keeps
        self.full_until_ns = self.failing_until_ns = 0
        self.flush_s = 0.001
        self.fatal_in = 0  # whoever makes this one of the next commits is killed right after it; 0: nobody is
        self.kill: Callable[[Process], None] = lambda process: None
        self._keepers: list[sqlite3.Connection] = []  # the last to close a file would empty its log
        folder.mkdir(parents=True, exist_ok=True)
        if template is not None:
            for area in _AREAS:
                shutil.copyfile(f"{template}{area}", f"{self.path}{area}")
            self._keep()

    def _keep(self) -> None:
        for area in _AREAS:
            keeper = sqlite3.connect(f"{self.path}{area}", isolation_level=None)
            keeper.execute("PRAGMA journal_mode=WAL")
            keeper.execute("SELECT * FROM sqlite_master").fetchall()
            self._keepers.append(keeper)

    def log_bytes(self, file: str) -> int:
        try:
            return os.stat(f"{file}-wal").st_size
        except OSError:
            return 0

    def close_of(self, process: Process) -> None:
        """A process that died: its transactions are rolled back, its locks released."""
        for connection in [one for one in self.connections if one.process is process]:
            connection.really_close()

    def crash(self, process_kill: Any) -> dict[str, tuple[int, int]]:
        """Power is lost. Returns, by file, the log's bytes that were kept, and those that there were."""
        process_kill()
        kept: dict[str, tuple[int, int]] = {}
        saved: dict[str, tuple[bytes, bytes]] = {}
        for area in _AREAS:
            file = f"{self.path}{area}"
            now = self.log_bytes(file)
            least = min(now, self.flushed.get(file, 0))
            cut = least + int(self._world.draw.random() * (now - least + 1))
            kept[area] = (cut, now)
            log = Path(f"{file}-wal").read_bytes()[:cut] if now else b""
            saved[file] = (Path(file).read_bytes() if os.path.exists(file) else b"", log)
        for connection in [*self.connections, *self._keepers]:
            getattr(connection, "really_close", connection.close)()
        self._keepers.clear()
        for file, (database, log) in saved.items():
            Path(f"{file}-shm").unlink(missing_ok=True)
            Path(file).write_bytes(database)
            Path(f"{file}-wal").write_bytes(log)
            self.flushed[file] = len(log)
        self._keep()
        return kept

    def committed(self, connection: Any) -> None:
        file = connection.file
        if connection.synchronous == "FULL":
            self.flushed[file] = self.log_bytes(file)
        for events in self.events:
            events.told(file)


class _SimConnection(dialect._Connection):
    """Made in place of `_Connection`; its class attributes are how SQLite behaves here."""

    file = ""
    process: Any = None
    patience_s = 0.0
    disk: Any = None
    ended = False

    def execute(self, sql: str, args: Any = (), /) -> Any:  # type: ignore[override]
        return _execute(self, sql, args)

    def executemany(self, sql: str, rows: Any, /) -> Any:  # type: ignore[override]
        _before(self, sql)
        return _raw_many(self, sql, rows)

    def close(self) -> None:
        if not self.ended:
            self.really_close()

    def really_close(self) -> None:
        self.ended = True
        if self in self.disk.connections:
            self.disk.connections.remove(self)
        super().close()

    def __hash__(self) -> int:
        return 1


def _before(connection: Any, sql: str) -> None:
    world = current_world()
    fiber = world.current
    if fiber is None:
        return
    if world.draw.random() < _SWITCH:
        world.step()
    disk = connection.disk
    if world.now_ns < disk.failing_until_ns and not sql.startswith(("PRAGMA", "ROLLBACK")):
        raise _error("disk I/O error", sqlite3.SQLITE_IOERR)
    if world.now_ns < disk.full_until_ns and sql.startswith(("INSERT", "UPDATE", "CREATE", "COMMIT")):
        raise _error("database or disk is full", sqlite3.SQLITE_FULL)


def _error(text: str, code: int) -> sqlite3.OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return error


def _execute(connection: Any, sql: str, args: Any = ()) -> Any:
    world = current_world()
    if sql.startswith("PRAGMA"):
        if sql.startswith("PRAGMA busy_timeout"):
            connection.patience_s = int(sql.partition("=")[2]) / 1000
            return None
        if sql.startswith("PRAGMA wal_autocheckpoint"):
            sql = "PRAGMA wal_autocheckpoint=0"
        return _raw(connection, sql, args)
    _before(connection, sql)
    if sql == "COMMIT" and connection.synchronous == "FULL" and world.current is not None:
        world.sleep(connection.disk.flush_s * (0.3 + world.draw.random()))  # until then nobody sees it
    until = world.now_ns + int(connection.patience_s * 1e9)
    while True:
        try:
            answer = _raw(connection, sql, args)
            break
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code != sqlite3.SQLITE_BUSY or world.now_ns >= until or world.current is None:
                raise
            world.sleep(0.001 + 0.02 * world.draw.random())
    if sql == "COMMIT":
        connection.disk.committed(connection)
        _die_perhaps(world, connection)
        world.step()  # a process may die here: committed, and nobody was told
    return answer


def _die_perhaps(world: World, connection: Any) -> None:
    disk = connection.disk
    if disk.fatal_in and connection.synchronous == "FULL" and world.current is not None:
        disk.fatal_in -= 1
        if not disk.fatal_in:
            world.call_later(0, lambda: disk.kill(connection.process))
            world.sleep(0.001)


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

    def make_room(self, *, emptying: bool) -> bool:
        return False


def install() -> None:
    """Have Postroom's files on the disk of the machine whose process opens them; for good."""
    dialect._Connection = _SimConnection  # type: ignore[misc]
    dialect.SqliteDialect.ask = dialect.SqliteDialect.do = staticmethod(_execute)
    dialect.SqliteDialect.many = staticmethod(_SimConnection.executemany)
    dialect.SqliteDialect._open = _open  # type: ignore[method-assign]
    dialect.Ballast = _NoBallast  # type: ignore[misc, assignment]
    dialect.open_events = _open_events  # type: ignore[assignment]
    dialect.open_private = _open_private
    dialect.os = Over(os, close=_close)  # type: ignore[assignment]


def _disk() -> Disk:
    world, fiber = current_world(), here()
    assert fiber is not None, "a process opens files"
    disks: dict[str, Disk] = world.disks  # type: ignore[attr-defined]
    return disks[fiber.process.machine]


def _open(self: Any, path: str) -> Any:
    connection: Any = sqlite3.connect(
        path, isolation_level=None, check_same_thread=False, timeout=0, cached_statements=256,
        factory=_SimConnection,
    )  # fmt: skip
    fiber, disk = here(), _disk()
    assert fiber is not None
    connection.file, connection.process, connection.disk = path, fiber.process, disk
    connection.patience_s = self._limits.busy_timeout_ms / 1000
    disk.connections.append(connection)
    return connection


def _open_private(path: Path, beside: Path | None = None) -> int:
    """The file of a lock: whoever dies lets go of it."""
    descriptor, fiber = open_private(path, beside), here()
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
