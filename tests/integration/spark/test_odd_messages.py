"""Messages that earlier versions have stored and nobody can date: jobs set them aside, and go on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import deltalake
import pytest

from postroom.cli.root import run
from postroom.errors import DataLoss
from postroom.model.messages.batch import BatchBuilder
from postroom.spark.jobs.archive import ArchiveOptions, archive
from postroom.spark.jobs.backlog import BacklogOptions, backlog
from postroom.spark.jobs.lake.delta import DeltaLake
from postroom.spark.jobs.lake.quarantine import quarantine_path
from postroom.spark.jobs.replay import ReplayOptions, replay
from postroom.store import open_sqlite
from postroom.store.contract import Append
from tests.damage import garbage
from tests.integration.spark.streams import send

MICROSECONDS = 1_795_000_000_000_000
YEAR_10000 = 253_402_300_800_000
YEAR_9990 = 253_086_854_400_000


def put(where: Path, *batches: bytes) -> None:
    """Straight into the log of the first partition: nobody looks at them."""
    store = open_sqlite(where / "queue.db")
    try:
        (place,) = (p.partition_id for p in store.catalog.topic("orders").route.ranges)
        store.log.append([Append(place, batch) for batch in batches])
    finally:
        store.close()


def stamped(*timestamps: int) -> bytes:
    builder = BatchBuilder()
    for at, timestamp in enumerate(timestamps):
        builder.append(timestamp, b"k", b"odd %d" % at, [("h", b"x")])
    return builder.build()


@pytest.fixture
def odd(mq: Any, tmp_path: Path) -> None:
    """Five, then four with these timestamps, one of them as it should be, and five."""
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 5)
    put(tmp_path, stamped(MICROSECONDS, int(time.time() * 1000), YEAR_10000, YEAR_9990))
    send(mq, "orders", 5, 5)


def quarantined(where: Path) -> list[dict[str, Any]]:
    table = deltalake.DeltaTable(quarantine_path(str(where / "lake"), "orders"))
    rows: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["offset"])


def archived(where: Path) -> list[int]:
    table = deltalake.DeltaTable(where / "lake" / "orders").to_pyarrow_table()
    return sorted(table.column("offset").to_pylist())


@pytest.mark.usefixtures("odd")
def test_they_are_read_counted_and_replayed(spark: Any, url: str, mq: Any) -> None:
    rows = spark.read.format("postroom").options(url=url, subscribe="orders").load().collect()
    assert sorted(row.offset for row in rows) == list(range(14))
    assert [row.offset for row in rows if row.timestamp is None] == [5, 7]
    assert next(row.timestamp.year for row in rows if row.offset == 8) == 9990

    found = backlog(spark, BacklogOptions({"url": url}, "orders"))
    assert (found.arrived, found.odd) == (11, 3) and len(found.windows) < 60
    mq.create_topic("again", partitions=1)
    assert replay(spark, ReplayOptions({"url": url}, "orders", "again", "job-1")).messages == 14
    headers = {m.headers["replayed-offset"]: m.headers for m in mq.read("again", end="latest")}
    assert len(headers) == 14
    assert [at for at in headers if "replayed-timestamp" not in headers[at]] == [b"5", b"7"]


@pytest.mark.usefixtures("odd")
def test_the_archive_sets_them_aside_once(
    spark: Any,
    url: str,
    mq: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = ArchiveOptions({"url": url}, "orders", str(tmp_path / "lake"))

    def killed(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:  # between the two commits
        patched.setattr(DeltaLake, "append", killed)
        with pytest.raises(KeyboardInterrupt):
            archive(spark, wanted)
    assert [row["offset"] for row in quarantined(tmp_path)] == [5, 7] and archived(tmp_path) == []
    put(tmp_path, stamped(MICROSECONDS))
    done = archive(spark, wanted)  # repeats the batch as it was, and goes on with what has come
    assert (done.messages, done.batches, done.behind) == (12, 2, 0)
    assert done.set_aside == {"timestamp": 3}
    assert archived(tmp_path) == [n for n in range(14) if n not in (5, 7)]
    rows = quarantined(tmp_path)
    assert [(row["offset"], row["timestamp_ms"]) for row in rows] == [
        (5, MICROSECONDS), (7, YEAR_10000), (14, MICROSECONDS),
    ]  # fmt: skip
    first = {name: rows[0][name] for name in ("topic", "partition", "messages", "key", "value", "reason")}
    assert first == {"topic": "orders", "partition": 0, "messages": 1, "key": b"k", "value": b"odd 0",
                     "reason": "timestamp"}  # fmt: skip
    assert rows[0]["headers"] == [{"key": "h", "value": b"x"}] and "1 to 9999" in rows[0]["detail"]

    put(tmp_path, garbage(3))
    send(mq, "orders", 10, 1)
    with pytest.raises(DataLoss, match="cannot be read"):
        archive(spark, wanted)
    capsys.readouterr()
    command = ["pipeline", "archive", "orders", "--to", wanted.folder, "--set-aside-unreadable", "--url", url]
    assert run(command) == 0
    assert "set aside of orders: 1 as batches that cannot be read" in capsys.readouterr().err
    last = quarantined(tmp_path)[-1]
    assert (last["offset"], last["messages"], last["reason"], last["timestamp_ms"]) == (
        15, 3, "unreadable", None,
    )  # fmt: skip
    assert last["value"][12:] == garbage(3)[12:] and archived(tmp_path)[-1] == 18
