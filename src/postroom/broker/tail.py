"""The tail cache: the newest batches in memory, so that consumers that keep up read no blobs from disk.

Filled only after a commit (I2). A batch never changes once stored, so whatever is here is right; what is
not here is read from the store. After a commit of unknown fate the partition's batches are forgotten.
Bounded in bytes; the oldest batch goes first, whatever its partition.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable

from ..store.contract import StoredBatch

__all__ = ["TailCache"]

_ENTRY_BYTES = 300  # what a cached batch costs beside its data


class TailCache:
    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._tails: dict[int, _Tail] = {}
        self._order: deque[tuple[int, int]] = deque()  # (partition id, cost), oldest first
        self._lock = threading.Lock()

    def add(self, partition_id: int, batch: StoredBatch) -> None:
        cost = len(batch.data) + _ENTRY_BYTES
        with self._lock:
            if not self._tails.setdefault(partition_id, _Tail()).push(batch):
                return
            self._order.append((partition_id, cost))
            self._bytes += cost
            while self._bytes > self._max_bytes:
                oldest, freed = self._order.popleft()
                self._bytes -= freed
                if not self._tails[oldest].pop():
                    del self._tails[oldest]

    def forget(self, partition_ids: Iterable[int]) -> None:
        with self._lock:
            gone = {partition_id for partition_id in partition_ids if self._tails.pop(partition_id, None)}
            if gone:
                self._bytes -= sum(cost for partition_id, cost in self._order if partition_id in gone)
                self._order = deque(entry for entry in self._order if entry[0] not in gone)

    def read(self, partition_id: int, offset: int, *, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        """Batches without a gap from the one that contains `offset`; empty if that one is not here."""
        with self._lock:
            tail = self._tails.get(partition_id)
            return [] if tail is None else tail.read(offset, max_messages, max_bytes)


class _Tail:
    """One partition's batches in ascending order; the front is cut off lazily."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._batches: list[StoredBatch | None] = []
        self._head = 0

    def push(self, batch: StoredBatch) -> bool:
        if self._bases and batch.base_offset <= self._bases[-1]:
            return False
        self._bases.append(batch.base_offset)
        self._batches.append(batch)
        return True

    def pop(self) -> bool:
        """Drop the oldest; False: that was the last one."""
        self._batches[self._head] = None
        self._head += 1
        if self._head * 2 > len(self._bases):
            del self._bases[: self._head], self._batches[: self._head]
            self._head = 0
        return bool(self._bases)

    def read(self, offset: int, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        found: list[StoredBatch] = []
        messages = size = 0
        expected = offset
        for index in range(max(bisect_right(self._bases, offset) - 1, self._head), len(self._bases)):
            batch = self._batches[index]
            if batch is None or batch.base_offset > expected or batch.last_offset < offset:
                break
            if found and (messages >= max_messages or size + len(batch.data) > max_bytes):
                break
            found.append(batch)
            messages += batch.last_offset - max(offset, batch.base_offset) + 1
            size += len(batch.data)
            expected = batch.last_offset + 1
        return found
