"""What the archive sets aside, without Spark: files of a task, and a table that knows its batches."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
deltalake = pytest.importorskip("deltalake")
types = pytest.importorskip("pyspark.sql.types")

from postroom.errors import CorruptBatch, UsageError  # noqa: E402
from postroom.model.messages.batch import BatchBuilder  # noqa: E402
from postroom.model.messages.timestamps import FIRST_SHOWN_MS, LAST_SHOWN_MS  # noqa: E402
from postroom.spark.columns import Columns, Odd  # noqa: E402
from postroom.spark.jobs.lake import File  # noqa: E402
from postroom.spark.jobs.lake.quarantine import Aside, Quarantine, quarantine_path  # noqa: E402
from postroom.spark.planning import Span  # noqa: E402
from postroom.store.contract import StoredBatch  # noqa: E402

SPAN = Span("orders", 3, 7, 0, 4)
STAMPS = (LAST_SHOWN_MS + 1, FIRST_SHOWN_MS, 2**60, LAST_SHOWN_MS)
BATCH = StoredBatch(8, 5, 1, b"bytes")


def rows(odd: Odd | None = None) -> Any:
    """Four messages with these timestamps, as the reader gives them."""
    builder = BatchBuilder()
    for stamp in STAMPS:
        builder._append(builder.count, stamp, None, b"v", [])  # past the check of `append`
        builder.count += 1
    names = {"topic": types.StringType(), "partition": types.IntegerType(), "offset": types.LongType(),
             "timestamp": types.TimestampType(), "value": types.BinaryType()}  # fmt: skip
    columns = Columns(types.StructType([types.StructField(n, kind) for n, kind in names.items()]), odd)
    columns.add(StoredBatch(0, len(STAMPS), 1, builder.build()), SPAN)
    return columns.flush(SPAN)


def test_a_timestamp_that_no_calendar_has_is_null_and_its_place_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, "postroom.spark"):
        found = rows().column("timestamp")
    assert [stamp and stamp.year for stamp in found.to_pylist()] == [None, 1, None, 9999]
    assert "topic 'orders' partition 3 offset 0, and 1 more" in caplog.text
    assert str(LAST_SHOWN_MS + 1) in caplog.text


def set_aside(path: str) -> list[File]:
    """The four, and batches that cannot be read; of one of them the span before has seen the beginning."""
    aside = Aside(path, "00000001-0000")
    assert aside.sift(rows(aside.odd)).column("offset").to_pylist() == [1, 3]
    aside.unreadable(Span("orders", 3, 7, 0, 10), BATCH, CorruptBatch("damaged"))
    aside.unreadable(Span("orders", 3, 7, 10, 20), BATCH, CorruptBatch("damaged"))
    files = aside.close()
    assert {reason: file.rows for reason, file in files.items()} == {"timestamp": 2, "unreadable": 1}
    return list(files.values())


def test_a_batch_is_there_once(tmp_path: Path) -> None:
    table = Quarantine(str(tmp_path), "orders")
    assert table.end_of(1) is None
    table.append(1, [], {"at": 4})
    assert table.end_of(1) is None and not Path(table.path).exists()
    for _ in range(2):  # repeated as it was: it is known
        table.append(1, set_aside(table.path), {"at": 4})
    assert table.end_of(1) == {"at": 4} and table.end_of(2) is None
    found = deltalake.DeltaTable(table.path).to_pyarrow_table().sort_by("offset").to_pylist()
    assert [(row["offset"], row["messages"], row["timestamp_ms"], row["reason"]) for row in found] == [
        (0, 1, STAMPS[0], "timestamp"), (2, 1, STAMPS[2], "timestamp"), (8, 5, None, "unreadable"),
    ]  # fmt: skip
    assert (found[2]["value"], found[2]["detail"]) == (b"bytes", "damaged")
    table.append(1, set_aside(table.path), {"at": 9})  # another batch of that number: never left out
    assert deltalake.DeltaTable(table.path).to_pyarrow_table().num_rows == 6


def test_the_table_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = quarantine_path(str(tmp_path), "orders")
    deltalake.write_deltalake(path, pa.table({"topic": ["orders"]}))
    with pytest.raises(UsageError, match="no column partition"):
        Quarantine(str(tmp_path), "orders").end_of(1)
