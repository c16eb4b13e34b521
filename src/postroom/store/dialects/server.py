"""What the dialects of database servers have in common.

All areas are one database, connections go stale, and time is the server's: read in a transaction where it
decides something, from memory elsewhere (I16).
"""

from __future__ import annotations

import logging
import os
import select
import socket
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cache
from typing import Any, ClassVar

from ...clock import Clock, ToldClock
from ...config import Limits
from ...errors import AccessDenied, StoreFull, StoreUnavailable
from ..sql.log.lone_append import LoneAppend, SentLone
from ..sql.session import Area

__all__ = ["ServerDialect"]

_log = logging.getLogger("postroom.store")

_SERVED = "the database of this queue {}: it is tried again; ask the operator of the brokers"
_NEVER = 2**62  # milliseconds
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
        self._time = ToldClock(set_by=self._was_set)

    def begin_read(self, area: Area) -> None:
        return None  # each has a connection

    def end_read(self, area: Area) -> None:
        return None

    def admit(self) -> None:
        return None  # a server's operator keeps room for it

    def make_room(self, *, emptying: bool) -> bool:
        return False

    def stored(self, area: Area, size: int) -> None:
        return None  # a server sees to its logs

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

    def send_lone(self, connection: Any, lone: LoneAppend) -> SentLone | None:
        return None

    def version(self, connection: Any) -> Hashable:
        raise AssertionError("nothing is quick on a server")

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

    def _lone_time(self, before: int) -> tuple[int, int, int] | None:
        """Return when a lone append is stored, not before that time, and the server's times that it is right
        at, the first and the last (I16); None: the server has not told its time."""
        now = self.time_ms()
        if now is None:
            return None
        if self.clock is not None:
            return max(before, now), 0, _NEVER
        return max(before, now), now - self.tuning.clock_slack_ms, now + self.tuning.clock_slack_ms

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
