"""Progress: cursors, deliveries and members, in a lane of its own.

Each verb locks the progress row of its group and partition first (I1), loads the few deliveries the
decision needs, lets `model.delivery` decide, and writes the change. What must be flushed is known only
once it is decided (I8): the verb then starts over with a flushed transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..errors import GenerationChanged
from ..model import delivery
from ..model.delivery import Ask, Change, Delivery, Settlement, Span, Stamp
from .contract import Backlog, Catalog, Granted, Group, Member, Peek, Settled
from .log import first_row, row_at
from .session import Lane, Session, Transaction

__all__ = ["SqlProgress"]

T = TypeVar("T")

_DUE_ROWS = 64  # deliveries looked at in one poll
_SAMPLE_MS = 10_000  # rates are measured over one to two of these
_ARRIVAL_MS = 60_000

_ROW = """SELECT generation, next_new, next_due, settled, first_wait_ms, sampled_at, sampled, earlier_at, earlier
          FROM penstock_progress WHERE group_id = ? AND partition_id = ?"""
_ROW_COLUMNS = (
    "generation", "next_new", "next_due", "settled", "first_wait_ms", "sampled_at", "sampled", "earlier_at", "earlier",
)  # fmt: skip
_DELIVERY = """SELECT first_offset, last_offset, visible_at, token, holder, spent, failures, suspect, alone,
               stamp_producer, stamp_partition, reason FROM penstock_deliveries WHERE group_id = ? AND partition_id = ?"""
_INSERT = """INSERT INTO penstock_deliveries (group_id, partition_id, first_offset, last_offset, visible_at, token,
             holder, spent, failures, suspect, alone, stamp_producer, stamp_partition, reason)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_DELETE = "DELETE FROM penstock_deliveries WHERE group_id = ? AND partition_id = ? AND first_offset = ?"
_NEXT_DUE = """SELECT visible_at FROM penstock_deliveries WHERE group_id = ? AND partition_id = ?
               ORDER BY visible_at LIMIT 1"""
_OPEN = """SELECT MIN(first_offset), SUM(last_offset - first_offset + 1) FROM penstock_deliveries
           WHERE group_id = ? AND partition_id = ?"""


@dataclass(slots=True)
class _Row:
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


class _NeedsStartError(Exception):
    """The partition was never polled in this generation: its start must be read from the catalog."""


class _NeedsFlushError(Exception):
    """What was decided must be durable: do it again in a flushed transaction."""


