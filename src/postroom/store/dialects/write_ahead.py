"""A SQLite file's write-ahead log: who copies it into the file, and the room that is kept for that.

**Checkpoints.** SQLite would copy the log within the commit that has made it long, and whoever had made that
commit would wait for the disk, twice. So a thread copies beside those who write. It never catches up with
them while they go on, and the log is begun anew only when all of it is copied: now and then it keeps them out
for the little that is left; on a disk with little room, for all of it. Whoever stores megabytes faster than
they are copied is held up, and there at once. Must never be needed for anything to be right: what the thread
did not copy, a commit does once the log is longer.

**Ballast.** On a full disk even a delete needs some room. A queue of some size keeps a file of `BALLAST`
bytes beside it. A verb that empties (a purge, retention) and finds the disk full gives these bytes back and
is run again. From then on the file is empty, which every process on the queue sees, and nothing is appended:
what was freed is for deletes. That ends when there is room again, on the disk or inside the database, where
deleted messages leave pages that are used again.

    armed (BALLAST bytes) ──a delete finds no space──▶ released (0 bytes) ──there is room──▶ armed

`BALLAST` is what a checkpoint may need: with less, a write-ahead log could not be copied into its database
and would take its room for ever. Must never be needed for anything to be right: a file that is gone or cannot
be made only means that somebody has to make room by hand.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from ...config import StoreTuning
from ...errors import PostroomError
from ...files import open_private
from ..sql.session import Area

__all__ = ["BALLAST", "PAGES", "Ballast", "Checkpoints"]

PAGES = 2000  # of a log that a commit copies: the thread did not
_SOME, _MANY = 500, 1500  # pages after which it copies, and of a log that is to be begun anew
_MOST = 4000  # pages that are written while it copies: it is waited for
_BULK = 256 * 1024  # bytes of a commit that may wait for it, since it is none of the event loop's
_CHECKPOINT = "PRAGMA wal_checkpoint(PASSIVE)"  # of what nobody is in the way of
_OF_A_COMMIT = 4  # pages of one that writes a few rows, about

BALLAST = 16 * 1024 * 1024
_AMPLE = 5  # times as much has to be free before it is made


class WriterLock(Protocol):
    """Keeps those who write out."""

    def acquire(self) -> bool: ...

    def release(self) -> None: ...


class Checkpoints:
    """Those of the files of a queue. Any thread may use it; its own ends with `close`."""

    def __init__(
        self,
        connect: Callable[[Area], sqlite3.Connection],
        locks: Mapping[Area, WriterLock],
        scarce: Callable[[], bool],
        tuning: StoreTuning,
    ) -> None:
        """`scarce`: the disk has little room left."""
        self._connect, self._locks, self._scarce = connect, locks, scarce
        self._wait_s = tuning.checkpoint_wait_s
        self._written = dict.fromkeys(Area, 0)  # pages, about, since the thread was last told of the file
        self._told: set[Area] = set()  # what it has not copied since
        self._jobs: SimpleQueue[Area | None] = SimpleQueue()
        self._guard = threading.Lock()
        self._copied = threading.Event()  # since the thread was last told of something
        self._thread: threading.Thread | None = None
        self._closed = False

    def committed(self, area: Area, pages: int = _OF_A_COMMIT) -> None:
        """The area's log is longer by about so many pages."""
        self._written[area] += pages  # of two at the same moment one may be missed
        if self._written[area] >= _SOME and area not in self._told:
            self._tell(area)

    def stored(self, area: Area, size: int, page: int) -> None:
        """Its log is longer by batches of so many bytes; called once nobody is kept out any more."""
        self.committed(area, size // page)
        if size >= _BULK and area in self._told and (self._written[area] >= _MOST or self._scarce()):
            self._copied.wait(self._wait_s)

    def _tell(self, area: Area) -> None:
        with self._guard:
            if area in self._told or self._closed:
                return
            if self._thread is None and not self._started():
                self._written[area] = 0  # it is tried again after as many pages
                return
            self._told.add(area)
            self._copied.clear()
        self._jobs.put(area)

    def _started(self) -> bool:
        """False: the process may have no more threads. Whoever has just committed must not fail for that."""
        thread = threading.Thread(target=self._run, name="postroom-checkpoints", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        connections: dict[Area, sqlite3.Connection] = {}
        while (area := self._jobs.get()) is not None:
            self._written[area] = 0
            with contextlib.suppress(sqlite3.Error, PostroomError, OSError):  # a commit meets it, and tells
                if area not in connections:
                    connections[area] = self._connect(area)
                self._copy(area, connections[area])
            self._told.discard(area)
            self._copied.set()
        for connection in connections.values():
            connection.close()

    def _copy(self, area: Area, connection: sqlite3.Connection) -> None:
        pages = _MANY if self._scarce() else connection.execute(_CHECKPOINT).fetchone()[1]
        if pages >= _MANY and self._locks[area].acquire():
            try:
                connection.execute(_CHECKPOINT).fetchone()
            finally:
                self._locks[area].release()

    def close(self) -> None:
        with self._guard:
            self._closed = True
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()


class Ballast:
    """The ballast of one database file. Any thread may use it."""

    def __init__(self, database: Path, tuning: StoreTuning) -> None:
        self._tuning = tuning
        self._database = database
        self._file = database.with_name(f"{database.name}.reserve")
        self._seen_until = 0.0
        self._look_at = 0.0
        self._again_at = 0.0
        self._turn = threading.Lock()
        self.released = False  # as far as this process knows

    def admits(self) -> bool:
        """Return whether something may be appended now; the file is looked at every few milliseconds."""
        now = time.monotonic()
        if now < self._seen_until and not self.released:
            return True
        self._seen_until = now + self._tuning.ballast_seen_s
        try:
            if os.stat(self._file).st_size:
                self.released = False
                return True
        except OSError:
            self.released = False
            if time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + self._tuning.ballast_check_s
                self._make()
            return True
        self.released = True
        return self._there_is_room()

    def scarce(self) -> bool:
        """Return whether there is so little room that no file should be longer than it need be."""
        try:
            return self._free() < _AMPLE * BALLAST
        except OSError:
            return True

    def make_room(self, *, emptying: bool) -> bool:
        """After an append or a delete found the disk full: True if it is worth another try."""
        with self._turn:
            if emptying and not self.released and self._release():
                self.checkpoint()
                return True
            if time.monotonic() < self._again_at:
                return False
            self._again_at = time.monotonic() + self._tuning.ballast_again_s
            before = self._ahead()
            self.checkpoint()
            return self._ahead() < before

    def checkpoint(self) -> None:
        """Copy the write-ahead log into the database, and give its room back, if nobody is in the way."""
        with contextlib.suppress(sqlite3.Error), contextlib.closing(self._connect()) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    # ---- the file ----

    def _make(self) -> None:
        with contextlib.suppress(OSError):
            if self._database.stat().st_size >= BALLAST and self._free() >= _AMPLE * BALLAST:
                self._fill(BALLAST)

    def _fill(self, size: int) -> None:
        """All of it, or no file: an empty one would say that nothing may be appended."""
        descriptor = open_private(self._file, self._database)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(descriptor, 0, size)
            else:  # pragma: no cover - macOS
                for at in range(0, size, 1 << 20):
                    os.pwrite(descriptor, bytes(1 << 20), at)
        except OSError:
            self._file.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)

    def _release(self) -> bool:
        """False: there is none. Another process may have done it before."""
        try:
            os.truncate(self._file, 0)
        except OSError:
            return False
        self.released = True
        return True

    def _there_is_room(self) -> bool:
        """Make a ballast that was released again, if enough was deleted since; return whether it is there."""
        with self._turn:
            if time.monotonic() < self._again_at:
                return False
            self._again_at = time.monotonic() + self._tuning.ballast_again_s
            self.checkpoint()
            try:
                free, inside = self._free(), self._inside()
                if free < 2 * BALLAST and inside < BALLAST:
                    return False
                self._fill(min(BALLAST, free // 2))  # the rest is for write-ahead logs
                self.released = False
            except (OSError, sqlite3.Error):
                return False
        return True

    # ---- how much there is ----

    def _free(self) -> int:
        space = os.statvfs(self._database.parent)
        return space.f_bavail * space.f_frsize

    def _inside(self) -> int:
        """Bytes of pages in the database that are free to be used."""
        with contextlib.closing(self._connect()) as connection:
            pages = connection.execute("PRAGMA freelist_count").fetchone()[0]
            size = connection.execute("PRAGMA page_size").fetchone()[0]
        return int(pages) * int(size)

    def _ahead(self) -> int:
        """Return the size of the write-ahead log."""
        try:
            return os.stat(f"{self._database}-wal").st_size
        except OSError:
            return 0

    def _connect(self) -> sqlite3.Connection:
        readers_ms = self._tuning.ballast_readers_ms
        connection = sqlite3.connect(self._database, isolation_level=None, timeout=readers_ms / 1000)
        connection.execute(f"PRAGMA busy_timeout={readers_ms}")
        return connection
