"""NOTIFY and LISTEN: how PostgreSQL wakes those who wait.

Sent after the commit, on a connection of its own, and coalesced: while one is on its way, further ones
become one (inside the transaction it cost 18 to 43 % of commits, I19). A notification that is lost costs
a pause, never a message: the listener also says "look" whenever it had to connect again, and now and then
anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import psycopg

from .session import Lane

__all__ = ["Listener", "Notifier"]

_CHANNEL = "postroom"
_WAIT_S = 0.05  # one look blocks for so long at most
_ANYWAY_S = 2.0  # and says yes after so long without news


class Notifier:
    """Sends from a thread of its own, which begins with the first that is to be sent."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._pending: set[Lane] = set()
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closed = False

    def notify(self, lane: Lane) -> None:
        with self._lock:
            self._pending.add(lane)
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="postroom-notify", daemon=True)
                self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Send what waits, then end."""
        self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        connection: Any = None
        while not self._closed or self._pending:
            self._wake.wait()
            self._wake.clear()
            with self._lock:
                lanes, self._pending = self._pending, set()
            if lanes:
                fresh = connection is None
                connection = self._send(connection, lanes)
                if connection is None and not fresh:  # it had gone stale: once more
                    connection = self._send(None, lanes)
        if connection is not None:
            connection.close()

    def _send(self, connection: Any, lanes: set[Lane]) -> Any:
        """The connection it went through; None: it did not, and the others look by themselves before long."""
        try:
            connection = connection or self._connect()
            for lane in lanes:
                connection.execute(f"NOTIFY {_CHANNEL}, '{lane.value}'")
        except psycopg.Error:
            if connection is not None:
                connection.close()
            return None
        return connection


class Listener:
    """Implements `contract.Watcher`. For one thread."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._connection: Any = None
        self._yes_at = 0.0  # when it last said yes

    def changed(self) -> tuple[bool, bool]:
        try:
            if self._connection is None:
                self._connection = self._connect()
                self._connection.execute(f"LISTEN {_CHANNEL}")
                return self._yes(True, True)
            told = {note.payload for note in self._connection.notifies(timeout=_WAIT_S, stop_after=1)}
            told |= {note.payload for note in self._connection.notifies(timeout=0)}
        except psycopg.Error:
            self.close()
            time.sleep(_WAIT_S)
            return self._yes(True, True)
        if not told and time.monotonic() - self._yes_at > _ANYWAY_S:
            return self._yes(True, True)
        return self._yes(Lane.LOG.value in told, Lane.PROGRESS.value in told)

    def _yes(self, log: bool, progress: bool) -> tuple[bool, bool]:
        if log or progress:
            self._yes_at = time.monotonic()
        return log, progress

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
