"""What requests consist of, read from their types: every value that travels, and its bounds.

Walks msgspec structs, dataclasses, tuples, maps and unions, so that a field or an operation that is new is
seen without a change here.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

__all__ = ["Shape", "fields_of", "shape_of", "walked"]


class Shape(NamedTuple):
    """A type, without its annotations, and what those bound."""

    kind: Any
    least: int | None = None
    most: int | None = None
    longest: int | None = None


def shape_of(hint: Any) -> Shape:
    if typing.get_origin(hint) is not Annotated:
        return Shape(hint)
    kind, *metas = typing.get_args(hint)
    found = Shape(kind)
    for meta in metas:
        if isinstance(meta, msgspec.Meta):
            given = {"least": meta.ge, "most": meta.le, "longest": meta.max_length}
            found = found._replace(**{name: value for name, value in given.items() if value is not None})
    return found


def fields_of(record: Any) -> dict[str, Any] | None:
    """Names and types of a struct or a dataclass; None: it is neither."""
    if not isinstance(record, type):
        return None
    if issubclass(record, msgspec.Struct):
        names: tuple[str, ...] = record.__struct_fields__
    elif dataclasses.is_dataclass(record):
        names = tuple(field.name for field in dataclasses.fields(record))
    else:
        return None
    hints = typing.get_type_hints(record, include_extras=True)
    return {name: hints[name] for name in names}


def walked(hint: Any, path: str = "") -> Iterator[tuple[str, Shape]]:
    """Every value within that type, with where it is."""
    shape = shape_of(hint)
    origin, arguments = typing.get_origin(shape.kind), typing.get_args(shape.kind)
    if origin in (typing.Union, types.UnionType):
        for one in arguments:
            if one is not type(None):
                yield from walked(one, path)
    elif origin in (tuple, list):
        repeated = origin is list or arguments[-1] is Ellipsis
        if repeated:
            yield path, shape
        for one in arguments[:1] if repeated else arguments:
            yield from walked(one, f"{path}[]")
    elif origin in (dict, Mapping):
        yield path, shape
        for one in arguments:
            yield from walked(one, f"{path}{{}}")
    elif (fields := fields_of(shape.kind)) is not None:
        for name, field in fields.items():
            yield from walked(field, f"{path}.{name}")
    elif origin is not Literal:
        yield path, shape
