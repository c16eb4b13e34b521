"""Routes: which partition takes which slots.

A route is one version of the mapping. Its ranges are contiguous, in ascending order, and cover every
slot exactly once; this is checked whenever a route is made (R24, R29).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field

from ..config import SLOTS
from ..errors import InvalidSetting, UnknownPartition

__all__ = ["Range", "Route", "even_ranges"]


@dataclass(frozen=True, slots=True)
class Range:
    first_slot: int
    last_slot: int
    partition: int  # number within the topic, for people
    partition_id: int  # unique in the store and never used again
    shard: str = ""  # "" is the first shard


@dataclass(frozen=True, slots=True)
class Route:
    topic: str
    version: int
    ranges: tuple[Range, ...]
    by_id: bool = False  # the topic looks at ids (R32): without a key the id decides about the slot
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        expected = 0
        for piece in self.ranges:
            assert piece.first_slot == expected <= piece.last_slot, "a route covers each slot exactly once"
            expected = piece.last_slot + 1
        assert expected == SLOTS, "a route covers every slot"
        object.__setattr__(self, "_starts", tuple(r.first_slot for r in self.ranges))

    def of_slot(self, slot: int) -> Range:
        return self.ranges[bisect_right(self._starts, slot) - 1]

    def of_partition(self, number: int) -> Range:
        for piece in self.ranges:
            if piece.partition == number:
                return piece
        known = ", ".join(str(r.partition) for r in self.ranges)
        raise UnknownPartition(f"topic {self.topic!r} has no partition {number}; it has {known}")


def even_ranges(partitions: int) -> list[tuple[int, int]]:
    """Slot ranges of a new topic, as even as they can be.

    >>> even_ranges(3)
    [(0, 340), (341, 681), (682, 1023)]
    """
    if not isinstance(partitions, int) or isinstance(partitions, bool) or not 1 <= partitions <= SLOTS:
        raise InvalidSetting(f"partitions={partitions!r}: choose a whole number from 1 to {SLOTS}")
    edges = [i * SLOTS // partitions for i in range(partitions + 1)]
    return [(edges[i], edges[i + 1] - 1) for i in range(partitions)]
