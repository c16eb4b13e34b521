"""An event loop on virtual time: asyncio's own, but for what it waits for.

Callbacks run in the order in which they were called for, as asyncio promises. What may come in any order
(other processes, threads, the network) does.
"""

from __future__ import annotations

import asyncio
import heapq
import weakref
from asyncio import base_events
from collections.abc import Callable, Coroutine
from typing import Any

from . import network
from .world import Fiber, Process, World, current_world

__all__ = ["SimLoop", "run_process"]


def _number(self: Any) -> int:
    """The hash of a future or task: sets of them have the same order every time."""
    try:
        return self._number  # type: ignore[no-any-return]
    except AttributeError:
        self._number = number = current_world().number()
        return number


class _NoTasks(weakref.WeakSet):  # type: ignore[type-arg]
    """In place of asyncio's set of all tasks, which nobody here asks for."""

    def add(self, task: Any) -> None:
        pass


asyncio.tasks._all_tasks.__class__ = _NoTasks


class _Future(asyncio.Future):  # type: ignore[type-arg]
    __hash__ = _number  # type: ignore[assignment]


class _Task(asyncio.Task):  # type: ignore[type-arg]
    __hash__ = _number  # type: ignore[assignment]


class SimLoop(base_events.BaseEventLoop):
    def __init__(self, world: World, fiber: Fiber) -> None:
        super().__init__()
        self._world, self._fiber = world, fiber
        self.set_task_factory(lambda loop, coro, **more: _Task(coro, loop=loop, **more))
        self.set_exception_handler(self._note)
        self.faults: list[dict[str, Any]] = []

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self._world.trace(f"the loop was told: {context.get('message')} {error!r}")
        if error is not None and self._world.failure is None:
            self._world.failure = error

    def time(self) -> float:
        return self._world.now_ns / 1e9

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def _write_to_self(self) -> None:
        self._world.wake(self._fiber)

    def call_soon_threadsafe(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> asyncio.Handle:
        handle = super().call_soon_threadsafe(callback, *args, **kwargs)
        if self._world.current is not None:  # the one that told may be overtaken by the one that is told
            self._world.step()
        return handle

    def deliver(self, callback: Callable[..., Any], *args: Any) -> None:
        """From outside of all fibers."""
        if not self._closed:
            self.call_soon(callback, *args)
            self._world.wake(self._fiber)

    def _run_once(self) -> None:
        scheduled, ready, world = self._scheduled, self._ready, self._world
        while scheduled and scheduled[0]._cancelled:
            self._timer_cancelled_count -= 1
            heapq.heappop(scheduled)._scheduled = False
        if not ready and not self._stopping:
            if not scheduled:
                world.block()
            elif scheduled[0]._when > (now := world.now_ns / 1e9):
                world.block(scheduled[0]._when - now + 1e-7)
        else:
            world.step()
        if scheduled:
            end = world.now_ns / 1e9 + 1e-9
            while scheduled and (scheduled[0]._when <= end or scheduled[0]._cancelled):
                handle = heapq.heappop(scheduled)
                handle._scheduled = False
                if handle._cancelled:
                    self._timer_cancelled_count -= 1
                else:
                    ready.append(handle)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def live(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run it to its end, in this fiber."""
        self._fiber.loop = self
        self._thread_id = None
        asyncio._set_running_loop(self)
        task = self.create_task(main)
        task.add_done_callback(lambda _: self.stop())
        while not self._stopping:
            self._run_once()
        self._stopping = False
        return task.result()

    # ---- threads ----

    def run_in_executor(self, executor: Any, function: Callable[..., Any], *args: Any) -> Any:
        done, world, process = self.create_future(), self._world, self._fiber.process

        def run() -> None:
            try:
                answer, error = function(*args), None
            except BaseException as raised:
                answer, error = None, raised
            self.call_soon_threadsafe(_answer, done, answer, error)

        world.spawn(process, f"{process.name}/executor", run)
        return done

    # ---- the network ----

    async def create_connection(  # type: ignore[override]
        self, factory: Callable[[], Any], host: str, port: int, **how: Any
    ) -> tuple[Any, Any]:
        return await network.connect(self, self._world, self._fiber.process, factory, host, port)

    async def sock_accept(self, listener: Any) -> Any:
        return await listener.accept(self)

    async def connect_accepted_socket(self, factory: Callable[[], Any], accepted: Any, **how: Any) -> Any:  # type: ignore[override]
        return accepted.adopt(self, factory())


def _answer(done: asyncio.Future[Any], answer: Any, error: BaseException | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(answer)
    else:
        done.set_exception(error)


def run_process(world: World, process: Process, main: Callable[[], Coroutine[Any, Any, Any]]) -> Fiber:
    """A process whose main thread runs a loop; when that ends, so does the process."""

    def run() -> None:
        loop = SimLoop(world, fiber)
        loop.live(main())
        world.trace("ends")
        world.kill(process)

    fiber = world.spawn(process, f"{process.name}/main", run)
    return fiber
