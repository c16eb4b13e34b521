"""The data source `postroom`: what Spark calls, in Spark's words.

Every decision is made elsewhere: options, positions, planning, streaming, reading. These classes are sent
to other processes, so that they hold options, and nothing that is open. Must never show a token.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any, Literal

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import BinaryType, StructField, StructType

from ..errors import PostroomError, UsageError, how_to_install
from . import queue as positions
from .columns import Columns, check_schema, schema_text, typed_schema
from .compat import StreamReading, one_sentence
from .formats.typed import Typed, format_options, settle
from .options import CONNECTION, FORMATS, ReadOptions, bad_option, kind_options, read_options, unknown_option
from .planning import Span, below_start, pack, spans
from .queue import Queue
from .reading import Losses, read_spans, set_apart
from .streaming import Stream
from .writing import BatchWriter, StreamWriter, write_options

__all__ = ["Kind", "PostroomSource", "asked", "of_query"]


# ---- options of SQL tables: which of them count for a read, and which for a write ----
# A table is made once and used in all ways, so that it may have options of every kind; those that do not
# fit a query are left out of it. What the query gives itself counts more, and is checked as everywhere.
#
# Java (`jar/`) hands on a table's options as `option.NAME`, and says with the option `jar` what it asks:
# `table`, these are the options of a table; `topic`, the same, and its topic has to be there; `topics`,
# which there are. Without the jar Spark shows the options of a table when it is made, and never again:
# then making one is refused. Must never show a token or an address.

Kind = Literal["batch", "stream", "write"]

_PREFIX = "option."
_JAR = "jar"
_QUESTIONS = ("table", "topic", "topics")
_TOPICS = ("subscribe", "subscribepattern", "assign")
_SHAPE = ("includeheaders", "includesource", *map(str.lower, FORMATS))
_OF_TABLE = (*_TOPICS, *_SHAPE)  # what a table is, which a query does not change
_STRATEGY = "startingoffsetsbytimestampstrategy"
_NO_JAR = (
    "Spark does not keep the OPTIONS of a table, unless it has Postroom's jar: start the session with "
    "postroom.spark.session(), or with --jars $(python -m postroom.spark.jar). Without it, use CREATE "
    "TEMPORARY VIEW … USING postroom OPTIONS (…)"
)


def asked(options: Mapping[str, str]) -> str | None:
    """What Java asks; None if this is not about a table. Refuses unknown options of a table."""
    lower = {name.lower(): value for name, value in options.items()}
    ofs = [name.removeprefix(_PREFIX) for name in lower if name.startswith(_PREFIX)]
    if _JAR not in lower:
        if ofs:
            raise UsageError(_NO_JAR)
        return None
    if lower[_JAR] not in _QUESTIONS:
        raise unknown_option(_JAR, kind_options("batch"))
    known = tuple(dict.fromkeys((*kind_options("batch"), *kind_options("stream"), "topic")))
    for name in ofs:
        if name not in map(str.lower, known) and not name.startswith("url."):
            raise unknown_option(name, known)
    return lower[_JAR]


def of_query(options: Mapping[str, str], kind: Kind) -> dict[str, str]:
    """What counts for this query: its own options, and those of its table that fit."""
    if not options:
        raise UsageError(f"there are no options, not even url. Is this a table? {_NO_JAR}")
    if asked(options) is None:
        return dict(options)
    lower = {name.lower(): value for name, value in options.items() if name.lower() != _JAR}
    table = {n.removeprefix(_PREFIX): value for n, value in lower.items() if n.startswith(_PREFIX)}
    given = {name: value for name, value in lower.items() if not name.startswith(_PREFIX)}
    if kind == "write":
        return {**_for_writing(table), **given}
    for name in _OF_TABLE:
        if name in given:
            raise bad_option(name, "the table has it: set it in its OPTIONS, or for the catalog")
    return {**_for_reading(table, given, kind), **given}


def _for_reading(
    table: Mapping[str, str], given: Mapping[str, str], kind: Literal["batch", "stream"]
) -> dict[str, str]:
    names = {name.lower() for name in kind_options(kind)}
    found = {name: value for name, value in table.items() if name in names or name.startswith("url.")}
    if "topic" in table and not any(name in found for name in _TOPICS):
        found["subscribe"] = table["topic"]
    for side in ("starting", "ending"):  # a query says in another way where reading begins
        if any(_is_position(name, side) for name in given):
            found = {name: value for name, value in found.items() if not _is_position(name, side)}
    return found


def _is_position(name: str, side: str) -> bool:
    return name.startswith(side) and name != _STRATEGY


def _for_writing(table: Mapping[str, str]) -> dict[str, str]:
    found = {n: v for n, v in table.items() if n in CONNECTION or n.startswith("url.") or n == "topic"}
    names = [name.strip() for name in table.get("subscribe", "").split(",") if name.strip()]
    if "topic" not in found and len(names) == 1:
        found["topic"] = names[0]
    return found


# ---- the data source ----


@one_sentence
class PostroomSource(DataSource):  # type: ignore[misc]
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        self._settled: list[Typed | None] = []
        set_apart()
        if find_spec("pyarrow") is None:
            raise UsageError(f"reading and writing with Spark needs pyarrow here: {how_to_install('spark')}")

    @classmethod
    def name(cls) -> str:
        return "postroom"

    def schema(self) -> Any:
        question = asked(self.options)
        if question == "topics":
            return self._topics()
        if question == "topic":
            self._find_topic()
        given = self.options if question is None else of_query(self.options, "batch")
        headers, source = (
            str(given.get(name, "")).strip().lower() == "true" for name in ("includeHeaders", "includeSource")
        )
        text, typed = schema_text(headers, source), self._typed(given, None)
        return text if typed is None else typed_schema(text, typed)

    def _typed(self, given: Mapping[str, str], schema: Any) -> Typed | None:
        """Settled once: Spark keeps this object from `schema` to the readers, and the columns with it."""
        if not self._settled:
            self._settled.append(settle(format_options(given), schema))
        return self._settled[0]

    def reader(self, schema: Any) -> BatchReader:
        given = of_query(self.options, "batch")
        return BatchReader(read_options(given, streaming=False), schema, self._typed(given, schema))

    def streamReader(self, schema: Any) -> StreamReader | RefusedStream:
        try:
            given = of_query(self.options, "stream")
            return StreamReader(read_options(given, streaming=True), schema, self._typed(given, schema))
        except PostroomError as error:
            return RefusedStream(error)

    def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
        given = of_query(self.options, "write")
        return BatchWriter(write_options(given, streaming=False), schema, overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        given = of_query(self.options, "write")
        return StreamWriter(write_options(given, streaming=True), schema, overwrite)

    def _topics(self) -> StructType:
        """A column for each topic: a schema is all that Spark asks a source for without a job."""
        given = of_query({**self.options, "option.subscribePattern": ".*"}, "batch")
        options = read_options(given, streaming=False)
        with Queue(options.reach) as queue:
            names = queue.topics(options.topics)
        return StructType([StructField(name, BinaryType()) for name in names])

    def _find_topic(self) -> None:
        options = read_options(of_query(self.options, "batch"), streaming=False)
        with Queue(options.reach) as queue:
            queue.routes(options.topics)  # raises, and says which topic was probably meant

    def __repr__(self) -> str:
        return "PostroomSource(…)"  # the options have the token


class Task(InputPartition):  # type: ignore[misc]
    """Spans that one task reads."""

    def __init__(self, spans: Sequence[Span]) -> None:
        super().__init__(tuple(spans))

    @property
    def spans(self) -> tuple[Span, ...]:
        found: tuple[Span, ...] = self.value
        return found


@one_sentence
class BatchReader(DataSourceReader):  # type: ignore[misc]
    """Takes no conditions of a query (`pushFilters`): Spark keeps the plan that is narrowed by them with the
    table, so that a second use of the DataFrame would miss rows."""

    def __init__(self, options: ReadOptions, schema: Any, typed: Typed | None = None) -> None:
        check_schema(schema, typed)
        self._options, self._schema, self._typed = options, schema, typed

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with Queue(options.reach) as queue:
            now = positions.look(queue, options.topics)
            start, end = positions.starts(queue, options, now), positions.ends(queue, options, now)
        wanted = spans(start, end, now)
        Losses(options.fail_on_data_loss).meet_spans(below_start(wanted, now))
        tasks = pack(
            wanted,
            cores=os.cpu_count() or 1,
            min_tasks=options.min_partitions,
            max_rows=options.max_records,
        )
        return [Task(task) for task in tasks]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        if not isinstance(partition, Task):  # Spark's own, where there is nothing to read
            return iter(())
        return _read(self._options, self._schema, self._typed, partition)


@one_sentence
class StreamReader(StreamReading):
    def __init__(self, options: ReadOptions, schema: Any, typed: Typed | None = None) -> None:
        check_schema(schema, typed)
        self.check(options)
        self._options, self._schema, self._typed = options, schema, typed

    @cached_property
    def _stream(self) -> Stream:
        """Made where it is used: on the driver."""
        return self.stream(self._options)

    def initialOffset(self) -> dict[str, Any]:
        return self._stream.initial().encode()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stream = self._stream
        return [Task(task) for task in stream.tasks(stream.decode(start), stream.decode(end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(self._options, self._schema, self._typed, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Comes late, and for the last batch not at all: groups are told in `latestOffset`."""

    def stop(self) -> None:
        if "_stream" in self.__dict__:
            self._stream.close()


@one_sentence
class RefusedStream(StreamReading):
    """A stream with options that are wrong. Spark has an error of its own for a reader that cannot be made,
    about a variable: so it is made, and refuses whatever is asked first."""

    def __init__(self, error: PostroomError) -> None:
        self._error = error

    def initialOffset(self, *asked: Any) -> Any:
        raise self._error

    getDefaultReadLimit = prepareForTriggerAvailableNow = partitions = read = initialOffset
    latestOffset = initialOffset  # type: ignore[assignment]


def _read(options: ReadOptions, schema: Any, typed: Typed | None, task: Task) -> Iterator[Any]:
    set_apart()
    losses = Losses(options.fail_on_data_loss)
    return read_spans(options.reach, task.spans, Columns(schema, typed=typed), losses)
