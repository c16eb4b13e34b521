"""Bodies of messages: what a value is sent as, and what a body is decoded into.

One set of rules for every way to send and for every handler, so that what was sent can be handled:

    a value                                  its body          an annotation that takes it back
    bytes, bytearray, memoryview             as it is          bytes, Any, none; bytearray; memoryview
    str                                      UTF-8             str
    pydantic, anywhere in its type           pydantic's JSON   the same type
    dataclass, Struct, TypedDict, NamedTuple,
    dict, list, int, float, bool, datetime, …  JSON by msgspec   the same type

An annotation that is neither bytes nor str means JSON, also for a str within it: whoever knows the annotation
(a task) encodes by it, `encoder`; who does not, by the value, `encode`. A type that none of them can make is
refused when the annotation is seen, not when the first message comes. Must never guess: what cannot be
encoded is an InvalidMessage that names the type, and a body that does not fit a DecodeError that says what
did not. Whatever else a user's own class raises while it is made is not ours to judge. Must never import
pydantic unless the program has.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, NewType, TypeAlias, get_args, get_origin

import msgspec

from ...errors import DecodeError, InvalidMessage, UsageError

__all__ = ["Decode", "Encode", "decode", "decoder", "encode", "encoder", "from_json", "text"]


Decode: TypeAlias = Callable[[bytes], Any]
Encode: TypeAlias = Callable[[Any], bytes]

_RAW: dict[Any, Decode] = {
    bytes: bytes,
    Any: bytes,
    object: bytes,
    bytearray: bytearray,
    memoryview: memoryview,
}
_SHOWN_PROBLEMS = 3
_KNOWN_CLASSES = 1000  # whose encoders are kept


# ---- out ----


def encode(value: Any) -> bytes:
    """Return the body of a value whose annotation nobody knows."""
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    if isinstance(value, str) and not isinstance(value, Enum):  # a member of an Enum is JSON, as its type is
        return _utf8(value)
    if value is None:
        raise InvalidMessage("None is no body: send b'' for an empty one, or b'null' for the null of JSON")
    cls: Any = type(value)
    return _encoder_of(cls)(value)


def encoder(annotation: Any, *, where: str) -> Encode:
    """Return what encodes values for a parameter with this annotation; bytes are a body already.

    `where` is what the annotation belongs to, for the message of the error.
    """
    bare = _bare(annotation)
    if bare in _RAW or bare is str:
        return encode
    classes = _checked(annotation, where)
    dump = _pydantic_dump(annotation) if any(map(_is_pydantic, classes)) else _json_dump
    return lambda value: value if type(value) is bytes else dump(value)


def _utf8(value: str) -> bytes:
    try:
        return value.encode()
    except UnicodeEncodeError:
        raise _cannot_send(value, f"UTF-8 does not have a character of {value[:100]!r}") from None


@lru_cache(maxsize=_KNOWN_CLASSES)
def _encoder_of(cls: Any) -> Encode:
    try:
        inside = any(map(_is_pydantic, _classes(cls)))
    except (TypeError, NameError):  # msgspec knows what it cannot encode when it is asked to
        inside = False
    return _pydantic_dump(cls) if inside else _json_dump


def _json_dump(value: Any) -> bytes:
    try:
        body = msgspec.json.encode(value, enc_hook=_within)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise _cannot_send(value, str(error)) from None
    if b"null" in body and _is_nan_in(msgspec.to_builtins(value, enc_hook=_within)):
        raise _cannot_send(value, "JSON has no word for nan and infinity")  # msgspec writes null
    return body


def _within(value: Any) -> Any:
    """A model of pydantic within what msgspec encodes."""
    serializer = getattr(type(value), "__pydantic_serializer__", None)
    if serializer is None:
        raise TypeError(f"objects of type {type(value).__name__} have no form in JSON")
    return serializer.to_python(value, mode="json", by_alias=True)


def _is_nan_in(plain: Any) -> bool:
    if isinstance(plain, float):
        return not math.isfinite(plain)
    if isinstance(plain, dict):
        return any(map(_is_nan_in, plain.values()))
    return isinstance(plain, list | tuple | set) and any(map(_is_nan_in, plain))


def _pydantic_dump(annotation: Any) -> Encode:
    from pydantic import TypeAdapter
    from pydantic_core import PydanticSerializationError

    dump = TypeAdapter(annotation).dump_json

    def dump_model(value: Any) -> bytes:
        try:
            return dump(value, by_alias=True, warnings="error")
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise _cannot_send(value, " ".join(str(error).split())) from None

    return dump_model


def _cannot_send(value: Any, problem: str) -> InvalidMessage:
    return InvalidMessage(
        f"a value of type {type(value).__name__} cannot be sent ({problem}): send bytes, str, a dataclass, a "
        "msgspec Struct, a pydantic model, a dict or a list of such, or encode it to bytes yourself",
        problem=problem,
    )


# ---- back ----


def decoder(annotation: Any, *, where: str) -> Decode:
    """Return the decoder for an annotation; `where` is what it belongs to, for the message of the error."""
    bare = _bare(annotation)
    if bare in _RAW:
        return _RAW[bare]
    if bare is str:
        return text
    classes = _checked(annotation, where)
    return _pydantic(annotation) if any(map(_is_pydantic, classes)) else _json(annotation)


def decode(body: bytes, annotation: Any) -> Any:
    """Return the body as what the annotation says, by the rules of handlers."""
    try:
        found = _decoder_of(annotation)
    except TypeError:  # it cannot be hashed
        found = decoder(annotation, where="decode")
    return found(body)


@lru_cache(maxsize=_KNOWN_CLASSES)
def _decoder_of(annotation: Any) -> Decode:
    return decoder(annotation, where="decode")


def text(body: bytes) -> str:
    """Return the body as text."""
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise DecodeError(f"the body is not UTF-8 text: byte {error.start} does not fit") from None


def from_json(body: bytes) -> Any:
    """Return what the JSON in the body says, as dicts, lists, texts and numbers."""
    return _PLAIN(body)


def _json(annotation: Any) -> Decode:
    decode = msgspec.json.Decoder(annotation).decode
    wanted = "JSON" if annotation is Any else _name(annotation)

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


def _bare(annotation: Any) -> Any:
    """Without Annotated[…] and NewType around it."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, NewType):
            annotation = annotation.__supertype__
        else:
            return annotation


def _checked(annotation: Any, where: str) -> list[Any]:
    """Return every class in an annotation; UsageError if one of them cannot be decoded."""
    try:
        classes = list(_classes(annotation))
    except (TypeError, NameError) as error:
        raise UsageError(f"{where}: cannot decode into {_name(annotation)}: {error}") from None
    if any(map(_is_pydantic, classes)):
        return classes
    for found in classes:
        if isinstance(found, _Custom):
            raise UsageError(
                f"{where}: a body cannot be decoded into {_name(found)}; use a dataclass, a msgspec Struct, "
                "a pydantic model, a TypedDict, dict, list, str or bytes"
            )
    return classes


def _classes(annotation: Any) -> Iterator[Any]:
    """Every class in an annotation, also those in fields of classes; unknown ones as _Custom."""
    pending, seen = [msgspec.inspect.type_info(annotation)], set[Any]()
    while pending:
        node = pending.pop()
        cls = getattr(node, "cls", None)
        if cls is not None and cls in seen:
            continue
        seen.add(cls)
        if isinstance(node, msgspec.inspect.CustomType):
            yield _Custom(cls)
        elif cls is not None:
            yield cls
        pending.extend(_parts(node))


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


_PLAIN = _json(Any)
