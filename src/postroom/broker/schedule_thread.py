"""When the schedule's mover runs: in a thread of its own, not in the event loop, which a handler may block.

Decides nothing about messages. Sleeps until the next one is due; is woken by what this process schedules, by
news of other processes, and by a test's clock. What fails is tried again, more and more slowly.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ..errors import PostroomError
from .schedule import LOOK_MS, ScheduleMover

__all__ = ["ScheduleThread"]

_log = logging.getLogger("postroom.broker")

_AGAIN_MS = 20  # after a failure, doubled each time
_ALWAYS, _NEVER = 2**63, -1


class ScheduleThread:
    def __init__(self, mover: ScheduleMover, now_ms: Callable[[], int]) -> None:
        self._mover = mover
        self._now_ms = now_ms
        self._awake = threading.Event()
        self._stopping = False
        self._failures = 0
        self._next_look = _ALWAYS  # by the store's clock; what is due before that wakes us
        self._thread = threading.Thread(target=self._run, name="postroom-schedule", daemon=True)
        self._thread.start()

    def scheduled(self, due_at: int) -> None:
        """Something is due then. From any thread."""
        if due_at < self._next_look:
            self._awake.set()

    def clock_moved(self) -> None:
        """A test's clock: when this returns, what is due has been moved."""
        if not self._stopping:
            self._tick()
            self._awake.set()

    def stop(self) -> None:
        """Ends soon: at most a move that is under way is finished."""
        self._stopping = True
        self._awake.set()
        try:
            self._mover.stop()
        except PostroomError as error:
            _log.warning("the lease on the schedule is left to run out: %s", error)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._next_look = _ALWAYS
            self._awake.clear()
            pause_ms = self._tick()
            self._next_look = _NEVER if self._mover.refused else self._now_ms() + pause_ms
            self._awake.wait(pause_ms / 1000)

    def _tick(self) -> int:
        try:
            pause_ms = self._mover.tick()
        except PostroomError as error:
            if not self._failures:
                _log.warning("delayed messages wait, trying again: %s", error)
            self._failures += 1
            return int(min(LOOK_MS, _AGAIN_MS * 2 ** min(self._failures, 10)))
        except Exception:
            _log.exception("moving delayed messages failed in an unexpected way; it is tried again")
            return LOOK_MS
        self._failures = 0
        return pause_ms
