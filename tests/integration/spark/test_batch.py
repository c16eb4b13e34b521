"""Batch reads in real Spark."""

from __future__ import annotations

import time
from typing import Any

import pytest

import postroom.sync
from postroom.spark.columns import COLUMNS
from tests.integration.spark.streams import numbers, send


def read(spark: Any, queue: str, **options: object) -> Any:
    given = {"url": queue, "subscribe": "orders", **options}
    return spark.read.format("postroom").options(**{k: v for k, v in given.items() if v is not None}).load()


def values(frame: Any) -> list[int]:
    return numbers(frame.selectExpr("cast(value as string) value").collect())


def test_in_real_spark(spark: Any, url: str, mq: Any) -> None:
    """Where reading begins and ends is in `test_readers`, which needs no JVM."""
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 20)
    mq.split("orders", 0)
    send(mq, "orders", 20, 10)
    assert values(read(spark, url)) == list(range(30))
    some = {"startingOffsets": '{"orders": {"0": 15, "1": -2}}', "endingOffsets": '{"orders": {"0": 18}}'}
    assert values(read(spark, url, **some, minPartitions=4)) == [15, 16, 17, *range(20, 30)]


def test_columns(spark: Any, url: str, mq: Any) -> None:
    mq.create_topic("orders", partitions=1)
    mq.send("orders", b"v", key="k", headers={"a": "1"})
    mq.send("orders", b"", headers={})
    whole = read(spark, url, includeHeaders=True)
    assert whole.columns == [*COLUMNS, "headers"]
    first, second = whole.orderBy("offset").collect()
    assert (bytes(first.key), bytes(first.value), first.topic, first.partition) == (b"k", b"v", "orders", 0)
    assert [(h.key, bytes(h.value)) for h in first.headers] == [("a", b"1")]
    assert (second.key, second.headers, second.offset, second.timestampType) == (None, None, 1, 0)
    assert abs(first.timestamp.timestamp() - time.time()) < 300
    given = (
        spark.read.format("postroom")
        .schema("offset bigint, value binary")
        .options(url=url, subscribe="orders")
    )
    assert given.load().columns == ["offset", "value"]
    assert given.load().count() == 2
    with pytest.raises(Exception, match="no column 'amount'"):
        spark.read.format("postroom").schema("amount int").options(url=url, subscribe="orders").load().count()


def test_conditions(spark: Any, url: str, mq: Any) -> None:
    """One DataFrame, used in several places and queries: a condition of one use narrows no other."""
    mq.create_topic("orders", partitions=2)
    send(mq, "orders", 0, 100)
    before = spark.conf.get("spark.sql.python.filterPushdown.enabled")
    try:
        for enabled in ("true", "false"):
            spark.conf.set("spark.sql.python.filterPushdown.enabled", enabled)
            frame = read(spark, url)
            few = frame.where("`offset` < 3 and timestamp > timestamp'2020-01-01'")
            assert (few.count(), frame.count(), few.count()) == (6, 100, 6)
            assert few.union(frame).count() == 106
            assert few.union(frame.where("partition = 1 and `offset` >= 3 and `offset` < 5")).count() == 8
            both = few.alias("a").join(frame.alias("b"), ["topic", "partition", "offset"])
            assert both.count() == 6
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", before)
    with pytest.raises(Exception, match="option pushfilters: conditions are not pushed down"):
        read(spark, url, pushFilters=True).count()


def test_dropped_messages(spark: Any, url: str, mq: Any) -> None:
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 10)
    mq.purge("orders")
    send(mq, "orders", 10, 5)
    assert values(read(spark, url)) == list(range(10, 15))
    below = '{"orders": {"0": 4}}'
    with pytest.raises(
        Exception, match="6 offsets were dropped before they were read: topic 'orders' partition 0, 4"
    ):
        read(spark, url, startingOffsets=below).count()
    assert values(read(spark, url, startingOffsets=below, failOnDataLoss=False)) == list(range(10, 15))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"subscribe": "order"}, "no topic 'order': did you mean 'orders'"),
        ({"startingOffset": "earliest"}, "no option startingoffset: did you mean startingOffsets"),
        ({"assign": '{"orders": [7]}', "subscribe": None}, "topic 'orders' has no partition 7; it has 0"),
        ({"startingOffsets": '{"orders": {"0": 99}}'}, "partition 0 ends at 3, and 99 is behind that"),
        (
            {"startingTimestamp": "4000000000000"},
            "nothing was stored in topic 'orders' partition 0 since then",
        ),
        ({"url": "memory://x"}, "memory:// is seen by one process only"),
        (
            {"url": "sqlite:////nowhere/at/all.db"},
            "option url: there is no file /nowhere/at/all.db on this machine",
        ),
    ],
)
def test_refused(spark: Any, url: str, mq: Any, options: dict[str, object], text: str) -> None:
    mq.create_topic("orders", partitions=1)
    send(mq, "orders", 0, 3)
    with pytest.raises(Exception, match=text) as error:
        read(spark, url, **options).count()
    assert len(str(error.value)) < 6000


def test_through_a_broker_with_a_token(spark: Any, url: str, mq: Any) -> None:
    mq.create_topic("orders", partitions=2)
    send(mq, "orders", 0, 100)
    token = "pst_" + "x" * 43
    with mq.serve("127.0.0.1", 0, token=token) as served:
        frame = read(spark, served.url, token=token)
        assert values(frame) == list(range(100))
        with postroom.sync.connect(served.url, token=token) as remote:
            assert remote.topic("orders").messages == 100
        for mode in ("simple", "extended", "formatted", "cost"):
            plan = spark._jvm.PythonSQLUtils.explainString(frame._jdf.queryExecution(), mode)
            assert "postroom" in plan and token not in plan
        with pytest.raises(Exception, match="invalid token") as error:
            read(spark, served.url, token="pst_" + "y" * 43).count()
        assert "yyyy" not in str(error.value)
