"""How far a stream goes next, and who reads what: pure decisions, without Spark, a clock or a connection.

A micro-batch reads from one `Offsets` to the next. Every offset is in exactly one of them: what is read never
goes back, and a partition that was not there before is read from its beginning. A partition advances only
once those it follows are read to their seal, so that the messages of a key, too, come in their order from one
micro-batch to the next (R25). A partition that retention dropped leaves the offsets if it was read to its
seal; otherwise messages are lost, and `reading.Losses` says so. A partition whose log is not the one that was
read begins again, in its next turn: nothing that is there is ever taken for read.

A span is a range of offsets of one partition. Long ones are cut and short ones packed, so that there are few
tasks of about equal weight: a task costs about 35 ms, however little it reads.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

from ..errors import InvalidSetting

__all__ = [
    "VERSION",
    "Offsets",
    "Partition",
    "Snapshot",
    "Span",
    "TopicPartition",
    "Turn",
    "advance",
    "backlog",
    "below_start",
    "first_offset",
    "pack",
    "read_up",
    "renewed",
    "restarted",
    "set_back",
    "spans",
    "until",
    "vanished",
]


# ---- how far a stream has read: the text in its checkpoint ----
#     {"v": 2, "topics": {"orders": {"0": 13, "1": 7}}, "sealed": {"orders": [0]}, "ids": {"orders": 1},
#      "queue": "5f0c…", "marks": {"orders": {"0": "10-9f1c20aa", "1": "0-00d3b1c4"}},
#      "turns": {"orders": {"1": [1, 0]}}}
#
# `topics` has the next offset of each partition, by its number. Partitions in `sealed` are read to their
# seal: they may leave as soon as retention has dropped them, and nothing is lost by that. `ids` tells a
# topic from another of the same name that was made later. `first` marks the empty batch that pins where a
# stream begins.
#
# `queue` and `marks` tell whether the log is still the one that was read (`model.marks`). A partition
# whose log was another one, and that is read again, is in its next turn: `turns` has how many there were,
# and the offset at which the newest began.
#
# A checkpoint outlives the program that wrote it: `VERSION` grows when the meaning changes, and what a
# newer version wrote is refused. Version 1 had no `queue`, `marks` or `turns`.

T = TypeVar("T")

TopicPartition: TypeAlias = tuple[str, int]
"""A partition: topic and number."""

Turn: TypeAlias = tuple[int, int]
"""How often a partition was begun again, and the offset at which that was."""

VERSION = 2


@dataclass(frozen=True, slots=True)
class Offsets:
    at: Mapping[TopicPartition, int] = field(default_factory=dict, hash=False)
    sealed: frozenset[TopicPartition] = frozenset()
    ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    first: bool = False
    queue: str = ""  # its incarnation; "": not known
    marks: Mapping[TopicPartition, str] = field(default_factory=dict, hash=False)
    turns: Mapping[TopicPartition, Turn] = field(default_factory=dict, hash=False)

    def encode(self) -> dict[str, Any]:
        """Equal offsets give equal texts: Spark compares those."""
        found: dict[str, Any] = {"v": VERSION, "topics": _nested(self.at)}
        if self.sealed:
            found["sealed"] = {
                topic: sorted(n for name, n in self.sealed if name == topic)
                for topic in sorted({name for name, _ in self.sealed})
            }
        found["ids"] = dict(sorted(self.ids.items()))
        if self.first:
            found["first"] = True
        if self.queue:
            found["queue"] = self.queue
        if self.marks:
            found["marks"] = _nested(self.marks)
        if self.turns:
            found["turns"] = {
                topic: {number: list(turn) for number, turn in numbers.items()}
                for topic, numbers in _nested(self.turns).items()
            }
        return found

    def goes_to(self, other: Offsets) -> bool:
        """Whether these are the same places, however they are marked."""
        return (self.at, self.sealed, self.ids, self.turns) == (
            other.at,
            other.sealed,
            other.ids,
            other.turns,
        )

    @staticmethod
    def decode(data: object, takes: Callable[[str], bool], wanted: str) -> Offsets:
        """`takes` tells whether a topic is read by this query, `wanted` is what it reads, for people."""
        if not isinstance(data, dict) or not isinstance(data.get("v"), int):
            raise InvalidSetting(
                "the checkpoint was not written by a stream from Postroom: give the query a "
                "checkpointLocation of its own"
            )
        if data["v"] > VERSION:
            raise InvalidSetting(
                f"the checkpoint has version {data['v']} and was written by a newer Postroom; this one knows "
                f"{VERSION}: install that version here as well, or begin with a new checkpointLocation"
            )
        try:
            at = {place: int(offset) for place, offset in _flat(data["topics"]).items()}
            sealed = frozenset((str(t), int(n)) for t, ns in data.get("sealed", {}).items() for n in ns)
            ids = {str(t): int(n) for t, n in data.get("ids", {}).items()}
            marks = {place: str(mark) for place, mark in _flat(data.get("marks", {})).items()}
            turns = {place: (int(n), int(o)) for place, (n, o) in _flat(data.get("turns", {})).items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidSetting(
                "the offsets in the checkpoint are damaged: restore it, or begin with a new one"
            ) from None
        foreign = sorted({topic for topic, _ in at if not takes(topic)})
        if foreign:
            raise InvalidSetting(
                f"the checkpoint is of topic {', '.join(map(repr, foreign))}, and this query reads {wanted}: "
                "give the query a checkpointLocation of its own"
            )
        queue = str(data.get("queue", ""))
        return Offsets(at, sealed, ids, bool(data.get("first", False)), queue, marks, turns)


def _nested(at: Mapping[TopicPartition, T]) -> dict[str, dict[str, T]]:
    found: dict[str, dict[str, T]] = {}
    for topic, number in sorted(at):
        found.setdefault(topic, {})[str(number)] = at[topic, number]
    return found


def _flat(data: Mapping[str, Mapping[str, Any]]) -> dict[TopicPartition, Any]:
    return {(str(topic), int(n)): value for topic, numbers in data.items() for n, value in numbers.items()}


# ---- the plan of a batch ----

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
    mark: str = ""  # of the batch before the offset that was asked about


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The partitions as they are now."""

    partitions: Mapping[TopicPartition, Partition]
    ids: Mapping[str, int] = field(default_factory=dict)  # tells topics of the same name apart
    incarnation: str = ""  # of the queue


