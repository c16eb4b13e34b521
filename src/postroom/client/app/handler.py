"""Handlers: what a function asks for, and what its ending means for the message.

Decides, when a function is registered, which of its parameters is the body and which the message, how it is
called (awaited, or in a thread), and which decoder the annotation of the body means:

    none, Any, bytes          the body as it is
    str                       UTF-8
    pydantic, anywhere in it  pydantic's own validation (only if the program has imported pydantic)
    anything else             JSON by msgspec: dataclass, Struct, TypedDict, NamedTuple, dict, list, int, …

A type that none of them can make is refused then and there, not when the first message comes. Must never
guess: a body that does not fit is a DecodeError that says what did not fit. Whatever else a user's own class
raises while it is made is not ours to judge. Decides, when the function ended, the verdict:

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
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NewType, TypeAlias, get_args, get_origin, get_type_hints

import msgspec

from ...errors import DecodeError, InvalidSetting, UsageError
from ...model.delivery.retry import Backoff
from ...units import Duration, Moment, duration_ms, moment_ms
from ..message import Message, Received

__all__ = [
    "ACK",
    "RELEASE",
    "Dead",
    "Decode",
    "Failed",
    "Handler",
    "Outcome",
    "Reply",
    "RetryLater",
    "decoder",
    "encoded",
    "outcome_of",
]


Decode: TypeAlias = Callable[[bytes], Any]

_RAW: frozenset[Any] = frozenset({bytes, Any, object})
_SHOWN_PROBLEMS = 3


def decoder(annotation: Any, *, handler: str) -> Decode:
    """The decoder for an annotation of `handler` (its name, for the message of the error)."""
    bare = _bare(annotation)
    if bare in _RAW:
        return bytes
    if bare is str:
        return _text
    classes = list(_classes(annotation, handler))
    if any(map(_is_pydantic, classes)):
        return _pydantic(annotation)
    strangers = [cls for cls in classes if _is_custom(cls)]
    if strangers:
        raise UsageError(
            f"handler {handler}: a body cannot be decoded into {_name(strangers[0])}; use a dataclass, a "
            "msgspec Struct, a pydantic model, a TypedDict, dict, list, str or bytes"
        )
    return _json(annotation)


def _bare(annotation: Any) -> Any:
    """Without Annotated[…] and NewType around it."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        else:
            return annotation


# ---- the decoders: each turns what goes wrong into a DecodeError ----


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"the body is not UTF-8 text: byte {error.start} does not fit") from None


def _json(annotation: Any) -> Decode:
    decode = msgspec.json.Decoder(annotation).decode
    wanted = _name(annotation)

    def decode_json(body: bytes) -> Any:
        try:
            return decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise _misfit(wanted, str(error) if body else "it is empty") from None

    return decode_json


def _pydantic(annotation: Any) -> Decode:
    from pydantic import TypeAdapter, ValidationError

    validate = TypeAdapter(annotation).validate_json
    wanted = _name(annotation)

    def decode_model(body: bytes) -> Any:
        try:
            return validate(body)
        except ValidationError as error:
            raise _misfit(wanted, _summary(error.errors(include_url=False, include_input=False))) from None

    return decode_model


def _misfit(wanted: str, problem: str) -> DecodeError:
    return DecodeError(f"the body does not fit {wanted}: {problem}")


def _summary(problems: list[Any]) -> str:
    shown = [
        f"{'.'.join(map(str, problem['loc'])) or 'body'}: {problem['msg']}"
        for problem in problems[:_SHOWN_PROBLEMS]
    ]
    more = len(problems) - len(shown)
    return "; ".join(shown) + (f"; and {more} more" if more > 0 else "")


# ---- what an annotation is made of ----


class _Custom:
    """A class that msgspec does not know."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls


def _is_custom(found: Any) -> bool:
    return isinstance(found, _Custom)


def _classes(annotation: Any, handler: str) -> Iterator[Any]:
    """Every class in an annotation, also those in fields of classes; unknown ones as _Custom."""
    try:
        found = msgspec.inspect.type_info(annotation)
    except (TypeError, NameError) as error:
        raise UsageError(f"handler {handler}: cannot decode into {_name(annotation)}: {error}") from None
    waiting, seen = [found], set[Any]()
    while waiting:
        node = waiting.pop()
        cls = getattr(node, "cls", None)
        if cls is not None and cls in seen:
            continue
        seen.add(cls)
        if isinstance(node, msgspec.inspect.CustomType):
            yield _Custom(cls)
        elif cls is not None:
            yield cls
        waiting.extend(_parts(node))


def _parts(node: Any) -> Iterator[msgspec.inspect.Type]:
    for name in node.__struct_fields__:
        value = getattr(node, name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, msgspec.inspect.Field):
                yield part.type
            elif isinstance(part, msgspec.inspect.Type):
                yield part


def _is_pydantic(found: Any) -> bool:
    cls = found.cls if isinstance(found, _Custom) else found
    return "pydantic" in sys.modules and hasattr(cls, "__pydantic_validator__")


def _name(annotation: Any) -> str:
    if isinstance(annotation, _Custom):
        return _name(annotation.cls)
    name = getattr(annotation, "__name__", None) if not get_args(annotation) else None
    return name or str(annotation).replace("typing.", "")


Reply = tuple[bytes, Mapping[str, str | bytes] | None]


def encoded(returned: Any) -> Reply:
    """Return the body and the headers of a reply, from what a handler returned.

        bytes, bytearray, memoryview   the body as it is
        str                            UTF-8
        None                           an empty body
        postroom.Message               its value, by these same rules, and its headers
        a pydantic model               its JSON
        anything else                  JSON by msgspec: dataclass, Struct, dict, list, int, …

    Must never guess: what none of them can encode is a UsageError that names the type.
    """
    if isinstance(returned, Message):
        return _body(returned.value), returned.headers
    return _body(returned), None


def _body(value: Any) -> bytes:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if value is None:
        return b""
    if isinstance(value, str):
        return value.encode()
    dump = getattr(value, "model_dump_json", None)
    if dump is not None and hasattr(type(value), "__pydantic_validator__"):
        return str(dump()).encode()
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"the handler returned {type(value).__name__}, which cannot be sent ({error}): return bytes, "
            "str, a dataclass, a msgspec Struct, a pydantic model, a dict, or a postroom.Message with headers"
        ) from None


# ---- what a handler may raise ----


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
    """Messages whose handling raised. `answered`: who asked was told, and nothing is retried."""

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
