"""A partition as Kafka clients see it: a chain of partitions that had its slots, with offsets that never
jump.

Kafka's partitions are fixed, ours are moved. So a Kafka partition is the chain of those that had its slots,
the oldest first. Each has an origin: the offset that Kafka clients see is the origin and the offset in the
partition. The seal, which is the last record of a partition that was moved, has no offset for them: what
follows begins with that offset. So offsets are dense, they rise, and the end that is reported can be reached
(I28).

Decides where an offset lies. Must never open a batch, and knows nothing of what is kept.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

from .route import Change, Route

__all__ = ["Chain", "Link", "chains_of", "numbered_chains", "origins_after", "settled_in"]


@dataclass(frozen=True, slots=True)
class Link:
    """A partition of a chain."""

    partition_id: int
    origin: int = 0
    number: int = 0  # of the partition, within its topic


@dataclass(frozen=True, slots=True)
class Chain:
    """A Kafka partition. Without a link, all that it ever had is gone."""

    index: int
    links: tuple[Link, ...]

    @property
    def newest(self) -> Link:
        return self.links[-1]

    def at(self, offset: int) -> int:
        """Return the place in the chain of the link with this offset; the first link, if it lies before all.

        >>> Chain(0, (Link(7, 0), Link(9, 100))).at(99)
        0
        >>> Chain(0, (Link(7, 0), Link(9, 100))).at(100)
        1
        """
        return max(0, bisect_right(self.links, offset, key=lambda link: link.origin) - 1)


def chains_of(route: Route, origins: Mapping[int, int]) -> tuple[Chain, ...]:
    """Return the Kafka partitions of a topic that was made for Kafka clients: one for each range."""
    found = []
    for index, newest in enumerate(route.ranges):
        older = [piece for piece in route.sealed if piece.overlaps(newest)]
        links = (Link(p.partition_id, origins.get(p.partition_id, 0), p.partition) for p in (*older, newest))
        found.append(Chain(index, tuple(sorted(links, key=lambda link: (link.origin, link.partition_id)))))
    return tuple(found)


def numbered_chains(route: Route) -> tuple[Chain, ...]:
    """Return the Kafka partitions of any other topic: each partition is one, under its number.

    Those that are gone stay as chains without a link, since Kafka clients count partitions from 0.
    """
    there = {piece.partition: Link(piece.partition_id, 0, piece.partition) for piece in route.partitions}
    return tuple(
        Chain(number, (there[number],) if number in there else ()) for number in range(max(there) + 1)
    )


_READ = 2**62  # a partition of which nothing is left to read


def settled_in(chains: tuple[Chain, ...], positions: Mapping[int, int]) -> dict[int, int]:
    """Return where a group goes on, by partition id, from the offsets that Kafka clients know, by index.

    >>> settled_in((Chain(0, (Link(7, 0), Link(9, 100))),), {0: 120})
    {7: 4611686018427387904, 9: 20}
    """
    found = {}
    for chain in chains:
        offset = positions.get(chain.index)
        for at, link in enumerate(chain.links if offset is not None else ()):
            assert offset is not None
            is_read = at + 1 < len(chain.links) and offset >= chain.links[at + 1].origin
            found[link.partition_id] = _READ if is_read else max(0, offset - link.origin)
    return found


def origins_after(change: Change, origins: Mapping[int, int], ends: Mapping[int, int]) -> dict[int, int]:
    """Return the origins of what a change opens, each of which follows one partition.

    `ends`: of what it seals, the seal included, which has no offset for Kafka clients.
    """
    found = {}
    for opened, (before, *more) in change.predecessors.items():
        assert not more, "a partition of a topic for Kafka clients follows one other"
        found[opened] = origins.get(before, 0) + ends[before] - 1
    return found
