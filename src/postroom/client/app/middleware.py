"""Middleware: what runs around handlers, for database sessions, logging context and reports of errors.

    @app.middleware
    async def session(message):             # a generator: before, yield, after
        async with Session() as current:
            yield

    @app.middleware
    async def timed(message, call_next):    # or a call around the call
        return await call_next()

Decides the order, as registered: the first is the outermost. What a handler raises passes through all of them
and counts as the handler's own ending; so does what a middleware raises, and one that swallows the error or
does not call on has handled the message. A middleware of a batch handler gets the list.

A coroutine function runs in the event loop, around every handler. A plain function runs in the handler's own
thread, around handlers that are plain functions: for what belongs to a thread. Must never run a handler
twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from ...errors import UsageError
from .handler import Handler

__all__ = ["Middleware", "around", "around_plain", "middleware_of", "refuse_unused"]

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
