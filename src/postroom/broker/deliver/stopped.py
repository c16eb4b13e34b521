"""What stopped in ordered groups: list it, restart it, skip it to the dead letters, or drop it (R23).

Blocking code, run in worker threads. A message whose attempts are used up stops its key in a group with
exhausted="stop", until somebody decides. The store's verbs decide what changes; this finds the group's places
(its topic and its own retry topic, sealed partitions too) and opens batches, to show what is in them.

Must never touch what is not stopped any more, nor what belongs to another group: a list may be old.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ...endpoint.values import StoppedMessage
from ...errors import CorruptBatch, GateClosed, GenerationChanged, UnknownPartition
from ...model.delivery.delivery import Delivery, Span
from ...model.messages.batch import BatchBuilder, Record, records, stored_records, with_base_offset
from ...model.topology.route import Range
from ...store.contract import Group, Store, StoredBatch, Topic
from ..topology.catalog_cache import CatalogCache
from .handed import Departure, new_stamp
from .shared import Deliveries

__all__ = ["Spot", "StoppedMessages"]

T = TypeVar("T")

_PAGE = 1000  # messages in one answer, and
_PAGE_BYTES = 4 * 1024 * 1024  # so much of them; one always fits
_COUNTED = 10_000  # messages read of a partition to count what waits behind
_CHUNK_BYTES = 4 * 1024 * 1024
_WHOLE = 2**31 - 1  # a message that is shown is as large as it is (I17)

Spot = tuple[int, int]
"""A message: partition id and offset."""


@dataclass(frozen=True, slots=True)
class _StoppedAt:
    topic: Topic
    group: Group  # the one that reads it
    piece: Range

    @property
    def id(self) -> int:
        return self.piece.partition_id


class StoppedMessages:
    def __init__(self, store: Store, catalog: CatalogCache, deliveries: Deliveries) -> None:
        self._store = store
        self._catalog = catalog
        self._deliveries = deliveries

    # ---- listing ----

    def listed(
        self, topic: str, group: str, limit: int, after: Spot | None, *, behind: bool
    ) -> list[StoppedMessage]:
        """By place, from the one behind `after` on. Fewer than `limit` may come; none: there are no more."""
        found: list[StoppedMessage] = []
        left, limit = _PAGE_BYTES, min(limit, _PAGE)
        for place in self._places(topic, group):
            if after is not None and place.id < after[0]:
                continue
            offset = after[1] if after is not None and place.id == after[0] else -1
            here = self._listed(place, offset, limit - len(found), left)
            found += self._counted(place, here) if behind else here
            left -= sum(len(one.batch.data) for one in here)
            if len(found) >= limit or left <= 0:
                break
        return found

    def _listed(self, place: _StoppedAt, after: int, limit: int, room: int) -> list[StoppedMessage]:
        found: list[StoppedMessage] = []
        for delivery in self._store.progress.stopped(place.group, place.id, limit=limit, after=after):
            first = max(delivery.first, after + 1)
            for message in self._opened(place, delivery.part(first, delivery.last)):
                found.append(message)
                room -= len(message.batch.data)
                if len(found) >= limit or room <= 0:
                    return found
        return found

    def _opened(self, place: _StoppedAt, stopped: Delivery) -> Iterator[StoppedMessage]:
        for batch in self._deliveries.walk_span(place.id, stopped.first, stopped.last):
            first, last = max(stopped.first, batch.base_offset), min(stopped.last, batch.last_offset)
            for alone, reason in _each(batch, first, last, stopped.reason):
                yield StoppedMessage(
                    place.topic.name, place.piece.partition, place.id, stopped.spent, reason,
                    stopped.failing_since, alone,
                )  # fmt: skip

    # ---- what waits behind ----

    def _counted(self, place: _StoppedAt, stopped: Sequence[StoppedMessage]) -> list[StoppedMessage]:
        """Each with how many messages of its key come after it, as far as they can be counted cheaply."""
        if not stopped:
            return []
        bounds = self._store.log.bounds([place.id])[place.id]
        end = bounds.end - int(bounds.sealed)
        if place.group.settings.order == "partition":  # everything waits
            return [replace(one, behind=max(0, end - one.offset - 1)) for one in stopped]
        keys = [records(one.batch.data)[0].key for one in stopped]
        counts, cut = self._behind(place, list(zip(keys, (s.offset for s in stopped), strict=True)), end)
        pairs = zip(stopped, counts, strict=True)
        return [replace(one, behind=count, more_behind=cut) for one, count in pairs]

    def _behind(
        self, place: _StoppedAt, stopped: Sequence[tuple[bytes | None, int]], end: int
    ) -> tuple[list[int], bool]:
        """What is parked behind each (I27), and what one look through the log finds after that.

        And whether that look was cut short.
        """
        lines = {line.key: line for line in self._store.progress.lines(place.group, place.id)}
        counts = [lines[key].messages if key in lines else 0 for key, _ in stopped]
        starts = [lines[key].last if key in lines else offset for key, offset in stopped]
        by_key: dict[bytes | None, list[int]] = {}
        for index, (key, _) in enumerate(stopped):
            by_key.setdefault(key, []).append(index)
        first = position = min(starts) + 1
        while position < end and position - first < _COUNTED:
            batches = self._store.log.read(
                place.id, position, max_messages=_COUNTED // 10, max_bytes=_CHUNK_BYTES
            )
            if not batches:
                break
            for batch in batches:
                for record in _readable(batch):
                    for index in by_key.get(record.key, ()):
                        counts[index] += record.offset > starts[index]
            position = batches[-1].last_offset + 1
        return counts, position < end

    # ---- deciding ----

    def restart(self, topic: str, group: str, spots: Sequence[Spot] | None) -> int:
        """They begin anew; returns how many."""
        verb = self._store.progress.restart_stopped
        return sum(self._each(topic, group, spots, lambda place, spans: verb(place.group, place.id, spans)))

    def drop(self, topic: str, group: str, spots: Sequence[Spot] | None) -> int:
        verb = self._store.progress.drop_stopped
        return sum(self._each(topic, group, spots, lambda place, spans: verb(place.group, place.id, spans)))

    def skip(self, topic: str, group: str, spots: Sequence[Spot] | None) -> tuple[int, list[Departure]]:
        """Stamp them for the dead letters; the mover does the rest (I12)."""

        def stamp(place: _StoppedAt, spans: Sequence[Span] | None) -> Departure:
            dead = self._catalog.dead_letters(topic, group) or self._catalog.make_dead_letters(topic, group)
            to = new_stamp(dead)
            assert to is not None, "there is a topic"
            leaving = self._store.progress.skip_stopped(place.group, place.id, to, spans)
            return Departure(place.group, place.piece.partition, place.id, leaving)

        found = list(self._each(topic, group, spots, stamp))
        return sum(d.size for one in found for d in one.deliveries), found

    def _each(
        self,
        topic: str,
        group: str,
        spots: Sequence[Spot] | None,
        verb: Callable[[_StoppedAt, Sequence[Span] | None], T],
    ) -> Iterator[T]:
        """The verb's answer for each partition in which something stopped, as far as it is asked for."""
        for place in self._places(topic, group):
            spans = None
            if spots is not None:
                spans = [(offset, offset) for of, offset in sorted(set(spots)) if of == place.id]
                if not spans:
                    continue
            if not self._store.progress.stopped(place.group, place.id, limit=1):
                continue
            try:
                yield verb(place, spans)
            except (GateClosed, GenerationChanged, UnknownPartition):
                self._catalog.forget()  # it was reset, or is gone: nothing has stopped there any more

    def _places(self, topic: str, group: str) -> list[_StoppedAt]:
        """All partitions that the group reads in order, by id; a broadcast group's members read in none."""
        places = [
            _StoppedAt(source, reader, piece)
            for own in self._catalog.readers(topic, group)
            for source, reader in self._catalog.sources(topic, own.name)
            if reader.settings.mode == "ordered"
            for piece in source.route.partitions
        ]
        return sorted(places, key=lambda place: place.id)


