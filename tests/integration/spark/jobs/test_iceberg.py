"""An archive in Iceberg's format in real Spark: every message once, and deleted rows stay deleted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from postroom.cli.root import run
from postroom.errors import InvalidSetting, UsageError
from postroom.spark.jobs.archive import ArchiveOptions, archive, compact
from postroom.spark.jobs.fields import Journal
from postroom.spark.jobs.lake import iceberg
from postroom.spark.jobs.replay import ReplayOptions, replay
from tests.integration.spark.streams import send

pytest.importorskip("pyiceberg")


def values(frame: Any) -> list[int]:
    return sorted(int(row["value"]) for row in frame.select("value").collect())


def deleting(lake: Any, number: int, folder: Path) -> Any:
    """A file of deleted positions beside the table's files, as other engines write them."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table import FileScanTask

    found = []
    for task in iceberg._planned(lake.there()):
        path = task.file.file_path
        at = [row["value"] for row in pq.read_table(path).to_pylist()]
        if b"%d" % number in at:
            where = str(folder / "deletes.parquet")
            row = {"file_path": [path], "pos": [at.index(b"%d" % number)]}
            pq.write_table(pa.table(row), where)
            kind = {"content": DataFileContent.POSITION_DELETES, "file_format": FileFormat.PARQUET}
            task = FileScanTask(task.file, {DataFile.from_args(file_path=where, partition={}, **kind)})
        found.append(task)
    return found


def test_archive_and_replay(
    spark: Any, url: str, mq: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pyiceberg.expressions import EqualTo

    folder = str(tmp_path / "a läke")
    mq.create_topic("orders", partitions=2)
    mq.create_topic("again", partitions=1)
    send(mq, "orders", 0, 100)
    called = ["pipeline", "archive", "orders", "--to", folder, "--format", "iceberg", "--url", url]
    assert run(called) == 0
    send(mq, "orders", 100, 20)
    wanted = ArchiveOptions({"url": url}, "orders", folder, format="iceberg")
    assert archive(spark, wanted).messages == 20
    lake: Any = wanted.lake()
    lake.there().delete(EqualTo("value", b"3"))
    compacted = compact(wanted)
    assert compacted.files_after < compacted.files_before
    kept = [n for n in range(120) if n != 3]
    assert values(lake.frame(spark)) == kept

    holed = deleting(lake, 7, tmp_path)
    monkeypatch.setattr(iceberg, "_planned", lambda *_: holed)
    kept.remove(7)
    job = ReplayOptions({"url": url}, "orders", "again", "a", folder=folder, format="iceberg")
    assert replay(spark, job).messages == len(kept)
    assert sorted(int(message.value) for message in mq.read("again")) == kept
    journal = Journal(str(Path(folder) / "orders"), id="value")  # as the audit reads it
    assert sorted(int(row["id"]) for row in journal.ids(spark, {}).collect()) == kept


def test_refused(url: str, mq: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mq.create_topic("orders", partitions=1)
    job = ReplayOptions({"url": url}, "orders", "orders", "a", folder=str(tmp_path / "a"), format="iceberg")
    with pytest.raises(UsageError, match="there is no archive of topic 'orders' in"):
        replay(None, job)
    (tmp_path / "b" / "orders").mkdir(parents=True)
    (tmp_path / "b" / "orders" / "mine.txt").touch()
    with pytest.raises(UsageError, match=r"is not empty, and the catalog has no table postroom.orders"):
        archive(None, ArchiveOptions({"url": url}, "orders", str(tmp_path / "b"), format="iceberg"))
    with pytest.raises(InvalidSetting, match="a catalog in a file needs a folder here"):
        archive(None, ArchiveOptions({"url": url}, "orders", "s3://bucket/lake", format="iceberg"))
    assert (
        run(["pipeline", "archive", "orders", "--to", str(tmp_path / "c"), "--format", "hudi", "--url", url])
        == 2
    )
    assert "--format 'hudi': choose delta or iceberg" in capsys.readouterr().err
