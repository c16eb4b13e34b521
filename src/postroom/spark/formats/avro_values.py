"""Avro values: single records, as columns of the reader's schema.

Without a registry they are written in the schema that is given. With one each says which schema it was
written in, and is resolved to the reader's by the rules of Avro: fields that it lacks have their defaults,
fields that only it has are left out.

A schema that refers to itself has no columns, and is refused; so are unions of several types, but for those
with null, and arrays of nothing, which bytes from anywhere could make endless.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from io import BytesIO
from operator import itemgetter
from typing import Any

from ...errors import UsageError, how_to_install
from .arrow import Fields, Items, Leaf, Pairs, Shape, Unreadable, arrow_type
from .registry import HEADER_BYTES, Registered, Registry, header

__all__ = ["AvroParser", "AvroValues"]

_LOGICAL = (
    "date",
    "decimal",
    "uuid",
    "timestamp-millis",
    "timestamp-micros",
    "local-timestamp-millis",
    "local-timestamp-micros",
)
_PLAIN = {
    "boolean": "BooleanType",
    "int": "IntegerType",
    "long": "LongType",
    "float": "FloatType",
    "double": "DoubleType",
    "bytes": "BinaryType",
    "fixed": "BinaryType",
    "string": "StringType",
    "enum": "StringType",
}
_WIDER = ({"int", "long"}, "long"), ({"float", "double"}, "double")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class AvroValues:
    schema: Registered
    registry: Registry | None = None

    @property
    def type(self) -> Any:
        return _Columns(_parsed(self.schema)).made[0]

    def parser(self) -> AvroParser:
        return AvroParser(self.schema, self.registry)


class AvroParser:
    def __init__(self, schema: Registered, registry: Registry | None) -> None:
        self._reader, names = _parsed(schema)
        from fastavro import schemaless_reader

        self._read, self._registry = schemaless_reader, registry
        self.shape = _Columns((self._reader, names)).made[1]
        self._own = schema
        self._writers: dict[int, tuple[Any, Any]] = {}  # and the reader's schema, if it is another one
        self._refused: dict[int, str] = {}

    def __call__(self, value: bytes) -> Any:
        source = BytesIO(value)
        if self._registry is None:
            writer, reader = self._reader, None
        else:
            writer, reader = self._written_in(self._registry, header(value))
            source.seek(HEADER_BYTES)
        try:
            found = self._read(source, writer, reader)
        except Exception as error:
            said = f"{type(error).__name__} {error}".strip()
            raise Unreadable(f"it is not as its schema says ({said})") from None
        left = len(value) - source.tell()
        if left:
            raise Unreadable(f"{left} bytes are left over: was it written in another schema?")
        return found

    def _written_in(self, registry: Registry, number: int) -> tuple[Any, Any]:
        if number in self._refused:
            raise Unreadable(self._refused[number])
        if number not in self._writers:
            schema = registry.by_id(number)
            try:
                if schema == self._own:
                    self._writers[number] = (self._reader, None)
                else:
                    writer, names = _parsed(schema)
                    _check(writer, names)
                    self._writers[number] = (writer, self._reader)
            except ValueError as error:
                self._refused[number] = f"schema {number}: {error}"
                raise Unreadable(self._refused[number]) from None
        return self._writers[number]


# ---- schemas ----


def _parsed(schema: Registered) -> tuple[Any, dict[str, Any]]:
    """With whole names everywhere, and the types by name. ValueError says what is wrong."""
    try:
        from fastavro import parse_schema
    except ImportError:
        raise UsageError(f"valueFormat=avro needs fastavro here: {how_to_install('spark-formats')}") from None
    names: dict[str, Any] = {}
    found: Any = None
    for text in [*(text for _, text in schema.references), schema.text]:
        try:
            found = parse_schema(_without_unknown(json.loads(text)), named_schemas=names)
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        except Exception as error:
            raise ValueError(f"it is no Avro schema ({type(error).__name__}: {error})") from None
    return found, names


def _without_unknown(schema: Any) -> Any:
    """Logical types that are not in the list are what is below them, such as a long."""
    if isinstance(schema, list):
        return [_without_unknown(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    dropped = schema.get("logicalType") not in _LOGICAL
    return {
        name: value if name in ("default", "symbols") else _without_unknown(value)
        for name, value in schema.items()
        if not (name == "logicalType" and dropped)
    }


def _kind(schema: Any) -> Any:
    return schema["type"] if isinstance(schema, dict) else schema


def _check(schema: Any, names: Mapping[str, Any], inside: tuple[str, ...] = ()) -> int:
    """The fewest bytes of a value. ValueError: reading it may not end."""
    if isinstance(schema, list):
        return 1 + min((_check(one, names, inside) for one in schema), default=0)
    kind = _kind(schema)
    if kind in names:
        return _check(names[kind], names, inside)
    match kind:
        case "record" | "error":
            return sum(_check(f["type"], names, _entered(schema, inside)) for f in schema["fields"])
        case "array":
            if not _check(schema["items"], names, inside):
                raise ValueError("it has an array of something that takes no bytes")
            return 1
        case "map":
            _check(schema["values"], names, inside)
            return 1
        case "fixed":
            return int(schema["size"])
        case "null":
            return 0
        case "float":
            return 4
        case "double":
            return 8
    return 1


def _entered(record: Mapping[str, Any], inside: tuple[str, ...]) -> tuple[str, ...]:
    name = record["name"]
    if name in inside:
        raise ValueError(f"{name} contains itself, and a column cannot: use a schema without that field")
    return (*inside, name)


# ---- columns ----


class _Columns:
    """The Spark type of the reader's schema, and how records fall into it."""

    def __init__(self, parsed: tuple[Any, Mapping[str, Any]]) -> None:
        schema, self._names = parsed
        if _kind(self._named(schema)) not in ("record", "error"):
            raise ValueError("the schema of a value is a record")
        self.made = self._of(schema, "value", ())
        _check(schema, self._names)

    def _named(self, schema: Any) -> Any:
        kind = _kind(schema) if not isinstance(schema, list) else None
        return self._names[kind] if isinstance(kind, str) and kind in self._names else schema

    def _of(self, schema: Any, path: str, inside: tuple[str, ...]) -> tuple[Any, Shape]:
        from pyspark.sql import types

        schema = self._named(_without_null(schema, path))
        kind = _kind(schema)
        if isinstance(schema, dict) and "logicalType" in schema:
            return _logical(schema, path)
        match kind:
            case "record" | "error":
                inside = _entered(schema, inside)
                if not schema["fields"]:
                    raise ValueError(f"{path}: the record {schema['name']} has no fields")
                listed = [f["name"] for f in schema["fields"]]
                inner = [self._of(f["type"], f"{path}.{f['name']}", inside) for f in schema["fields"]]
                made = types.StructType(
                    [types.StructField(name, one) for name, (one, _) in zip(listed, inner, strict=True)]
                )
                getters = tuple(itemgetter(name) for name in listed)
                return made, Fields(arrow_type(made), getters, tuple(shape for _, shape in inner))
            case "array":
                item, shape = self._of(schema["items"], path, inside)
                made = types.ArrayType(item)
                return made, Items(arrow_type(made), shape)
            case "map":
                item, shape = self._of(schema["values"], path, inside)
                made = types.MapType(types.StringType(), item)
                return made, Pairs(arrow_type(made), Leaf(arrow_type(types.StringType())), shape)
        if kind not in _PLAIN:
            raise ValueError(f"{path}: the type {kind!r} cannot be a column")
        made = getattr(types, _PLAIN[kind])()
        return made, Leaf(arrow_type(made))


