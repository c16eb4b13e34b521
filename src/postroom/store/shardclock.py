"""The shard's clock from memory: the process's steady clock, set by what the server last said (I16).

Leases and due times are decided in transactions, by the time read there. This one is for everything that
only has to be near: how long to wait, when a message was sent. A process whose own wall clock is wrong
never notices. A server whose clock is set is noticed with its next answer, before anything is decided by it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..clock import STEP_MS, steady_s

__all__ = ["ShardClock"]

_DRIFT = 0.001  # how much faster or slower one of two clocks may run


class ShardClock:
    """How far the server's clock is ahead of ours, between two bounds that each answer narrows.

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
