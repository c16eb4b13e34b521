"""A group's progress in a partition, under its lock: one row, and the deliveries below its cursor.

The row is locked first (I1), and made from the group's start when the partition is first touched in a
generation. What must be durable is known only once it is decided (I8): whoever finds so asks for a
flushed transaction and is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import GenerationChanged
from ..model import settlement
from ..model.delivery import Change, Delivery, Span, Stamp
from .contract import Granted, Group
from .session import Session, Transaction

__all__ = [
    "DELIVERY",
    "LOWEST",
    "ROW",
    "UNSETTLED",
    "Locked",
    "NeedsFlushError",
    "NeedsStartError",
    "Row",
    "reset_meanwhile",
]

_SAMPLE_MS = 10_000  # rates are measured over one to two of these

_COLUMNS = (
    "generation", "next_new", "next_due", "settled", "first_wait_ms", "sampled_at", "sampled",
    "earlier_at", "earlier",
)  # fmt: skip
_OF_DELIVERY = """first_offset, last_offset, visible_at, token, holder, spent, failures, suspect, alone,
                  stamp_producer, stamp_partition, reason"""
ROW = f"SELECT {', '.join(_COLUMNS)} FROM penstock_progress WHERE group_id = ? AND partition_id = ?"
DELIVERY = f"SELECT {_OF_DELIVERY} FROM penstock_deliveries WHERE group_id = ? AND partition_id = ?"
LOWEST = "SELECT MIN(first_offset) FROM penstock_deliveries WHERE group_id = ? AND partition_id = ?"
UNSETTLED = """SELECT MIN(first_offset),
                      SUM(last_offset - CASE WHEN first_offset < ? THEN ? ELSE first_offset END + 1)
               FROM penstock_deliveries WHERE group_id = ? AND partition_id = ? AND last_offset >= ?"""
_INSERT = f"""INSERT INTO penstock_deliveries (group_id, partition_id, {_OF_DELIVERY})
              VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_DELETE = "DELETE FROM penstock_deliveries WHERE group_id = ? AND partition_id = ? AND first_offset = ?"
_NEXT_DUE = """SELECT visible_at FROM penstock_deliveries WHERE group_id = ? AND partition_id = ?
               ORDER BY visible_at LIMIT 1"""


@dataclass(slots=True)
class Row:
    """A locked progress row."""

    generation: int
    cursor: int
    next_due: int | None
    settled: int = 0
    first_wait_ms: int = 0
    sampled_at: int = 0
    sampled: int = 0
    earlier_at: int = 0
    earlier: int = 0

    def sample(self, now: int) -> None:
        if now - self.sampled_at >= _SAMPLE_MS:
            self.earlier_at, self.earlier = (
                (self.sampled_at, self.sampled) if self.sampled_at else (now, self.settled)
            )
            self.sampled_at, self.sampled = now, self.settled

    def drain_per_s(self, now: int) -> float:
        passed = now - self.earlier_at
        return 1000 * (self.settled - self.earlier) / passed if self.earlier_at and passed > 0 else 0.0


class NeedsStartError(Exception):
    """The partition was never polled in this generation: its start must be read from the catalog."""


class NeedsFlushError(Exception):
    """What was decided must be durable: do it again in a flushed transaction."""


