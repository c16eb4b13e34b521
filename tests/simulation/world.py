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
from typing import Any, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

__all__ = ["Fiber", "Process", "World", "WorldOver", "current_world", "here"]

T = TypeVar("T")

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
        "label",
        "loop",
        "mood",
        "name",
        "process",
        "serial",
        "waiting",
        "woken",
    )

    def __init__(self, process: Process, name: str, target: Callable[[], Any]) -> None:
        self.process, self.name, self.label = process, name, name.encode()
        self.glet = greenlet(target)
        self.loop: Any = None
        self.serial = 0  # of its waits: a timer of an earlier one is stale
        self.waiting = self.woken = self.done = False
        self.joiners: list[Fiber] = []
        self.error: BaseException | None = None
        self.mood: dict[str, Any] = {}


_world: World


def current_world() -> World:
    return _world


def here() -> Fiber | None:
    return _world.current


class World:
    def __init__(self, seed: int, *, until_s: float = 3600, steps: int = 3_000_000) -> None:
        self.seed, self.draw = seed, random.Random(seed)
        self.now_ns = _START_NS
        self.current: Fiber | None = None
        self.lines: list[str] = []
        self.folder = ""  # of its files, which has another name each time: it is left out of the lines
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
        self._kept: dict[str, Any] = {}
        self._numbers = 0
        global _world
        _world = self

    def number(self) -> int:
        """Return one that no other object of this world was given, for its hash."""
        self._numbers += 1
        return self._numbers

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """Return what the simulator keeps under this name for as long as this world lasts."""
        if name not in self._kept:
            self._kept[name] = make()
        found: T = self._kept[name]
        return found

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
        self._leave(fiber)
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
            self._leave(fiber)

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
        if process.alive:
            self._ready += process.stash
        process.stash.clear()

    # ---- running ----

    def run(self) -> None:
        """Until `finish` is called. WorldOver: it never will be."""
        while (fiber := self._next()) is not None:
            self._enter(fiber)
            fiber.glet.switch()
            self.current = None  # a fiber has ended, or found that there is none to go on
            _set_running_loop(None)
        if self.failure is not None:
            raise self.failure

    def _leave(self, fiber: Fiber) -> None:
        """Have the next one run; returns when it is this one's turn again."""
        self.current = None
        following = self._next()
        if following is None:
            self._hub.switch()
        elif following is fiber:
            self.current = fiber
        else:
            self._enter(following)
            following.glet.switch()

    def _enter(self, fiber: Fiber) -> None:
        self.current = fiber
        _set_running_loop(fiber.loop)

    def _next(self) -> Fiber | None:
        """Draw who goes on. None: nobody does any more."""
        ready, timers, draw = self._ready, self._timers, self.draw.random
        while not self._over and self.failure is None:
            self.steps += 1
            self.now_ns += _STEP_NS
            if timers and timers[0][0] <= self.now_ns:
                self._take_due()
            if not ready:
                if timers:
                    self.now_ns = timers[0][0]
                elif self.failure is None:
                    self.failure = WorldOver("nobody can go on: all wait for each other")
                continue
            if self.steps > self._most_steps or self.now_ns > self._end_ns:
                self.failure = WorldOver(f"not done after {self.elapsed_s:.0f} s and {self.steps} steps")
            at = int(draw() * len(ready))
            fiber = ready[at]
            ready[at] = ready[-1]
            ready.pop()
            process = fiber.process
            if process.paused:
                process.stash.append(fiber)
            elif process.alive and not fiber.done:
                self.digest = zlib.crc32(fiber.label, (self.digest ^ self.now_ns) & 0xFFFFFFFF)
                return fiber
        return None

    def _take_due(self) -> None:
        timers, now = self._timers, self.now_ns
        while timers and timers[0][0] <= now:
            _, _, fiber, what = heapq.heappop(timers)
            if fiber is None:
                try:
                    what()
                except Exception as error:  # in whatever fiber this is: the world ends
                    self.failure = error
            elif fiber.waiting and fiber.serial == what:
                fiber.waiting = False
                self._ready.append(fiber)

    def finish(self) -> None:
        self._over = True

    def trace(self, text: str) -> None:
        who = self.current.process.name if self.current is not None else "world"
        if self.folder:
            text = text.replace(self.folder, "")
        self.lines.append(f"{self.elapsed_s:11.6f} {who:10} {text}")
