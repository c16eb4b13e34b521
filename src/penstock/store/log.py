"""Batches: append under the partition's lock, read, trim.

Offsets are given inside the lock and become visible at commit, so a reader never sees a hole that fills
later. Nothing is cached here: memory cannot run ahead of a commit (I2).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

from ..config import DEFAULTS
from ..errors import PartitionSealed, PenstockError
from ..model import sequence
from ..model.batch import BatchHeader, read_header, with_base_offset
from .contract import Append, Appended, Bounds, News, StoredBatch
from .lookups import first_row, log_of, unknown_partition
from .schema import log_table
from .session import Lane, Session, Transaction

__all__ = ["SqlLog"]

_LOCK = "SELECT state, next_offset, next_bytes, appended_at FROM penstock_partitions WHERE id = ?"
_ADVANCE = "UPDATE penstock_partitions SET next_offset = ?, next_bytes = ?, appended_at = ? WHERE id = ?"
_SEQUENCE = "SELECT state FROM penstock_sequences WHERE producer_id = ? AND partition_id = ?"
_INSERT = """INSERT INTO {log}
             (base_offset, records, bytes, bytes_before, appended_at, first_ts, last_ts, batch)
             VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
_BOUNDS = """SELECT p.id, COALESCE(t.log_start, 0), p.next_offset, p.state FROM penstock_partitions p
             LEFT JOIN penstock_trims t ON t.partition_id = p.id WHERE p.id IN ({marks})"""
_BATCHES = """SELECT base_offset, records, appended_at, batch FROM {log}
              WHERE base_offset >= COALESCE((SELECT MAX(base_offset) FROM {log} WHERE base_offset <= ?), 0)
              ORDER BY base_offset LIMIT ?"""


@dataclass(slots=True)
class _Partition:
    """A locked partition while batches are added; dies with its transaction."""

    sealed: bool
    next_offset: int
    next_bytes: int
    appended_at: int
    rows: list[tuple[Any, ...]] = field(default_factory=list)


