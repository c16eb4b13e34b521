"""The data source `postroom`: what Spark calls, in Spark's words.

Every decision is made elsewhere: options, positions, planning, streaming, reading. These classes are sent
to other processes, so that they hold options, and nothing that is open. Must never show a token.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from ..errors import UsageError
from ..install import how_to_install
from . import positions
from .columns import Columns, check_schema, schema_text
from .filters import Narrowing, narrowing
from .options import ReadOptions, read_options
from .planning import Span, below_start, pack, spans
from .queue import Queue
from .reading import Losses, read_spans
from .streaming import Stream
from .worker import settle
from .writing import BatchWriter, StreamWriter, write_options

__all__ = ["PostroomSource"]

_PUSHING = "pyspark.sql.worker.data_source_pushdown_filters"


class PostroomSource(DataSource):  # type: ignore[misc]
    def __init__(self, options: dict[str, str]) -> None:
        super().__init__(options)
        settle()
        if find_spec("pyarrow") is None:
            raise UsageError(f"reading and writing with Spark needs pyarrow here: {how_to_install('spark')}")

    @classmethod
    def name(cls) -> str:
        return "postroom"

    def schema(self) -> str:
        return schema_text(str(self.options.get("includeHeaders", "")).strip().lower() == "true")

    def reader(self, schema: Any) -> BatchReader:
        """Takes conditions only where it is asked to, and Spark offers them: where it does not, it refuses a
        reader that could."""
        options = read_options(self.options, streaming=False)
        kind = NarrowingReader if options.push_filters and _pushing() else BatchReader
        return kind(options, schema)

    def streamReader(self, schema: Any) -> StreamReader:
        return StreamReader(read_options(self.options, streaming=True), schema)

    def writer(self, schema: Any, overwrite: bool) -> BatchWriter:
        return BatchWriter(write_options(self.options, streaming=False), schema, overwrite)

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        return StreamWriter(write_options(self.options, streaming=True), schema, overwrite)

    def __repr__(self) -> str:
        return "PostroomSource(…)"  # the options have the token


def _pushing() -> bool:
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    return _PUSHING in sys.modules or getattr(main, "name", "") == _PUSHING


class Task(InputPartition):  # type: ignore[misc]
    """Spans that one task reads."""

    def __init__(self, spans: Sequence[Span]) -> None:
        super().__init__(tuple(spans))

    @property
    def spans(self) -> tuple[Span, ...]:
        found: tuple[Span, ...] = self.value
        return found


class BatchReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: ReadOptions, schema: Any) -> None:
        check_schema(schema)
        self._options, self._schema = options, schema
        self._narrowing = Narrowing()

    def partitions(self) -> list[InputPartition]:
        options = self._options
        with Queue(options.reach) as queue:
            now = positions.look(queue, options.topics)
            start, end = positions.starts(queue, options, now), positions.ends(queue, options, now)
        wanted = self._narrowing.apply(spans(start, end, now))
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
        return _read(self._options, self._schema, partition, self._narrowing.not_before_ms)


class NarrowingReader(BatchReader):
    """Spark 4.3 keeps the plan of a scan with its table, so that one DataFrame in two places of a query,
    or in a second query, reads what the last condition has left. So it is asked for by an option."""

    def pushFilters(self, filters: list[Any]) -> list[Any]:
        self._narrowing = narrowing(filters)
        return filters  # Spark checks all of them again


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):  # type: ignore[misc]
    def __init__(self, options: ReadOptions, schema: Any) -> None:
        check_schema(schema)
        self._options, self._schema = options, schema

    @cached_property
    def _stream(self) -> Stream:
        """Made where it is used: on the driver."""
        return Stream(self._options)

    def initialOffset(self) -> dict[str, Any]:
        return self._stream.initial().encode()

    def getDefaultReadLimit(self) -> ReadLimit:
        most = self._options.max_offsets
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:
        self._stream.freeze()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        return self._stream.latest(self._stream.decode(start), most).encode()

    def reportLatestOffset(self) -> dict[str, Any]:
        return self._stream.newest().encode()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        stream = self._stream
        return [Task(task) for task in stream.tasks(stream.decode(start), stream.decode(end))]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return _read(self._options, self._schema, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Comes late, and for the last batch not at all: groups are told in `latestOffset`."""

    def stop(self) -> None:
        if "_stream" in self.__dict__:
            self._stream.close()


def _read(options: ReadOptions, schema: Any, task: Task, not_before_ms: int | None = None) -> Iterator[Any]:
    settle()
    losses = Losses(options.fail_on_data_loss)
    return read_spans(options.reach, task.spans, Columns(schema), losses, not_before_ms)
