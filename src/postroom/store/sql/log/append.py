"""One append transaction: batches get their offsets under the partition's lock.

Locks first, in id order, then every look-up (I1). Offsets are given inside the lock and become visible at
commit, so a reader never sees a hole that fills later. Messages whose id is known are left out (R32). A
refused batch leaves no trace and does not disturb its neighbours; everything here dies with the transaction
(I2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from ....errors import CorruptBatch, PartitionSealed, PostroomError
from ....model.messages import sequence
from ....model.messages.batch import BatchHeader, read_header, with_base_offset
from ...contract import Append, Appended
from ..lists import padded
from ..outbox import Drawing
from ..schedule import Delayed
from ..schema import log_table
from ..session import Area, Session, Transaction
from .dedup_append import DedupPass, check_ids, kept_of
from .lookups import GONE, unknown_partition
from .volatile import LIFE_OFFSETS

__all__ = ["Appending", "PartitionKey", "seal"]

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


PartitionKey = tuple[Area, int]
"""The area whose table has the partition's row, and the partition."""

_Line = tuple[int, int]
"""The producer whose sequence it is, and the partition."""


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
        given: Mapping[PartitionKey, int],
        remembered: int,
    ) -> None:
        """`given`: how far each partition was when this process last saw it. `remembered`: how many batches
        of a producer are, in a partition."""
        self._tx = tx
        self._dialect = session.dialect
        self._counted = session.counted
        self._remembered = remembered
        self._tables = session.stored_in(area)
        self._appends = appends
        self._partitions = self._lock()
        self._drawing: Drawing | None = None  # of outboxes in this database
        for append in appends:
            if append.drawn is not None:
                self._drawing = Drawing(tx, appends)
                break
        if area is Area.VOLATILE:
            self._look_for_a_crash(given)
        self._ids = ids
        ids.begin(tx, area, {one: part.next_offset for one, part in self._partitions.items()})
        self._headers: list[BatchHeader | CorruptBatch] = []
        self._sequences = self._known()
        self._moved: set[_Line] = set()
        self._delayed: Delayed | None = None
        self._now = tx.now_ms()

    def _lock(self) -> dict[int, _Partition]:
        locked = {}
        order = sorted({append.partition_id for append in self._appends})
        rows = self._tx.locked_each(_LOCK, [(partition_id,) for partition_id in order])
        for partition_id, row in zip(order, rows, strict=True):
            if row is not None and row[0] != "dropped":
                locked[partition_id] = _Partition(row[0] in ("sealed", "removed"), *row[1:])
                locked[partition_id].removed = row[0] == "removed"
        return locked

    def ends(self) -> dict[PartitionKey, int]:
        """Return where the partitions end, with what was added so far."""
        return {(self._tables, one): part.next_offset for one, part in self._partitions.items()}

    def _look_for_a_crash(self, given: Mapping[PartitionKey, int]) -> None:
        """A crash of the server empties volatile logs, and may forget the last offsets that were given.

        Looked for at the first append since its start.
        """
        started_ms = self._tx.started_ms()
        for partition_id, part in self._partitions.items():
            if part.sealed:
                continue
            known = given.get((self._tables, partition_id), 0)
            if part.next_offset < known:
                part.next_offset = known
                part.begin_anew()
                continue
            unseen = part.next_offset > 0 and part.appended_at < started_ms
            if unseen and self._tx.one(f"SELECT 1 FROM {log_table(partition_id)} LIMIT 1") is None:
                part.begin_anew()

    def run(self) -> list[Appended | PostroomError]:
        results: list[Appended | PostroomError] = []
        for append, header in zip(self._appends, self._headers, strict=True):
            try:
                if isinstance(header, CorruptBatch):
                    raise header
                results.append(self._add(append, header))
            except PostroomError as refused:  # this batch only; nothing of it was written
                results.append(refused)
        self._write()
        return results

    def _add(self, append: Append, header: BatchHeader) -> Appended:
        if append.ids:
            check_ids(append, header.records)
        partition = self._partitions.get(append.partition_id)
        if partition is None:
            raise unknown_partition(append.partition_id)
        if append.drawn is not None and self._drawing is not None:
            self._drawing.check(append.drawn)
        line = _line(append, header)
        repeat = None if line is None else self._repeat(line, header)
        if repeat is not None:
            dropped = () if partition.removed else self._ids.were_repeats(append, repeat, self._now)
            return Appended(repeat, partition.appended_at, duplicate=True, repeats=dropped)
        if partition.sealed:
            raise PartitionSealed(
                "the partition takes no more batches; fetch the route again and send to its successors"
            )
        repeats = self._ids.repeats(append, partition.next_offset, self._now) if append.ids else ()
        kept = kept_of(append, repeats) if repeats else append
        if kept is None:
            stored = Appended(NO_OFFSET, self._now)
        elif append.due_at:
            stored = self._schedule(kept, partition, header.records - len(repeats))
        else:
            stored = self._store(kept, partition, header if kept is append else read_header(kept.batch))
        if append.drawn is not None and self._drawing is not None:
            self._drawing.stored(append.drawn)
        if line is not None:
            self._remember(line, header, stored.base_offset)  # sequences count what was sent
        return replace(stored, repeats=repeats) if repeats else stored

    def _schedule(self, append: Append, partition: _Partition, records: int) -> Appended:
        self._delayed = self._delayed or Delayed()
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

    def _known(self) -> dict[_Line, sequence.SequenceState | None]:
        """Look up the sequences of all producers, in a few round trips; the partitions are locked."""
        found: dict[_Line, sequence.SequenceState | None] = {}
        for append in self._appends:
            try:
                header = read_header(append.batch)
            except CorruptBatch as refused:  # when its turn comes
                self._headers.append(refused)
                continue
            self._headers.append(header)
            line = _line(append, header)
            if line is not None and append.partition_id in self._partitions:
                found[line] = None
        for some in padded(sorted(found), _AT_ONCE):
            where = " OR ".join([_SEQUENCE] * len(some))
            for producer_id, partition_id, state in self._tx.all(_SEQUENCES + where, *chain(*some)):
                found[producer_id, partition_id] = sequence.unpack(state)
        return found

    def _repeat(self, line: _Line, header: BatchHeader) -> int | None:
        """Return the first offset of a batch that is stored already; None if it is the next one (I3)."""
        known = self._sequences[line]
        return sequence.check(known, header.epoch, header.base_sequence, header.records)

    def _remember(self, line: _Line, header: BatchHeader, offset: int) -> None:
        self._sequences[line] = sequence.remember(
            self._sequences[line], header.epoch, header.base_sequence, header.records, offset,
            self._remembered,
        )  # fmt: skip
        self._moved.add(line)

    # ---- writing ----

    def _write(self) -> None:
        for partition_id, part in self._partitions.items():
            if part.rows:
                self._tx.many(_INSERT.format(log=log_table(partition_id)), part.rows)
                self._tx.do(_ADVANCE, part.next_offset, part.next_bytes, part.appended_at, partition_id)
            if part.rows and part.log_start is not None:
                trims = self._dialect.upsert("postroom_trims", ("partition_id",), ("log_start",))
                self._tx.do(trims, partition_id, part.log_start)
        if self._delayed is not None:
            self._delayed.write(self._tx, self._counted)
        if self._drawing is not None:
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


def _line(append: Append, header: BatchHeader) -> _Line | None:
    """Return the sequence in which the batch counts; None for a one-way send, which counts in none."""
    if header.producer_id < 0 or header.base_sequence < 0:
        return None
    producer_id = header.producer_id if append.producer_id is None else append.producer_id
    return producer_id, append.partition_id
