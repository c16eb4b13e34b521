"""The job `archive`: a topic's messages into a table of Parquet files, each exactly once.

Spark carries the plan, and executors the rows: each task reads spans of the queue and writes files by itself.
The driver commits the files of a batch together with the offsets they go to, and only then tells the group
of the archive, so that retention drops nothing that is not archived. Whatever is killed when: the next run
goes on from the last commit. Knows nothing of the table's format.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ...errors import InvalidSetting, PostroomError
from ..options import ReadOptions, read_options
from ..planning import Offsets, Span, backlog
from ..streaming import Stream
from .failures import connected, explained
from .lake import Compacted, File, Format, Lake, Mark, SetBack, open_lake
from .lake.parquet import RESULT, Tables, file_of, write_spans
from .lake.quarantine import Quarantine

__all__ = ["ArchiveOptions", "Archived", "archive", "check", "compact"]


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
