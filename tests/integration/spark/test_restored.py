"""A queue that is restored from an older backup, without a word: nobody takes new messages for read ones."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import deltalake
import pytest

import postroom.sync
from postroom.errors import DataLoss
from postroom.spark.jobs.archive import ArchiveOptions, archive
from tests.integration.spark.streams import Query, send

LOST = "restored from an older backup .*offsets up to 1999 were read"


def files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("queue.db*") if path.is_file()]


def copied(spark: Any, url: str, to: str, where: Path, **options: object) -> None:
    """Topic to topic, each message once."""
    given = {"url": url, "subscribe": "in", "startingOffsets": "earliest", "includeSource": "true", **options}
    rows = spark.readStream.format("postroom").options(**given).load()
    writing = rows.drop("topic").writeStream.format("postroom").options(url=to, topic="out")
    writing = writing.option("checkpointLocation", str(where / "copied"))
    writing.trigger(availableNow=True).start().awaitTermination(240)


class Restored:
    """Topic `in` of a queue on files, with 0 to 1999; `restore` takes it back to 0 to 999."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.live = folder, folder / "live"
        self.url = f"sqlite:///{self.live}/queue.db"
        self.live.mkdir()
        with postroom.sync.connect(self.url) as mq:
            mq.create_topic("in", partitions=1)
        self.send(0, 1000)
        for path in files(self.live):
            shutil.copy(path, folder)
        self.send(1000, 1000)

    def restore(self) -> None:
        for path in files(self.live):
            path.unlink()
        for path in files(self.folder):
            shutil.copy(path, self.live)

    def send(self, first: int, count: int) -> None:
        with postroom.sync.connect(self.url) as mq:
            send(mq, "in", first, count)


ALL = sorted([*range(2000), *range(1000), *range(3000, 5000)])


def test_streams(spark: Any, tmp_path: Path) -> None:
    queue, to = Restored(tmp_path), f"sqlite:///{tmp_path}/target.db"
    with postroom.sync.connect(to) as mq:
        mq.create_topic("out", partitions=2)
    query = Query(spark, tmp_path, url=queue.url, subscribe="in", startingOffsets="earliest")
    query.run()
    copied(spark, queue.url, to, tmp_path)
    queue.restore()
    queue.send(3000, 500)
    with pytest.raises(Exception, match=LOST):
        query.run()
    queue.send(3500, 1500)  # past the offset that was read
    with pytest.raises(Exception, match=LOST):
        copied(spark, queue.url, to, tmp_path)
    Query(spark, tmp_path, **query.options, failOnDataLoss=False).run()
    rows = spark.read.parquet(str(tmp_path / "out")).collect()
    assert sorted(int(row.value) for row in rows) == ALL
    copied(spark, queue.url, to, tmp_path, failOnDataLoss="false")
    with postroom.sync.connect(to) as mq:
        assert sorted(int(message.value) for message in mq.read("out", end="latest")) == ALL


def test_an_archive(spark: Any, tmp_path: Path) -> None:
    queue = Restored(tmp_path)
    options = ArchiveOptions({"url": queue.url}, "in", str(tmp_path / "lake"))
    assert archive(spark, options).messages == 2000
    queue.restore()
    for first, count in ((3000, 500), (3500, 1500)):
        queue.send(first, count)
        with pytest.raises(DataLoss, match=LOST):
            archive(spark, options)
    done = archive(spark, replace(options, fail_on_data_loss=False))
    assert (done.messages, done.behind) == (3000, 0)
    values = deltalake.DeltaTable(tmp_path / "lake" / "in").to_pyarrow_table()["value"].to_pylist()
    assert sorted(int(value) for value in values) == ALL
