"""One append transaction: batches get their offsets under the partition's lock.

Locks first, in id order, then every look-up (I1). Offsets are given inside the lock and become visible at
commit, so a reader never sees a hole that fills later. Messages whose id is known are left out (R32). A
refused batch leaves no trace and does not disturb its neighbours; everything here dies with the transaction
(I2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ....config import DEFAULTS
from ....errors import CorruptBatch, PartitionSealed, PostroomError
from ....model.messages import sequence
from ....model.messages.batch import BatchHeader, read_header, with_base_offset
from ...contract import Append, Appended
from ..outbox import Drawing
from ..schedule import Delayed
from ..schema import log_table
from ..session import Area, Session, Transaction
from .dedup_append import DedupPass, check_ids, kept_of
from .lookups import GONE, padded, unknown_partition
from .volatile import LIFE_OFFSETS

__all__ = ["Appending", "seal"]

NO_OFFSET = -1  # of a delayed batch: it gets its offsets when it is due; of one with nothing but repeats

_LOCK = "SELECT state, next_offset, next_bytes, appended_at, topic_id FROM postroom_partitions WHERE id = ?"
_ADVANCE = "UPDATE postroom_partitions SET next_offset = ?, next_bytes = ?, appended_at = ? WHERE id = ?"
_SEAL = """UPDATE postroom_partitions SET state = 'sealed', next_offset = ?, next_bytes = ?, appended_at = ?
           WHERE id = ?"""
_SEQUENCES = "SELECT producer_id, partition_id, state FROM postroom_sequences WHERE "
_SEQUENCE = "(producer_id = ? AND partition_id = ?)"
_AT_ONCE = (1, 4, 16, 64)  # sequences that are looked up together: few different statements
_INSERT = """INSERT INTO {log}
             (base_offset, records, bytes, bytes_before, appended_at, first_ts, last_ts, ids, batch)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""


