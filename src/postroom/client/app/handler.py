"""Handlers: what a function asks for, and what its ending means for the message.

Decides, when a function is registered, which of its parameters is the body and which the message, and how it
is called: awaited, or in a thread. Decides, when it ended, the verdict:

    returned                      ack
    raised RetryLater             retry, then
    raised Dead                   dead letter, with its reason
    the body does not fit         dead letter, with what did not fit: it will never fit
    raised anything else          retry after the back-off for this attempt, with the error as the reason

Must never read a clock or draw a random number, never run a handler, and never talk to the store.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ...errors import DecodeError, InvalidSetting, UsageError
from ...model.delivery.retry import Backoff
from ...units import Duration, Moment, duration_ms, moment_ms
from ..message import Received
from .payload import Decode, decoder

__all__ = ["ACK", "RELEASE", "Dead", "Failed", "Handler", "Outcome", "RetryLater", "outcome_of"]

_REASON_CHARACTERS = 500


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
    """Messages whose handling raised. `answered`: who asked was told (`replying`), and nothing is retried."""

    error: BaseException
    messages: list[Received]
    answered: bool = False


def outcome_of(error: BaseException, retry: Backoff, attempt: int, fraction: float) -> Outcome:
    """The verdict on a message whose handling raised; `fraction` is the caller's random number."""
    if isinstance(error, Dead):
        return Outcome("dead", reason=_cut(error.reason))
    if isinstance(error, DecodeError):
        return Outcome("dead", reason=_cut(str(error)))
    delay_ms, at_ms, reason = None, None, ""
    if isinstance(error, RetryLater):
        delay_ms, at_ms, reason = error.delay_ms, error.at_ms, error.reason
    if delay_ms is None:
        delay_ms = retry.delay_ms(max(1, attempt), fraction)
    return Outcome("retry", delay_ms, at_ms, _cut(reason or _described(error)))


def _described(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


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
        decode = None
        if body is not None:
            decode = decoder(_body_type(hints.get(body, bytes), many, name), handler=f"{name}({body})")
        return Handler(function, name, _is_async(function), decode, body, message)

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
