"""How a handler's annotation turns a body into what the handler asked for.

Decides, once, when the handler is registered, which decoder an annotation means:

    none, Any, bytes          the body as it is
    str                       UTF-8
    pydantic, anywhere in it  pydantic's own validation (only if the program has imported pydantic)
    anything else             JSON by msgspec: dataclass, Struct, TypedDict, NamedTuple, dict, list, int, …

A type that none of them can make is refused then and there, not when the first message comes. Must never
guess: a body that does not fit is a DecodeError that says what did not fit. It will never fit, so whoever
catches it need not try again. Whatever else a user's own class raises while it is made is not ours to judge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, NewType, TypeAlias, get_args, get_origin

import msgspec

from ...errors import DecodeError, UsageError
from ..message import Message

__all__ = ["Decode", "Reply", "decoder", "encoded"]


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
