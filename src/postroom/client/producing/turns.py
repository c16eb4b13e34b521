"""Whose turn it is to take messages without a key (R22).

The partitions take turns, each for a batch. One that takes no more is passed over, and so is one in trouble,
with its shard: its store was away when a batch came, and that batch is being repeated. When all are in
trouble they take turns as ever, since one of them will answer first. Must never leave out a partition for
longer than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from .accumulator import Accumulator

__all__ = ["Turns"]


class Turns:
    __slots__ = ("_all", "_at", "_troubled")

    def __init__(self) -> None:
        self._all: Sequence[Accumulator] = ()
        self._at = 0
        self._troubled: set[Accumulator] = set()

    def __len__(self) -> int:
        return len(self._all)

    def between(self, accumulators: Sequence[Accumulator]) -> None:
        self._all, self._at = accumulators, self._at % len(accumulators)

    def pick(self, gone: AbstractSet[int]) -> Accumulator | None:
        """The one whose turn it is; None: all partitions are `gone`."""
        if not gone and not self._troubled:
            return self._all[self._at]
        found = self._first_without(gone | self._avoided)
        return found if found is not None else self._first_without(gone)

    def next(self) -> None:
        self._at = (self._at + 1) % len(self._all)

    def batch_left(self, partition_id: int) -> None:
        """Messages stay with a partition until a batch has left it."""
        if self._all and self._all[self._at].where.partition_id == partition_id:
            self.next()

    def in_trouble(self, accumulator: Accumulator) -> None:
        self._troubled.add(accumulator)

    def well(self, accumulator: Accumulator) -> None:
        self._troubled.discard(accumulator)

    @property
    def any_well(self) -> bool:
        return not self._avoided.issuperset(one.where.partition_id for one in self._all)

    @property
    def _avoided(self) -> set[int]:
        """What is in trouble, and all that is on a shard with it, if there are others (R6)."""
        shards = {accumulator.where.shard for accumulator in self._troubled}
        found = {accumulator.where.partition_id for accumulator in self._troubled}
        if any(one.where.shard not in shards for one in self._all):
            found.update(one.where.partition_id for one in self._all if one.where.shard in shards)
        return found

    def _first_without(self, avoided: AbstractSet[int]) -> Accumulator | None:
        for step in range(len(self._all)):
            at = (self._at + step) % len(self._all)
            if self._all[at].where.partition_id not in avoided:
                self._at = at
                return self._all[at]
        return None
