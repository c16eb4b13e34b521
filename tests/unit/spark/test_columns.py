"""Stored batches as Arrow batches: exactly the schema that Spark wants, and only what is asked for."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from postroom.errors import CorruptBatch, InvalidSetting
from postroom.model.messages.batch import BatchBuilder, assemble, build_control, with_base_offset
from postroom.spark.columns import HEADERS, Columns, check_schema, schema_text
from postroom.spark.planning import Span
from postroom.store.contract import StoredBatch

SPAN = Span("t", 3, 7, 0, 1000)
MS = 1_700_000_000_123


KINDS: dict[str, DataType] = {
    "binary": BinaryType(),
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "timestamp": TimestampType(),
    HEADERS: ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}


def schema(text: str) -> StructType:
    """Spark's own parser needs a session."""
    assert all(kind.simpleString() == name for name, kind in KINDS.items())
    listed = [column.removesuffix(" not null").split(" ", 1) for column in text.split(", ")]
    given = [not column.endswith(" not null") for column in text.split(", ")]
    return StructType(
        [StructField(name, KINDS[kind], null) for (name, kind), null in zip(listed, given, strict=True)]
    )


def stored(base: int, count: int, *, compression: str = "lz4", headers: bool = False) -> StoredBatch:
    builder = BatchBuilder(compression)
    for n in range(count):
        own = [("h", b"%d" % n), ("empty", None)] if headers and n % 2 else []
        builder.append(MS + n, None if n % 3 == 0 else b"k%d" % n, b"v%d" % (base + n), own)
    return StoredBatch(base, count, MS, with_base_offset(builder.build(), base))


def control(base: int) -> StoredBatch:
    return StoredBatch(base, 1, MS, with_base_offset(build_control(64), base))


def read(text: str, *batches: StoredBatch, span: Span = SPAN) -> pa.RecordBatch:
    columns = Columns(schema(text))
    for batch in batches:
        columns.add(batch, span)
    return columns.flush(span)


@pytest.mark.parametrize("compression", ["none", "lz4", "zstd"])
def test_all_columns(compression: str) -> None:
    found = read(schema_text(True), stored(10, 4, compression=compression, headers=True))
    assert found.schema.equals(to_arrow_schema(schema(schema_text(True)), timezone="UTC"))
    found.validate(full=True)
    rows = found.to_pylist()
    assert [row["key"] for row in rows] == [None, b"k1", b"k2", None]
    assert [row["value"] for row in rows] == [b"v10", b"v11", b"v12", b"v13"]
    assert [row["offset"] for row in rows] == [10, 11, 12, 13]
    assert [int(row["timestamp"].timestamp() * 1000 + 0.5) for row in rows] == [MS, MS + 1, MS + 2, MS + 3]
    assert {(row["topic"], row["partition"], row["timestampType"]) for row in rows} == {("t", 3, 0)}
    assert [row["headers"] for row in rows] == [
        None,
        [{"key": "h", "value": b"1"}, {"key": "empty", "value": None}],
        None,
        [{"key": "h", "value": b"3"}, {"key": "empty", "value": None}],
    ]


def test_only_what_is_in_the_span() -> None:
    span = Span("t", 3, 7, 12, 25)
    found = read("offset bigint, value binary", stored(10, 4), control(14), stored(20, 10), span=span)
    assert found.column("offset").to_pylist() == [12, 13, 20, 21, 22, 23, 24]
    assert found.column("value").to_pylist()[0] == b"v12"


def test_some_columns_in_any_order() -> None:
    found = read("partition int, key binary", stored(0, 2))
    assert found.schema.names == ["partition", "key"]
    assert found.num_rows == 2


def test_a_batch_is_opened_only_if_that_is_needed() -> None:
    damaged = stored(0, 5)
    broken = StoredBatch(0, 5, MS, damaged.data[:-1] + bytes([damaged.data[-1] ^ 1]))
    assert read("offset bigint, topic string", broken).column("offset").to_pylist() == [0, 1, 2, 3, 4]
    with pytest.raises(CorruptBatch):
        read("value binary", broken)


def test_nothing_is_left_behind_by_a_flush() -> None:
    columns = Columns(schema("value binary, offset bigint"))
    for base in (0, 5):
        columns.add(stored(base, 5), SPAN)
        assert columns.flush(SPAN).column("offset").to_pylist() == list(range(base, base + 5))
        assert columns.rows == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("valu binary", "no column 'valu'; the columns are key binary"),
        ("value string", "the column value is binary, not string"),
        ("partition bigint", "the column partition is int, not bigint"),
    ],
)
def test_schemas_that_do_not_fit(text: str, message: str) -> None:
    with pytest.raises(InvalidSetting, match=message):
        check_schema(schema(text))
    check_schema(schema(schema_text(True)))


def test_columns_that_may_not_be_null_are_taken_as_they_are() -> None:
    fields: Any = schema("value binary not null, offset bigint")
    columns = Columns(fields)
    columns.add(stored(0, 2), SPAN)
    assert columns.flush(SPAN).schema.equals(to_arrow_schema(fields, timezone="UTC"))


def test_records_that_turn_out_to_be_no_records_are_told_when_the_rows_are_given() -> None:
    """The checksum is right, and what it covers is not."""
    bad = with_base_offset(assemble(b"\x00\x01" * 20, 3, MS, "none"), 2)
    broken, told = StoredBatch(2, 3, MS, bad), list[StoredBatch]()
    columns = Columns(schema("value binary, offset bigint"))
    for batch in (stored(0, 2), broken, stored(5, 2)):
        columns.add(batch, SPAN)
    found = columns.flush(SPAN, lambda batch, error: told.append(batch))
    assert told == [broken]
    assert found.to_pydict() == {"value": [b"v0", b"v1", b"v5", b"v6"], "offset": [0, 1, 5, 6]}
    columns = Columns(schema("value binary"))
    columns.add(broken, SPAN)
    with pytest.raises(CorruptBatch):
        columns.flush(SPAN)
