"""Protobuf values: single messages, as columns of a message type.

A field that has presence (a message, `optional`, a member of a oneof) is null where it is not set; any
other has its default, as in every language. Enums are their names, uint32 is bigint and uint64
decimal(20,0), so that no number changes. With a registry each value says which message it is; it must be
the one that is read, in whatever version: fields have numbers, and need no resolution.

A message that contains itself has no columns, and is refused.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from decimal import Decimal
from importlib import import_module
from operator import attrgetter
from typing import Any

from ...errors import UsageError, how_to_install
from .arrow import Fields, Items, Leaf, Pairs, Shape, Unreadable, arrow_type
from .registry import HEADER_BYTES, Registered, Registry, header

__all__ = ["ProtobufParser", "ProtobufValues", "files_of_registered", "files_of_set"]

_WELL_KNOWN = ("any", "duration", "empty", "field_mask", "struct", "timestamp", "wrappers", "descriptor")
_WITH = "write it with protoc --include_imports --descriptor_set_out=FILE"
_PLAIN = {  # by FieldDescriptor.CPPTYPE_…
    1: "IntegerType",
    2: "LongType",
    3: "LongType",
    5: "DoubleType",
    6: "FloatType",
    7: "BooleanType",
    9: "StringType",
}
_UINT64, _ENUM, _BYTES, _MESSAGE = 4, 8, 12, 10  # CPPTYPE_UINT64, CPPTYPE_ENUM, TYPE_BYTES, CPPTYPE_MESSAGE
_INDEXES = 32  # a message is nested no deeper in its file
_KEPT = 1_000  # names of messages in memory


@dataclass(frozen=True, slots=True)
class ProtobufValues:
    files: tuple[bytes, ...]  # each a FileDescriptorProto; the last has the message, unless it is named
    message: str = ""  # its whole name; "": the first one
    registry: Registry | None = None

    @property
    def type(self) -> Any:
        return _Columns(_message(self.files, self.message)).made[0]

    def parser(self) -> ProtobufParser:
        return ProtobufParser(_message(self.files, self.message), self.registry)


class ProtobufParser:
    def __init__(self, message: Any, registry: Registry | None) -> None:
        from google.protobuf.message_factory import GetMessageClass

        self._name, self._registry = message.full_name, registry
        self._read: Callable[[bytes], Any] = GetMessageClass(message).FromString
        self.shape = _Columns(message).made[1]
        self._names: dict[tuple[int, tuple[int, ...]], str] = {}

    def __call__(self, value: bytes) -> Any:
        if self._registry is not None:
            number = header(value)
            path, at = _indexes(value, HEADER_BYTES)
            self._check(self._registry, number, path)
            value = value[at:]
        try:
            return self._read(value)
        except Exception as error:
            raise Unreadable(f"it is no message of type {self._name} ({error})") from None

    def _check(self, registry: Registry, number: int, path: tuple[int, ...]) -> None:
        key = (number, path)
        if key not in self._names:
            schema = registry.by_id(number)
            try:
                self._names[key] = _at_path(_file(files_of_registered(schema)), path).full_name
            except ValueError as error:
                self._names[key] = f"none: {error}"
            while len(self._names) > _KEPT:
                del self._names[next(iter(self._names))]
        if self._names[key] != self._name:
            raise Unreadable(f"schema {number}: its type is {self._names[key]}, and {self._name} is read")


def _indexes(value: bytes, at: int) -> tuple[tuple[int, ...], int]:
    """Which message of its file it is, one index for each level; nothing stands for the first."""
    count, at = _zigzag(value, at)
    if not 0 <= count <= _INDEXES:
        raise Unreadable(f"its header names {count} message indexes")
    path = []
    for _ in range(count):
        index, at = _zigzag(value, at)
        path.append(index)
    return tuple(path) or (0,), at


def _zigzag(value: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(value) and shift < 35:
        byte = value[at]
        number, shift, at = number | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return (number >> 1) ^ -(number & 1), at
    raise Unreadable("the header of the registry is cut off")


# ---- descriptors ----


def files_of_set(data: bytes) -> tuple[bytes, ...]:
    """The files of a FileDescriptorSet, as protoc writes it. ValueError says what is wrong."""
    pb2 = _descriptors()
    try:
        found = pb2.FileDescriptorSet.FromString(data)
    except Exception:
        raise ValueError(f"it is no descriptor set: {_WITH}") from None
    if not found.file:
        raise ValueError(f"the descriptor set has no file: {_WITH}")
    return tuple(one.SerializeToString() for one in found.file)


def files_of_registered(schema: Registered) -> tuple[bytes, ...]:
    """The same of a registry's schema, which is a base64 of each file without its name."""
    pb2 = _descriptors()
    files = []
    for name, text in [*schema.references, ("", schema.text)]:
        try:
            file = pb2.FileDescriptorProto.FromString(base64.b64decode(text, validate=True))
        except Exception:
            raise ValueError("it is no serialized protobuf schema: is the registry older than 5.5?") from None
        file.name = name or "postroom-value.proto"
        files.append(file.SerializeToString())
    return tuple(files)


