"""The job replay in real Spark: from an archive and from a topic, each message once for a job."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.cli.root import run
from postroom.errors import InvalidSetting, UsageError
from postroom.spark.jobs.archive import ArchiveOptions, archive
from postroom.spark.jobs.replay import Replayed, ReplayOptions, replay
from tests.integration.spark.streams import send

DAY_MS = 86_400_000
OLD = 1_700_000_000_000


def messages(mq: Any, topic: str) -> list[Any]:
    return list(mq.read(topic))


def values(mq: Any, topic: str) -> list[int]:
    return sorted(int(message.value) for message in messages(mq, topic))


def counts(done: Replayed) -> tuple[int, int]:
    return done.messages, done.before


def test_from_an_archive(
    spark: Any, url: str, mq: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mq.create_topic("orders", partitions=2)
    mq.create_topic("again", partitions=3)
    for day in range(3):
        some = range(day * 100, day * 100 + 100)
        mq.send_many(
            "orders",
            [postroom.Message(b"%d" % n, key=f"k{n % 5}", timestamp=OLD + day * DAY_MS) for n in some],
        )
    mq.send("orders", b"300", key="k0", id="o-300", headers={"h": "x"})
    lake = str(tmp_path / "lake")
    archive(spark, ArchiveOptions({"url": url}, "orders", lake))
    mq.purge("orders")  # what comes now comes from the archive

    wanted = ReplayOptions({"url": url}, "orders", "again", "fix-17", folder=lake)
    assert counts(replay(spark, wanted)) == (301, 0)
    first = messages(mq, "again")
    assert sorted(int(m.value) for m in first) == list(range(301))
    for key in {m.key for m in first}:
        mine = [int(m.value) for m in first if m.key == key]
        assert mine == sorted(mine), "the messages of a key are in order"
    (marked,) = (m for m in first if m.value == b"300")
    assert marked.headers["h"] == b"x" and marked.headers["replayed-id"] == b"o-300"
    assert marked.headers["replayed-topic"] == b"orders" and "replayed-offset" in marked.headers
    assert next(m for m in first if m.value == b"100").headers["replayed-timestamp"] == b"%d" % (OLD + DAY_MS)

    send(mq, "orders", 301, 20)
    archive(spark, ArchiveOptions({"url": url}, "orders", lake))
    assert counts(replay(spark, wanted)) == (20, 301)  # the same job again: what has come since
    assert values(mq, "again") == list(range(321))

    mq.create_topic("day", partitions=1)
    capsys.readouterr()
    first_ms, end_ms = (
        datetime.fromtimestamp((OLD + day * DAY_MS) / 1000, UTC).isoformat() for day in (1, 2)
    )
    called = [
        "pipeline",
        "replay",
        "orders",
        "--to",
        "day",
        "--archive",
        lake,
        "--job",
        "day",
        "--url",
        url,
        "--json",
    ]
    assert run([*called, "--start", first_ms, "--end", end_ms]) == 0
    assert json.loads(capsys.readouterr().out)["messages"] == 100
    assert values(mq, "day") == list(range(100, 200))


def test_from_a_topic(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=2)
    mq.create_topic("again", partitions=1)
    send(mq, "orders", 0, 100)
    stored = {(m.partition, m.offset): int(m.value) for m in messages(mq, "orders")}
    part = ReplayOptions({"url": url}, "orders", "again", "a", start={0: 10}, end={0: 30}, partitions=(0,))
    assert counts(replay(spark, part)) == (20, 0)
    assert values(mq, "again") == sorted(stored[0, at] for at in range(10, 30))
    places = {(int(m.headers["replayed-partition"]), int(m.headers["replayed-offset"])): int(m.value)
              for m in messages(mq, "again")}  # fmt: skip
    assert places.items() <= stored.items() and len(places) == 20

    mq.create_topic("third", partitions=1)
    assert counts(replay(spark, ReplayOptions({"url": url}, "again", "third", "b"))) == (20, 0)
    assert {m.headers["replayed-topic"] for m in messages(mq, "third")} == {b"orders"}  # the first origin


def test_refused(url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    queue = {"url": url}
    with pytest.raises(postroom.UnknownTopic, match="no topic 'order': did you mean 'orders'"):
        replay(None, ReplayOptions(queue, "orders", "order", "a"))
    with pytest.raises(UsageError, match="there is no archive of topic 'orders' in"):
        replay(None, ReplayOptions(queue, "orders", "orders", "a", folder=str(tmp_path / "lake")))
    with pytest.raises(InvalidSetting, match="there is nothing between"):
        replay(None, ReplayOptions(queue, "orders", "orders", "a", start={0: 5}, end={0: 5}))
    with pytest.raises(InvalidSetting, match="has no time zone"):
        replay(None, ReplayOptions(queue, "orders", "orders", "a", start=datetime(2026, 1, 1)))
    with pytest.raises(InvalidSetting, match="job=''"):
        replay(None, ReplayOptions(queue, "orders", "orders", ""))
