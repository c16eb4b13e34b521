"""How fast Spark reads a topic: into its `noop` sink, beside its own limit, and into Parquet files.

From a SQLite file and through a broker, as a batch and as a stream. The floor is what a micro-batch takes
that has almost nothing in it.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from .spark_ground import Place, Rate, filled, measured, served, streamed

__all__ = ["Reading", "run"]

_FLOOR_BATCHES, _FLOOR_ROWS = 20, 100


@dataclass(frozen=True)
class Reading:
    rates: list[Rate]
    stream_of_limit: float  # streaming, as a part of what a prebuilt batch reaches
    floor_ms: float


def run(here: Place) -> Reading:
    spark, url, rows = here.spark, here.url, here.messages
    each = rows // 5
    limit = spark.readStream.format("prebuilt").options(rows=rows, maxOffsetsPerTrigger=each)
    rates = [measured(here, "prebuilt batches -> noop", rows, lambda: _noop(_prebuilt(spark, rows)))]
    most = streamed(here, "prebuilt batches -> noop, stream", rows, limit)[0]
    assert _topic(spark.read, url).load().count() == rows
    rates += [most, measured(here, "topic -> noop", rows, lambda: _noop(_topic(spark.read, url)))]
    few = _topic(spark.read, url).schema("`offset` bigint")
    rates.append(measured(here, "topic -> noop, offsets only", rows, lambda: _noop(few)))
    stream = streamed(here, "topic -> noop, stream", rows, _stream(spark, url, each))[0]
    again = streamed(here, "prebuilt batches -> noop, stream, again", rows, limit)[0]
    rates += [stream, again, *_parquet(here)]
    with served(url) as broker:
        rates.append(measured(here, "broker -> noop", rows, lambda: _noop(_topic(spark.read, broker))))
        rates.append(streamed(here, "broker -> noop, stream", rows, _stream(spark, broker, each))[0])
    return Reading(rates, stream.per_s / max(most.per_s, again.per_s), _floor(here))


def _parquet(here: Place) -> list[Rate]:
    """Written by Spark; and read again by Spark itself, which no Python takes part in."""
    spark, rows, last = here.spark, here.messages, [""]

    def write() -> int:
        last[0] = here.fresh()
        _topic(spark.read, here.url).load().write.parquet(last[0])
        return int(spark.read.parquet(last[0]).count())

    wrote = measured(here, "topic -> Parquet files", rows, write, runs=3)
    read = measured(
        here, "Parquet files -> noop (no Python)", rows, lambda: _noop(spark.read.format("parquet"), last[0])
    )
    return [wrote, read]


def _floor(here: Place) -> float:
    """Milliseconds of a micro-batch of a hundred rows."""
    url, rows = f"sqlite:///{here.fresh()}.db", _FLOOR_ROWS * _FLOOR_BATCHES
    filled(url, "t", rows)
    source = _stream(here.spark, url, _FLOOR_ROWS)
    return statistics.median(streamed(here, f"micro-batches of {_FLOOR_ROWS} rows", rows, source)[1])


def _prebuilt(spark: Any, rows: int) -> Any:
    return spark.read.format("prebuilt").option("rows", rows)


def _topic(read: Any, url: str) -> Any:
    return read.format("postroom").options(url=url, subscribe="t")


def _stream(spark: Any, url: str, each: int) -> Any:
    source = _topic(spark.readStream, url).option("startingOffsets", "earliest")
    return source.option("maxOffsetsPerTrigger", each)


def _noop(source: Any, *path: str) -> None:
    source.load(*path).write.format("noop").mode("overwrite").save()
