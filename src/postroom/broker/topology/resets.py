"""A reset: which partitions of a group it moves, from where to where, and in what order.

Blocking use cases, run in worker threads. Offsets by partition move the partitions that they name; in all
others the group stays where it is, with what is in flight there or waits for a retry. An offset that is not
there is refused, with those that are: nothing is clamped in silence. Must never rewind a partition of an
ordered group while somebody goes on in those that follow it: they are fenced first, and wait until it is read
again (I10).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from ...endpoint.values import PartitionReset
from ...errors import GateClosed, InvalidSetting, StoreUnavailable
from ...model.delivery.delivery import Span
from ...model.policy.settings import Start
from ...model.topology.route import Route
from ...store.contract import Backlog, Group, Store
from .catalog_cache import is_base

__all__ = ["Resets", "moved"]


def moved(cursor: int, end: int, sealed: bool, unsettled: Iterable[Span], to: int) -> tuple[int, int]:
    """How many messages come again, and how many are skipped, when a group goes on at `to`.

    Everything below `cursor` was handed out, and is settled but for the `unsettled` ranges. The control batch
    that seals a partition is no message.
    """
    last = end - int(sealed)
    cursor, to = min(cursor, last), min(to, last)
    ranges = [(first, min(final, last - 1)) for first, final in unsettled if first < last]
    below = sum(min(final, to - 1) - first + 1 for first, final in ranges if first < to)
    above = sum(final - max(first, to) + 1 for first, final in ranges if final >= to)
    return max(0, cursor - to) - above, below + max(0, to - cursor)


_ALL = 2**31 - 1  # unsettled ranges, however many there are


class Resets:
    """`resolve`: what a start comes to in a topic, by partition id."""

    def __init__(self, store: Store, resolve: Callable[[str, Start], dict[int, int]]) -> None:
        self._store = store
        self._resolve = resolve

    def plan(self, route: Route, groups: Sequence[Group], start: Start) -> list[PartitionReset]:
        """What a reset would do now, a line for each group and partition."""
        self._check(route, start)
        found = self._resolve(route.topic, start)
        named = _named(route, start)
        after = {one: offset for one, offset in found.items() if one in named}
        return self._lines(route, groups, self._positions(route, groups), lambda _: after)

    def run(self, route: Route, groups: Sequence[Group], start: Start) -> list[PartitionReset]:
        """Reset these groups; the lines say what was done."""
        self._check(route, start)
        before = self._positions(route, groups)
        after: dict[int, dict[int, int]] = {}
        for group in groups:
            again = self._store.catalog.reset_group(route.topic, group.name, start)
            if not is_base(group):
                self._rewind(again, route, start)
                named = _named(route, start)
                after[group.id] = {one: self._store.catalog.start_of(group.id, one)[1] for one in named}
        return self._lines(route, groups, before, lambda group: after[group.id])

    def _check(self, route: Route, start: Start) -> None:
        start.check_past(self._store.now_ms(), name="to")
        pieces = {piece.partition: piece.partition_id for piece in route.partitions}
        unknown = sorted(number for number, _ in start.offsets if number not in pieces)
        if unknown:
            raise InvalidSetting(
                f"topic {route.topic!r} has no partition {unknown[0]}; it has "
                f"{', '.join(str(number) for number in sorted(pieces))}",
                topic=route.topic,
            )
        for number, offset in start.offsets:
            bounds = self._store.log.bounds([pieces[number]])[pieces[number]]
            where = f"partition {number} of topic {route.topic!r}"
            if offset > bounds.end:
                raise InvalidSetting(
                    f"{where} ends at offset {bounds.end}, and {offset} is beyond it: choose {bounds.end} "
                    "(its end) or less",
                    topic=route.topic,
                )
            if offset < bounds.start:
                raise InvalidSetting(
                    f"{where} begins at offset {bounds.start}, and {offset} is not kept any more: choose "
                    f"{bounds.start} (its beginning) or more",
                    topic=route.topic,
                )

    # ---- moving ----

    def _rewind(self, group: Group, route: Route, start: Start) -> None:
        """What follows a partition that is moved first; it opens when it is its turn again (I10)."""
        places = [piece.partition_id for piece in route.partitions]
        named = _named(route, start)
        fenced: set[int] = set()
        if group.settings.mode == "ordered":
            fenced = {one for place in named for one in route.descendants(place)}
            self._store.progress.fence(group, [p for p in reversed(places) if p in fenced])
        self._store.progress.rewind(group, [p for p in places if p in named and p not in fenced])
        for place in places:  # as they are: they would follow with their next poll
            if place not in named and place not in fenced:
                with suppress(GateClosed, StoreUnavailable):
                    self._store.progress.rewind(group, [place])

    # ---- telling ----

    def _positions(self, route: Route, groups: Sequence[Group]) -> Mapping[int, list[Backlog]]:
        there = self._store.present(piece.partition_id for piece in route.partitions)
        progress = self._store.progress
        return {g.id: progress.backlog(g, there, open_spans=_ALL) for g in groups if not is_base(g)}

    def _lines(
        self,
        route: Route,
        groups: Sequence[Group],
        before: Mapping[int, list[Backlog]],
        after: Callable[[Group], Mapping[int, int]],
    ) -> list[PartitionReset]:
        numbers = {piece.partition_id: piece.partition for piece in route.partitions}
        found = []
        for group in groups:
            for was in before.get(group.id, ()):
                to = after(group).get(was.partition_id)
                if to is None and was.sealed and was.committed >= was.end:
                    continue  # read to its end, and left there
                found.append(_line(group.name, numbers[was.partition_id], was, to))
        return sorted(found, key=lambda line: (line.group, line.partition))


def _line(group: str, partition: int, was: Backlog, to: int | None) -> PartitionReset:
    """`to` None: the group stays there."""
    if to is None:
        return PartitionReset(group, partition, was.committed, was.committed, 0, 0, moved=False)
    again, skipped = moved(was.cursor, was.end, was.sealed, was.open, to)
    return PartitionReset(group, partition, was.committed, to, again, skipped)


def _named(route: Route, start: Start) -> set[int]:
    """The partitions that are moved, by id."""
    numbers = {number for number, _ in start.offsets}
    return {p.partition_id for p in route.partitions if start.kind != "offsets" or p.partition in numbers}
