"""Whose turn it is to take messages without a key (R22, R6).

The partitions take turns, each for a batch. One that takes no more is passed over, and so is one that is
away, with its shard. That is remembered from the first failure on, until something was stored there or the
broker says that it is back; and for as long as a batch is being repeated there. When all are away they take
turns as ever, since one of them will answer first. Has no clock of its own: moments are arguments.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet

from ...model.route import Range
from .accumulator import Accumulator

__all__ = ["Turns"]

_REFUSED_S = 0.5  # for so long nobody is believed who says that it is back: others may not have noticed
_SILENT_S = 6.0  # the same for one that does not answer: a broker needs about five seconds to notice
_LOOK_S = 0.5  # between two looks whether it is back


class Turns:
    __slots__ = ("_all", "_at", "_away", "_looked_at", "_repeating")

    def __init__(self) -> None:
        self._all: Sequence[Accumulator] = ()
        self._at = 0
        self._repeating: set[Accumulator] = set()  # a batch is being repeated there
        self._away: dict[int, float] = {}  # partitions, and from when on they may be said to be back
        self._looked_at = 0.0

    def __len__(self) -> int:
        return len(self._all)

    def between(self, accumulators: Sequence[Accumulator]) -> None:
        self._all, self._at = accumulators, self._at % len(accumulators)
        here = {one.where.partition_id for one in accumulators}
        self._away = {one: until for one, until in self._away.items() if one in here}

    def pick(self, gone: AbstractSet[int]) -> Accumulator | None:
        """The one whose turn it is; None: all partitions are `gone`."""
        if not gone and not self._repeating and not self._away:
            return self._all[self._at]
        found = self._first_without(gone | self.avoided)
        return found if found is not None else self._first_without(gone)

    def next(self) -> None:
        self._at = (self._at + 1) % len(self._all)

    def batch_left(self, partition_id: int) -> None:
        """Messages stay with a partition until a batch has left it."""
        if self._all and self._all[self._at].where.partition_id == partition_id:
            self.next()

    # ---- who is away ----

    def in_trouble(self, accumulator: Accumulator, now: float, *, silent: bool) -> bool:
        """A batch met a store that is away, or one that does not answer (`silent`), and is being repeated.

        Returns whether it is passed over because of that.
        """
        if silent and not self.many_shards:
            return False  # it is slow, as all the others then are
        self._repeating.add(accumulator)
        until = now + (_SILENT_S if silent else _REFUSED_S)
        place = accumulator.where.partition_id
        self._away[place] = max(until, self._away.get(place, 0.0)) if silent else until
        return True

    def quiet(self, accumulator: Accumulator) -> None:
        """No batch is being repeated there any more."""
        self._repeating.discard(accumulator)

    def well(self, where: Range) -> None:
        """Something was stored there: whatever is on its shard is back."""
        if self._away:
            for one in self._mates(where):
                self._away.pop(one, None)

    def told(self, away: Collection[int], now: float) -> None:
        """These are away, as a broker sees it; all others are back, if that can be known by now."""
        self._looked_at = now
        here = {one.where.partition_id for one in self._all}
        kept = {one: until for one, until in self._away.items() if one in away or until > now}
        self._away = kept | {one: now for one in away if one in here and one not in kept}

    def wants_a_look(self, now: float) -> bool:
        """Whether somebody should ask now if those that are away are back; not again for a while then."""
        if not self._away or now - self._looked_at < _LOOK_S:
            return False
        self._looked_at = now
        return True

    def any_well(self, gone: AbstractSet[int]) -> bool:
        """Whether there is a partition that takes messages and is not away."""
        return self._first_without(gone | self.avoided, look_only=True) is not None

    @property
    def avoided(self) -> set[int]:
        """What is away, and all that is on a shard with it, if there are others (R6)."""
        found = {*self._away, *(accumulator.where.partition_id for accumulator in self._repeating)}
        if not found or not self.many_shards:
            return found
        shards = {one.where.shard for one in self._all if one.where.partition_id in found}
        return found.union(one.where.partition_id for one in self._all if one.where.shard in shards)

    @property
    def many_shards(self) -> bool:
        """Whether there is another shard to go to."""
        return len({one.where.shard for one in self._all}) > 1

    def _mates(self, where: Range) -> list[int]:
        if not self.many_shards:
            return [where.partition_id]
        return [one.where.partition_id for one in self._all if one.where.shard == where.shard]

    def _first_without(self, avoided: AbstractSet[int], *, look_only: bool = False) -> Accumulator | None:
        for step in range(len(self._all)):
            at = (self._at + step) % len(self._all)
            if self._all[at].where.partition_id not in avoided:
                if not look_only:
                    self._at = at
                return self._all[at]
        return None
