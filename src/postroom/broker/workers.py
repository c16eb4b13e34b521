"""A few threads for blocking work, with the answer in the event loop.

What `run_in_executor` does, with one hand-over each way and no second future: a poll or a settle is two of
them, and under light load they are most of its cost. Work for the same key is begun in the order it came,
and keys take turns, so that a group that asks for much does not delay the others (R41). A caller that is
cancelled does not stop its work; its result is dropped.

Where the store needs no server, work that is short is done at once, in the event loop, while the threads have
nothing to do: a hand-over costs more than the work itself. Must never wait there: work that would have to is
begun anew in a thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable
from queue import SimpleQueue
from typing import Any, TypeVar

from ..store.contract.values import AtOnce

__all__ = ["Workers"]

T = TypeVar("T")

_Job = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]
_END = object()


class Workers:
    def __init__(self, threads: int, name: str, at_once: AtOnce | None = None) -> None:
        self.threads = threads
        self._at_once = at_once
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._jobs: dict[Hashable, deque[_Job]] = {}  # what waits, by key; never empty
        self._turns: SimpleQueue[Hashable] = SimpleQueue()  # each key of `_jobs` once
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """For nobody in particular: it has a turn of its own."""
        return await self.run_for(object(), function, *args)

    def run_here(self, function: Callable[..., T], *args: Any) -> T | None:
        """The answer of short work that is done at once, in the event loop; None: leave it to a thread.

        WouldWaitError: it was begun, and is to be begun anew in a thread. To hand work to a thread and back
        costs a fifth of the CPU of a poll and an ack on SQLite (`bench.mechanisms`).
        """
        if self._at_once is None or self._jobs:
            return None
        with self._at_once():
            return function(*args)

    async def run_for(self, key: Hashable, function: Callable[..., T], *args: Any) -> T:
        """The answer of work that is done in a thread, after what came before it under that key."""
        done: asyncio.Future[T] = self._loop.create_future()
        job = (done, function, args)
        with self._lock:
            waiting = self._jobs.get(key)
            if waiting is None:
                self._jobs[key] = deque((job,))
                self._turns.put(key)
            else:
                waiting.append(job)
        return await done

    async def close(self) -> None:
        """Finish what was begun or waits, then end the threads."""
        for _ in self._threads:
            self._turns.put(_END)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _next(self) -> _Job | None:
        """Of the key whose turn it is; if more waits for it, that comes after all other keys."""
        while True:
            key = self._turns.get()
            with self._lock:
                if key is _END:
                    if not self._jobs:
                        return None
                    self._turns.put(_END)  # behind what waits
                    continue
                waiting = self._jobs[key]
                job = waiting.popleft()
                if waiting:
                    self._turns.put(key)
                else:
                    del self._jobs[key]
                return job

    def _run(self) -> None:
        while (job := self._next()) is not None:
            done, function, args = job
            try:
                answer, error = function(*args), None
            except BaseException as raised:
                answer, error = None, raised
            self._loop.call_soon_threadsafe(_answer, done, answer, error)
            del job, done, function, args, answer, error  # nothing is kept alive while the thread waits


def _answer(done: asyncio.Future[Any], answer: Any, error: BaseException | None) -> None:
    if done.done():  # its caller was cancelled
        return
    if error is None:
        done.set_result(answer)
    else:
        done.set_exception(error)
