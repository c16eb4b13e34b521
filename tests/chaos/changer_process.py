"""A process to be killed that changes a route again and again: splits, merges and, with shards, moves.

It notes each change before and after. One that is refused, since another is under way or the route is another
one by now, is noted as refused: the next look at the route says what there is to do.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping

import postroom

from .journal import Journal
from .patience import connected

__all__ = ["change"]

_FEWEST, _MOST = 2, 12  # partitions
_SHORTEST_S = 0.05  # between two changes
_ALIKE = 0.3  # of the splits are in the middle; others are anywhere


async def change(url: str, shards: dict[str, str], topic: str, journal: str, longest_s: float) -> None:
    mq = await connected(url, shards)
    notes = Journal(journal)
    while True:
        await asyncio.sleep(random.uniform(_SHORTEST_S, longest_s))
        try:
            await _change(mq, topic, shards, notes)
        except (postroom.RouteConflict, postroom.UnknownPartition):
            notes.note("refused", ["by-another-change"])
        except postroom.StoreError as error:
            if not error.retriable:
                raise
            notes.note("refused", ["by-the-store"])


async def _change(mq: postroom.Connection, topic: str, shards: Mapping[str, str], notes: Journal) -> None:
    route = await mq.route(topic)
    kind = _kind(route, bool(shards))
    name = f"{kind}-of-{route.version}"
    notes.note("changing", [name])
    if kind == "split":
        piece = random.choice([piece for piece in route.ranges if piece.slots > 1])
        at = None if random.random() < _ALIKE else random.randint(piece.first_slot + 1, piece.last_slot)
        await mq.split(topic, piece.partition, at=at)
    elif kind == "merge":
        at = random.randrange(len(route.ranges) - 1)
        await mq.merge(topic, route.ranges[at].partition, route.ranges[at + 1].partition)
    else:
        piece = random.choice(route.ranges)
        others = [shard for shard in ("first", *shards) if shard != piece.shard]
        await mq.move(topic, piece.partition, shard=random.choice(others))
    notes.note("changed", [name])


def _kind(route: postroom.Route, movable: bool) -> str:
    """Between the fewest and the most partitions any kind will do."""
    kinds = ["move"] if movable else []
    if len(route.ranges) > _FEWEST:
        kinds.append("merge")
    if len(route.ranges) < _MOST:
        kinds.append("split")
    return random.choice(kinds)
