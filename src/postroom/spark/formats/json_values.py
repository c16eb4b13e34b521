"""JSON values: objects in UTF-8, as columns of a Spark schema.

Means what Spark's `from_json` means: a field that is missing or null is null, one that the schema does not
name is left out, of a name that comes twice the last counts, and a field of type string takes any JSON as
its text. In one thing it is stricter: a value with one field of another type is not read at all, rather
than in part. A time without a zone is in UTC.

There are two decoders. The first takes what nearly all messages have; the second also what is rarer: text
for what is no text, dates as moments, seconds since 1970, "NaN".
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from decimal import ROUND_HALF_UP, Context, Decimal
from operator import attrgetter
from typing import Annotated, Any

import msgspec

from .arrow import Fields, Items, Leaf, Pairs, Shape, Unreadable, arrow_type
from .registry import HEADER_BYTES, header

__all__ = ["JsonParser", "JsonValues", "type_of"]


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_NUMBERS = {
    "NaN": float("nan"),
    **dict.fromkeys(("Infinity", "+Infinity", "+INF"), float("inf")),
    **dict.fromkeys(("-Infinity", "-INF"), float("-inf")),
}
_TEXT = msgspec.json.Encoder(decimal_format="number")


@dataclass(frozen=True, slots=True)
class JsonValues:
    """`type` is a StructType of which everything may be null."""

    type: Any
    framed: bool = False  # each value begins with the id of a schema

    def parser(self) -> JsonParser:
        return JsonParser(self.type, self.framed)


class JsonParser:
    def __init__(self, type: Any, framed: bool = False) -> None:
        self.shape = _shape(type, "value")
        self._framed = framed
        self._strict = msgspec.json.Decoder(_model(type, loose=False), dec_hook=_loose, float_hook=Decimal)
        self._loose = msgspec.json.Decoder(_model(type, loose=True), dec_hook=_loose, float_hook=Decimal)
        self._first = self._strict

    def __call__(self, value: bytes) -> Any:
        if self._framed:
            header(value)
            value = value[HEADER_BYTES:]
        try:
            return self._first.decode(value)
        except msgspec.ValidationError as error:
            if self._first is self._loose:
                raise Unreadable(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Unreadable(f"it is no JSON: {error}") from None
        try:
            found = self._loose.decode(value)
        except msgspec.ValidationError as error:
            raise Unreadable(str(error)) from None
        self._first = self._loose  # one comes seldom alone, and it takes all that the first does
        return found


# ---- what msgspec decodes ----


class _Anything(type):
    """msgspec asks whether what a hook returned is an instance of what was declared."""

    def __instancecheck__(cls, value: object) -> bool:
        return True


class _Text(metaclass=_Anything):
    pass


class _Number(metaclass=_Anything):
    pass


class _Moment(metaclass=_Anything):
    pass


class _LocalMoment(metaclass=_Anything):
    pass


def _loose(kind: type, value: Any) -> Any:
    if kind is _Text:
        return value if isinstance(value, str) else _TEXT.encode(value).decode()
    if kind is _Number:
        if isinstance(value, str) and value in _NUMBERS:
            return _NUMBERS[value]
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            return float(value)
        raise ValueError(f"Expected a number, got {_brief(value)}")
    if kind is _Moment and type(value) is int:
        try:
            return _EPOCH + timedelta(seconds=value)
        except OverflowError:
            raise ValueError(
                f"{value} seconds since 1970 are beyond the year 9999: declare the field as bigint if it "
                "counts milliseconds"
            ) from None
    if isinstance(value, str):
        return datetime.fromisoformat(value)
    raise ValueError(f"Expected a time, got {_brief(value)}")


def _brief(value: Any) -> str:
    text = _TEXT.encode(value).decode()
    return text if len(text) <= 40 else text[:40] + "…"


def _whole(bits: int) -> Any:
    return Annotated[int, msgspec.Meta(ge=-(2 ** (bits - 1)), le=2 ** (bits - 1) - 1)]


def _model(kind: Any, loose: bool) -> Any:
    from pyspark.sql import types

    match kind:
        case types.StructType():
            names = {f"f{n}": field.name for n, field in enumerate(kind.fields)}
            fields = [
                (f"f{n}", _model(field.dataType, loose) | None, None) for n, field in enumerate(kind.fields)
            ]
            return msgspec.defstruct("Value", fields, rename=names, gc=False)
        case types.ArrayType():
            return list[_model(kind.elementType, loose) | None]  # type: ignore[misc]
        case types.MapType():
            return dict[str, _model(kind.valueType, loose) | None]  # type: ignore[misc]
        case types.StringType():
            return _Text if loose else str
        case types.DoubleType() | types.FloatType():
            return _Number if loose else float
        case types.TimestampType():
            return _Moment if loose else datetime
        case types.TimestampNTZType():
            return _LocalMoment if loose else datetime
        case types.BooleanType():
            return bool
        case types.ByteType():
            return _whole(8)
        case types.ShortType():
            return _whole(16)
        case types.IntegerType():
            return _whole(32)
        case types.LongType():
            return _whole(64)
        case types.DecimalType():
            return Decimal
        case types.DateType():
            return date
        case types.BinaryType():
            return bytes
    raise ValueError(f"the type {kind.simpleString()} cannot be read from JSON: use string, or leave it out")


# ---- and how it becomes columns ----


def _shape(kind: Any, path: str) -> Shape:
    from pyspark.sql import types

    made = arrow_type(kind)
    match kind:
        case types.StructType():
            if not kind.fields:
                raise ValueError(f"{path} has no fields: name one at least, or use map<string, …>")
            return Fields(
                made,
                tuple(attrgetter(f"f{n}") for n in range(len(kind.fields))),
                tuple(_shape(field.dataType, f"{path}.{field.name}") for field in kind.fields),
            )
        case types.ArrayType():
            return Items(made, _shape(kind.elementType, path))
        case types.MapType():
            if not isinstance(kind.keyType, types.StringType):
                raise ValueError(f"{path}: the keys of a map are strings in JSON: write map<string, …>")
            return Pairs(made, Leaf(made.key_type), _shape(kind.valueType, path))
        case types.DecimalType():
            return Leaf(made, _rounding(kind.precision, kind.scale))
        case types.TimestampNTZType():
            return Leaf(made, _without_zone)
    return Leaf(made)


def _rounding(precision: int, scale: int) -> Any:
    """Rounded as Spark does it; more digits than there is room for are an error."""
    step, context = Decimal(1).scaleb(-scale), Context(prec=38 + 38, rounding=ROUND_HALF_UP)

    def rounded(value: Decimal) -> Decimal:
        fits = value.is_finite() and value.adjusted() <= precision - scale
        made = value.quantize(step, context=context) if fits else value
        if not fits or (made and made.adjusted() >= precision - scale):
            raise Unreadable(f"{value} does not fit into decimal({precision}, {scale})")
        return made

    return rounded


def _without_zone(value: datetime) -> datetime:
    if value.tzinfo is not None:
        raise Unreadable(f"{value.isoformat()} has a zone, and the field is timestamp_ntz: use timestamp")
    return value


# ---- a JSON Schema, as registries keep it, becomes a Spark type ----
# What has no type of its own in Spark (several types, anything at all) is a string with the JSON in it:
# so nothing is lost, and from_json can go on from there.

_PLAIN = {"integer": "LongType", "number": "DoubleType", "boolean": "BooleanType", "string": "StringType"}
_FORMATS = {"date": "DateType", "date-time": "TimestampType"}


def type_of(text: str) -> Any:
    """A StructType. ValueError says what is wrong."""
    from pyspark.sql.types import StructType

    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"it is no JSON Schema ({error})") from None
    made = _Types(schema).of(schema, "value", ())
    if not isinstance(made, StructType):
        raise ValueError("the JSON Schema of a value is an object with properties: give valueSchema")
    return made


class _Types:
    def __init__(self, root: Any) -> None:
        self._root = root

    def of(self, schema: Any, path: str, inside: tuple[str, ...]) -> Any:
        from pyspark.sql import types

        if not isinstance(schema, dict):  # true: anything
            return types.StringType()
        if "$ref" in schema:
            ref = schema["$ref"]
            if ref in inside:
                raise ValueError(
                    f"{path}: {ref} contains itself, and a column cannot: give a schema without that field "
                    "with valueSchema"
                )
            return self.of(self._referred(ref), path, (*inside, ref))
        for choice in ("oneOf", "anyOf"):
            rest = [one for one in schema.get(choice, ()) if one != {"type": "null"}]
            if len(rest) == 1:
                return self.of(rest[0], path, inside)
        kind = schema.get("type")
        if isinstance(kind, list):
            rest = [one for one in kind if one != "null"]
            kind = rest[0] if len(rest) == 1 else None
        if kind == "object":
            return self._object(schema, path, inside)
        if kind == "array":
            return types.ArrayType(self.of(schema.get("items", True), path, inside))
        if kind == "string" and schema.get("format") in _FORMATS:
            return getattr(types, _FORMATS[schema["format"]])()
        return getattr(types, _PLAIN.get(kind, "StringType") if isinstance(kind, str) else "StringType")()

    def _object(self, schema: dict[str, Any], path: str, inside: tuple[str, ...]) -> Any:
        from pyspark.sql import types

        listed = schema.get("properties")
        if isinstance(listed, dict) and listed:
            return types.StructType(
                [
                    types.StructField(name, self.of(one, f"{path}.{name}", inside))
                    for name, one in listed.items()
                ]
            )
        further = schema.get("additionalProperties", True)
        if isinstance(further, dict):
            return types.MapType(types.StringType(), self.of(further, path, inside))
        return types.StringType()

    def _referred(self, ref: Any) -> Any:
        found = self._root
        if not isinstance(ref, str) or not ref.startswith("#"):
            raise ValueError(f"{ref!r} refers to another schema: give the schema with valueSchema")
        for part in ref.removeprefix("#").split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, dict) or part not in found:
                raise ValueError(f"{ref!r} refers to nothing")
            found = found[part]
        return found
