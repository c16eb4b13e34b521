"""Handlers that reply: `@app.reply` (R38).

A handler that replies is an ordinary subscription around a function that answers: what it returns is the
reply, and the request is acked when that is stored. Decides what its ending means for who asked:

    returned                      the reply
    raised RetryLater             tried again then, if that is before the deadline; else as below
    raised Dead                   RequestFailed, and a dead letter
    raised anything else          RequestFailed, at once; it is not tried again: its requester decides
    the body does not fit         RequestFailed; likewise
    the deadline has passed       not handled at all; counted

A message that is no request is handled as by `@app.subscribe`, and what is returned is dropped. Must never
leave a requester waiting for what has failed already, and never ack a request whose answer is not stored.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ...errors import PenstockError, RequestFailed
from ...model.requests import Failure
from ...model.retry import Backoff
from ...units import Duration
from ..answering import answer, answers_of, fail
from ..message import Received
from .call import being_cancelled
from .encode import Reply, encoded
from .handler import ANSWERED, Dead, Handler, RetryLater
from .subscription import Subscription, make_subscription

__all__ = ["make_reply"]

_MOST_CHARACTERS = 2000  # of what a requester is told
_RETRY = Backoff(1, 2, "10m")  # of messages that are no requests


def make_reply(
    function: Callable[..., Any],
    scope: Mapping[str, Any],
    *,
    timeout: Duration | None,
    traceback: bool,
    **settings: Any,
) -> Subscription:
    """A subscription whose handler answers."""
    found = make_subscription(
        function, scope, batch=None, retry=_RETRY, ack="after", timeout=timeout, **settings
    )
    handler = found.handler
    replying = _Replying(handler, found.timeout_s, traceback)
    answering = Handler(
        function=replying.in_loop if handler.is_async else replying.in_thread,
        name=handler.name,
        is_async=handler.is_async,
        decode=None,
        body=None,
        message="message",
    )
    # A coroutine function's time is kept here, so that its requester is told; a thread's can only be told of.
    return replace(found, handler=answering, timeout_s=None if handler.is_async else found.timeout_s)


class _Replying:
    def __init__(self, handler: Handler, timeout_s: float | None, traceback: bool) -> None:
        self._handler, self._timeout_s, self._traceback = handler, timeout_s, traceback

    async def in_loop(self, message: Received) -> None:
        """A coroutine function."""
        if answers_of(message).is_over(message):
            return
        try:
            reply = encoded(await self._in_time(self._arguments(message, message)))
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            await self._failed(message, error)
            raise
        await self._answered(message, reply)

    async def _in_time(self, arguments: dict[str, Any]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await self._handler.function(**arguments)
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise TimeoutError(f"the handler did not end within {self._timeout_s:g} seconds") from error

    def in_thread(self, message: Any) -> None:
        """A plain function: it gets the message as `penstock.sync` has it."""
        call, received = message._portal.call, message._target
        if call(_is_over, received):
            return
        try:
            reply = encoded(self._handler.function(**self._arguments(received, message)))
        except Exception as error:
            call(self._failed, received, error)
            raise
        call(self._answered, received, reply)

    def _arguments(self, received: Received, message: Any) -> dict[str, Any]:
        decode = self._handler.decode
        return self._handler.arguments(None if decode is None else decode(received.value), message)

    async def _answered(self, message: Received, reply: Reply) -> None:
        if message._asked is None:
            return
        try:
            await answer(message, *reply)
        except PenstockError as error:  # too large, or headers that are none
            if not error.retriable:
                await self._failed(message, error)
            raise

    async def _failed(self, message: Received, error: BaseException) -> None:
        """Tell who asked, and mark the error as told; not if the request is to be tried again."""
        vars(error).pop(ANSWERED, None)  # the same error may be raised twice
        if message._asked is None or _comes_again(message, error):
            return
        await fail(message, self._told(error))
        if not isinstance(error, Dead):
            vars(error)[ANSWERED] = True

    def _told(self, error: BaseException) -> Failure:
        text = str(error) or type(error).__name__
        if len(text) > _MOST_CHARACTERS:
            text = text[: _MOST_CHARACTERS - 1] + "…"
        return Failure(_kind(error), text, _traced(error) if self._traceback else "")


async def _is_over(message: Received) -> bool:
    return answers_of(message).is_over(message)


def _comes_again(message: Received, error: BaseException) -> bool:
    """Whether the handler asked for another try that comes before the deadline."""
    if not isinstance(error, RetryLater):
        return False
    if error.at_ms is not None:
        return message.expires is None or error.at_ms < message.expires.timestamp() * 1000
    delay_ms = _RETRY.delay_ms(max(1, message.attempt), 1.0) if error.delay_ms is None else error.delay_ms
    return delay_ms < answers_of(message).ms_left(message)


def _traced(error: BaseException) -> str:
    """From where the handler begins."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _kind(error: BaseException) -> str:
    if isinstance(error, RequestFailed):
        return error.kind
    if isinstance(error, PenstockError):
        return error.code
    named = {Dead: "dead", RetryLater: "retry_later", TimeoutError: "timeout"}
    return named.get(type(error), type(error).__name__)
