"""Golden frames: each operation with a fixed value in every field, its bytes, and what those bytes mean."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from postroom import errors
from tests.request_types import fields_of, shape_of

from . import internals
from .internals import Operation, Other

__all__ = ["failures", "filled", "frames_text", "request_of", "shortest"]

BODY = b"the body"
_PREFIX = 16  # bytes before a frame's header


# ---- values ----


def filled(hint: Any, name: str = "value", nth: str = "") -> Any:
    """A value of that type with every field set, the same each time. `nth`: items of a list differ by it."""
    shape = shape_of(hint)
    kind, origin, arguments = shape.kind, typing.get_origin(shape.kind), typing.get_args(shape.kind)
    if origin is typing.Annotated:
        return filled(kind, name, nth)
    if origin in (typing.Union, types.UnionType):
        return filled(next(one for one in arguments if one is not type(None)), name, nth)
    if origin is Literal:
        return arguments[-1]
    if origin is list or (origin is tuple and arguments[-1] is Ellipsis):
        return origin(filled(arguments[0], f"{name}{at}", f"{nth}{at}") for at in (1, 2))
    if origin is tuple:
        return tuple(filled(one, f"{name}{at}") for at, one in enumerate(arguments, 1))
    if origin in (dict, Mapping):
        return {filled(arguments[0], f"{name}-key"): filled(arguments[1], name)}
    if kind in (None, type(None)):
        return None
    if kind in _PLAIN:
        return _PLAIN[kind](shape, name)
    return _record(kind, _GIVEN.get(kind.__name__, {}), nth)


def _number(shape: Any, name: str) -> int:
    wanted = 1000 + sum(name.encode()) % 1000  # by its name: fields that change places are seen
    low = wanted if shape.least is None else max(wanted, shape.least)
    return low if shape.most is None else min(low, shape.most)


_PLAIN: dict[Any, Any] = {
    bool: lambda shape, name: True,
    int: _number,
    float: lambda shape, name: 0.5 + sum(name.encode()) % 7 / 16,
    str: lambda shape, name: name[: shape.longest],
    bytes: lambda shape, name: name.encode()[: shape.longest],
    Any: lambda shape, name: name,
}


def _record(kind: Any, given: Mapping[str, Any], nth: str = "") -> Any:
    if kind.__name__ == "Route":
        return _route(kind)
    hints = fields_of(kind)
    if hints is None:
        hints = typing.get_type_hints(kind, include_extras=True)  # a NamedTuple
    if dataclasses.is_dataclass(kind):
        hints = {one.name: hints[one.name] for one in dataclasses.fields(kind) if one.init}
    values = {}
    for name, hint in hints.items():
        one = given.get(name)
        if isinstance(one, dict):
            values[name] = _record(hint, one)
        else:
            values[name] = filled(hint, f"{name}{nth}", nth) if one is None else one
    return kind(**values)


def _route(kind: Any) -> Any:
    """A route covers every slot, so its ranges cannot be any."""
    [range_type, *_] = typing.get_args(typing.get_type_hints(kind)["ranges"])
    first, second = range_type(0, 511, 0, 11, ""), range_type(512, 1023, 1, 12, "east")
    return kind("topic", 3, (first, second), True, (range_type(0, 1023, 9, 10, "east"),), {11: (10,)}, (12,))


# Settings check themselves: what goes together, for those where not everything does.
_GIVEN: dict[str, dict[str, Any]] = {
    "GroupWish": {"mode": "ordered", "order": "partition"},
    "GroupSettings": {
        "mode": "ordered",
        "order": "partition",
        "slow_lane": {"failures": 0.0, "handling_ms": 0},
    },
}


# ---- frames ----


def request_of(operation: Operation) -> tuple[Any, bytes]:
    return filled(operation.request_type), BODY if operation.has_body else b""


def shortest(operation: Operation) -> list[Any] | None:
    """The header of a client that knows only the fields without a default; None: there are no others."""
    fields = msgspec.structs.fields(operation.request_type)
    needed = [one for one in fields if one.required]
    if len(needed) == len(fields):
        return None
    full = filled(operation.request_type)
    return [getattr(full, one.name) for one in needed]


def failures() -> Iterator[Exception]:
    """Every error of the public tree."""
    for name in sorted(errors.__all__):
        kind = getattr(errors, name)
        if isinstance(kind, type) and issubclass(kind, errors.PostroomError):
            yield kind("what to do next", topic="orders", size=7)


def frames_text() -> str:
    found: dict[str, Any] = {"operations": {}, "others": {}, "errors": {}}
    for operation in internals.operations():
        found["operations"][operation.name] = _exchange(operation)
    for other in internals.other_frames():
        found["others"][other.name] = {"kind": other.kind} | _other(other)
    for error in failures():
        found["errors"][type(error).__name__] = _shown(internals.failure_frame(error))
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _exchange(operation: Operation) -> dict[str, Any]:
    short = shortest(operation)
    return {
        "kind": operation.kind,
        "repeatable": operation.repeatable,
        "request": _shown(operation.request_frame(*request_of(operation))),
        **({} if short is None else {"shortest request": _short(operation, short)}),
        "reply": _shown(operation.reply_frame(filled(operation.reply_type))),
    }


def _short(operation: Operation, header: list[Any]) -> dict[str, Any]:
    """With what the fields are that it leaves out: their defaults are a promise to old clients."""
    data = operation.request_frame(header, b"")
    request, _ = operation.request_of(data)
    names = request.__struct_fields__[len(header) :]
    return _shown(data) | {"left out": {name: _plain(getattr(request, name)) for name in names}}


def _other(other: Other) -> dict[str, Any]:
    return _shown(other.frame(filled(other.header_type)))


def _shown(data: bytes) -> dict[str, Any]:
    """A frame for people, and its bytes."""
    end = _PREFIX + int.from_bytes(data[8:12])
    header = msgspec.msgpack.decode(data[_PREFIX:end], strict=False)
    body = {"body": _plain(data[end:])} if data[end:] else {}
    return {"header": json.dumps(_plain(header), ensure_ascii=False), **body, "frame": data.hex()}


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode() if value.isascii() else value.hex()
    if isinstance(value, dict):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value