def _descriptors() -> Any:
    try:
        return import_module("google.protobuf.descriptor_pb2")
    except ImportError:
        raise UsageError(
            f"valueFormat=protobuf needs protobuf here: {how_to_install('spark-formats')}"
        ) from None


def _file(files: Iterable[bytes]) -> Any:
    """The last file, in a pool of its own with those it imports."""
    from google.protobuf.descriptor_pool import DescriptorPool

    pb2 = _descriptors()
    known = {}
    for name in _WELL_KNOWN:
        module = import_module(f"google.protobuf.{name}_pb2")
        known[module.DESCRIPTOR.name] = pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    listed = [pb2.FileDescriptorProto.FromString(data) for data in files]
    known.update({file.name: file for file in listed})
    pool, added = DescriptorPool(), set[str]()

    def add(file: Any, path: tuple[str, ...] = ()) -> None:
        if file.name in added or file.name in path:
            return
        for name in file.dependency:
            if name not in known:
                raise ValueError(f"{file.name} imports {name}, which is missing: {_WITH}")
            add(known[name], (*path, file.name))
        added.add(file.name)
        pool.AddSerializedFile(file.SerializeToString())

    try:
        for file in listed:
            add(file)
        return pool.FindFileByName(listed[-1].name)
    except (TypeError, KeyError) as error:
        raise ValueError(f"it is no valid descriptor ({error}): {_WITH}") from None


def _message(files: tuple[bytes, ...], name: str) -> Any:
    file = _file(files)
    if name:
        try:
            return file.pool.FindMessageTypeByName(name)
        except KeyError:
            there = ", ".join(one.full_name for one in file.message_types_by_name.values())
            raise ValueError(f"there is no message {name!r} in it; there are {there or 'none'}") from None
    return _at_path(file, (0,))


def _at_path(file: Any, path: tuple[int, ...]) -> Any:
    described = _descriptors().FileDescriptorProto.FromString(file.serialized_pb).message_type
    inside, found = [file.message_types_by_name[one.name] for one in described], None
    for index in path:
        if not 0 <= index < len(inside):
            raise ValueError(f"there is no message {'.'.join(map(str, path))} in it")
        found = inside[index]
        inside = list(found.nested_types)
    return found


# ---- columns ----


