"""Handlers: what a function asks for, and what its ending means for the message.

Decides, when a function is registered, which of its parameters is the body and which the message, and how it
is called (awaited, or in a thread); what the body's annotation means is decided in `model.messages.body`.
Decides, when the function ended, the verdict:

    returned                      ack
    raised RetryLater             retry, then
    raised Dead                   dead letter, with its reason
    the body does not fit         dead letter, with what did not fit: it will never fit
    its task is unknown here      dead letter, with the tasks that are known
    raised anything else          retry after the back-off for this attempt, with the error as the reason

Must never read a clock or draw a random number, never run a handler, and never talk to the store.
"""

from __future__ import annotations

import functools
import inspect
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...errors import DecodeError, InvalidMessage, InvalidSetting, UsageError
from ...model.delivery.reason import with_traceback
from ...model.delivery.retry import Backoff
from ...model.messages.body import Decode, decoder, encode
from ...units import Duration, Moment, duration_ms, moment_ms
from ..message import Message, Received

__all__ = [
    "ACK",
    "RELEASE",
    "Dead",
    "Failed",
    "Handler",
    "Outcome",
    "Reply",
    "RetryLater",
    "encoded",
    "outcome_of",
    "own_frames",
    "traced",
]


Reply = tuple[bytes, Mapping[str, str | bytes] | None]


def encoded(returned: Any) -> Reply:
    """Return the body and the headers of a reply, from what a handler returned.

        None                           an empty body
        postroom.Message               its value, by these same rules, and its headers
        anything else                  as it would be sent: see `model.messages.body`

    Must never guess: what none of them can encode is a UsageError that names the type.
    """
    if isinstance(returned, Message):
        return _body(returned.value), returned.headers
    return _body(returned), None


def _body(value: Any) -> bytes:
    if value is None:
        return b""
    try:
        return encode(value)
    except InvalidMessage as error:
        why = error.details["problem"]
        raise UsageError(
            f"the handler returned {type(value).__name__}, which cannot be sent ({why}): return bytes, str, "
            "a dataclass, a msgspec Struct, a pydantic model, a dict, or a postroom.Message with headers"
        ) from None


# ---- what a handler may raise ----


_REASON_CHARACTERS = 500
_HEADING = "Traceback (most recent call last):\n"
_PACKAGE = str(Path(__file__).parents[2]) + os.sep


class RetryLater(Exception):
    """Raise it in a handler: not now, again after `delay` or at a moment; neither: after the back-off.

    Counts as an attempt, as every retry does.
    """

    def __init__(self, delay: Duration | None = None, *, at: Moment | None = None, reason: str = "") -> None:
        if delay is not None and at is not None:
            raise InvalidSetting("RetryLater takes delay= or at=, not both")
        self.delay_ms = None if delay is None else duration_ms(delay, name="delay")
        self.at_ms = None if at is None else moment_ms(at, name="at")
        self.reason = str(reason)
        super().__init__(self.reason or "retry later")


class Dead(Exception):
    """Raise it in a handler: hopeless; to the group's dead letters at once, with the reason."""

    def __init__(self, reason: str) -> None:
        self.reason = str(reason)
        super().__init__(self.reason)


# ---- what an ending means ----


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a message, in the words of a verdict."""

    kind: Literal["ack", "retry", "release", "dead"]
    delay_ms: int = 0
    at_ms: int | None = None
    reason: str = ""


ACK = Outcome("ack")
RELEASE = Outcome("release")


@dataclass(frozen=True, slots=True)
class Failed:
    """Messages whose handling raised. `answered`: who asked was told, and nothing is retried."""

    error: BaseException
    messages: list[Received]
    answered: bool = False


def outcome_of(error: BaseException, retry: Backoff, attempt: int, fraction: float) -> Outcome:
    """The verdict on a message whose handling raised; `fraction` is the caller's random number."""
    if isinstance(error, Dead):
        return Outcome("dead", reason=_traced(_cut(error.reason), error))
    if isinstance(error, DecodeError):
        return Outcome("dead", reason=_cut(str(error)))
    delay_ms, at_ms, reason = None, None, ""
    if isinstance(error, RetryLater):
        delay_ms, at_ms, reason = error.delay_ms, error.at_ms, error.reason
    if delay_ms is None:
        delay_ms = retry.delay_ms(max(1, attempt), fraction)
    return Outcome("retry", delay_ms, at_ms, _traced(_cut(reason or _described(error)), error))


