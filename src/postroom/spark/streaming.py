"""A stream as the driver sees it: where it begins, how far the next micro-batch goes, and who reads what.

The checkpoint is the truth. A stream that begins at "latest" or at a moment would begin elsewhere after each
crash before its first commit, so the first micro-batch is empty and only writes down where it begins. The
group of the option `group` is told how far the checkpoint is, never further: Spark asks for the next batch
from where the last one that it has committed ends.

Lives in one process of the driver, which Spark kills in the end. Needs no Spark itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from time import monotonic

from ..config import DEFAULTS
from ..errors import GroupLive, InvalidSetting
from . import queue as positions
from .options import LATEST, ReadOptions, bad_option
from .planning import (
    Offsets,
    Snapshot,
    Span,
    TopicPartition,
    advance,
    backlog,
    below_start,
    first_offset,
    pack,
    read_up,
    renewed,
    restarted,
    set_back,
    spans,
    until,
    vanished,
)
from .queue import Queue
from .reading import Losses

__all__ = ["Stream", "WholeStream", "refuse_short_runs"]


class Stream:
    """One run of a streaming query."""

    def __init__(
        self,
        options: ReadOptions,
        open_queue: Callable[[], Queue] | None = None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self._options = options
        self._losses = Losses(options.fail_on_data_loss)
        self._open = open_queue or (lambda: Queue(options.reach))
        self._clock, self._tell_s = clock, DEFAULTS.tuning.spark.told_s
        self._queue: Queue | None = None
        self._ids: dict[str, int] = {}
        self._seen: dict[TopicPartition, int] = {}  # the ids of partitions
        self._initial: Offsets | None = None
        self._pinned = False  # where the stream begins is in the checkpoint, or on its way there
        self._target: Snapshot | None = None
        self._batch_at = clock()
        self._told: tuple[float, Offsets] | None = None

    # ---- what Spark asks ----

    def initial(self) -> Offsets:
        """Asked twice at the first start, and again after a crash before the first commit."""
        if self._initial is None:
            now = positions.look(self.queue, self._options.topics)
            self._initial = self._marked(positions.starts(self.queue, self._options, now), now)
            if self._options.group is not None:  # from now on nothing of it is dropped
                self._set_group(self._options.group, self._initial)
        return self._initial

    def freeze(self) -> None:
        """Read what is there now, and then end."""
        self._target = self._now()

    def latest(self, start: Offsets, limit: int | None) -> Offsets:
        if self._pins(start):
            self._pinned = True
            return start
        now = self._now(start.at)
        start = self._checked(start, now)
        self._tell_group(start)
        if self._target is not None:
            now = until(now, self._target, start)
        found = self._advanced(start, now, limit)
        least = self._options.min_offsets
        little = least is not None and self._target is None and backlog(start, found) < least
        if little and self._clock() - self._batch_at < self._options.max_delay_ms / 1000:
            return start
        if found is start:
            return start
        self._batch_at = self._clock()
        return self._marked(found, now)

    def newest(self) -> Offsets:
        """Behind the newest message of each partition."""
        now = self._now()
        return Offsets({place: there.end for place, there in now.partitions.items()}, ids=now.ids)

    def tasks(self, start: Offsets, end: Offsets) -> list[tuple[Span, ...]]:
        self._pinned = True
        if end.first:  # it only writes down where the stream begins
            return []
        now = self._now(end.at)
        start = self._anew(start, now)
        lost = set_back(end, now)
        if lost:  # what is there now is for the next micro-batch, which sees that, too
            self._losses.meet_set_back(end, now, lost)
        wanted = [span for span in spans(start, end, now) if (span.topic, span.partition) not in lost]
        self._losses.meet_spans([*self._gone(start, end, now), *below_start(wanted, now)])
        return pack(
            wanted,
            cores=os.cpu_count() or 1,
            min_tasks=self._options.min_partitions,
            max_rows=self._options.max_records,
        )

    def decode(self, data: object) -> Offsets:
        topics = self._options.topics
        return Offsets.decode(data, topics.takes, str(topics))

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    def _pins(self, start: Offsets) -> bool:
        return self._initial == start and not self._pinned

    def _advanced(self, start: Offsets, now: Snapshot, limit: int | None) -> Offsets:
        return advance(start, now, limit)

    # ---- the queue ----

    @property
    def queue(self) -> Queue:
        if self._queue is None:
            self._queue = self._open()
        return self._queue

    def _now(self, at: Mapping[TopicPartition, int] | None = None) -> Snapshot:
        now = self.queue.snapshot(self._options.topics, self._identity, at)
        anew = {p[0] for p, there in now.partitions.items() if self._seen.setdefault(p, there.id) != there.id}
        if anew:  # deleted and made again, under the stream's feet
            self._seen = {place: id for place, id in self._seen.items() if place[0] not in anew}
            self._ids = {topic: id for topic, id in self._ids.items() if topic not in anew}
            return self._now(at)
        return now

    def _identity(self, topic: str) -> int:
        """Asked once, until its partitions are others."""
        if topic not in self._ids:
            self._ids[topic] = self.queue.identity(topic)
        return self._ids[topic]

    def _checked(self, start: Offsets, now: Snapshot) -> Offsets:
        """Where reading goes on, after what is lost was met."""
        for topic in restarted(start, now):
            self._losses.meet(f"topic {topic!r} was deleted, and made again, since the stream has read it")
        start = self._anew(start, now)
        gone = vanished(start, now)
        ends = self.queue.final_ends(gone) if gone else {}
        unread = [place for place in gone if not read_up(start, place, ends.get(place), now)]
        if unread:
            listed = ", ".join(f"topic {topic!r} partition {number}" for topic, number in unread)
            self._losses.meet(f"{listed}: gone, and was not read to its end")
        lost = set_back(start, now)
        if lost:
            self._losses.meet_set_back(start, now, lost)
        return renewed(start, now, lost) if lost else start

    def _anew(self, start: Offsets, now: Snapshot) -> Offsets:
        """Without topics that were made again: those are read from their beginning."""
        new = restarted(start, now)
        if not new:
            return start
        return replace(
            start,
            at={place: offset for place, offset in start.at.items() if place[0] not in new},
            sealed=frozenset(p for p in start.sealed if p[0] not in new),
            ids=now.ids,
            marks={place: mark for place, mark in start.marks.items() if place[0] not in new},
            turns={place: turn for place, turn in start.turns.items() if place[0] not in new},
        )

    def _gone(self, start: Offsets, end: Offsets, now: Snapshot) -> list[Span]:
        """Spans of this micro-batch whose partition was dropped since it was planned."""
        found = [
            Span(*place, -1, first_offset(start, end, place), last)
            for place, last in sorted(end.at.items())
            if place not in now.partitions and last > first_offset(start, end, place)
        ]
        if not found:
            return []
        ends = self.queue.final_ends((span.topic, span.partition) for span in found)
        places = {span: (span.topic, span.partition) for span in found}
        return [span for span in found if not read_up(start, places[span], ends.get(places[span]), now)]

    def _marked(self, at: Offsets, now: Snapshot) -> Offsets:
        """With the marks by which it is told whether the log is still the one that was read."""
        unmarked = {place: offset for place, offset in at.at.items() if offset and place not in at.marks}
        found = self.queue.marks(unmarked, now) if unmarked else {}
        return replace(at, marks={**at.marks, **found})

    # ---- the group ----

    def _tell_group(self, start: Offsets) -> None:
        """`start` is in the checkpoint: retention may drop what is below."""
        now = self._clock()
        if self._options.group is None or (self._told is not None and self._told[1].at == start.at):
            return
        if self._told is None or self._target is not None or now - self._told[0] >= self._tell_s:
            self._set_group(self._options.group, start)
            self._told = (now, start)

    def _set_group(self, group: str, at: Offsets) -> None:
        for topic in at.ids:
            try:
                self.queue.set_group(topic, group, _of_topic(at, topic))
            except GroupLive:
                raise InvalidSetting(
                    f"option group: {group!r} of topic {topic!r} is in use by consumers; give the stream "
                    "a group of its own, or stop them"
                ) from None


def _of_topic(at: Offsets, topic: str) -> list[tuple[int, int]]:
    return [(number, offset) for (name, number), offset in sorted(at.at.items()) if name == topic]


# ---- a stream under Spark 4.0 or 4.1, where each micro-batch reads all that is there ----
# That Spark says neither where a micro-batch begins nor whether another follows: `availableNow` is one of
# them, and the end. So the stream keeps by itself where it is: at the end of the last micro-batch that
# was planned, which Spark names after a restart before it asks for more. It passes through all successors
# of a partition at once; the messages of a key are in order from one micro-batch to the next, as
# everywhere.
#
# Only a stream from "latest" begins with an empty micro-batch that pins it: a run that ends there misses
# nothing. Any other beginning is found again after a crash before the first commit. Options by which a
# micro-batch might leave something behind are refused.


def refuse_short_runs(options: ReadOptions, version: str) -> None:
    """`version` is that of PySpark, for people."""
    for name, value in (
        ("maxOffsetsPerTrigger", options.max_offsets),
        ("minOffsetsPerTrigger", options.min_offsets),
    ):
        if value is not None:
            raise bad_option(
                name,
                f"it needs PySpark 4.2 or newer, and this is {version}, where a run with availableNow would "
                "end before everything is read: leave it out; a micro-batch then reads all that is there",
            )
    if options.start.kind == "offsets" and LATEST in options.start.at.values():
        raise bad_option(
            options.start.option,
            f"-1 (latest) needs PySpark 4.2 or newer, and this is {version}: name the offsets, or write "
            "latest for all partitions",
        )


class WholeStream(Stream):
    _at: Offsets | None = None  # None: of a new stream, until it is asked

    def tasks(self, start: Offsets, end: Offsets) -> list[tuple[Span, ...]]:
        self._at = end
        return super().tasks(start, end)

    def next(self) -> Offsets:
        """Where the next micro-batch ends; what was told before is in the checkpoint by now."""
        self._at = self.latest(self._at or self.initial(), None)
        return self._at

    def _pins(self, start: Offsets) -> bool:
        return self._options.start.kind == "latest" and super()._pins(start)

    def _advanced(self, start: Offsets, now: Snapshot, limit: int | None) -> Offsets:
        found = advance(start, now, limit)
        while (further := advance(found, now, limit)) != found:
            found = further
        return found
