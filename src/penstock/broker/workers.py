"""A few threads for blocking work, with the answer in the event loop.

What `run_in_executor` does, with one hand-over each way and no second future: a poll or a settle is two of
them, and under light load they are most of its cost. Work is begun in the order it came. A caller that is
cancelled does not stop its work; its result is dropped.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, TypeVar

__all__ = ["Workers"]

T = TypeVar("T")

_Job = tuple["asyncio.Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Workers:
    def __init__(self, threads: int, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        done: asyncio.Future[T] = self._loop.create_future()
        self._jobs.put((done, function, args))
        return await done

    async def close(self) -> None:
        """Finish what was begun or waits, then end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            await asyncio.to_thread(thread.join)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
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
