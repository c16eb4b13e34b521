"""A task of Spark meets a batch that nobody can read: it fails with its place, or goes on if it may."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from postroom.endpoint.values import Fetched
from postroom.errors import DataLoss
from postroom.model.messages.batch import BatchBuilder, with_base_offset
from postroom.spark import reading
from postroom.spark.columns import Columns
from postroom.spark.planning import Span
from postroom.store.contract import StoredBatch
from tests.damage import garbage

SPAN = Span("orders", 3, 7, 0, 5)


class NoQueue:
    def __init__(self, reach: object) -> None: ...

    def __enter__(self) -> NoQueue:
        return self

    def __exit__(self, *error: object) -> None: ...

    def fetch_ahead(self, span: object, offset: int) -> None: ...


@pytest.fixture
def columns(monkeypatch: pytest.MonkeyPatch) -> Columns:
    """Of a partition with a message, three that cannot be read, and a message."""

    def fetched(*_: Any) -> Iterator[Fetched]:
        yield Fetched((one(0), StoredBatch(1, 3, 1, with_base_offset(garbage(), 1)), one(4)), 0, 5)

    monkeypatch.setattr(reading, "task_log", NoQueue)
    monkeypatch.setattr(reading, "_fetched", fetched)
    return Columns(StructType([StructField("value", BinaryType())]))


def one(offset: int) -> StoredBatch:
    builder = BatchBuilder()
    builder.append(1, None, b"%d" % offset, [])
    return StoredBatch(offset, 1, 1, with_base_offset(builder.build(), offset))


def read(columns: Columns, *, fail: bool) -> list[bytes]:
    found = reading.read_spans(None, [SPAN], columns, reading.Losses(fail))  # type: ignore[arg-type]
    return [value for batch in found for value in batch.column("value").to_pylist()]


def test_the_task_fails_and_names_the_place(columns: Columns) -> None:
    with pytest.raises(DataLoss, match=r"topic 'orders' partition 3, 1 to 3.*failOnDataLoss"):
        read(columns, fail=True)


def test_with_the_option_it_goes_on(columns: Columns, caplog: pytest.LogCaptureFixture) -> None:
    assert read(columns, fail=False) == [b"0", b"4"]
    assert "topic 'orders' partition 3, 1 to 3" in caplog.text