class Locked:
    """A group's progress in a partition, locked, in this group's generation."""

    def __init__(
        self,
        tx: Transaction,
        session: Session,
        group: Group,
        partition_id: int,
        start: int | None,
        flush: bool,
    ) -> None:
        self._tx = tx
        self._dialect = session.dialect
        self._key = (group.id, partition_id)
        self._flush = flush
        self.dirty = False
        raw = tx.one(ROW + session.dialect.for_update, *self._key)
        self.now = tx.now_ms()
        if raw is not None and raw[0] > group.generation:
            raise reset_meanwhile(group)
        if raw is not None and raw[0] == group.generation:
            self.row = Row(*raw)
            return
        if start is None:
            raise NeedsStartError
        if not flush:
            raise NeedsFlushError
        tx.run("DELETE FROM penstock_deliveries WHERE group_id = ? AND partition_id = ?", *self._key)
        self.row = Row(group.generation, start, None)
        self._save()

    def must_flush(self) -> None:
        if not self._flush:
            raise NeedsFlushError

    def deliveries(self, where: str, *args: Any) -> list[Delivery]:
        return [_delivery(row) for row in self._tx.all(f"{DELIVERY} {where}", *self._key, *args)]

    def due(self, limit: int) -> list[Delivery]:
        if self.row.next_due is None or self.row.next_due > self.now:
            return []
        found = self.deliveries("AND visible_at <= ? ORDER BY visible_at LIMIT ?", self.now, limit)
        return sorted(found, key=lambda d: d.first)

    def hand_out_again(self, held: Sequence[Delivery], lease_ms: int) -> Granted:
        """The reply to the first poll was lost. The asker counts its lease from this one (I6, I16)."""
        spans = [(d.first, d.last) for d in held]
        change = settlement.extend(held, spans, self.now + lease_ms, self.row.cursor)
        self.apply(change)
        return Granted(change.put, next_due=self.row.next_due)

    def skip_to(self, log_start: int) -> None:
        """Pass over what retention took away."""
        if log_start <= 0:
            return
        for old in self.deliveries("AND first_offset < ?", log_start):
            self.dirty = True
            self._tx.run(_DELETE, *self._key, old.first)
            self.row.settled += min(old.last, log_start - 1) - old.first + 1
            if old.last >= log_start:
                self._tx.run(_INSERT, *self._key, *_columns(old.part(log_start, old.last)))
        if self.row.cursor < log_start:
            self.row.cursor = log_start
            self.dirty = True

    def in_other_hands(self, spans: Sequence[Span], token: int) -> tuple[Span, ...]:
        """Which of these offsets are unsettled and held by somebody else, or by nobody (I7).

        From the cursor on nothing was handed out, or a crash forgot it (I8): that is unsettled too.
        """
        if not spans:
            return ()
        low, high = min(s[0] for s in spans), max(s[1] for s in spans)
        others = self.deliveries(
            "AND first_offset <= ? AND last_offset >= ? AND token <> ?", high, low, token
        )
        beyond = [(max(first, self.row.cursor), last) for first, last in spans if last >= self.row.cursor]
        return (*settlement.covered(spans, others), *beyond)

    def apply(self, change: Change) -> None:
        if change.drop:
            self._tx.many(_DELETE, [(*self._key, first) for first in change.drop])
        if change.put:
            self._tx.many(_INSERT, [(*self._key, *_columns(d)) for d in change.put])
        self.row.cursor = change.cursor
        self.row.settled += change.settled
        self._save()

    def _save(self) -> None:
        due = self._tx.one(_NEXT_DUE, *self._key)
        row = self.row
        row.next_due = due[0] if due else None
        row.sample(self.now)
        upsert = self._dialect.upsert("penstock_progress", ("group_id", "partition_id"), _COLUMNS)
        self._tx.run(
            upsert, *self._key, row.generation, row.cursor, row.next_due, row.settled, row.first_wait_ms,
            row.sampled_at, row.sampled, row.earlier_at, row.earlier,
        )  # fmt: skip


def _delivery(row: tuple[Any, ...]) -> Delivery:
    first, last, visible_at, token, holder, spent, failures, suspect, alone, producer, partition, reason = row
    stamp = None if producer is None else Stamp(producer, partition)
    return Delivery(
        first, last, visible_at, token, holder, spent, failures, bool(suspect), bool(alone), stamp, reason
    )


def _columns(d: Delivery) -> tuple[Any, ...]:
    producer, partition = (d.stamp.producer_id, d.stamp.partition_id) if d.stamp else (None, None)
    return (
        d.first, d.last, d.visible_at, d.token, d.holder, d.spent, d.failures, int(d.suspect), int(d.alone),
        producer, partition, d.reason,
    )  # fmt: skip


def reset_meanwhile(group: Group) -> GenerationChanged:
    return GenerationChanged(
        f"group {group.name!r} of topic {group.topic!r} was reset or deleted meanwhile; poll again",
        topic=group.topic,
        group=group.name,
    )
