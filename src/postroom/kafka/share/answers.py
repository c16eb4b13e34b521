"""The answers to ShareFetch and ShareAcknowledge, written by hand: batches are passed on as they are stored.

Whatever these say must be what `kio` says, which a test holds against them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from ..primitives import NO_UUID, Piece, Writer

__all__ = ["SharedPartition", "Sharing", "acknowledge_answer", "fetch_answer"]

_LOCK_FROM = 2  # version of ShareAcknowledge that says how long a lease is
_MOST_ATTEMPTS = 2**15 - 1


@dataclass(slots=True)
class SharedPartition:
    index: int
    error: int = 0
    message: str | None = None
    ack_error: int = 0
    ack_message: str | None = None
    pieces: list[tuple[int, list[Piece]]] = field(default_factory=list)  # a batch, with its first offset
    acquired: list[tuple[int, int, int]] = field(default_factory=list)  # first, last, attempt
    named: bool = False  # it is answered for, whatever there is

    @property
    def worth_telling(self) -> bool:
        return bool(self.named or self.error or self.ack_error or self.acquired)


@dataclass(slots=True)
class Sharing:
    """What is answered to one request. `lease_ms`: how long the consumer has what it has acquired."""

    lease_ms: int
    error: int = 0
    message: str | None = None
    topics: dict[UUID | None, dict[int, SharedPartition]] = field(default_factory=dict)

    def partition(self, topic: UUID | None, index: int) -> SharedPartition:
        return self.topics.setdefault(topic, {}).setdefault(index, SharedPartition(index))

    def emptied(self) -> None:
        """There is no room for the messages: it is as if there were none."""
        for partitions in self.topics.values():
            for one in partitions.values():
                one.pieces, one.acquired = [], []

    @property
    def size(self) -> int:
        """Bytes of batches."""
        return sum(
            len(piece)
            for partitions in self.topics.values()
            for one in partitions.values()
            for _, pieces in one.pieces
            for piece in pieces
        )

    def told(self) -> list[tuple[UUID | None, list[SharedPartition]]]:
        each = ((id, [one for one in of.values() if one.worth_telling]) for id, of in self.topics.items())
        return [(id, partitions) for id, partitions in each if partitions]


def fetch_answer(version: int, found: Sharing) -> list[Piece]:
    """A ShareFetch answer of version 1 or 2."""
    out = _begun(found)
    out.i32(found.lease_ms)
    topics = found.told()
    out.count(len(topics))
    for id, partitions in topics:
        out.uuid(id or NO_UUID)
        out.count(len(partitions))
        for one in partitions:
            _fetched(out, one)
        out.tags()
    return _ended(out)


def _fetched(out: Writer, one: SharedPartition) -> None:
    out.i32(one.index)
    out.i16(one.error)
    out.string(one.message)
    out.i16(one.ack_error)
    out.string(one.ack_message)
    _leader(out)
    pieces = [piece for _, of_batch in sorted(one.pieces, key=lambda batch: batch[0]) for piece in of_batch]
    out.count(sum(map(len, pieces)))
    out.raw(pieces)
    out.count(len(one.acquired))
    for first, last, attempt in sorted(one.acquired):
        out.i64(first)
        out.i64(last)
        out.i16(min(attempt, _MOST_ATTEMPTS))
        out.tags()
    out.tags()


def acknowledge_answer(version: int, found: Sharing) -> list[Piece]:
    """A ShareAcknowledge answer of version 1 or 2."""
    out = _begun(found)
    if version >= _LOCK_FROM:
        out.i32(found.lease_ms)
    topics = found.told()
    out.count(len(topics))
    for id, partitions in topics:
        out.uuid(id or NO_UUID)
        out.count(len(partitions))
        for one in partitions:
            out.i32(one.index)
            out.i16(one.ack_error)
            out.string(one.ack_message)
            _leader(out)
            out.tags()
        out.tags()
    return _ended(out)


def _begun(found: Sharing) -> Writer:
    out = Writer(flexible=True)
    out.i32(0)
    out.i16(found.error)
    out.string(found.message)
    return out


def _leader(out: Writer) -> None:
    """Any broker serves any partition: none is named instead of this one."""
    out.i32(-1)
    out.i32(-1)
    out.tags()


def _ended(out: Writer) -> list[Piece]:
    out.count(0)  # no broker has to be known for the leaders above
    out.tags()
    return out.done()
