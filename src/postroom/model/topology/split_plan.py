"""A split plan: which partitions of a topic to split and which to merge, so that each has its share (R47).

Decides it from the load of each slot, and decides how much of a plan a route has been through already. A plan
is for one version of one topic's route. Its steps name slots, not partitions: those that open get their
number when they open. A step of a plan adds one edge between two partitions, or takes one away.

The fewest partitions are looked for whose heaviest has at most `factor` times the mean. A partition is cut
between slots only. Where one slot is heavier than that, nothing is gained by more partitions: then the
heaviest is made as light as it can be, and the plan is not `even`. Must never plan without a load to go by.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from ...config import SLOTS
from ...errors import InvalidSetting, RouteConflict
from .route import Range, Route

__all__ = ["MAX_FACTOR", "Piece", "SplitPlan", "Step", "done_steps", "heaviest", "make_plan"]

MAX_FACTOR = 100.0
COLD = 0.5
"""Neighbours are cold that have at most this share of the mean together."""


@dataclass(frozen=True, slots=True)
class Step:
    """`at` is the first slot of the second part: of the two that a split opens, or that a merge seals."""

    do: Literal["split", "merge"]
    first_slot: int
    last_slot: int
    at: int

    def __post_init__(self) -> None:
        if self.do not in ("split", "merge") or not 0 <= self.first_slot < self.at <= self.last_slot < SLOTS:
            raise InvalidSetting(f"a step has slots in their order, from 0 to {SLOTS - 1}; not {self}")

    def edges(self, before: frozenset[int]) -> frozenset[int]:
        """Return where partitions begin after this step; raise InvalidSetting if it does not fit."""
        inside = {edge for edge in before if self.first_slot < edge <= self.last_slot}
        outer = {self.first_slot, self.last_slot + 1} - {SLOTS}
        wanted = set() if self.do == "split" else {self.at}
        if inside != wanted or not outer <= before:
            raise InvalidSetting(f"{self} does not fit the route that the steps before it make")
        return before | {self.at} if self.do == "split" else before - {self.at}

    def __str__(self) -> str:
        slots = f"slots {self.first_slot} to {self.last_slot}"
        return f"split {slots} at {self.at}" if self.do == "split" else f"merge {slots} over {self.at}"


@dataclass(frozen=True, slots=True)
class Piece:
    """A partition as it would be, and its load."""

    first_slot: int
    last_slot: int
    load: int


@dataclass(frozen=True, slots=True)
class SplitPlan:
    topic: str
    version: int  # of the route that it is for
    ranges: tuple[Range, ...]  # of that route
    steps: tuple[Step, ...]
    factor: float = 1.5
    weighed: str = "messages"  # what a load is counted in
    before: tuple[Piece, ...] = ()
    after: tuple[Piece, ...] = ()
    too_hot: tuple[int, ...] = ()  # slots that alone have more than a partition should
    made_at_ms: int = 0

    def __post_init__(self) -> None:
        if [piece.first_slot for piece in self.ranges] + [SLOTS] != [0] + [
            piece.last_slot + 1 for piece in self.ranges
        ]:
            raise InvalidSetting("the ranges of a plan cover each slot once, in their order")
        self.edges_after(len(self.steps))

    @property
    def even(self) -> bool:
        """True if the heaviest partition will have at most `factor` times the mean."""
        return heaviest(self.after) <= self.factor

    def edges_after(self, steps: int) -> frozenset[int]:
        edges = _edges(self.ranges)
        for step in self.steps[:steps]:
            edges = step.edges(edges)
        return edges


def heaviest(pieces: Sequence[Piece]) -> float:
    """The load of the heaviest, in means; 0: there is no load."""
    total = sum(piece.load for piece in pieces)
    return max(piece.load for piece in pieces) * len(pieces) / total if total else 0.0


# ---- making one ----


def make_plan(
    route: Route,
    loads: Sequence[int],
    *,
    factor: float = 1.5,
    max_partitions: int | None = None,
    merge_cold: bool = False,
    weighed: str = "messages",
    made_at_ms: int = 0,
) -> SplitPlan:
    """`loads`: of each slot. By default at most four times as many partitions, and up to 16 anyway."""
    assert len(loads) == SLOTS, "each slot has a load, if only 0"
    if not 1 < factor <= MAX_FACTOR:
        raise InvalidSetting(f"factor={factor!r}: choose more than 1, such as 1.5, up to {MAX_FACTOR:.0f}")
    now = len(route.ranges)
    most = max(16, 4 * now) if max_partitions is None else max_partitions
    if not 1 <= most <= SLOTS:
        raise InvalidSetting(f"max_partitions={most!r}: choose a whole number from 1 to {SLOTS}")
    spans = [(piece.first_slot, piece.last_slot) for piece in route.ranges]
    counts = _counts(spans, loads, factor, max(now, min(most, SLOTS)))
    cut = [piece for span, count in zip(spans, counts, strict=True) for piece in _cut(span, count, loads)]
    after = _pieces(cut, loads)
    steps = _splits(route.ranges, after)
    mean = sum(loads) / len(after)
    if merge_cold and mean:
        merges, after = _merged(route, after, mean * COLD)
        steps += merges
    limit = factor * sum(loads) / len(after)
    return SplitPlan(
        topic=route.topic,
        version=route.version,
        ranges=route.ranges,
        steps=tuple(steps),
        factor=factor,
        weighed=weighed,
        before=tuple(_pieces(spans, loads)),
        after=tuple(after),
        too_hot=tuple(slot for slot, load in enumerate(loads) if load > limit),
        made_at_ms=made_at_ms,
    )


def _counts(spans: Sequence[tuple[int, int]], loads: Sequence[int], factor: float, most: int) -> list[int]:
    """Decide how many partitions each span becomes: the fewest that are even, else the lightest heaviest."""
    total = sum(loads)
    if not total:
        return [1 for _ in spans]
    for count in range(len(spans), most + 1):
        limit = math.floor(factor * total / count)
        found = [_needed(span, limit, loads) for span in spans]
        if sum(found) <= count:
            return [int(one) for one in found]
    limit = _lowest(lambda at: sum(_needed(span, at, loads) for span in spans) <= most, max(loads), total)
    return [int(_needed(span, limit, loads)) for span in spans]


def _needed(span: tuple[int, int], limit: int, loads: Sequence[int]) -> float:
    """The fewest parts of at most this load; infinite if a slot alone is heavier."""
    parts, load = 1, 0
    for slot in range(span[0], span[1] + 1):
        if loads[slot] > limit:
            return math.inf
        load += loads[slot]
        if load > limit:
            parts, load = parts + 1, loads[slot]
    return parts


def _cut(span: tuple[int, int], count: int, loads: Sequence[int]) -> list[tuple[int, int]]:
    """Cut into so many parts that the heaviest is as light as can be."""
    if count == 1:
        return [span]
    own = loads[span[0] : span[1] + 1]
    limit = _lowest(lambda at: _needed(span, at, loads) <= count, max(own), sum(own))
    parts, first, load = [], span[0], 0
    for slot in range(span[0], span[1] + 1):
        load += loads[slot]
        if load > limit:
            parts.append((first, slot - 1))
            first, load = slot, loads[slot]
    return [*parts, (first, span[1])]


def _lowest(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The lowest number from `low` to `high` for which it holds; it does for `high`."""
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def _pieces(spans: Sequence[tuple[int, int]], loads: Sequence[int]) -> list[Piece]:
    return [Piece(first, last, sum(loads[first : last + 1])) for first, last in spans]