def _each(batch: StoredBatch, first: int, last: int, reason: str) -> Iterator[tuple[StoredBatch, str]]:
    """The messages between two offsets, and why they stopped. One that cannot be read is shown empty."""
    try:
        found = stored_records(batch)
    except CorruptBatch as error:
        for offset in range(first, last + 1):
            yield _empty(batch, offset), f"{reason} (its batch cannot be read: {error})"
        return
    for record in found:
        if first <= record.offset <= last:
            yield _alone(record, batch), reason


def _empty(batch: StoredBatch, offset: int) -> StoredBatch:
    builder = BatchBuilder()
    builder.append(batch.appended_at, None, b"", [])
    return StoredBatch(offset, 1, batch.appended_at, with_base_offset(builder.build(), offset))


def _readable(batch: StoredBatch) -> list[Record]:
    """What can be counted of it."""
    try:
        return stored_records(batch)
    except CorruptBatch:
        return []


def _alone(record: Record, batch: StoredBatch) -> StoredBatch:
    """The message in a batch of its own: its neighbours are nobody's business."""
    builder = BatchBuilder(max_bytes=_WHOLE)
    builder.append(record.timestamp, record.key, record.value, list(record.headers))
    return StoredBatch(record.offset, 1, batch.appended_at, with_base_offset(builder.build(), record.offset))
