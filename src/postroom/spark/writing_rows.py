"""Columns into messages: what a row has to look like to be written, and which rows were written before.

The columns are those of the Kafka sink (`topic`, `key`, `value`, `headers`), and two that say where a row
comes from: `source_partition` and `source_offset`. Rows at or below the marks of the query are left out
(I20): they were decided before. Decided for whole Arrow columns, never row by row. Must never leave out a row
for any other reason, nor change one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidMessage, InvalidSetting
from ..model.names import HEADER_PREFIX, check_topic
from ..model.staging import Span
from .columns import HEADERS

__all__ = ["OF_SOURCES", "Columns", "Part", "Shape", "shape_of"]

_TEXT = ("binary", "string")
_NUMBERS = ("tinyint", "smallint", "int", "bigint")
_KINDS: dict[str, tuple[str, ...]] = {
    "topic": ("string",),
    "key": _TEXT,
    "value": _TEXT,
    "headers": (HEADERS,),
    "source_partition": ("string", *_NUMBERS),
    "source_offset": _NUMBERS,
}
OF_SOURCES = ("partition", "offset", "timestamp", "timestampType")
"""Columns that a source has and a sink does not write: they may be there."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Which columns the rows have."""

    topic: str | None  # the option: for every row
    has_topic: bool
    has_key: bool
    has_headers: bool
    has_source: bool


def shape_of(schema: Any, topic: str | None) -> Shape:
    """InvalidSetting, with the name of the column, if these rows cannot be written."""
    found = {column.name: column.dataType.simpleString() for column in schema.fields}
    for name, kind in found.items():
        if name not in _KINDS and name not in OF_SOURCES:
            raise InvalidSetting(
                f"column {name}: it would not be written; select {', '.join(_KINDS)} (value is what a "
                "message holds: to_json(struct(*)) makes one of all columns; in SQL they are named: "
                "INSERT INTO t (key, value) VALUES …)"
            )
        if name in _KINDS and kind not in _KINDS[name]:
            raise InvalidSetting(
                f"column {name}: it is {' or '.join(_KINDS[name])}, and here it is {kind}: cast it"
            )
    if "value" not in found:
        raise InvalidSetting("column value: it is missing; it is what a message holds")
    if topic is None and "topic" not in found:
        raise InvalidSetting("option topic: it is missing, and there is no column topic: name one of the two")
    if ("source_partition" in found) != ("source_offset" in found):
        raise InvalidSetting("columns source_partition and source_offset: give both, or neither")
    return Shape(topic, "topic" in found, "key" in found, "headers" in found, "source_offset" in found)


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one topic."""

    topic: str
    keys: list[bytes | None] | None
    values: list[bytes]
    headers: list[list[tuple[str, bytes | None]]] | None


class Columns:
    """One Arrow batch of rows."""

    def __init__(self, shape: Shape, batch: Any) -> None:
        self._shape = shape
        self._batch = batch
        self.rows: int = batch.num_rows

    @property
    def topics(self) -> list[str]:
        if self._shape.topic is not None:
            return [self._shape.topic]
        column = self._batch.column("topic")
        if column.null_count:
            raise InvalidMessage("column topic: it is null in some rows; fill it, or use the option topic")
        return [check_topic(name) for name in column.unique().to_pylist()]

    # ---- where rows come from ----

    def source(self) -> dict[str, Span]:
        """By source partition, the first and the last offset."""
        if not self._shape.has_source or not self.rows:
            return {}
        import pyarrow as pa

        names, offsets = self._source()
        spans = pa.table({"p": names, "o": offsets}).group_by("p").aggregate([("o", "min"), ("o", "max")])
        columns = (spans.column(name).to_pylist() for name in ("p", "o_min", "o_max"))
        return {name: (first, last) for name, first, last in zip(*columns, strict=True)}

    def _source(self) -> tuple[Any, Any]:
        import pyarrow as pa

        names, offsets = self._batch.column("source_partition"), self._batch.column("source_offset")
        if names.null_count or offsets.null_count:
            raise InvalidMessage(
                "columns source_partition and source_offset: they are null in some rows; leave both columns "
                "out if not every row has a source"
            )
        return names.cast(pa.string()), offsets.cast(pa.int64())

    def above(self, marks: Mapping[str, int], source: Mapping[str, Span]) -> Columns:
        """Without the rows that were decided before."""
        met = {name: marks[name] for name, (first, _) in source.items() if first <= marks.get(name, -1)}
        if not met:
            return self
        import pyarrow as pa
        import pyarrow.compute as pc

        names, offsets = self._source()
        at = pc.index_in(names, value_set=pa.array(list(met), pa.string()))
        limits = pc.fill_null(pc.take(pa.array(list(met.values()), pa.int64()), at), -1)
        return Columns(self._shape, self._batch.filter(pc.greater(offsets, limits)))

    # ---- messages ----

    def parts(self) -> Iterator[Part]:
        """By topic; within it in the order of the rows."""
        topics = self.topics if self.rows else []
        if len(topics) == 1:
            yield self._part(topics[0], self._batch)
            return
        import pyarrow.compute as pc

        for topic in topics:
            yield self._part(topic, self._batch.filter(pc.equal(self._batch.column("topic"), topic)))

    def _part(self, topic: str, batch: Any) -> Part:
        import pyarrow as pa

        value = batch.column("value")
        if value.null_count:
            raise InvalidMessage(
                f"column value: it is null in {value.null_count} rows, and a message has a value: leave such "
                "rows out (where value is not null), or write coalesce(value, '')"
            )
        keys = batch.column("key").cast(pa.binary()).to_pylist() if self._shape.has_key else None
        headers = _headers(batch.column("headers")) if self._shape.has_headers else None
        return Part(topic, keys, value.cast(pa.binary()).to_pylist(), headers)


def _headers(column: Any) -> list[list[tuple[str, bytes | None]]]:
    for name in column.flatten().field(0).unique().to_pylist():
        if not name:
            raise InvalidMessage("column headers: a header has a name, and here one is null or empty")
        if name.startswith(HEADER_PREFIX):
            raise InvalidMessage(
                f"column headers: {name!r} is reserved, as all names that start with {HEADER_PREFIX!r}"
            )
    return [[(pair["key"], pair["value"]) for pair in row or ()] for row in column.to_pylist()]
