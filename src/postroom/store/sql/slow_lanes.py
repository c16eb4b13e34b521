"""Slow lanes: what became of messages of each source, and which sources are slow (R42).

The row without a name is locked first (I1), so that those who count for a group do so one after the other;
then everything of the group is read, which is little: only sources that fail or take long are counted here.
Need not be flushed: what a crash forgets is counted anew. Decides nothing: `model.lanes` does.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...model.policy.slow_lane import (
    MOST_SOURCES,
    LanePolicy,
    LaneState,
    Seen,
    SlowSource,
    bucket_of,
    decide,
    total,
    window_start,
)
from ..contract import Group
from .session import Area, Session, Transaction, verbs

__all__ = ["SqlLanes"]

_LOCK = "SELECT since FROM postroom_lanes WHERE group_id = ? AND source = ''"
_FIRST = """INSERT INTO postroom_lanes (group_id, source, since, failed_at, handled_at, reason)
            VALUES (?, '', ?, 0, 0, '')"""
_CLEANED = "UPDATE postroom_lanes SET since = ? WHERE group_id = ? AND source = ''"
_SLOW = """SELECT source, since, reason, failed_at, handled_at FROM postroom_lanes
           WHERE group_id = ? AND source <> '' ORDER BY since, source"""
_COUNTS = """SELECT bucket, source, handled, failed, spent_ms FROM postroom_lane_counts
             WHERE group_id = ? AND bucket >= ?"""
_WATCHED = "SELECT DISTINCT source FROM postroom_lane_counts WHERE group_id = ? AND bucket >= ?"
_RETURN = "DELETE FROM postroom_lanes WHERE group_id = ? AND source = ?"
_FORGET = "DELETE FROM postroom_lane_counts WHERE group_id = ? AND source = ?"
_OLD = "DELETE FROM postroom_lane_counts WHERE group_id = ? AND bucket < ?"

_Counts = dict[tuple[int, str], Seen]  # by bucket and source


@verbs
class SqlLanes:
    def __init__(self, session: Session) -> None:
        self._session = session
        upsert = session.dialect.upsert
        self._put = upsert(
            "postroom_lanes", ("group_id", "source"), ("since", "failed_at", "handled_at", "reason")
        )
        self._add = upsert(
            "postroom_lane_counts", ("group_id", "source", "bucket"), ("handled", "failed", "spent_ms")
        )

    def state(self, group: Group) -> LaneState:
        with self._session.read(Area.PROGRESS) as tx:
            since = window_start(group.settings.slow_lane, tx.now_ms())
            watched = frozenset(row[0] for row in tx.all(_WATCHED, group.id, since))
            return LaneState(_slow(tx, group.id), watched)

    def count(self, group: Group, counts: Sequence[tuple[int, Seen]]) -> LaneState:
        policy = group.settings.slow_lane
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            self._lock(tx, group.id, policy)
            now = tx.now_ms()
            since = window_start(policy, now)
            known = {(at, row[0]): Seen(*row) for at, *row in tx.all(_COUNTS, group.id, since)}
            fresh = _fresh(policy, since, known, counts)
            self._write(tx, group.id, known, fresh)
            slow = {one.source: one for one in _slow(tx, group.id)}
            changes = decide(policy, now, slow, total(known.values()), total(fresh.values()))
            for one in changes.put:
                row = (one.since, one.failed_at, one.handled_at, one.reason)
                tx.do(self._put, group.id, one.source, *row)
                slow[one.source] = one
            for source in changes.drop:
                tx.do(_RETURN, group.id, source)
                tx.do(_FORGET, group.id, source)
                del slow[source]
        watched = {source for _, source in known} - set(changes.drop)
        return LaneState(tuple(sorted(slow.values(), key=_order)), frozenset(watched))

    def _lock(self, tx: Transaction, group_id: int, policy: LanePolicy) -> None:
        row = tx.locked(_LOCK, group_id)
        bucket = bucket_of(policy, tx.now_ms())
        if row is None:  # two at once: one meets the other's row, and is run again
            tx.do(_FIRST, group_id, bucket)
        elif row[0] != bucket:  # once for each bucket
            tx.do(_CLEANED, bucket, group_id)
            tx.do(_OLD, group_id, window_start(policy, tx.now_ms()))

    def _write(self, tx: Transaction, group_id: int, known: _Counts, fresh: _Counts) -> None:
        """`known` has them from then on."""
        for place, seen in fresh.items():
            known[place] = seen if place not in known else known[place] + seen
        rows = [
            (group_id, source, at, known[at, source].handled, known[at, source].failed,
             known[at, source].spent_ms)
            for at, source in sorted(fresh)
        ]  # fmt: skip
        if rows:
            tx.many(self._add, rows)


def _fresh(policy: LanePolicy, since: int, known: _Counts, counts: Sequence[tuple[int, Seen]]) -> _Counts:
    """Return what is to be added: within the window, and of no more sources than may be watched."""
    watched = {source for _, source in known}
    found: _Counts = {}
    for moment, seen in counts:
        place = (bucket_of(policy, moment), seen.source)
        if place[0] < since or (seen.source not in watched and len(watched) >= MOST_SOURCES):
            continue
        watched.add(seen.source)
        found[place] = seen if place not in found else found[place] + seen
    return found


def _slow(tx: Transaction, group_id: int) -> tuple[SlowSource, ...]:
    return tuple(SlowSource(*row) for row in tx.all(_SLOW, group_id))


def _order(one: SlowSource) -> tuple[int, str]:
    return one.since, one.source