def _splits(ranges: Sequence[Range], after: Sequence[Piece]) -> list[Step]:
    """Each takes one part off the left of what is left of its partition."""
    steps = []
    for old in ranges:
        first = old.first_slot
        for piece in after:
            if old.first_slot < piece.first_slot <= old.last_slot:
                steps.append(Step("split", first, old.last_slot, piece.first_slot))
                first = piece.first_slot
    return steps


def _merged(route: Route, pieces: Sequence[Piece], most: float) -> tuple[list[Step], list[Piece]]:
    """The coldest neighbours first. What was split stays so, and nothing is moved to another shard by it."""
    whole = {(old.first_slot, old.last_slot) for old in route.ranges}
    left = list(pieces)
    steps: list[Step] = []
    while True:
        pairs = [
            (a.load + b.load, at)
            for at, (a, b) in enumerate(pairwise(left))
            if a.load + b.load <= most
            and {(a.first_slot, a.last_slot), (b.first_slot, b.last_slot)} <= whole
            and route.of_slot(a.first_slot).shard == route.of_slot(b.first_slot).shard
        ]
        if not pairs:
            return steps, left
        load, at = min(pairs)
        a, b = left[at : at + 2]
        left[at : at + 2] = [Piece(a.first_slot, b.last_slot, load)]
        whole.add((a.first_slot, b.last_slot))
        steps.append(Step("merge", a.first_slot, b.last_slot, b.first_slot))


# ---- how far it is ----


def done_steps(plan: SplitPlan, history: Sequence[Route]) -> int:
    """Count the steps that the route has been through; raise RouteConflict if it was changed otherwise.

    `history`: every version, the oldest first. A change that was turned back leaves a version with the same
    slots on the same shards (I11); such a one does not count.
    """
    newest = history[-1]
    then = next((route for route in history if route.version == plan.version), None)
    again = "make a new one with `postroom pipeline hotspots`"
    if then is None:
        raise RouteConflict(
            f"the plan is for version {plan.version} of the route of topic {plan.topic!r}, and that is at "
            f"version {newest.version}: {again}"
        )
    if [_identity(piece) for piece in then.ranges] != [_identity(piece) for piece in plan.ranges]:
        raise RouteConflict(
            f"the plan is for another topic {plan.topic!r}: the partitions in it are not those that version "
            f"{plan.version} has here. Name the queue it was made on with --url, or {again}"
        )
    done, before = 0, then
    for route in history:
        if route.version <= plan.version:
            continue
        if done < len(plan.steps) and _edges(route.ranges) == plan.edges_after(done + 1):
            done += 1
        elif _places(route.ranges) != _places(before.ranges):
            raise RouteConflict(
                f"the plan is for version {plan.version} of the route of topic {plan.topic!r}; version "
                f"{route.version} was not made by it, and the route is at {newest.version} now: {again}"
            )
        before = route
    return done


def _edges(ranges: Sequence[Range]) -> frozenset[int]:
    return frozenset(piece.first_slot for piece in ranges)


def _identity(piece: Range) -> tuple[int, int, int]:
    return piece.first_slot, piece.last_slot, piece.partition_id


def _places(ranges: Sequence[Range]) -> list[tuple[int, int, str]]:
    return [(piece.first_slot, piece.last_slot, piece.shard) for piece in ranges]
