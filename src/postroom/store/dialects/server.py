"""What the dialects of database servers have in common.

All areas are one database, connections go stale, and time is the server's: read in a transaction where it
decides something, from memory elsewhere (I16).
"""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

from ...clock import STEP_MS, Clock, steady_s
from ...config import Limits
from ...errors import AccessDenied, StoreFull, StoreUnavailable
from ..sql.session import Area, Row, Session

__all__ = ["LookingWatcher", "ServerDialect", "ShardClock"]


_DRIFT = 0.001  # how much faster or slower one of two clocks may run


class ShardClock:
    """The shard's clock from memory: the process's steady clock, set by what the server last said (I16).

    Leases and due times are decided in transactions, by the time read there. This one is for everything that
    only has to be near: how long to wait, when a message was sent. A process whose own wall clock is wrong
    never notices. A server whose clock is set is noticed with its next answer, before anything is decided by
    it.

    What is kept is how far the server's clock is ahead of ours, between two bounds that each answer narrows.
    The server read its clock between our question and its answer. An answer that waited for a lock in between
    has wide bounds, and spoils nothing.
    """

    def __init__(
        self, steady: Callable[[], float] = steady_s, set_by: Callable[[float], None] | None = None
    ) -> None:
        """`set_by` is told by how many milliseconds the server's clock was set."""
        self._steady, self._set_by = steady, set_by
        self.stepped_ms = 0  # the server's time when it was seen that its clock was set; 0: never
        self._lock = threading.Lock()
        self._low = self._high = 0.0  # milliseconds
        self._told_at: float | None = None

    def begin(self) -> float:
        """To be called before the server is asked."""
        return self._steady()

    def told(self, shard_ms: int, began: float) -> None:
        """The server said so, somewhere between `began` and now."""
        now = self._steady()
        low, high = shard_ms - now * 1000, shard_ms + 1 - began * 1000  # it says whole milliseconds
        step = 0.0
        with self._lock:
            if self._told_at is not None:
                drift = (now - self._told_at) * 1000 * _DRIFT
                nearest, furthest = max(low, self._low - drift), min(high, self._high + drift)
                if nearest <= furthest:  # else its clock was set: what it says now counts
                    low, high = nearest, furthest
                else:
                    step = (nearest - furthest) * (1 if low > self._low else -1)
            self._low, self._high, self._told_at = low, high, now
            if abs(step) > STEP_MS:
                self.stepped_ms = shard_ms
        if abs(step) > STEP_MS and self._set_by is not None:
            self._set_by(step)

    def now_ms(self) -> int | None:
        """None: the server has not said anything yet."""
        with self._lock:
            if self._told_at is None:
                return None
            return round(self._steady() * 1000 + (self._low + self._high) / 2)


_log = logging.getLogger("postroom.store")

_SERVED = "the database of this queue {}: it is tried again; ask the operator of the brokers"
_SILENT = ("no answer", "timed out", "timeout expired")


