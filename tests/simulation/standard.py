"""The standard library as the simulated code sees it: clocks, threads, queues, chance.

`install` puts these in place of the real ones in every module of Postroom, and nowhere else. It is the one
seam of the simulator: nothing in Postroom knows of it, so nothing has to be passed through.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import enum
import os
import queue
import random
import secrets
import socket
import sys
import threading
import time
import types
import uuid
from collections import deque
from collections.abc import Callable
from typing import Any

from .world import Fiber, current_world, here

__all__ = ["FiberMood", "Over", "install", "steady_hashes"]


# ---- clocks ----


def _monotonic() -> float:
    return current_world().now_ns / 1e9


def _monotonic_ns(_clock: int = 0) -> int:
    return current_world().now_ns


def _wall() -> float:
    return current_world().wall_ns() / 1e9


def _wall_ns() -> int:
    return current_world().wall_ns()


def _sleep(seconds: float) -> None:
    current_world().sleep(seconds)


# ---- threads ----


class Lock:
    """Not fair on purpose: whoever is drawn first gets it."""

    def __init__(self) -> None:
        self._owner: Fiber | None = None
        self._taken = False
        self._waiters: list[Fiber] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if not self._taken:
            self._taken = True
            return True
        if not blocking or timeout == 0:
            return False
        world, fiber = current_world(), here()
        assert fiber is not None, "nobody is there to wait"
        until = None if timeout < 0 else world.now_ns + int(timeout * 1e9)
        while self._taken:
            self._waiters.append(fiber)
            woken = world.block(None if until is None else max(0, until - world.now_ns) / 1e9)
            if not woken:
                self._waiters.remove(fiber)
                return False
        self._taken = True
        return True

    def release(self) -> None:
        if not self._taken:
            raise RuntimeError("release unlocked lock")
        self._taken = False
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            current_world().wake(waiter)

    def locked(self) -> bool:
        return self._taken

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()


class RLock:
    def __init__(self) -> None:
        self._lock = Lock()
        self._owner: Fiber | None = None
        self._times = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = here()
        if self._times and self._owner is me:
            self._times += 1
            return True
        if not self._lock.acquire(blocking, timeout):
            return False
        self._owner, self._times = me, 1
        return True

    def release(self) -> None:
        if self._owner is not here() or not self._times:
            raise RuntimeError("cannot release un-acquired lock")
        self._times -= 1
        if not self._times:
            self._owner = None
            self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *args: object) -> None:
        self.release()


class Event:
    def __init__(self) -> None:
        self._set = False
        self._waiters: list[Fiber] = []

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            current_world().wake(waiter)

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if self._set:
            return True
        fiber = here()
        assert fiber is not None, "nobody is there to wait"
        self._waiters.append(fiber)
        if not current_world().block(timeout) and fiber in self._waiters:
            self._waiters.remove(fiber)
        return self._set


class Thread:
    def __init__(
        self,
        group: None = None,
        target: Callable[..., Any] | None = None,
        name: str = "thread",
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self.name, self._args, self._kwargs = target, name, args, kwargs or {}
        self.daemon = daemon
        self._fiber: Fiber | None = None

    def run(self) -> None:
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def start(self) -> None:
        world, parent = current_world(), here()
        assert parent is not None, "a thread is started by a process"
        self._fiber = world.spawn(parent.process, f"{parent.process.name}/{self.name}", self.run)

    def is_alive(self) -> bool:
        return self._fiber is not None and not self._fiber.done

    def join(self, timeout: float | None = None) -> None:
        fiber, me = self._fiber, here()
        assert fiber is not None and me is not None, "started, and waited for by somebody"
        world = current_world()
        until = None if timeout is None else world.now_ns + int(timeout * 1e9)
        while not fiber.done:
            fiber.joiners.append(me)
            if not world.block(None if until is None else max(0, until - world.now_ns) / 1e9):
                return


class SimpleQueue:
    def __init__(self) -> None:
        self._items: deque[Any] = deque()
        self._waiters: list[Fiber] = []

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._items.append(item)
        if self._waiters:
            world = current_world()
            at = int(world.draw.random() * len(self._waiters))
            world.wake(self._waiters.pop(at))

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        fiber, world = here(), current_world()
        while not self._items:
            if not block:
                raise queue.Empty
            assert fiber is not None, "nobody is there to wait"
            self._waiters.append(fiber)
            if not world.block(timeout):
                if fiber in self._waiters:
                    self._waiters.remove(fiber)
                if not self._items:
                    raise queue.Empty
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


class FiberMood:
    """What `threading.local` is for threads, for `postroom.store.sql.session`."""

    @property
    def at_once(self) -> bool:
        fiber = here()
        return bool(fiber and fiber.mood.get("at_once"))

    @at_once.setter
    def at_once(self, value: bool) -> None:
        fiber = here()
        if fiber is not None:
            fiber.mood["at_once"] = value

    @property
    def emptying(self) -> bool:
        fiber = here()
        return bool(fiber and fiber.mood.get("emptying"))

    @emptying.setter
    def emptying(self, value: bool) -> None:
        fiber = here()
        if fiber is not None:
            fiber.mood["emptying"] = value


def _wait_for(futures: list[Any], timeout: float | None = None) -> None:
    """`concurrent.futures.wait`, as far as it is used: for one."""
    world, me = current_world(), here()
    assert me is not None, "nobody is there to wait"
    (one,) = futures
    if not one.done():
        one.add_done_callback(lambda _: world.wake(me))
        world.block(timeout)


# ---- chance ----


def _randbits(bits: int) -> int:
    return current_world().draw.getrandbits(bits)


def _token_bytes(count: int = 32) -> bytes:
    return current_world().draw.randbytes(count)


def _uuid4() -> uuid.UUID:
    return uuid.UUID(int=current_world().draw.getrandbits(128), version=4)


class _Chance(types.ModuleType):
    """`random`, drawing from the seed."""

    Random = random.Random

    def __getattr__(self, name: str) -> Any:
        return getattr(current_world().draw, name)


# ---- putting it in place ----


class Over(types.ModuleType):
    """A module with some of its names replaced."""

    def __init__(self, real: types.ModuleType, **names: Any) -> None:
        super().__init__(real.__name__)
        self.__dict__.update({k: v for k, v in vars(real).items() if not k.startswith("__")})
        self.__dict__.update(names)


def _fakes() -> dict[int, Any]:
    """By the id of what is replaced."""
    clock = {
        "monotonic": _monotonic,
        "monotonic_ns": _monotonic_ns,
        "perf_counter": _monotonic,
        "perf_counter_ns": _monotonic_ns,
        "thread_time": _monotonic,
        "time": _wall,
        "time_ns": _wall_ns,
        "sleep": _sleep,
    }
    threads = {"Thread": Thread, "Lock": Lock, "RLock": RLock, "Event": Event}
    chances = {
        "randbits": _randbits,
        "randbelow": lambda end: current_world().draw.randrange(end),
        "choice": lambda some: current_world().draw.choice(some),
        "token_bytes": _token_bytes,
        "token_hex": lambda count=32: _token_bytes(count).hex(),
        "token_urlsafe": lambda count=32: _token_bytes(count).hex(),
    }
    waiting = Over(concurrent.futures, wait=_wait_for)
    pairs: list[tuple[Any, Any]] = [
        (time, Over(time, **clock)),
        (threading, Over(threading, **threads)),
        (queue.SimpleQueue, SimpleQueue),
        (secrets, Over(secrets, **chances)),
        (random, _Chance("random")),
        (uuid, Over(uuid, uuid1=_uuid4, uuid4=_uuid4)),
        (concurrent, Over(concurrent, futures=waiting)),
        (os, Over(os, getpid=_pid, urandom=_token_bytes)),
        (socket, Over(socket, gethostname=_hostname, create_connection=_no_socket)),
    ]
    pairs += [(getattr(time, name), fake) for name, fake in clock.items()]
    return {id(real): fake for real, fake in pairs}


def _pid() -> int:
    fiber = here()
    return fiber.process.pid if fiber is not None else 1


def _hostname() -> str:
    fiber = here()
    return fiber.process.machine if fiber is not None else "nowhere"


def _no_socket(*args: Any, **kwargs: Any) -> Any:
    raise OSError("blocking sockets are not simulated")


def install() -> None:
    """The modules of Postroom that are loaded live in the current world from now on."""
    fakes = _fakes()
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] == "postroom" and module is not None:
            for key, value in list(vars(module).items()):
                fake = fakes.get(id(value))
                if fake is not None:
                    setattr(module, key, fake)
                if isinstance(value, type) and value.__module__ == name:
                    for function in vars(value).values():
                        _replace_defaults(function, fakes)
                _replace_defaults(value, fakes)


def _replace_defaults(function: Any, fakes: dict[int, Any]) -> None:
    """Defaults were bound when the module was loaded: a real sleep, in real time."""
    if not isinstance(function, types.FunctionType) or not function.__module__.startswith("postroom"):
        return
    if function.__defaults__:
        function.__defaults__ = tuple(fakes.get(id(one), one) for one in function.__defaults__)
    if function.__kwdefaults__:
        bound = function.__kwdefaults__.items()
        function.__kwdefaults__ = {name: fakes.get(id(one), one) for name, one in bound}


def steady_hashes() -> None:
    """Objects that are hashed by their address are hashed by a number: the order of sets is the seed's.

    For good, so only in a process of the simulator's own.
    """

    def number(self: Any) -> int:
        numbers = current_world().keep("numbers", dict[int, tuple[int, Any]])
        found = numbers.get(id(self))
        if found is None:  # kept alive: no other object gets its address
            found = numbers[id(self)] = (len(numbers) * 7919 + 1, self)
        return found[0]

    for kind in (asyncio.Event, asyncio.Lock, asyncio.Condition, asyncio.Semaphore, asyncio.Handle):
        if kind.__hash__ is object.__hash__:
            kind.__hash__ = number  # type: ignore[method-assign]
    for name, module in sorted(sys.modules.items()):
        if name.partition(".")[0] != "postroom" or module is None:
            continue
        for value in list(vars(module).values()):
            if (
                isinstance(value, type)
                and value.__module__ == name
                and value.__hash__ is object.__hash__
                and not issubclass(value, enum.Enum)
            ):
                try:
                    value.__hash__ = number  # type: ignore[method-assign]
                except TypeError:
                    pass
