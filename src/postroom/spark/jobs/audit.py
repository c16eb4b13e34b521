"""The job `audit`: what was lost, repeated or put out of order between sending, storing and handling.

Level 1 looks at the topic alone: that no offset is missing, and, where messages carry a running number for
each key, that the numbers are complete, single and in order. Level 2 compares it with journals: ids that were
sent, and ids that were handled. Each check is one query that counts; only if it counts something bad a second
one lists it, with ids and offsets, into a report. Rows stay in Spark: what comes to the driver are counts,
and the report line by line. Every query sees the same offsets. Must never call clean what was not looked at:
`unchecked` says what that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from ...clock import wall_ms
from ...errors import InvalidSetting
from ...model.messages.timestamps import latest_sent
from .audit_report import Bad, Check, Flag, Report
from .failures import explained
from .fields import Field, Journal, Stored, look, rank_column, text_of_bytes

__all__ = [
    "AuditOptions",
    "Audited",
    "Bad",
    "IdCheck",
    "PartitionCount",
    "audit",
    "id_checks",
    "number_check",
    "offset_check",
]


# ---- level 2 of the audit: ids that were sent, stored and handled, put side by side ----
# All three are one table with a row for each time an id was seen; rows of an id meet in one place. There
# it shows what one side has and another has not, or has more often. For the order the messages of a key
# are put in the order in which they are stored. Out of order is the one that is late: stored behind one
# that was sent after it, or handled after one that is stored behind it.

_SENT, _STORED, _HANDLED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class IdCheck:
    id: Field
    sent: Journal | None
    handled: tuple[Journal, ...]
    order: bool
    waiting_after_ms: int | None

    @property
    def sent_order(self) -> bool:
        return self.order and self.sent is not None and self.sent.has_order

    @property
    def handled_order(self) -> bool:
        """Of several journals nobody knows which came first."""
        return self.order and len(self.handled) == 1 and self.handled[0].has_order

    @property
    def unchecked(self) -> list[str]:
        found = []
        if self.sent is None:
            found.append("nothing was compared with what was sent: there is no journal of that")
        elif self.order and not self.sent_order:
            found.append("the order of sending is not known: the journal names no column for it")
        if not self.handled:
            found.append("nothing was compared with what was handled: there is no journal of that")
        elif self.order and not self.handled_order:
            why = (
                "there are several journals"
                if len(self.handled) > 1
                else "the journal names no column for it"
            )
            found.append(f"the order of handling is not known: {why}")
        return found


def id_checks(spark: Any, stored: Stored, wanted: IdCheck) -> list[Check]:
    from pyspark.sql import functions as F

    rows = _with_counts(_rows(spark, stored, wanted))
    if wanted.sent_order or wanted.handled_order:
        rows = _with_order(rows)
    return [
        Check(
            what="ids",
            by="id",
            rows=rows,
            flags=_flags(wanted),
            counts=_counts(wanted),
            fields={
                "id": F.col("id"),
                "key": text_of_bytes("key"),
                "partition": F.col("partition"),
                "offset": F.col("offset"),
            },
        )
    ]


def _rows(spark: Any, stored: Stored, wanted: IdCheck) -> Any:
    """side, id, at, and of a stored message also key, partition, offset, rank, time_ms."""
    from pyspark.sql import functions as F

    columns = list(dict.fromkeys(("key", "partition", "offset", "timestamp", *wanted.id.columns)))
    frame = stored.frame(spark, columns, lossy=True)
    sides = [
        frame.select(
            F.lit(_STORED).alias("side"),
            wanted.id.text().alias("id"),
            F.lit(None).cast("bigint").alias("at"),
            "key",
            "partition",
            "offset",
            rank_column(stored).alias("rank"),
            F.unix_millis("timestamp").alias("time_ms"),
        )
    ]
    journals = [(_SENT, wanted.sent)] if wanted.sent is not None else []
    journals += [(_HANDLED, journal) for journal in wanted.handled]
    for side, journal in journals:
        sides.append(
            journal.ids(spark, stored.queue).select(
                F.lit(side).alias("side"),
                "id",
                "at",
                F.lit(None).cast("binary").alias("key"),
                F.lit(None).cast("int").alias("partition"),
                F.lit(None).cast("bigint").alias("offset"),
                F.lit(None).cast("bigint").alias("rank"),
                F.lit(None).cast("bigint").alias("time_ms"),
            )
        )
    return reduce(lambda one, other: one.unionAll(other), sides)


def _with_counts(rows: Any) -> Any:
    """How often each side has the id, when it is first there, and which of them this row is."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    # rows without an id have nothing in common: else they would be one id, and one task
    rows = rows.withColumn("spread", F.when(F.col("id").isNull(), F.xxhash64("partition", "offset", "at")))
    same = Window.partitionBy("id", "spread")
    nth = Window.partitionBy("id", "spread", "side").orderBy("rank", "offset", "at")

    def of(side: int, value: Any) -> Any:
        return F.when(F.col("side") == side, value)

    return rows.withColumns(
        {
            "sent": F.count(of(_SENT, F.lit(1))).over(same),
            "stored": F.count(of(_STORED, F.lit(1))).over(same),
            "handled": F.count(of(_HANDLED, F.lit(1))).over(same),
            "sent_at": F.min(of(_SENT, F.col("at"))).over(same),
            "handled_at": F.min(of(_HANDLED, F.col("at"))).over(same),
            "nth": F.row_number().over(nth),
        }
    )


