"""How far a stream goes next, and who reads what: pure decisions, without Spark, a clock or a connection.

A micro-batch reads from one `Offsets` to the next. Every offset is in exactly one of them: what is read never
goes back, and a partition that was not there before is read from its beginning. A partition advances only
once those it follows are read to their seal, so that the messages of a key, too, come in their order from one
micro-batch to the next (R25). A partition that retention dropped leaves the offsets if it was read to its
seal; otherwise messages are lost, and `reading.Losses` says so.

A span is a range of offsets of one partition. Long ones are cut and short ones packed, so that there are few
tasks of about equal weight: a task costs about 35 ms, however little it reads.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .offsets import Offsets, Place

__all__ = [
    "Partition",
    "Snapshot",
    "Span",
    "advance",
    "backlog",
    "below_start",
    "pack",
    "restarted",
    "spans",
    "until",
    "vanished",
]

TASK_ROWS = 50_000
"""A task of fewer rows is not worth its cost, if there are others."""

MAX_TASK_ROWS = 1_000_000
"""More rows than that are cut: a task that fails is done again from its start."""


@dataclass(frozen=True, slots=True)
class Partition:
    id: int  # unique in the store
    end: int  # the next offset to be given; of a sealed one behind its seal
    start: int = 0  # the lowest offset that is kept
    sealed: bool = False
    before: tuple[int, ...] = ()  # the numbers of those it follows, as far as they are there


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The partitions as they are now."""

    partitions: Mapping[Place, Partition]
    ids: Mapping[str, int] = field(default_factory=dict)  # tells topics of the same name apart


@dataclass(frozen=True, slots=True, order=True)
class Span:
    topic: str
    partition: int
    partition_id: int
    first: int
    end: int  # excluded

    @property
    def rows(self) -> int:
        return self.end - self.first


# ---- how far ----


def advance(start: Offsets, now: Snapshot, limit: int | None = None) -> Offsets:
    """Where a micro-batch that begins at `start` ends. Equal to `start` if there is nothing to read."""
    ends: dict[Place, int] = {}
    for place, there in now.partitions.items():
        if _open(place, there, start, now):
            ends[place] = max(there.end, start.at.get(place, 0))
        elif place in start.at:
            ends[place] = start.at[place]
    if limit is not None:
        ends = _limited(start.at, ends, limit)
    sealed = {p for p, end in ends.items() if now.partitions[p].sealed and end >= now.partitions[p].end}
    after = Offsets(ends, frozenset(sealed), dict(now.ids))
    return start if replace(after, first=start.first) == start else after


def _open(place: Place, there: Partition, start: Offsets, now: Snapshot) -> bool:
    """All that it follows is read to the seal; one that is gone counts as read."""
    for number in there.before:
        old = now.partitions.get((place[0], number))
        if old is not None and not (old.sealed and start.at.get((place[0], number), 0) >= old.end):
            return False
    return True


def _limited(start: Mapping[Place, int], ends: Mapping[Place, int], limit: int) -> dict[Place, int]:
    """Not more than `limit` in all, shared by backlog, but at least one from each that has any."""
    sizes = {place: end - start.get(place, 0) for place, end in ends.items()}
    total = sum(sizes.values())
    if total <= limit:
        return dict(ends)
    return {
        place: start.get(place, 0) + (min(size, max(1, limit * size // total)) if size else 0)
        for place, size in sizes.items()
    }


def until(now: Snapshot, target: Snapshot, start: Offsets) -> Snapshot:
    """As if nothing had come since `target` was seen."""
    found = {}
    for place, there in now.partitions.items():
        then = target.partitions.get(place)
        end = start.at.get(place, 0) if then is None else min(there.end, then.end)
        found[place] = replace(there, end=end, sealed=there.sealed and end == there.end)
    listed = {p: t for p, t in found.items() if p in start.at or p in target.partitions}
    return Snapshot(listed, now.ids)


def backlog(start: Offsets, end: Offsets) -> int:
    return sum(max(0, offset - start.at.get(place, 0)) for place, offset in end.at.items())


# ---- what is lost ----


def vanished(start: Offsets, now: Snapshot) -> list[Place]:
    """Partitions that are gone, and were not read to their seal."""
    return sorted(p for p in start.at if p not in now.partitions and p not in start.sealed)


def restarted(start: Offsets, now: Snapshot) -> list[str]:
    """Topics that were deleted, and made again under the same name."""
    return sorted(t for t, id in now.ids.items() if start.ids.get(t, id) != id)


def below_start(spans: Iterable[Span], now: Snapshot) -> list[Span]:
    """Of these spans, what retention has dropped."""
    lost = []
    for span in spans:
        there = now.partitions.get((span.topic, span.partition))
        kept = span.end if there is None or there.id != span.partition_id else max(span.first, there.start)
        if kept > span.first:
            lost.append(replace(span, end=min(kept, span.end)))
    return lost


# ---- who reads what ----


def spans(start: Offsets, end: Offsets, now: Snapshot) -> list[Span]:
    """What lies between the two, of partitions that are there."""
    found = []
    for place, last in sorted(end.at.items()):
        first, there = start.at.get(place, 0), now.partitions.get(place)
        if there is not None and last > first:
            found.append(Span(*place, there.id, first, last))
    return found


def pack(
    wanted: Sequence[Span], *, cores: int, min_tasks: int | None = None, max_rows: int | None = None
) -> list[tuple[Span, ...]]:
    """Tasks that read all of it, each offset once. `max_rows`: of a task, unless there are more cores."""
    total = sum(span.rows for span in wanted)
    if not total:
        return []
    tasks = max(min(cores, math.ceil(total / TASK_ROWS)), math.ceil(total / MAX_TASK_ROWS), min_tasks or 1)
    if max_rows:
        tasks = max(tasks, math.ceil(total / max_rows))
    piece = max(1, min(max_rows or total, total // tasks))  # rounded down: else there may be too few
    cut = [
        replace(span, first=at, end=min(span.end, at + piece))
        for span in wanted
        for at in range(span.first, span.end, piece)
    ]
    heap: list[tuple[int, int, list[Span]]] = [(0, n, []) for n in range(min(tasks, len(cut)))]
    for span in sorted(cut, key=lambda one: -one.rows):
        weight, n, mine = heapq.heappop(heap)
        mine.append(span)
        heapq.heappush(heap, (weight + span.rows, n, mine))
    return [tuple(sorted(mine)) for _, _, mine in sorted(heap, key=lambda one: one[1])]
