"""Columns of Python objects: what a parser gives becomes an Arrow array of exactly the type that Spark
expects.

A `Shape` says how an object falls into columns: field by field, never row by row. A value that fits into no
column does not spoil its batch: `gather` finds it by halving, and says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

__all__ = ["Fields", "Items", "Leaf", "Pairs", "Shape", "Unreadable", "gather", "reason"]

Getter = Callable[[Any], Any]

_FIRST = datetime(1, 1, 1, tzinfo=UTC)
_LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
_SHOWN = 300  # characters of a reason


class Unreadable(ValueError):
    """One value cannot be read; the text says why."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A plain value. `convert` is called for each that is not null."""

    type: Any
    convert: Getter | None = None


@dataclass(frozen=True, slots=True)
class Items:
    """A sequence of values."""

    type: Any
    item: Shape


@dataclass(frozen=True, slots=True)
class Pairs:
    """A dict, or what has its `items()`."""

    type: Any
    key: Shape
    value: Shape


@dataclass(frozen=True, slots=True)
class Fields:
    """An object with fields, and how each is taken from it."""

    type: Any
    getters: tuple[Getter, ...]
    shapes: tuple[Shape, ...]


Shape = Leaf | Items | Pairs | Fields


def gather(shape: Shape, values: Sequence[Any]) -> tuple[Any, dict[int, str]]:
    """An array as long as `values`, and what could not be put into it: where, and why. It is null there."""
    bad: dict[int, str] = {}
    parts = list(_parts(shape, values, 0, bad))
    import pyarrow as pa

    return (parts[0] if len(parts) == 1 else pa.concat_arrays(parts)), bad


def _parts(shape: Shape, values: Sequence[Any], at: int, bad: dict[int, str]) -> list[Any]:
    try:
        return [_array(shape, values)]
    except Exception as error:
        if len(values) == 1:
            bad[at] = reason(error)
            return [_array(shape, [None])]
    half = len(values) // 2
    return _parts(shape, values[:half], at, bad) + _parts(shape, values[half:], at + half, bad)


def reason(error: Exception) -> str:
    """Why a value cannot be read, in one line of bounded length."""
    said = " ".join(str(error).split())
    text = said if isinstance(error, Unreadable) else f"{type(error).__name__}: {said}".rstrip(": ")
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


def _array(shape: Shape, values: Sequence[Any]) -> Any:
    match shape:
        case Leaf():
            return _leaf(shape, values)
        case Items():
            return _items(shape, values)
        case Pairs():
            return _pairs(shape, values)
        case Fields():
            return _fields(shape, values)


def _leaf(shape: Leaf, values: Sequence[Any]) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    if (convert := shape.convert) is not None:
        values = [None if value is None else convert(value) for value in values]
    made = pa.array(values, shape.type)
    if pa.types.is_timestamp(shape.type) and made.null_count < len(made):
        ends = pc.min_max(made)
        first, last = (pa.scalar(at, pa.timestamp("us", "UTC")).cast(shape.type) for at in (_FIRST, _LAST))
        if ends["min"].value < first.value or ends["max"].value > last.value:
            raise Unreadable("a time outside of the years 1 to 9999")
    return made


def _items(shape: Items, values: Sequence[Any]) -> Any:
    import pyarrow as pa

    inner = _array(shape.item, list(chain.from_iterable(v for v in values if v is not None)))
    return pa.ListArray.from_arrays(_places(values), inner, type=shape.type)


def _pairs(shape: Pairs, values: Sequence[Any]) -> Any:
    import pyarrow as pa

    flat = [pair for value in values if value is not None for pair in value.items()]
    keys = _array(shape.key, [key for key, _ in flat])
    items = _array(shape.value, [value for _, value in flat])
    return pa.MapArray.from_arrays(_places(values), keys, items, type=shape.type)


def _places(values: Sequence[Any]) -> Any:
    """Where each begins in what lies inside; null: there is none."""
    import pyarrow as pa

    at, places = 0, list[int | None]()
    for value in values:
        places.append(None if value is None else at)
        at += 0 if value is None else len(value)
    return pa.array([*places, at], pa.int32())


def _fields(shape: Fields, values: Sequence[Any]) -> Any:
    import pyarrow as pa

    there = [value for value in values if value is not None]
    inner = [_array(one, list(map(get, there))) for get, one in zip(shape.getters, shape.shapes, strict=True)]
    fields = list(shape.type)
    if len(there) == len(values):
        return pa.StructArray.from_arrays(inner, fields=fields)
    at, places = 0, list[int | None]()
    for value in values:
        places.append(None if value is None else at)
        at += value is not None
    where = pa.array(places, pa.int32())
    spread = [array.take(where) for array in inner]
    return pa.StructArray.from_arrays(spread, fields=fields, mask=where.is_null())
