"""Postroom beside Spark's own Kafka source and sink: the same messages, session, machine and run.

Every work is done by one side after the other, in some rounds, and ratios are taken within a round: what else
the machine does then hits all of them. The floor is a source and a sink in Python that do nothing: what Spark
itself takes for any of them. The first round warms up. Kafka's sink writes at least once, and Kafka
flushes when the system likes; Postroom writes exactly once, and flushes every commit.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table

import postroom.sync
from postroom.spark.jobs.archive import ArchiveOptions, archive

from .measure import percentile
from .peers.peer import NotInstalled
from .spark_ground import Place, filled, served
from .spark_kafka import PARTITIONS, connector, kafka
from .spark_memory import Memory, watching

__all__ = ["Beside", "Side", "goals", "run", "table"]

ROUNDS = 3
MIB = 1024 * 1024
KAFKA = "Kafka source"
FLOOR = "any in Python"
_SMALL_BATCHES, _SMALL_ROWS = 25, 100
_FULL, _SMALL, _OUT = "full", "small", "out"
_STARTED = 2  # micro-batches of a query that are its start


@dataclass(frozen=True)
class Side:
    name: str
    format: str
    where: Mapping[str, str]  # options

    def read(self, reader: Any, topic: str) -> Any:
        found = reader.format(self.format).options(**self.where, subscribe=topic)
        return found.option("startingOffsets", "earliest")

    def write(self, writer: Any, topic: str) -> Any:
        return writer.format(self.format).options(**self.where, topic=topic)


@dataclass(frozen=True)
class _Floor(Side):
    rows: Mapping[str, int]  # by topic

    def read(self, reader: Any, topic: str) -> Any:
        return reader.format(self.format).option("rows", self.rows[topic])


@dataclass(frozen=True)
class Work:
    what: str
    run: Callable[[Place, Side], list[float]]  # rates in rows/s, or milliseconds
    latency: bool = False
    without: tuple[str, ...] = ()  # sides that have nothing like it
    goal: float | None = None  # how many times as fast as Kafka's


@dataclass(frozen=True)
class Beside:
    connector: str | None  # or why there is none
    rounds: int
    found: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)  # work, side, rounds
    memory: dict[str, Memory] = field(default_factory=dict)

    def figure(self, work: Work, side: str) -> float:
        """Typical: the median of what one round gives, over the rounds."""
        return statistics.median(map(statistics.median, self.found[work.what][side]))

    def ratio(self, work: Work, side: str) -> float | None:
        """How many times as fast as Kafka's, within a round; the median of the rounds."""
        both = self.found[work.what]
        if KAFKA not in both or side not in both:
            return None
        pairs = zip(both[side], both[KAFKA], strict=True)
        ratios = [statistics.median(ours) / statistics.median(theirs) for ours, theirs in pairs]
        found = statistics.median(ratios)
        return 1 / found if work.latency else found


def run(here: Place, told: Callable[[str], None], rounds: int = ROUNDS, only: Sequence[str] = ()) -> Beside:
    works = [work for work in WORKS if not only or any(word in work.what for word in only)]
    with _sides(here, told) as sides:
        result = Beside(connector() if sides[0].name == KAFKA else None, rounds)
        result.memory.update({side.name: Memory() for side in sides})
        for number in range(rounds + 1):
            for work in works:
                for side in sides:
                    if side.name in work.without:
                        continue
                    with watching(here.spark, result.memory[side.name]):
                        found = work.run(here, side)
                    if number:
                        result.found.setdefault(work.what, {}).setdefault(side.name, []).append(found)
                        unit = "ms" if work.latency else "rows/s"
                        told(f"{work.what:34} {side.name:14} {statistics.median(found):12,.0f} {unit}")
        return result


@contextmanager
def _sides(here: Place, told: Callable[[str], None]) -> Iterator[list[Side]]:
    with ExitStack() as stack:
        urls = [f"sqlite:///{here.fresh()}.db" for _ in range(2)]
        for url in urls:
            filled(url, _FULL, here.messages)
            filled(url, _SMALL, _SMALL_ROWS * _SMALL_BATCHES)
            with postroom.sync.connect(url) as mq:
                mq.create_topic(_OUT, partitions=PARTITIONS)
        ours = [Side("SQLite file", "postroom", {"url": urls[0]})]
        ours.append(Side("broker", "postroom", {"url": stack.enter_context(served(urls[1]))}))
        ours.append(
            _Floor(FLOOR, "prebuilt", {}, {_FULL: here.messages, _SMALL: _SMALL_ROWS * _SMALL_BATCHES})
        )
        try:
            there = Side(KAFKA, "kafka", {"kafka.bootstrap.servers": stack.enter_context(kafka())})
        except NotInstalled as error:
            told(f"without Spark's Kafka source: {error}")
            yield ours
            return
        for topic in (_FULL, _SMALL):
            _copy(here, ours[0], there, topic)
        yield [there, *ours]


def _copy(here: Place, ours: Side, there: Side, topic: str) -> None:
    """The same messages, in the same partitions."""
    frame = ours.read(here.spark.read, topic).load().select("key", "value", "partition")
    there.write(frame.write, topic).save()
    assert there.read(here.spark.read, topic).load().count() == frame.count()


# ---- what is done ----


def _timed(rows: int, run: Callable[[], object]) -> list[float]:
    began = time.perf_counter()
    run()
    return [rows / (time.perf_counter() - began)]


def _batch_noop(here: Place, side: Side) -> list[float]:
    frame = side.read(here.spark.read, _FULL).load()
    return _timed(here.messages, lambda: frame.write.format("noop").mode("overwrite").save())


