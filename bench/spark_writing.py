"""How fast Spark writes into a topic, staged and published exactly once: `python -m bench.spark_writing`.

A million rows of 100 bytes on local[2], into a file, beside what Spark needs to make them (noop). The best of
three turns, after one that warms Spark up.
"""

from __future__ import annotations

import sys
import tempfile
import time
from typing import Any

import penstock.spark
import penstock.sync

__all__ = ["measure"]

_VALUE = "substring(concat(sha2(cast(id as string), 256), sha2(cast(id as string), 256)), 1, 100)"


def measure(rows: int, directory: str, turns: int = 3) -> tuple[float, float]:
    """Rows a second to noop, and into a topic of 4 partitions."""
    url = f"sqlite:///{directory}/queue.db"
    with penstock.sync.connect(url) as mq:
        mq.create_topic("out", partitions=4)
    spark = penstock.spark.session("bench", master="local[2]")
    spark.sparkContext.setLogLevel("ERROR")
    frame = spark.range(0, rows, 1, 2).selectExpr("cast(id % 1000 as string) key", f"{_VALUE} value")
    frame = frame.selectExpr("cast(key as binary) key", "cast(value as binary) value")
    noop = frame.write.format("noop").mode("overwrite")
    topic = frame.write.format("penstock").options(url=url, topic="out").mode("append")
    return rows / _best(noop, turns), rows / _best(topic, turns)


def _best(writing: Any, turns: int) -> float:
    taken = []
    for _ in range(turns + 1):
        began = time.perf_counter()
        writing.save()
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as where:
        noop, topic = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000, where)
    print(f"noop {noop:,.0f} rows/s, topic {topic:,.0f} rows/s")
