"""Stored batches that nobody can read: damaged at rest, or by whoever wrote them.

Such a batch stops no group. Whatever a delivery of it was to become (a dead letter, a retry, a message of the
slow lane, one that is redriven), its bytes become one dead letter of the group, with the reason and its
place, and the delivery is settled. Decides what the letter holds and under which identity it is appended: the
same for all deliveries of the batch in one generation of the group, so that it is stored once however many
members meet however small parts of it (I3).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b

from ...config import DEFAULTS, BrokerTuning
from ...errors import CorruptBatch, UnknownPartition
from ...model.messages.batch import BatchBuilder, Headers, Record, stored_records
from ...model.topology.names import HEADER_PREFIX, REDRIVE_GROUP, owner
from ...store.contract import Group, Store, StoredBatch, Topic
from ..topology.catalog_cache import CatalogCache

__all__ = ["CheckBatches", "Letter", "again", "is_letter", "letter_box", "letter_of", "why"]


_MARK = f"{HEADER_PREFIX}unreadable"
_WHOLE = 2**31 - 1  # internal appends are exempt from limits on size (I17)


@dataclass(frozen=True, slots=True)
class Letter:
    """What is kept of an unreadable batch."""

    offset: int  # where it is, of the batch's first message
    said: str  # for the log; "": it was a letter before
    timestamp: int
    value: bytes
    headers: Headers

    def build(self, producer_id: int) -> bytes:
        builder = BatchBuilder(max_bytes=_WHOLE)
        builder.append(self.timestamp, None, self.value, self.headers)
        return builder.build(producer_id, 0, 0)

    def identity(self, group: Group, partition_id: int) -> int:
        place = f"{group.id}:{group.generation}:{partition_id}:{self.offset}"
        return int.from_bytes(blake2b(place.encode(), digest_size=8).digest()) >> 2


def letter_of(
    batch: StoredBatch, error: Exception, place: tuple[str, int, int], attempts: int, now: int
) -> Letter:
    """Of a batch at this place: topic, partition and partition id."""
    topic, partition, partition_id = place
    value = batch.data[: DEFAULTS.max_message_bytes]
    cut = f"the first {len(value):,} of " if len(value) < len(batch.data) else ""
    said = f"{topic}:{partition}:{batch.base_offset}"
    reason = (
        f"unreadable batch {said}, {batch.records} messages, offsets {batch.base_offset} to "
        f"{batch.last_offset}: {why(error)}; the value is {cut}its {len(batch.data):,} bytes"
    )
    found = {
        "topic": topic,
        "partition": partition,
        "offset": batch.base_offset,
        "timestamp": batch.appended_at,
        "id": f"{partition_id}-{batch.base_offset}",
        "reason": reason,
        "attempts": attempts,
        "dead-at": now,
        "last-offset": batch.last_offset,
        "messages": batch.records,
        "unreadable": len(batch.data),
    }
    headers: Headers = [(f"{HEADER_PREFIX}{name}", str(text).encode()) for name, text in found.items()]
    return Letter(batch.base_offset, f"{said} ({batch.records} messages: {why(error)})", now, value, headers)


def why(error: Exception) -> str:
    return str(error)[:300]


def is_letter(record: Record) -> bool:
    """Whether this dead letter is an unreadable batch: nobody could handle it."""
    return any(name == _MARK for name, _ in record.headers)


def again(record: Record) -> Letter:
    """The letter once more: who redrives it gets it back."""
    return Letter(record.offset, "", record.timestamp, record.value or b"", list(record.headers))


def letter_box(catalog: CatalogCache, group: Group) -> int:
    """The partition that the group's dead letters are stored in. Blocking."""
    return _box(catalog, group).route.ranges[0].partition_id


def _box(catalog: CatalogCache, group: Group) -> Topic:
    if group.name == REDRIVE_GROUP:
        return catalog.topic(group.topic)
    topic, name = owner(group.topic) or (group.topic, group.name)
    return catalog.dead_letters(topic, name) or catalog.make_dead_letters(topic, name)


_log = logging.getLogger("postroom.broker")

_RUN_BYTES = 4 * 1024 * 1024  # read in one run, about,
_READ_BYTES = 512 * 1024
_READ_MESSAGES = 5_000
_MOST_KNOWN = 10_000  # batches that were named already

_Place = tuple[str, int, int]  # topic, partition, partition id


class CheckBatches:
    """The background job that asks whether the batches that are stored are still what was stored.

    A disk may turn bytes over and say nothing. A duty reads the logs again, some MB a minute, and says once
    of each batch that cannot be read where it is. Decides how much is read at a time and when a round begins
    anew. Must change nothing: whoever is handed such a batch goes past it (`unreadable`).
    """

    name: str = "check-batches"
    every_s: float = 60

    def __init__(self, store: Store, tuning: BrokerTuning = DEFAULTS.tuning.broker) -> None:
        self._store = store
        self._run_s, self._round_s = tuning.unreadable_run_s, tuning.unreadable_round_s
        self.found: Callable[[str], None] = lambda topic: None  # is told the topic of each
        self._places: list[_Place] = []
        self._offset = 0  # where to go on in the last of them
        self._next_round = 0.0
        self._known: set[tuple[int, int]] = set()

    def run_once(self) -> None:
        if not self._places and not self._begin():
            return
        until, left = time.monotonic() + self._run_s, _RUN_BYTES
        while self._places and left > 0 and time.monotonic() < until:
            left -= self._step(self._places[-1])

    def _begin(self) -> bool:
        now = time.monotonic()
        if now < self._next_round:
            return False
        self._next_round, self._offset = now + self._round_s, 0
        self._places = [
            (topic.name, piece.partition, piece.partition_id)
            for topic in self._store.catalog.topics()
            for piece in topic.route.partitions
        ]
        random.shuffle(self._places)  # whoever holds the duty for a short time only does some of all
        return True

    def _step(self, place: _Place) -> int:
        """Read some of a partition; how many bytes that were."""
        batches = self._read(place[2])
        for batch in batches:
            try:
                stored_records(batch)
            except CorruptBatch as error:
                self._tell(place, batch, error)
        if not batches:
            self._places.pop()
            self._offset = 0
            return 4096  # it was asked for, all the same
        self._offset = batches[-1].last_offset + 1
        return sum(len(batch.data) for batch in batches)

    def _read(self, partition_id: int) -> list[StoredBatch]:
        """From the store: what is in memory was checked when it came. Nothing of a shard that is away."""
        if not self._store.present([partition_id]):
            return []
        try:
            bounds = self._store.log.bounds([partition_id])[partition_id]
            start = max(self._offset, bounds.start)
            if start >= bounds.end:
                return []
            return self._store.log.read(
                partition_id, start, max_messages=_READ_MESSAGES, max_bytes=_READ_BYTES
            )
        except UnknownPartition:
            return []  # it was deleted meanwhile

    def _tell(self, place: _Place, batch: StoredBatch, error: CorruptBatch) -> None:
        topic, partition, partition_id = place
        if (partition_id, batch.base_offset) in self._known or len(self._known) >= _MOST_KNOWN:
            return
        self._known.add((partition_id, batch.base_offset))
        _log.error(
            "%s:%d:%d, a stored batch of %d messages, cannot be read: %s; groups go past it and keep its "
            "bytes as a dead letter. Check the disk and the backups, and run `postroom doctor --deep`",
            topic,
            partition,
            batch.base_offset,
            batch.records,
            why(error),
        )
        self.found(topic)
