"""What of a poll's deliveries fits into its bytes: the batches that hold them, and those left for later.

The store grants deliveries by their number, since it does not know how large messages are that come again.
So the batches are read here until the poll's bytes are spent. The first always fits (I17). No clock; decides
nothing about what becomes of those that are left.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ..model.delivery import Delivery
from ..store.contract import StoredBatch

__all__ = ["Fitted", "fitted"]

Read = Callable[[int, int, int, int], list[StoredBatch]]
"""Batches of a partition from an offset on: so many messages, and bytes, at most."""

_base = attrgetter("base_offset")


@dataclass(frozen=True, slots=True)
class Fitted:
    deliveries: Sequence[Delivery]
    batches: tuple[StoredBatch, ...]
    left: Sequence[Delivery] = ()  # there was no room for them


def fitted(
    read: Read,
    partition_id: int,
    deliveries: Sequence[Delivery],
    known: Sequence[StoredBatch],
    max_bytes: int,
) -> Fitted:
    """`known` batches were read already; the others come from the log."""
    found = sorted(known, key=_base)
    taken: dict[int, StoredBatch] = {}
    size = 0
    for index, delivery in enumerate(deliveries):
        position = delivery.first
        while position <= delivery.last:
            batch = _at(found, position)
            if batch is None:
                more = read(partition_id, position, delivery.last - position + 1, max(1, max_bytes - size))
                if not more or more[0].base_offset > delivery.last:
                    break  # retention took the rest
                for one in more:
                    if _at(found, one.base_offset) is None:
                        insort(found, one, key=_base)
                batch = more[0]
            if batch.base_offset not in taken:
                size += len(batch.data)
                if taken and size > max_bytes:
                    head = [delivery.part(delivery.first, position - 1)] if position > delivery.first else []
                    left = [delivery.part(position, delivery.last), *deliveries[index + 1 :]]
                    return Fitted([*deliveries[:index], *head], _in_order(taken), left)
                taken[batch.base_offset] = batch
            position = batch.last_offset + 1
    return Fitted(deliveries, _in_order(taken))


def _at(batches: Sequence[StoredBatch], offset: int) -> StoredBatch | None:
    """The batch that has this offset."""
    at = bisect_right(batches, offset, key=_base) - 1
    return batches[at] if at >= 0 and batches[at].last_offset >= offset else None


def _in_order(taken: dict[int, StoredBatch]) -> tuple[StoredBatch, ...]:
    return tuple(sorted(taken.values(), key=_base))
