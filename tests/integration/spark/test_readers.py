"""The readers as Spark uses them, without a JVM: pickled, in JSON, over a real queue.

What is done to a topic is drawn at random: messages, splits, merges, runs that are killed at any step, and
retention that drops what was read. In the end every message was read once.
"""

from __future__ import annotations

import json
import random
import time
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.types import BinaryType, IntegerType, LongType, StringType, StructField, StructType

import postroom.sync
from postroom.broker.duties import Retention
from postroom.config import DEFAULTS
from postroom.errors import DataLoss
from postroom.spark.source import PostroomSource
from tests.integration.spark.streams import send

SCHEMA = StructType(
    [
        StructField("value", BinaryType()),
        StructField("topic", StringType()),
        StructField("partition", IntegerType()),
        StructField("offset", LongType()),
    ]
)


def sent_along(value: Any) -> Any:
    return cloudpickle.loads(cloudpickle.dumps(value))


class Killed(Exception):
    pass


class Checkpoint:
    def __init__(self) -> None:
        self.offsets: list[str] = []
        self.commits = 0
        self.sink: dict[int, list[int]] = {}

    @property
    def values(self) -> list[int]:
        return sorted(value for batch in self.sink.values() for value in batch)


class Run:
    """One run of a query with the trigger availableNow."""

    def __init__(
        self, options: dict[str, str], checkpoint: Checkpoint, kill: str = "", after: int = 0
    ) -> None:
        source = sent_along(PostroomSource(options))
        self.reader = source.streamReader(SCHEMA)
        self.executor = sent_along(source.streamReader(SCHEMA))  # as it is sent to tasks
        self.checkpoint, self.kill, self.left = checkpoint, kill, after

    def go(self) -> None:
        at = self.checkpoint
        try:
            self.reader.prepareForTriggerAvailableNow()
            begin = at.offsets[-1] if at.commits else json.dumps(self.reader.initialOffset())
            if len(at.offsets) > at.commits:
                begin = at.offsets[-2] if at.commits else begin
                begin = self.batch(begin, at.offsets[-1])
            while True:
                found = self.reader.latestOffset(json.loads(begin), self.reader.getDefaultReadLimit())
                if at.offsets and json.dumps(found) == begin:
                    return
                at.offsets.append(json.dumps(found))
                self.maybe("logged")
                begin = self.batch(begin, at.offsets[-1])
        finally:
            self.reader.stop()

    def batch(self, begin: str, end: str) -> str:
        tasks = self.reader.partitions(json.loads(begin), json.loads(end))
        rows = [
            row
            for task in tasks
            for arrow in self.executor.read(sent_along(task))
            for row in arrow.to_pylist()
        ]
        self.checkpoint.sink[len(self.checkpoint.offsets) - 1] = [int(row["value"]) for row in rows]
        self.maybe("ran")
        self.checkpoint.commits = len(self.checkpoint.offsets)
        return end

    def maybe(self, step: str) -> None:
        if step == self.kill:
            self.left -= 1
            if self.left < 0:
                raise Killed


@pytest.mark.parametrize("seed", range(6))
def test_every_message_once(seed: int, url: str, mq: postroom.sync.Connection) -> None:
    chance = random.Random(seed)
    mq.create_topic("orders", partitions=2, drop_settled=True)
    options = {"url": url, "subscribe": "orders", "startingOffsets": "earliest", "group": "lake"}
    options["maxOffsetsPerTrigger"] = str(chance.choice([7, 40, 1000]))
    checkpoint, sent = Checkpoint(), 0
    for _ in range(14):
        match chance.choice(["send", "send", "split", "merge", "run", "kill", "drop"]):
            case "send":
                count = chance.randrange(1, 60)
                send(mq, "orders", sent, count)
                sent += count
            case "split":
                mq.split("orders", chance.choice(mq.route("orders").ranges).partition)
            case "merge":
                ranges = mq.route("orders").ranges
                if len(ranges) > 1:
                    at = chance.randrange(len(ranges) - 1)
                    mq.merge("orders", ranges[at].partition, ranges[at + 1].partition)
            case "run":
                Run(options, checkpoint).go()
            case "kill":
                try:
                    Run(options, checkpoint, chance.choice(["logged", "ran"]), chance.randrange(4)).go()
                except Killed:
                    pass
            case "drop":  # what the group has read is dropped, and sealed partitions go as a whole
                Retention(mq._target._endpoint.store, DEFAULTS).run_once()
    Run(options, checkpoint).go()
    assert checkpoint.values == list(range(sent))
    assert mq.lag("orders", "lake").total.messages == 0


