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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage

from .. import sync
from ..client.staging import Staged
from ..errors import InvalidSetting, PostroomError, UsageError
from ..model.names import check_topic
from ..model.staging import check_name
from .border import one_sentence
from .compat import StreamArrowWriter
from .content import content_of
from .options import CONNECTION, Reach, bad_option, reach_options, unknown_option
from .queue import patiently
from .worker import set_apart, uncollected
from .writing_rows import Columns, Shape, shape_of

__all__ = ["BatchWriter", "StreamWriter", "WriteOptions", "Written", "write_options"]

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
        for arrow in rows:
            columns = Columns(self._shape, arrow)
            topics, source = columns.topics if columns.rows else [], columns.source()
            if source and marks is None:
                marks = staging.marks(topics)
            known = marks or {}
            parts = list(columns.above(known, source).parts())
            for part in parts:
                segment.add_columns(part.topic, part.values, part.keys, part.headers)
            content = content_of(parts) if self._options.compare and not self._shape.has_source else b""
            at = {name: known.get(name, -1) for name in source}
            segment.saw(columns.rows, topics, source, at, content)

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