def _with_order(rows: Any) -> Any:
    """Of the messages of the same key: the last one that was sent of those that are stored before, and the
    first one that was handled of those that are stored behind."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    known = (
        (F.col("side") == _STORED) & (F.col("nth") == 1) & F.col("id").isNotNull() & F.col("key").isNotNull()
    )
    rows = rows.withColumn("ordered", F.when(known, F.col("key")))
    rows = rows.withColumn("alone", F.when(~known, F.xxhash64("id", "side", "partition", "offset", "nth")))
    same = Window.partitionBy("ordered", "alone")
    before = same.orderBy("rank", "offset").rowsBetween(Window.unboundedPreceding, -1)
    # backwards: a frame that begins at the row is computed anew for each, which is the square of a key's rows
    behind = same.orderBy(F.desc("rank"), F.desc("offset")).rowsBetween(Window.unboundedPreceding, -1)
    return rows.withColumns(
        {"sent_before": F.max("sent_at").over(before), "handled_behind": F.min("handled_at").over(behind)}
    )


def _flags(wanted: IdCheck) -> tuple[Flag, ...]:
    from pyspark.sql import functions as F

    side, nth = F.col("side"), F.col("nth")
    named = F.col("id").isNotNull()
    is_stored, first = named & (side == _STORED), nth == 1
    flags = [Flag("stored", "repeated", is_stored & (nth > F.greatest(F.col("sent"), F.lit(1))))]
    old = _is_old(wanted)
    if wanted.sent is not None:
        lost = named & (side == _SENT) & first & (F.col("stored") == 0)
        flags.append(Flag("stored", "lost", lost))
        flags.append(Flag("stored", "unknown", is_stored & first & (F.col("sent") == 0) & old))
    if wanted.sent_order:
        flags.append(
            Flag("stored", "out of order", is_stored & first & (F.col("sent_at") < F.col("sent_before")))
        )
    if wanted.handled:
        is_handled = named & (side == _HANDLED)
        flags.append(Flag("handled", "lost", is_stored & first & (F.col("handled") == 0) & old))
        flags.append(Flag("handled", "unknown", is_handled & first & (F.col("stored") == 0)))
        more = F.greatest(F.col("stored"), F.lit(1))
        flags.append(
            Flag(
                "handled", "repeated", is_stored & first & (F.col("handled") > more), F.col("handled") - more
            )
        )
    if wanted.handled_order:
        late = F.col("handled_at") > F.col("handled_behind")
        flags.append(Flag("handled", "out of order", is_stored & first & late))
    return tuple(flags)


def _is_old(wanted: IdCheck) -> Any:
    from pyspark.sql import functions as F

    if wanted.waiting_after_ms is None:
        return F.lit(True)
    time_ms = F.col("time_ms")  # null, or far ahead: nobody knows, and it must not wait for ever
    is_young = time_ms.between(wanted.waiting_after_ms, latest_sent(wall_ms()))
    return ~F.coalesce(is_young, F.lit(False))


def _counts(wanted: IdCheck) -> dict[str, Any]:
    from pyspark.sql import functions as F

    side, unnamed = F.col("side"), F.col("id").isNull()
    counts = {"without_id": unnamed & (side == _STORED)}
    if wanted.sent is not None:
        counts["sent"] = side == _SENT
    if wanted.handled:
        counts["handled"] = side == _HANDLED
        unhandled = (side == _STORED) & (F.col("nth") == 1) & ~unnamed & (F.col("handled") == 0)
        counts["waiting"] = unhandled & ~_is_old(wanted)
    return counts


# ---- level 1 of the audit: running numbers ----
# Each stream, such as a key, counts its messages from one number on.
#
# In the order in which they are stored the numbers of a stream go up by one. What is missing between the
# lowest and the highest was lost; what is there a second time was repeated; what is there once, but
# behind a higher one, is out of order. Numbers behind the highest cannot be missed here: journals show
# those.


def number_check(spark: Any, stored: Stored, number: Field, stream: Field, first: int | None) -> Check:
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    columns = list(dict.fromkeys(("partition", "offset", *number.columns, *stream.columns)))
    rows = stored.frame(spark, columns, lossy=True).select(
        stream.bytes().alias("stream"),
        number.text().try_cast("bigint").alias("number"),
        "partition",
        "offset",
        rank_column(stored).alias("rank"),
    )
    told = F.col("stream").isNotNull() & F.col("number").isNotNull()
    # what has no number is in no stream: else all of it would be one stream, and one task
    rows = rows.withColumn("spread", F.when(told, F.lit(None)).otherwise(F.xxhash64("partition", "offset")))
    streams = ("stream", "spread")
    as_stored = Window.partitionBy(*streams).orderBy("rank", "offset")
    by_number = Window.partitionBy(*streams).orderBy("number", "rank", "offset")
    rows = rows.withColumns(
        {
            "highest": F.max("number").over(as_stored.rowsBetween(Window.unboundedPreceding, -1)),
            "lower": F.lag("number").over(by_number),
        }
    )
    before = F.col("lower") if first is None else F.coalesce(F.col("lower"), F.lit(first - 1))
    repeated = told & (F.col("lower") == F.col("number"))
    missing = F.col("number") - before - 1
    return Check(
        what=f"the running numbers in {number}",
        by="number",
        rows=rows,
        flags=(
            Flag(
                "stored",
                "lost",
                told & (missing > 0),
                missing,
                {
                    "number": before + 1,
                    "last_number": F.col("number") - 1,
                    "partition": F.lit(None),
                    "offset": F.lit(None),
                },
            ),
            Flag("stored", "repeated", repeated),
            Flag("stored", "out of order", told & ~repeated & (F.col("number") < F.col("highest"))),
        ),
        counts={"numbered": told, "unnumbered": ~told},
        fields={
            "key": text_of_bytes("stream"),
            "number": F.col("number"),
            "partition": F.col("partition"),
            "offset": F.col("offset"),
        },
    )


def offset_check(spark: Any, stored: Stored) -> Check:
    """Offsets between the first and the last of a partition that no message has."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    before = F.lag("offset").over(Window.partitionBy("partition").orderBy("offset"))
    rows = stored.frame(spark, ["partition", "offset"], lossy=True).withColumn("before", before)
    missing = F.col("offset") - F.col("before") - 1
    fields = {
        "partition": F.col("partition"),
        "offset": F.col("before") + 1,
        "last_offset": F.col("offset") - 1,
    }
    return Check("offsets", "offset", rows, (Flag("stored", "gap", missing > 0, missing),), {}, fields)


