"""Watching where the database cannot wake us: look, less and less often, until there is news.

Looks 5, 10, 20 … ms apart up to a cap, and 5 ms again after news (DESIGN, "Waiters"). A look is one cheap
read.
"""

from __future__ import annotations

import time

from ..config import Limits
from .session import Lane, Row, Session

__all__ = ["LookingWatcher"]

_LOG = """SELECT (SELECT value FROM postroom_settings WHERE name = 'catalog_version'),
                 (SELECT SUM(next_offset) FROM postroom_partitions),
                 (SELECT MIN(due_at) FROM postroom_schedule)"""
_PROGRESS = """SELECT SUM(next_new), SUM(settled), MIN(next_due), COUNT(*), MAX(holder_until)
               FROM postroom_progress"""


class LookingWatcher:
    """Implements `contract.Watcher`. For one thread."""

    def __init__(self, session: Session, limits: Limits) -> None:
        self._session = session
        self._limits = limits
        self._pause_ms = 0
        self._seen: tuple[Row | None, Row | None] | None = None

    def changed(self) -> tuple[bool, bool]:
        time.sleep(self._pause_ms / 1000)
        with self._session.read(Lane.LOG) as tx:
            now = (tx.one(_LOG), tx.one(_PROGRESS))
        before, self._seen = self._seen, now
        log, progress = (before is None or old != new for old, new in zip(before or now, now, strict=True))
        least = self._limits.watch_interval_ms
        self._pause_ms = (
            0 if log or progress else min(max(least, self._pause_ms * 2), self._limits.watch_cap_ms)
        )
        return log, progress

    def close(self) -> None:
        pass
