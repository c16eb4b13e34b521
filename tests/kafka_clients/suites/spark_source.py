"""Spark's own Kafka source and sink: batches and a stream that is resumed, before and after a move."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import postroom.sync
from bench.spark_kafka import connector, connector_settings

from .. import fetch
from ..outcome import FAILED, PASSED, Case
from ..running import Listener

__all__ = ["spark"]

_ROWS, _PARTITIONS, _TOPIC = 2_000, 3, "spark-orders"


def spark(listener: Listener) -> Iterator[Case]:
    if connector() is None:
        raise fetch.Missing("needs Spark's Kafka connector: make peers (Maven fetches its jars)")
    try:
        from postroom.spark import session
    except ImportError:
        raise fetch.Missing("needs pyspark: install the extra spark-local") from None
    found = session("kafka-clients", master="local[2]", memory="1g", config=connector_settings())
    try:
        yield from _cases(found, listener)
    finally:
        found.stop()


def _cases(spark: Any, listener: Listener) -> Iterator[Case]:
    folder = listener.folder / "spark"
    with postroom.sync.connect(listener.url) as mq:
        mq.create_topic(_TOPIC, kafka_partitions=_PARTITIONS, keys="java")
        yield _case("write a batch", lambda: _write(spark, listener, 0), None)
        yield _case("read a batch", lambda: _read(spark, listener), list(range(_ROWS)))
        yield _case("a stream", lambda: _stream(spark, listener, folder), list(range(_ROWS)))
        for piece in mq.route(_TOPIC).ranges:
            mq.move(_TOPIC, piece.partition)
        yield _case("write a batch after a move", lambda: _write(spark, listener, _ROWS), None)
        everything = list(range(2 * _ROWS))
        yield _case("read a batch over a move", lambda: _read(spark, listener), everything)
        yield _case("the stream goes on over a move", lambda: _stream(spark, listener, folder), everything)
        newest = {one.key: one.partition for one in mq.read(_TOPIC)}  # the last of a key counts
        sent = {key: mq.send(_TOPIC, b"native", key=key).partition for key in newest if key is not None}
        agreed = bool(sent) and all(newest[key] == there for key, there in sent.items())
        yield Case("native keys go where Spark's go", PASSED if agreed else FAILED)


def _case(name: str, act: Any, wanted: list[int] | None) -> Case:
    try:
        found = act()
    except Exception as error:
        return Case(name, FAILED, str(error).splitlines()[0][:200])
    if found != wanted:
        return Case(name, FAILED, f"{len(found or ())} rows, and not the {len(wanted or ())} that were sent")
    return Case(name, PASSED)


def _write(spark: Any, listener: Listener, first: int) -> None:
    rows = spark.range(first, first + _ROWS).selectExpr(
        "CAST(id % 100 AS STRING) AS key", "CAST(id AS STRING) AS value"
    )
    _options(rows.write.format("kafka"), listener).option("topic", _TOPIC).save()


def _read(spark: Any, listener: Listener) -> list[int]:
    rows = _options(spark.read.format("kafka"), listener).option("subscribe", _TOPIC).load()
    return sorted(int(bytes(row.value)) for row in rows.select("value").collect())


def _stream(spark: Any, listener: Listener, folder: Path) -> list[int]:
    """Everything that the stream has written, in all of its runs: each message once."""
    reading = _options(spark.readStream.format("kafka"), listener).option("subscribe", _TOPIC)
    rows = reading.option("startingOffsets", "earliest").load().selectExpr("CAST(value AS STRING) AS value")
    query = (
        rows.writeStream.format("parquet")
        .option("path", str(folder / "out"))
        .option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return sorted(int(row.value) for row in spark.read.parquet(str(folder / "out")).collect())


def _options(builder: Any, listener: Listener) -> Any:
    return builder.option("kafka.bootstrap.servers", listener.address)
