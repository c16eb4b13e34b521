"""What a group can read: which partitions, which batches from memory, and how many of them in one poll."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter

from ...model.delivery.delivery import Delivery
from ...model.frozen import dataclass
from ...model.policy.bounds import make_room
from ...model.topology.route import Range, Route
from ...store.contract import Bounds, Granted, Group, Peek, Progress, Store, StoredBatch, Topic

__all__ = ["CaughtUp", "Fitted", "TailCache", "Unread", "fitted", "has_due", "has_new", "took_all"]


_ENTRY_BYTES = 300  # what a cached batch costs beside its data


class TailCache:
    """The newest batches in memory, so that consumers that keep up read no blobs from disk.

    Filled only after a commit (I2). A batch never changes once stored, so whatever is here is right; what is
    not here is read from the store. After a commit of unknown fate the partition's batches are forgotten.
    Bounded in bytes; the oldest batch goes first, whatever its partition.
    """

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

    def reaches(self, partition_id: int, end: int) -> bool:
        """Return whether the newest batch here ends there, or later: this process has stored it."""
        with self._lock:
            tail = self._tails.get(partition_id)
            return tail is not None and tail.end >= end

    def end_from(self, partition_id: int, offset: int) -> int | None:
        """Return the offset behind the newest batch here; None: the message at `offset` is not here."""
        with self._lock:
            tail = self._tails.get(partition_id)
            return tail.end if tail is not None and tail.read(offset, 1, 1) else None

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

    @property
    def end(self) -> int:
        newest = self._batches[-1] if self._batches else None
        return 0 if newest is None else newest.last_offset + 1

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


class CaughtUp:
    """It knows where groups were left that had read a partition to its end, as far as that was here.

    Only a hint: another process may have moved the cursor since. Any thread may use it.
    """

    def __init__(self, tail: TailCache, store: Store) -> None:
        self._tail, self._store = tail, store
        self._cursors: dict[tuple[int, int, int], int] = {}  # by group, its generation, and partition
        self._starts: dict[int, int] = {}  # of partitions, as far as was read
        self._versions: dict[int, Hashable] = {}  # of the store, when a group's bounds were read

    def version(self, topic: Topic) -> Hashable | None:
        """Return what is another value once anybody else has changed something, to be asked for before bounds
        are read; None: that takes a query."""
        return None if topic.settings.storage == "volatile" else self._store.version()

    def bounds_read(self, group: Group, bounds: Mapping[int, Bounds], version: Hashable | None) -> None:
        """Bounds are read; `version`: of the store just before, None if they are not those of all partitions.

        What was purged or dropped until then is not handed out any more."""
        if group.id not in self._versions:
            make_room(self._versions, _MOST)
        self._versions[group.id] = version
        for partition_id, edges in bounds.items():
            if partition_id not in self._starts:
                make_room(self._starts, _MOST)
            self._starts[partition_id] = max(edges.start, self._starts.get(partition_id, 0))

    def note(self, group: Group, partition_id: int, cursor: int) -> None:
        key = (group.id, group.generation, partition_id)
        if key not in self._cursors:
            make_room(self._cursors, _MOST)
        self._cursors[key] = cursor

    def since(
        self, group: Group, pieces: Sequence[Range], version: Hashable | None
    ) -> tuple[list[tuple[Range, int]], dict[int, Bounds]] | None:
        """From where on each of the partitions has new messages, and its bounds as far as that goes; None: of
        one of them this is not known, or its next message is not in memory. `version`: nor if somebody has
        changed the store since the bounds were read."""
        if version is not None and self._versions.get(group.id) != version:
            return None
        fresh: list[tuple[Range, int]] = []
        bounds: dict[int, Bounds] = {}
        for piece in pieces:
            partition_id = piece.partition_id
            cursor = self._cursors.get((group.id, group.generation, partition_id))
            start = self._starts.get(partition_id)
            if cursor is None or start is None:
                return None
            cursor = max(cursor, start)
            end = self._tail.end_from(partition_id, cursor)
            if end is None:
                return None
            fresh.append((piece, cursor))
            bounds[partition_id] = Bounds(start, end)
        return fresh, bounds


def took_all(granted: Granted, cursor: int, bounds: Bounds) -> bool:
    """Whether a poll of a partition with nothing due was given all that it had: new messages, to its end."""
    one = granted.deliveries[0] if len(granted.deliveries) == 1 else None
    if one is None or granted.again or granted.leaving or granted.unplaced or granted.draining:
        return False
    return one.first >= cursor and one.last + 1 >= bounds.end


def has_new(peek: Peek, bounds: Bounds) -> bool:
    return max(peek.cursor, bounds.start) < bounds.end


def has_due(peek: Peek | None, now: int) -> bool:
    return peek is not None and peek.next_due is not None and peek.next_due <= now


_MOST = 20_000  # groups of which is known something; the store knows of all


class Unread:
    """It says which partitions a group has still to read, and which it may read already.

    Sealed partitions are read to their end and then never looked at again. A group in mode "ordered" begins
    in a successor once it has drained all that the successor follows; other groups read successors at once
    (I10). Who has drained what is the store's to say (`Progress.drain`, flushed); what it said is remembered
    here, since it stays true for a group's generation. Any thread may use it.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._drained: dict[int, tuple[int, set[int]]] = {}  # by group: its generation, and partitions

    def partitions(self, route: Route, group: Group) -> tuple[Range, ...]:
        """Those to look at: not what the group has drained."""
        if not route.sealed:
            return route.ranges
        drained = self._of(group)
        return tuple(piece for piece in route.partitions if piece.partition_id not in drained)

    def look(
        self, route: Route, group: Group, bounds: Mapping[int, Bounds], peeks: Mapping[int, Peek]
    ) -> frozenset[int]:
        """Which of these the group reads now, by id. What it has settled to the end is noted."""
        if not [place for place, edges in bounds.items() if edges.sealed]:
            return frozenset(bounds) if not route.sealed else self._open(route, group, bounds, peeks)
        for place, edges in bounds.items():
            peek = peeks.get(place)
            at_end = peek is not None and edges.sealed and max(peek.lowest, edges.start) >= edges.end
            if peek is not None and at_end and (peek.drained or self._progress.drain(group, place)):
                with self._lock:
                    self._of(group).add(place)
        return self._open(route, group, bounds, peeks)

    def drained(self, group: Group, partition_id: int) -> bool:
        """Whether the group is known to have settled the partition to its end."""
        return partition_id in self._of(group)

    def _open(
        self, route: Route, group: Group, bounds: Mapping[int, Bounds], peeks: Mapping[int, Peek]
    ) -> frozenset[int]:
        drained = self._of(group)
        left = frozenset(bounds) - drained
        if group.settings.mode != "ordered":
            return left
        return frozenset(
            place
            for place in left
            if place in peeks or all(one in drained for one in route.predecessors.get(place, ()))
        )

    def _of(self, group: Group) -> set[int]:
        generation, drained = self._drained.get(group.id, (-1, set()))
        if generation != group.generation:
            drained = set()
            make_room(self._drained, _MOST)
            self._drained[group.id] = (group.generation, drained)
        return drained


