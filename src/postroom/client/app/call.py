"""Calling a handler once, whatever kind of function it is, with the app's middleware around it.

    @app.middleware
    async def session(message):             # a generator: before, yield, after
        async with Session() as current:
            yield

    @app.middleware
    async def timed(message, call_next):    # or a call around the call
        return await call_next()

Decides what counts as the handler's own ending: everything it raises, also a CancelledError of something it
waited for, and its timeout; not that its lane was cancelled, nor that the program ends. A plain function runs
in a thread and cannot be cancelled: its timeout is only told, and what it did counts, since to retry work
that was done would double it. Who asked (R38) is answered when all of that has ended. Must never settle
anything.

Decides the order of middleware, as registered: the first is the outermost. What a handler raises passes
through all of it and counts as the handler's own ending; so does what a middleware raises, and one that
swallows the error or does not call on has handled the message. A middleware of a batch handler gets the list.
A coroutine function runs in the event loop, around every handler. A plain function runs in the handler's own
thread, around handlers that are plain functions: for what belongs to a thread. Must never run a handler
twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import inspect
import logging
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from time import monotonic
from typing import Any

from ...errors import UsageError
from ..message import Received
from ..tracing import by_app
from .handler import Failed, Handler
from .subscription import Subscription

__all__ = [
    "Caller",
    "HandlerThreads",
    "Middleware",
    "around",
    "around_plain",
    "being_cancelled",
    "middleware_of",
    "refuse_awaitable",
    "refuse_unused",
]


Next = Callable[[], Awaitable[Any]]
PlainNext = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Middleware:
    name: str
    plain: bool  # runs in the handler's thread
    call: Callable[..., Any]  # with the message, or the list, and what to call next
    own_kind: bool = False  # around handlers of its own kind only; no mistake if there are none


def middleware_of(function: Callable[..., Any]) -> Middleware:
    """Look at a function, and make it one that is given what to call next."""
    if not callable(function):
        raise UsageError(f"a middleware is a function, not {type(function).__name__}")
    name = getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
    if inspect.isasyncgenfunction(function):
        _check(function, name, 1, "(message) with one yield in it")
        return Middleware(name, False, _of_generator(function))
    if inspect.isgeneratorfunction(function):
        _check(function, name, 1, "(message) with one yield in it")
        return Middleware(name, True, _of_plain_generator(function))
    _check(function, name, 2, "(message, call_next)")
    called = function if inspect.isroutine(function) else getattr(function, "__call__")  # noqa: B004, B009
    return Middleware(name, not inspect.iscoroutinefunction(called), function)


def _check(function: Callable[..., Any], name: str, count: int, shape: str) -> None:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        raise UsageError(f"middleware {name} cannot be called so: write it as {name}{shape}") from None


def refuse_unused(layers: Sequence[Middleware], handlers: Sequence[Handler]) -> None:
    """A plain middleware in an app that has only coroutine handlers would never run: a mistake."""
    if all(handler.is_async for handler in handlers):
        for layer in layers:
            if layer.plain and not layer.own_kind and handlers:
                raise UsageError(
                    f"middleware {layer.name} is a plain function, which is for handlers that are plain "
                    "functions, and this app has none: make it `async def`"
                )


# ---- around a handler ----


def around(layers: Sequence[Middleware], given: Any, handle: Next) -> Next:
    """The handler with these around it; `given` is the message, or the list."""
    following = handle
    for layer in reversed(layers):
        following = _layered(layer, given, following)
    return following


def _layered(layer: Middleware, given: Any, inner: Next) -> Next:
    async def call() -> Any:
        step = _Step(layer.name)

        async def call_next() -> Any:
            step.begin()
            step.returned = await inner()
            return step.returned

        return step.result(await layer.call(given, call_next))

    return call


def around_plain(layers: Sequence[Middleware], given: Any, handle: PlainNext) -> PlainNext:
    """The same in a handler's thread."""
    following = handle
    for layer in reversed(layers):
        following = _layered_plain(layer, given, following)
    return following


