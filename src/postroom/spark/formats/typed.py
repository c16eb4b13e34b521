"""How keys and values are read: settled once on the driver, and used for each batch on executors.

Turns what may be written about formats into one typed value, and refuses what is contradictory, with the
option's name and what to write instead. Must never show a password or a token.

Schemas are read from files and from the registry by the driver alone, so that all tasks of a DataFrame, and
of a stream until it is started again, have the same columns. Executors ask the registry only for what values
were written in. A value that cannot be read is never left out: it fails the task with its offset, or is null
with the reason and its bytes beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar
from urllib.parse import urlsplit

from ...errors import DecodeError, InvalidSetting, PostroomError
from ..options import FORMATS, bad_option
from . import json_values as json_schema
from .arrow import (
    Leaf,
    Shape,
    Unreadable,
    arrow_type,
    fields_that_may_not_be_null,
    gather,
    parse_schema,
    reason,
    relaxed,
)
from .avro_values import AvroValues
from .json_values import JsonValues
from .protobuf_values import ProtobufValues, files_of_registered, files_of_set
from .registry import Registered, Registry

__all__ = [
    "ERROR",
    "RAW",
    "FormatOptions",
    "Kind",
    "Typed",
    "check_nulls",
    "format_options",
    "settle",
]


T = TypeVar("T")

Kind = Literal["binary", "string", "json", "avro", "protobuf"]

_KINDS: dict[str, Kind] = {
    "binary": "binary",
    "string": "string",
    "json": "json",
    "avro": "avro",
    "protobuf": "protobuf",
}
_WITH_SCHEMA = ("json", "avro", "protobuf")
_OF_REGISTRY = ("schemaSubject", "schemaRegistryUser", "schemaRegistryPassword", "schemaRegistryToken")
ERROR, RAW = "valueError", "valueRaw"
"""The columns that valueErrors=null adds."""


@dataclass(frozen=True, slots=True)
class FormatOptions:
    kind: Kind = "binary"
    schema: str = ""  # as it is written
    message: str = ""
    registry: Registry | None = None
    subject: str = ""
    text_keys: bool = False
    keep_bad: bool = False  # a value that cannot be read is null, with the reason beside it

    @property
    def raw(self) -> bool:
        """Bytes, as they are."""
        return self.kind == "binary" and not self.text_keys


def format_options(options: Mapping[str, str]) -> FormatOptions:
    names = {name.lower(): name for name in FORMATS}
    given = {names[n.lower()]: str(v).strip() for n, v in options.items() if n.lower() in names}
    kind = _choice(given, "valueFormat", _KINDS, "binary")
    text_keys = _choice(given, "keyFormat", {"binary": False, "string": True}, False)
    for name in ("valueSchema", "schemaRegistry"):
        if name in given and kind not in _WITH_SCHEMA:
            raise bad_option(name, f"it goes with valueFormat, one of {', '.join(_WITH_SCHEMA)}: give both")
    if "valueMessage" in given and kind != "protobuf":
        raise bad_option("valueMessage", "it goes with valueFormat=protobuf: leave it out")
    if "valueErrors" in given and kind == "binary" and not text_keys:
        raise bad_option("valueErrors", "it goes with valueFormat or keyFormat: bytes can always be read")
    registry = _registry(given, kind)
    if kind in ("avro", "protobuf") and "valueSchema" not in given and registry is None:
        what = "an Avro schema" if kind == "avro" else "a descriptor set, a file that protoc has written"
        raise bad_option("valueSchema", f"it is missing: give {what}, or schemaRegistry")
    return FormatOptions(
        kind=kind,
        schema=given.get("valueSchema", ""),
        message=given.get("valueMessage", ""),
        registry=registry,
        subject=_subject(given, options) if registry is not None and "valueSchema" not in given else "",
        text_keys=text_keys,
        keep_bad=_choice(given, "valueErrors", {"fail": False, "null": True}, False),
    )


def _choice(given: Mapping[str, str], name: str, choices: Mapping[str, T], otherwise: T) -> T:
    if name not in given:
        return otherwise
    if given[name].lower() not in choices:
        raise bad_option(name, f"{given[name]!r}: choose one of {', '.join(choices)}")
    return choices[given[name].lower()]


def _registry(given: Mapping[str, str], kind: str) -> Registry | None:
    url = given.get("schemaRegistry")
    if url is None:
        for name in _OF_REGISTRY:
            if name in given:
                raise bad_option(name, "it goes with schemaRegistry: give both, or neither")
        return None
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        fits = False
    if not fits or parts.query or parts.fragment:
        raise bad_option("schemaRegistry", "write an address such as https://registry:8081")
    if parts.username is not None or parts.password is not None:
        raise bad_option(
            "schemaRegistry",
            "the address has a password in it, which would be shown: use schemaRegistryUser and "
            "schemaRegistryPassword",
        )
    user, password = given.get("schemaRegistryUser"), given.get("schemaRegistryPassword")
    token = given.get("schemaRegistryToken")
    if (user is None) != (password is None):
        missing = "schemaRegistryPassword" if password is None else "schemaRegistryUser"
        raise bad_option(missing, "it is missing: user and password go together")
    if user is not None and token is not None:
        raise bad_option("schemaRegistryToken", "it contradicts schemaRegistryUser: give one of them")
    return Registry(url, kind, user, password, token)


def _subject(given: Mapping[str, str], options: Mapping[str, str]) -> str:
    if "schemaSubject" in given:
        return given["schemaSubject"]
    listed = next((value for name, value in options.items() if name.lower() == "subscribe"), "")
    topics = [name.strip() for name in listed.split(",") if name.strip()]
    if len(topics) != 1:
        raise bad_option(
            "schemaSubject",
            "it is missing: where not one topic alone is read, name the subject that all are read with",
        )
    return f"{topics[0]}-value"


class _Parser(Protocol):
    @property
    def shape(self) -> Shape: ...

    def __call__(self, value: bytes) -> Any: ...


@dataclass(frozen=True, slots=True)
class Text:
    """Values, or keys, in UTF-8."""

    @property
    def type(self) -> Any:
        from pyspark.sql.types import StringType

        return StringType()

    def parser(self) -> _Parser:
        return _Utf8(Leaf(arrow_type(self.type)))


@dataclass(frozen=True, slots=True)
class _Utf8:
    shape: Shape

    def __call__(self, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise Unreadable(f"it is no UTF-8 ({error.reason} at byte {error.start})") from None


Format = Text | JsonValues | AvroValues | ProtobufValues


@dataclass(frozen=True, slots=True)
class Typed:
    """What is read as what. None: as bytes."""

    kind: str
    values: Format | None
    keys: Text | None
    keep_bad: bool

    def columns(self) -> dict[str, Any]:
        """The Spark types of columns, where they differ from those without a format."""
        from pyspark.sql.types import BinaryType, StringType

        found: dict[str, Any] = {}
        if self.keys is not None:
            found["key"] = self.keys.type
        if self.values is not None:
            found["value"] = self.values.type
        if self.keep_bad:
            found |= {ERROR: StringType(), RAW: BinaryType()}
        return found

    def raw_schema(self, schema: Any) -> Any:
        """The Arrow schema of what has to be gathered for `schema`: with bytes where they are decoded."""
        import pyarrow as pa

        found = {field.name: field for field in schema if field.name not in (ERROR, RAW)}
        for name in ("key", "value"):
            asked = name in found or (self.keep_bad and ERROR in schema.names)
            if self._format(name) is not None and (asked or (name == "value" and RAW in schema.names)):
                found[name] = pa.field(name, pa.binary())
        if not found:  # something has to say how many rows there are
            found["offset"] = pa.field("offset", pa.int64())
        return pa.schema(list(found.values()))

    def decode(self, raw: dict[str, Any], where: Callable[[int], str]) -> dict[str, Any]:
        """Columns with their types, from those of `raw_schema`. `where` names a row. DecodeError: a value, or
        a key, cannot be read, and is not to be kept."""
        import pyarrow as pa

        found, bad = dict(raw), dict[int, str]()
        for name in ("key", "value"):
            form = self._format(name)
            if form is None or name not in raw:
                continue
            found[name], wrong = _decoded(_parser(form), raw[name])
            if wrong and not self.keep_bad:
                row = min(wrong)
                raise DecodeError(self._refusal(name, where(row), wrong[row], len(wrong) - 1))
            for row, why in wrong.items():
                if name == "key":  # its bytes have no column of their own
                    why = f"key {raw['key'][row].as_py().hex()}: {why}"
                bad[row] = f"{bad[row]}; {why}" if row in bad else why
            if name == "value" and self.keep_bad:
                kept = [raw[name][row].as_py() if row in wrong else None for row in range(len(raw[name]))]
                found[RAW] = pa.array(kept, pa.binary())
        if self.keep_bad and raw:
            rows = len(next(iter(raw.values())))
            found[ERROR] = pa.array([bad.get(row) for row in range(rows)], pa.string())
            found.setdefault(RAW, pa.nulls(rows, pa.binary()))
        return found

    def _format(self, name: str) -> Format | None:
        return self.keys if name == "key" else self.values

    def _refusal(self, name: str, place: str, why: str, others: int) -> str:
        more = f" (and {others:,} more of the same batch)" if others else ""
        form = "string" if name == "key" else self.kind
        return (
            f"{place}: the {name} cannot be read as {form}: {why}{more}. To go on with null in its place, "
            "and the reason and the bytes in columns of their own, set the option valueErrors to null"
        )


@lru_cache(maxsize=8)
def _parser(form: Format) -> _Parser:
    """Kept from one task to the next: to make one takes longer than a small batch."""
    return form.parser()


def _decoded(parse: _Parser, raw: Any) -> tuple[Any, dict[int, str]]:
    """An array, null where a value cannot be read, and why."""
    rows: list[Any] = raw.to_pylist()
    bad: dict[int, str] = {}
    for row, value in enumerate(rows):
        if value is not None:
            try:
                rows[row] = parse(value)
            except PostroomError:  # not the message's fault: the registry is away
                raise
            except Exception as error:
                bad[row], rows[row] = reason(error), None
    made, unfit = gather(parse.shape, rows)
    return made, bad | unfit


# ---- on the driver ----


def settle(options: FormatOptions, given: Any = None) -> Typed | None:
    """Reads schemas where they are. `given`: the schema of the user, a StructType. None: all is bytes."""
    if options.raw:
        return None
    wanted = options.kind != "binary" and (given is None or {"value", ERROR, RAW} & set(given.names))
    return Typed(
        options.kind,
        _values(options, given) if wanted else None,
        Text() if options.text_keys else None,
        options.keep_bad,
    )


def _values(options: FormatOptions, given: Any) -> Format:
    from pyspark.sql.types import StructType

    source = "valueSchema" if options.schema or options.registry is None else "schemaRegistry"
    try:
        match options.kind:
            case "avro":
                found: Format = AvroValues(_avro_schema(options), options.registry)
            case "protobuf":
                found = ProtobufValues(_protobuf_files(options), options.message, options.registry)
            case "json":
                own = given["value"].dataType if given is not None and "value" in given.names else None
                kind = own if isinstance(own, StructType) else _json_type(options)
                found = JsonValues(relaxed(kind), options.registry is not None)
            case _:
                found = Text()
        found.parser()
    except (ValueError, OSError) as error:
        raise bad_option(source, str(error)) from None
    return found


def _json_type(options: FormatOptions) -> Any:
    if options.schema:
        return parse_schema(options.schema)
    if options.registry is None:
        raise ValueError("it is missing: write the fields as in Spark, such as 'id bigint, name string'")
    return json_schema.type_of(options.registry.latest(options.subject).text)


def _avro_schema(options: FormatOptions) -> Registered:
    text = options.schema
    if not text:
        assert options.registry is not None
        return options.registry.latest(options.subject)
    return Registered(text if text[0] in '{["' else _file(text).decode())


def _protobuf_files(options: FormatOptions) -> tuple[bytes, ...]:
    if options.schema:
        return files_of_set(_file(options.schema))
    assert options.registry is not None
    return files_of_registered(options.registry.latest(options.subject))


def _file(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path[:200]!r} cannot be read on the driver: {error.strerror or error}") from None


def check_nulls(typed: Typed, schema: Any) -> None:
    """What may be missing cannot be NOT NULL."""
    if typed.values is not None and "value" in schema.names:
        for path in fields_that_may_not_be_null(schema["value"].dataType):
            raise InvalidSetting(f"schema: {path} is NOT NULL, and may be missing in a message: leave it out")
