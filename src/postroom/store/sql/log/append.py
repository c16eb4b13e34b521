"""One append transaction: batches get their offsets under the partition's lock.

Locks first, in id order, then every look-up (I1). Offsets are given inside the lock and become visible at
commit, so a reader never sees a hole that fills later. Messages whose id is known are left out (R32). A
refused batch leaves no trace and does not disturb its neighbours; everything here dies with the transaction
(I2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
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
from .dedup_append import DedupPass, Repeats, check_ids, kept_of
from .lone_append import KnownEnds, Line
from .lookups import GONE, unknown_partition
from .volatile import LIFE_OFFSETS

__all__ = ["Appending", "PartitionKey", "header_of", "line_of", "seal"]

NO_OFFSET = -1  # of a delayed batch: it gets its offsets when it is due; of one with nothing but repeats

_LOCK = "SELECT state, next_offset, next_bytes, appended_at, topic_id FROM postroom_partitions WHERE id = ?"
_ADVANCE = "UPDATE postroom_partitions SET next_offset = ?, next_bytes = ?, appended_at = ? WHERE id = ?"
_SEAL = """UPDATE postroom_partitions SET state = 'sealed', next_offset = ?, next_bytes = ?, appended_at = ?
           WHERE id = ?"""
_SEQUENCES = "SELECT producer_id, partition_id, state FROM postroom_sequences WHERE "
_SEQUENCE = "(producer_id = ? AND partition_id = ?)"
_SEQUENCE_COLUMNS = ("producer_id", "partition_id"), ("state", "seen_at")
_AT_ONCE = (1, 4, 16, 64)  # sequences that are looked up together: few different statements
_INSERT = """INSERT INTO {log}
             (base_offset, records, bytes, bytes_before, appended_at, first_ts, last_ts, ids, batch)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"""


PartitionKey = tuple[Area, int]
"""The area whose table has the partition's row, and the partition."""


@dataclass(slots=True)
class _Partition:
    """A locked partition while batches are added."""

    sealed: bool
    next_offset: int
    next_bytes: int
    appended_at: int
    topic_id: int
    began: int = 0  # where it ended before them
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
        _insert(partition_id),
        offset, header.records, header.size, size, appended_at, header.first_ts, header.last_ts, None,
        with_base_offset(batch, offset),
    )  # fmt: skip
    tx.do(_SEAL, offset + header.records, size + header.size, appended_at, partition_id)
    tx.announce(Area.LOG)
    return int(offset + header.records)