@dataclass(frozen=True, slots=True, order=True)
class Span:
    topic: str
    partition: int
    partition_id: int
    first: int
    end: int  # excluded
    turn: int = 0  # how often the stream has begun the partition again

    @property
    def source(self) -> str:
        """A name for the log: that of another one in its place, or after it, is another."""
        turn = f".{self.turn}" if self.turn else ""
        return f"{self.topic}/{self.partition}@{self.partition_id}{turn}"

    @property
    def rows(self) -> int:
        return self.end - self.first


# ---- how far ----


def advance(start: Offsets, now: Snapshot, limit: int | None = None) -> Offsets:
    """Where a micro-batch that begins at `start` ends. Equal to `start` if there is nothing to read."""
    ends: dict[TopicPartition, int] = {}
    for place, there in now.partitions.items():
        if _open(place, there, start, now):
            ends[place] = max(there.end, start.at.get(place, 0))
        elif place in start.at:
            ends[place] = start.at[place]
    if limit is not None:
        ends = _limited(start.at, ends, limit)
    sealed = {p for p, end in ends.items() if now.partitions[p].sealed and end >= now.partitions[p].end}
    after = Offsets(
        ends,
        frozenset(sealed),
        dict(now.ids),
        queue=now.incarnation,
        marks={p: mark for p, mark in start.marks.items() if ends.get(p) == start.at.get(p)},
        turns={p: turn for p, turn in start.turns.items() if p in ends},
    )
    return start if after.goes_to(start) else after


def _open(place: TopicPartition, there: Partition, start: Offsets, now: Snapshot) -> bool:
    """All that it follows is read to the seal; one that is gone counts as read."""
    for number in there.before:
        old = now.partitions.get((place[0], number))
        if old is not None and not (old.sealed and start.at.get((place[0], number), 0) >= old.end):
            return False
    return True