def _layered_plain(layer: Middleware, given: Any, inner: PlainNext) -> PlainNext:
    def call() -> Any:
        step = _Step(layer.name)

        def call_next() -> Any:
            step.begin()
            step.returned = inner()
            return step.returned

        return step.result(layer.call(given, call_next))

    return call


class _Step:
    """One middleware around one call."""

    __slots__ = ("begun", "name", "returned")

    def __init__(self, name: str) -> None:
        self.name = name
        self.begun = False
        self.returned: Any = None

    def begin(self) -> None:
        if self.begun:
            raise UsageError(f"middleware {self.name} called call_next() twice: a handler runs once")
        self.begun = True

    def result(self, own: Any) -> Any:
        """A middleware that returns nothing leaves what the handler returned."""
        return self.returned if own is None else own


# ---- generators ----


def _of_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    block = asynccontextmanager(function)

    async def call(given: Any, call_next: Next) -> None:
        async with block(given):
            await call_next()

    return call


def _of_plain_generator(function: Callable[..., Any]) -> Callable[..., Any]:
    block = contextmanager(function)

    def call(given: Any, call_next: PlainNext) -> None:
        with block(given):
            call_next()

    return call


# ---- threads ----


@dataclass(slots=True)
class _Job:
    work: Callable[[], None]
    context: contextvars.Context
    ended: asyncio.Future[BaseException | None]


class HandlerThreads:
    """Threads for handlers that are plain functions.

    As many as the subscription's concurrency, made when they are first needed. They are daemons: a handler
    that hangs cannot be stopped, but must never keep the program from ending (concurrent.futures waits for
    its threads at exit; that is why it is not used here).
    """

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


log = logging.getLogger("postroom.app")


