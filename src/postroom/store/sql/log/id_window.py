"""Which ids a partition has seen of late (R32): the window in memory, and the rows it is made from.

The truth is in the rows: a batch's ids are stored beside it. Memory follows: it is loaded before the
partition is locked, and under the lock only rows that it has not seen are read (I13), those of other
processes among them. It learns of a commit after the commit, never before, so whatever becomes of a
transaction, what is remembered is stored (I2). What is found missing under the lock, and would take long to
read there, ends the transaction: it is read without the lock, and the verb is run again.

Must never make anybody wait for a database while it holds its own lock.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ....config import DEFAULTS, Limits
from ....errors import StoreUnavailable, UnknownPartition
from ....model.messages.ids import NO_FLOOR, IdTable, Window, split
from ....model.policy.settings import GroupSettings
from ....model.topology.names import base_of
from ..catalog.catalog import SqlCatalog
from ..lists import blanks
from ..schema import log_table
from ..session import Area, Row, Session, Transaction
from .lookups import area_of, first_row, reading_log, row_at

__all__ = ["DelayedIds", "Kept", "NotPreparedError", "StoredIds", "Windows", "ids_of"]


_WAITING_ROWS = """SELECT id, COALESCE(ids, id_hash) FROM postroom_schedule
           WHERE partition_id = ? AND id > ? ORDER BY id LIMIT ?"""
_ROW = "SELECT COALESCE(ids, id_hash) FROM postroom_schedule WHERE id = ?"
_COUNT = "SELECT SUM(messages) FROM postroom_delayed WHERE partition_id = ?"

_PAGE = 200  # rows whose ids are read at once
_STALE = 10_000  # ids of rows that are gone, and as many again as wait: then all are read anew


def ids_of(tx: Transaction, row_id: int) -> Sequence[bytes]:
    """The ids that a row of the schedule has now; none if it is gone."""
    row = tx.one(_ROW, row_id)
    return () if row is None or row[0] is None else split(bytes(row[0]))


class DelayedIds:
    """The ids of a partition's delayed messages: one that waits in the schedule is a repeat for whoever sends
    it again (I13).

    Kept in memory and topped up under the partition's lock, as the window is. A row of the schedule leaves it
    when it is moved to a log, or cancelled: so what is found here is looked up in the schedule before it
    counts, and an id that was cancelled may be sent again. Rows of one partition are made under its lock, so
    their numbers grow in the order of the commits. The lock that its verbs are given is that of `Windows`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._table = IdTable()
        self._numbers = array("q")  # from a number of the table on …
        self._rows = array("q")  # … ids are of this row

    def __len__(self) -> int:
        return len(self._table)

    @property
    def _seen(self) -> int:
        return self._rows[-1] if self._rows else 0

    def known(self, digests: Sequence[bytes]) -> list[bytes]:
        """Return those of these ids that may wait in the schedule."""
        return self._table.known(digests) if len(self._table) else []

    def row_of(self, digest: bytes) -> int:
        """The row of the schedule that has, or had, a message with that id; -1 if none is known."""
        number = self._table.number(digest)
        return self._rows[bisect_right(self._numbers, number) - 1] if number >= 0 else -1

    # ---- without the partition's lock ----

    def load(self, session: Session, partition_id: int, lock: threading.Lock) -> None:
        full = True
        while full:
            with session.read(Area.LOG) as tx:
                rows = tx.all(_WAITING_ROWS, partition_id, self._seen, _PAGE)
            with lock:
                self._see(rows)
            full = len(rows) == _PAGE

    def tidy(self, session: Session, partition_id: int, lock: threading.Lock) -> None:
        """Read all anew once most of it is of rows that are gone."""
        if len(self._table) <= _STALE:
            return
        with session.read(Area.LOG) as tx:
            row = tx.one(_COUNT, partition_id)
        if len(self._table) > 2 * int(row[0] or 0 if row else 0) + _STALE:
            fresh = DelayedIds(self._limit)
            fresh.load(session, partition_id, lock)
            with lock:
                self._table, self._numbers, self._rows = fresh._table, fresh._numbers, fresh._rows

    # ---- under the partition's lock ----

    def top_up(self, tx: Transaction, partition_id: int, lock: threading.Lock) -> bool:
        """Read what was scheduled since; False if there is more than can be read here."""
        rows = tx.all(_WAITING_ROWS, partition_id, self._seen, _PAGE)
        with lock:
            self._see(rows)
        return len(rows) < _PAGE

    def _see(self, rows: Sequence[Row]) -> None:
        for row_id, ids in rows:
            if row_id > self._seen:
                self._numbers.append(self._table.add(bytes(ids or b"")))
                self._rows.append(int(row_id))
        if len(self._table) > self._limit:  # the newest count
            self._table.forget_below(self._table.end - self._limit)
            gone = bisect_right(self._numbers, self._table.start) - 1
            del self._numbers[:gone], self._rows[:gone]


