"""A queue without a store, and a Spark without a JVM, for the tests of streams.

`World` has partitions that are split, merged, moved and dropped, and answers what a stream asks of `Queue`.
`Driver` does with a stream what Spark does with one: it logs where a micro-batch ends before it is run, and
that it was run after its rows are in the sink. It can be killed at each of these steps. Offsets go through
JSON, and tasks through pickle, as in Spark.
"""

from __future__ import annotations

import json
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from postroom.model.policy.settings import Start
from postroom.spark.options import ReadOptions, Topics
from postroom.spark.planning import Partition, Snapshot, Span, TopicPartition
from postroom.spark.streaming import Stream

SLOTS = 8
SEAL = None


@dataclass
class Log:
    id: int
    first_slot: int
    last_slot: int
    before: tuple[int, ...] = ()
    rows: list[tuple[int, int] | None] = field(default_factory=list)  # (slot, number); None: the seal
    sealed: bool = False
    start: int = 0

    def mark(self, offset: int) -> str:
        """Of the batch before it: every message is a batch here."""
        return f"{offset - 1}-{self.rows[offset - 1]}" if self.start < offset <= len(self.rows) else ""


class World:
    def __init__(self, topic: str = "t", partitions: int = 2) -> None:
        self.topic, self.next_id, self.sent = topic, 1, 0
        self.logs: dict[int, Log] = {}
        self.next_number = 0
        self.groups: dict[str, dict[int, int]] = {}
        self.told = 0
        self.incarnation = "first"
        self.make(partitions)

    def make(self, partitions: int = 2) -> None:
        """The topic; once more: it was deleted, and is made again."""
        self.logs, self.next_number, self.first_id = {}, 0, self.next_id
        self.removed: dict[int, int] = {}
        width = SLOTS // partitions
        for n in range(partitions):
            self._open(n * width, SLOTS - 1 if n == partitions - 1 else (n + 1) * width - 1, ())

    def _open(self, first: int, last: int, before: tuple[int, ...]) -> None:
        self.logs[self.next_number] = Log(self.next_id, first, last, before)
        self.next_number, self.next_id = self.next_number + 1, self.next_id + 1

    # ---- what happens to it ----

    @property
    def open(self) -> list[int]:
        return sorted(
            (n for n, log in self.logs.items() if not log.sealed), key=lambda n: self.logs[n].first_slot
        )

    def send(self, slot: int, count: int = 1) -> None:
        number = next(n for n in self.open if self.logs[n].first_slot <= slot <= self.logs[n].last_slot)
        for _ in range(count):
            self.logs[number].rows.append((slot, self.sent))
            self.sent += 1

    def seal(self, *numbers: int) -> None:
        for number in numbers:
            self.logs[number].rows.append(SEAL)
            self.logs[number].sealed = True

    def split(self, number: int) -> None:
        old = self.logs[number]
        if old.first_slot < old.last_slot:
            self.seal(number)
            middle = (old.first_slot + old.last_slot) // 2
            self._open(old.first_slot, middle, (number,))
            self._open(middle + 1, old.last_slot, (number,))

    def merge(self, left: int) -> None:
        """With its neighbour on the right."""
        at = self.open.index(left)
        if at + 1 < len(self.open):
            right = self.open[at + 1]
            first, last = self.logs[left].first_slot, self.logs[right].last_slot
            self.seal(left, right)
            self._open(first, last, (left, right))

    def move(self, number: int) -> None:
        old = self.logs[number]
        self.seal(number)
        self._open(old.first_slot, old.last_slot, (number,))

    def drop(self, number: int) -> None:
        """Retention has dropped the whole of a sealed partition."""
        self.removed[number] = len(self.logs.pop(number).rows)

    def backup(self) -> bytes:
        kept = {name: value for name, value in vars(self).items() if name not in ("sent", "told")}
        return pickle.dumps(kept)

    def restore(self, backup: bytes) -> None:
        """As it was then, without a word; what is sent from now on is new."""
        vars(self).update(pickle.loads(backup))

    # ---- what a stream asks ----

    def snapshot(
        self, wanted: Topics, identity: Callable[[str], int], at: Mapping[TopicPartition, int] | None = None
    ) -> Snapshot:
        found = {
            (self.topic, n): Partition(
                log.id,
                len(log.rows),
                log.start,
                log.sealed,
                tuple(one for one in log.before if one in self.logs),
                log.mark((at or {}).get((self.topic, n), 0)),
            )
            for n, log in self.logs.items()
            if wanted.takes(self.topic) and (not wanted.partitions or (self.topic, n) in wanted.partitions)
        }
        return Snapshot(found, {self.topic: identity(self.topic)}, self.incarnation)

    def marks(self, at: Mapping[TopicPartition, int], now: Snapshot) -> dict[TopicPartition, str]:
        found = {place: self.logs[place[1]].mark(offset) for place, offset in at.items()}
        return {place: mark for place, mark in found.items() if mark}

    def final_ends(self, places: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        return {place: self.removed[place[1]] for place in places if place[1] in self.removed}

    def identity(self, topic: str) -> int:
        return self.first_id

    def resolve(self, topic: str, start: Start) -> dict[int, int]:
        raise NotImplementedError

    def set_group(self, topic: str, group: str, offsets: Iterable[tuple[int, int]]) -> None:
        self.told += 1
        self.groups[group] = dict(offsets)

    def close(self) -> None:
        """Nothing is open."""

    def read(self, span: Span) -> list[tuple[int, int]]:
        log = self.logs[span.partition]
        assert log.id == span.partition_id
        assert log.start <= span.first < span.end <= len(log.rows)
        return [row for row in log.rows[span.first : span.end] if row is not None]


class Killed(Exception):
    pass


class Driver:
    """A streaming query and its checkpoint, over any number of runs."""

    def __init__(
        self, options: ReadOptions, world: Any, read: Callable[[Span], list[Any]] | None = None
    ) -> None:
        self.options, self.world, self.read = options, world, read or world.read
        self.offsets: list[str] = []
        self.commits = 0
        self.sink: dict[int, list[Any]] = {}  # by batch: a batch that is run again takes the place of itself
        self.now = 0.0
        self.stream: Stream | None = None
        self.ran: list[int] = []

    @property
    def rows(self) -> list[Any]:
        return [row for batch in sorted(self.sink) for row in self.sink[batch]]

    def repeated(self) -> list[Any]:
        return [row for row, count in Counter(self.rows).items() if count > 1]

    def start(self, *, available_now: bool = False) -> None:
        self.stream = Stream(self.options, lambda: self.world, lambda: self.now)
        if available_now:
            self.stream.freeze()
        if not self.commits:
            self._initial()
        if len(self.offsets) > self.commits:
            self._run(len(self.offsets) - 1, None)

    def _initial(self) -> str:
        assert self.stream is not None
        self.stream.initial()
        return json.dumps(self.stream.initial().encode())

    def _begin(self, batch: int) -> str:
        return self.offsets[batch - 1] if batch else self._initial()

    def step(self, limit: int | None = None, *, kill: str | None = None) -> bool:
        """One micro-batch; False if there is nothing to do. `kill`: "logged" or "ran"."""
        batch = len(self.offsets)
        end = self._next_end(batch, limit)
        if batch and end == self.offsets[-1]:
            return False
        self.offsets.append(end)
        if kill == "logged":
            raise Killed
        self._run(batch, kill)
        return True

    def _next_end(self, batch: int, limit: int | None) -> str:
        """As Spark asks since 4.2."""
        assert self.stream is not None
        begin = self.stream.decode(json.loads(self._begin(batch)))
        return json.dumps(self.stream.latest(begin, limit).encode())

    def _run(self, batch: int, kill: str | None) -> None:
        assert self.stream is not None
        begin, end = (self.stream.decode(json.loads(t)) for t in (self._begin(batch), self.offsets[batch]))
        tasks = pickle.loads(pickle.dumps(self.stream.tasks(begin, end)))
        self.sink[batch] = [row for task in tasks for span in task for row in self.read(span)]
        self.ran.append(batch)
        if kill == "ran":
            raise Killed
        self.commits = batch + 1

    def run(self, limit: int | None = None) -> None:
        """As with the trigger availableNow."""
        self.start(available_now=True)
        for _ in range(10_000):
            if not self.step(limit):
                return
        raise AssertionError("it does not end")