# ---- the job ----

Progress = Callable[[str], None]
"""Is told what is being done."""


@dataclass(frozen=True, slots=True)
class AuditOptions:
    queue: Mapping[str, str] = field(repr=False)  # how it is reached: url, token, …
    topic: str
    start_ms: int | None = None  # by the time of the messages
    end_ms: int | None = None
    number: str | None = None  # level 1: where the running number is: header:NAME or json:FIELD
    stream: str = "key"  # what has its own running number
    first_number: int | None = None  # that of every stream; else numbers before the first one are not missed
    id: str = "id"  # level 2: where the id of a stored message is
    sent: Journal | None = None
    handled: tuple[Journal, ...] = ()
    order: bool = True  # also whether journals have the order in which each key was stored
    waiting_after_ms: int | None = (
        None  # what was stored since then, and is not handled, waits: it is not lost
    )
    report: str | None = None  # a file: a line of JSON for each that is bad

    def __post_init__(self) -> None:
        if self.number is not None and Field.parse(self.number, "number").kind not in ("header", "json"):
            raise InvalidSetting(f"number={self.number!r}: choose header:NAME or json:FIELD")
        Field.parse(self.stream, "stream")
        Field.parse(self.id, "id")
        if self.waiting_after_ms is not None and not self.handled:
            raise InvalidSetting("waiting_after goes with a journal of what was handled: name one")

    @property
    def level(self) -> int:
        return 2 if self.sent is not None or self.handled else 1


