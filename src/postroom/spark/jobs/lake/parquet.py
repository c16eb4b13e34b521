"""A task of the archive: reads its spans and writes Parquet files, by date. Runs on executors.

Rows go from the queue into files without passing through Spark. A task may be run twice, also at once: each
attempt has names of its own, and the driver knows only those of one that has succeeded. A file is on the disk
before its task ends.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...columns import Columns
from ...options import Reach
from ...planning import Span
from ...reading import Losses, read_spans
from . import File, Sink, arrow_schema
from .quarantine import Aside

__all__ = ["RESULT", "Tables", "file_of", "write_spans"]

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
