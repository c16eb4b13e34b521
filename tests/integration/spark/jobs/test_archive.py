"""The job archive in real Spark: every message once in a table, through changes and restores."""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest

import postroom
from postroom.cli.root import run
from postroom.errors import DataLoss, InvalidSetting, UsageError
from postroom.spark.jobs.archive import ArchiveOptions, archive, compact
from postroom.spark.jobs.lake import COLUMNS, Mark
from postroom.spark.jobs.lake.delta import DeltaLake, newest
from tests.integration.spark.streams import send


def options(url: str, where: Path, **others: Any) -> ArchiveOptions:
    return ArchiveOptions({"url": url}, "orders", str(where / "lake"), **others)


def rows(where: Path) -> list[dict[str, Any]]:
    """As any reader of Delta sees them; none is there twice."""
    found = pa.table(deltalake.DeltaTable(where / "lake" / "orders").to_pyarrow_table()).to_pylist()
    assert max(Counter((r["partition"], r["offset"]) for r in found).values(), default=1) == 1
    return found


def numbers(where: Path) -> list[int]:
    return sorted(int(row["value"]) for row in rows(where))


def test_every_message_once(
    spark: Any, url: str, mq: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = options(url, tmp_path)
    mq.create_topic("orders", partitions=2)
    send(mq, "orders", 0, 100)
    old = 1_700_000_000_000  # another day
    mq.send_many(
        "orders", [postroom.Message(b"100", headers={"h": "x"}, timestamp=old), postroom.Message(b"101")]
    )
    told = list[tuple[int, int]]()
    done = archive(spark, options(url, tmp_path, max_rows=60), progress=lambda *what: told.append(what))
    assert (done.messages, done.batches, done.behind) == (102, 2, 0)
    assert done.files == len(list(Path(done.table).rglob("*.parquet"))) and told[-1] == (102, 102)
    assert numbers(tmp_path) == list(range(102))
    row = next(row for row in rows(tmp_path) if row["value"] == b"100")
    assert list(row) == list(COLUMNS) and row["key"] is None
    assert row["headers"] == [{"key": "h", "value": b"x"}]
    assert row["timestamp"] == datetime.fromtimestamp(old / 1000, UTC) and str(row["date"]) == "2023-11-14"
    assert mq.lag("orders", "archive").total.messages == 0
    mq.split("orders", 0)
    send(mq, "orders", 102, 50)
    assert mq.lag("orders", "archive").total.messages == 50  # held by the group until they are archived
    assert archive(spark, wanted).messages == 50
    before = deltalake.DeltaTable(tmp_path / "lake" / "orders").version()
    capsys.readouterr()
    assert (
        run(["pipeline", "archive", "orders", "--to", wanted.folder, "--compact", "--json", "--url", url])
        == 0
    )
    said = json.loads(capsys.readouterr().out)
    assert (said["topic"], said["batches"], said["behind"]) == ("orders", 0, 0)
    assert said["compacted"]["files_after"] == 2 < said["compacted"]["files_before"]  # one for each day
    assert deltalake.DeltaTable(tmp_path / "lake" / "orders").version() > before
    send(mq, "orders", 152, 10)
    assert archive(spark, wanted).messages == 10
    assert numbers(tmp_path) == list(range(162))

    deltalake.DeltaTable(done.table).restore(before)  # the last ten are gone from it
    assert numbers(tmp_path) == list(range(152))
    assert archive(spark, wanted).messages == 10
    assert numbers(tmp_path) == list(range(162))


def test_refused(
    url: str, mq: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 10)
    table = tmp_path / "lake" / "orders"
    deltalake.write_deltalake(table, pa.table({"topic": ["orders"], "offset": ["0"], "more": [1]}))
    before = sorted(table.rglob("*"))
    with pytest.raises(InvalidSetting, match="has another schema: column partition is missing") as error:
        archive(None, options(url, tmp_path))
    assert "column offset is string, not long; " in str(error.value)
    assert "Nothing was written; undo that, or archive into another folder" in str(error.value)
    assert sorted(table.rglob("*")) == before and not mq.groups("orders")

    DeltaLake(str(tmp_path / "b"), "others").create({"v": 1, "topics": {}, "ids": {}})
    (tmp_path / "b" / "others").rename(tmp_path / "b" / "orders")
    with pytest.raises(InvalidSetting, match="is of topic 'others', and not of 'orders'"):
        archive(None, ArchiveOptions({"url": url}, "orders", str(tmp_path / "b")))
    (tmp_path / "c" / "orders").mkdir(parents=True)
    (tmp_path / "c" / "orders" / "mine.txt").touch()
    with pytest.raises(UsageError, match="is not empty, and holds no Delta table"):
        archive(None, ArchiveOptions({"url": url}, "orders", str(tmp_path / "c")))
    with pytest.raises(UsageError, match="there is no archive of topic 'orders' in"):
        compact(ArchiveOptions({"url": url}, "orders", str(tmp_path / "d")))
    with pytest.raises(postroom.UnknownTopic, match="no topic 'order': did you mean 'orders'"):
        archive(None, ArchiveOptions({"url": url}, "order", str(tmp_path / "d")))
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    assert run(["pipeline", "archive", "orders", "--to", str(tmp_path / "d"), "--url", url]) == 2
    assert "no pyspark here: run `pip install '.[spark-local]'` in a checkout" in capsys.readouterr().err
    assert (
        run(["pipeline", "archive", "a", "b", "--continuous", "--to", str(tmp_path / "d"), "--url", url]) == 2
    )
    assert "--continuous is for one topic" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_how_far_a_table_is() -> None:
    """The last batch says it, whatever was done to the table since; one that was set back, as it was then."""

    def commit(version: int, operation: str, batch: int | None = None, to: str = "") -> dict[str, Any]:
        said = (
            {} if batch is None else {"postroom.batch": str(batch), "postroom.end": json.dumps({"at": batch})}
        )
        return {"version": version, "operation": operation, "operationParameters": {"version": to}, **said}

    late = [commit(4, "VACUUM END"), commit(3, "OPTIMIZE", 1), commit(2, "WRITE", 2), commit(1, "WRITE", 1)]
    assert newest(iter(late)) == (Mark(2, {"at": 2}), None)
    assert newest(iter(late[:2])) == (None, None)  # the log is cut off behind it
    assert newest(iter([commit(5, "RESTORE", to="1"), *late])) == (Mark(1, {"at": 1}), 1)
    assert newest(iter([commit(5, "RESTORE", to="1")])) == (None, 1)
    assert newest(iter([commit(0, "CREATE TABLE")])) == (None, None)


def test_what_was_dropped(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 10)
    archive(spark, options(url, tmp_path))
    send(mq, "orders", 10, 10)
    mq.purge("orders")
    send(mq, "orders", 20, 5)
    with pytest.raises(DataLoss, match="10 offsets were dropped before they were read"):
        archive(spark, options(url, tmp_path))
    archive(spark, options(url, tmp_path, fail_on_data_loss=False))
    assert numbers(tmp_path) == [*range(10), *range(20, 25)]
