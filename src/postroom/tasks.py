"""Tasks that many share, and tasks that must end.

For the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Iterable
from typing import Any, TypeVar

__all__ = ["SingleFlight", "end"]


T = TypeVar("T")


class SingleFlight:
    """One call for all who ask for the same at the same time: they go on with its result, in their order.

    Appends of one producer come in the order of their sequences (I3), and must not overtake each other
    because one of them had to look something up. `in_thread` runs the call; a caller that is cancelled does
    not end it.
    """

    def __init__(self, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._in_thread = in_thread
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}

    def busy(self, key: Hashable) -> bool:
        """Whether a call is under way for that key: whoever goes on without it overtakes those who wait."""
        return key in self._under_way

    async def look(self, key: Hashable, known: T | None, function: Callable[..., T], *args: Any) -> T:
        """The result of the function. What is `known` already is returned at once, unless a call is under
        way: nobody who waits for one is overtaken."""
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


_AGAIN_SECONDS = 0.05


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks until they are done; what they raise is nobody's concern any more.

    One `cancel()` may not do: on Python 3.11 `asyncio.wait_for` swallows a cancel that arrives together with
    the result it waits for, and whoever then awaits the task waits for ever. Must never be used on a task
    that has something to finish: that one is awaited, not ended.
    """
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        done, running = await asyncio.wait(running, timeout=_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()
