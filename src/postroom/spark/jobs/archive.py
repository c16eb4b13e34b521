"""The job `archive`: a topic's messages into a table of Parquet files, each exactly once.

Spark carries the plan, and executors the rows: each task reads spans of the queue and writes files by itself,
by date, without passing rows through Spark. A task may be run twice, also at once: each attempt has names of
its own, and the driver knows only those of one that has succeeded. A file is on the disk before its task
ends.

The driver commits the files of a batch together with the offsets they go to, and only then tells the group of
the archive, so that retention drops nothing that is not archived. Whatever is killed when: the next run goes
on from the last commit. Knows nothing of the table's format.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ...errors import InvalidSetting, PostroomError
from ..columns import Columns
from ..options import Reach, ReadOptions, read_options
from ..planning import Offsets, Span, backlog
from ..reading import Losses, read_spans
from ..streaming import Stream
from .failures import connected, explained
from .lake import Compacted, File, Format, Lake, Mark, SetBack, Sink, arrow_schema, open_lake
from .lake.quarantine import Aside, Quarantine

__all__ = [
    "RESULT",
    "ArchiveOptions",
    "Archived",
    "Tables",
    "archive",
    "check",
    "compact",
    "file_of",
    "write_spans",
]


RESULT = "path string, date string, bytes bigint, rows bigint, stats string, aside string"
"""Files; `aside`: one of the quarantine, and why."""

_BUFFER_BYTES = 64 * 1024 * 1024
_GROUP_ROWS = 250_000
_MOST_OPEN = 16  # files at once: messages with wild timestamps do not open thousands


@dataclass(frozen=True, slots=True)
class Tables:
    """Where the rows go."""

    table: str
    quarantine: str
    unreadable: bool  # batches that cannot be read are set aside; else they are an error


def write_spans(
    reach: Reach,
    tasks: Sequence[Sequence[Span]],
    tables: Tables,
    batch: int,
    fail: bool,
    numbers: Iterator[Any],
) -> Iterator[Any]:
    """For `mapInArrow`: numbers of tasks come in, files go out."""
    import pyarrow as pa

    for some in numbers:
        for number in some.column(0).to_pylist():
            name = f"{batch:08}-{number:04}"
            files, aside = _Files(tables.table, name), Aside(tables.quarantine, name)
            losses = Losses(fail, aside.unreadable if tables.unreadable else None)
            for arrow in read_spans(reach, tasks[number], Columns(_spark_schema(), aside.odd), losses):
                files.add(aside.sift(arrow))
            closed = [*((None, file) for file in files.close()), *aside.close().items()]
            found = [(f.path, f.date, f.bytes, f.rows, f.stats, reason) for reason, f in closed]
            names = [name.split()[0] for name in RESULT.split(", ")]
            kinds = [pa.string(), pa.string(), pa.int64(), pa.int64(), pa.string(), pa.string()]
            columns = zip(*found, strict=True) if found else [[] for _ in names]
            yield pa.RecordBatch.from_arrays(
                [pa.array(list(column), kind) for column, kind in zip(columns, kinds, strict=True)],
                names=names,
            )


def file_of(row: Any) -> File:
    return File(row["path"], row["date"], row["bytes"], row["rows"], row["stats"])


def _spark_schema() -> Any:
    from pyspark.sql import types as t

    header = t.StructType([t.StructField("key", t.StringType()), t.StructField("value", t.BinaryType())])
    kinds = {
        "topic": t.StringType(),
        "partition": t.IntegerType(),
        "offset": t.LongType(),
        "timestamp": t.TimestampType(),
        "key": t.BinaryType(),
        "value": t.BinaryType(),
        "headers": t.ArrayType(header),
    }
    return t.StructType([t.StructField(name, kind) for name, kind in kinds.items()])


class _Files:
    """The files of one task."""

    def __init__(self, table: str, name: str) -> None:
        self._table, self._name = table, name
        self._open: dict[Any, _File] = {}
        self._done: list[File] = []

    def add(self, batch: Any) -> None:
        import pyarrow as pa
        import pyarrow.compute as pc

        dates = pc.cast(batch.column("timestamp"), pa.date32())
        for date in dates.unique().to_pylist():
            part = batch if len(dates.unique()) == 1 else batch.filter(pc.equal(dates, date))
            self._file(date).add(part)
        if sum(file.buffered for file in self._open.values()) >= _BUFFER_BYTES:
            for file in self._open.values():
                file.flush()

    def _file(self, date: Any) -> _File:
        if date not in self._open:
            if len(self._open) >= _MOST_OPEN:
                oldest = next(iter(self._open))
                self._done.append(self._open.pop(oldest).close())
            self._open[date] = _File(self._table, str(date), f"{self._name}-{secrets.token_hex(8)}.parquet")
        return self._open[date]

    def close(self) -> list[File]:
        return [*self._done, *(file.close() for file in self._open.values())]


class _File:
    def __init__(self, table: str, date: str, name: str) -> None:
        import pyarrow.parquet as pq

        self._date, self._path = date, f"date={date}/{name}"
        self._sink = Sink(table, self._path)
        self._schema = arrow_schema(date=False)
        self._writer = pq.ParquetWriter(
            self._sink.stream, self._schema, compression="zstd", compression_level=1
        )
        self._batches: list[Any] = []
        self._rows = 0
        self._least: dict[str, Any] = {}
        self._most: dict[str, Any] = {}
        self.buffered = 0

    def add(self, batch: Any) -> None:
        import pyarrow.compute as pc

        for name in ("partition", "offset", "timestamp"):
            both = pc.min_max(batch.column(name)).as_py()
            self._least[name] = min(both["min"], self._least.get(name, both["min"]))
            self._most[name] = max(both["max"], self._most.get(name, both["max"]))
        self._batches.append(batch)
        self._rows += batch.num_rows
        self.buffered += batch.nbytes

    def flush(self) -> None:
        import pyarrow as pa

        if self._batches:
            rows = pa.Table.from_batches(self._batches).cast(self._schema)
            self._writer.write_table(rows, row_group_size=_GROUP_ROWS)
        self._batches, self.buffered = [], 0

    def close(self) -> File:
        self.flush()
        self._writer.close()
        return File(self._path, self._date, self._sink.close(), self._rows, self._stats())

    def _stats(self) -> str:
        def shown(found: dict[str, Any]) -> dict[str, Any]:
            moment = found["timestamp"].isoformat(timespec="milliseconds").replace("+00:00", "Z")
            return {**found, "timestamp": moment}

        nulls = dict.fromkeys(("partition", "offset", "timestamp"), 0)
        stats = {"numRecords": self._rows, "minValues": shown(self._least), "maxValues": shown(self._most)}
        return json.dumps({**stats, "nullCount": nulls})


@dataclass(frozen=True, slots=True)
class ArchiveOptions:
    queue: Mapping[str, str] = field(repr=False)  # how it is reached: url, token, …
    topic: str
    folder: str  # the table is FOLDER/TOPIC; all executors see it
    group: str = "archive"  # holds retention until the messages are archived, and shows how far that is
    start: Literal["earliest", "latest"] = "earliest"  # of a new table
    once: bool = True  # what is there now; else on and on, until stopped
    every_s: float = 10.0  # on and on: between a batch with nothing in it and the next look
    max_rows: int = 2_000_000  # of a batch: of one commit
    fail_on_data_loss: bool = True
    set_aside_unreadable: bool = False  # batches that cannot be read go to the quarantine; else they stop it
    format: Format = "delta"
    catalog: str = ""  # of Iceberg: where the table is listed; none: a file in the folder

    def lake(self) -> Lake:
        return open_lake(self.folder, self.topic, self.format, self.catalog)

    def reading(self) -> ReadOptions:
        options = {
            **self.queue,
            "subscribe": self.topic,
            "startingOffsets": self.start,
            "maxOffsetsPerTrigger": str(self.max_rows),
            "failOnDataLoss": str(self.fail_on_data_loss),
            "group": self.group,
        }
        return read_options(options, streaming=True)


@dataclass(frozen=True, slots=True)
class Archived:
    topic: str
    table: str
    version: int  # of the table
    batches: int
    messages: int
    files: int
    bytes: int
    behind: int  # offsets that are not archived yet
    seconds: float
    quarantine: str  # the table with what was set aside, if there is any
    set_aside: Mapping[str, int]  # by reason: messages, or batches that cannot be read


Progress = Callable[[int, int], None]
"""Is told how many messages are archived, and of about how many."""


def archive(
    spark: Any,
    options: ArchiveOptions,
    *,
    progress: Progress = lambda done, total: None,
    stop: threading.Event | None = None,
) -> Archived:
    """`stop` ends a run that goes on and on, after the batch that is being written."""
    check(options)
    run = _Run(spark, options, options.reading(), options.lake())
    try:
        run.go(progress, stop or threading.Event())
        return run.result()
    finally:
        run.stream.close()


def check(options: ArchiveOptions) -> None:
    """Refuses what cannot be archived, or not into this table, before anything is made or started."""
    options.reading()
    if not options.every_s > 0:
        raise InvalidSetting(f"every_s={options.every_s!r}: seconds, more than 0")
    options.lake().mark()
    with connected(options.queue) as mq:
        mq.topic(options.topic)


def compact(options: ArchiveOptions) -> Compacted:
    """Merge small files into large ones. Needs no Spark; may run beside the archive."""
    return options.lake().compact()


class _Run:
    def __init__(self, spark: Any, options: ArchiveOptions, reading: ReadOptions, lake: Lake) -> None:
        self._spark, self._options, self._reading, self._lake = spark, options, reading, lake
        self.stream = Stream(reading)
        self._since = time.monotonic()
        self._quarantine = Quarantine(options.folder, options.topic)
        self._files: list[File] = []
        self._aside: Counter[str] = Counter()
        self._batches = 0
        self._at = Offsets()
        self._cut_off: dict[str, Any] | None = None

    def go(self, progress: Progress, stop: threading.Event) -> None:
        mark = self._begin()
        if self._options.once:
            self.stream.freeze()
        while not stop.is_set():
            end = self._repeated(self.stream.latest(self._at, self._options.max_rows))
            if end == self._at:
                if self._options.once:
                    return
                stop.wait(self._options.every_s)
                continue
            before = sum(file.rows for file in self._files)
            progress(before, before + backlog(self._at, self.stream.newest()))
            try:
                mark = self._batch(mark, end)
            except SetBack:  # it is filled up again from where it is
                mark = self._begin()
                continue
            except PostroomError:
                if stop.is_set():  # a signal has ended Spark, too: the next run does this batch
                    return
                raise
            progress(sum(file.rows for file in self._files), before + backlog(self._at, self.stream.newest()))
            self._at = end

    def _begin(self) -> Mark:
        mark = self._lake.mark()
        if mark is None:
            self._at = self.stream.initial()
            mark = self._lake.create(self._at.encode())
            self.stream.latest(self._at, None)  # it is pinned: by the table
        self._at = self.stream.decode(mark.offsets)
        self._cut_off = self._quarantine.end_of(mark.batch + 1)
        return mark

    def _repeated(self, end: Offsets) -> Offsets:
        """A batch that was cut off between its two commits goes as far as it went."""
        before, self._cut_off = self._cut_off, None
        again = end if before is None else self.stream.decode(before)
        return again if (again.ids, again.queue) == (end.ids, end.queue) else end

    def _batch(self, mark: Mark, end: Offsets) -> Mark:
        tasks = self.stream.tasks(self._at, end)
        files, aside = self._write(tasks, mark.batch + 1) if tasks else ([], [])
        self._quarantine.append(mark.batch + 1, [file for file, _ in aside], end.encode())
        mark = self._lake.append(mark, files, end.encode())
        for file, reason in aside:
            self._aside[reason] += file.rows
        self._files += files
        self._batches += 1
        return mark

    def _write(
        self, tasks: Sequence[Sequence[Span]], batch: int
    ) -> tuple[list[File], list[tuple[File, str]]]:
        """The rows stay on the executors; what comes back is the list of their files.

        Those of the table, and those of the quarantine with their reasons.
        """
        fail = self._options.fail_on_data_loss
        unreadable = self._options.set_aside_unreadable or not fail
        tables = Tables(self._lake.path, self._quarantine.path, unreadable)
        write = partial(write_spans, self._reading.reach, tasks, tables, batch, fail)
        with explained():
            numbers = self._spark.range(0, len(tasks), 1, len(tasks))
            rows = numbers.mapInArrow(write, RESULT).collect()
        kept = [file_of(row) for row in rows if row["aside"] is None]
        return kept, [(file_of(row), row["aside"]) for row in rows if row["aside"] is not None]

    def result(self) -> Archived:
        return Archived(
            topic=self._options.topic,
            table=self._lake.path,
            version=self._lake.version,
            batches=self._batches,
            messages=sum(file.rows for file in self._files),
            files=len(self._files),
            bytes=sum(file.bytes for file in self._files),
            behind=backlog(self._at, self.stream.newest()),
            seconds=time.monotonic() - self._since,
            quarantine=self._quarantine.path,
            set_aside=dict(self._aside),
        )