Read = Callable[[int, int, int, int], list[StoredBatch]]
"""Batches of a partition from an offset on: so many messages, and bytes, at most."""

_base = attrgetter("base_offset")


@dataclass(frozen=True, slots=True)
class Fitted:
    deliveries: Sequence[Delivery]
    batches: tuple[StoredBatch, ...]
    left: Sequence[Delivery] = ()  # there was no room for them


def fitted(
    read: Read,
    partition_id: int,
    deliveries: Sequence[Delivery],
    known: Sequence[StoredBatch],
    max_bytes: int,
) -> Fitted:
    """Those of a poll's deliveries that fit into its bytes, with the batches that hold them, and those left.

    The store grants deliveries by their number, since it does not know how large messages are that come
    again. So the batches are read here until the poll's bytes are spent. The first always fits (I17). `known`
    batches were read already; the others come from the log.
    """
    found = sorted(known, key=_base)
    taken: dict[int, StoredBatch] = {}
    size = 0
    for index, delivery in enumerate(deliveries):
        position = delivery.first
        while position <= delivery.last:
            batch = _at(found, position)
            if batch is None:
                more = read(partition_id, position, delivery.last - position + 1, max(1, max_bytes - size))
                if not more or more[0].base_offset > delivery.last:
                    break  # retention took the rest
                for one in more:
                    if _at(found, one.base_offset) is None:
                        insort(found, one, key=_base)
                batch = more[0]
            if batch.base_offset not in taken:
                size += len(batch.data)
                if taken and size > max_bytes:
                    head = [delivery.part(delivery.first, position - 1)] if position > delivery.first else []
                    left = [delivery.part(position, delivery.last), *deliveries[index + 1 :]]
                    return Fitted([*deliveries[:index], *head], _in_order(taken), left)
                taken[batch.base_offset] = batch
            position = batch.last_offset + 1
    return Fitted(deliveries, _in_order(taken))


def _at(batches: Sequence[StoredBatch], offset: int) -> StoredBatch | None:
    """The batch that has this offset."""
    at = bisect_right(batches, offset, key=_base) - 1
    return batches[at] if at >= 0 and batches[at].last_offset >= offset else None


def _in_order(taken: dict[int, StoredBatch]) -> tuple[StoredBatch, ...]:
    return tuple(sorted(taken.values(), key=_base))
