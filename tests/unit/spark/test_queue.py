"""What a stream asks of a real queue, and how often."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.types import LongType, StringType, StructField, StructType

import postroom.sync
from postroom.address import parse
from postroom.endpoint.values import Fetched
from postroom.spark import reading
from postroom.spark.columns import Columns
from postroom.spark.options import ReadOptions, read_options
from postroom.spark.planning import Span
from postroom.spark.queue import AHEAD, Queue
from postroom.spark.streaming import Stream
from postroom.store import open_store

SOURCE = StructType([StructField("source_partition", StringType()), StructField("source_offset", LongType())])


class Counting(Queue):
    def __init__(self, options: ReadOptions) -> None:
        super().__init__(options.reach)
        self.asked: Counter[str] = Counter()

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.asked[function.__name__] += 1
        return super()._call(function, *args, **kwargs)


@pytest.fixture
def options(tmp_path: Path) -> ReadOptions:
    given = {"url": f"sqlite:///{tmp_path}/q.db", "subscribe": "orders", "startingOffsets": "earliest"}
    return read_options(given, streaming=True)


@pytest.fixture
def mq(options: ReadOptions) -> Iterator[postroom.sync.Connection]:
    with postroom.sync.connect(options.reach.url) as connection:
        connection.create_topic("orders", partitions=4)
        yield connection


def send(mq: postroom.sync.Connection, count: int) -> None:
    mq.send_many("orders", [postroom.Message(b"%d" % n, key=f"k{n}") for n in range(count)])


def test_a_micro_batch_costs_seven_questions(mq: postroom.sync.Connection, options: ReadOptions) -> None:
    """To look and to mark, to report, to plan; however many partitions there are. To look in vain: two."""
    queue = Counting(options)
    stream = Stream(options, lambda: queue)
    at = stream.latest(stream.initial(), None)
    stream.newest()  # also who the topic is, which is asked once
    for limit in (None, 10):
        send(mq, 50)
        queue.asked.clear()
        end = stream.latest(at, limit)
        stream.newest()
        assert stream.tasks(at, end)
        assert queue.asked == {"route": 3, "bounds": 4}
        at = end
    at = stream.latest(at, None)
    queue.asked.clear()
    assert stream.latest(at, None) == at
    assert queue.asked == {"route": 1, "bounds": 1}
    stream.close()


def test_a_sealed_partition_that_was_read_and_dropped(
    mq: postroom.sync.Connection, options: ReadOptions
) -> None:
    """While the stream is down: no loss if it was read to the end, and one if it was not."""
    send(mq, 100)
    stream = Stream(options)
    at = stream.latest(stream.initial(), None)
    end = stream.latest(at, None)
    stream.close()
    one = mq.route("orders").ranges[0]
    mq.split("orders", one.partition)
    store = open_store(parse(options.reach.url))
    store.log.trim(one.partition_id, 10_000)
    while store.log.sweep(one.partition_id, rows=1000):
        pass
    store.routes.remove(one.partition_id)
    store.close()
    place = ("orders", one.partition)
    stream = Stream(options)
    assert place not in stream.latest(end, None).at
    short = replace(end, at={**end.at, place: end.at[place] - 1}, marks={})
    with pytest.raises(postroom.PostroomError, match="gone, and was not read to its end"):
        stream.latest(short, None)
    stream.close()


def test_rows_carry_their_source(mq: postroom.sync.Connection, options: ReadOptions) -> None:
    send(mq, 20)
    stream = Stream(options)
    start = stream.initial()
    tasks = stream.tasks(start, stream.latest(stream.latest(start, None), None))
    stream.close()
    found = [
        row
        for task in tasks
        for batch in reading.read_spans(options.reach, task, Columns(SOURCE), reading.Losses(True))
        for row in batch.to_pylist()
    ]
    ids = {f"orders/{r.partition}@{r.partition_id}" for r in mq.route("orders").ranges}
    assert {row["source_partition"] for row in found} <= ids
    assert len({tuple(row.values()) for row in found}) == 20


def test_short_spans_are_fetched_side_by_side() -> None:
    """A hundred partitions are not a hundred round trips, one after the other."""
    together = threading.Barrier(AHEAD)

    class Slow:
        def fetch_ahead(self, span: Span, offset: int) -> Future[Fetched]:
            done: Future[Fetched] = Future()

            def fetch() -> None:
                together.wait(30)
                done.set_result(Fetched((), 0, 0))

            threading.Thread(target=fetch, daemon=True).start()
            return done

    spans = [Span("t", n, n, 0, 1) for n in range(2 * AHEAD)]
    begun = reading._begun(Slow(), spans)  # type: ignore[arg-type]
    assert [span for span, coming in begun if coming.result(30)] == spans
