"""Time, as an argument.

Nothing in `model/` reads a clock. Stores and brokers are given one: the system's, or one that a test
moves. Whoever waits until a moment subscribes, so that moving a manual clock wakes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch."""

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        """Call `moved` whenever time jumps; returns the call that ends the subscription."""


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class ManualClock:
    """A clock that stands still until a test moves it."""

    def __init__(self, start_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = start_ms
        self._listeners: list[Callable[[], None]] = []

    def now_ms(self) -> int:
        return self._now_ms

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now_ms += round(seconds * 1000)
        for moved in list(self._listeners):
            moved()

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        self._listeners.append(moved)
        return lambda: self._listeners.remove(moved)
