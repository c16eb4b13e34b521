"""Spark types as text and as Arrow, and columns of exactly those types: what typed reading needs without a
session.

Spark's own parser of `id bigint, items array<…>` runs in the JVM, which a data source cannot ask. A `Shape`
says how an object that a parser gave falls into columns: field by field, never row by row. A value that fits
into no column does not spoil its batch: `gather` finds it by halving, and says why.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import chain
from typing import Any

__all__ = [
    "Fields",
    "Items",
    "Leaf",
    "Pairs",
    "Shape",
    "Unreadable",
    "arrow_type",
    "fields_that_may_not_be_null",
    "gather",
    "parse_schema",
    "reason",
    "relaxed",
]


_TOKEN = re.compile(r"\s*(?:`((?:[^`]|``)+)`|('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")|([\w]+)|([<>(),:]))")
_NAMES = {
    "boolean": "BooleanType",
    "bool": "BooleanType",
    "tinyint": "ByteType",
    "byte": "ByteType",
    "smallint": "ShortType",
    "short": "ShortType",
    "int": "IntegerType",
    "integer": "IntegerType",
    "bigint": "LongType",
    "long": "LongType",
    "float": "FloatType",
    "real": "FloatType",
    "double": "DoubleType",
    "string": "StringType",
    "binary": "BinaryType",
    "date": "DateType",
    "timestamp": "TimestampType",
    "timestamp_ltz": "TimestampType",
    "timestamp_ntz": "TimestampNTZType",
}
_DECIMAL = ("decimal", "dec", "numeric")
Getter = Callable[[Any], Any]

_FIRST = datetime(1, 1, 1, tzinfo=UTC)
_LAST = datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)
_SHOWN = 300  # characters of a reason


def parse_schema(text: str) -> Any:
    """A StructType of a DDL string (`id bigint, name string`, or `struct<…>`), or of Spark's JSON. ValueError
    says what is wrong with it."""
    from pyspark.sql.types import StructType

    if not text.lstrip().startswith("{"):
        return _Parser(text).whole()
    try:
        found = json.loads(text)
        return StructType.fromJson(found)
    except Exception as error:
        raise ValueError(f"it is no schema as `df.schema.json()` gives it ({error})") from None


def relaxed(kind: Any) -> Any:
    """The same type, and everything in it may be null, as with from_json; without comments."""
    from pyspark.sql.types import ArrayType, MapType, StructField, StructType

    match kind:
        case StructType():
            return StructType([StructField(f.name, relaxed(f.dataType)) for f in kind.fields])
        case ArrayType():
            return ArrayType(relaxed(kind.elementType))
        case MapType():
            return MapType(relaxed(kind.keyType), relaxed(kind.valueType))
    return kind


def fields_that_may_not_be_null(kind: Any, path: str = "value") -> Iterator[str]:
    from pyspark.sql.types import ArrayType, MapType, StructType

    match kind:
        case StructType():
            for field in kind.fields:
                here = f"{path}.{field.name}"
                if not field.nullable:
                    yield here
                yield from fields_that_may_not_be_null(field.dataType, here)
        case ArrayType():
            if not kind.containsNull:
                yield f"{path}.element"
            yield from fields_that_may_not_be_null(kind.elementType, f"{path}.element")
        case MapType():
            if not kind.valueContainsNull:
                yield f"{path}.value"
            yield from fields_that_may_not_be_null(kind.valueType, f"{path}.value")


def arrow_type(kind: Any) -> Any:
    """What Spark compares a batch with, to the letter."""
    from pyspark.sql.pandas.types import to_arrow_type

    return to_arrow_type(kind, timezone="UTC")


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str]] = []  # what it is (name, word, text, sign), and its text
        at = 0
        text = text.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ValueError(f"{text[at:].strip()[:20]!r} is no part of a schema")
            kind = ("name", "text", "word", "sign")[(found.lastindex or 1) - 1]
            self._tokens.append((kind, found[found.lastindex or 1]))
            at = found.end()
        self._at = 0

    def whole(self) -> Any:
        whole = self._word() == "struct" and self._peek(1) == "<"
        made = self._type() if whole else self._columns()
        if self._at < len(self._tokens):
            raise ValueError(f"{self._peek()!r} was not expected behind {self._before()}")
        return made

    def _columns(self) -> Any:
        from pyspark.sql.types import StructField, StructType

        fields = []
        while True:
            name = self._name()
            self._take(":")
            kind = self._type()
            nullable = not self._words("not", "null")
            if self._words("comment"):
                self._at += 1
            fields.append(StructField(name, kind, nullable))
            if not self._take(","):
                break
        seen = [field.name for field in fields]
        for name in seen:
            if seen.count(name) > 1:
                raise ValueError(f"it has the field {name!r} twice")
        return StructType(fields)

    def _type(self) -> Any:
        from pyspark.sql import types

        word = self._word()
        self._at += 1
        if word == "array":
            self._expect("<")
            inner = self._type()
            self._expect(">")
            return types.ArrayType(inner)
        if word == "map":
            self._expect("<")
            key = self._type()
            self._expect(",")
            value = self._type()
            self._expect(">")
            return types.MapType(key, value)
        if word == "struct":
            self._expect("<")
            made = self._columns()
            self._expect(">")
            return made
        if word in _DECIMAL:
            return types.DecimalType(*self._sizes())
        if word not in _NAMES:
            known = ", ".join([*dict.fromkeys(_NAMES), "decimal(p, s)", "array<…>", "map<…, …>", "struct<…>"])
            raise ValueError(f"{word or 'nothing'!r} is no type behind {self._before(1)}; there are {known}")
        return getattr(types, _NAMES[word])()

    def _sizes(self) -> tuple[int, int]:
        if not self._take("("):
            return 10, 0
        precision = self._number()
        scale = self._number() if self._take(",") else 0
        self._expect(")")
        if not (1 <= precision <= 38 and scale <= precision):
            raise ValueError(
                f"decimal({precision}, {scale}): 1 to 38 digits, and not more of them behind the point"
            )
        return precision, scale

    # ---- single tokens ----

    def _peek(self, ahead: int = 0) -> str:
        at = self._at + ahead
        return self._tokens[at][1] if at < len(self._tokens) else ""

    def _word(self) -> str:
        at = self._at
        return self._tokens[at][1].lower() if at < len(self._tokens) and self._tokens[at][0] == "word" else ""

    def _before(self, back: int = 0) -> str:
        at = self._at - 1 - back
        return repr(self._tokens[at][1]) if at >= 0 else "the beginning"

    def _name(self) -> str:
        if self._at >= len(self._tokens) or self._tokens[self._at][0] not in ("name", "word"):
            raise ValueError(f"the name of a field is missing behind {self._before()}")
        kind, text = self._tokens[self._at]
        self._at += 1
        return text.replace("``", "`") if kind == "name" else text

    def _number(self) -> int:
        text = self._word()
        if not text.isdecimal():
            raise ValueError(f"a number is missing behind {self._before()}")
        self._at += 1
        return int(text)

    def _take(self, sign: str) -> bool:
        at = self._at
        if at < len(self._tokens) and self._tokens[at] == ("sign", sign):
            self._at += 1
            return True
        return False

    def _words(self, *words: str) -> bool:
        found = [
            text.lower() for kind, text in self._tokens[self._at : self._at + len(words)] if kind == "word"
        ]
        if found == list(words):
            self._at += len(words)
            return True
        return False

    def _expect(self, sign: str) -> None:
        if not self._take(sign):
            raise ValueError(f"{sign!r} is missing behind {self._before()}")


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
