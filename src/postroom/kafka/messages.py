"""Every other message of Kafka's, by the fields that `kio` knows: bytes into a request, and plain values
into the bytes of an answer.

An answer is written as nested dictionaries with the fields of its newest version. Those that an older version
does not have are left out, so that a handler says once what is to be said. `kio` is an extra: whoever has not
installed it is told so when a listener is to be started.
"""

from __future__ import annotations

import dataclasses
import datetime
import typing
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from ..errors import ProtocolError, UsageError, how_to_install
from .primitives import Piece, Reader

__all__ = ["check_installed", "read_request", "written"]

_Convert = Callable[[Any], Any]
_Read = Callable[[Reader], Any]


def check_installed() -> None:
    """UsageError, with what to install, if the extra is missing."""
    try:
        import kio.index  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Kafka clients need a package that is not installed: {how_to_install('kafka')}"
        ) from error


def read_request(key: int, version: int, body: memoryview) -> Any:
    """The request in these bytes: its fields, but for tagged ones. ProtocolError if they are none."""
    kind = _request(key, version)
    return _read(typing.cast("Hashable", kind), Reader(body))


def written(key: int, version: int, values: Mapping[str, Any]) -> list[Piece]:
    """The bytes of an answer."""
    kind, write = _writer(key, version)
    pieces = _Pieces()
    write(pieces, _built(kind, values))
    return [b"".join(pieces)]


class _Pieces(list[Piece]):
    def write(self, piece: Piece) -> None:
        self.append(piece)


# ---- requests ----
# Read by the fields that `kio` knows, and not by its reader: that one makes room for as many elements as it
# is told, and ends the process if there is no such room (I22).


@cache
def _request(key: int, version: int) -> type[Any]:
    from kio.index import load_request_schema

    return load_request_schema(key, version)


def _read(kind: Hashable, reader: Reader) -> SimpleNamespace:
    fields, flexible = _read_fields(kind)
    found = SimpleNamespace(**{name: read(reader) for name, read in fields})
    if flexible:
        reader.tags()
    return found


@cache
def _read_fields(kind: Any) -> tuple[list[tuple[str, _Read]], bool]:
    """How each field is read, in their order."""
    hints, flexible = typing.get_type_hints(kind), bool(kind.__flexible__)
    fields = [
        (one.name, _reading(hints[one.name], one.metadata.get("kafka_type", ""), flexible))
        for one in dataclasses.fields(kind)
        if "tag" not in one.metadata
    ]
    return fields, flexible


def _reading(hint: Any, kafka_type: str, flexible: bool) -> _Read:
    nullable = type(None) in typing.get_args(hint)
    if _is_array(hint):
        nested = _nested(hint)
        one = (
            _primitive(kafka_type, flexible)
            if nested is None
            else partial(_read, typing.cast("Hashable", nested))
        )

        def array(reader: Reader) -> tuple[Any, ...] | None:
            size = reader.array(flexible)
            if size < 0 and not nullable:
                raise ProtocolError("a request has no list where one must be")
            return None if size < 0 else tuple(one(reader) for _ in range(size))

        return array
    read = _primitive(kafka_type, flexible)

    def single(reader: Reader) -> Any:
        found = read(reader)
        if found is None and not nullable:
            raise ProtocolError("a request has nothing where something must stand")
        return found

    return single


def _primitive(kafka_type: str, flexible: bool) -> _Read:
    """How a value of that type is read. Durations are milliseconds; no id is None."""
    known: dict[str, _Read] = {
        "bool": lambda reader: reader.i8() != 0,
        "int8": Reader.i8,
        "int16": Reader.i16,
        "int32": Reader.i32,
        "int64": Reader.i64,
        "timedelta_i32": Reader.i32,
        "timedelta_i64": Reader.i64,
        "uuid": Reader.uuid,
        "string": lambda reader: reader.string(flexible),
        "bytes": lambda reader: reader.owned(flexible),
    }
    return known[kafka_type]


def _is_array(hint: Any) -> bool:
    return any(typing.get_origin(part) is tuple for part in (hint, *typing.get_args(hint)))


# ---- answers ----


@cache
def _writer(key: int, version: int) -> tuple[type[Any], Callable[[Any, Any], None]]:
    from kio.index import load_response_schema
    from kio.serial import entity_writer

    kind: type[Any] = load_response_schema(key, version)
    return kind, typing.cast("Callable[[Any, Any], None]", entity_writer(kind))


def _built(kind: type[Any], values: Mapping[str, Any]) -> Any:
    fields = _fields(typing.cast("Hashable", kind))
    return kind(**{name: fields[name](value) for name, value in values.items() if name in fields})


@cache
def _fields(kind: type[Any]) -> dict[str, _Convert]:
    """How the value of each field is made into what `kio` wants there."""
    hints = typing.get_type_hints(kind)
    return {
        one.name: _conversion(hints[one.name], one.metadata.get("kafka_type", ""))
        for one in dataclasses.fields(kind)
    }


def _conversion(hint: Any, kafka_type: str) -> _Convert:
    if kafka_type == "error_code":
        from kio.schema.errors import ErrorCode

        return ErrorCode
    if kafka_type.startswith("timedelta"):
        return lambda value: datetime.timedelta(milliseconds=value)
    nested = _nested(hint)
    if nested is None:
        single = _structure(hint)
        if single is None:
            return lambda value: value
        return lambda value: None if value is None else _built(single, value)
    return lambda value: None if value is None else tuple(_built(nested, one) for one in value)


def _nested(hint: Any) -> type[Any] | None:
    """The structure of an array's elements; None: it is no array of structures."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is tuple:
            first = typing.get_args(part)[0]
            return first if dataclasses.is_dataclass(first) and isinstance(first, type) else None
    return None


def _structure(hint: Any) -> type[Any] | None:
    """The structure that a field is; None: it is no structure."""
    for part in (hint, *typing.get_args(hint)):
        if dataclasses.is_dataclass(part) and isinstance(part, type):
            return part
    return None
