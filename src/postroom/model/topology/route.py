"""Routes: which partition takes which slots, and how one route becomes the next.

A route is one version of the mapping. Its ranges are contiguous, in ascending order, and cover every
slot exactly once; this is checked whenever a route is made (R24, R29).

A change seals some partitions of the newest route and opens others on exactly the same slots: a split, a
merge of neighbours, a move, or a renewal, which gives a sealed partition a fresh successor on its own range
(I11). It is drafted first (`split`, `merge`, `move`, `renew`), without partitions; the store gives those that
open a number and an id. Versions are consecutive: a change of version n makes n + 1, or nothing.

The predecessors of a partition that opens are the sealed ones that had a slot of its range: an ordered group
reads it once it has read all of those (I10).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from ...config import SLOTS
from ...errors import InvalidSetting, UnknownPartition
from ..messages.slot import Keys, slot_by

__all__ = [
    "Change",
    "Draft",
    "Kind",
    "Range",
    "Route",
    "even_ranges",
    "merge",
    "move",
    "renew",
    "split",
]

Kind = Literal["split", "merge", "move", "renew"]


@dataclass(frozen=True, slots=True)
class Range:
    first_slot: int
    last_slot: int
    partition: int  # number within the topic, for people; never used again
    partition_id: int  # unique in the store and never used again
    shard: str = ""  # "" is the first shard within the store; people read "first"

    @property
    def slots(self) -> int:
        return self.last_slot - self.first_slot + 1

    def overlaps(self, other: Range) -> bool:
        return self.first_slot <= other.last_slot and other.first_slot <= self.last_slot

    def __str__(self) -> str:
        return f"partition {self.partition} (slots {self.first_slot} to {self.last_slot})"


@dataclass(frozen=True, slots=True)
class Route:
    topic: str
    version: int
    ranges: tuple[Range, ...]
    by_id: bool = False  # the topic looks at ids (R32): without a key the id decides about the slot
    sealed: tuple[Range, ...] = ()  # of earlier versions, as long as their logs are there; the oldest first
    predecessors: Mapping[int, tuple[int, ...]] = field(default_factory=dict, hash=False)
    # of a partition, by id: those it follows, without what is gone
    away: tuple[int, ...] = field(default=(), compare=False)  # of the ranges, those whose shard is away now
    keys: Keys = "postroom"  # by which rule a key has its slot
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        expected = 0
        for piece in self.ranges:
            assert piece.first_slot == expected <= piece.last_slot, "a route covers each slot exactly once"
            expected = piece.last_slot + 1
        assert expected == SLOTS, "a route covers every slot"
        assert len({r.partition_id for r in self.ranges}) == len(self.ranges), "a partition has one range"
        object.__setattr__(self, "_starts", tuple(r.first_slot for r in self.ranges))

    @property
    def partitions(self) -> tuple[Range, ...]:
        """All partitions that can be read; sealed ones come first."""
        return (*self.sealed, *self.ranges)

    def successors(self, partition_id: int) -> tuple[Range, ...]:
        """The partitions of this route that took over slots of a sealed one, by however many steps."""
        newer = self.descendants(partition_id)
        return tuple(piece for piece in self.ranges if piece.partition_id in newer)

    def descendants(self, partition_id: int) -> set[int]:
        """Return all partitions that follow a sealed one, by however many steps."""
        newer: set[int] = set()
        for piece in self.partitions:  # whatever follows comes later
            before = self.predecessors.get(piece.partition_id, ())
            if any(one == partition_id or one in newer for one in before):
                newer.add(piece.partition_id)
        return newer

    def slot_of(self, key: bytes) -> int:
        """The slot of a key, by the topic's rule."""
        return slot_by(self.keys, key, self._starts)

    def of_slot(self, slot: int) -> Range:
        return self.ranges[bisect_right(self._starts, slot) - 1]

    def of_partition(self, number: int) -> Range:
        for piece in self.ranges:
            if piece.partition == number:
                return piece
        raise self._unknown(number, self.ranges)

    def readable(self, number: int) -> Range:
        """One that takes messages, or a sealed one whose messages are still there."""
        for piece in self.partitions:
            if piece.partition == number:
                return piece
        raise self._unknown(number, self.partitions)

    def _unknown(self, number: int, there: Sequence[Range]) -> UnknownPartition:
        known = ", ".join(str(r.partition) for r in there)
        was = next((r for r in self.sealed if r.partition == number), None)
        if was is not None:
            return UnknownPartition(
                f"{was} of topic {self.topic!r} is sealed, and others have its slots by now: it has {known}"
            )
        return UnknownPartition(f"topic {self.topic!r} has no partition {number}; it has {known}")

    def after(self, change: Change) -> Route:
        """The next version."""
        assert change.version == self.version, "a change is of the version it was drafted on"
        sealed = {piece.partition_id for piece in change.seals}
        assert sealed <= {piece.partition_id for piece in self.ranges}, "only what is open is sealed"
        kept = [piece for piece in self.ranges if piece.partition_id not in sealed]
        ranges = sorted([*kept, *change.opens], key=lambda piece: piece.first_slot)
        return replace(
            self,
            version=self.version + 1,
            ranges=tuple(ranges),
            sealed=(*self.sealed, *change.seals),
            predecessors={**self.predecessors, **change.predecessors},
        )

    def without(self, partition_id: int) -> Route:
        """Return the route once the log of a sealed partition is gone: it counts as read by all.

        What followed it follows what it followed: a group that is reset reads those again first.
        """
        before = self.predecessors.get(partition_id, ())
        left = {
            one: tuple(dict.fromkeys(p for old in olds for p in (before if old == partition_id else (old,))))
            for one, olds in self.predecessors.items()
            if one != partition_id
        }
        sealed = tuple(piece for piece in self.sealed if piece.partition_id != partition_id)
        return replace(self, sealed=sealed, predecessors={one: olds for one, olds in left.items() if olds})


