"""Tasks that many share, and tasks that must end.

For the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Hashable, Iterable
from typing import Any, Generic, TypeVar

from .errors import ClosedError

__all__ = ["SharedTask", "SingleFlight", "end"]


T = TypeVar("T")


class _Flight:
    """A call that is under way, or was just now: not all who waited for it have gone on yet."""

    __slots__ = ("call", "places", "waiting")

    def __init__(self, call: asyncio.Future[Any]) -> None:
        self.call, self.waiting = call, 0
        self.places: list[asyncio.Future[None]] = []  # of those who wait for its end, in their order


class SingleFlight:
    """One call for all who ask for the same at the same time: they go on with its result, in their order.

    Appends of one producer come in the order of their sequences (I3), and must not overtake each other
    because one of them had to look something up. Whoever comes after the call has ended, and before the last
    of those who waited for it has gone on, goes on behind them. `in_thread` runs the call; a caller that is
    cancelled does not end it.
    """

    def __init__(self, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._in_thread = in_thread
        self._flights: dict[Hashable, _Flight] = {}

    def busy(self, key: Hashable) -> bool:
        """Whether somebody waits for that key: whoever goes on without waiting overtakes."""
        return key in self._flights

    async def look(self, key: Hashable, known: T | None, function: Callable[..., T], *args: Any) -> T:
        """The result of the function. What is `known` already is returned at once, unless somebody waits."""
        flight = self._flights.get(key)
        if flight is None:
            if known is not None:
                return known
            call = asyncio.ensure_future(self._in_thread(function, *args))
            flight = self._flights[key] = _Flight(call)
            call.add_done_callback(lambda done: self._ended(key, flight))
        loop = asyncio.get_running_loop()
        place: asyncio.Future[None] = loop.create_future()
        if flight.call.done():
            loop.call_soon(_go_on, place)  # those who waited before are woken in this turn of the loop
        else:
            flight.places.append(place)
        flight.waiting += 1
        try:
            await place
            found: T = flight.call.result()
            return found
        finally:
            flight.waiting -= 1
            self._forget(key, flight)

    def _ended(self, key: Hashable, flight: _Flight) -> None:
        if not flight.call.cancelled():
            flight.call.exception()  # those who wait are told
        for place in flight.places:
            _go_on(place)
        self._forget(key, flight)  # if all were cancelled

    def _forget(self, key: Hashable, flight: _Flight) -> None:
        if not flight.waiting and flight.call.done() and self._flights.get(key) is flight:
            del self._flights[key]


def _go_on(place: asyncio.Future[None]) -> None:
    if not place.done():
        place.set_result(None)


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
