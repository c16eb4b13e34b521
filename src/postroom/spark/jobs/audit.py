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
from typing import Any

from ...errors import InvalidSetting
from .audit_ids import IdCheck, id_checks
from .audit_numbers import number_check, offset_check
from .audit_report import Bad, Check, Report
from .failures import explained
from .fields import Field, Journal
from .stored import Stored, look

__all__ = ["AuditOptions", "Audited", "Bad", "PartitionCount", "audit"]

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