@dataclass(frozen=True, slots=True)
class Draft:
    """A change that is wanted. Partitions that open have the number and id -1 until the store gives them."""

    kind: Kind
    topic: str
    version: int
    seals: tuple[Range, ...]
    opens: tuple[Range, ...]

    def __post_init__(self) -> None:
        assert self.seals and self.opens, "a change seals and opens something"
        assert _slots(self.seals) == _slots(self.opens), "what opens covers what is sealed, exactly once"

    def numbered(self, change_id: int, topic_id: int, names: Sequence[tuple[int, int]]) -> Change:
        """`names`: the number and id of each partition that opens."""
        opens = tuple(
            replace(piece, partition=number, partition_id=partition_id)
            for piece, (number, partition_id) in zip(self.opens, names, strict=True)
        )
        return Change(change_id, topic_id, self.kind, self.topic, self.version, self.seals, opens)


@dataclass(frozen=True, slots=True)
class Change:
    """A change under way: what is written down before the first partition is touched."""

    id: int  # random: whoever works on it knows by this that it is still the same one
    topic_id: int
    kind: Kind
    topic: str
    version: int  # of the route it changes; the next version is the one it makes
    seals: tuple[Range, ...]
    opens: tuple[Range, ...]

    @property
    def shards(self) -> tuple[str, ...]:
        """Every shard that it touches, each once."""
        return tuple(dict.fromkeys(piece.shard for piece in (*self.seals, *self.opens)))

    @property
    def predecessors(self) -> Mapping[int, tuple[int, ...]]:
        """The predecessors of each partition that opens, by id."""
        return {
            new.partition_id: tuple(old.partition_id for old in self.seals if old.overlaps(new))
            for new in self.opens
        }

    def successors(self, partition_id: int) -> tuple[Range, ...]:
        return tuple(
            new for new in self.opens for old in self.seals
            if old.partition_id == partition_id and old.overlaps(new)
        )  # fmt: skip


