"""Threads for handlers that are plain functions.

As many as the subscription's concurrency, made when they are first needed. Decides nothing. They are daemons:
a handler that hangs cannot be stopped, but must never keep the program from ending (concurrent.futures waits
for its threads at exit; that is why it is not used here).
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from ...errors import UsageError

__all__ = ["HandlerThreads", "refuse_awaitable"]


@dataclass(slots=True)
class _Job:
    work: Callable[[], None]
    context: contextvars.Context
    ended: asyncio.Future[BaseException | None]


class HandlerThreads:
    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = 0
        self._unfinished = 0  # jobs given to threads and not ended; also those nobody waits for any more

    async def run(self, work: Callable[[], None]) -> BaseException | None:
        """Run it in a thread; returns what it raised. Cancelling ends the wait, not the thread."""
        job = _Job(work, contextvars.copy_context(), self._loop.create_future())
        self._unfinished += 1
        if self._threads < min(self._unfinished, self._limit):
            self._threads += 1
            thread = threading.Thread(target=self._work, name=f"{self._name}-{self._threads}", daemon=True)
            thread.start()
        self._jobs.put(job)
        return await job.ended

    def close(self) -> None:
        """Threads end with what they are doing."""
        for _ in range(self._threads):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            raised: BaseException | None = None
            try:
                job.context.run(job.work)
            except BaseException as error:  # also SystemExit: it ends neither the thread nor the app
                raised = error
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._ended, job.ended, raised)
            del job, raised

    def _ended(self, ended: asyncio.Future[BaseException | None], raised: BaseException | None) -> None:
        self._unfinished -= 1
        if not ended.done():
            ended.set_result(raised)


def refuse_awaitable(returned: object) -> None:
    """A plain function that wraps a coroutine function has not done anything yet when it returns."""
    if inspect.isawaitable(returned):
        if inspect.iscoroutine(returned):
            returned.close()
        raise UsageError("the handler returned something to await: make it `async def` and await it there")