@dataclass(frozen=True, slots=True)
class PartitionCount:
    partition: int
    first: int
    last: int
    messages: int

    @property
    def missing(self) -> int:
        """Offsets between the first and the last that no message has. A seal is behind the last."""
        return self.last - self.first + 1 - self.messages


@dataclass(frozen=True, slots=True)
class Audited:
    topic: str
    level: int
    partitions: tuple[PartitionCount, ...]
    counts: Mapping[str, int] = field(hash=False)  # of rows that were looked at: stored, numbered, sent, …
    bad: tuple[Bad, ...] = ()
    waiting: int = 0
    unchecked: tuple[str, ...] = ()
    report: str | None = None
    seconds: float = 0.0

    @property
    def messages(self) -> int:
        return sum(one.messages for one in self.partitions)

    @property
    def clean(self) -> bool:
        return not self.bad

    @property
    def verdict(self) -> str:
        return "clean" if self.clean else "not clean"

    def count(self, stage: str, kind: str) -> int:
        """Messages that are bad in this way; what both numbers and ids tell counts once."""
        return max((one.messages for one in self.bad if (one.stage, one.kind) == (stage, kind)), default=0)


def audit(spark: Any, options: AuditOptions, *, progress: Progress = lambda text: None) -> Audited:
    began = time.monotonic()
    with explained():
        stored = look(options.queue, options.topic, start_ms=options.start_ms, end_ms=options.end_ms)
        progress("counting what is stored")
        partitions = _partitions(spark, stored)
        checks, unchecked = _checks(spark, options, stored)
        counts: dict[str, int] = {"stored": sum(one.messages for one in partitions)}
        bad: list[Bad] = []
        if any(one.missing for one in partitions):
            checks.insert(0, offset_check(spark, stored))
        with Report(options.report) as report:
            for check in checks:
                progress(f"checking {check.what}")
                found = check.count()
                counts.update(found.counts)
                bad += found.bad
                if found.bad and options.report is not None:
                    progress(f"listing what is wrong with {check.what}")
                    report.write(check.listed())
    unchecked += _left_out(options, counts)
    return Audited(
        topic=options.topic,
        level=options.level,
        partitions=tuple(partitions),
        counts=counts,
        bad=tuple(bad),
        waiting=counts.pop("waiting", 0),
        unchecked=tuple(unchecked),
        report=report.path,
        seconds=time.monotonic() - began,
    )


def _checks(spark: Any, options: AuditOptions, stored: Stored) -> tuple[list[Check], list[str]]:
    checks: list[Check] = []
    unchecked: list[str] = []
    if options.number is not None:
        number, stream = Field.parse(options.number, "number"), Field.parse(options.stream, "stream")
        checks.append(number_check(spark, stored, number, stream, options.first_number))
    elif options.level == 1:
        unchecked.append("only offsets were looked at: name a running number, or journals, to find more")
    if options.level == 2:
        wanted = IdCheck(
            id=Field.parse(options.id, "id"),
            sent=options.sent,
            handled=options.handled,
            order=options.order,
            waiting_after_ms=options.waiting_after_ms,
        )
        checks += id_checks(spark, stored, wanted)
        unchecked += wanted.unchecked
    return checks, unchecked


def _left_out(options: AuditOptions, counts: Mapping[str, int]) -> list[str]:
    """What has no number, or no id. InvalidSetting if nothing has: then it was not an audit."""
    found = []
    for name, value, where in (("unnumbered", "number", options.number), ("without_id", "id", options.id)):
        without = counts.get(name, 0)
        if without and without == counts["stored"]:
            raise InvalidSetting(f"{value}={where!r}: none of {without:,} stored messages has one there")
        if without:
            found.append(f"{without:,} stored messages have no {value} in {where}")
    return found


def _partitions(spark: Any, stored: Stored) -> list[PartitionCount]:
    from pyspark.sql import functions as F

    if not stored.offsets:
        return []
    rows = (
        stored.frame(spark, ["partition", "offset"], lossy=True)
        .groupBy("partition")
        .agg(F.min("offset").alias("first"), F.max("offset").alias("last"), F.count("*").alias("messages"))
        .collect()
    )
    return sorted(
        (PartitionCount(row["partition"], row["first"], row["last"], row["messages"]) for row in rows),
        key=lambda one: one.partition,
    )
