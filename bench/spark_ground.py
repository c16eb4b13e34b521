"""Where the figures of Spark are taken: one session on two cores, a full topic, and how a line is measured.

Every line says how many rows there should be, and is checked: a figure of rows that were not there is none.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import postroom
import postroom.spark
import postroom.sync

from .spark_kafka import PARTITIONS, connector_settings
from .spark_limits import VALUE, Prebuilt

__all__ = ["Place", "Rate", "filled", "measured", "place", "served", "streamed"]

RUNS = 5
_QUERIES = 2  # all but the last warm up
_SOME = 20_000
_HOST = """
import sys, postroom.sync
with postroom.sync.connect(sys.argv[1]) as mq, mq.serve("127.0.0.1", 0) as served:
    print(served.url, flush=True)
    sys.stdin.read()
"""


@dataclass(frozen=True)
class Rate:
    what: str
    rows: int
    per_s: float  # the median of some runs, or of the micro-batches of a stream
    best: float


@dataclass(frozen=True)
class Place:
    spark: Any
    folder: Path
    url: str
    messages: int  # in the topic `t`
    told: Callable[[Rate], None]
    _numbers: Iterator[int]

    def fresh(self) -> str:
        """A folder that is not there yet."""
        return str(self.folder / f"f{next(self._numbers)}")


@contextmanager
def place(messages: int, told: Callable[[Rate], None]) -> Iterator[Place]:
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as where:
        url = f"sqlite:///{where}/queue.db"
        filled(url, "t", messages)
        spark = postroom.spark.session("bench", master="local[2]", config=connector_settings())
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(Prebuilt)
        try:
            yield Place(spark, Path(where), url, messages, told, itertools.count())
        finally:
            spark.stop()


def filled(url: str, topic: str, messages: int) -> None:
    with postroom.sync.connect(url) as mq:
        mq.create_topic(topic, partitions=PARTITIONS)
        for first in range(0, messages, _SOME):
            some = range(first, min(messages, first + _SOME))
            batch = [postroom.Message(_value(), key=b"k%d" % (n % 1000)) for n in some]
            mq.send_many(topic, batch, timeout=120)


def _value() -> bytes:
    """Each another: a topic of one letter would compress to nothing."""
    return os.urandom(len(VALUE) // 2).hex().encode()


@contextmanager
def served(url: str) -> Iterator[str]:
    """The address of a broker in a process of its own."""
    host = subprocess.Popen(
        [sys.executable, "-c", _HOST, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert host.stdin is not None and host.stdout is not None
    try:
        yield host.stdout.readline().strip()
    finally:
        host.stdin.close()
        host.wait()


def measured(here: Place, what: str, rows: int, run: Callable[[], int | None], runs: int = RUNS) -> Rate:
    """`run` says how many rows it saw, if it knows. Once more than `runs`: the first one warms up."""
    found = []
    for _ in range(runs + 1):
        began = time.perf_counter()
        seen = run()
        found.append(rows / (time.perf_counter() - began))
        assert seen is None or seen == rows, f"{what}: {seen} rows, and not {rows}"
    rate = Rate(what, rows, statistics.median(found[1:]), max(found[1:]))
    here.told(rate)
    return rate


def streamed(here: Place, what: str, rows: int, source: Any) -> tuple[Rate, list[float]]:
    """By the micro-batches of the last query, without its start; and what they took in milliseconds."""
    for _ in range(_QUERIES):
        writing = source.load().writeStream.format("noop").trigger(availableNow=True)
        query = writing.option("checkpointLocation", here.fresh()).start()
        query.awaitTermination()
        found = [(one.numInputRows, one.durationMs["triggerExecution"]) for one in query.recentProgress]
        seen = sum(count for count, _ in found)
        assert seen == rows, f"{what}: {seen} rows, and not {rows}"
    warm = [(count, max(1, ms)) for count, ms in found if count][1:]
    rates = [count / ms * 1000 for count, ms in warm]
    rate = Rate(what, rows, statistics.median(rates), max(rates))
    here.told(rate)
    return rate, [ms for _, ms in warm]
