"""Requests that a hostile client makes up, from the types of the operations alone.

Each differs from a sound request in one value: the least and the most that its type allows, one less and one
more, numbers at the edges of 64 bits, names and partitions of somebody else, lists that are empty, full, or
over. A new operation, or a new field of an old one, is covered as soon as it has a type.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tests.request_types import fields_of, shape_of

__all__ = ["World", "hostile", "sound"]

_EDGES = (-(2**63), -1, 0, 1, 2**31, 2**62, 2**63 - 1, 2**63, 2**64 - 1)
_NAMES = ("topic", "name", "group", "member", "client", "query", "segment", "shard", "producer", "topics")


@dataclass(frozen=True)
class World:
    """What a sound request names, by the name of its field; and what belongs to somebody else."""

    own: Mapping[str, Any]
    others_names: tuple[str, ...]
    others_numbers: tuple[int, ...]


def sound(hint: Any, world: World, field: str = "") -> Any:
    """A value that is taken, as it travels."""
    shape = shape_of(hint)
    kind, origin, arguments = shape.kind, typing.get_origin(shape.kind), typing.get_args(shape.kind)
    if field in world.own:
        return world.own[field]
    if origin in (typing.Union, types.UnionType):
        if type(None) in arguments:
            return None
        return sound(arguments[0], world, field)
    if origin is Literal:
        return arguments[0]
    if origin in (tuple, list):
        if origin is list or arguments[-1] is Ellipsis:
            return [sound(arguments[0], world, field)]
        return [sound(one, world) for one in arguments]
    if origin in (dict, Mapping):
        return {sound(arguments[0], world): sound(arguments[1], world)}
    fields = fields_of(kind)
    if fields is not None:
        made = {name: sound(one, world, name) for name, one in fields.items()}
        return list(made.values()) if _is_array(kind) else made
    return {int: max(1, shape.least or 0), str: "x", bytes: b"x", bool: False, float: 0.5}[kind]


def sparse(value: Any, hint: Any) -> Any:
    """The same without what may be left out: as many as possible fit into a header."""
    kind = shape_of(hint).kind
    if not isinstance(value, dict) or not dataclasses.is_dataclass(kind):
        return value
    needed = [
        f.name for f in dataclasses.fields(kind) if f.default is f.default_factory is dataclasses.MISSING
    ]
    return {name: value[name] for name in needed}


def _is_array(kind: Any) -> bool:
    config = getattr(kind, "__struct_config__", None)
    return config is not None and bool(config.array_like)


def hostile(hint: Any, world: World, field: str = "") -> Iterator[tuple[str, Any]]:
    """Where each differs from a sound value, and the value."""
    shape = shape_of(hint)
    kind, origin, arguments = shape.kind, typing.get_origin(shape.kind), typing.get_args(shape.kind)
    if origin in (typing.Union, types.UnionType):
        for one in arguments:
            if one is type(None):
                yield f"{field}=nil", None
            else:
                yield from hostile(one, world, field)
    elif origin is Literal:
        yield from ((f"{field}={one}", one) for one in arguments)
        yield f"{field}=another kind", "k" * 5000
    elif origin in (tuple, list) and (origin is list or arguments[-1] is Ellipsis):
        yield from _lists(shape.longest or 10, arguments[0], world, field)
    elif origin is tuple:
        base = [sound(one, world) for one in arguments]
        for at, one in enumerate(arguments):
            for label, value in hostile(one, world, f"{field}[{at}]"):
                yield label, [*base[:at], value, *base[at + 1 :]]
    elif origin in (dict, Mapping):
        yield from _maps(shape.longest or 10, arguments, world, field)
    elif (fields := fields_of(kind)) is not None:
        yield from _records(kind, fields, world, field)
    else:
        yield from _leaves(shape, world, field)


def _records(kind: Any, fields: dict[str, Any], world: World, field: str) -> Iterator[tuple[str, Any]]:
    base = {name: sound(one, world, name) for name, one in fields.items()}
    for name, one in fields.items():
        for label, value in hostile(one, world, name):
            made = {**base, name: value}
            yield f"{field}.{label}", list(made.values()) if _is_array(kind) else made
    made = {**base, "newer": [{"a": [2**64 - 1]}] * 100}
    yield f"{field}+newer", list(made.values()) if _is_array(kind) else made


def _lists(longest: int, element: Any, world: World, field: str) -> Iterator[tuple[str, Any]]:
    one = sound(element, world, field)
    yield f"{field}=[]", []
    for length in (longest, longest + 1):
        yield f"{field}=[{length} different]", [_moved(one, number) for number in range(length)]
        yield f"{field}=[{length} equal]", [one] * length
    small = sparse(one, element)
    for length in (100, 1000, 3000, longest):  # of these, some fit into a header
        yield f"{field}=[{length} small]", [_moved(small, number) for number in range(min(length, longest))]
    yield f"{field}=[twice]", [one, one]
    for label, value in hostile(element, world, field):
        yield f"{field}[].{label}", [value]


def _maps(
    longest: int, arguments: tuple[Any, ...], world: World, field: str
) -> Iterator[tuple[str, dict[Any, Any]]]:
    value = sound(arguments[1], world)
    yield f"{field}={{}}", {}
    for length in (longest, longest + 1):
        yield f"{field}={{{length}}}", {f"k{number}": value for number in range(length)}
    for label, key in hostile(arguments[0], world, field):
        if isinstance(key, str | int):
            yield f"{field}.key {label}", {key: value}
    for label, other in hostile(arguments[1], world, field):
        yield f"{field}.value {label}", {"k": other}


def _leaves(shape: Any, world: World, field: str) -> Iterator[tuple[str, Any]]:
    if shape.kind is int:
        least, most = shape.least, shape.most
        numbers = {least, least - 1, least + 1, most, most + 1, most - 1, *_EDGES, *world.others_numbers}
        yield from ((f"{field}={number}", number) for number in sorted(numbers) if -(2**63) <= number < 2**64)
    elif shape.kind is str:
        longest = shape.longest
        for length in (0, longest, longest + 1, 200_000):
            yield f"{field}='x'*{length}", "x" * length
        yield f"{field}=dead of dead", "a" + ".g.dead" * (longest // 7)
        yield f"{field}=wide", "\U0001f600" * longest
        yield f"{field}=nul", "a\0b"
        for name in world.others_names if field in _NAMES else ():
            yield f"{field}={name}", name
    elif shape.kind is bytes:
        yield from ((f"{field}=b'x'*{n}", b"x" * n) for n in (0, 1, shape.longest, shape.longest + 1, 2**20))
    elif shape.kind is bool:
        yield f"{field}=true", True
    elif shape.kind is float:
        for number in (0.0, -1.0, 1e308, float("nan"), float("inf")):
            yield f"{field}={number}", number


def _moved(value: Any, by: int) -> Any:
    """The same with other numbers and texts: a full list has an entry of each."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value + 2 * by
    if isinstance(value, str):
        return value if value.isalpha() and len(value) > 1 else f"{value}{by}"
    if isinstance(value, list):
        return [_moved(one, by) for one in value]
    if isinstance(value, dict):
        return {name: _moved(one, by) for name, one in value.items()}
    return value
