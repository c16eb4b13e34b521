"""Level 2 of the audit: ids that were sent, stored and handled, put side by side.

All three are one table with a row for each time an id was seen; rows of an id meet in one place. There it
shows what one side has and another has not, or has more often. For the order the messages of a key are
put in the order in which they are stored. Out of order is the one that is late: stored behind one that was
sent after it, or handled after one that is stored behind it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from typing import Any

from ...clock import wall_ms
from ...model.timestamps import latest_sent
from .audit_report import Check, Flag
from .fields import Field, Journal, rank_column, text_of_bytes
from .stored import Stored

__all__ = ["IdCheck", "id_checks"]

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
