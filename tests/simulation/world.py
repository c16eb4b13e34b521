"""One world, driven by one seed: fibers, virtual time, and what happened.

Whatever would be a thread or an event loop is a fiber (a greenlet), and one runs at a time. A fiber runs
until it has to wait; who goes on is drawn from the seed. Time stands still while code runs, but for a
little at each step, and jumps to the next timer when nobody is ready. Must never read a real clock or draw
from anything but `draw`: the same seed is the same world, byte for byte.
"""

from __future__ import annotations

import heapq
import random
import zlib
from asyncio import _set_running_loop
from collections.abc import Callable
from typing import Any

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Fiber", "Process", "World", "WorldOver", "current_world", "here"]

_STEP_NS = 2_000  # what a step of any fiber takes
_START_NS = 1_000_000_000_000
_EPOCH_NS = 1_700_000_000_000_000_000


class WorldOver(Exception):
    """Something is wrong with the world itself: nobody can go on, or it takes too long."""


class Process:
    """A process of a machine: its fibers live and die together."""

    def __init__(self, name: str, machine: str, pid: int) -> None:
        self.name, self.machine, self.pid = name, machine, pid
        self.alive, self.paused = True, False
        self.stash: list[Fiber] = []  # those that would go on if it were not paused
        self.on_death: list[Callable[[], None]] = []
        self.ended: Callable[[], None] = lambda: None

    def __repr__(self) -> str:
        return self.name


class Fiber:
    __slots__ = (
        "done",
        "error",
        "glet",
        "joiners",
        "loop",
        "mood",
        "name",
        "process",
        "serial",
        "waiting",
        "woken",
    )

    def __init__(self, process: Process, name: str, target: Callable[[], Any]) -> None:
        self.process, self.name = process, name
        self.glet = greenlet(target)
        self.loop: Any = None
        self.serial = 0  # of its waits: a timer of an earlier one is stale
        self.waiting = self.woken = self.done = False
        self.joiners: list[Fiber] = []
        self.error: BaseException | None = None
        self.mood: dict[str, Any] = {}


_worlds: list[World] = []


def current_world() -> World:
    return _worlds[-1]


def here() -> Fiber | None:
    return _worlds[-1].current if _worlds else None