def even_ranges(partitions: int) -> list[tuple[int, int]]:
    """Slot ranges of a new topic, as even as they can be.

    >>> even_ranges(3)
    [(0, 340), (341, 681), (682, 1023)]
    """
    if not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= SLOTS:
        raise InvalidSetting(f"partitions={partitions!r}: choose a whole number from 1 to {SLOTS}")
    edges = [i * SLOTS // partitions for i in range(partitions + 1)]
    return [(edges[i], edges[i + 1] - 1) for i in range(partitions)]


# ---- drafts ----


def split(route: Route, partition: int, at: int | None = None) -> Draft:
    """Two partitions in the place of one: the second begins with slot `at`, by default in the middle."""
    old = route.of_partition(partition)
    if old.slots < 2:
        raise InvalidSetting(
            f"{old} of topic {route.topic!r} has one slot only and cannot be split: all its keys share it"
        )
    slot = (old.first_slot + old.last_slot + 1) // 2 if at is None else at
    if not isinstance(slot, int) or isinstance(slot, bool) or not old.first_slot < slot <= old.last_slot:
        raise InvalidSetting(
            f"at={at!r}: the second part begins with slot `at`, so for {old} of topic {route.topic!r} "
            f"choose {old.first_slot + 1} to {old.last_slot}"
        )
    opens = (_piece(old.first_slot, slot - 1, old.shard), _piece(slot, old.last_slot, old.shard))
    return Draft("split", route.topic, route.version, (old,), opens)


def merge(route: Route, one: int, other: int) -> Draft:
    """One partition in the place of two neighbours; it is where the first of them was."""
    first, second = sorted(
        (route.of_partition(one), route.of_partition(other)), key=lambda piece: piece.first_slot
    )
    if first == second:
        raise InvalidSetting(f"partition {one} cannot be merged with itself; name one of its neighbours")
    if first.last_slot + 1 != second.first_slot:
        near = [
            str(r.partition)
            for r in route.ranges
            if r.last_slot + 1 == first.first_slot or r.first_slot == first.last_slot + 1
        ]
        raise InvalidSetting(
            f"{first} and {second} of topic {route.topic!r} are not neighbours: only those can be merged; "
            f"the neighbours of partition {first.partition} are {' and '.join(near)}"
        )
    opens = (_piece(first.first_slot, second.last_slot, first.shard),)
    return Draft("merge", route.topic, route.version, (first, second), opens)


def move(route: Route, partition: int, shard: str) -> Draft:
    """Draft the move of a partition: its range goes to another shard."""
    old = route.of_partition(partition)
    if old.shard == shard:
        raise InvalidSetting(
            f"partition {partition} of topic {route.topic!r} is on that shard already; name another"
        )
    opens = (_piece(old.first_slot, old.last_slot, shard),)
    return Draft("move", route.topic, route.version, (old,), opens)


def renew(route: Route, partition_ids: Collection[int]) -> Draft | None:
    """A fresh successor on its own range for each of these that is in the route; None if none is."""
    old = tuple(piece for piece in route.ranges if piece.partition_id in partition_ids)
    if not old:
        return None
    opens = tuple(_piece(piece.first_slot, piece.last_slot, piece.shard) for piece in old)
    return Draft("renew", route.topic, route.version, old, opens)


def _piece(first_slot: int, last_slot: int, shard: str) -> Range:
    return Range(first_slot, last_slot, -1, -1, shard)


def _slots(ranges: Sequence[Range]) -> list[tuple[int, int]]:
    """Return the slots that these cover, as spans that do not touch; fail if a slot is covered twice."""
    spans: list[tuple[int, int]] = []
    for piece in sorted(ranges, key=lambda piece: piece.first_slot):
        assert piece.first_slot <= piece.last_slot, "a range has a slot"
        if spans and piece.first_slot <= spans[-1][1]:
            raise AssertionError("a slot is covered twice")
        if spans and piece.first_slot == spans[-1][1] + 1:
            spans[-1] = (spans[-1][0], piece.last_slot)
        else:
            spans.append((piece.first_slot, piece.last_slot))
    return spans
