"""Tables of an archive, of each format: with files as tasks write them, and in the hands of others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

from postroom.spark.jobs.archive import _Files
from postroom.spark.jobs.lake import COLUMNS, File, Lake, Mark, arrow_schema, open_lake
from postroom.spark.jobs.lake.iceberg import _unpooled

FIRST_DAY = datetime(2026, 1, 1, 12, tzinfo=UTC)


def offsets(end: int) -> dict[str, Any]:
    return {"v": 1, "topics": {"orders": {"0": end}}, "sealed": {"orders": [3]}, "ids": {"orders": 1}}


def written(lake: Lake, batch: int, numbers: Sequence[int]) -> list[File]:
    """Message n is of day n % 2."""
    rows = [
        {"topic": "orders", "partition": 0, "offset": n, "timestamp": FIRST_DAY + timedelta(days=n % 2),
         "key": b"k", "value": b"%d" % n, "headers": [{"key": "h", "value": b"x"}]}
        for n in numbers
    ]  # fmt: skip
    files = _Files(lake.path, f"{batch:08}-0000")
    files.add(pa.RecordBatch.from_pylist(rows, arrow_schema(date=False)))
    return files.close()


def filled(lake: Lake, mark: Mark | None, numbers: range) -> Mark:
    """One batch more."""
    mark = mark or lake.create(offsets(numbers.start))
    return lake.append(mark, written(lake, mark.batch + 1, numbers), offsets(numbers.stop))


def in_order(rows: Any) -> list[dict[str, Any]]:
    return sorted(rows.to_pylist(), key=lambda row: row["offset"])


@contextmanager
def overtaken(lake: Any, others: Callable[[], object]) -> Iterator[None]:
    """Others are at work once, when the table was looked at, and before the commit."""
    look, still = lake._mark, [others]

    def looked(table: Any) -> Mark:
        found: Mark = look(table)
        if still:
            still.pop()()
        return found

    lake._mark = looked
    yield
    lake._mark = look
    assert not still


class Delta:
    """What somebody else does with a Delta table."""

    format = "delta"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def lake(self) -> Lake:
        return open_lake(str(self._folder), "orders")

    @property
    def table(self) -> Any:
        return deltalake.DeltaTable(self._folder / "orders")

    def rows(self) -> list[dict[str, Any]]:
        return in_order(pa.table(self.table.scan(columns=list(COLUMNS))))

    def add_column(self, name: str = "reviewed") -> None:
        self.table.alter.add_columns([deltalake.Field(name, "boolean")])

    def widen(self) -> None:
        """The type of `partition`, as if somebody had written the log by hand."""
        log = self._folder / "orders" / "_delta_log"
        lines = "\n".join(commit.read_text() for commit in sorted(log.glob("*.json"))).split("\n")
        last = [json.loads(line)["metaData"] for line in lines if line.startswith('{"metaData"')][-1]
        last["schemaString"] = last["schemaString"].replace('"integer"', '"long"')
        (log / f"{self.table.version() + 1:020}.json").write_text(json.dumps({"metaData": last}))

    def set_property(self) -> None:
        self.table.alter.set_table_properties({"mine": "yes"}, raise_if_not_exists=False)

    def delete(self, number: int) -> None:
        self.table.delete(f"`offset` = {number}")

    def rewrite(self) -> None:
        self.table.optimize.z_order(["offset"])
        self.table.vacuum(dry_run=False, retention_hours=0, enforce_retention_duration=False)

    def set_back(self) -> None:
        """To what it was before the last commit."""
        self.table.restore(self.table.version() - 1)

    def clean_up(self) -> None:
        """The history goes, what is in the table stays."""
        self.table.create_checkpoint()
        for commit in sorted((self._folder / "orders" / "_delta_log").glob("*.json"))[:-1]:
            commit.unlink()


class Iceberg:
    """What somebody else does with an Iceberg table."""

    format = "iceberg"

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("pyiceberg")
        self._folder = folder

    def lake(self) -> Lake:
        return open_lake(str(self._folder), "orders", "iceberg")

    @property
    def table(self) -> Any:
        from pyiceberg.catalog import load_catalog

        catalog = load_catalog("postroom", type="sql", uri=f"sqlite:///{self._folder}/catalog.db")
        return _unpooled(catalog).load_table(("postroom", "orders"))

    def rows(self) -> list[dict[str, Any]]:
        found = in_order(self.table.scan(selected_fields=COLUMNS[:-1]).to_arrow())
        return [{**row, "date": row["timestamp"].date()} for row in found]

    def add_column(self, name: str = "reviewed") -> None:
        from pyiceberg.types import BooleanType

        with self.table.update_schema() as change:
            change.add_column(name, BooleanType())

    def widen(self) -> None:
        from pyiceberg.types import LongType

        with self.table.update_schema() as change:
            change.update_column("partition", LongType())

    def set_property(self) -> None:
        with self.table.transaction() as change:
            change.set_properties(mine="yes")

    def delete(self, number: int) -> None:
        self.table.delete(f"offset = {number}")

    def rewrite(self) -> None:
        self.table.overwrite(self.table.scan().to_arrow())

    def set_back(self) -> None:
        table = self.table
        table.manage_snapshots().rollback_to_snapshot(table.current_snapshot().parent_snapshot_id).commit()

    def clean_up(self) -> None:
        self.rewrite()  # the newest snapshot is nobody's batch
        self.table.maintenance.expire_snapshots().older_than(datetime.now(UTC) + timedelta(days=1)).commit()


WORLDS = (Delta, Iceberg)
