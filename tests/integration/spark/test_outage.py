"""Brokers that are away for a while: streams wait, and go on."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from postroom.errors import BrokerUnavailable, PostroomError
from postroom.spark.options import read_options
from postroom.spark.queue import Queue
from tests.integration.spark.streams import numbers, send

TOKEN = "pst_" + "b" * 43
AWAY_S = 15.0  # the stream gave up after 10


def reading(url: str, **options: str) -> dict[str, str]:
    return {"url": url, "token": TOKEN, "subscribe": "in", "startingOffsets": "earliest", **options}


def test_a_stream_waits_for_its_broker(spark: Any, mq: Any, tmp_path: Path) -> None:
    """The driver, the tasks that read, and those that write."""
    mq.create_topic("in", partitions=2)
    mq.create_topic("out", partitions=2)
    send(mq, "in", 0, 50)
    served = mq.serve("127.0.0.1", 0, token=TOKEN)
    url, port = served.url, served.port
    rows = spark.readStream.format("postroom").options(**reading(url, includeSource="true")).load()
    writing = rows.drop("topic").writeStream.format("postroom").options(url=url, token=TOKEN, topic="out")
    query = writing.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    try:
        query.processAllAvailable()
        served.close()
        send(mq, "in", 50, 50)
        time.sleep(AWAY_S)
        assert query.isActive and query.exception() is None
        served = mq.serve("127.0.0.1", port, token=TOKEN)
        query.processAllAvailable()
        assert numbers(list(mq.read("out", end="latest"))) == list(range(100))
    finally:
        query.stop()
        served.close()


@pytest.mark.parametrize("patience", ["1s", "60s"])
def test_how_long_a_broker_is_waited_for(mq: Any, patience: str, caplog: pytest.LogCaptureFixture) -> None:
    mq.create_topic("in", partitions=2)
    served = mq.serve("127.0.0.1", 0, token=TOKEN)
    options = read_options(reading(served.url, unreachableTimeout=patience), streaming=True)
    found: list[Any] = []

    def look(queue: Queue) -> None:
        try:
            found.append(queue.snapshot(options.topics, queue.identity))
        except PostroomError as error:
            found.append(error)

    with Queue(options.reach) as queue, caplog.at_level(logging.WARNING, "postroom.spark"):
        look(queue)
        port = served.port
        served.close()
        asking = threading.Thread(target=look, args=(queue,))
        asking.start()
        if patience == "1s":
            asking.join(60)
            assert isinstance(found[1], BrokerUnavailable)
            assert "It was tried for 1s, as the option unreachableTimeout says" in str(found[1])
            return
        while not any("waiting up to 1m for the queue" in record.message for record in caplog.records):
            assert asking.is_alive()
            time.sleep(0.1)
        with mq.serve("127.0.0.1", port, token=TOKEN):
            asking.join(60)
            assert found[1] == found[0]
        said = [record.message for record in caplog.records if record.name == "postroom.spark"]
        assert [line.split(" ")[0] for line in said] == ["waiting", "the"], (
            "one line, and one when it is back"
        )
