"""Looks into the store that many wait for: one looks, and all go on with what it found, in their order.

Appends of one producer come in the order of their sequences (I3), and must not overtake each other because
one of them had to look something up. Used in the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from typing import Any, Generic, TypeVar

from .errors import ClosedError

__all__ = ["SharedTask", "SingleFlight", "end"]


T = TypeVar("T")


class SingleFlight:
    def __init__(self, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._in_thread = in_thread
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}

    async def look(self, key: Hashable, known: T | None, function: Callable[..., T], *args: Any) -> T:
        """`known`: what it is, if that is known already; also then nobody who looks is overtaken."""
        looking = self._under_way.get(key)
        if looking is None:
            if known is not None:
                return known
            looking = self._under_way[key] = asyncio.ensure_future(self._in_thread(function, *args))
            looking.add_done_callback(lambda done: self._looked(key, done))
        found: T = await asyncio.shield(looking)
        return found

    def _looked(self, key: Hashable, done: asyncio.Future[Any]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # those who wait are told


# ---- ending ----
# Ending tasks for certain.
#
# One `cancel()` may not do: on Python 3.11 `asyncio.wait_for` swallows a cancel that arrives together
# with the result it waits for, and whoever then awaits the task waits for ever. Must never be used on a
# task that has something to finish: that one is awaited, not ended.

_AGAIN_SECONDS = 0.05


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks until they are done; what they raise is nobody's concern any more."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        done, running = await asyncio.wait(running, timeout=_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()


class SharedTask(Generic[T]):
    """One run of a coroutine at a time, which all who ask meanwhile wait for; the next one begins a new run.

    A caller that is cancelled does not end the run. `closed`: what those who wait are told when it is ended.
    """

    def __init__(self, run: Callable[[], Coroutine[Any, Any, T]], closed: str = "closed") -> None:
        self._run, self._closed = run, closed
        self._task: asyncio.Task[T] | None = None

    @property
    def under_way(self) -> bool:
        return self._task is not None and not self._task.done()

    def start(self) -> asyncio.Task[T]:
        """Return the run that is under way, or begin one."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._run())
            self._task.add_done_callback(_retrieved)
        return self._task

    async def result(self) -> T:
        """Wait for the run that is under way, or for a new one. ClosedError if it is ended."""
        task = self.start()
        await asyncio.wait((task,))
        if task.cancelled():
            raise ClosedError(self._closed)
        return task.result()

    async def settle(self) -> None:
        """Wait until nothing is under way, whatever comes of it."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    async def end(self) -> None:
        """Cancel what is under way."""
        if self._task is not None:
            await end((self._task,))


def _retrieved(task: asyncio.Task[Any]) -> None:
    """Those who wait are told of its error; there may be none."""
    if not task.cancelled():
        task.exception()
