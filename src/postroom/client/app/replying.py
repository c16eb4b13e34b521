"""Handlers that reply: `@app.reply` (R38).

A handler that replies is an ordinary subscription that also answers: what the handler returns, once its
middleware has ended, is the reply, and the request is acked when that is stored. Decides what its ending
means for who asked:

    returned                      the reply
    raised RetryLater             tried again then, if that is before the deadline; else as below
    raised Dead                   RequestFailed, and a dead letter
    raised anything else          RequestFailed, at once; it is not tried again: its requester decides
    the body does not fit         RequestFailed; likewise
    the deadline has passed       not handled at all; counted

A handler of lists returns a list, with the reply to each in the order of the requests; what it raises is told
to each of them. A message that is no request is handled as by `@app.subscribe`, and what is returned is
dropped. Must never leave a requester waiting for what has failed already, and never ack a request whose
answer is not stored.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...errors import PostroomError, RequestFailed
from ...model.delivery.retry import Backoff
from ...model.messages.requests import Failure
from ..message import Received
from ..requests.reply import answer, answers_of, fail
from .handler import Dead, Failed, RetryLater
from .payload import encoded
from .subscription import Subscription, make_subscription

__all__ = ["make_reply"]

_MOST_CHARACTERS = 2000  # of what a requester is told
_RETRY = Backoff(1, 2, "10m")  # of messages that are no requests
_HERE = Path(__file__).parent


def make_reply(
    function: Callable[..., Any], scope: Mapping[str, Any], *, traceback: bool, **settings: Any
) -> Subscription:
    """A subscription that answers."""
    found = make_subscription(function, scope, retry=_RETRY, ack="after", **settings)
    return replace(found, answering=_Replying(traceback))


class _Replying:
    def __init__(self, traceback: bool) -> None:
        self._traceback = traceback

    def is_over(self, message: Received) -> bool:
        """Whether its deadline has passed; then it is counted."""
        return answers_of(message).is_over(message)

    async def answered(self, message: Received, returned: Any) -> Failed | None:
        if message._asked is None:
            return None
        try:
            await answer(message, *encoded(returned))
        except Exception as error:
            if isinstance(error, PostroomError) and not error.retriable:
                return await self.failed(message, error)  # too large, or headers that are none
            return Failed(error, [message])
        return None

    async def failed(self, message: Received, error: BaseException) -> Failed:
        if message._asked is None or _comes_again(message, error):
            return Failed(error, [message])
        try:
            await fail(message, self._told(error))
        except Exception as failure:
            return Failed(failure, [message])
        return Failed(error, [message], answered=not isinstance(error, Dead))

    def _told(self, error: BaseException) -> Failure:
        text = str(error) or type(error).__name__
        if len(text) > _MOST_CHARACTERS:
            text = text[: _MOST_CHARACTERS - 1] + "…"
        return Failure(_kind(error), text, _traced(error) if self._traceback else "")


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
    while trace is not None and Path(trace.tb_frame.f_code.co_filename).parent == _HERE:
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


def _kind(error: BaseException) -> str:
    if isinstance(error, RequestFailed):
        return error.kind
    if isinstance(error, PostroomError):
        return error.code
    named = {Dead: "dead", RetryLater: "retry_later", TimeoutError: "timeout"}
    return named.get(type(error), type(error).__name__)