class SqlProgress:
    def __init__(self, session: Session, catalog: Catalog) -> None:
        self._session = session
        self._catalog = catalog

    # ---- deliveries ----

    def peek(self, group_id: int, partition_ids: Sequence[int]) -> dict[int, Peek]:
        wanted = set(partition_ids)
        with self._session.read(Lane.PROGRESS) as tx:
            rows = tx.all(
                "SELECT partition_id, next_new, next_due FROM penstock_progress WHERE group_id = ?", group_id
            )
        return {row[0]: Peek(row[1], row[2]) for row in rows if row[0] in wanted}

    def poll(
        self, group: Group, partition_id: int, ask: Ask, *, log_start: int = 0, waited_ms: int | None = None
    ) -> Granted:
        def decide(locked: _Locked) -> Granted:
            if again := locked.deliveries("AND token = ? ORDER BY first_offset", ask.token):
                return locked.hand_out_again(again, group.settings.lease_ms)
            locked.skip_to(log_start)
            due = locked.due(_DUE_ROWS)
            before = locked.row.cursor
            change = delivery.poll(before, due, locked.now, ask, group.terms)
            if any(d.spent for d in change.granted) or change.leaving:
                locked.must_flush()
            if waited_ms is not None and change.cursor > before:
                locked.row.first_wait_ms = waited_ms
            if change.cursor != before or change.drop or locked.dirty:
                locked.apply(change)
            return Granted(
                change.granted, change.leaving, change.unplaced, locked.row.next_due, change.draining
            )

        return self._locked(group, partition_id, decide, flush=ask.on_delivery)

    def settle(
        self, group: Group, partition_id: int, token: int, settlements: Sequence[Settlement]
    ) -> Settled:
        def decide(locked: _Locked) -> Settled:
            held = locked.deliveries("AND token = ? ORDER BY first_offset", token)
            change = delivery.settle(held, settlements, locked.now, group.terms, locked.row.cursor)
            if change.leaving:
                locked.must_flush()
            lost = locked.in_other_hands(change.missing, token)
            if change.drop:
                locked.apply(change)
            return Settled(lost, change.leaving, change.unplaced)

        return self._locked(group, partition_id, decide)

    def extend(self, group: Group, partition_id: int, token: int, spans: Sequence[Span]) -> tuple[Span, ...]:
        def decide(locked: _Locked) -> tuple[Span, ...]:
            held = locked.deliveries("AND token = ? ORDER BY first_offset", token)
            until = locked.now + group.settings.lease_ms
            change = delivery.extend(held, spans, until, locked.row.cursor)
            if change.drop:
                locked.apply(change)
            return locked.in_other_hands(change.missing, token)

        return self._locked(group, partition_id, decide)

    def seize(self, group: Group, partition_id: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        def decide(locked: _Locked) -> Granted:
            low, high = min(s[0] for s in spans), max(s[1] for s in spans)
            where = "AND first_offset <= ? AND last_offset >= ? ORDER BY first_offset"
            rows = locked.deliveries(where, high, low)
            change = delivery.seize(locked.row.cursor, rows, spans, locked.now, ask, group.terms)
            locked.apply(change)
            return Granted(change.granted, change.leaving)

        return self._locked(group, partition_id, decide, flush=True) if spans else Granted(())

    def _locked(
        self, group: Group, partition_id: int, decide: Callable[[_Locked], T], *, flush: bool = False
    ) -> T:
        start: int | None = None
        while True:
            try:
                with self._session.write(Lane.PROGRESS, flush=flush) as tx:
                    return decide(_Locked(tx, self._session, group, partition_id, start, flush))
            except _NeedsFlushError:
                flush = True
            except _NeedsStartError:
                generation, start = self._catalog.start_of(group.id, partition_id)
                if generation != group.generation:
                    raise _reset_meanwhile(group) from None

    # ---- measures ----

    def committed(self, group_id: int, partition_id: int) -> int | None:
        with self._session.read(Lane.PROGRESS) as tx:
            row = tx.one(_ROW, group_id, partition_id)
            lowest = tx.one(_OPEN, group_id, partition_id)
        if row is None:
            return None
        return int(row[1]) if lowest is None or lowest[0] is None else min(int(lowest[0]), int(row[1]))

    def backlog(self, group: Group, partition_ids: Sequence[int], *, open_spans: int = 0) -> list[Backlog]:
        return [self._backlog(group, partition_id, open_spans) for partition_id in partition_ids]

    def _backlog(self, group: Group, partition_id: int, open_spans: int) -> Backlog:
        key = (group.id, partition_id)
        with self._session.read(Lane.PROGRESS) as tx:
            raw = tx.one(_ROW, *key)
            lowest, unsettled = tx.one(_OPEN, *key) or (None, 0)
            rows = (
                tx.all(_DELIVERY + " ORDER BY first_offset LIMIT ?", *key, open_spans) if open_spans else []
            )
        if raw is None or raw[0] != group.generation:
            row = _Row(group.generation, self._catalog.start_of(*key)[1], None)
            lowest, unsettled, rows = None, 0, []
        else:
            row = _Row(*raw)
        committed = row.cursor if lowest is None else min(lowest, row.cursor)
        with self._session.read(Lane.LOG) as tx:
            return _measure(
                tx, partition_id, row, committed, unsettled or 0, tuple((r[0], r[1]) for r in rows)
            )

    # ---- groups ----

    def rewind(self, group: Group, partition_ids: Sequence[int]) -> None:
        for partition_id in partition_ids:
            self._locked(group, partition_id, lambda locked: None, flush=True)

    def forget(self, group_id: int) -> None:
        with self._session.write(Lane.PROGRESS) as tx:
            for table in ("progress", "deliveries", "members"):
                tx.run(f"DELETE FROM penstock_{table} WHERE group_id = ?", group_id)

    def join(self, group_id: int, member: str, client: str, ttl_ms: int) -> None:
        with self._session.write(Lane.PROGRESS, flush=False) as tx:
            now = tx.now_ms()
            renewed = tx.run(
                "UPDATE penstock_members SET until_ms = ? WHERE group_id = ? AND name = ?",
                now + ttl_ms,
                group_id,
                member,
            )
            if not renewed:
                tx.run(
                    "INSERT INTO penstock_members (group_id, name, client, joined_at, until_ms) VALUES (?, ?, ?, ?, ?)",
                    group_id, member, client, now, now + ttl_ms,
                )  # fmt: skip
                tx.run("DELETE FROM penstock_members WHERE group_id = ? AND until_ms < ?", group_id, now)

    def leave(self, group_id: int, member: str) -> None:
        with self._session.write(Lane.PROGRESS, flush=False) as tx:
            tx.run("DELETE FROM penstock_members WHERE group_id = ? AND name = ?", group_id, member)

    def members(self, group_id: int) -> list[Member]:
        with self._session.read(Lane.PROGRESS) as tx:
            rows = tx.all(
                """SELECT group_id, name, client, joined_at, until_ms FROM penstock_members
                   WHERE group_id = ? AND until_ms >= ? ORDER BY joined_at, name""",
                group_id,
                tx.now_ms(),
            )
        return [Member(*row) for row in rows]


class _Locked:
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
        raw = tx.one(_ROW + session.dialect.for_update, *self._key)
        self.now = tx.now_ms()
        if raw is not None and raw[0] > group.generation:
            raise _reset_meanwhile(group)
        if raw is not None and raw[0] == group.generation:
            self.row = _Row(*raw)
            return
        if start is None:
            raise _NeedsStartError
        if not flush:
            raise _NeedsFlushError
        tx.run("DELETE FROM penstock_deliveries WHERE group_id = ? AND partition_id = ?", *self._key)
        self.row = _Row(group.generation, start, None)
        self._save()

    def must_flush(self) -> None:
        if not self._flush:
            raise _NeedsFlushError

    def deliveries(self, where: str, *args: Any) -> list[Delivery]:
        return [_delivery(row) for row in self._tx.all(f"{_DELIVERY} {where}", *self._key, *args)]

    def due(self, limit: int) -> list[Delivery]:
        if self.row.next_due is None or self.row.next_due > self.now:
            return []
        found = self.deliveries("AND visible_at <= ? ORDER BY visible_at LIMIT ?", self.now, limit)
        return sorted(found, key=lambda d: d.first)

    def hand_out_again(self, held: Sequence[Delivery], lease_ms: int) -> Granted:
        """The reply to the first poll was lost. The asker counts its lease from this one (I6, I16)."""
        spans = [(d.first, d.last) for d in held]
        change = delivery.extend(held, spans, self.now + lease_ms, self.row.cursor)
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
        """Which of these offsets are unsettled and held by somebody else, or by nobody (I7)."""
        if not spans:
            return ()
        low, high = min(s[0] for s in spans), max(s[1] for s in spans)
        others = self.deliveries(
            "AND first_offset <= ? AND last_offset >= ? AND token <> ?", high, low, token
        )
        return tuple(delivery.covered(spans, others))

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
        upsert = self._dialect.upsert("penstock_progress", ("group_id", "partition_id"), _ROW_COLUMNS)
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


def _measure(
    tx: Transaction, partition_id: int, row: _Row, committed: int, unsettled: int, spans: tuple[Span, ...]
) -> Backlog:
    """Backlog from a few look-ups by primary key."""
    now = tx.now_ms()
    end, total = tx.one(
        "SELECT next_offset, next_bytes FROM penstock_partitions WHERE id = ?", partition_id
    ) or (0, 0)
    at = row_at(tx, partition_id, committed, "base_offset, records, bytes, bytes_before, appended_at")
    size = age = 0
    if at is not None and committed < end:
        base, records, length, before, appended_at = at
        size = total - before - length * (min(committed, base + records) - base) // records
        age = max(0, now - appended_at)
    window = max(1, min(_ARRIVAL_MS, now - first_appended(tx, partition_id, now)))
    arrived = end - first_row(tx, partition_id, "appended_at", now - _ARRIVAL_MS)
    return Backlog(
        partition_id=partition_id,
        committed=committed,
        cursor=row.cursor,
        end=end,
        unsettled=unsettled,
        bytes=size,
        oldest_age_ms=age,
        first_wait_ms=row.first_wait_ms,
        arrival_per_s=1000 * arrived / max(window, 1000),
        drain_per_s=row.drain_per_s(now),
        open=spans,
    )


def first_appended(tx: Transaction, partition_id: int, otherwise: int) -> int:
    """When the oldest batch that is kept was appended."""
    row = tx.one(f"SELECT appended_at FROM penstock_log_{partition_id:d} ORDER BY base_offset LIMIT 1")
    return int(row[0]) if row else otherwise


def _reset_meanwhile(group: Group) -> GenerationChanged:
    return GenerationChanged(
        f"group {group.name!r} of topic {group.topic!r} was reset or deleted meanwhile; poll again",
        topic=group.topic,
        group=group.name,
    )
