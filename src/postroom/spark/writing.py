"""Writing into topics, exactly once (I20): tasks stage what they have, and the driver decides and publishes.

`write` runs in a task, any number of times and maybe in several places at once: each attempt stages a segment
of its own, which nobody sees. `commit` runs on the driver: it decides that the batch consists of the segments
of the attempts that Spark has chosen, and publishes them; run again after whatever happened, it gets the
decision back that was made, and goes on publishing. `abort` drops what was staged; whatever is left, by a
driver that was killed, is dropped by the broker after a day.

A stream is known by the id of its query, which is in its checkpoint. A batch write has a random one, unless
the options `query` and `batch` name it: then it may be run again as well.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from .. import sync
from ..client.producer.staging import Staged, check_longest
from ..errors import InvalidMessage, InvalidSetting, PostroomError, UsageError
from ..model.moves.staging import Span, check_name, joined, summed
from ..model.topology.names import HEADER_PREFIX, check_topic
from .columns import HEADERS
from .compat import StreamArrowWriter, one_sentence
from .formats.records import Packing, can_pack, longest
from .options import CONNECTION, Reach, bad_option, reach_options, unknown_option
from .queue import patiently
from .reading import set_apart, uncollected

__all__ = [
    "OF_SOURCES",
    "BatchWriter",
    "Columns",
    "Part",
    "Shape",
    "StreamWriter",
    "WriteOptions",
    "Written",
    "content_of",
    "shape_of",
    "write_options",
]


# ---- columns become messages: what a row has to look like, and which rows were written before ----
# The columns are those of the Kafka sink (`topic`, `key`, `value`, `headers`), and two that say where a
# row comes from: `source_partition` and `source_offset`. Rows at or below the marks of the query are left
# out (I20): they were decided before. Decided for whole Arrow columns, never row by row. Must never leave
# out a row for any other reason, nor change one.

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
        for topic, batch in self._by_topic():
            keys, values = self._binary(batch)
            headers = _headers(batch.column("headers")) if self._shape.has_headers else None
            yield Part(topic, keys.to_pylist() if self._shape.has_key else None, values.to_pylist(), headers)

    def arrays(self) -> Iterator[tuple[str, Any, Any]]:
        """The same without headers: topic, keys and values, as binary arrays."""
        for topic, batch in self._by_topic():
            yield (topic, *self._binary(batch))

    def _by_topic(self) -> Iterator[tuple[str, Any]]:
        topics = self.topics if self.rows else []
        if len(topics) == 1:
            yield topics[0], self._batch
            return
        import pyarrow.compute as pc

        for topic in topics:
            yield topic, self._batch.filter(pc.equal(self._batch.column("topic"), topic))

    def _binary(self, batch: Any) -> tuple[Any, Any]:
        import pyarrow as pa

        value = batch.column("value")
        if value.null_count:
            raise InvalidMessage(
                f"column value: it is null in {value.null_count} rows, and a message has a value: leave such "
                "rows out (where value is not null), or write coalesce(value, '')"
            )
        key = batch.column("key") if self._shape.has_key else pa.nulls(len(value))
        return key.cast(pa.binary()), value.cast(pa.binary())


def _headers(column: Any) -> list[list[tuple[str, bytes | None]]]:
    for name in column.flatten().field(0).unique().to_pylist():
        if not name:
            raise InvalidMessage("column headers: a header has a name, and here one is null or empty")
        if name.startswith(HEADER_PREFIX):
            raise InvalidMessage(
                f"column headers: {name!r} is reserved, as all names that start with {HEADER_PREFIX!r}"
            )
    return [[(pair["key"], pair["value"]) for pair in row or ()] for row in column.to_pylist()]


# ---- the content of a batch, for whole columns: hashes as in `model.moves.staging`, ten times as fast ----
# Columns are hashed by pandas (SipHash, in C), and mixed into one number a row. A library that hashes
# otherwise gives other words: its sums are not compared with these. Must never depend on the order of
# rows.

_ODD = (0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93, 0xFF51AFD7ED558CCD)
_PROBE = b"what rows of a batch hold"


def content_of(parts: Iterable[Part]) -> bytes:
    """Empty where pandas is missing: then batches are compared by their number of rows."""
    try:
        import numpy as np
        from pandas.util import hash_array
    except ImportError:
        return b""

    def hashed(values: Sequence[bytes | None]) -> Any:
        column = np.empty(len(values), dtype=object)
        column[:] = values
        return hash_array(column, categorize=False)

    def present(values: Sequence[bytes | None]) -> Any:
        """0 for None: a column of these is as none."""
        some = np.fromiter((value is not None for value in values), dtype=bool, count=len(values))
        return np.where(some, hashed(values), np.uint64(0))

    topic_by, key_by, value_by, headers_by, all_by = (np.uint64(number) for number in _ODD)
    word = hashed([_PROBE]).tobytes()
    found = []
    for part in parts:
        rows = hashed(part.values) * value_by + hashed([part.topic.encode()]) * topic_by
        if part.keys is not None:
            rows += present(part.keys) * key_by
        if part.headers is not None:
            packed = [msgspec.msgpack.encode(pairs) if pairs else None for pairs in part.headers]
            rows += present(packed) * headers_by
        rows ^= rows >> np.uint64(32)
        rows *= all_by
        rows ^= rows >> np.uint64(29)
        low, high = rows & np.uint64(0xFFFFFFFF), rows >> np.uint64(32)  # their sums do not overflow
        found.append(summed(word, int(low.sum()) + (int(high.sum()) << 32)))
    return joined(found)


# ---- the writer of a query ----

_log = logging.getLogger("postroom.spark")

_BATCH = ("query", "batch", "failOnOtherContent")
_WRITE = (*CONNECTION, "topic", *_BATCH)
_OF_SPARK = ("path", "checkpointlocation", "queryname", "outputmode")  # Spark passes some of its own on
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"


@dataclass(frozen=True, slots=True)
class WriteOptions:
    reach: Reach = field(repr=False)
    topic: str | None = None
    query: str | None = None
    batch: int = 0
    compare: bool = False  # a batch that comes again has to have the same content


def write_options(options: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    names = {name.lower(): name for name in _WRITE}
    given: dict[str, str] = {}
    for name, value in options.items():
        lower = name.lower()
        if lower in names:
            given[names[lower]] = str(value).strip()
        elif lower == "path" and not streaming:
            raise bad_option("path", "save() takes no path: name the topic with the option topic")
        elif not lower.startswith("url.") and lower not in _OF_SPARK:
            raise unknown_option(name, _WRITE)
    if streaming and (found := [name for name in _BATCH if name in given]):
        raise bad_option(
            found[0], "it is for batch writes; a stream is known by its checkpoint: leave it out"
        )
    if "batch" in given and ("query" not in given or not given["batch"].isdecimal()):
        raise bad_option("batch", f"{given['batch']!r}: a number from 0 up, and only together with query")
    topic, query = given.get("topic"), given.get("query")
    compare = given.get("failOnOtherContent", "true").lower()
    if compare not in ("true", "false") or ("failOnOtherContent" in given and query is None):
        raise bad_option("failOnOtherContent", "true or false, and only together with query")
    if topic is not None:
        check_topic(topic)
    if query is not None:
        check_name(query, "query")
    return WriteOptions(
        reach_options(options),
        topic,
        query,
        int(given.get("batch", "0")),
        query is not None and compare == "true",
    )


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):  # type: ignore[misc]
    """What one attempt of a task has staged."""

    query: str
    batch: int
    staged: Staged


Messages = Sequence[Written | None]


class _Columnar:
    """Fills a segment with rows without headers: they are packed here, as columns, and only staged there."""

    def __init__(self, segment: Any) -> None:
        self._segment, self._call = segment._target, segment._portal.call
        self._packing: dict[str, Packing] = {}

    def add(self, columns: Columns) -> None:
        for topic, keys, values in columns.arrays():
            check_longest(longest(keys), longest(values))
            packing = self._packing.get(topic)
            if packing is None:
                route = self._call(self._segment._packing_of, topic).route
                packing = self._packing[topic] = Packing(route)
            batches = packing.add(keys, values, self._segment._endpoint.now_ms())
            self._call(self._segment._add_packed, topic, batches, len(values))

    def end(self) -> None:
        for topic, packing in self._packing.items():
            batches = packing.end(self._segment._endpoint.now_ms())
            self._call(self._segment._add_packed, topic, batches, 0)


class _Writing:
    """What both writers do. Sent to other processes: holds options, and nothing that is open."""

    def __init__(self, options: WriteOptions, schema: Any) -> None:
        self._options = options
        self._shape: Shape = shape_of(schema, options.topic)

    def _stage(self, query: str, batch: int, rows: Iterator[Any]) -> Written:
        set_apart()
        context = TaskContext.get()
        place = f"{context.partitionId()}.{context.attemptNumber()}" if context is not None else "0.0"
        with uncollected(), _connected(self._options.reach) as mq:
            staging = mq.staging(query, batch, timeout=self._options.reach.wait_ms / 1000)
            segment = staging.segment(f"{place}-{secrets.token_hex(8)}")
            try:
                self._fill(staging, segment, rows)
                return Written(query, batch, segment.close())
            except BaseException:
                with suppress(PostroomError):  # else it is dropped later
                    segment.abort()
                raise

    def _fill(self, staging: Any, segment: Any, rows: Iterator[Any]) -> None:
        marks: dict[str, int] | None = None
        compared = self._options.compare and not self._shape.has_source
        columnar = None if compared or self._shape.has_headers or not can_pack() else _Columnar(segment)
        for arrow in rows:
            columns = Columns(self._shape, arrow)
            seen, topics, source = columns.rows, columns.topics if columns.rows else [], columns.source()
            if source and marks is None:
                marks = staging.marks(topics)
            known = marks or {}
            columns, content = columns.above(known, source), b""
            if columnar is not None:
                columnar.add(columns)
            else:
                parts = list(columns.parts())
                for part in parts:
                    segment.add_columns(part.topic, part.values, part.keys, part.headers)
                content = content_of(parts) if compared else b""
            at = {name: known.get(name, -1) for name in source}
            segment.saw(seen, topics, source, at, content)
        if columnar is not None:
            columnar.end()

    def _commit(self, messages: Messages) -> None:
        set_apart()
        found = [message for message in messages if message is not None]
        if not found:
            return
        query, batch = found[0].query, found[0].batch
        with _connected(self._options.reach) as mq:
            staging = mq.staging(query, batch, timeout=self._options.reach.wait_ms / 1000)
            topic = self._options.topic
            if topic is not None and not any(message.staged.topics for message in found):
                found = [Written(query, batch, Staged("", 0, 0, (topic,)))]  # nothing: decided all the same
            published = staging.commit([message.staged for message in found])
        left_out = sum(message.staged.rows - message.staged.messages for message in found)
        if left_out:
            _log.warning("batch %d of query %s: %d rows had been written before", batch, query, left_out)
        if published.dropped:
            _log.warning(
                "batch %d of query %s: %d rows went with their topics", batch, query, published.dropped
            )

    def _abort(self, messages: Messages) -> None:
        found = [message for message in messages if message is not None]
        if found:
            with suppress(PostroomError), _connected(self._options.reach) as mq:
                mq.staging(found[0].query, found[0].batch).abort([message.staged for message in found])


@one_sentence
class BatchWriter(_Writing, DataSourceArrowWriter):  # type: ignore[misc]
    def __init__(self, options: WriteOptions, schema: Any, overwrite: bool) -> None:
        if overwrite:
            raise InvalidSetting('a topic is not overwritten: write with mode("append"), or INSERT INTO')
        super().__init__(options, schema)
        self._query = options.query or f"batch-{secrets.token_hex(16)}"

    def write(self, iterator: Iterator[Any]) -> Written:
        return self._stage(self._query, self._options.batch, iterator)

    def commit(self, messages: Messages) -> None:
        self._commit(messages)

    def abort(self, messages: Messages) -> None:
        self._abort(messages)


@one_sentence
class StreamWriter(_Writing, StreamArrowWriter):  # type: ignore[misc]
    def __init__(self, options: WriteOptions, schema: Any, overwrite: bool) -> None:
        if overwrite:
            raise InvalidSetting('a topic is not overwritten: use outputMode("append") or ("update")')
        super().__init__(options, schema)

    def write(self, iterator: Iterator[Any]) -> Written:
        context = TaskContext.get()
        query = context.getLocalProperty(_QUERY_ID) if context is not None else None
        batch = context.getLocalProperty(_BATCH_ID) if context is not None else None
        if query is None or batch is None:
            raise UsageError("Spark did not say which batch of which query this is: is it a stream?")
        return self._stage(query, int(batch), iterator)

    def commit(self, messages: Messages, batchId: int) -> None:
        _check_batch(messages, batchId)
        self._commit(messages)

    def abort(self, messages: Messages, batchId: int) -> None:
        self._abort(messages)


def _check_batch(messages: Messages, batch: int) -> None:
    for message in messages:
        assert message is None or message.batch == batch, "tasks and driver are about the same batch"


def _connected(reach: Reach) -> sync.Connection:
    tls = {"true": True, "false": None}.get((reach.tls or "false").lower(), reach.tls)
    return patiently(
        lambda: sync.connect(reach.url, token=reach.token, tls=tls, shards=dict(reach.shards) or None),
        reach.wait_ms,
    )