class ServerDialect(ABC):
    offset = "BIGINT"
    for_update = " FOR UPDATE"
    areas: tuple[Area, ...] = (Area.LOG,)
    pooled = True
    shows_flushed = True
    quick = False
    commits_lone = True
    one_connection = False

    failures: ClassVar[tuple[type[Exception], ...]]  # the driver's
    now: ClassVar[str]  # reads the server's clock, in milliseconds
    replica: ClassVar[str]  # what a server that takes no writes is called
    on_conflict: ClassVar[str]  # of an upsert, with `{key}`, and its change of a `{column}`
    change_column: ClassVar[str]

    def __init__(self, shown: str, clock: Clock | None, limits: Limits) -> None:
        self.shown = shown  # the address without its password
        self.clock = clock  # of a test; else the server's
        self._limits, self.tuning = limits, limits.tuning.store
        self._time = ShardClock(set_by=self._was_set)

    def begin_read(self, area: Area) -> None:
        return None  # each has a connection

    def end_read(self, area: Area) -> None:
        return None

    def admit(self) -> None:
        return None  # a server's operator keeps room for it

    def make_room(self, *, emptying: bool) -> bool:
        return False

    @abstractmethod
    def _fileno(self, connection: Any) -> int: ...

    def cut(self, connection: Any) -> None:
        with (
            suppress(OSError, ValueError, AttributeError, *self.failures),  # it has ended already
            socket.socket(fileno=os.dup(self._fileno(connection))) as line,
        ):
            line.shutdown(socket.SHUT_RDWR)

    def seems_gone(self, connection: Any) -> bool:
        """Something came unasked: the end of the connection, most likely."""
        asked = select.poll()
        asked.register(self._fileno(connection), select.POLLIN)
        return bool(asked.poll(0))

    # ---- statements ----

    @cache  # noqa: B019 - one dialect per store, some hundred statements
    def sql(self, text: str) -> str:
        """Return a statement in the driver's own style."""
        return text.replace("?", "%s")

    @cache  # noqa: B019
    def _locking(self, text: str) -> str:
        """Return a SELECT in the driver's own style that locks what it finds."""
        return f"{self.sql(text)}{self.for_update}"

    @abstractmethod
    def ask(self, connection: Any, sql: str, args: Sequence[Any]) -> Any: ...

    @cache  # noqa: B019
    def upsert(self, table: str, key: tuple[str, ...], columns: tuple[str, ...]) -> str:
        names = (*key, *columns)
        changes = ", ".join(self.change_column.format(column=column) for column in columns)
        return (
            f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))}) "
            f"{self.on_conflict.format(key=', '.join(key))} {changes}"
        )

    # ---- time ----

    def now_ms(self, connection: Any) -> int:
        began = self._time.begin()
        now = int(self.ask(connection, self.now, ()).fetchone()[0])
        self._time.told(now, began)
        return now

    def stepped_ms(self) -> int:
        return self._time.stepped_ms if self.clock is None else 0

    def _was_set(self, step_ms: float) -> None:
        how = (
            "leases that ended by it are kept for one lease more, for their holders to renew"
            if step_ms > 0
            else "leases of those who are gone are cut to what they would be now"
        )
        _log.warning("the clock of %s was set by %+.1f s: %s", self.shown, step_ms / 1000, how)

    def time_ms(self) -> int | None:
        return self._time.now_ms() if self.clock is None else self.clock.now_ms()

    # ---- errors that read the same everywhere ----

    def _read_only(self) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.shown} takes no writes (a {self.replica}, or set to read-only): name the primary in the "
            "address, or wait until it is one again",
            reason="read_only",
            _served=_SERVED.format("takes no writes now"),
        )

    def _unreachable(self, said: str, **details: Any) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.shown} cannot be reached ({said}); check host and port, and that the server runs",
            reason=_reason(said),
            _served=_SERVED.format("cannot be reached"),
            **details,
        )

    def _ended(self, said: str, **details: Any) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.shown} ended the connection ({said}); it is tried again",
            reason="lost",
            _served=_SERVED.format("ended the connection"),
            **details,
        )

    def _crowded(self, said: str, limits: str, **details: Any) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.shown} takes no more connections ({said}): close some, or raise the server's limit "
            f"({limits})",
            reason="crowded",
            _served=_SERVED.format("takes no more connections"),
            **details,
        )

    def _no_database(self, said: str, **details: Any) -> AccessDenied:
        return AccessDenied(f"{self.shown}: {said}; create the database, or correct its name", **details)

    def _full(self, said: str) -> StoreFull:
        return StoreFull(
            f"{self.shown} has no space left ({said}): free some, then try again; nothing was stored",
            _served="the database of this queue has no space left, and nothing was stored: ask the operator "
            "of the brokers to free some, then try again",
        )


def _reason(said: str) -> str:
    """Why a server cannot be reached, for those who tell people of it; drivers have no code for it."""
    if "refused" in said.lower():
        return "refused"
    return "no_answer" if any(words in said for words in _SILENT) else "unreachable"


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