def rows(reader: Any, tasks: Any) -> list[int]:
    found = [row for task in tasks for arrow in reader.read(task) for row in arrow.to_pylist()]
    return sorted(int(row["value"]) for row in found)


def read(url: str, **options: object) -> list[int]:
    given = {"url": url, "subscribe": "orders", **options}
    source = PostroomSource({name: str(value) for name, value in given.items() if value is not None})
    reader = sent_along(sent_along(source).reader(SCHEMA))
    return rows(reader, map(sent_along, reader.partitions()))


def test_where_a_batch_read_begins_and_ends(url: str, mq: postroom.sync.Connection) -> None:
    mq.create_topic("orders", partitions=1)
    mq.create_topic("others", partitions=1)
    send(mq, "orders", 0, 10)
    time.sleep(0.02)  # time is what is read by here
    between = int(time.time() * 1000)
    time.sleep(0.02)
    send(mq, "orders", 10, 10)
    mq.split("orders", 0)
    send(mq, "orders", 20, 10)
    send(mq, "others", 100, 5)
    everything = [*range(30), *range(100, 105)]
    assert read(url) == list(range(30))
    assert read(url, subscribe="orders,others") == everything
    later = {"startingTimestamp": between, "startingOffsetsByTimestampStrategy": "latest"}
    assert read(url, subscribe=None, subscribePattern="o.*s", **later) == everything[10:]
    first: dict[str, object] = {"subscribe": None, "assign": '{"orders": [0]}'}
    assert read(url, **first) == list(range(20))
    assert read(url, startingOffsets='{"orders": {"0": 15, "1": -2}}') == list(range(15, 30))
    assert read(url, endingOffsets='{"orders": {"0": 5, "1": 0, "2": 0}}') == list(range(5))
    assert read(url, **first, endingTimestamp=between, startingOffsets='{"orders": {"0": 3}}') == list(
        range(3, 10)
    )
    by_time = json.dumps({"orders": {"0": between}})
    assert read(url, startingOffsetsByTimestamp=by_time) == list(range(10, 30))
    assert read(url, endingOffsetsByTimestamp=by_time, minPartitions=4) == [*range(10), *range(20, 30)]


def test_many_small_fetches(url: str, mq: postroom.sync.Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("postroom.spark.reading.FETCH_MESSAGES", 10)
    monkeypatch.setattr("postroom.spark.reading._ROWS", 7)
    mq.create_topic("orders", partitions=1)
    for n in range(40):
        mq.send("orders", b"%d" % n)
    send(mq, "orders", 40, 60)
    given = {"url": url, "subscribe": "orders", "startingOffsets": '{"orders": {"0": 3}}'}
    reader = PostroomSource({**given, "endingOffsets": '{"orders": {"0": 77}}', "minPartitions": "2"}).reader(
        SCHEMA
    )
    assert rows(reader, reader.partitions()) == list(range(3, 77))


@pytest.mark.parametrize("gone", ["messages", "topic"])
def test_gone_after_it_was_planned(url: str, mq: postroom.sync.Connection, gone: str) -> None:
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 10)
    given = {"url": url, "subscribe": "orders"}
    strict = PostroomSource(given).reader(SCHEMA)
    lenient = PostroomSource({**given, "failOnDataLoss": "false"}).reader(SCHEMA)
    tasks = strict.partitions()
    if gone == "topic":
        mq.delete_topic("orders")
    else:
        mq.purge("orders")
        send(mq, "orders", 10, 3)
    with pytest.raises(
        DataLoss, match=r"10 offsets were dropped before they were read: .* partition 0, 0 to 9"
    ):
        rows(strict, tasks)
    assert rows(lenient, tasks) == []
