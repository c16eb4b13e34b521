"""Turns: one writer at a time, threads by a lock, processes by an advisory lock on a side file.

It is for fairness only: SQLite's own lock is what keeps the data right, but its busy handler sleeps and
starves some of many processes (I19). Waiting is bounded: a process stopped while it holds the side lock
must not hang the others; after the limit they go on to BEGIN IMMEDIATE, whose own time-out gives a clear
error, and threads behind them give up by themselves (I15).
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

from ..config import Limits
from .private import open_private

try:
    import fcntl
except ImportError:  # pragma: no cover - not on Windows
    fcntl = None  # type: ignore[assignment]

__all__ = ["Turn"]

_PAUSE_S = 0.0005


class Turn:
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
        deadline = time.monotonic() + self._limits.side_lock_ms / 1000
        while True:
            try:
                return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return None
                time.sleep(_PAUSE_S)

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