@dataclass(slots=True)
class _Partition:
    """A locked partition while batches are added."""

    sealed: bool
    next_offset: int
    next_bytes: int
    appended_at: int
    topic_id: int
    removed: bool = False  # its log is gone; what was stored in it is still known (I11)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    log_start: int | None = None  # another one: what was there is lost

    def begin_anew(self) -> None:
        """The last offsets that were given may be forgotten, but not by everybody: none is given twice."""
        self.next_offset = self.log_start = (self.next_offset // LIFE_OFFSETS + 1) * LIFE_OFFSETS


def seal(tx: Transaction, partition_id: int, batch: bytes) -> int:
    """Close a partition with a control batch as its last one; returns its end. Done once, and never again."""
    row = tx.locked(_LOCK, partition_id)
    if row is None or row[0] in GONE:
        raise unknown_partition(partition_id)
    state, offset, size, appended_at, _ = row
    if state == "sealed":
        return int(offset)
    header, appended_at = read_header(batch), max(appended_at, tx.now_ms())
    tx.do(
        _INSERT.format(log=log_table(partition_id)),
        offset, header.records, header.size, size, appended_at, header.first_ts, header.last_ts, None,
        with_base_offset(batch, offset),
    )  # fmt: skip
    tx.do(_SEAL, offset + header.records, size + header.size, appended_at, partition_id)
    tx.announce(Area.LOG)
    return int(offset + header.records)


class Appending:
    def __init__(
        self,
        tx: Transaction,
        area: Area,
        session: Session,
        appends: Sequence[Append],
        ids: DedupPass,
        given: Mapping[int, int],
    ) -> None:
        """`given`: how far each partition was when this process last saw it."""
        self._tx = tx
        self._dialect = session.dialect
        self._counted = session.counted
        self._partitions = self._lock({a.partition_id for a in appends})
        self._drawing = Drawing(tx, appends)
        if area is Area.VOLATILE:
            self._look_for_a_crash(given)
        self._ids = ids
        ids.begin(
            tx, area, {partition_id: part.next_offset for partition_id, part in self._partitions.items()}
        )
        self._sequences = self._known(appends)
        self._moved: set[tuple[int, int]] = set()
        self._delayed = Delayed()
        self._now = tx.now_ms()

    def _lock(self, ids: set[int]) -> dict[int, _Partition]:
        locked = {}
        order = sorted(ids)
        rows = self._tx.locked_each(_LOCK, [(partition_id,) for partition_id in order])
        for partition_id, row in zip(order, rows, strict=True):
            if row is not None and row[0] != "dropped":
                locked[partition_id] = _Partition(row[0] in ("sealed", "removed"), *row[1:])
                locked[partition_id].removed = row[0] == "removed"
        return locked

    def ends(self, place: Area) -> dict[tuple[Area, int], int]:
        """Where the partitions end, with what was added so far."""
        return {(place, partition_id): part.next_offset for partition_id, part in self._partitions.items()}

    def _look_for_a_crash(self, given: Mapping[int, int]) -> None:
        """A crash of the server empties volatile logs, and may forget the last offsets that were given.

        Looked for at the first append since its start.
        """
        started_ms = self._tx.started_ms()
        for partition_id, part in self._partitions.items():
            if part.sealed:
                continue
            if part.next_offset < given.get(partition_id, 0):
                part.next_offset = given[partition_id]
                part.begin_anew()
                continue
            unseen = part.next_offset > 0 and part.appended_at < started_ms
            if unseen and self._tx.one(f"SELECT 1 FROM {log_table(partition_id)} LIMIT 1") is None:
                part.begin_anew()

    def run(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        results: list[Appended | PostroomError] = []
        for append in appends:
            try:
                results.append(self._add(append))
            except PostroomError as refused:  # this batch only; nothing of it was written
                results.append(refused)
        self._write()
        return results

    def _add(self, append: Append) -> Appended:
        header = read_header(append.batch)
        check_ids(append, header.records)
        partition = self._partitions.get(append.partition_id)
        if partition is None:
            raise unknown_partition(append.partition_id)
        self._drawing.check(append.drawn)
        repeat = self._repeat(append, header)
        if repeat is not None:
            dropped = () if partition.removed else self._ids.were_repeats(append, repeat, self._now)
            return Appended(repeat, partition.appended_at, duplicate=True, repeats=dropped)
        if partition.sealed:
            raise PartitionSealed(
                "the partition takes no more batches; fetch the route again and send to its successors"
            )
        repeats = self._ids.repeats(append, partition.next_offset, self._now)
        kept = kept_of(append, repeats)
        if kept is None:
            stored = Appended(NO_OFFSET, self._now)
        elif append.due_at:
            stored = self._schedule(kept, partition, header.records - len(repeats))
        else:
            stored = self._store(kept, partition, header if kept is append else read_header(kept.batch))
        self._drawing.stored(append.drawn)
        self._remember(append, header, stored.base_offset)  # sequences count what was sent
        return replace(stored, repeats=repeats) if repeats else stored

    def _schedule(self, append: Append, partition: _Partition, records: int) -> Appended:
        self._delayed.add(append, partition.topic_id, records, self._now)
        self._ids.scheduled(append)
        return Appended(NO_OFFSET, self._now)

    def _store(self, append: Append, partition: _Partition, header: BatchHeader) -> Appended:
        offset = partition.next_offset
        partition.appended_at = max(partition.appended_at, self._now)
        ids = self._ids.stored(append, offset, header.records, partition.appended_at)
        partition.rows.append(
            (offset, header.records, header.size, partition.next_bytes, partition.appended_at,
             header.first_ts, header.last_ts, ids, with_base_offset(append.batch, offset))
        )  # fmt: skip
        partition.next_offset += header.records
        partition.next_bytes += header.size
        return Appended(offset, partition.appended_at)

    # ---- sequences ----

    def _known(self, appends: Sequence[Append]) -> dict[tuple[int, int], sequence.SequenceState | None]:
        """What is remembered of all producers, in a few round trips; the partitions are locked."""
        found: dict[tuple[int, int], sequence.SequenceState | None] = {}
        for append in appends:
            with suppress(CorruptBatch):  # it is refused when its turn comes
                header = read_header(append.batch)
                if _counts(header) and append.partition_id in self._partitions:
                    found[_line(append, header)] = None
        for some in padded(sorted(found), _AT_ONCE):
            where = " OR ".join([_SEQUENCE] * len(some))
            for producer_id, partition_id, state in self._tx.all(_SEQUENCES + where, *chain(*some)):
                found[producer_id, partition_id] = sequence.unpack(state)
        return found

    def _repeat(self, append: Append, header: BatchHeader) -> int | None:
        """The first offset of a batch that is stored already; None if it is the next one (I3)."""
        if not _counts(header):
            return None
        known = self._sequences[_line(append, header)]
        return sequence.check(known, header.epoch, header.base_sequence, header.records)

    def _remember(self, append: Append, header: BatchHeader, offset: int) -> None:
        if not _counts(header):
            return
        key = _line(append, header)
        self._sequences[key] = sequence.remember(
            self._sequences[key], header.epoch, header.base_sequence, header.records, offset,
            DEFAULTS.remembered_batches,
        )  # fmt: skip
        self._moved.add(key)

    # ---- writing ----

    def _write(self) -> None:
        for partition_id, part in self._partitions.items():
            if part.rows:
                self._tx.many(_INSERT.format(log=log_table(partition_id)), part.rows)
                self._tx.do(_ADVANCE, part.next_offset, part.next_bytes, part.appended_at, partition_id)
            if part.rows and part.log_start is not None:
                trims = self._dialect.upsert("postroom_trims", ("partition_id",), ("log_start",))
                self._tx.do(trims, partition_id, part.log_start)
        self._delayed.write(self._tx, self._counted)
        self._drawing.write()
        upsert = self._dialect.upsert(
            "postroom_sequences", ("producer_id", "partition_id"), ("state", "seen_at")
        )
        rows = []
        for key in sorted(self._moved):
            state = self._sequences[key]
            assert state is not None, "a remembered batch has a state"
            rows.append((*key, sequence.pack(state), self._now))
        if rows:
            self._tx.many(upsert, rows)
        self._tx.announce(Area.LOG)


def _counts(header: BatchHeader) -> bool:
    """Whether the batch has a place in its producer's sequence; one-way sends have none."""
    return header.producer_id >= 0 and header.base_sequence >= 0


def _line(append: Append, header: BatchHeader) -> tuple[int, int]:
    """Whose sequence the batch counts in, and where."""
    producer_id = header.producer_id if append.producer_id is None else append.producer_id
    return producer_id, append.partition_id