def _without_null(schema: Any, path: str) -> Any:
    """The type of a union with null, or of numbers the widest."""
    if not isinstance(schema, list):
        return schema
    rest = [one for one in schema if one != "null"]
    if len(rest) == 1:
        return rest[0]
    for numbers, wider in _WIDER:
        if rest and all(isinstance(one, str) for one in rest) and set(rest) <= numbers:
            return wider
    raise ValueError(
        f"{path}: a union of several types cannot be a column: give a schema with one of them and null, with "
        "valueSchema"
    )


def _logical(schema: Mapping[str, Any], path: str) -> tuple[Any, Leaf]:
    """What fastavro gives, or, where the writer did not say so, what is below."""
    from pyspark.sql import types

    kind = schema["logicalType"]
    if kind == "decimal":
        precision, scale = int(schema["precision"]), int(schema.get("scale", 0))
        if precision > 38:
            raise ValueError(f"{path}: a decimal has 38 digits at most in Spark, not {precision}")
        made: Any = types.DecimalType(precision, scale)
        return made, Leaf(arrow_type(made), lambda v: v if isinstance(v, Decimal) else _decimal(v, scale))
    if kind == "uuid":
        return types.StringType(), Leaf(arrow_type(types.StringType()), str)
    if kind == "date":
        return types.DateType(), Leaf(arrow_type(types.DateType()), _day)
    made = types.TimestampNTZType() if kind.startswith("local") else types.TimestampType()
    epoch = _EPOCH.replace(tzinfo=None) if kind.startswith("local") else _EPOCH
    step = timedelta(milliseconds=1) if kind.endswith("millis") else timedelta(microseconds=1)
    return made, Leaf(arrow_type(made), lambda v: v if isinstance(v, datetime) else epoch + v * step)


def _decimal(value: bytes, scale: int) -> Decimal:
    return Decimal(int.from_bytes(value, "big", signed=True)).scaleb(-scale)


def _day(value: date | int) -> date:
    return value if isinstance(value, date) else _EPOCH.date() + timedelta(days=value)