def _limited(
    start: Mapping[TopicPartition, int], ends: Mapping[TopicPartition, int], limit: int
) -> dict[TopicPartition, int]:
    """Not more than `limit` in all: one from each that has any, and the rest by backlog.

    If there are more partitions than that, they take turns. Which are next follows from how much was read:
    so much further in the circle of partitions as the last micro-batch has read. So each of them is among the
    next ones after as many micro-batches as it takes to read one message of all.
    """
    sizes = {place: end - start.get(place, 0) for place, end in ends.items()}
    if sum(sizes.values()) <= limit:
        return dict(ends)
    circle = sorted(sizes)
    first = sum(start.values()) % len(circle)
    waiting = [place for place in [*circle[first:], *circle[:first]] if sizes[place]]
    taken = dict.fromkeys(waiting[:limit], 1)
    left = limit - len(taken)
    if left:  # then everybody has one
        rest = {place: sizes[place] - 1 for place in waiting}
        total = sum(rest.values())
        for place, size in rest.items():
            taken[place] += left * size // total
        odd = sorted(rest, key=lambda place: -(left * rest[place] % total))
        for place in odd[: limit - sum(taken.values())]:
            taken[place] += 1
    return {place: start.get(place, 0) + taken.get(place, 0) for place in ends}


def until(now: Snapshot, target: Snapshot, start: Offsets) -> Snapshot:
    """As if nothing had come since `target` was seen."""
    found = {}
    for place, there in now.partitions.items():
        then = target.partitions.get(place)
        end = start.at.get(place, 0) if then is None else min(there.end, then.end)
        found[place] = replace(there, end=end, sealed=there.sealed and end == there.end)
    listed = {p: t for p, t in found.items() if p in start.at or p in target.partitions}
    return replace(now, partitions=listed)


def backlog(start: Offsets, end: Offsets) -> int:
    return sum(max(0, offset - start.at.get(place, 0)) for place, offset in end.at.items())


# ---- what is lost ----


def vanished(start: Offsets, now: Snapshot) -> list[TopicPartition]:
    """Partitions that are gone, and were not seen to be read to their seal."""
    return sorted(p for p in start.at if p not in now.partitions and p not in start.sealed)


def read_up(start: Offsets, place: TopicPartition, end: int | None, now: Snapshot) -> bool:
    """Whether all messages of a partition that is gone were read; `end` is behind its seal, if it is known.

    Whoever has read beyond it has read another log.
    """
    return end is not None and start.at.get(place, 0) in (end - 1, end) and _same_queue(start, now)


def set_back(start: Offsets, now: Snapshot) -> list[TopicPartition]:
    """Partitions whose log is not the one that was read up to `start`, by which the marks were asked for."""
    found = []
    for place, offset in start.at.items():
        there, mark = now.partitions.get(place), start.marks.get(place, "")
        if there is None or not offset:
            continue
        known = bool(mark and there.mark)
        same = mark == there.mark if known else _same_queue(start, now)
        if there.end < offset or not same:
            found.append(place)
    return sorted(found)


def _same_queue(start: Offsets, now: Snapshot) -> bool:
    return not start.queue or start.queue == now.incarnation


def renewed(start: Offsets, now: Snapshot, places: Iterable[TopicPartition]) -> Offsets:
    """These partitions begin again, each at the oldest message that is kept."""
    again = {p: (start.turns.get(p, (0, 0))[0] + 1, now.partitions[p].start) for p in places}
    return replace(
        start,
        at={p: again[p][1] if p in again else offset for p, offset in start.at.items()},
        sealed=start.sealed - again.keys(),
        first=False,
        marks={p: mark for p, mark in start.marks.items() if p not in again},
        turns={**start.turns, **again},
    )


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
        first, there = first_offset(start, end, place), now.partitions.get(place)
        if there is not None and last > first:
            found.append(Span(*place, there.id, first, last, end.turns.get(place, (0, 0))[0]))
    return found


def first_offset(start: Offsets, end: Offsets, place: TopicPartition) -> int:
    """Where a micro-batch begins in a partition."""
    turn = end.turns.get(place)
    return start.at.get(place, 0) if turn is None or turn == start.turns.get(place) else turn[1]


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
