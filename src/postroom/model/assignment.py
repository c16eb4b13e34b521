"""Which partitions of an ordered group a member should hold: everybody decides for itself, by one rule.

There is no leader and nothing is agreed upon. Each member looks at who holds what, computes the same shares
as everybody else, and acts for itself alone: whoever holds more than its share gives the surplus up, whoever
holds less may claim what nobody holds. The store's lock decides who gets a partition that two claim.

    partitions 1 2 3 4 5, members a b c; a holds all of them
    a: its share is 2, gives up 3 4 5
    b: its share is 2, claims two of 3 4 5         c: its share is 1, claims the last

Must never let two members act on each other's partitions: a plan names only what is free and what is one's
own. What is done on an old view does no lasting harm: the next look mends it (R14, R23).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

__all__ = ["Plan", "plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    claim: tuple[int, ...] = ()  # free partitions, in the order in which to try them
    room: int = 0  # how many of them to take at most
    give_up: tuple[int, ...] = ()  # held beyond the share


def plan(partitions: Collection[int], holders: Mapping[int, str], members: Collection[str], me: str) -> Plan:
    """What `me` should do now. `holders` has the partitions that are held; the others are free.

    A holder that is no member keeps what it holds until it hands it over or its lease ends.
    """
    held: dict[str, list[int]] = {name: [] for name in (*members, me)}
    for partition in sorted(partitions):
        if (holder := holders.get(partition)) in held:
            held[holder].append(partition)
    ranked = sorted(held, key=lambda name: (-len(held[name]), name))
    rank = ranked.index(me)
    share, rest = divmod(len(partitions), len(ranked))
    share += rank < rest  # whoever holds most keeps one more: the fewest moves
    mine = held[me]
    free = sorted(partition for partition in partitions if partition not in holders)
    room = max(0, min(share - len(mine), len(free)))
    return Plan(_from(free, rank, len(ranked)) if room else (), room, tuple(mine[share:]))


def _from(free: list[int], rank: int, members: int) -> tuple[int, ...]:
    """Members begin at different places, so that those who claim at once seldom meet."""
    at = rank * len(free) // members
    return tuple(free[at:] + free[:at])