class SqlLog:
    def __init__(self, session: Session) -> None:
        self._session = session

    # ---- append ----

    def append(self, appends: Sequence[Append]) -> list[Appended | PenstockError]:
        with self._session.write(Lane.LOG) as tx:
            return _Appending(tx, self._session, appends).run(appends)

    # ---- read ----

    def read(self, partition_id: int, offset: int, *, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        log = log_table(partition_id)
        with log_of(self._session, partition_id), self._session.read(Lane.LOG) as tx:
            rows = tx.stream(_BATCHES.format(log=log), offset, max_messages + 1)
            return _up_to(rows, offset, max_messages, max_bytes)

    def bounds(self, partition_ids: Iterable[int]) -> dict[int, Bounds]:
        ids = list(partition_ids)
        if not ids:
            return {}
        with self._session.read(Lane.LOG) as tx:
            rows = tx.all(_BOUNDS.format(marks=", ".join("?" * len(ids))), *ids)
        found = {
            row[0]: Bounds(row[1], row[2], sealed=row[3] == "sealed") for row in rows if row[3] != "dropped"
        }
        for partition_id in ids:
            if partition_id not in found:
                raise unknown_partition(partition_id)
        return found

    def offset_at(self, partition_id: int, time_ms: int) -> int:
        with log_of(self._session, partition_id), self._session.read(Lane.LOG) as tx:
            return first_row(tx, partition_id, "appended_at", time_ms)

    def news(self) -> News:
        with self._session.read(Lane.LOG) as tx:
            ends = tx.all("SELECT id, next_offset FROM penstock_partitions WHERE state <> 'dropped'")
            version = tx.one("SELECT value FROM penstock_settings WHERE name = 'catalog_version'")
        return News(int(version[0]) if version else 0, dict(ends))

    # ---- trim ----

    def trim(self, partition_id: int, below: int) -> int:
        with self._session.write(Lane.LOG) as tx:
            part = tx.one("SELECT next_offset FROM penstock_partitions WHERE id = ?", partition_id)
            if part is None:
                raise unknown_partition(partition_id)
            row = tx.one("SELECT log_start FROM penstock_trims WHERE partition_id = ?", partition_id)
            start = max(row[0] if row else 0, min(below, part[0]))
            upsert = self._session.dialect.upsert("penstock_trims", ("partition_id",), ("log_start",))
            tx.run(upsert, partition_id, start)
            return int(start)

    def sweep(self, partition_id: int, *, rows: int) -> int:
        log = log_table(partition_id)
        with log_of(self._session, partition_id), self._session.write(Lane.LOG) as tx:
            start = tx.one("SELECT log_start FROM penstock_trims WHERE partition_id = ?", partition_id)
            if start is None:
                return 0
            old = tx.all(
                f"SELECT base_offset FROM {log} WHERE base_offset < ? AND base_offset + records <= ? "
                "ORDER BY base_offset LIMIT ?",
                start[0],
                start[0],
                rows,
            )
            return tx.run(f"DELETE FROM {log} WHERE base_offset <= ?", old[-1][0]) if old else 0

    def expire_by_limits(self, partition_id: int, *, before_ms: int, keep_bytes: int) -> int:
        with log_of(self._session, partition_id), self._session.read(Lane.LOG) as tx:
            by_age = first_row(tx, partition_id, "appended_at", before_ms) if before_ms > 0 else 0
            if not keep_bytes:
                return by_age
            total = tx.one("SELECT next_bytes FROM penstock_partitions WHERE id = ?", partition_id)
            excess = (total[0] if total else 0) - keep_bytes
            by_size = first_row(tx, partition_id, "bytes_before", excess) if excess > 0 else 0
            return max(by_age, by_size)

    def forget_producers(self, idle_since_ms: int) -> int:
        with self._session.write(Lane.LOG) as tx:
            return tx.run("DELETE FROM penstock_sequences WHERE seen_at < ?", idle_since_ms)


class _Appending:
    """One append transaction: locks first, in id order, then every look-up (I1)."""

    def __init__(self, tx: Transaction, session: Session, appends: Sequence[Append]) -> None:
        self._tx = tx
        self._dialect = session.dialect
        self._partitions = self._lock({a.partition_id for a in appends})
        self._sequences: dict[tuple[int, int], sequence.SequenceState | None] = {}
        self._moved: set[tuple[int, int]] = set()
        self._now = tx.now_ms()

    def _lock(self, ids: set[int]) -> dict[int, _Partition]:
        locked = {}
        for partition_id in sorted(ids):
            row = self._tx.one(_LOCK + self._dialect.for_update, partition_id)
            if row is not None and row[0] != "dropped":
                locked[partition_id] = _Partition(row[0] == "sealed", *row[1:])
        return locked

    def run(self, appends: Sequence[Append]) -> list[Appended | PenstockError]:
        results: list[Appended | PenstockError] = []
        for append in appends:
            try:
                results.append(self._add(append))
            except PenstockError as refused:  # this batch only; nothing of it was written
                results.append(refused)
        self._write()
        return results

    def _add(self, append: Append) -> Appended:
        header = read_header(append.batch)
        partition = self._partitions.get(append.partition_id)
        if partition is None:
            raise unknown_partition(append.partition_id)
        repeat = self._repeat(append.partition_id, header)
        if repeat is not None:
            return Appended(repeat, partition.appended_at, duplicate=True)
        if partition.sealed:
            raise PartitionSealed(
                "the partition takes no more batches; fetch the route again and send to its successors"
            )
        offset = partition.next_offset
        partition.appended_at = max(partition.appended_at, self._now)
        batch = with_base_offset(append.batch, offset)
        partition.rows.append(
            (offset, header.records, header.size, partition.next_bytes, partition.appended_at,
             header.first_ts, header.last_ts, batch)
        )  # fmt: skip
        partition.next_offset += header.records
        partition.next_bytes += header.size
        self._remember(append.partition_id, header, offset)
        return Appended(offset, partition.appended_at)

    def _repeat(self, partition_id: int, header: BatchHeader) -> int | None:
        """The first offset of a batch that is stored already; None if it is the next one (I3)."""
        if header.producer_id < 0 or header.base_sequence < 0:
            return None
        key = (header.producer_id, partition_id)
        if key not in self._sequences:
            row = self._tx.one(_SEQUENCE, *key)
            self._sequences[key] = sequence.unpack(row[0]) if row else None
        return sequence.check(self._sequences[key], header.epoch, header.base_sequence, header.records)

    def _remember(self, partition_id: int, header: BatchHeader, offset: int) -> None:
        if header.producer_id < 0 or header.base_sequence < 0:
            return
        key = (header.producer_id, partition_id)
        self._sequences[key] = sequence.remember(
            self._sequences[key], header.epoch, header.base_sequence, header.records, offset,
            DEFAULTS.remembered_batches,
        )  # fmt: skip
        self._moved.add(key)

    def _write(self) -> None:
        for partition_id, part in self._partitions.items():
            if part.rows:
                self._tx.many(_INSERT.format(log=log_table(partition_id)), part.rows)
                self._tx.run(_ADVANCE, part.next_offset, part.next_bytes, part.appended_at, partition_id)
        upsert = self._dialect.upsert(
            "penstock_sequences", ("producer_id", "partition_id"), ("state", "seen_at")
        )
        rows = []
        for key in self._moved:
            state = self._sequences[key]
            assert state is not None, "a remembered batch has a state"
            rows.append((*key, sequence.pack(state), self._now))
        if rows:
            self._tx.many(upsert, rows)


def _up_to(
    rows: Generator[tuple[Any, ...], None, None], offset: int, max_messages: int, max_bytes: int
) -> list[StoredBatch]:
    """Batches until a limit is reached, but at least one."""
    found: list[StoredBatch] = []
    messages = size = 0
    with closing(rows):
        for row in rows:
            batch = StoredBatch(*row)
            if batch.last_offset < offset:
                continue
            size += len(batch.data)
            if found and size > max_bytes:
                break
            found.append(batch)
            messages += batch.last_offset - max(batch.base_offset, offset) + 1
            if messages >= max_messages:
                break
    return found
