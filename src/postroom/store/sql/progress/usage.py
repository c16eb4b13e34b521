"""Who uses groups, and how far all of them are: what retention, limits on backlog and expiry go by.

Activity is kept beside progress and need not be flushed: what is lost makes a group seem idle for a minute
more. A group that is to be forgotten is retired first, in the one transaction that finds it idle and without
members; whoever comes after that is told, and begins anew. Must never retire a group that a live member uses
(R44).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack

from ....model.delivery import first_waits
from ....model.delivery.delivery import Span
from ...contract import Backlog, Group
from ..catalog.catalog import SqlCatalog
from ..lists import blanks, each
from ..log.lookups import area_of, first_kept, first_row, log_of, row_at, unknown_partition
from ..schema import log_table
from ..session import Area, Row, Session, Transaction, verbs
from .locked import ProgressRow

__all__ = ["SqlUsage", "log_start_of", "measure"]


_RETIRED = -1  # in place of the moment it was last used: it is being forgotten
_SEEN = "SELECT seen_at FROM postroom_activity WHERE group_id = ?"
_ALL_SEEN = "SELECT group_id, seen_at FROM postroom_activity WHERE seen_at >= 0"
_FIRST = "INSERT INTO postroom_activity (group_id, seen_at) VALUES (?, ?)"
_AGAIN = "UPDATE postroom_activity SET seen_at = ? WHERE group_id = ?"
_LIVE = "SELECT COUNT(*) FROM postroom_members WHERE group_id = ? AND until_ms >= ?"
_LOWEST = """SELECT group_id, partition_id, generation, lowest FROM postroom_progress
             WHERE group_id IN ({marks})"""
_MARKS = """SELECT partition_id, COUNT(*), SUM(lowest), SUM(generation) FROM postroom_progress
            GROUP BY partition_id"""
_BYTES = "base_offset, records, bytes, bytes_before"
_TOTALS = "SELECT id, next_bytes FROM postroom_partitions WHERE state <> 'dropped' AND id IN ({marks})"
_LOOK = """SELECT {number}, {columns} FROM (SELECT {columns} FROM {log} WHERE base_offset <= ?
           ORDER BY base_offset DESC LIMIT 1) AS at_{number}"""
_AT_ONCE = 50  # look-ups in one statement

_At = tuple[int, int]  # a partition and an offset


@verbs
class SqlUsage:
    def __init__(self, session: Session, catalog: SqlCatalog) -> None:
        self._session = session
        self._catalog = catalog  # of the first shard, where groups are

    # ---- activity ----

    def touch(self, group_id: int) -> bool:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            row = tx.locked(_SEEN, group_id)
            if row is None:  # two at once: one meets the other's row, and looks again
                tx.run(_FIRST, group_id, tx.now_ms())
            elif row[0] == _RETIRED:
                return False
            else:
                tx.do(_AGAIN, tx.now_ms(), group_id)
            return True

    def seen(self, of: Collection[int] | None = None) -> dict[int, int]:
        with self._session.read(Area.PROGRESS) as tx:
            return dict(each(tx, _ALL_SEEN, "group_id", of))

    def retire(self, group_id: int, idle_ms: int) -> bool:
        with self._session.write(Area.PROGRESS) as tx:
            row = tx.locked(_SEEN, group_id)
            now = tx.now_ms()
            if row is None:  # its activity was lost: it counts from now on
                tx.run(_FIRST, group_id, now)
                return False
            live = tx.one(_LIVE, group_id, now)
            if row[0] > now - idle_ms or (live and live[0]):
                return False
            tx.do(_AGAIN, _RETIRED, group_id)
            return True

    # ---- backlog ----

    def marks(self) -> dict[int, tuple[int, ...]]:
        with self._session.read(Area.PROGRESS) as tx:
            return {place: tuple(map(int, rest)) for place, *rest in tx.all(_MARKS)}

    def committed(self, groups: Sequence[Group], partition_ids: Sequence[int]) -> dict[int, dict[int, int]]:
        if not groups:
            return {}
        ids = [group.id for group in groups]
        marks = blanks(len(ids))
        with self._session.read(Area.PROGRESS) as tx:  # before the starts, which only a reset moves
            rows = tx.all(_LOWEST.format(marks=marks), *ids)
        starts = self._catalog.starts(ids)
        found = {
            g.id: {place: starts.get((g.id, place), (0, 0))[0] for place in partition_ids} for g in groups
        }
        for group_id, place, generation, lowest in rows:
            if generation >= starts.get((group_id, place), (0, 0))[1] and place in found[group_id]:
                found[group_id][place] = lowest
        return found

    def bytes_from(self, positions: Sequence[Mapping[int, int]]) -> list[int]:
        places: dict[Area, set[_At]] = {}
        for partition_id, offset in {place for position in positions for place in position.items()}:
            places.setdefault(area_of(self._session, partition_id), set()).add((partition_id, offset))
        left: dict[_At, int] = {}
        for area, wanted in places.items():
            left |= self._bytes_left(area, sorted(wanted))
        return [sum(left[place] for place in position.items()) for position in positions]

    def _bytes_left(self, area: Area, places: list[_At]) -> dict[_At, int]:
        ids = sorted({partition_id for partition_id, _ in places})
        found: dict[_At, int] = {}
        with ExitStack() as stack:
            for partition_id in ids:
                stack.enter_context(log_of(self._session, partition_id))
            tx = stack.enter_context(self._session.read(area))
            totals: dict[int, int] = dict(tx.all(_TOTALS.format(marks=blanks(len(ids))), *ids))
            rows = _batches_at(tx, places)
            for place in places:
                if place[0] not in totals:
                    raise unknown_partition(place[0])
                at = rows.get(place) or first_kept(tx, place[0], _BYTES)
                found[place] = 0 if at is None else _left(place[1], totals[place[0]], at)
        return found


def _batches_at(tx: Transaction, places: list[_At]) -> dict[_At, Row]:
    """The batch at or before each place: many look-ups by primary key in one statement."""
    found: dict[_At, Row] = {}
    for start in range(0, len(places), _AT_ONCE):
        part = places[start : start + _AT_ONCE]
        looks = (
            _LOOK.format(number=number, log=log_table(partition_id), columns=_BYTES)
            for number, (partition_id, _) in enumerate(part)
        )
        for number, *row in tx.all(" UNION ALL ".join(looks), *(offset for _, offset in part)):
            found[part[number]] = tuple(row)
    return found


def _left(offset: int, total: int, at: Row) -> int:
    base, records, length, before = at
    done = min(max(offset - base, 0), records)
    return max(0, int(total - before - length * done // records))


# How far behind a group is, from a few look-ups by primary key: no scan (R43).

_EDGE = "SELECT next_offset, next_bytes, state FROM postroom_partitions WHERE id = ?"
_AT = "base_offset, records, bytes, bytes_before, appended_at"


def log_start_of(tx: Transaction, partition_id: int) -> int:
    row = tx.one("SELECT log_start FROM postroom_trims WHERE partition_id = ?", partition_id)
    return int(row[0]) if row else 0


def measure(
    tx: Transaction,
    partition_id: int,
    row: ProgressRow,
    committed: int,
    unsettled: int,
    spans: tuple[Span, ...],
) -> Backlog:
    now = tx.now_ms()
    partition = tx.one(_EDGE, partition_id)
    end, total, state = partition or (0, 0, "")
    size, age = _behind(tx, partition_id, committed, total, now) if committed < end else (0, 0)
    return Backlog(
        partition_id=partition_id,
        committed=committed,
        cursor=row.cursor,
        end=end,
        unsettled=unsettled,
        bytes=size,
        oldest_age_ms=age,
        first_wait_ms=row.first_wait_ms,
        first_waits=first_waits.recent(
            row.first_waits, now_ms=now, period_ms=tx.dialect.tuning.first_waits_ms
        ),
        arrival_per_s=_arrival_per_s(tx, partition_id, end - int(state == "sealed"), now),
        drain_per_s=row.drain_per_s(now),
        open=spans,
        sealed=state == "sealed",
    )


def _behind(tx: Transaction, partition_id: int, committed: int, total: int, now: int) -> tuple[int, int]:
    """Bytes from the committed offset on, and the age of what is there; part of a batch counts in part."""
    at = row_at(tx, partition_id, committed, _AT) or first_kept(tx, partition_id, _AT)
    if at is None:
        return 0, 0
    base, records, length, before, appended_at = at
    done = min(max(committed - base, 0), records)
    return total - before - length * done // records, max(0, now - appended_at)


def _arrival_per_s(tx: Transaction, partition_id: int, end: int, now: int) -> float:
    oldest = first_kept(tx, partition_id, "appended_at")
    most_ms = tx.dialect.tuning.arrival_ms
    window_ms = min(most_ms, now - oldest[0]) if oldest else 0
    arrived = end - first_row(tx, partition_id, "appended_at", now - most_ms)
    return 1000 * max(0, arrived) / max(window_ms, 1000)
