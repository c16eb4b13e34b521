"""Progress: cursors, deliveries and members, in a lane of its own.

Each verb locks the progress row of its group and partition first (I1), loads the few deliveries the
decision needs, lets `model.delivery` decide, and writes the change. What must be flushed is known only
once it is decided (I8): the verb then starts over with a flushed transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ..model import delivery, settlement
from ..model.delivery import Ask, Settlement, Span
from .contract import Backlog, Catalog, Granted, Group, Member, Peek, Settled
from .locked import (
    DELIVERY,
    LOWEST,
    ROW,
    UNSETTLED,
    Locked,
    NeedsFlushError,
    NeedsStartError,
    Row,
    reset_meanwhile,
)
from .lookups import log_of
from .measures import log_start_of, measure
from .session import Lane, Session

__all__ = ["SqlProgress"]

T = TypeVar("T")

_DUE_ROWS = 64  # deliveries looked at in one poll
_ENTER = """INSERT INTO penstock_members (group_id, name, client, joined_at, until_ms)
            VALUES (?, ?, ?, ?, ?)"""


class SqlProgress:
    def __init__(self, session: Session, catalog: Catalog) -> None:
        self._session = session
        self._catalog = catalog

    # ---- deliveries ----

    def peek(self, group: Group, partition_ids: Sequence[int]) -> dict[int, Peek]:
        wanted = set(partition_ids)
        look = """SELECT partition_id, next_new, next_due FROM penstock_progress
                  WHERE group_id = ? AND generation = ?"""
        with self._session.read(Lane.PROGRESS) as tx:
            rows = tx.all(look, group.id, group.generation)
        return {row[0]: Peek(row[1], row[2]) for row in rows if row[0] in wanted}

    def dues(self) -> dict[int, int]:
        earliest = """SELECT group_id, MIN(next_due) FROM penstock_progress
                      WHERE next_due IS NOT NULL GROUP BY group_id"""
        with self._session.read(Lane.PROGRESS) as tx:
            return dict(tx.all(earliest))

    def held_by(self, group_id: int, token: int) -> set[int]:
        held = "SELECT partition_id FROM penstock_deliveries WHERE token = ? AND group_id = ?"
        with self._session.read(Lane.PROGRESS) as tx:
            return {row[0] for row in tx.all(held, token, group_id)}

    def poll(
        self, group: Group, partition_id: int, ask: Ask, *, log_start: int = 0, waited_ms: int | None = None
    ) -> Granted:
        def decide(locked: Locked) -> Granted:
            locked.skip_to(log_start)
            if again := locked.deliveries("AND token = ? ORDER BY first_offset", ask.token):
                return locked.hand_out_again(again, group.settings.lease_ms)
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
        def decide(locked: Locked) -> Settled:
            held = locked.deliveries("AND token = ? ORDER BY first_offset", token)
            change = settlement.settle(held, settlements, locked.now, group.terms, locked.row.cursor)
            if change.leaving:
                locked.must_flush()
            lost = locked.in_other_hands(change.missing, token)
            if change.drop:
                locked.apply(change)
            return Settled(lost, change.leaving, change.unplaced)

        return self._locked(group, partition_id, decide)

    def extend(self, group: Group, partition_id: int, token: int, spans: Sequence[Span]) -> tuple[Span, ...]:
        def decide(locked: Locked) -> tuple[Span, ...]:
            held = locked.deliveries("AND token = ? ORDER BY first_offset", token)
            until = locked.now + group.settings.lease_ms
            change = settlement.extend(held, spans, until, locked.row.cursor)
            if change.drop:
                locked.apply(change)
            return locked.in_other_hands(change.missing, token)

        return self._locked(group, partition_id, decide)

    def seize(self, group: Group, partition_id: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        def decide(locked: Locked) -> Granted:
            low, high = min(s[0] for s in spans), max(s[1] for s in spans)
            where = "AND first_offset <= ? AND last_offset >= ? ORDER BY first_offset"
            rows = locked.deliveries(where, high, low)
            change = settlement.seize(locked.row.cursor, rows, spans, locked.now, ask, group.terms)
            locked.apply(change)
            return Granted(change.granted, change.leaving)

        return self._locked(group, partition_id, decide, flush=True) if spans else Granted(())

    def _locked(
        self, group: Group, partition_id: int, decide: Callable[[Locked], T], *, flush: bool = False
    ) -> T:
        start: int | None = None
        while True:
            try:
                with self._session.write(Lane.PROGRESS, flush=flush) as tx:
                    return decide(Locked(tx, self._session, group, partition_id, start, flush))
            except NeedsFlushError:
                flush = True
            except NeedsStartError:
                generation, start = self._catalog.start_of(group.id, partition_id)
                if generation != group.generation:
                    raise reset_meanwhile(group) from None

    # ---- measures ----

    def committed(self, group_id: int, partition_id: int) -> int | None:
        with self._session.read(Lane.PROGRESS) as tx:
            row = tx.one(ROW, group_id, partition_id)
            lowest = tx.one(LOWEST, group_id, partition_id)
        if row is None or row[0] != self._catalog.start_of(group_id, partition_id)[0]:
            return None
        return int(row[1]) if lowest is None or lowest[0] is None else min(int(lowest[0]), int(row[1]))

    def backlog(self, group: Group, partition_ids: Sequence[int], *, open_spans: int = 0) -> list[Backlog]:
        return [self._backlog(group, partition_id, open_spans) for partition_id in partition_ids]

    def _backlog(self, group: Group, partition_id: int, open_spans: int) -> Backlog:
        key = (group.id, partition_id)
        with self._session.read(Lane.LOG) as tx:
            log_start = log_start_of(tx, partition_id)
        with self._session.read(Lane.PROGRESS) as tx:
            raw = tx.one(ROW, *key)
            lowest, unsettled = tx.one(UNSETTLED, log_start, log_start, *key, log_start) or (None, 0)
            where = " AND last_offset >= ? ORDER BY first_offset LIMIT ?"
            rows = tx.all(DELIVERY + where, *key, log_start, open_spans) if open_spans else []
        if raw is None or raw[0] != group.generation:
            row = Row(group.generation, self._catalog.start_of(*key)[1], None)
            lowest, unsettled, rows = None, 0, []
        else:
            row = Row(*raw)
        row.cursor = max(row.cursor, log_start)  # what was trimmed is passed over by the next poll
        committed = row.cursor if lowest is None else max(log_start, min(lowest, row.cursor))
        spans = tuple((max(r[0], log_start), r[1]) for r in rows)
        with log_of(self._session, partition_id), self._session.read(Lane.LOG) as tx:
            return measure(tx, partition_id, row, committed, int(unsettled or 0), spans)

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
                tx.run(_ENTER, group_id, member, client, now, now + ttl_ms)
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
