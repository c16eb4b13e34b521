"""Streams in real Spark: through changes of the route and restarts; every message once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.spark.streams import Query, numbers, send


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
    assert last["v"] == 2 and last["sealed"] == {"orders": [0, 1, 2]}
    assert max(query.offsets(1)["topics"]["orders"].values()) == 60
    progress = json.loads(second.lastProgress.json)["sources"][0]
    assert progress["endOffset"]["topics"] == progress["latestOffset"]["topics"]


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
    newest.write_text("\n".join([*lines[:2], lines[2].replace('"v":2', '"v":3').replace('"v": 2', '"v": 3')]))
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    with pytest.raises(Exception, match="the checkpoint has version 3 and was written by a newer Postroom"):
        query.run()
