"""A consumer of a share group as its broker knows it: a session, and the messages it has acquired (KIP-932).

A session is a list of partitions that a consumer wants, kept between its requests and numbered by epochs: 0
opens it, -1 closes it, and any other must be the one that follows. What the consumer has acquired is kept
beside it, since an acknowledgement names offsets and nothing else: where they are stored, and the token that
proves who has them, is looked up here. The lease itself is in the store, which has the last word (I7).

Pure: no I/O, no clock. An acknowledgement is bounded by what was acquired, however long a range it names
(I22).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from itertools import groupby
from uuid import UUID

__all__ = [
    "CLOSES",
    "OPENS",
    "AckType",
    "Acknowledged",
    "Acquired",
    "EpochError",
    "InvalidAckError",
    "PartitionOf",
    "ShareSession",
    "acknowledged",
    "next_epoch",
]

OPENS, CLOSES = 0, -1
"""Epochs that open and close a session."""

PartitionOf = tuple[UUID | None, int]
"""A partition, as Kafka clients name it: the topic's id, and a number."""

_LAST_EPOCH = 2**31 - 1


class AckType(IntEnum):
    """What a consumer says of a message."""

    GAP = 0  # there is none at this offset
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4


class EpochError(Exception):
    """The request is not the one that follows."""


class InvalidAckError(Exception):
    """An acknowledgement makes no sense, whatever was acquired."""


def next_epoch(epoch: int) -> int:
    """Return the epoch of the request that follows.

    >>> next_epoch(7), next_epoch(2**31 - 1)
    (8, 1)
    """
    return 1 if epoch >= _LAST_EPOCH else epoch + 1


@dataclass(frozen=True, slots=True)
class Acquired:
    """Offsets of one delivery, as Kafka clients count them; `origin` and the offset in the partition."""

    first: int
    last: int
    topic: str  # where it is stored: the topic itself, or one of the group's own
    partition_id: int
    origin: int
    token: int
    attempt: int
    until: int  # the lease ends then

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def part(self, first: int, last: int) -> Acquired:
        return replace(self, first=first, last=last)

    def until_then(self, until: int) -> Acquired:
        return replace(self, until=until)


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """One thing that is said about a range of offsets."""

    first: int
    last: int
    kind: AckType


def acknowledged(
    batches: Iterable[tuple[int, int, Sequence[int]]], *, renews: bool = False
) -> list[Acknowledged]:
    """Return what is said of each range: one type for all of it, or one for each offset.

    `renews`: whether a lease may be renewed. InvalidAckError for ranges that are none, or in no order.

    >>> acknowledged([(3, 5, [1, 1, 2])])[1]
    Acknowledged(first=5, last=5, kind=<AckType.RELEASE: 2>)
    """
    found: list[Acknowledged] = []
    upto = -1
    for first, last, kinds in batches:
        if not upto < first <= last or len(kinds) not in (1, last - first + 1):
            raise InvalidAckError(f"offsets {first} to {last} with {len(kinds)} types are no acknowledgement")
        upto = last
        if len(kinds) == 1:
            found.append(Acknowledged(first, last, _kind(kinds[0], renews)))
            continue
        at = first
        for kind, run in groupby(kinds):
            size = len(list(run))
            found.append(Acknowledged(at, at + size - 1, _kind(kind, renews)))
            at += size
    return found


def _kind(number: int, renews: bool) -> AckType:
    if not AckType.GAP <= number <= (AckType.RENEW if renews else AckType.REJECT):
        raise InvalidAckError(f"there is no acknowledgement of type {number} here")
    return AckType(number)


@dataclass(slots=True)
class ShareSession:
    """What a broker keeps of one consumer of a share group. `partitions`: those it fetches."""

    epoch: int = CLOSES  # that the next request has to have; before it is opened none is right
    partitions: dict[PartitionOf, None] = field(default_factory=dict)
    used_at: int = 0
    in_flight: int = 0  # offsets that are acquired
    _acquired: dict[PartitionOf, list[Acquired]] = field(default_factory=dict)  # lowest offset first

    # ---- epochs ----

    def advance(self, epoch: int) -> None:
        """A request comes. EpochError, and nothing is changed, unless it is the one that follows.

        Whoever opens a session that is open already begins it anew, and has what it had acquired.
        """
        if epoch == OPENS:
            self.partitions.clear()
        elif epoch not in (CLOSES, self.epoch) or self.epoch == CLOSES:
            raise EpochError(f"epoch {epoch} came, and {self.epoch} was to follow")
        self.epoch = CLOSES if epoch == CLOSES else next_epoch(epoch)

    # ---- what is acquired ----

    def acquire(self, partition: PartitionOf, acquired: Acquired) -> None:
        """It has these offsets of a partition from now on; whatever it had of them is old."""
        rows = self._acquired.setdefault(partition, [])
        self._cut(rows, acquired.first, acquired.last)
        rows.insert(bisect_left(rows, acquired.first, key=_first), acquired)
        self.in_flight += acquired.size

    def settle(self, partition: PartitionOf, said: Acknowledged) -> tuple[list[Acquired], bool]:
        """Return what of the range it has, and whether that is all of it. It has it no longer."""
        rows = self._acquired.get(partition, [])
        found = self._cut(rows, said.first, said.last)
        if not rows:
            self._acquired.pop(partition, None)
        return found, sum(one.size for one in found) == said.last - said.first + 1

    def _cut(self, rows: list[Acquired], first: int, last: int) -> list[Acquired]:
        low = bisect_left(rows, first, key=_last)
        high = bisect_left(rows, last + 1, key=_first)
        found, left = list[Acquired](), list[Acquired]()
        for row in rows[low:high]:
            found.append(row.part(max(first, row.first), min(last, row.last)))
            if row.first < first:
                left.append(row.part(row.first, first - 1))
            if row.last > last:
                left.append(row.part(last + 1, row.last))
        rows[low:high] = left
        self.in_flight -= sum(one.size for one in found)
        return found

    def give_up(self, partition: PartitionOf, acquired: Acquired) -> None:
        """It has these offsets no longer."""
        self._cut(self._acquired.get(partition, []), acquired.first, acquired.last)

    def forget_ended(self, now: int) -> None:
        """What was not acknowledged within its lease is somebody else's."""
        for partition, rows in list(self._acquired.items()):
            kept = [row for row in rows if row.until > now]
            if len(kept) < len(rows):
                self.in_flight -= sum(row.size for row in rows) - sum(row.size for row in kept)
                if kept:
                    self._acquired[partition] = kept
                else:
                    del self._acquired[partition]

    def drained(self) -> Iterator[Acquired]:
        """Yield all that it has; it has it no longer."""
        for rows in self._acquired.values():
            yield from rows
        self._acquired.clear()
        self.in_flight = 0


def _first(row: Acquired) -> int:
    return row.first


def _last(row: Acquired) -> int:
    return row.last
