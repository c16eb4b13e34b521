"""A driver that is stopped at named steps, to be killed there: `python -m … FOLDER`.

FOLDER/cases.json lists the cases, which all run in this one driver. At its step a case leaves
FOLDER/NAME.reached and goes no further. The steps of a stream are those of Spark, in their order:

    asked      it knows where it begins, and the checkpoint nothing
    planned    the end of its first batch with rows is in the checkpoint, and nothing of it was read
    reading    a task has read some rows
    staged     one task has staged its rows, and its driver does not know
    decided    what the batch consists of is written down, and nothing of it is published
    appended   it is in the logs, and its staging does not know
    committed  the sink has it, and the checkpoint does not

and those of the archive `begun` (the group is there, the table is not), `created`, `writing` (a task has
written its files), `written` (all tasks), `appended` (the table has it, the group does not know).
`STEP@N`: of batch N.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession

import postroom.spark
from postroom.broker.moves import staged as publishing
from postroom.broker.moves.staged import StagingWork
from postroom.spark.jobs import archive as archiving
from postroom.spark.jobs.lake.delta import DeltaLake
from postroom.spark.source import PostroomSource, StreamReader
from postroom.spark.writing import StreamWriter

__all__ = ["FEW", "Case", "archived", "finished", "listed", "main", "started"]

FEW = {"maxOffsetsPerTrigger": "100"}

_TRIES = 5
_SLOW = "Python worker failed to connect back"
"""Spark gives a Python process ten seconds to start, however busy the machine is."""


@dataclass(frozen=True)
class Case:
    name: str
    into: str  # topic, foreach, files, delta
    stop: str = ""
    start: str = "earliest"
    options: dict[str, str] = field(default_factory=lambda: dict(FEW))  # of reading

    @property
    def source(self) -> str:
        return f"{self.name}-in"

    @property
    def target(self) -> str:
        return f"{self.name}-out"


def reached(mark: str) -> None:
    """Leave word, and wait for the end."""
    Path(mark).touch()
    while True:
        time.sleep(1)


# ---- streams ----


class Stopping(PostroomSource):
    """The data source, with two options more: where to stop, and where to leave word."""

    def __init__(self, options: dict[str, str]) -> None:
        self.at, self.mark = options.get("stop", ""), options.get("mark", "")
        super().__init__({k: v for k, v in options.items() if k.lower() not in ("stop", "mark")})

    @classmethod
    def name(cls) -> str:
        return "stopping"

    def streamReader(self, schema: Any) -> StreamReader:
        reader = super().streamReader(schema)
        reader.__class__ = _Reader
        reader.at, reader.mark = self.at, self.mark  # type: ignore[attr-defined]
        return reader

    def streamWriter(self, schema: Any, overwrite: bool) -> StreamWriter:
        writer = super().streamWriter(schema, overwrite)
        writer.__class__ = _Writer
        writer.at, writer.mark = self.at, self.mark  # type: ignore[attr-defined]
        return writer


class _Reader(StreamReader):
    at: str
    mark: str

    def latestOffset(self, start: dict[str, Any], limit: Any) -> dict[str, Any]:
        if self.at == "asked":
            reached(self.mark)
        return super().latestOffset(start, limit)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Any:
        found = super().partitions(start, end)
        if self.at == "planned" and found:
            reached(self.mark)
        return found

    def read(self, partition: Any) -> Iterator[Any]:
        for rows in super().read(partition):
            yield rows
            if self.at == "reading":
                reached(self.mark)


class _Writer(StreamWriter):
    at: str
    mark: str

    def write(self, iterator: Iterator[Any]) -> Any:
        written = super().write(iterator)
        if self.at == f"staged@{written.batch}" and TaskContext.get().partitionId() == 0:
            reached(self.mark)
        return written

    def commit(self, messages: Any, batchId: int) -> None:
        if self.at == f"decided@{batchId}":
            StagingWork.publish = lambda *_: reached(self.mark)  # type: ignore[method-assign,assign,return-value]
        if self.at == f"appended@{batchId}":
            carry_out = publishing._Turn._carry_out

            def stopping(turn: Any, *args: Any) -> None:
                carry_out(turn, *args)
                reached(self.mark)

            publishing._Turn._carry_out = stopping  # type: ignore[method-assign,assign]
        super().commit(messages, batchId)
        if self.at == f"committed@{batchId}":
            reached(self.mark)


def started(spark: SparkSession, case: Case, url: str, folder: Path, **trigger: Any) -> Any:
    """The query of a case; it stops where the case says, if it does."""
    source = "stopping" if case.stop else "postroom"
    given = {"stop": case.stop, "mark": str(folder / f"{case.name}.reached")} if case.stop else {}
    reading = spark.readStream.format(source).options(url=url, subscribe=case.source, **given)
    rows = reading.options(startingOffsets=case.start, **case.options).load()
    rows = rows.selectExpr(
        "key", "value", "concat(topic, '-', partition) source_partition", "`offset` source_offset"
    )
    if case.into == "files":
        writing = rows.writeStream.format("parquet").option("path", str(folder / case.target))
    elif case.into == "topic":
        writing = rows.writeStream.format(source).options(url=url, topic=case.target, **given)
    else:
        writing = rows.writeStream.foreachBatch(_foreach(case, url, given.get("mark", "")))
    checkpoint = str(folder / f"{case.name}-checkpoint")
    return writing.option("checkpointLocation", checkpoint).trigger(**trigger).start()


def finished(spark: SparkSession, case: Case, url: str, folder: Path) -> None:
    """Run to the end of what is there."""
    for _ in range(_TRIES):
        query = started(spark, case, url, folder, availableNow=True)
        try:
            assert query.awaitTermination(240), f"{case.name} does not come to its end"
            return
        except Exception as error:
            if _SLOW not in str(error):
                raise
    raise AssertionError(f"{case.name}: {_SLOW}")


def _foreach(case: Case, url: str, mark: str) -> Any:
    """Batch writes that are known by the number of their batch."""

    def write(rows: Any, batch: int) -> None:
        writing = rows.write.format("postroom").options(url=url, topic=case.target)
        writing.options(query=case.name, batch=batch).mode("append").save()
        if case.stop == f"committed@{batch}":
            reached(mark)

    return write


# ---- the archive ----


def archived(spark: Any, case: Case, url: str, folder: Path) -> archiving.Archived:
    most = int(case.options["maxOffsetsPerTrigger"])
    options = archiving.ArchiveOptions(
        {"url": url},
        case.source,
        str(folder / "lake"),
        start=case.start,  # type: ignore[arg-type]
        max_rows=most,
    )
    return archiving.archive(spark, options)


def _stop_archives(cases: dict[str, Case], folder: Path) -> None:
    """Of the topics in `cases`."""
    create, append, write_spans = DeltaLake.create, DeltaLake.append, archiving.write_spans

    def at(topic: str, step: str) -> None:
        if cases[topic].stop == step:
            reached(str(folder / f"{cases[topic].name}.reached"))

    def creating(lake: Any, offsets: Any) -> Any:
        at(lake.topic, "begun")
        mark = create(lake, offsets)
        at(lake.topic, "created")
        return mark

    def appending(lake: Any, mark: Any, files: Any, end: Any) -> Any:
        at(lake.topic, f"written@{mark.batch + 1}")
        after = append(lake, mark, files, end)
        at(lake.topic, f"appended@{after.batch}")
        return after

    def writing(reach: Any, tasks: Any, tables: Any, batch: int, fail: bool, numbers: Any) -> Iterator[Any]:
        for files in write_spans(reach, tasks, tables, batch, fail, numbers):
            at(Path(tables.table).name, f"writing@{batch}")
            yield files

    DeltaLake.create, DeltaLake.append = creating, appending  # type: ignore[method-assign]
    archiving.write_spans = writing


# ---- the driver ----


def main(where: str) -> None:
    folder = Path(where)
    given = json.loads((folder / "cases.json").read_text())
    url, cases = given["url"], [Case(**case) for case in given["cases"]]
    config = {"spark.sql.execution.arrow.maxRecordsPerBatch": 50}
    spark = postroom.spark.session("killed", master="local[16]", memory="1g", config=config)
    spark.sparkContext.setLogLevel("FATAL")
    spark.dataSource.register(Stopping)
    _stop_archives({case.source: case for case in cases if case.into == "delta"}, folder)

    for case in cases:  # one after the other, so that processes start in time
        run = _archive if case.into == "delta" else _stream
        error = run(spark, case, url, folder)
        if error:
            (folder / f"{case.name}.failed").write_text(error)
    threading.Event().wait()


def _stream(spark: Any, case: Case, url: str, folder: Path) -> str:
    """Until it is at its step, or waits for messages."""
    checkpoint = folder / f"{case.name}-checkpoint"
    for _ in range(_TRIES):
        query = started(spark, case, url, folder, processingTime="0 seconds")
        while query.isActive:
            if _is_there(folder, case) or (
                case.start == "latest" and (checkpoint / "commits" / "0").exists()
            ):
                return ""
            time.sleep(0.02)
        if _SLOW not in str(query.exception()):
            break
    return str(query.exception())


def _archive(spark: Any, case: Case, url: str, folder: Path) -> str:
    found: list[str] = []

    def run() -> None:
        try:
            archived(spark, case, url, folder)
            found.append("it ended by itself")
        except BaseException:
            found.append(traceback.format_exc())

    threading.Thread(target=run, daemon=True).start()
    while not _is_there(folder, case) and not found:
        time.sleep(0.02)
    return found[0] if found else ""


def _is_there(folder: Path, case: Case) -> bool:
    return (folder / f"{case.name}.reached").exists()


def listed(url: str, cases: list[Case]) -> str:
    """What `cases.json` has."""
    return json.dumps({"url": url, "cases": [asdict(case) for case in cases]})


if __name__ == "__main__":
    from tests.integration.spark import killing  # as the workers know it

    killing.main(sys.argv[1])
