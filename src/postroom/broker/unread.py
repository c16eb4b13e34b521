"""Which partitions a group has still to read, and which it may read already.

Sealed partitions are read to their end and then never looked at again. A group in mode "ordered" begins in a
successor once it has drained all that the successor follows; other groups read successors at once (I10). Who
has drained what is the store's to say (`Progress.drain`, flushed); what it said is remembered here, since it
stays true for a group's generation.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from ..model.cache import make_room
from ..model.route import Range, Route
from ..store.contract import Bounds, Group, Peek, Progress

__all__ = ["Unread"]

_MOST = 20_000  # groups of which is known what they have drained; the store knows of all


class Unread:
    """Any thread may use it."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._lock = threading.Lock()
        self._drained: dict[int, tuple[int, set[int]]] = {}  # by group: its generation, and partitions

    def partitions(self, route: Route, group: Group) -> tuple[Range, ...]:
        """Those to look at: not what the group has drained."""
        if not route.sealed:
            return route.ranges
        drained = self._of(group)
        return tuple(piece for piece in route.partitions if piece.partition_id not in drained)

    def look(
        self, route: Route, group: Group, bounds: Mapping[int, Bounds], peeks: Mapping[int, Peek]
    ) -> frozenset[int]:
        """Which of these the group reads now, by id. What it has settled to the end is noted."""
        if not any(bounds[place].sealed for place in bounds):
            return frozenset(bounds) if not route.sealed else self._open(route, group, bounds, peeks)
        for place, edges in bounds.items():
            peek = peeks.get(place)
            at_end = peek is not None and edges.sealed and max(peek.lowest, edges.start) >= edges.end
            if peek is not None and at_end and (peek.drained or self._progress.drain(group, place)):
                with self._lock:
                    self._of(group).add(place)
        return self._open(route, group, bounds, peeks)

    def drained(self, group: Group, partition_id: int) -> bool:
        """Whether that is known."""
        return partition_id in self._of(group)

    def _open(
        self, route: Route, group: Group, bounds: Mapping[int, Bounds], peeks: Mapping[int, Peek]
    ) -> frozenset[int]:
        drained = self._of(group)
        left = frozenset(bounds) - drained
        if group.settings.mode != "ordered":
            return left
        return frozenset(
            place
            for place in left
            if place in peeks or all(one in drained for one in route.predecessors.get(place, ()))
        )

    def _of(self, group: Group) -> set[int]:
        generation, drained = self._drained.get(group.id, (-1, set()))
        if generation != group.generation:
            drained = set()
            make_room(self._drained, _MOST)
            self._drained[group.id] = (group.generation, drained)
        return drained
