"""How a process learns of commits by others.

PostgreSQL tells: a `Notifier` sends after a commit, and a `Listener` hears it. Where the database is files,
Linux tells that they were written (`FileEvents`). Elsewhere, and behind PgBouncer, a `LookingWatcher` reads
now and then. Nobody is told more than that there is something to read: a wake-up that is lost costs a pause
(I19).
"""

from __future__ import annotations

import ctypes
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ...config import Limits, StoreTuning
from ..sql.session import Area, Row, Session

if TYPE_CHECKING:
    from .postgres_connection import ImpatientConnection

__all__ = ["FileEvents", "Listener", "LookingWatcher", "Notifier", "open_events"]

Failures = tuple[type[Exception], ...]
"""What the driver raises."""

_CHANNEL = "postroom"
_IN_MODIFY = 0x2
_BUFFER = 64 * 1024


class Notifier:
    """Wakes those who wait, by NOTIFY, from a thread of its own; it begins with the first to be sent.

    Sent after the commit, on a connection of its own, and coalesced: while one is on its way, and for a
    moment after it, further ones become one. Inside the transaction it cost 18 to 43 % of commits (I19), and
    one for each lone send a quarter of their rate. One that is lost costs a pause, never a message.
    """

    def __init__(
        self, connect: Callable[[], ImpatientConnection], failures: Failures, tuning: StoreTuning
    ) -> None:
        self._connect, self._failures, self._tuning = connect, failures, tuning
        self._pending: set[Area] = set()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def notify(self, area: Area) -> None:
        with self._lock:
            self._pending.add(area)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="postroom-notify", daemon=True)
                self._thread.start()
        if not self._wake.is_set():  # else what is pending is taken after it is cleared
            self._wake.set()

    def close(self) -> None:
        """Send what waits, then end."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(self._tuning.notifier_stop_s)

    def _run(self) -> None:
        connection: ImpatientConnection | None = None
        sent = 0.0  # when the last one was
        while not self._closed or self._pending:
            self._wake.wait()
            if not self._closed and (early := sent + self._tuning.notify_pause_s - time.monotonic()) > 0:
                time.sleep(early)
            self._wake.clear()
            sent = time.monotonic()
            with self._lock:
                areas, self._pending = self._pending, set()
            if areas:
                fresh = connection is None
                connection = self._send(connection, areas)
                if connection is None and not fresh:  # it had gone stale: once more
                    connection = self._send(None, areas)
        if connection is not None:
            connection.close()

    def _send(self, connection: ImpatientConnection | None, areas: set[Area]) -> ImpatientConnection | None:
        """The connection it went through; None: it did not, and the others look by themselves before long."""
        try:
            connection = connection or self._connect()
            for area in areas:
                connection.ask(f"NOTIFY {_CHANNEL}, '{area.value}'")
        except self._failures:
            if connection is not None:
                connection.close()
            return None
        return connection


class Listener:
    """Hears what a `Notifier` sends. Implements `contract.Watcher`, for one thread.

    It says "look" also whenever it had to connect again, and now and then anyway. In between it sleeps until
    something comes, or `wake` is called: a process that has nothing to do should cost next to nothing.
    """

    def __init__(
        self, connect: Callable[[], ImpatientConnection], failures: Failures, tuning: StoreTuning
    ) -> None:
        self._connect, self._failures, self._tuning = connect, failures, tuning
        self._connection: Any = None
        self._yes_at = 0.0  # when it last said yes
        self._bell = socket.socketpair()
        for end in self._bell:
            end.setblocking(False)

    def changed(self) -> tuple[bool, bool]:
        try:
            if self._connection is None:
                self._connection = self._connect()
                self._connection.ask(f"LISTEN {_CHANNEL}")
                return self._yes(True, True)
            told = self._told() or self._told_later()
        except self._failures:
            self._drop()
            time.sleep(self._tuning.listen_again_s)
            return self._yes(True, True)
        if not told and time.monotonic() - self._yes_at >= self._tuning.listen_anyway_s:
            return self._yes(True, True)
        return self._yes(Area.LOG.value in told, Area.PROGRESS.value in told)

    def _yes(self, log: bool, progress: bool) -> tuple[bool, bool]:
        if log or progress:
            self._yes_at = time.monotonic()
        return log, progress

    def _told(self) -> set[str]:
        return {note.payload for note in self._connection.notifies(timeout=0)}

    def _told_later(self) -> set[str]:
        """Wait for it, a while."""
        events = select.poll()  # not `select`, which takes no descriptor above 1023
        for descriptor in (self._connection.fileno(), self._bell[0].fileno()):
            events.register(descriptor, select.POLLIN)
        events.poll(self._tuning.listen_s * 1000)
        with suppress(BlockingIOError):
            self._bell[0].recv(4096)
        return self._told()

    def wake(self) -> None:
        with suppress(BlockingIOError):  # it has been rung often enough
            self._bell[1].send(b"\0")

    def close(self) -> None:
        self._drop()
        for end in self._bell:
            end.close()

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


_LOG = """SELECT (SELECT value FROM postroom_settings WHERE name = 'catalog_version'),
                 (SELECT SUM(next_offset) FROM postroom_partitions),
                 (SELECT MIN(due_at) FROM postroom_schedule)"""
_PROGRESS = """SELECT SUM(next_new), SUM(settled), MIN(next_due), COUNT(*), MAX(holder_until)
               FROM postroom_progress"""


class LookingWatcher:
    """Watches where the database cannot wake us: it looks, less and less often, until there is news.

    Looks are 5, 10, 20 … ms apart up to a cap, and 5 ms again after news (DESIGN, "Waiters"). A look is one
    cheap read. Implements `contract.Watcher`, for one thread.
    """

    def __init__(self, session: Session, limits: Limits) -> None:
        self._session = session
        self._limits = limits
        self._pause_ms = 0
        self._seen: tuple[Row | None, Row | None] | None = None

    def changed(self) -> tuple[bool, bool]:
        time.sleep(self._pause_ms / 1000)
        with self._session.read(Area.LOG) as tx:
            now = (tx.one(_LOG), tx.one(_PROGRESS))
        before, self._seen = self._seen, now
        log, progress = (before is None or old != new for old, new in zip(before or now, now, strict=True))
        least = self._limits.watch_interval_ms
        self._pause_ms = (
            0 if log or progress else min(max(least, self._pause_ms * 2), self._limits.watch_cap_ms)
        )
        return log, progress

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


def open_events(files: Iterable[str]) -> FileEvents | None:
    """Return what tells when one of these files is written, by any process of this machine: Linux's inotify.

    None: there is none, on another system or with no more instances for this user, and whoever waits has to
    look by itself. So has a caller who finds news of which it was not told: some file systems do not tell.
    """
    if not sys.platform.startswith("linux"):
        return None
    try:
        system = ctypes.CDLL(None, use_errno=True)
        told = system.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return None
    if told < 0:
        return None
    events = FileEvents(told)
    if any(system.inotify_add_watch(told, os.fsencode(file), _IN_MODIFY) < 0 for file in files):
        events.close()
        return None
    return events


class FileEvents:
    """For one thread that waits, and others that `wake` it."""

    def __init__(self, told: int) -> None:
        self._told = told
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        for descriptor in (self._told, self._woken):
            self._poll.register(descriptor, select.POLLIN)

    def wait(self, seconds: float) -> bool:
        """Return whether a file was written since the last time, once one is; False: the time is over, or
        somebody called `wake`."""
        ready = [descriptor for descriptor, _ in self._poll.poll(seconds * 1000)]
        with suppress(BlockingIOError):
            os.read(self._told, _BUFFER)
        return self._told in ready

    def wake(self) -> None:
        """End the wait, and all that come."""
        with suppress(OSError):  # it is closed: nobody waits
            os.eventfd_write(self._woken, 1)

    def close(self) -> None:
        """Linux takes 10 ms to close the first, and nobody is to wait for that."""
        threading.Thread(target=os.close, args=(self._told,), daemon=True).start()
        os.close(self._woken)