def _parquet(here: Place, side: Side) -> list[float]:
    folder, frame = here.fresh(), side.read(here.spark.read, _FULL).load()
    found = _timed(here.messages, lambda: frame.write.parquet(folder))
    assert here.spark.read.parquet(folder).count() == here.messages, f"{side.name}: rows are missing"
    shutil.rmtree(folder)
    return found


def _archive(here: Place, side: Side) -> list[float]:
    folder = here.fresh()
    found = _timed(
        here.messages, lambda: archive(here.spark, ArchiveOptions(dict(side.where), _FULL, folder))
    )
    shutil.rmtree(folder)
    return found


def _written(here: Place, side: Side) -> list[float]:
    value = "substring(concat(sha2(cast(id as string), 256), sha2(cast(id as string), 256)), 1, 100)"
    made = here.spark.range(0, here.messages, 1, 2).selectExpr(
        "cast(cast(id % 1000 as string) as binary) key", f"cast({value} as binary) value"
    )
    return _timed(here.messages, lambda: side.write(made.write.mode("append"), _OUT).save())


def _stream_noop(here: Place, side: Side) -> list[float]:
    return _streamed(here, side, "noop")


def _stream_topic(here: Place, side: Side) -> list[float]:
    return _streamed(here, side, "topic")


def _streamed(here: Place, side: Side, sink: str) -> list[float]:
    """Rates of micro-batches of a fifth."""
    source = side.read(here.spark.readStream, _FULL).option("maxOffsetsPerTrigger", here.messages // 5)
    done = _query(here, side, source, sink, here.messages, drain=True)
    return [rows / ms * 1000 for rows, ms in done[1:]]


def _small_noop(here: Place, side: Side) -> list[float]:
    return _small(here, side, "noop")


def _small_topic(here: Place, side: Side) -> list[float]:
    return _small(here, side, "topic")


def _small(here: Place, side: Side, sink: str) -> list[float]:
    """Milliseconds of micro-batches of a hundred rows, in a stream that goes on."""
    source = side.read(here.spark.readStream, _SMALL).option("maxOffsetsPerTrigger", _SMALL_ROWS)
    done = _query(here, side, source, sink, _SMALL_ROWS * _SMALL_BATCHES, drain=False)
    return [ms for _, ms in done[_STARTED:]]


def _query(
    here: Place, side: Side, source: Any, sink: str, rows: int, *, drain: bool
) -> list[tuple[int, float]]:
    """Rows and milliseconds of its micro-batches. `drain`: until all is read, as availableNow does."""
    writer = source.load().select("key", "value").writeStream.option("checkpointLocation", here.fresh())
    writer = writer.format("noop") if sink == "noop" else side.write(writer, _OUT)
    query = (writer.trigger(availableNow=True) if drain else writer).start()
    try:
        if drain:
            query.awaitTermination()
        else:
            query.processAllAvailable()
        progress = [(one.numInputRows, one.durationMs["triggerExecution"]) for one in query.recentProgress]
    finally:
        query.stop()
    seen = sum(count for count, _ in progress)
    assert seen == rows, f"{side.name}: {seen} rows, and not {rows}"
    return [(count, max(1, ms)) for count, ms in progress if count]


WORKS = (
    Work("batch -> noop", _batch_noop),
    Work("stream -> noop", _stream_noop, goal=1.5),
    Work("batch -> Parquet", _parquet),
    Work("archive job -> Delta", _archive, without=(KAFKA, FLOOR)),
    Work("made rows -> topic", _written, without=(FLOOR,)),
    Work("topic -> topic stream", _stream_topic, goal=1),
    Work("micro-batch of 100 -> noop", _small_noop, latency=True, goal=1),
    Work("micro-batch of 100 -> topic", _small_topic, latency=True, goal=1),
)


# ---- the table ----


def table(found: Beside) -> Table:
    title = f"Beside {found.connector or 'nothing: its Kafka connector is not here'}, {found.rounds} rounds"
    shown = Table("rows/s, or ms p50 / p99", title=title)
    sides = list(found.memory)
    for side in sides:
        shown.add_column(side, justify="right")
        if side != KAFKA and KAFKA in sides:
            shown.add_column("x as fast", justify="right")
    for work in (one for one in WORKS if one.what in found.found):
        shown.add_row(work.what, *_cells(found, work, sides))
    memory: list[str] = []
    for side in sides:
        seen = found.memory[side]
        memory.append(f"{seen.java // MIB:,} + {seen.python // MIB:,}")
        memory += [""] if side != KAFKA and KAFKA in sides else []
    shown.add_row("PSS MiB at most: Java + Python", *memory)
    return shown


def goals(found: Beside) -> Iterator[tuple[str, str, str, bool]]:
    """What, wanted, found, and whether it is met; nothing where there was no Kafka."""
    for work in WORKS:
        for side in found.memory:
            ratio = found.ratio(work, side) if side != KAFKA and work.what in found.found else None
            if work.goal is not None and ratio is not None and side != FLOOR:
                wanted = f"{work.goal:g} x Kafka's at least"
                yield f"{work.what}, {side}", wanted, f"{ratio:.2f}", ratio >= work.goal


def _cells(found: Beside, work: Work, sides: Sequence[str]) -> Iterator[str]:
    for side in sides:
        if side not in found.found[work.what]:
            yield "-"
            continue
        yield _figure(found, work, side)
        if side != KAFKA and KAFKA in sides:
            ratio = found.ratio(work, side)
            yield "" if ratio is None else f"{ratio:.2f}"


def _figure(found: Beside, work: Work, side: str) -> str:
    if not work.latency:
        return f"{found.figure(work, side):,.0f}"
    every = [ms for some in found.found[work.what][side] for ms in some]
    return f"{percentile(every, 50):,.0f} / {percentile(every, 99):,.0f}"