class Appending:
    """The appends of one transaction; `begin` and `run` once for each try of it."""

    __slots__ = (
        "_appends", "_area", "_delayed", "_drawing", "_headers", "_ids", "_lines", "_moved", "_now",
        "_partitions", "_remembered", "_sequences", "_session", "_tables", "_tx",
    )  # fmt: skip

    def __init__(self, area: Area, session: Session, appends: Sequence[Append], remembered: int) -> None:
        """`remembered`: how many batches of a producer are, in a partition."""
        self._area, self._session = area, session
        self._tables = session.stored_in(area)
        self._remembered = remembered
        self._appends = appends
        self._headers: list[BatchHeader | CorruptBatch] = []
        self._lines: list[Line | None] = []  # the sequence in which each batch counts
        for append in appends:
            header = append.header or header_of(append)
            self._headers.append(header)
            self._lines.append(None if isinstance(header, CorruptBatch) else line_of(append, header))

    def begin(self, tx: Transaction, ids: DedupPass | None, given: Mapping[PartitionKey, int]) -> None:
        """Lock the partitions, in the order of their ids, and look up the sequences of all producers.

        `ids` is None if no id is looked at. `given`: how far each partition was when last seen here.
        """
        self._tx, self._ids = tx, ids
        appends = self._appends
        order = sorted({append.partition_id for append in appends})
        lines = sorted(set(filter(None, self._lines)))
        rows, states = tx.locked_each(_LOCK, list(zip(order, strict=True)), _sequence_queries(lines))
        self._partitions: dict[int, _Partition] = {}
        for partition_id, row in zip(order, rows, strict=True):
            if row is not None and row[0] != "dropped":
                part = _Partition(row[0] != "new" and row[0] != "open", *row[1:])
                part.began, part.removed = row[1], row[0] == "removed"
                self._partitions[partition_id] = part
        self._sequences: dict[Line, sequence.SequenceState | None] = dict.fromkeys(lines)
        for producer_id, partition_id, state in states:
            self._sequences[producer_id, partition_id] = state
        self._drawing: Drawing | None = None  # of outboxes in this database
        for append in appends:
            if append.drawn is not None:
                self._drawing = Drawing(tx, appends)
                break
        if self._area is Area.VOLATILE:
            self._look_for_a_crash(given)
        if ids is not None:
            ids.begin(tx, self._area, {one: part.next_offset for one, part in self._partitions.items()})
        self._moved: set[Line] = set()
        self._delayed: Delayed | None = None
        self._now = tx.now_ms()

    def ends(self) -> dict[PartitionKey, int]:
        """Return where the partitions end, with what was added so far."""
        return {(self._tables, one): part.next_offset for one, part in self._partitions.items()}

    def tell(self, known: KnownEnds) -> None:
        """Say what is known now that it is committed."""
        ends = [
            (one, part.began, (part.next_offset, part.next_bytes, part.appended_at))
            for one, part in self._partitions.items()
            if not part.sealed
        ]
        known.saw(ends, self._sequences)

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
        for append, header, line in zip(self._appends, self._headers, self._lines, strict=True):
            try:
                if isinstance(header, CorruptBatch):
                    raise header
                results.append(self._add(append, header, line))
            except PostroomError as refused:  # this batch only; nothing of it was written
                results.append(refused)
        self._write()
        return results

    def _add(self, append: Append, header: BatchHeader, line: Line | None) -> Appended:
        if append.ids:
            check_ids(append, header.records)
        partition = self._partitions.get(append.partition_id)
        if partition is None:
            raise unknown_partition(append.partition_id)
        if append.drawn is not None and self._drawing is not None:
            self._drawing.check(append.drawn)
        if line is not None:  # a repeat has the first offset of the batch that is stored already (I3)
            epoch, first, count = header.epoch, header.base_sequence, header.records
            known = self._sequences[line]
            unknown = known is None and line[0] < 0  # one of Kafka's, whose state is gone: it begins anywhere
            repeat = None if unknown else sequence.check(known, epoch, first, count)
            if repeat is not None:
                return self._repeated(append, partition, repeat)
        if partition.sealed:
            raise PartitionSealed(
                "the partition takes no more batches; fetch the route again and send to its successors"
            )
        stored = self._taken(append, partition, header)
        if append.drawn is not None and self._drawing is not None:
            self._drawing.stored(append.drawn)
        if line is not None:  # sequences count what was sent
            self._sequences[line] = sequence.remember(
                self._sequences[line], epoch, first, count, stored.base_offset, self._remembered
            )
            self._moved.add(line)
        return stored

    def _repeated(self, append: Append, partition: _Partition, offset: int) -> Appended:
        dropped: Repeats = ()
        if append.ids and self._ids is not None and not partition.removed:
            dropped = self._ids.were_repeats(append, offset, self._now)
        return Appended(offset, partition.appended_at, duplicate=True, repeats=dropped)

    def _taken(self, append: Append, partition: _Partition, header: BatchHeader) -> Appended:
        """Take what of a batch is new, into the log or the schedule."""
        if append.ids and self._ids is not None:
            repeats = self._ids.repeats(append, partition.next_offset, self._now)
            if repeats:
                kept = kept_of(append, repeats)
                if kept is None:
                    return Appended(NO_OFFSET, self._now, repeats=repeats)
                stored = self._stored(kept, partition, read_header(kept.batch))
                return replace(stored, repeats=repeats)
        return self._stored(append, partition, header)

    def _stored(self, append: Append, partition: _Partition, header: BatchHeader) -> Appended:
        if append.due_at:
            self._delayed = self._delayed or Delayed()
            self._delayed.add(append, partition.topic_id, header.records, self._now)
            if self._ids is not None:
                self._ids.scheduled(append)
            return Appended(NO_OFFSET, self._now)
        offset, records = partition.next_offset, header.records
        partition.appended_at = appended_at = max(partition.appended_at, self._now)
        if self._ids is not None:
            self._ids.stored(append, offset, records, appended_at)
        partition.rows.append(
            (offset, records, header.size, partition.next_bytes, appended_at,
             header.first_ts, header.last_ts, append.ids or None, append.at(offset))
        )  # fmt: skip
        partition.next_offset = offset + records
        partition.next_bytes += header.size
        return Appended(offset, appended_at)

    # ---- writing ----

    def _write(self) -> None:
        tx, dialect = self._tx, self._tx.dialect
        for partition_id, part in self._partitions.items():
            if not part.rows:
                continue
            tx.many(_insert(partition_id), part.rows)
            tx.do(_ADVANCE, part.next_offset, part.next_bytes, part.appended_at, partition_id)
            if part.log_start is not None:
                trims = dialect.upsert("postroom_trims", ("partition_id",), ("log_start",))
                tx.do(trims, partition_id, part.log_start)
        if self._delayed is not None:
            self._delayed.write(tx, self._session.counted)
        if self._drawing is not None:
            self._drawing.write()
        if self._moved:
            rows = [(*line, self._sequences[line], self._now) for line in sorted(self._moved)]
            tx.many(dialect.upsert("postroom_sequences", *_SEQUENCE_COLUMNS), rows)
        tx.announce(Area.LOG)


def header_of(append: Append) -> BatchHeader | CorruptBatch:
    """Read the header of a batch; one that is not sound is refused when its turn comes."""
    try:
        return read_header(append.batch)
    except CorruptBatch as refused:
        return refused


def line_of(append: Append, header: BatchHeader) -> Line | None:
    """Return the sequence in which the batch counts; None for a one-way send, which counts in none."""
    if header.producer_id < 0 or header.base_sequence < 0:
        return None
    producer_id = header.producer_id if append.producer_id is None else append.producer_id
    return producer_id, append.partition_id


def _sequence_queries(lines: Sequence[Line]) -> list[tuple[str, Sequence[int]]]:
    """Return the few statements that look up the sequences, each with its values."""
    return [
        (_SEQUENCES + " OR ".join([_SEQUENCE] * len(some)), [*chain(*some)])
        for some in padded(lines, _AT_ONCE)
    ]


@lru_cache(maxsize=10_000)
def _insert(partition_id: int) -> str:
    return _INSERT.format(log=log_table(partition_id))
