"""A group's progress in a partition, under its lock: one row, and the deliveries below its cursor.

The row is locked first (I1), and made from the group's start when the partition is first touched in a
generation. What must be durable is known only once it is decided (I8): whoever finds so asks for a
flushed transaction and is run again.

No read of deliveries begins at the beginning: the row keeps the lowest unsettled offset, and reads start
there, by primary key. Behind an old snapshot a database has to step over all that was ever deleted, and an
index on `visible_at` would only lead it there (I19). So the row keeps the moment when the first delivery is
due as well: exactly, while there are few; of many a moment before which none is due, looked up once it has
passed, in one go over all of them, and no more often than that is cheap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from ....errors import GenerationChanged
from ....model.delivery import first_waits, settlement
from ....model.delivery.delivery import NOBODY, Change, Delivery, Holder, Line, Span, Stamp, renewed
from ....model.delivery.ordered import FAR
from ...contract import Granted, Group, Origin
from ..lists import blanks, padded
from ..session import Area, Transaction

__all__ = [
    "DELIVERY",
    "MAKE",
    "ROW",
    "UNSETTLED",
    "Locked",
    "NeedsFlushError",
    "NeedsStartError",
    "ProgressRow",
    "held_under",
    "lines_of",
    "lock",
    "lock_each",
    "reset_meanwhile",
    "stopped_below",
]


_COLUMNS = (
    "generation", "next_new", "lowest", "next_due", "deliveries", "settled", "first_wait_ms", "first_waits",
    "sampled_at", "sampled", "earlier_at", "earlier", "drained", "recalled", "delivered_from", "parked_from",
    "parked", "holder_token", "holder", "holder_until",
)  # fmt: skip
_ROW_KEY = "group_id = ? AND partition_id = ?"
ROW = f"SELECT {', '.join(_COLUMNS)} FROM postroom_progress WHERE {_ROW_KEY}"
MAKE = f"""INSERT INTO postroom_progress (group_id, partition_id, {", ".join(_COLUMNS)})
            VALUES (?, ?, {blanks(len(_COLUMNS))})"""
_SAVE = f"UPDATE postroom_progress SET {', '.join(f'{c} = ?' for c in _COLUMNS)} WHERE "
_LOCK = f"SELECT {', '.join(_COLUMNS)} FROM postroom_progress WHERE "
_TABLE, _KEY_COLUMNS = "postroom_progress", ("group_id", "partition_id")


def lock(tx: Transaction, key: tuple[int, int]) -> Sequence[Any] | None:
    """Lock the row and return its columns, or None if there is no such row.

    It is changed by every poll and ack, and its past versions may pile up (I19).
    """
    return tx.locked(tx.dialect.newest(_LOCK, _TABLE, _KEY_COLUMNS), *key, key[-1])


InFlight = dict[tuple[int, int], list[Delivery]]
"""What tokens have in flight, by partition and token, lowest offset first."""


def lock_each(
    tx: Transaction, group_id: int, partition_ids: Sequence[int], tokens: Sequence[tuple[int, int]]
) -> tuple[Sequence[Sequence[Any] | None], InFlight]:
    """Lock the rows of several partitions, in this order; return their columns, and what these tokens have.

    A server is asked for that together with the locks, which saves a round trip. Where there is none, nothing
    is asked for that may not be needed.
    """
    sql = tx.dialect.newest(_LOCK, _TABLE, _KEY_COLUMNS)
    in_flight: InFlight = {} if tx.dialect.quick else {pair: [] for pair in tokens}
    then = [(_IN_FLIGHT, (token, group_id, partition_id)) for partition_id, token in in_flight]
    rows, found = tx.locked_each(sql, [(group_id, one, one) for one in partition_ids], then)
    for partition_id, *raw in sorted(found):
        one = _delivery(tuple(raw))
        in_flight[partition_id, one.token].append(one)
    return rows, in_flight


_NO_HOLDER = Holder()


@dataclass(slots=True)
class ProgressRow:
    """The progress row of a group and a partition: its columns, and what is counted in them.

    It is the lock of every progress verb (I1). Besides the cursor it keeps what reads would have to look for:
    where the deliveries begin, when the first of them is due, who holds the partition (I5, I19), and where
    the parked lines begin (I27). The column `lowest` is what others read: the lowest offset that is
    unsettled, be it in a delivery or in a line.
    """

    generation: int
    cursor: int
    lowest: int  # the lowest offset of a delivery; the cursor if there is none
    next_due: int | None
    deliveries: int = 0  # how many there are
    settled: int = 0
    first_wait_ms: int = 0
    first_waits: str = ""
    sampled_at: int = 0
    sampled: int = 0
    earlier_at: int = 0
    earlier: int = 0
    drained: int = 0  # a sealed partition: all of it is settled, and that was flushed (I10)
    recalled: int = 0  # ordered groups: what its holder has received of a stopped key is out of date
    holder: Holder = _NO_HOLDER  # ordered groups
    parked_from: int | None = None  # ordered groups: the lowest offset of a parked line (I27)
    parked: int = 0  # and how many messages wait in them

    @staticmethod
    def of(raw: Sequence[Any]) -> ProgressRow:
        row = ProgressRow(*raw[:-6])
        row.lowest, row.parked_from, row.parked = raw[-6:-3]
        row.holder = Holder(*raw[-3:])
        return row

    @property
    def committed(self) -> int:
        """The lowest unsettled offset; the cursor if there is none."""
        return self.lowest if self.parked_from is None else min(self.lowest, self.parked_from)

    @property
    def columns(self) -> tuple[Any, ...]:
        return (
            self.generation, self.cursor, self.committed, self.next_due, self.deliveries, self.settled,
            self.first_wait_ms, self.first_waits, self.sampled_at, self.sampled, self.earlier_at,
            self.earlier, self.drained, self.recalled, self.lowest, self.parked_from, self.parked,
            self.holder.token, self.holder.member, self.holder.until,
        )  # fmt: skip

    def sample(self, now: int, every_ms: int) -> None:
        if now - self.sampled_at >= every_ms:
            self.earlier_at, self.earlier = (
                (self.sampled_at, self.sampled) if self.sampled_at else (now, self.settled)
            )
            self.sampled_at, self.sampled = now, self.settled

    def drain_per_s(self, now: int) -> float:
        passed = now - self.earlier_at
        return 1000 * (self.settled - self.earlier) / passed if self.earlier_at and passed > 0 else 0.0


_NEAR = 1000  # spans no further apart than this are read at once
_LOOKED_AT = 10_000  # deliveries of others, to say who lost what
_CLUSTERS = 64  # spans far apart from each other that are read one by one
_FEW = 256  # deliveries that may be looked through whenever it helps

_OF_DELIVERY = """first_offset, last_offset, visible_at, token, holder, spent, failures, suspect, alone,
                  stamp_producer, stamp_partition, reason, failing_since, stamp_due"""
_KEY = "group_id = ? AND partition_id = ?"

DELIVERY = f"SELECT {_OF_DELIVERY} FROM postroom_deliveries WHERE {_KEY} AND first_offset >= ?"
UNSETTLED = f"""SELECT MIN(first_offset),
                       SUM(last_offset - CASE WHEN first_offset < ? THEN ? ELSE first_offset END + 1),
                       SUM(CASE WHEN visible_at >= ? THEN last_offset - first_offset + 1 ELSE 0 END),
                       MIN(CASE WHEN visible_at >= ? THEN failing_since END)
                FROM postroom_deliveries WHERE {_KEY} AND first_offset >= ? AND last_offset >= ?"""
# a delivery that begins before an offset may reach over it: the nearest one does, if any
_FROM = f"""SELECT {_OF_DELIVERY} FROM postroom_deliveries WHERE {_KEY}
            AND first_offset <= ? AND first_offset >= COALESCE(
              (SELECT MAX(first_offset) FROM postroom_deliveries
               WHERE {_KEY} AND first_offset >= ? AND first_offset <= ?), ?)"""
_FIRST_FEW = "ORDER BY first_offset LIMIT ?"
# by the index on tokens: with an order or a bound SQLite would go through all deliveries instead
_HELD = f"SELECT {_OF_DELIVERY} FROM postroom_deliveries WHERE token = ? AND {_KEY}"
_IN_FLIGHT = f"SELECT partition_id, {_OF_DELIVERY} FROM postroom_deliveries WHERE token = ? AND {_KEY}"
_LOWEST = f"SELECT MIN(first_offset) FROM postroom_deliveries WHERE {_KEY} AND first_offset >= ?"
_EARLIEST = f"SELECT MIN(visible_at) FROM postroom_deliveries WHERE {_KEY} AND first_offset >= ?"
_LATER = f"{_EARLIEST} AND visible_at > ?"
_STAMPED = f"{_EARLIEST} AND stamp_producer IS NOT NULL"
_INSERT = f"""INSERT INTO postroom_deliveries (group_id, partition_id, {_OF_DELIVERY})
              VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"""
_DELETE = f"DELETE FROM postroom_deliveries WHERE {_KEY} AND first_offset IN ({{marks}})"
_DELETE_ALL = f"DELETE FROM postroom_deliveries WHERE {_KEY}"

_LINES = f"SELECT line, line_key, first_offset, last_offset, messages FROM postroom_parked WHERE {_KEY}"
_MAKE_LINE = """INSERT INTO postroom_parked
                (line_key, first_offset, last_offset, messages, group_id, partition_id, line)
                VALUES (?, ?, ?, ?, ?, ?, ?)"""
_SAVE_LINE = f"""UPDATE postroom_parked SET line_key = ?, first_offset = ?, last_offset = ?, messages = ?
                 WHERE {_KEY} AND line = ?"""
_DROP_LINE = f"DELETE FROM postroom_parked WHERE {_KEY} AND line = ?"
_DROP_LINES = f"DELETE FROM postroom_parked WHERE {_KEY}"
_FIRST_LINE = f"SELECT MIN(first_offset) FROM postroom_parked WHERE {_KEY}"

_FIRST, _VISIBLE_AT = attrgetter("first"), attrgetter("visible_at")

_NO_LIMIT = 2**31 - 1
_SIZES = (1, 4, 16, 64)  # of deletes: few different statements, and few round trips


class NeedsStartError(Exception):
    """A partition was not touched in this generation: its start must be read from the catalog."""

    def __init__(self, partition_id: int, generation: int | None) -> None:
        super().__init__()
        self.partition_id = partition_id
        self.generation = generation  # in which it was touched last; None: it never was


class NeedsFlushError(Exception):
    """The decision must be durable: it is made again in a flushed transaction."""


class Locked:
    """A group's progress in a partition, locked, in this group's generation.

    What is changed is written by `apply`, and the row itself at last by `save`.
    """

    def __init__(
        self,
        tx: Transaction,
        group: Group,
        partition_id: int,
        raw: Sequence[Any] | None,
        origin: Origin | None,
        flush: bool,
        in_flight: InFlight | None = None,
    ) -> None:
        """`raw`: the columns of its row, which is locked; None: it has none. `in_flight`: read with it."""
        self._tx, self.tuning = tx, tx.dialect.tuning
        self._key = (group.id, partition_id)
        self._flush = flush
        self._ordered = group.settings.mode == "ordered"
        self._seen: dict[int, Delivery] = {}  # what was read, by its first offset
        self._in_flight = {} if in_flight is None else in_flight
        self._changed = False
        self.now = tx.now_ms()
        if raw is not None and raw[0] > group.generation:
            raise reset_meanwhile(group)
        if raw is not None and raw[0] == group.generation:
            self.row = ProgressRow.of(raw)
            return
        if origin is None:
            raise NeedsStartError(partition_id, None if raw is None else raw[0])
        self.must_flush()
        if raw is not None and raw[0] >= origin.since:  # a reset has left this partition where it is
            self.row = ProgressRow.of(raw)
            self.row.generation = group.generation
            self._changed = True
            return
        self.row = ProgressRow(group.generation, origin.start, origin.start, None)
        self.row.sample(self.now, self.tuning.drain_sample_ms)
        self._begin(raw is None)

    def _begin(self, new: bool) -> None:
        """Two that insert the row at once meet a violation of its key: one of them is run again (I1)."""
        if new:
            self._tx.do(MAKE, *self._key, *self.row.columns)
        else:
            self._tx.do(_DELETE_ALL, *self._key)
            self._tx.do(_DROP_LINES, *self._key)
            self._changed = True

    def must_flush(self) -> None:
        if not self._flush:
            raise NeedsFlushError

    def announce(self) -> None:
        """Others may be handed something now."""
        self._tx.announce(Area.PROGRESS)

    def safe_from(self, lease_ms: int) -> int:
        """No lease that has ended is taken from its holder before then.

        A start of the database, or a failover, may have lost renewals (I8), and its clock may have been set
        (I26): whoever lives renews within a lease.
        """
        moments = (self._tx.started_ms(), self._tx.dialect.stepped_ms())
        return max((one for one in moments if one <= self.now), default=0) + lease_ms  # else it was set back

    # ---- reading ----

    def _read(self, sql: str, *args: Any) -> list[Delivery]:
        if self.row.lowest == self.row.cursor:  # everything is settled
            return []
        found = list(map(_delivery, self._tx.all(sql, *args)))
        for one in found:
            self._seen[one.first] = one
        return found

    def where(self, condition: str, *args: Any, limit: int = _NO_LIMIT) -> list[Delivery]:
        """Deliveries of which this holds, lowest offset first."""
        sql = f"{DELIVERY} AND {condition} {_FIRST_FEW}"
        return self._read(sql, *self._key, self.row.lowest, *args, limit)

    def held(self, token: int) -> list[Delivery]:
        known = self._in_flight.pop((self._key[1], token), None)  # once: then it may have changed
        if known is None or self.row.lowest == self.row.cursor:
            return sorted(self._read(_HELD, token, *self._key), key=_FIRST)
        self._seen.update((one.first, one) for one in known)
        return known

    def reaching(
        self, low: int, high: int, condition: str = "1 = 1", *, limit: int = _NO_LIMIT
    ) -> list[Delivery]:
        """Deliveries with an offset from `low` to `high`, lowest first; the first may end before `low`."""
        sql = f"{_FROM} AND {condition} {_FIRST_FEW}"
        return self._read(sql, *self._key, high, *self._key, self.row.lowest, low, low, limit)

    def near(self, spans: Sequence[Span], *, limit: int = _NO_LIMIT) -> list[Delivery]:
        """At least the deliveries with an offset in these spans; spans far from each other apart.

        Nothing is looked for where no delivery can be, and no more than so many are found.
        """
        found: list[Delivery] = []
        here = [(max(a, self.row.lowest), min(z, self.row.cursor)) for a, z in spans]
        for low, high in _clusters([(a, z) for a, z in here if a <= z]):
            some = self.reaching(low, high, limit=min(limit - len(found) + 1, _NO_LIMIT))
            found += (d for d in some if not found or d.first > found[-1].first)
            if len(found) >= limit:
                return found[:limit]
        return found

    @property
    def looks(self) -> bool:
        """Return whether something may be due."""
        return self.row.next_due is not None and self.row.next_due <= self.now

    def safe(self, due: list[Delivery], lease_ms: int) -> list[Delivery]:
        """Without what may be held still (I8, I26)."""
        held = [d for d in due if d.token != NOBODY and d.stamp is None]
        if not held or self.now >= self.safe_from(lease_ms):
            return due
        return [d for d in due if d not in held]

    def due_when_safe(self, lease_ms: int) -> int:
        """Return when something can be handed out again while what is due may be held still."""
        found = self._tx.one(_LATER, *self._key, self.row.lowest, self.now)
        later = None if found is None else found[0]
        safe_from = self.safe_from(lease_ms)
        return safe_from if later is None else min(safe_from, int(later))

    def in_other_hands(self, spans: Sequence[Span], token: int) -> tuple[Span, ...]:
        """Which of these offsets are unsettled and held by somebody else, or by nobody (I7).

        From the cursor on nothing was handed out, or a crash forgot it (I8): that is unsettled too. Of a span
        with more deliveries than anybody holds, what lies behind the first of them counts as theirs.
        """
        if not spans:
            return ()
        near = self.near(spans, limit=_LOOKED_AT)
        reach = near[-1].last if len(near) == _LOOKED_AT else self.row.cursor - 1
        others = [d for d in near if d.token != token]
        beyond = [(max(first, reach + 1), last) for first, last in spans if last > reach]
        return (*settlement.covered(spans, others), *beyond)

    # ---- writing ----

    def hand_out_again(self, held: Sequence[Delivery], lease_ms: int) -> Granted:
        """The reply to the first poll was lost. The asker counts its lease from this one (I6, I16)."""
        spans = [(d.first, d.last) for d in held]
        until = renewed(self.now + lease_ms, max(d.visible_at for d in held))
        change = settlement.extend(held, spans, until, self.row.cursor)
        self.apply(change)
        return Granted(change.put, next_due=self.row.next_due, again=True, until=until)

    def skip_to(self, log_start: int) -> None:
        """Pass over what retention took away."""
        if self.row.parked_from is not None and self.row.parked_from < log_start:
            self._cut_lines(log_start)
        if log_start <= self.row.lowest:
            return
        old = self.where("first_offset < ?", log_start)
        gone = sum(min(d.last, log_start - 1) - d.first + 1 for d in old)
        rest = tuple(d.part(log_start, d.last) for d in old if d.last >= log_start)
        self.apply(
            Change(
                cursor=max(self.row.cursor, log_start),
                drop=tuple(d.first for d in old),
                put=rest,
                settled=gone,
            )
        )

    def hold(self, holder: Holder) -> None:
        """Ordered groups: who holds the partition from now on."""
        self.row.holder = holder
        self._changed = True

    def drained(self) -> None:
        """A sealed partition: everything is settled. Durable, since this transaction is flushed (I10)."""
        self.row.drained = 1
        self._changed = True
        self.announce()

    def look_at(self, moment: int) -> None:
        """Ordered groups: polls from then on look at everything that is unsettled, until `look_up_due`."""
        self.row.next_due = moment if self.row.next_due is None else min(self.row.next_due, moment)
        self._changed = True

    def apply(self, change: Change) -> None:
        """Write a change of deliveries that were read here."""
        for some in padded(change.drop, _SIZES):
            self._tx.do(_DELETE.format(marks=blanks(len(some))), *self._key, *some)
        if change.put:
            self._tx.many(_INSERT, [(*self._key, *_columns(d)) for d in change.put])
        self._follow(change)
        for first in change.drop:
            self._seen.pop(first, None)
        for one in change.put:
            self._seen[one.first] = one
        self.row.cursor = change.cursor
        self.row.settled += change.settled
        self._changed = True

    def _follow(self, change: Change) -> None:
        """Keep `lowest` and `next_due`. They are looked up only where the lowest or the earliest is gone."""
        row = self.row
        row.deliveries += len(change.put) - len(change.drop)
        first = min(map(_FIRST, change.put), default=change.cursor)
        if row.lowest == row.cursor:  # there was nothing: all there is now was put
            row.lowest = first
            row.next_due = self._earliest(change.put)
            return
        if first < row.lowest:  # out of a parked line
            row.lowest = first
        elif row.lowest in change.drop and first != row.lowest:
            lowest = None if self._drops_all(change) else self._minimum(_LOWEST)
            row.lowest = change.cursor if lowest is None else lowest
        if row.lowest == change.cursor:
            row.next_due = None
            return
        added = self._earliest(change.put)
        if added is not None and (row.next_due is None or added <= row.next_due):
            row.next_due = added
        elif not self._ordered and row.deliveries <= _FEW:
            gone = min((self._seen[first].visible_at for first in change.drop), default=None)
            if gone == row.next_due:
                row.next_due = self._minimum(_EARLIEST)

    def _drops_all(self, change: Change) -> bool:
        """Return whether what is dropped reaches from the lowest offset to the cursor: nothing is left."""
        reach = self.row.lowest
        for first in sorted(change.drop):
            if first != reach:
                return False
            reach = self._seen[first].last + 1
        return reach == self.row.cursor and not change.put

    def look_up_due(self) -> None:
        """Find when the first delivery is due, after everything that is due has been looked at."""
        row = self.row
        before = row.next_due
        row.next_due = None if row.lowest == row.cursor else self._earliest_of_all()
        self._changed = self._changed or row.next_due != before

    def _earliest_of_all(self) -> int | None:
        earliest = self._minimum(_STAMPED if self._ordered else _EARLIEST)
        if earliest is None or earliest <= self.now or self.row.deliveries <= _FEW:
            return earliest
        return max(earliest, self.now + self.row.deliveries // self.tuning.due_scan_per_ms)

    def _minimum(self, sql: str) -> int | None:
        found = self._tx.one(sql, *self._key, self.row.lowest)
        return None if found is None or found[0] is None else int(found[0])

    def _earliest(self, deliveries: Sequence[Delivery]) -> int | None:
        """In an ordered group only a stamped delivery is due by itself."""
        due = [one for one in deliveries if one.stamp is not None] if self._ordered else deliveries
        return min(map(_VISIBLE_AT, due), default=None)

    # ---- parked lines (I27) ----

    def lines(self, line_id: int | None = None) -> list[Line]:
        """All of them, lowest offset first, or the one of that id."""
        if self.row.parked_from is None:
            return []
        if line_id is None:
            rows = self._tx.all(f"{_LINES} ORDER BY first_offset", *self._key)
        else:
            rows = self._tx.all(f"{_LINES} AND line = ?", *self._key, line_id)
        return [line_of(raw) for raw in rows]

    def change_line(self, before: Line | None, after: Line | None) -> None:
        """Make, change or drop a line that was read here."""
        if after is not None:
            columns = (after.key, after.first, after.last, after.messages, *self._key, after.id)
            self._tx.do(_MAKE_LINE if before is None else _SAVE_LINE, *columns)
        elif before is not None:
            self._tx.do(_DROP_LINE, *self._key, before.id)
        row = self.row
        row.parked += (after.messages if after else 0) - (before.messages if before else 0)
        if row.parked_from is None:
            row.parked_from = None if after is None else after.first
        else:
            found = self._tx.one(_FIRST_LINE, *self._key)
            row.parked_from = None if found is None else found[0]
        self._changed = True

    def _cut_lines(self, log_start: int) -> None:
        for line in self.lines():
            if line.first < log_start:
                rest = None if line.last < log_start else replace(line, first=log_start)
                self.change_line(line, rest)
                self.row.settled += 0 if rest else line.messages

    def note_wait(self, waited_ms: int, messages: int) -> None:
        """Note that messages are handed out for the first time; the oldest of them had waited so long."""
        row, period_ms = self.row, self.tuning.first_waits_ms
        row.first_wait_ms = waited_ms
        row.first_waits = first_waits.noted(
            row.first_waits, waited_ms, messages, now_ms=self.now, period_ms=period_ms
        )

    def save(self) -> None:
        if self._changed:
            self.row.sample(self.now, self.tuning.drain_sample_ms)
            sql = self._tx.dialect.at_newest(_SAVE, _TABLE, _KEY_COLUMNS)
            self._tx.do(sql, *self.row.columns, *self._key, self._key[-1])


def _clusters(spans: Sequence[Span]) -> list[Span]:
    found: list[Span] = []
    for first, last in sorted(spans):
        if found and first - found[-1][1] <= _NEAR:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return found if len(found) <= _CLUSTERS else [(found[0][0], max(last for _, last in found))]


def held_under(tx: Transaction, group_id: int, partition_id: int, token: int) -> list[Delivery]:
    """Return what has this token, lowest offset first; without a lock."""
    rows = tx.all(_HELD, token, group_id, partition_id)
    return sorted(map(_delivery, rows), key=_FIRST)


def line_of(raw: tuple[Any, ...]) -> Line:
    line_id, key, first, last, messages = raw
    return Line(line_id, None if key is None else bytes(key), first, last, messages)


def lines_of(tx: Transaction, group_id: int, partition_id: int) -> list[Line]:
    """The parked lines, lowest offset first; without a lock."""
    return [line_of(raw) for raw in tx.all(f"{_LINES} ORDER BY first_offset", group_id, partition_id)]


def stopped_below(
    tx: Transaction, key: tuple[int, int], lowest: int, after: int, limit: int
) -> list[Delivery]:
    """Ordered groups: what stopped, of the offsets behind `after`, lowest first; without a lock."""
    where = f"{DELIVERY} AND last_offset > ? AND visible_at >= ? {_FIRST_FEW}"
    return [_delivery(raw) for raw in tx.all(where, *key, lowest, after, FAR, limit)]


def _delivery(raw: tuple[Any, ...]) -> Delivery:
    first, last, at, token, holder, spent, failures, *rest = raw
    suspect, alone, producer, partition, reason, since, due = rest
    stamp = None if producer is None else Stamp(producer, partition, due)
    flags = bool(suspect), bool(alone)
    return Delivery(first, last, at, token, holder, spent, failures, *flags, stamp, reason, since)


def _columns(d: Delivery) -> tuple[Any, ...]:
    stamp = d.stamp
    producer, partition, due = (
        (stamp.producer_id, stamp.partition_id, stamp.due_at) if stamp else (None, None, 0)
    )
    return (
        d.first, d.last, d.visible_at, d.token, d.holder, d.spent, d.failures, int(d.suspect), int(d.alone),
        producer, partition, d.reason, d.failing_since, due,
    )  # fmt: skip


def reset_meanwhile(group: Group) -> GenerationChanged:
    return GenerationChanged(
        f"group {group.name!r} of topic {group.topic!r} was reset or deleted meanwhile; poll again",
        topic=group.topic,
        group=group.name,
    )
