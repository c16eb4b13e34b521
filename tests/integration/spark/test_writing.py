"""Writing into topics with real Spark: batches and streams, exactly once (I20)."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.functions import expr

from tests.integration.spark.streams import send
from tests.integration.spark.writing_process import copy

KILLS = int(os.environ.get("POSTROOM_SPARK_KILLS", "1"))
"""How often the driver is killed: 3 is the long version."""


def there(mq: Any, topic: str) -> list[Any]:
    return list(mq.read(topic))


def write(rows: Any, url: str, **options: object) -> None:
    rows.write.format("postroom").options(url=url, **options).mode("append").save()


def test_a_batch_write(spark: Any, url: str, mq: Any) -> None:
    for topic in ("a", "b"):
        mq.create_topic(topic, partitions=3)
    rows = spark.range(0, 3000, 1, 3).selectExpr(
        "if(id % 3 = 0, 'a', 'b') topic",
        "cast(id % 10 as string) key",
        "cast(id as string) value",
        "array(named_struct('key', 'n', 'value', cast(cast(id as string) as binary))) headers",
    )
    write(rows, url, query="nightly")
    found = {topic: there(mq, topic) for topic in ("a", "b")}
    assert [len(found[topic]) for topic in ("a", "b")] == [1000, 2000]
    assert sorted(int(m.value) for m in found["a"]) == list(range(0, 3000, 3))
    for message in found["b"]:
        assert message.key == message.value[-1:]
        assert dict(message.headers) == {"n": message.value}
    write(rows.repartition(2), url, query="nightly")  # the same job once more, its rows spread otherwise
    with pytest.raises(Exception, match="other content"):
        write(rows.withColumn("value", expr("if(value = '7', 'x', value)")), url, query="nightly")
    assert [len(there(mq, topic)) for topic in ("a", "b")] == [1000, 2000]
    write(rows.select("value"), url, topic="a")
    assert len(there(mq, "a")) == 4000
    with pytest.raises(Exception, match="comes back with 10"):
        write(rows.limit(10), url, query="nightly")
    broken = rows.selectExpr("topic", "key", "if(key = '9', raise_error('broken'), value) value")
    for wrong in (broken, rows.selectExpr("topic", "key", "nullif(value, '2999') value")):
        with pytest.raises(Exception, match=r"broken|is null in 1 rows"):
            write(wrong, url)
    assert [len(there(mq, topic)) for topic in ("a", "b")] == [4000, 2000]


def test_a_stream_whose_checkpoint_is_set_back(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    """By one batch, which then has another end: as after a loss of power (checkpoints are not flushed)."""
    for topic in ("in", "out"):
        mq.create_topic(topic, partitions=2)
    where = tmp_path / "checkpoint"

    def run(source: bool = True, **options: object) -> None:
        query = copy(spark, url, str(where), source, **options).trigger(availableNow=True).start()
        query.awaitTermination(240)

    def back() -> int:
        """Forget the last batch; its number."""
        last = max(int(one.name) for one in (where / "offsets").glob("*") if one.name.isdecimal())
        for kind in ("offsets", "commits"):
            for name in (str(last), f".{last}.crc"):
                (where / kind / name).unlink(missing_ok=True)
        return last

    send(mq, "in", 0, 300)
    run(maxOffsetsPerTrigger=200)
    last = back()
    send(mq, "in", 300, 200)
    run()  # the last batch has more rows than before
    assert numbers(mq) == list(range(500))
    assert back() == last
    run(maxOffsetsPerTrigger=150)  # and now fewer, and others follow
    send(mq, "in", 500, 50)
    mq.split("out", 0)
    run()
    assert numbers(mq) == list(range(550))
    for key in range(7):
        mine = [int(m.value) for m in there(mq, "out") if m.key == b"k%d" % key]
        assert mine == sorted(mine)
    assert back() > last
    send(mq, "in", 550, 50)
    with pytest.raises(Exception, match="source_partition and source_offset"):
        run(source=False)
    assert numbers(mq) == list(range(550))


def numbers(mq: Any) -> list[int]:
    return sorted(int(message.value) for message in mq.read("out"))


def test_the_driver_is_killed(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    for topic in ("in", "out"):
        mq.create_topic(topic, partitions=2)
    send(mq, "in", 0, 4000)
    checkpoint, chance = str(tmp_path / "checkpoint"), random.Random(time.time_ns())
    for turn in range(KILLS):
        before = written(mq)
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.spark.writing_process", url, checkpoint],
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(lambda: written(mq) > before + 200, child)  # noqa: B023
            time.sleep(chance.random())  # any moment of a batch
        finally:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        assert written(mq) < 4000, f"it was done before it was killed, in turn {turn}"
    copy(spark, url, checkpoint).trigger(availableNow=True).start().awaitTermination(240)
    counts = Counter(int(message.value) for message in mq.read("out"))
    assert sorted(counts) == list(range(4000))
    assert set(counts.values()) == {1}


def written(mq: Any) -> int:
    return int(mq.topic("out").messages)


def wait_for(done: Any, child: subprocess.Popen[bytes], limit_s: float = 120) -> None:
    until = time.monotonic() + limit_s
    while not done():
        assert child.poll() is None, "the driver ended by itself"
        assert time.monotonic() < until, "the driver writes nothing"
        time.sleep(0.05)