class _Columns:
    """The Spark type of a message, and how messages fall into it."""

    def __init__(self, message: Any) -> None:
        self.made = self._message(message, "value", ())

    def _message(self, message: Any, path: str, inside: tuple[str, ...]) -> tuple[Any, Shape]:
        from pyspark.sql import types

        name = message.full_name
        if name in _SPECIAL:
            return _special(name)
        if name in inside:
            raise ValueError(
                f"{path}: {name} contains itself, and a column cannot: describe a message without that field"
            )
        if not message.fields:
            return types.BooleanType(), Leaf(arrow_type(types.BooleanType()), lambda _: True)
        inner = [self._field(one, f"{path}.{one.name}", (*inside, name)) for one in message.fields]
        made = types.StructType(
            [types.StructField(f.name, kind) for f, (kind, _) in zip(message.fields, inner, strict=True)]
        )
        getters = tuple(_getter(one) for one in message.fields)
        return made, Fields(arrow_type(made), getters, tuple(shape for _, shape in inner))

    def _field(self, field: Any, path: str, inside: tuple[str, ...]) -> tuple[Any, Shape]:
        from pyspark.sql import types

        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            entry = field.message_type.fields_by_name
            key, key_shape = self._one(entry["key"], path, inside)
            value, shape = self._one(entry["value"], path, inside)
            made = types.MapType(key, value)
            return made, Pairs(arrow_type(made), key_shape, shape)
        one, shape = self._one(field, path, inside)
        if not _repeated(field):
            return one, shape
        made = types.ArrayType(one)
        return made, Items(arrow_type(made), shape)

    def _one(self, field: Any, path: str, inside: tuple[str, ...]) -> tuple[Any, Shape]:
        from pyspark.sql import types

        kind = field.cpp_type
        if kind == _MESSAGE:
            return self._message(field.message_type, path, inside)
        if kind == _UINT64:
            return types.DecimalType(20, 0), Leaf(arrow_type(types.DecimalType(20, 0)), Decimal)
        if kind == _ENUM:
            names = {value.number: value.name for value in field.enum_type.values}
            return types.StringType(), Leaf(
                arrow_type(types.StringType()), lambda number: names.get(number, str(number))
            )
        made = types.BinaryType() if field.type == _BYTES else getattr(types, _PLAIN[kind])()
        return made, Leaf(arrow_type(made))


def _repeated(field: Any) -> bool:
    """`label` is deprecated since there is `is_repeated`."""
    found: bool = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
    return found


def _getter(field: Any) -> Callable[[Any], Any]:
    name = field.name
    if not _repeated(field) and field.has_presence:
        return lambda message: getattr(message, name) if message.HasField(name) else None
    return attrgetter(name)


_SPECIAL: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "google.protobuf.Timestamp": ("TimestampType", lambda m: m.seconds * 1_000_000 + m.nanos // 1000),
    "google.protobuf.Duration": (
        "DayTimeIntervalType",
        lambda m: m.seconds * 1_000_000 + int(m.nanos / 1000),
    ),
    "google.protobuf.Struct": ("StringType", lambda m: _json(m)),
    "google.protobuf.Value": ("StringType", lambda m: _json(m)),
    "google.protobuf.ListValue": ("StringType", lambda m: _json(m)),
    **{
        f"google.protobuf.{name}Value": (kind, attrgetter("value"))
        for name, kind in {
            "Bool": "BooleanType",
            "Bytes": "BinaryType",
            "Double": "DoubleType",
            "Float": "FloatType",
            "Int32": "IntegerType",
            "Int64": "LongType",
            "String": "StringType",
            "UInt32": "LongType",
        }.items()
    },
    "google.protobuf.UInt64Value": ("DecimalType", lambda m: Decimal(m.value)),
}
"""Messages that have a type of their own in Spark."""


def _special(name: str) -> tuple[Any, Leaf]:
    from pyspark.sql import types

    kind, convert = _SPECIAL[name]
    made = types.DecimalType(20, 0) if kind == "DecimalType" else getattr(types, kind)()
    return made, Leaf(arrow_type(made), convert)


def _json(message: Any) -> str:
    from google.protobuf.json_format import MessageToJson

    text: str = MessageToJson(message, indent=None)
    return text
