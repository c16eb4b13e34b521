"""What is tried on each version: `python -m tests.spark_versions.checks classic|connect FOLDER [CHECK …]`.

Prints a line of JSON for each check: "ok", "refused" where Postroom says that this version cannot do it, or
what went wrong. Needs no pytest, so that an environment has only what users have.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import postroom.spark
import postroom.sync
from postroom.spark.jobs.archive import ArchiveOptions, archive
from postroom.spark.jobs.replay import ReplayOptions, replay

__all__ = ["CHECKS"]

CHECKS: dict[str, Callable[[Try], str | None]] = {}


class Try:
    """One check: a queue of its own, and the session that all of them share."""

    def __init__(self, spark: Any, mode: str, where: Path) -> None:
        where.mkdir()
        self.spark, self.mode, self.where = spark, mode, where
        self.url = f"sqlite:///{where}/queue.db"
        self.mq = postroom.sync.connect(self.url)
        self.sent = 0

    def topic(self, name: str, partitions: int = 2) -> None:
        self.mq.create_topic(name, partitions=partitions)

    def send(self, count: int, topic: str = "in") -> None:
        numbers = range(self.sent, self.sent + count)
        self.mq.send_many(topic, [postroom.Message(b"%d" % n, key=f"k{n % 7}") for n in numbers])
        self.sent += count

    def stream(self, topic: str = "in", **options: object) -> Any:
        reading = self.spark.readStream.format("postroom").options(url=self.url, subscribe=topic)
        return reading.options(**options).load()

    def start(self, name: str = "copy", trigger: dict[str, Any] | None = None, **options: object) -> Any:
        """A stream into files."""
        rows = self.stream(**{"startingOffsets": "earliest", **options})
        writing = (
            rows.selectExpr("cast(value as string) value")
            .writeStream.format("parquet")
            .option("checkpointLocation", f"{self.where}/{name}-at")
        )
        return writing.trigger(**(trigger or {"availableNow": True})).start(f"{self.where}/{name}")

    def run(self, name: str = "copy", **options: object) -> Any:
        query = self.start(name, **options)
        assert query.awaitTermination(120), "it does not end"
        return query

    def copied(self, name: str = "copy") -> list[int]:
        return sorted(int(row.value) for row in self.spark.read.parquet(f"{self.where}/{name}").collect())

    def read(self, topic: str) -> list[int]:
        return sorted(int(message.value) for message in self.mq.read(topic))


def check(function: Callable[[Try], str | None]) -> Callable[[Try], str | None]:
    CHECKS[function.__name__.replace("_", " ")] = function
    return function


def until(what: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.1)


@check
def batch_read(at: Try) -> None:
    at.topic("in")
    at.send(300)
    frame = at.spark.read.format("postroom").options(url=at.url, subscribe="in", minPartitions=3).load()
    assert sorted(int(row.value) for row in frame.collect()) == list(range(300))
    assert frame.where("`offset` < 10").union(frame).count() == 300 + frame.where("`offset` < 10").count()
    few = at.spark.read.format("postroom").options(url=at.url, subscribe="in", pushFilters="true")
    assert few.schema("partition int, `offset` bigint").load().where("`offset` >= 10").count() == 280


@check
def stream_with_restarts(at: Try) -> None:
    at.topic("in", partitions=1)
    at.send(100)
    first = at.run()
    at.mq.split("in", 0)
    at.send(100)
    second = at.run()
    at.run()
    assert at.copied() == list(range(200)) and first.id == second.id
    at.mq.merge("in", 1, 2)
    query = at.start(trigger={"processingTime": "0 seconds"})
    at.send(50)
    query.processAllAvailable()
    query.stop()
    assert at.copied() == list(range(250))
    at.send(50)
    at.run()
    assert at.copied() == list(range(300))


@check
def stream_from_latest(at: Try) -> None:
    at.topic("in")
    at.send(100)
    at.run(startingOffsets="latest")  # writes down where it begins
    at.send(50)
    at.run(startingOffsets="latest")
    assert at.copied() == list(range(100, 150))


@check
def availableNow_reads_all(at: Try) -> None:
    at.topic("in", partitions=1)
    at.send(40)
    at.mq.split("in", 0)
    at.send(40)
    at.mq.split("in", 1)
    at.send(40)
    at.run()
    assert at.copied() == list(range(120))


@check
def maxOffsetsPerTrigger(at: Try) -> str | None:
    at.topic("in")
    at.send(200)
    try:
        query = at.run(maxOffsetsPerTrigger=50)
    except Exception as error:
        if "option maxOffsetsPerTrigger: it needs PySpark 4.2 or newer" in str(error):
            return "refused"
        raise
    assert at.copied() == list(range(200))
    assert max(progress.numInputRows for progress in query.recentProgress) <= 50
    return None


@check
def batch_write(at: Try) -> None:
    at.topic("out")
    rows = at.spark.range(500).selectExpr("cast(id % 5 as string) key", "cast(id as string) value")
    for _ in range(2):  # a job that is run again
        writing = rows.write.format("postroom").options(url=at.url, topic="out", query="nightly")
        writing.mode("append").save()
    assert at.read("out") == list(range(500))


DRIVER = """
import sys
from tests.spark_versions.checks import copy, made
copy(made("classic"), *sys.argv[1:]).start().awaitTermination()
"""


def copy(spark: Any, url: str, checkpoint: str) -> Any:
    reading = spark.readStream.format("postroom").options(url=url, subscribe="in")
    rows = reading.option("startingOffsets", "earliest").load()
    columns = ["key", "value", "concat(topic, '-', partition) source_partition", "`offset` source_offset"]
    writing = rows.selectExpr(*columns).writeStream.format("postroom").options(url=url, topic="out")
    return writing.option("checkpointLocation", checkpoint)


@check
def stream_write_exactly_once_after_kills(at: Try) -> None:
    """The driver is killed twice with all its processes, and the stream goes on in this one."""
    at.topic("in")
    at.topic("out")
    for _ in range(2):
        at.send(400)
        before = len(at.read("out"))
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, at.url, str(at.where / "at")],
            env={n: v for n, v in os.environ.items() if not n.startswith("SPARK_")},  # those of Connect
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            while len(at.read("out")) == before:
                assert process.poll() is None, "the driver has failed"
                at.send(50)  # so that it is in the middle of something
                time.sleep(0.3)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    at.send(50)
    for _ in range(2):  # the first may end with the batch that was left
        query = copy(at.spark, at.url, str(at.where / "at")).trigger(availableNow=True).start()
        assert query.awaitTermination(120)
    found = Counter(at.read("out"))
    assert sorted(found) == list(range(at.sent)) and max(found.values()) == 1


@check
def lag_and_its_listener(at: Try) -> None:
    at.topic("in")
    at.send(60)
    told: list[postroom.spark.Lag] = []
    listener = postroom.spark.lag_listener(told.append)
    at.spark.streams.addListener(listener)
    try:
        query = at.run()
        until(lambda: bool(told and told[-1].topics["in"].read == told[-1].topics["in"].newest))
    finally:
        at.spark.streams.removeListener(listener)
    found = postroom.spark.lag(query)
    assert found is not None and found.behind == 0
    assert sum(found.topics["in"].read.values()) == 60


@check
def archive_and_replay(at: Try) -> None:
    at.topic("in")
    at.topic("out")
    at.send(200)
    folder = str(at.where / "lake")
    for _ in range(2):
        archive(at.spark, ArchiveOptions({"url": at.url}, "in", folder))
    replay(at.spark, ReplayOptions({"url": at.url}, "in", "out", "again", folder))
    assert at.read("out") == list(range(200))


@check
def session_takes_the_active_one(at: Try) -> None:
    assert postroom.spark.session() is at.spark
    said = ""
    try:
        postroom.spark.session(master="spark://h:7077")
    except postroom.errors.InvalidSetting as error:
        said = str(error)
    assert "a session on 'local[2]' is active; stop it first" in said


def made(mode: str) -> Any:
    if mode == "connect":
        from pyspark.sql import SparkSession

        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        return SparkSession.builder.remote("local[2]").getOrCreate()
    spark = postroom.spark.session("versions", master="local[2]", memory="1g")
    spark.sparkContext.setLogLevel("FATAL")
    return spark


def main(mode: str, folder: str, *wanted: str) -> None:
    spark = made(mode)
    print(json.dumps({"version": spark.version}), flush=True)
    for number, name in enumerate(wanted or CHECKS):
        try:
            said = CHECKS[name](Try(spark, mode, Path(folder) / str(number))) or "ok"
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        print(json.dumps({name: said}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