class Caller:
    def __init__(
        self,
        subscription: Subscription,
        for_thread: Callable[[Received], Any],
        middleware: Sequence[Middleware] = (),
    ) -> None:
        self._subscription = subscription
        is_async = subscription.handler.is_async
        self._layers = [one for one in middleware if not one.plain and (is_async or not one.own_kind)]
        self._plain_layers = [layer for layer in middleware if layer.plain]
        self._for_thread = for_thread  # a message as a plain function gets it
        handler = subscription.handler
        self._threads = (
            None if handler.is_async else HandlerThreads(subscription.concurrency, f"postroom-{handler.name}")
        )

        timeout_s, answering = subscription.timeout_s, subscription.answering
        self._simple = is_async and not self._layers and timeout_s is None and answering is None

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    async def call(self, bodies: list[Any], unit: list[Received]) -> list[Failed]:
        """Run the handler, and answer; returns what failed. Raises only what ends the lane."""
        span = by_app(self._subscription, unit)
        if span is None:
            return await (self._simply(bodies, unit) if self._simple else self._answer(bodies, unit))
        with span:
            failures = await self._answer(bodies, unit)
            if failures:
                span.failed(failures[0].error)
            return failures

    async def _simply(self, bodies: list[Any], unit: list[Received]) -> list[Failed]:
        """A coroutine function with nothing around it: the shortest way."""
        try:
            await self._subscription.handler.function(**self._arguments(bodies, unit))
        except BaseException as error:
            return [Failed(_own(error), unit)]
        return []

    def _arguments(self, bodies: list[Any], messages: list[Any]) -> dict[str, Any]:
        handler = self._subscription.handler
        if self._subscription.batch is None:
            return handler.arguments(bodies[0] if bodies else None, messages[0])
        return handler.arguments(bodies, messages)

    async def _answer(self, bodies: list[Any], unit: list[Received]) -> list[Failed]:
        answering = self._subscription.answering
        if answering is None:
            error = (await self._call(bodies, unit))[1]
            return [] if error is None else [Failed(error, unit)]
        over = [answering.is_over(message) for message in unit]
        bodies = [body for body, gone in zip(bodies, over, strict=False) if not gone]
        unit = [message for message, gone in zip(unit, over, strict=True) if not gone]
        if not unit:
            return []
        returned, error = await self._call(bodies, unit)
        if error is None:
            returned, error = self._for_each(returned, len(unit))
        if error is not None:
            return await self.told(unit, error)
        answers = [answering.answered(message, one) for message, one in zip(unit, returned, strict=True)]
        return _together([failed for failed in await asyncio.gather(*answers) if failed is not None])

    def _for_each(self, returned: Any, count: int) -> tuple[Any, UsageError | None]:
        """One reply for each request, or what is wrong with what the handler returned."""
        if self._subscription.batch is None:
            return [returned], None
        if isinstance(returned, list | tuple) and len(returned) == count:
            return returned, None
        found = f"{len(returned)}" if isinstance(returned, list | tuple) else type(returned).__name__
        return None, UsageError(
            f"handler {self._subscription.handler.name} got {count} requests and returned {found}: with "
            "batch= return a list with the reply to each, in their order"
        )

    async def told(self, unit: list[Received], error: BaseException) -> list[Failed]:
        """Tell those who asked, if these were requests; returns what to make of the messages."""
        answering = self._subscription.answering
        if answering is None:
            return [Failed(error, unit)]
        return _together(await asyncio.gather(*(answering.failed(message, error) for message in unit)))

    async def _call(self, bodies: list[Any], unit: list[Received]) -> tuple[Any, BaseException | None]:
        """What it returned, or raised."""
        handler, single = self._subscription.handler, self._subscription.batch is None
        wrap = self._threads is not None and (handler.message or self._plain_layers)
        messages = [self._for_thread(m) for m in unit] if wrap else unit
        arguments = self._arguments(bodies, messages)
        in_thread: list[BaseException] = []

        async def handle() -> Any:
            if self._threads is None:
                return await handler.function(**arguments)
            given = messages[0] if single else messages
            returned, error = await self._in_thread(self._threads, arguments, given)
            if error is None:
                return returned
            in_thread.append(error)
            raise error

        try:
            return await self._in_time(around(self._layers, unit[0] if single else unit, handle)), None
        except BaseException as error:
            return None, error if error in in_thread else _own(error)

    async def _in_time(self, handle: Callable[[], Awaitable[Any]]) -> Any:
        seconds = self._subscription.timeout_s
        if seconds is None or self._threads is not None:
            return await handle()
        try:
            async with asyncio.timeout(seconds) as limit:
                return await handle()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the handler did not end within {seconds:g} seconds") from error

    async def _in_thread(
        self, threads: HandlerThreads, arguments: dict[str, Any], given: Any
    ) -> tuple[Any, BaseException | None]:
        began = monotonic()
        returned: list[Any] = []

        def handle() -> Any:
            result = self._subscription.handler.function(**arguments)
            refuse_awaitable(result)
            return result

        def work() -> None:
            returned.append(around_plain(self._plain_layers, given, handle)())

        error = await threads.run(work)
        limit = self._subscription.timeout_s
        if limit is not None and monotonic() - began > limit:
            log.warning(
                "handler %s took %.1f seconds, its timeout is %g; a plain function cannot be cancelled, so "
                "what it did counts",
                self._subscription.handler.name,
                monotonic() - began,
                limit,
            )
        return (returned[0], None) if error is None else (None, error)


def _together(failures: list[Failed]) -> list[Failed]:
    """Those that failed alike as one: a list that raised is told of once."""
    alike: dict[tuple[int, bool], Failed] = {}
    for one in failures:
        first = alike.setdefault((id(one.error), one.answered), one)
        if first is not one:
            first.messages.extend(one.messages)
    return list(alike.values())


def _own(error: BaseException) -> BaseException:
    """The handler's own error, also a CancelledError of something it waited for; others are raised on."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    if isinstance(error, asyncio.CancelledError) and being_cancelled():
        raise error
    return error


def being_cancelled() -> bool:
    """Whether somebody cancels this task, as against something it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
