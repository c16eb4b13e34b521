"""What a poll may be given, and what polls and settles bring: what `poll`, `shared` and `ordered` talk of."""

from __future__ import annotations

import secrets
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field

from ...config import DEFAULTS
from ...endpoint.values import Grant, Lease, PollRequest, Settle, Verdict
from ...model.delivery.delivery import Ask, Delivery, Span, Stamp
from ...model.frozen import dataclass
from ...model.policy.slow_lane import LaneView
from ...store.contract import Group, StoredBatch, Topic

__all__ = [
    "WHOLE", "Departure", "Fresh", "Handed", "Outcome", "PartialPoll", "PartitionNews", "PollAcks",
    "PollBudget", "ReadRelease", "earlier", "lease_of", "new_stamp",
]  # fmt: skip

WHOLE = 2**31  # no limit on bytes


@dataclass(frozen=True, slots=True)
class PartialPoll(PollRequest):
    """A poll of some partitions of its topic, and all of the group's own topics: as Kafka clients ask."""

    only: frozenset[int] = frozenset()  # ids of partitions
    whole: bool = False  # as many messages as it asks for, and the rest of the last one's batch


@dataclass(frozen=True, slots=True)
class ReadRelease(Verdict):
    """A release of what the client may have read: its next delivery is not shown as the first, as Kafka's
    clients expect. It counts for nothing else (I14)."""


@dataclass(frozen=True, slots=True)
class Departure:
    """Stamped deliveries that the mover is to finish."""

    group: Group
    partition: int
    partition_id: int
    deliveries: tuple[Delivery, ...]


@dataclass(frozen=True, slots=True)
class Fresh:
    """What a look was the first to hand out under its token; in ordered groups, a partition it claimed."""

    group: Group
    partition_id: int
    until: int  # `Granted.until`: whoever renews it meanwhile has received it


@dataclass(slots=True)
class Handed:
    """What one look brought."""

    grants: list[Grant] = field(default_factory=list)
    fresh: list[Fresh] = field(default_factory=list)  # what of it nobody else was told of
    departures: list[Departure] = field(default_factory=list)
    draining: bool = False
    next_due: int | None = None  # nothing is due before then
    revoked: tuple[int, ...] = ()  # ordered groups: to be handed over
    lost: tuple[int, ...] = ()  # ordered groups: not the asker's any more
    watchful: bool = False  # ordered groups: others hold something; that they hand it over is news
    started_ms: int = 0  # ordered groups: see `PollReply`
    lanes: LaneView | None = None  # see `PollReply`
    took_all: bool = False  # shared groups: nothing is left that this poll could have been given

    @property
    def worth_telling(self) -> bool:
        return bool(self.grants or self.draining or self.revoked or self.lost)


@dataclass(slots=True)
class Outcome:
    """What settling brought."""

    lost: list[tuple[Settle, tuple[Span, ...]]] = field(default_factory=list)
    kept: list[tuple[Settle, tuple[Lease, ...]]] = field(default_factory=list)  # ordered groups
    departures: list[Departure] = field(default_factory=list)
    waiting: set[int] = field(default_factory=set)  # groups to which something was handed back
    away: list[Settle] = field(default_factory=list)  # not settled: their shard is away


@dataclass(slots=True)
class PollAcks:
    """Acks that came with a poll of their group and topic. They are stored with what that hands out, or
    before: its member is done with them."""

    topic: str
    group: str
    parts: Sequence[Settle]
    outcome: Outcome | None = None  # None: they are not stored yet


@dataclass(frozen=True, slots=True)
class PartitionNews:
    """Partitions that had news since nothing was left for a group."""

    partitions: frozenset[int]
    waited: bool  # for the news: nothing of it was purged before the poll came


@dataclass(slots=True)
class PollBudget:
    """A budget is what one poll may still be given; the partitions it visits share it."""

    request: PollRequest
    dead: Topic | None
    messages: int
    bytes: int
    empty_handed: bool
    full: bool = False
    left: bool = False  # a partition may have more than this poll was given of it
    unread: bool = False  # something was granted, and its batches could not be read
    alone: bool = False  # nothing more, since what it has, or holds, is to be settled first (I14)
    batches: list[StoredBatch] = field(default_factory=list)
    acks: PollAcks | None = None
    news: PartitionNews | None = None  # only these partitions can have something; None: any

    @contextmanager
    def limited(self, messages: int) -> Iterator[None]:
        """It has no more than so many meanwhile."""
        aside = max(0, self.messages - messages)
        self.messages -= aside
        try:
            yield
        finally:
            self.messages += aside
            self.left = self.left or self.full
            self.full = self.full and not (aside and self.messages > 0 and self.bytes > 0 and not self.alone)

    def reach(self, cursor: int) -> int:
        """The offset up to which the batches that were read go."""
        return reach(self.batches, cursor)

    @property
    def most_bytes(self) -> int:
        """What it may bring of a partition. What is settled as it is handed out cannot be given back."""
        return WHOLE if self.request.on_delivery else self.bytes

    def most_messages(self, again: bool) -> int:
        """Of what comes `again` it is not known how large it is."""
        few = max(1, self.bytes // DEFAULTS.max_batch_bytes)
        return min(self.messages, few) if again and self.request.on_delivery else self.messages

    def ask(self, cursor: int, *, again: bool = False) -> Ask:
        return Ask(
            member=self.request.member,
            token=self.request.token,
            messages=self._to_end_of_batch(self.batches, cursor, self.most_messages(again)),
            end=self.reach(cursor),
            empty_handed=self.empty_handed,
            on_delivery=self.request.on_delivery,
            dead=new_stamp(self.dead),
        )

    def ask_fresh(self, batches: Sequence[StoredBatch], cursor: int, messages: int) -> Ask:
        """Ask for new messages alone, of the batches that were read."""
        request, most = self.request, self._to_end_of_batch(batches, cursor, messages)
        end = reach(batches, cursor)
        return Ask(request.member, request.token, most, end, on_delivery=request.on_delivery, fresh=True)

    def _to_end_of_batch(self, batches: Sequence[StoredBatch], cursor: int, messages: int) -> int:
        """Whoever is sent whole batches had better have all of them: else they are sent again and again."""
        if isinstance(self.request, PartialPoll) and self.request.whole:
            at = bisect_left(batches, cursor + messages - 1, key=lambda batch: batch.last_offset)
            if at < len(batches):
                return max(messages, batches[at].last_offset - cursor + 1)
        return messages

    def spend(self, leases: Sequence[Lease], batches: Sequence[StoredBatch]) -> None:
        for lease in leases:
            self.messages -= lease.last - lease.first + 1
            self.alone = self.alone or lease.alone
        for batch in batches:
            self.bytes -= len(batch.data)
        self.empty_handed = False
        spent = self.messages <= 0 or self.bytes <= 0
        self.full = self.full or spent or self.alone


def reach(batches: Sequence[StoredBatch], cursor: int) -> int:
    """The offset up to which these batches go."""
    return max(cursor, batches[-1].last_offset + 1) if batches else cursor


def new_stamp(target: Topic | None) -> Stamp | None:
    """A fresh identity for moves to that topic."""
    if target is None:
        return None
    return Stamp(secrets.randbits(62), target.route.ranges[0].partition_id)


def lease_of(delivery: Delivery) -> Lease:
    """What the holder of a partition is told of a delivery (ordered groups)."""
    return Lease(delivery.first, delivery.last, delivery.attempt, delivery.alone, delivery.visible_at)


def earlier(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)