def _described(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _traced(said: str, error: BaseException) -> str:
    """The reason with the traceback; where the handler chose its words, only if another error led to them."""
    if error.__traceback__ is None or (isinstance(error, RetryLater | Dead) and error.__cause__ is None):
        return said
    return with_traceback(said, traced(error).removeprefix(_HEADING))


def own_frames(error: BaseException) -> TracebackType | None:
    """Return the traceback from where the handler begins: what called it is the same for all of them."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        trace = trace.tb_next
    return error.__traceback__ if trace is None else trace


def traced(error: BaseException) -> str:
    """Return the traceback as text, from where the handler begins."""
    return "".join(traceback.format_exception(type(error), error, own_frames(error)))


def _cut(text: str) -> str:
    return text if len(text) <= _REASON_CHARACTERS else text[: _REASON_CHARACTERS - 1] + "…"


# ---- what a function asks for ----


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, ready to be given messages."""

    function: Callable[..., Any]
    name: str
    is_async: bool
    decode: Decode | None  # None: it does not ask for the body
    body: str | None  # the parameter that takes the body, if it must go by name
    message: str | None  # the parameter that takes the message
    annotation: Any = bytes  # of the body; with lists, of one in them

    @staticmethod
    def of(function: Callable[..., Any], *, many: bool, scope: Mapping[str, Any]) -> Handler:
        """Look at a function; `many`: it takes lists. `scope`: names its annotations may use besides."""
        if not callable(function):
            raise UsageError(f"a handler is a function, not {type(function).__name__}")
        name = _name_of(function)
        hints = _hints(function, name, scope)
        body = message = None
        for parameter in _parameters(function, name):
            if _takes_message(parameter.name, hints.get(parameter.name), many):
                message = _once(message, parameter.name, name)
            else:
                body = _once(body, parameter.name, name)
        decode, annotation = None, bytes
        if body is not None:
            annotation = _body_type(hints.get(body, bytes), many, name)
            decode = decoder(annotation, where=f"handler {name}({body})")
        return Handler(function, name, _is_async(function), decode, body, message, annotation)

    def arguments(self, body: Any, message: Any) -> dict[str, Any]:
        """What to call the function with."""
        found = {} if self.body is None else {self.body: body}
        if self.message is not None:
            found[self.message] = message
        return found


def _parameters(function: Callable[..., Any], name: str) -> list[inspect.Parameter]:
    """The parameters that a message is to fill; those with defaults are the function's own affair."""
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise UsageError(f"handler {name}: {parameter.name!r} must not be positional-only")
        if parameter.default is parameter.empty or parameter.name in ("message", "messages"):
            found.append(parameter)
    if not found:
        raise UsageError(f"handler {name} takes nothing: give it a parameter for the body, or `message`")
    return found


def _once(taken: str | None, name: str, handler: str) -> str:
    if taken is None:
        return name
    raise UsageError(
        f"handler {handler} has the parameters {taken!r} and {name!r} for the same thing: a handler takes "
        "the body and `message`; give others a default"
    )


def _takes_message(name: str, hint: Any, many: bool) -> bool:
    if hint is None or hint is Any:
        return name == ("messages" if many else "message")
    if many and get_origin(hint) is list:
        hint = (*get_args(hint), None)[0]
    return isinstance(hint, type) and _is_received(hint)


def _is_received(hint: type) -> bool:
    """Received itself, or the form of it that plain functions get (postroom.sync)."""
    return issubclass(hint, Received) or getattr(hint, "__wraps__", None) is Received


def _body_type(hint: Any, many: bool, name: str) -> Any:
    if not many:
        return hint
    if hint is list or hint is bytes or hint is Any:  # no annotation, or one that says only "a list"
        return bytes
    if get_origin(hint) is list:
        return get_args(hint)[0]
    raise UsageError(f"handler {name} takes batches: annotate its body as list[…], not {hint!r}")


def _hints(function: Callable[..., Any], name: str, scope: Mapping[str, Any]) -> dict[str, Any]:
    target: Any = function
    while isinstance(target, functools.partial):
        target = target.func
    if not inspect.isroutine(target):
        target = type(target).__call__
    try:
        return get_type_hints(target, localns=dict(scope), include_extras=True)
    except NameError as error:
        raise UsageError(
            f"handler {name}: its annotation cannot be read ({error}); define the type before the handler"
        ) from None


def _is_async(function: Callable[..., Any]) -> bool:
    if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
        raise UsageError(f"handler {_name_of(function)} has a yield in it: a handler returns or raises")
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004
    )


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__qualname__", type(function).__qualname__).rpartition("<locals>.")[2]