_ROWS = """SELECT base_offset, records, appended_at, ids FROM {log}
           WHERE base_offset >= ? AND base_offset < ? ORDER BY base_offset"""
_NEXT = "SELECT MIN(base_offset) FROM {log} WHERE base_offset >= ?"
_END = "SELECT next_offset FROM postroom_partitions WHERE id = ?"
_LOWEST = """SELECT group_id, generation, lowest FROM postroom_progress
             WHERE partition_id = ? AND group_id IN ({marks})"""


_SLICE = 32_768  # messages whose ids are read at once: half a megabyte
_NEAR = 32_768  # messages whose ids may be read under the lock


class NotPreparedError(Exception):
    """Something must be read before the partition is locked: prepare, and do it again."""


class StoredIds(NamedTuple):
    """A row of the log without its batch."""

    base: int
    records: int
    appended_at: int
    ids: bytes | None
    digests: Sequence[bytes] | None = None  # the same one by one, if somebody had to cut them apart


@dataclass(slots=True)
class Kept:
    """A partition's ids, as far as they are in memory."""

    window: Window
    window_ms: int  # the time it covers
    floor: int  # from here on some group has something to settle, as of the last look
    looked_at: int
    waiting: DelayedIds
    used_at: int = 0
    before: tuple[int, ...] = ()  # sealed partitions that this one follows: their ids count too (I13)


