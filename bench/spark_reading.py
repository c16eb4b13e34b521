"""How fast Spark reads a topic: `python -m bench.spark_reading [--messages 1000000]`.

From a SQLite file and through a broker, as a batch and as a stream, into Spark's `noop` sink; beside Spark's
own limit: a source in Python that repeats one prebuilt Arrow batch. Every line is the median of some runs, or
of the micro-batches of a stream.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

import penstock
import penstock.spark
import penstock.sync
from penstock.spark.columns import schema_text

VALUE = b"x" * 100
RUNS = 5
BATCH_ROWS = 10_000

HOST = """
import sys, penstock.sync
with penstock.sync.connect(sys.argv[1]) as mq, mq.serve("127.0.0.1", 0) as served:
    print(served.url, flush=True)
    sys.stdin.read()
"""


class Prebuilt(DataSource):  # type: ignore[misc]
    """Spark's share alone: the same batch again and again."""

    @classmethod
    def name(cls) -> str:
        return "prebuilt"

    def schema(self) -> str:
        return schema_text(False)

    def reader(self, schema: Any) -> PrebuiltReader:
        return PrebuiltReader(int(self.options["rows"]), schema)


class PrebuiltReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, rows: int, schema: Any) -> None:
        self._rows, self._schema = rows, schema

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(n) for n in range(2)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        import pyarrow as pa
        from pyspark.sql.pandas.types import to_arrow_schema

        columns = {
            "key": [b"k%d" % (n % 1000) for n in range(BATCH_ROWS)],
            "value": [VALUE] * BATCH_ROWS,
            "topic": ["t"] * BATCH_ROWS,
            "partition": [0] * BATCH_ROWS,
            "offset": list(range(BATCH_ROWS)),
            "timestamp": [1_700_000_000_000_000] * BATCH_ROWS,
            "timestampType": [0] * BATCH_ROWS,
        }
        batch = pa.RecordBatch.from_pydict(columns, schema=to_arrow_schema(self._schema, timezone="UTC"))
        for _ in range(self._rows // BATCH_ROWS // 2):
            yield batch


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    asked.add_argument("--messages", type=int, default=1_000_000)
    messages: int = asked.parse_args().messages
    with tempfile.TemporaryDirectory() as where:
        url = f"sqlite:///{where}/queue.db"
        fill(url, messages)
        spark = penstock.spark.session("bench", master="local[2]")
        spark.sparkContext.setLogLevel("ERROR")
        spark.dataSource.register(Prebuilt)
        show(
            "prebuilt batches", messages, lambda: save(spark.read.format("prebuilt").option("rows", messages))
        )
        show("file, batch", messages, lambda: save(reader(spark.read, url)))
        show(
            "file, batch, offsets only",
            messages,
            lambda: save(reader(spark.read, url).schema("`offset` bigint")),
        )
        stream("file, stream", spark, url, Path(where), messages)
        host = subprocess.Popen(
            [sys.executable, "-c", HOST, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert host.stdin is not None and host.stdout is not None
        try:
            served = host.stdout.readline().strip()
            show("broker, batch", messages, lambda: save(reader(spark.read, served)))
            stream("broker, stream", spark, served, Path(where), messages)
        finally:
            host.stdin.close()
            host.wait()


def fill(url: str, messages: int) -> None:
    with penstock.sync.connect(url) as mq:
        mq.create_topic("t", partitions=4)
        for first in range(0, messages, 20_000):
            some = range(first, min(messages, first + 20_000))
            mq.send_many("t", [penstock.Message(VALUE, key=b"k%d" % (n % 1000)) for n in some], timeout=60)


def reader(read: Any, url: str) -> Any:
    return read.format("penstock").option("url", url).option("subscribe", "t")


def save(source: Any) -> None:
    source.load().write.format("noop").mode("overwrite").save()


def stream(what: str, spark: Any, url: str, where: Path, messages: int) -> None:
    """Of the micro-batches of one run, without the time that a query takes to start."""
    source = reader(spark.readStream, url).option("startingOffsets", "earliest")
    source = source.option("maxOffsetsPerTrigger", messages // 5).load()
    writing = source.writeStream.format("noop").trigger(availableNow=True)
    query = writing.option("checkpointLocation", tempfile.mkdtemp(dir=where)).start()
    query.awaitTermination()
    found = [(one.numInputRows, one.durationMs["triggerExecution"] / 1000) for one in query.recentProgress]
    told(what, [rows / took for rows, took in found if rows][1:])


def show(what: str, messages: int, run: Callable[[], None]) -> None:
    run()  # warm
    found = []
    for _ in range(RUNS):
        began = time.perf_counter()
        run()
        found.append(messages / (time.perf_counter() - began))
    told(what, found)


def told(what: str, found: list[float]) -> None:
    print(f"{what:28} {statistics.median(found):12,.0f} rows/s  best {max(found):12,.0f}", flush=True)


if __name__ == "__main__":
    main()
