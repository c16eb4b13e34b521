"""The clock of a queue in a file: all processes that have the file open go by one pace (I26).

The pace is a row of the log's file, written by the first process after the machine was started, and by the
first that sees a step of the wall clock; the others find it there. It is read when a store is opened and
when a step is seen, never on the way of a message. Where the start of the machine cannot be told, or clocks
are counted apart (a time namespace of its own), processes do not share: each begins at the wall clock.

Beside it is written when the queue was first opened since the machine was started: what was not flushed
before that may be forgotten, and members on other machines, served by a broker here, still go by it (I8).

Must never write within a transaction of somebody else: whoever reads the time may be in one.
"""

from __future__ import annotations

import json
import logging
import os
import threading

from ...clock import FURTHEST_MS, Pace, SteadyClock
from ...errors import PostroomError
from ..sql.log.volatile import boot_id
from ..sql.session import Area, Session, Transaction

__all__ = ["keep_steady", "read_pace"]

_log = logging.getLogger("postroom.store")

_NAME, _OPENED = "clock", "opened"
_LOOK = "SELECT value FROM postroom_settings WHERE name = ?"
_NEWEST = "SELECT MAX(appended_at) FROM postroom_partitions"


def keep_steady(session: Session, clock: SteadyClock) -> int:
    """Go by the file's pace, from now on; a new one if the machine was started since.

    Returns when the queue was first opened since then, by its own time; 0: it cannot be told.
    """
    machine = _machine()
    if not machine:
        return 0
    follower = _Follower(session, clock, machine)
    with session.read(Area.LOG) as tx:
        pace = _read(tx, machine)
    if pace is None or clock.step_ms(pace):
        follower.agree()
    else:
        clock.adopt(pace)
    clock.on_step = follower.seen
    return _first_opened(session, clock, machine)


def _first_opened(session: Session, clock: SteadyClock, machine: str) -> int:
    with session.read(Area.LOG) as tx:
        known = _read_opened(tx, machine)
    if known:
        return known
    with session.write(Area.LOG) as tx:
        known = _read_opened(tx, machine)  # another process may have been first
        if not known:
            known = clock.now_ms()
            upsert = tx.dialect.upsert("postroom_settings", ("name",), ("value",))
            tx.do(upsert, _OPENED, json.dumps([machine, known]))
    return known


def _read_opened(tx: Transaction, machine: str) -> int:
    row = tx.one(_LOOK, _OPENED)
    try:
        found = json.loads(str(row[0])) if row else [""]
        return int(found[1]) if found[0] == machine else 0
    except (ValueError, TypeError, LookupError):
        return 0  # damaged: it is written anew


class _Follower:
    def __init__(self, session: Session, clock: SteadyClock, machine: str) -> None:
        self._session, self._clock, self._machine = session, clock, machine
        self._busy = threading.Lock()

    def seen(self) -> None:
        """The wall clock was set: agree with the others about it, in a thread of its own."""
        if self._busy.acquire(blocking=False):
            threading.Thread(target=self._follow, name="postroom-clock", daemon=True).start()

    def _follow(self) -> None:
        try:
            self.agree()
        except PostroomError as error:  # looked at again before long
            _log.debug("the step of the wall clock is not written down yet: %s", error)
        finally:
            self._busy.release()

    def agree(self) -> None:
        """Take the pace that somebody wrote down since, or write one."""
        clock = self._clock
        with self._session.write(Area.LOG) as tx:
            kept = _read(tx, self._machine)
            if kept is not None and not clock.step_ms(kept):
                pace = kept
            else:
                pace = self._next(tx, kept)
                upsert = tx.dialect.upsert("postroom_settings", ("name",), ("value",))
                tx.do(upsert, _NAME, _encode(pace, self._machine))
        clock.adopt(pace)

    def _next(self, tx: Transaction, kept: Pace | None) -> Pace:
        steady, wall = self._clock.read()
        if kept is not None:
            _tell(wall - steady - kept.ahead_ms)
            return kept.after_step(steady, wall)
        newest = int((tx.one(_NEWEST) or (0,))[0] or 0)  # time does not go back over a restart
        return Pace(steady, max(wall, newest), wall - steady).after_step(steady, wall)


def _tell(step_ms: int) -> None:
    how = (
        "the queue's time follows slowly, and no lease ends for it"
        if abs(step_ms) <= FURTHEST_MS
        else "too far to be followed slowly: the queue's time is set, and messages in hand may come again"
    )
    _log.warning("the wall clock of this machine was set by %+.1f s: %s", step_ms / 1000, how)


def _machine() -> str:
    """This start of the machine, as far as its steady clock is the same for all; "" if it cannot be told."""
    boot = boot_id()
    try:
        return boot and f"{boot} {os.readlink('/proc/self/ns/time')}"
    except OSError:
        return boot


def _encode(pace: Pace, machine: str) -> str:
    return json.dumps([machine, pace.steady_ms, pace.queue_ms, pace.ahead_ms])


def _read(tx: Transaction, machine: str) -> Pace | None:
    row = tx.one(_LOOK, _NAME)
    return read_pace(str(row[0]), machine) if row else None


def read_pace(text: str, machine: str | None = None) -> Pace | None:
    """A pace as it is kept; None if it is of another start of the machine."""
    try:
        found = json.loads(text)
        return Pace(*map(int, found[1:])) if found[0] == (machine or _machine()) else None
    except (ValueError, TypeError, LookupError):
        return None  # damaged: it is written anew
