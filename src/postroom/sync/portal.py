"""The way from plain threads into an event loop: calls, futures and iterators.

Decides how a blocking call ends: with the answer, with its error, or interrupted (Ctrl-C), and then the call
is cancelled in the loop before the interruption goes on. Must never block an event loop, never wait for a
loop of the parent process after fork, and never hold up a thread that only collects garbage.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import inspect
import os
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from ..config import DEFAULTS
from ..errors import ClosedError, ForkError, UsageError

__all__ = ["LoopThread", "Portal", "PostFuture", "Pump", "loop_factory", "refuse_running_loop"]

_READ_AHEAD = 1000  # items a pump may have waiting


class Portal:
    """The way into an event loop that runs in another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, wrap: Callable[[Portal, Any], Any]) -> None:
        self._let_go_s = DEFAULTS.tuning.client.interrupted_s
        self._loop = loop
        self._wrap = wrap  # what a call returned, in its blocking form
        self._pid = os.getpid()
        self.closed = False

    def check(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(
                "this connection was opened before a fork and belongs to the parent process: "
                "connect again in the child"
            )
        if self.closed:
            raise ClosedError("this connection is closed: connect again")
        refuse_running_loop()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it in the loop, wait for what it returns, and give that back in its blocking form."""
        self.check()
        done: concurrent.futures.Future[Any] = concurrent.futures.Future()
        tasks: list[asyncio.Task[None]] = []

        def begin() -> None:
            tasks.append(self._loop.create_task(self._run(done, function, args, kwargs)))

        try:
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            raise ClosedError("this connection is closed: connect again") from None
        try:
            return done.result()
        except BaseException:
            if not done.done():  # the wait was interrupted, not the call: let it go, then tell
                self._loop.call_soon_threadsafe(lambda: tasks[0].cancel())
                concurrent.futures.wait((done,), timeout=self._let_go_s)
            raise

    async def _run(
        self,
        done: concurrent.futures.Future[Any],
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        try:
            result = function(*args, **kwargs)
            if inspect.iscoroutine(result):
                result = await result
            done.set_result(self._wrap(self, result))
        except asyncio.CancelledError:
            done.set_exception(concurrent.futures.CancelledError())
            raise
        except Exception as error:
            done.set_exception(error)

    def end(self) -> None:
        """The loop is somebody else's: only the way into it ends."""
        self.closed = True

    def soon(self, function: Callable[[], Any]) -> None:
        """Call it in the loop, and do not wait: also from a thread that must not wait."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it what was to be done
            self._loop.call_soon_threadsafe(function)


class LoopThread(Portal):
    """An event loop in a thread of its own, and the way into it."""

    def __init__(self, wrap: Callable[[Portal, Any], Any]) -> None:
        started: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
        # A daemon: a program that forgot to close must be able to end.
        self._thread = threading.Thread(target=self._live, args=(started,), name="postroom-loop", daemon=True)
        self._thread.start()
        super().__init__(started.result(), wrap)

    def _live(self, started: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
        async def live() -> None:
            self._ended = asyncio.Event()
            started.set_result(asyncio.get_running_loop())
            await self._ended.wait()

        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(live())

    def end(self) -> None:
        """End the loop with everything in it."""
        if not self.closed:
            self.closed = True
            self.soon(self._ended.set)
        self._thread.join()


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it exists."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def refuse_running_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise UsageError("postroom.sync would block this event loop: use postroom.connect here, with await")


class PostFuture(concurrent.futures.Future[Any]):
    """The receipt of a posted message. Whoever looks at a failure is told of it here, and only here."""

    def __init__(self, posted: asyncio.Future[Any]) -> None:
        super().__init__()
        self._posted = posted
        self.set_running_or_notify_cancel()  # what was posted cannot be taken back
        posted.add_done_callback(self._resolved)

    def _resolved(self, posted: asyncio.Future[Any]) -> None:
        error = concurrent.futures.CancelledError() if posted.cancelled() else posted._exception
        if error is None:
            self.set_result(posted.result())
        else:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self.exception(timeout)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        found = super().exception(timeout)
        if found is not None and not self._posted.cancelled():
            self._posted.exception()  # looked at: leaving the producer does not raise it again
        return found


class Pump:
    """Runs ahead of a plain iterator, so that not every message is a trip between threads."""

    def __init__(self, open_iterator: Callable[[], AsyncGenerator[Any, None]]) -> None:
        self._open = open_iterator
        self._items: deque[Any] = deque()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def take(self) -> list[Any]:
        """What is there, at least one; nothing at the end."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        while not self._items and not self._task.done():
            self._changed.clear()
            await self._changed.wait()
        if not self._items:
            self._task.result()
        items = list(self._items)
        self._items.clear()
        self._changed.set()
        return items

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            async with contextlib.aclosing(self._open()) as iterator:
                async for item in iterator:
                    self._items.append(item)
                    self._changed.set()
                    while len(self._items) >= _READ_AHEAD:
                        self._changed.clear()
                        await self._changed.wait()
        finally:
            self._changed.set()
