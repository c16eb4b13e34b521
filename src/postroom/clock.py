"""Time, as an argument.

Nothing in `model/` reads a clock. Stores and brokers are given one: the system's, or one that a test
moves. Whoever waits until a moment subscribes, so that moving a manual clock wakes it.

A queue in a file or in memory goes by a `SteadyClock`: it begins at the wall clock's time and runs with the
machine's steady clock, so that a step of the wall clock moves no lease (I26). It follows such a step slowly,
by a quarter of the time that passes, so it never jumps and is not wrong for ever. `Pace` says where it is;
processes that share a file share a pace. A step that would take too long is taken at once: that is a machine
which had no idea of the time before.

The steady clock counts the time that a machine was suspended. Its holders were suspended too, but due moments
and the rest of the world were not: leases end during a suspension as they do while a process is stopped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from .config import DEFAULTS, StoreTuning

__all__ = [
    "FURTHEST_MS",
    "STEP_MS",
    "CautiousTime",
    "Clock",
    "ManualClock",
    "Pace",
    "SteadyClock",
    "SystemClock",
    "ToldClock",
    "is_real",
    "steady_ms",
    "steady_s",
    "wall_ms",
]

_FOLLOWS = 4  # a step is caught up with by one part in so many of the time that passes
FURTHEST_MS = 2 * 3_600_000  # a step by more is taken at once
STEP_MS = 1_000  # by less is no step
_DRIFT = 0.001  # how much faster or slower one of two clocks may run
_READINGS = 20  # of two clocks at most, until they were read at one moment


class Clock(Protocol):
    def now_ms(self) -> int:
        """Milliseconds since the epoch."""

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        """Call `moved` whenever time jumps; returns the call that ends the subscription."""


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


# A clock that never steps, the same for all processes of the machine.
if hasattr(time, "CLOCK_BOOTTIME"):
    steady_ns: Callable[[], int] = partial(time.clock_gettime_ns, time.CLOCK_BOOTTIME)
else:
    steady_ns = time.monotonic_ns


def steady_ms() -> int:
    return steady_ns() // 1_000_000


def steady_s() -> float:
    return steady_ns() / 1e9


class SystemClock:
    def now_ms(self) -> int:
        return wall_ms()

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


@dataclass(frozen=True, slots=True)
class Pace:
    """Where a steady clock's time is: at `queue_ms` when the machine's was `steady_ms`, and on its way to the
    wall clock, which is `ahead_ms` ahead of the machine's."""

    steady_ms: int
    queue_ms: int
    ahead_ms: int

    def at(self, steady_ms: int) -> int:
        """
        >>> Pace(0, 1_000, 61_000).at(40_000)  # set on by a minute: after 40 s, 50 have passed
        51000
        """
        ran = max(0, steady_ms - self.steady_ms)
        behind, most = self.steady_ms + self.ahead_ms - self.queue_ms, ran // _FOLLOWS
        return self.queue_ms + ran + max(-most, min(behind, most))

    def behind_ms(self, steady_ms: int) -> int:
        """How far the wall clock, as it was last seen, is ahead of it."""
        return steady_ms + self.ahead_ms - self.at(steady_ms)

    def after_step(self, steady_ms: int, wall_ms: int) -> Pace:
        """The wall clock was set: from here on it is on its way there, or there at once if that is far."""
        now = self.at(steady_ms)
        return Pace(steady_ms, now if abs(wall_ms - now) <= FURTHEST_MS else wall_ms, wall_ms - steady_ms)


class SteadyClock:
    """A clock that does not step. `on_step` is called by whoever reads the time after the wall clock was set:
    it must not wait, and sees to it that a new pace is adopted."""

    def __init__(
        self,
        wall: Callable[[], int] = wall_ms,
        steady: Callable[[], int] = steady_ms,
        tuning: StoreTuning = DEFAULTS.tuning.store,
    ) -> None:
        self._check_ms = tuning.wall_check_ms
        self.wall, self.steady = wall, steady
        now, there = self.read()
        self.pace = Pace(now, there, 0)
        self.stepped_ms = 0  # when its time was set by more than it follows slowly; 0: never
        self.adopt(Pace(now, self.pace.queue_ms, self.pace.queue_ms - now))
        self.on_step: Callable[[], None] = self.follow

    def now_ms(self) -> int:
        now = self.steady()
        if now >= self._look_at:
            self._look(now)
        return now + self._ahead_ms if now >= self._there_at else self.pace.at(now)

    def _look(self, now: int) -> None:
        self._look_at = now + self._check_ms
        if self.step_ms():
            self.on_step()

    def read(self) -> tuple[int, int]:
        """What both clocks said at one moment, the steady one first.

        A process may stand still between two readings. If it does so each time, then the steady clock is read
        late: it would be worse to be ahead of the wall clock, since then what is delayed came early (R35).
        """
        best = 2**62
        for _ in range(_READINGS):
            before = self.steady()
            wall = self.wall()
            after = self.steady()
            if after - before < best:
                best, found = after - before, (after, wall)
            if best <= 1:
                break
        return found

    def step_ms(self, pace: Pace | None = None) -> int:
        """By how much the wall clock was set since it was last looked at, or since that pace; 0: it was not.

        Two clocks cannot be read at once: only what lies outside of both readings is a step.
        """
        ahead = (pace or self.pace).ahead_ms
        before = self.steady()
        wall = self.wall()
        least, most = wall - self.steady() - ahead, wall - before - ahead
        return least if least > STEP_MS else most if most < -STEP_MS else 0

    def follow(self) -> None:
        """Go by the wall clock as it is now."""
        self.adopt(self.pace.after_step(*self.read()))

    def adopt(self, pace: Pace) -> None:
        if abs(pace.at(pace.steady_ms) - self.pace.at(pace.steady_ms)) > FURTHEST_MS // 2:
            self.stepped_ms = pace.queue_ms
        behind = abs(pace.behind_ms(pace.steady_ms))
        self._there_at, self._ahead_ms = pace.steady_ms + _FOLLOWS * behind, pace.ahead_ms  # the usual case
        self.pace, self._look_at = pace, pace.steady_ms + self._check_ms

    def subscribe(self, moved: Callable[[], None]) -> Callable[[], None]:
        return lambda: None


