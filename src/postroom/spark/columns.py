"""Messages as columns: stored batches become Arrow batches.

The columns are those of the Kafka source. A schema that the user gives leaves out columns; only what is asked
for is decoded, and a batch is not opened at all where its header has everything. Must match the schema that
Spark expects to the letter: type, order, and nullability.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from ..errors import CorruptBatch, InvalidSetting
from ..model.messages.batch import (
    HEADER_SIZE,
    BatchHeader,
    Buffer,
    is_compressed,
    opened,
    plain_form,
    read_header,
    verify_stored,
)
from ..model.messages.timestamps import FIRST_SHOWN_MS, LAST_SHOWN_MS
from ..store.contract import StoredBatch
from .formats.arrow import parse_schema
from .formats.records import unpacked
from .formats.typed import Typed, check_nulls
from .planning import Span

__all__ = ["COLUMNS", "HEADERS", "SOURCE", "Columns", "Odd", "check_schema", "schema_text", "typed_schema"]

log = logging.getLogger("postroom.spark")

COLUMNS = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
}
HEADERS = "array<struct<key:string,value:binary>>"
SOURCE = {"source_partition": "string", "source_offset": "bigint"}
"""Where a row comes from, as the writer takes it: the partition by a name that no other log has."""

_INSIDE = ("key", "value", "timestamp", "headers")  # the batch has to be opened for these
_CREATE_TIME = 0

Odd: TypeAlias = Callable[[Span, Sequence[tuple[int, int]]], None]
"""Takes the offsets of rows, and what their timestamps are."""

Unreadable: TypeAlias = Callable[[StoredBatch, CorruptBatch], None]


def schema_text(headers: bool, source: bool = False) -> str:
    listed = {**COLUMNS, **({"headers": HEADERS} if headers else {}), **(SOURCE if source else {})}
    return ", ".join(f"{name} {kind}" for name, kind in listed.items())


def typed_schema(text: str, typed: Typed) -> Any:
    """A StructType of `schema_text`, with the columns that are typed; what is added comes last."""
    from pyspark.sql.types import StructField, StructType

    kinds = {field.name: field.dataType for field in parse_schema(text).fields}
    return StructType([StructField(name, kind) for name, kind in (kinds | typed.columns()).items()])


def check_schema(schema: Any, typed: Typed | None = None) -> None:
    """A schema given by the user: these columns, or some of them, in any order."""
    known = {**COLUMNS, "headers": HEADERS, **SOURCE}
    if typed is not None:
        known |= {name: kind.simpleString() for name, kind in typed.columns().items()}
        check_nulls(typed, schema)
    for column in schema.fields:
        kind = column.dataType.simpleString()
        if column.name not in known:
            listed = ", ".join(f"{name} {one}" for name, one in known.items())
            raise InvalidSetting(
                f"schema: there is no column {column.name!r}; the columns are {listed}. To read "
                "what is in value, leave the schema out and give valueFormat, or use from_json or a cast"
            )
        if kind != known[column.name]:
            raise InvalidSetting(f"schema: the column {column.name} is {known[column.name]}, not {kind}")


class Columns:
    """Gathers batches of one span, and gives them as an Arrow batch."""

    def __init__(self, schema: Any, odd: Odd | None = None, typed: Typed | None = None) -> None:
        """`odd`: is told, before they are given, of rows whose timestamp no calendar has; it is null."""
        from .compat import arrow_schema

        self._schema = arrow_schema(schema)
        self._typed = typed
        self._raw = self._schema if typed is None else typed.raw_schema(self._schema)
        self._names: list[str] = list(self._raw.names)
        self._opens = any(name in _INSIDE for name in self._names)
        self._usual = "headers" not in self._names  # records are of the form that is quickly unpacked
        self._odd = odd or _warn
        self._clear()

    def _clear(self) -> None:
        self.rows = self.bytes = 0
        self._runs: list[tuple[int, int]] = []  # offsets: the first, and behind the last
        self._keys: list[Any] = []  # arrays
        self._values: list[Any] = []
        self._stamps: list[Any] = []
        self._plain: list[tuple[StoredBatch, slice, Buffer, BatchHeader]] = []  # not looked into yet
        self._headers: list[list[tuple[str, bytes | None]]] = []

    def add(self, batch: StoredBatch, span: Span) -> None:
        """What of the batch is in the span; control batches have nothing (I18). CorruptBatch: as before."""
        header = read_header(batch.data)
        first, end = max(span.first, batch.base_offset), min(span.end, batch.last_offset + 1)
        if header.control or first >= end:
            return
        if self._opens:
            self._open(batch, slice(first - batch.base_offset, end - batch.base_offset))
        self._runs.append((first, end))
        self.rows += end - first

    def _open(self, batch: StoredBatch, part: slice) -> None:
        header = verify_stored(batch) if self._usual else None
        if header is None:
            self._decode(batch, part)
            return
        try:
            plain = plain_form(batch.data, header) if is_compressed(batch.data) else batch.data
        except Exception as error:
            raise CorruptBatch(f"the records of the batch cannot be read: {error}") from error
        self.bytes += len(plain) - HEADER_SIZE
        self._plain.append((batch, part, plain, header))

    def _decode(self, batch: StoredBatch, part: slice) -> None:
        """Record by record."""
        import pyarrow as pa

        found, size = opened(batch)
        self.bytes += size
        found, binary = found[part], pa.binary()
        if "headers" in self._names:
            self._headers += [record.headers for record in found]
        if "key" in self._names:
            self._keys.append(pa.array([record.key for record in found], binary))
        if "value" in self._names:
            self._values.append(pa.array([record.value for record in found], binary))
        self._stamps.append(pa.array([record.timestamp for record in found], pa.int64()))

    def _unpack(self, unreadable: Unreadable) -> None:
        """What was put off by `_open`: all batches at once, or else one by one."""
        pending, self._plain = self._plain, []
        found = unpacked([(plain, header) for _, _, plain, header in pending])
        if found is not None:
            first, last = pending[0], pending[-1]
            behind = last[3].records - (last[1].stop or 0)
            part = slice(first[1].start, len(found.keys) - behind)
            self._keys, self._values, self._stamps = ([array[part]] for array in found)
            return
        self._usual = False  # those that follow are like these
        runs, self._runs, self.rows = self._runs, [], 0
        for (batch, part, _, _), run in zip(pending, runs, strict=True):
            try:
                self._decode(batch, part)
            except CorruptBatch as error:
                unreadable(batch, error)
            else:
                self._runs.append(run)
                self.rows += run[1] - run[0]

    def flush(self, span: Span, unreadable: Unreadable | None = None) -> Any:
        """The rows gathered so far, as an Arrow batch of the schema. `unreadable`: as CorruptBatch of `add`,
        for batches of which it is found out only now."""
        import pyarrow as pa

        if self._plain:
            self._unpack(unreadable or _refuse)
        arrays = {field.name: self._array(field, span) for field in self._raw}
        if self._typed is not None:
            arrays = self._typed.decode(arrays, lambda row: self._place(span, row))
        made = pa.RecordBatch.from_arrays([arrays[name] for name in self._schema.names], schema=self._schema)
        self._clear()
        return made

    def _place(self, span: Span, row: int) -> str:
        offset = _offset_array(self._runs)[row].as_py()
        return f"topic {span.topic!r} partition {span.partition} offset {offset}"

    def _array(self, field: Any, span: Span) -> Any:
        import pyarrow as pa

        match field.name:
            case "key":
                return _concat(self._keys, field.type).cast(field.type)
            case "value":
                return _concat(self._values, field.type).cast(field.type)
            case "timestamp":
                return self._moments(span).cast(field.type)
            case "headers":
                return _header_array(self._headers, field.type)
            case "source_partition":
                return pa.repeat(pa.scalar(span.source, field.type), self.rows)
            case "offset" | "source_offset":
                return _offset_array(self._runs)
            case "topic":
                return pa.repeat(pa.scalar(span.topic, field.type), self.rows)
            case "partition":
                return pa.repeat(pa.scalar(span.partition, field.type), self.rows)
            case _:
                return pa.repeat(pa.scalar(_CREATE_TIME, field.type), self.rows)

    def _moments(self, span: Span) -> Any:
        """Never a wrong one: what Spark or Python cannot hold is null."""
        import pyarrow as pa
        import pyarrow.compute as pc

        stamps = _concat(self._stamps, pa.int64())
        least, most = pc.min_max(stamps).as_py().values() if len(stamps) else (0, 0)
        if least < FIRST_SHOWN_MS or most > LAST_SHOWN_MS:
            shown = pc.and_(pc.greater_equal(stamps, FIRST_SHOWN_MS), pc.less_equal(stamps, LAST_SHOWN_MS))
            offsets = _offset_array(self._runs).filter(pc.invert(shown)).to_pylist()
            values = stamps.filter(pc.invert(shown)).to_pylist()
            self._odd(span, list(zip(offsets, values, strict=True)))
            stamps = pc.if_else(shown, stamps, None)
        return stamps.cast(pa.timestamp("ms", "UTC"))


def _warn(span: Span, found: Sequence[tuple[int, int]]) -> None:
    offset, value = found[0]
    more = f", and {len(found) - 1:,} more" if len(found) > 1 else ""
    log.warning(
        "topic %r partition %d offset %d%s: timestamp %d is outside of the years 1 to 9999, and null here; "
        "was it microseconds?", span.topic, span.partition, offset, more, value,
    )  # fmt: skip


def _refuse(batch: StoredBatch, error: CorruptBatch) -> None:
    raise error


def _concat(arrays: Sequence[Any], kind: Any = None) -> Any:
    import pyarrow as pa

    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays) if arrays else pa.array([], kind)


def _offset_array(runs: Sequence[tuple[int, int]]) -> Any:
    import pyarrow as pa

    joined: list[tuple[int, int]] = []
    for first, end in runs:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((first, end))
    parts = [
        pa.arange(first, end) if hasattr(pa, "arange") else pa.array(range(first, end), pa.int64())
        for first, end in joined
    ]
    return _concat(parts, pa.int64())


def _header_array(headers: Sequence[list[tuple[str, bytes | None]]], kind: Any) -> Any:
    """null where a message has none, as the Kafka source has it."""
    import pyarrow as pa

    flat = [pair for pairs in headers for pair in pairs]
    at, places = 0, list[int | None]()
    for pairs in headers:
        places.append(at if pairs else None)
        at += len(pairs)
    places.append(at)
    pair = kind.value_type
    names = pa.array([name for name, _ in flat], pair.field(0).type)
    values = pa.array([value for _, value in flat], pair.field(1).type)
    inner = pa.StructArray.from_arrays([names, values], fields=[pair.field(0), pair.field(1)])
    return pa.ListArray.from_arrays(pa.array(places, pa.int32()), inner, type=kind)