class World:
    def __init__(self, seed: int, *, until_s: float = 3600, steps: int = 3_000_000) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.now_ns = _START_NS
        self.current: Fiber | None = None
        self.lines: list[str] = []
        self.digest = 0
        self.steps = 0
        self._most_steps, self._end_ns = steps, _START_NS + int(until_s * 1e9)
        self._ready: list[Fiber] = []
        self._timers: list[tuple[int, int, Fiber | None, Any]] = []
        self._count = 0
        self._hub = getcurrent()
        self._over = False
        self.wall_ahead_ns: dict[str, int] = {}  # by machine, how far its wall clock was set
        self.boots: dict[str, int] = {}
        self.processes: list[Process] = []
        self.failure: BaseException | None = None
        _worlds.append(self)

    # ---- time ----

    @property
    def elapsed_s(self) -> float:
        return (self.now_ns - _START_NS) / 1e9

    def monotonic_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        fiber = self.current
        ahead = self.wall_ahead_ns.get(fiber.process.machine, 0) if fiber is not None else 0
        return _EPOCH_NS + self.now_ns + ahead

    def call_at(self, at_ns: int, function: Callable[[], None]) -> None:
        """Call it then, in no fiber: it must not wait."""
        self._count += 1
        heapq.heappush(self._timers, (max(at_ns, self.now_ns), self._count, None, function))

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        self.call_at(self.now_ns + int(seconds * 1e9), function)

    # ---- fibers ----

    def process(self, name: str, machine: str) -> Process:
        process = Process(name, machine, 1000 + len(self.processes))
        self.processes.append(process)
        return process

    def spawn(self, process: Process, name: str, target: Callable[[], Any]) -> Fiber:
        def run() -> None:
            try:
                target()
            except GreenletExit:
                pass
            except BaseException as error:
                fiber.error = error
                self.failed(fiber, error)
            fiber.done = True
            for joiner in fiber.joiners:
                self.wake(joiner)

        fiber = Fiber(process, name, run)
        fiber.glet.parent = self._hub
        if process.alive:
            self._ready.append(fiber)
        return fiber

    def failed(self, fiber: Fiber, error: BaseException) -> None:
        """A thread ended with an error: that is a fault of whoever runs it."""
        if fiber.process.alive:
            self.trace(f"{fiber.name} ended with {error!r}")
            if self.failure is None:
                self.failure = error

    def block(self, seconds: float | None = None) -> bool:
        """Wait until somebody wakes this fiber, or for so long; returns whether somebody did."""
        fiber = self.current
        assert fiber is not None, "only a fiber can wait"
        fiber.serial += 1
        fiber.waiting, fiber.woken = True, False
        if seconds is not None:
            self._count += 1
            at = self.now_ns + max(0, int(seconds * 1e9))
            heapq.heappush(self._timers, (at, self._count, fiber, fiber.serial))
        self._hub.switch()
        return fiber.woken

    def wake(self, fiber: Fiber) -> None:
        if fiber.waiting:
            fiber.waiting, fiber.woken = False, True
            self._ready.append(fiber)

    def sleep(self, seconds: float) -> None:
        self.block(seconds)

    def step(self) -> None:
        """Let others run, if there are any: any of them, or this one again."""
        fiber = self.current
        if fiber is not None:
            self._ready.append(fiber)
            self._hub.switch()

    # ---- processes ----

    def kill(self, process: Process) -> None:
        """-9: nothing of it runs again, not even what it would do at its end."""
        if not process.alive:
            return
        process.alive = False
        process.stash.clear()
        for function in process.on_death:
            function()
        process.ended()

    def pause(self, process: Process) -> None:
        process.paused = True

    def resume(self, process: Process) -> None:
        process.paused = False
        self._ready += process.stash
        process.stash.clear()

    # ---- running ----

    def run(self) -> None:
        """Until `finish` is called. WorldOver: it never will be."""
        draw = self.draw.random
        while not self._over and self.failure is None:
            self.steps += 1
            self.now_ns += _STEP_NS
            self._take_due()
            ready = self._ready
            if not ready:
                if not self._timers:
                    raise WorldOver("nobody can go on: all wait for each other")
                self.now_ns = self._timers[0][0]
                continue
            if self.steps > self._most_steps or self.now_ns > self._end_ns:
                raise WorldOver(f"not done after {self.elapsed_s:.0f} s and {self.steps} steps")
            at = int(draw() * len(ready))
            fiber = ready[at]
            ready[at] = ready[-1]
            ready.pop()
            self._switch(fiber)
        if self.failure is not None:
            raise self.failure

    def _take_due(self) -> None:
        timers, now = self._timers, self.now_ns
        while timers and timers[0][0] <= now:
            _, _, fiber, what = heapq.heappop(timers)
            if fiber is None:
                what()
            elif fiber.waiting and fiber.serial == what:
                fiber.waiting = False
                self._ready.append(fiber)

    def _switch(self, fiber: Fiber) -> None:
        process = fiber.process
        if not process.alive or fiber.done:
            return
        if process.paused:
            process.stash.append(fiber)
            return
        self.digest = zlib.crc32(b"%d %s" % (self.now_ns, fiber.name.encode()), self.digest)
        self.current = fiber
        _set_running_loop(fiber.loop)
        fiber.glet.switch()
        _set_running_loop(None)
        self.current = None

    def finish(self) -> None:
        self._over = True

    def trace(self, text: str) -> None:
        who = self.current.process.name if self.current is not None else "world"
        self.lines.append(f"{self.elapsed_s:11.6f} {who:10} {text}")
