"""What a broker counts: plain numbers by labels, for whoever shows them (`exposition`).

Something is counted once for a batch or a request, never for a message. Bounded: once a tally has `_MOST`
combinations of labels, further ones are counted together as "(other)", so that names made up by clients
cannot fill the memory. May be used from any thread. Must never raise, and decides nothing.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import PostroomError, StoreError, StoreFull
from ..model.topology.names import base_of, base_topic

__all__ = [
    "BOUNDS_S",
    "OTHER",
    "WAIT_BOUNDS_S",
    "Figures",
    "Labels",
    "Spread",
    "Tally",
    "group_label",
    "topic_label",
]

Labels = tuple[str, ...]

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper edges of the buckets of a spread, in seconds."""

WAIT_BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0, 21600.0,
    86400.0,
)  # fmt: skip
"""The same of waits, which last from milliseconds to days."""

_MOST = 2000
OTHER = "(other)"


class Tally:
    """A sum for each combination of labels."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[Labels, float] = {}

    def add(self, labels: Labels, amount: float = 1) -> None:
        with self._lock:
            sums = self._sums
            if labels not in sums and len(sums) >= _MOST:
                labels = (OTHER,) * len(labels)
            sums[labels] = sums.get(labels, 0) + amount

    def items(self) -> list[tuple[Labels, float]]:
        with self._lock:
            return list(self._sums.items())


class Spread:
    """A count of durations in each bucket, for each combination of labels."""

    def __init__(self, bounds: Sequence[float] = BOUNDS_S) -> None:
        self._lock, self._bounds = threading.Lock(), bounds
        self._found: dict[Labels, tuple[list[int], list[float]]] = {}

    def add(self, labels: Labels, seconds: float, count: int = 1) -> None:
        """So many things took so long, each of them."""
        with self._lock:
            found = self._found.get(labels)
            if found is None:
                if len(self._found) >= _MOST:
                    labels = (OTHER,) * len(labels)
                found = self._found.setdefault(labels, ([0] * (len(self._bounds) + 1), [0.0]))
            found[0][bisect_left(self._bounds, seconds)] += count
            found[1][0] += seconds * count

    def items(self) -> list[tuple[Labels, list[int], float]]:
        """For each: how many in each bucket (the last one has no upper edge), and their sum."""
        with self._lock:
            return [(labels, list(counts), total[0]) for labels, (counts, total) in self._found.items()]


@dataclass(slots=True)
class Figures:
    started_at: float = field(default_factory=time.time)

    # by topic
    published: Tally = field(default_factory=Tally)  # messages that were stored
    delayed: Tally = field(default_factory=Tally)  # messages that were stored to be due later
    batches: Tally = field(default_factory=Tally)
    published_bytes: Tally = field(default_factory=Tally)
    duplicates: Tally = field(default_factory=Tally)  # messages that were there already

    unreadable: Tally = field(default_factory=Tally)  # batches, and by who found them

    # by topic and group
    delivered: Tally = field(default_factory=Tally)  # messages
    redelivered: Tally = field(default_factory=Tally)  # messages, of those
    deliveries: Tally = field(default_factory=Tally)  # ranges
    first_waits: Spread = field(default_factory=lambda: Spread(WAIT_BOUNDS_S))  # messages, by their wait
    settled: Tally = field(default_factory=Tally)  # messages, and by verdict
    lost: Tally = field(default_factory=Tally)  # ranges that were in other hands when they were settled
    dead: Tally = field(default_factory=Tally)  # messages

    # requests
    requests: Tally = field(default_factory=Tally)  # by operation and outcome
    seconds: Spread = field(default_factory=Spread)  # by operation
    store_errors: Tally = field(default_factory=Tally)  # by code
    http: Tally = field(default_factory=Tally)  # by method, route and status

    # by shard
    commit_seconds: Spread = field(default_factory=Spread)
    commit_batches: Tally = field(default_factory=Tally)
    commit_bytes: Tally = field(default_factory=Tally)
    queued: dict[str, Callable[[], int]] = field(default_factory=dict)  # bytes that wait for the writer

    full_at: float = float("-inf")  # when an append found no space, if none was stored since; monotonic

    def committed(self, shard: str, batches: int, size: int, seconds: float) -> None:
        self.full_at = float("-inf")
        self.commit_seconds.add((shard or "first",), seconds)
        self.commit_batches.add((shard or "first",), batches)
        self.commit_bytes.add((shard or "first",), size)

    def died(self, topic: str, group: str, messages: int) -> None:
        self.dead.add((topic_label(topic), group_label(group)), messages)

    def found_unreadable(self, topic: str, found_by: str) -> None:
        self.unreadable.add((topic_label(topic), found_by))

    def ended(self, operation: str, seconds: float, error: BaseException | None = None) -> None:
        """A request; cancelled ones and faults of ours have outcomes of their own."""
        outcome = "ok"
        if isinstance(error, PostroomError):
            outcome = error.code
            if isinstance(error, StoreError):
                self.store_errors.add((error.code,))
                if isinstance(error, StoreFull) and operation == "append":
                    self.full_at = time.monotonic()
        elif error is not None:
            outcome = "unexpected" if isinstance(error, Exception) else "cancelled"
        self.requests.add((operation, outcome))
        self.seconds.add((operation,), seconds)


def topic_label(topic: str) -> str:
    """A group's own topics count as their topic, and Postroom's topics (replies) by their kind."""
    base = base_topic(topic)
    return base.partition(".")[0] if base.startswith("_") else base


def group_label(group: str) -> str:
    """Members of a broadcast group count as the group."""
    return base_of(group) or group