class CautiousTime:
    """Another's time, for what must not be done because that one's clock was set: deletions by age, or the
    end of a handling. To be read now and then.

    It is the same as long as that goes on as a steady clock does. Where it is ahead by more than that, it is
    followed by a quarter of the time that passes. One that was set back is taken at once.
    """

    def __init__(
        self,
        now_ms: Callable[[], int],
        steady: Callable[[], int] = steady_ms,
        doubted: Callable[[int], None] | None = None,
        tuning: StoreTuning = DEFAULTS.tuning.store,
    ) -> None:
        """`doubted` is told by how much that time is ahead, when it begins to be."""
        self._now_ms, self._steady, self._doubted = now_ms, steady, doubted
        self._believed_ms = tuning.believed_ms
        self._lock = threading.Lock()
        self._last: tuple[int, int] | None = None  # the steady clock's, and ours then
        self._ahead = False

    def now_ms(self) -> int:
        with self._lock:
            steady, now = self._steady(), self._now_ms()
            if self._last is not None:
                ran = max(0, steady - self._last[0])
                ahead_ms = now - self._last[1] - ran
                if ahead_ms > self._believed_ms and not self._ahead and self._doubted is not None:
                    self._doubted(ahead_ms)
                self._ahead = ahead_ms > self._believed_ms
                now = min(now, self._last[1] + ran + ran // _FOLLOWS) if self._ahead else now
            self._last = (steady, now)
            return now


class ToldClock:
    """Another's clock from memory: this machine's steady clock, set by what that one says (I16).

    Leases and due times are decided in transactions, by the time read there. This one is for everything that
    only has to be near: how long to wait, when a message was sent. A process whose own wall clock is wrong
    never notices. A clock that is set is noticed with its next answer, before anything is decided by it.

    What is kept is how far that clock is ahead of ours, between two bounds that each answer narrows. It was
    read between our question and the answer. An answer that was long under way has wide bounds, and spoils
    nothing.
    """

    def __init__(
        self, steady: Callable[[], float] = steady_s, set_by: Callable[[float], None] | None = None
    ) -> None:
        """`set_by` is told by how many milliseconds that clock was set."""
        self._steady, self._set_by = steady, set_by
        self.stepped_ms = 0  # its time when it was seen that it was set; 0: never
        self._lock = threading.Lock()
        self._low = self._high = 0.0  # milliseconds
        self._told_at: float | None = None

    def begin(self) -> float:
        """To be called before it is asked."""
        return self._steady()

    def told(self, told_ms: int, began: float) -> None:
        """It said so, somewhere between `began` and now."""
        now = self._steady()
        low, high = told_ms - now * 1000, told_ms + 1 - began * 1000  # it says whole milliseconds
        step = 0.0
        with self._lock:
            if self._told_at is not None:
                drift = (now - self._told_at) * 1000 * _DRIFT
                nearest, furthest = max(low, self._low - drift), min(high, self._high + drift)
                if nearest <= furthest:  # else that clock was set: what it says now counts
                    low, high = nearest, furthest
                else:
                    step = (nearest - furthest) * (1 if low > self._low else -1)
            self._low, self._high, self._told_at = low, high, now
            if abs(step) > STEP_MS:
                self.stepped_ms = told_ms
        if abs(step) > STEP_MS and self._set_by is not None:
            self._set_by(step)

    def now_ms(self) -> int | None:
        """Return its likely time; None: it has not said anything yet."""
        return self._between(0.5)

    def latest_ms(self) -> int | None:
        """Return what it has not passed yet, or only just."""
        return self._between(1.0)

    def reached_ms(self) -> int | None:
        """Return what it has reached for certain."""
        return self._between(0.0)

    def _between(self, share: float) -> int | None:
        with self._lock:
            if self._told_at is None:
                return None
            return int(self._steady() * 1000 + self._low + (self._high - self._low) * share)


def is_real(clock: Clock) -> bool:
    """Whether nobody moves it on purpose, as tests do."""
    return isinstance(clock, SystemClock | SteadyClock)


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
