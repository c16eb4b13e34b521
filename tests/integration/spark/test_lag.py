"""The lag of a running stream, as Spark's own events tell it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import postroom.spark
from tests.integration.spark.streams import Query, numbers, send


def test_while_it_catches_up(spark: Any, url: str, mq: Any, tmp_path: Path) -> None:
    mq.create_topic("orders", partitions=2)
    send(mq, "orders", 0, 100)
    told: list[postroom.spark.Lag] = []
    done = threading.Event()

    def tell(found: postroom.spark.Lag) -> None:
        told.append(found)
        if found.behind == 0 and sum(found.topics["orders"].read.values()) == 100:
            done.set()

    query = Query(spark, tmp_path, url=url, subscribe="orders", startingOffsets="earliest",
                  maxOffsetsPerTrigger=40)  # fmt: skip
    listener = postroom.spark.lag_listener(tell)
    spark.streams.addListener(listener)
    try:
        ended = query.run()
        assert done.wait(60)
    finally:
        spark.streams.removeListener(listener)
    assert numbers(query.rows()) == list(range(100))
    behind = [one.behind for one in told]
    assert behind == sorted(behind, reverse=True) and behind[0] == 100 and 0 < behind[1] < 100
    last = postroom.spark.lag(ended)
    assert last is not None and last.behind == 0
    assert sum(last.topics["orders"].newest.values()) == 100