@dataclass(slots=True)
class Windows:
    """The id windows of a store. Any thread may use them; `lock` is held for moments, never while a database
    is asked."""

    session: Session
    catalog: SqlCatalog  # of the first shard, where groups are
    limits: Limits = DEFAULTS
    lock: threading.Lock = field(default_factory=threading.Lock)
    elsewhere: Callable[[int], Windows] | None = None  # whose window a partition has, if there are several
    _kept: dict[int, Kept] = field(default_factory=dict)
    _tidied_at: int = 0

    def kept(self, partition_id: int) -> Kept | None:
        return self._kept.get(partition_id)

    def forget(self, partition_id: int) -> None:
        self._kept.pop(partition_id, None)

    def at(self, partition_id: int) -> Windows:
        return self if self.elsewhere is None else self.elsewhere(partition_id)

    # ---- without the partition's lock ----

    def prepare(self, partition_id: int, window_ms: int) -> None:
        """Bring into memory what is missing; now and then, look what may be forgotten."""
        now = self.session.now_ms()
        kept = self._kept.get(partition_id)
        if kept is None or kept.window_ms < window_ms:
            self._kept[partition_id] = self._loaded(partition_id, window_ms)
        elif not 0 <= now - kept.looked_at < self.session.tuning.ids_check_ms:
            self._look(partition_id, kept, window_ms, now)
        kept = self._kept[partition_id]
        kept.used_at = now
        kept.before = tuple(one for one in kept.before if self.at(one)._still_counts(one, window_ms))
        self._forget_idle(now)

    def _still_counts(self, partition_id: int, window_ms: int) -> bool:
        """Return whether an id of a sealed partition may still be asked for; its ids are in memory then."""
        try:
            self.prepare(partition_id, window_ms)
        except UnknownPartition:
            return False  # retention took it, so nothing of it was within the window
        except StoreUnavailable:
            if partition_id not in self._kept:  # else it is sealed: what is in memory is all there is
                raise
        kept = self._kept[partition_id]
        return kept.window.start < kept.window.end or len(kept.waiting) > 0

    def catch_up(self, partition_id: int) -> None:
        """Read what others have stored since."""
        kept = self._kept.get(partition_id)
        if kept is not None:
            self._read(partition_id, kept.window)
            kept.waiting.load(self.session, partition_id, self.lock)

    def look_at_groups(self, partition_id: int) -> int:
        """From which offset on some group has something to settle."""
        floor = self._floor(partition_id)
        kept = self._kept.get(partition_id)
        if kept is not None:
            kept.floor = floor
        return floor

    def _loaded(self, partition_id: int, window_ms: int) -> Kept:
        floor, now = self._floor(partition_id), self.session.now_ms()
        with reading_log(self.session, partition_id) as tx:
            end = _end(tx, partition_id)
            by_time = first_row(
                tx, partition_id, "appended_at", now - window_ms - self.session.tuning.ids_margin_ms
            )
            start = max(min(by_time, floor), end - self.limits.dedup_ids, 0)
            row = row_at(tx, partition_id, start, "base_offset")
        if row is not None:  # its ids are stored with the whole batch
            start = min(start, row[0])
        window = Window(start, self.limits.dedup_ids, end - start)
        self._read(partition_id, window)
        kept = Kept(window, window_ms, floor, now, DelayedIds(self.limits.dedup_ids))
        kept.waiting.load(self.session, partition_id, self.lock)
        kept.before = self._ancestors(partition_id)
        for one in kept.before:
            self.at(one).catch_up(one)  # it may be known from before it was sealed
        return kept

    def _ancestors(self, partition_id: int) -> tuple[int, ...]:
        pairs = self.catalog.lineage_at(partition_id)
        found = [partition_id]
        for one in found:
            found += [before for of, before in pairs if of == one and before not in found]
        return tuple(found[1:])

    def _look(self, partition_id: int, kept: Kept, window_ms: int, now: int) -> None:
        kept.floor, kept.looked_at = self._floor(partition_id), now
        with self.lock:
            needed = kept.window.needed(now - self.session.tuning.ids_margin_ms, window_ms, kept.floor)
            kept.window.forget_below(needed)
            short = needed < kept.window.start
        if short:  # a new group, or one that was reset, has to settle what the others had settled
            self._kept[partition_id] = self._loaded(partition_id, window_ms)
        else:
            kept.window_ms = window_ms
            kept.waiting.tidy(self.session, partition_id, self.lock)

    def _read(self, partition_id: int, window: Window) -> None:
        with reading_log(self.session, partition_id) as tx:
            end = _end(tx, partition_id)
        at: int | None = window.end
        while at is not None and at < end:
            with reading_log(self.session, partition_id) as tx:
                rows, at = _slice(tx, partition_id, at, end)
            with self.lock:
                _see(window, rows)

    def _forget_idle(self, now: int) -> None:
        if 0 <= now - self._tidied_at < self.session.tuning.ids_check_ms:
            return
        self._tidied_at = now
        for partition_id, kept in list(self._kept.items()):
            if now - kept.used_at > self.session.tuning.ids_idle_ms:
                self.forget(partition_id)

    def _floor(self, partition_id: int) -> int:
        """The lowest offset that some group has not settled, or has not come to."""
        origins = {
            group_id: (start, since)
            for group_id, name, settings, start, since in self.catalog.groups_at(partition_id)
            if not _is_base(name, settings)
        }
        if not origins:
            return NO_FLOOR
        ids = list(origins)
        with self.session.read(Area.PROGRESS) as tx:
            rows = tx.all(_LOWEST.format(marks=blanks(len(ids))), partition_id, *ids)
        lowest = {group_id: start for group_id, (start, _) in origins.items()}
        for group_id, generation, offset in rows:
            if generation >= origins[group_id][1]:
                lowest[group_id] = offset
        return min(lowest.values())

    # ---- under the partition's lock ----

    def top_up(self, tx: Transaction, area: Area, partition_id: int, end: int, *, patient: bool) -> Kept:
        """The window, up to what is stored now; NotPreparedError if too much is missing, unless `patient`."""
        kept = self._kept.get(partition_id)
        if kept is None:
            raise NotPreparedError
        if self.sees_schedule(area):
            while not kept.waiting.top_up(tx, partition_id, self.lock):
                if not patient:
                    raise NotPreparedError
        stored_in = self.session.stored_in
        if stored_in(area) is stored_in(area_of(self.session, partition_id)):
            self._top_up_log(tx, partition_id, kept, end, patient)
        return kept

    def sees_schedule(self, area: Area) -> bool:
        """Return whether a transaction in that area can read the schedule."""
        return self.session.stored_in(area) is Area.LOG

    def _top_up_log(self, tx: Transaction, partition_id: int, kept: Kept, end: int, patient: bool) -> None:
        if kept.window.end > end:  # the database is an older one than it was: nothing holds any more
            self.forget(partition_id)
            raise NotPreparedError
        if end - kept.window.end > _NEAR and not patient:
            raise NotPreparedError
        at: int | None = kept.window.end
        while at is not None and at < end:
            rows, at = _slice(tx, partition_id, at, end)
            with self.lock:
                _see(kept.window, rows)

    # ---- after the commit ----

    def committed(self, partition_id: int, rows: Sequence[StoredIds]) -> None:
        """Rows of one transaction."""
        kept = self._kept.get(partition_id)
        if kept is None:
            return
        with self.lock:
            if rows and kept.window.end == rows[0].base:  # else others were faster: it is read from the log
                _see(kept.window, rows)


def _end(tx: Transaction, partition_id: int) -> int:
    row = tx.one(_END, partition_id)
    return int(row[0]) if row else 0


def _slice(tx: Transaction, partition_id: int, at: int, end: int) -> tuple[list[StoredIds], int | None]:
    """Some rows from an offset on, and where the next ones begin; None: there are no more."""
    log = log_table(partition_id)
    until = min(at + _SLICE, end)
    rows = [StoredIds(*row) for row in tx.all(_ROWS.format(log=log), at, until)]
    if rows:
        return rows, max(until, rows[-1].base + rows[-1].records)
    after = tx.one(_NEXT.format(log=log), at)
    return [], None if after is None or after[0] is None else int(after[0])


def _see(window: Window, rows: Iterable[StoredIds]) -> None:
    for row in rows:
        window.see(row.base, row.records, row.appended_at, row.ids or b"", row.digests)


def _is_base(name: str, settings: GroupSettings) -> bool:
    """A broadcast group has no progress of its own: its members' groups have (R11)."""
    return settings.mode == "broadcast" and base_of(name) is None
