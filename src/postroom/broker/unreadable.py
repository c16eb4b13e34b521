"""Stored batches that nobody can read: damaged at rest, or by whoever wrote them.

Such a batch stops no group. Whatever a delivery of it was to become (a dead letter, a retry, a message of the
slow lane, one that is redriven), its bytes become one dead letter of the group, with the reason and its
place, and the delivery is settled. Decides what the letter holds and under which identity it is appended: the
same for all deliveries of the batch in one generation of the group, so that it is stored once however many
members meet however small parts of it (I3).
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b

from ..config import DEFAULTS
from ..model.batch import BatchBuilder, Headers, Record
from ..model.names import HEADER_PREFIX, REDRIVE_GROUP, owner
from ..store.contract import Group, StoredBatch, Topic
from .catalog import CatalogCache

__all__ = ["Letter", "again", "is_letter", "letter_box", "letter_of", "why"]

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
