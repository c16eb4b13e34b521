"""Every other message of Kafka's, by `kio`: bytes into a request, and plain values into the bytes of an
answer.

An answer is written as nested dictionaries with the fields of its newest version. Those that an older version
does not have are left out, so that a handler says once what is to be said. `kio` is an extra: whoever has not
installed it is told so when a listener is to be started.
"""

from __future__ import annotations

import dataclasses
import datetime
import io
import struct
import typing
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

from ..errors import ProtocolError, UsageError, how_to_install
from .primitives import Piece

__all__ = ["check_installed", "read_request", "written"]

_Convert = Callable[[Any], Any]


def check_installed() -> None:
    """UsageError, with what to install, if the extra is missing."""
    try:
        import kio.index  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"Kafka clients need a package that is not installed: {how_to_install('kafka')}"
        ) from error


def read_request(key: int, version: int, body: memoryview) -> Any:
    """The request in these bytes. ProtocolError if they are none."""
    try:
        found, _ = _reader(key, version)(bytes(body), 0)
    except (
        ValueError,
        TypeError,
        IndexError,
        EOFError,
        OverflowError,
        struct.error,
        io.UnsupportedOperation,
    ) as error:
        raise ProtocolError(f"a request could not be read: {error}") from None
    except Exception as error:
        if type(error).__module__.startswith(("kio", "_kio")):
            raise ProtocolError(f"a request could not be read: {error}") from None
        raise
    return found


def written(key: int, version: int, values: Mapping[str, Any]) -> list[Piece]:
    """The bytes of an answer."""
    kind, write = _writer(key, version)
    pieces = _Pieces()
    write(pieces, _built(kind, values))
    return [b"".join(pieces)]


class _Pieces(list[Piece]):
    def write(self, piece: Piece) -> None:
        self.append(piece)


@cache
def _reader(key: int, version: int) -> Callable[[bytes, int], tuple[Any, int]]:
    from kio.index import load_request_schema
    from kio.serial import entity_reader

    return typing.cast(
        "Callable[[bytes, int], tuple[Any, int]]", entity_reader(load_request_schema(key, version))
    )


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
        return lambda value: value
    return lambda value: None if value is None else tuple(_built(nested, one) for one in value)


def _nested(hint: Any) -> type[Any] | None:
    """The structure of an array's elements; None: it is no array of structures."""
    for part in (hint, *typing.get_args(hint)):
        if typing.get_origin(part) is tuple:
            first = typing.get_args(part)[0]
            return first if dataclasses.is_dataclass(first) and isinstance(first, type) else None
    return None
