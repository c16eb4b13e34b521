"""Calling a handler once, whatever kind of function it is.

Decides what counts as the handler's own ending: everything it raises, also a CancelledError of something it
waited for, and its timeout; not that its lane was cancelled, nor that the program ends. A plain function runs
in a thread and cannot be cancelled: its timeout is only told, and what it did counts, since to retry work
that was done would double it. Must never settle anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from time import monotonic
from typing import Any

from ..message import Received
from ..tracing import by_app
from .subscription import Subscription
from .threads import HandlerThreads

__all__ = ["Caller", "being_cancelled"]

log = logging.getLogger("penstock.app")


class Caller:
    def __init__(self, subscription: Subscription, for_thread: Callable[[Received], Any]) -> None:
        self._subscription = subscription
        self._for_thread = for_thread  # a message as a plain function gets it
        handler = subscription.handler
        self._threads = (
            None if handler.is_async else HandlerThreads(subscription.concurrency, f"penstock-{handler.name}")
        )

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()

    async def call(self, bodies: list[Any], unit: list[Received]) -> BaseException | None:
        """Run the handler; returns what it raised. Raises only what ends the lane."""
        span = by_app(self._subscription, unit)
        if span is None:
            return await self._call(bodies, unit)
        with span:
            error = await self._call(bodies, unit)
            if error is not None:
                span.failed(error)
            return error

    async def _call(self, bodies: list[Any], unit: list[Received]) -> BaseException | None:
        handler = self._subscription.handler
        messages = [self._for_thread(m) for m in unit] if self._threads and handler.message else unit
        if self._subscription.batch is None:
            arguments = handler.arguments(bodies[0] if bodies else None, messages[0])
        else:
            arguments = handler.arguments(bodies, messages)
        if self._threads is not None:
            return await self._in_thread(self._threads, arguments)
        try:
            if self._subscription.timeout_s is None:
                await handler.function(**arguments)
            else:
                await self._in_time(arguments, self._subscription.timeout_s)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            return error  # also a CancelledError of something the handler waited for
        return None

    async def _in_time(self, arguments: dict[str, Any], seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds) as limit:
                await self._subscription.handler.function(**arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the handler did not end within {seconds:g} seconds") from error

    async def _in_thread(self, threads: HandlerThreads, arguments: dict[str, Any]) -> BaseException | None:
        began = monotonic()
        error = await threads.run(self._subscription.handler.function, arguments)
        limit = self._subscription.timeout_s
        if limit is not None and monotonic() - began > limit:
            log.warning(
                "handler %s took %.1f seconds, its timeout is %g; a plain function cannot be cancelled, so "
                "what it did counts",
                self._subscription.handler.name,
                monotonic() - began,
                limit,
            )
        return error


def being_cancelled() -> bool:
    """Whether somebody cancels this task, as against something it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
