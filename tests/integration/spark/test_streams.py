"""Streams in real Spark: through changes of the route, restarts and kills; every message once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.spark.streams import Query, numbers, send

ROOT = Path(__file__).resolve().parents[3]


def wait_for(true: Callable[[], object], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


def test_through_changes_of_the_route(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    query = Query(spark, tmp_path, url=url, subscribe="orders", startingOffsets="earliest",
                  maxOffsetsPerTrigger=60, group="lake")  # fmt: skip
    send(mq, "orders", 0, 100)
    query.run()
    assert numbers(query.rows()) == list(range(100))
    assert mq.lag("orders", "lake").total.messages == 0  # also what the last batch read is told
    mq.split("orders", 0)
    send(mq, "orders", 100, 100)
    assert mq.lag("orders", "lake").total.messages == 100
    first = query.run()
    assert numbers(query.rows()) == list(range(200))
    mq.merge("orders", 1, 2)
    send(mq, "orders", 200, 50)
    second = query.run()
    assert numbers(query.rows()) == list(range(250))
    assert mq.lag("orders", "lake").total.messages == 0
    assert first.id == second.id
    last = query.offsets(query.batches - 1)
    assert last["v"] == 1 and last["sealed"] == {"orders": [0, 1, 2]}
    assert max(query.offsets(1)["topics"]["orders"].values()) == 60
    progress = json.loads(second.lastProgress.json)["sources"][0]
    assert progress["endOffset"]["topics"] == progress["latestOffset"]["topics"]


RUNNER = """
import sys, time
import penstock.spark
from pathlib import Path
from tests.integration.spark.streams import Query
spark = penstock.spark.session(master="local[2]", memory="1g")
spark.sparkContext.setLogLevel("FATAL")
query = Query(spark, Path(sys.argv[1]), url=sys.argv[2], subscribe="orders", startingOffsets="latest")
query.start(processingTime="0 seconds").awaitTermination()
"""


def test_killed(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    """The whole of it, JVM and all, without warning; it had begun at "latest"."""
    mq.create_topic("orders", partitions=2)
    send(mq, "orders", 0, 50)  # before its time
    query = Query(spark, tmp_path, url=url, subscribe="orders", startingOffsets="latest")
    child = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(tmp_path), url],
        cwd=ROOT,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: query.batches >= 1 or child.poll() is not None)
        sent = 1000
        while query.batches < 3 and child.poll() is None:
            send(mq, "orders", sent, 25)
            sent += 25
            time.sleep(0.1)  # so that there is something to do, and time to do it
        assert child.poll() is None, "it ended by itself"
        mq.split("orders", 0)
        send(mq, "orders", sent, 75)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    send(mq, "orders", sent + 75, 25)
    query.run()
    assert numbers(query.rows()) == list(range(1000, sent + 100))


def test_what_is_gone(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    strict = Query(spark, tmp_path, url=url, subscribe="orders", startingOffsets="earliest")
    send(mq, "orders", 0, 10)
    strict.run()
    send(mq, "orders", 10, 10)
    mq.purge("orders")
    send(mq, "orders", 20, 5)
    with pytest.raises(Exception, match="10 offsets were dropped before they were read"):
        strict.run()
    Query(spark, tmp_path, **strict.options, failOnDataLoss=False).run()
    assert numbers(strict.rows()) == [*range(10), *range(20, 25)]


def test_refused(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=1)
    mq.create_topic("others", partitions=1)
    send(mq, "orders", 0, 10)
    query = Query(spark, tmp_path, url=url, subscribe="orders", startingOffsets="earliest")
    query.run()
    with pytest.raises(Exception, match="the checkpoint is of topic 'orders', and this query reads 'others'"):
        Query(spark, tmp_path, url=url, subscribe="others").run()
    with mq.consumer("orders", group="billing") as consumer:
        assert consumer.poll(wait=5)
        with pytest.raises(
            Exception, match="option group: 'billing' of topic 'orders' is in use by consumers"
        ):
            Query(spark, tmp_path, **query.options, group="billing").run()
    newest = max((tmp_path / "checkpoint" / "offsets").glob("[0-9]*"), key=lambda path: int(path.name))
    lines = newest.read_text().splitlines()
    newest.write_text("\n".join([*lines[:2], lines[2].replace('"v":1', '"v":2').replace('"v": 1', '"v": 2')]))
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    with pytest.raises(Exception, match="the checkpoint has version 2 and was written by a newer Penstock"):
        query.run()
