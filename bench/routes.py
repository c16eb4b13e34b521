"""What a producer notices of a route change: the longest wait of a send while a topic is split and merged.

Four tasks send keyed messages one by one, a fifth sends lists, all at a steady rate. The route is changed by
another connection, as by a process of its own: the producers learn of it by the seal alone. For each change
the slowest of the sends counts that were under way during it or began soon after, since a producer may meet
the seal late; beside it is the p99 of those that met none.

Goals: under 100 ms at the median of the changes, 500 ms at the worst.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import postroom

from .grounds import Ground
from .measure import percentile

__all__ = ["GOAL_MEDIAN_MS", "GOAL_WORST_MS", "Pauses", "Span", "pauses", "run"]

GOAL_MEDIAN_MS = 100
GOAL_WORST_MS = 500

_TASKS = 4
_EVERY_S = 0.005  # a send of each task; lists ten times as seldom
_LIST = 50
_KEYS = 40
_VALUE = b"x" * 100
_TOPIC = "bench"
_AFTER_S = 0.1  # a send that begins so soon after a change may still meet the seal


class Span(NamedTuple):
    """A send, or a change: when it began and ended, in seconds."""

    begin: float
    end: float

    @property
    def ms(self) -> float:
        return (self.end - self.begin) * 1000

    def meets(self, other: Span) -> bool:
        return self.begin < other.end and other.begin < self.end


@dataclass(frozen=True)
class Pauses:
    store: str
    changes: int
    change_ms: float  # what a change takes, at the median
    median_ms: float  # of the longest waits, one for each change
    worst_ms: float
    quiet_p99_ms: float  # of sends that met no change
    quiet_max_ms: float
    sends: int

    @property
    def good(self) -> bool:
        return self.median_ms < GOAL_MEDIAN_MS and self.worst_ms < GOAL_WORST_MS


def pauses(store: str, sends: Sequence[Span], changes: Sequence[Span]) -> Pauses:
    windows = [Span(change.begin, change.end + _AFTER_S) for change in changes]
    longest = [max(send.ms for send in sends if send.meets(window)) for window in windows]
    quiet = [send.ms for send in sends if not any(send.meets(window) for window in windows)]
    return Pauses(
        store=store,
        changes=len(changes),
        change_ms=statistics.median(change.ms for change in changes),
        median_ms=statistics.median(longest),
        worst_ms=max(longest),
        quiet_p99_ms=percentile(quiet, 99),
        quiet_max_ms=max(quiet),
        sends=len(sends),
    )


async def run(where: Ground, *, changes: int = 20, quiet_s: float = 2.0, between_s: float = 0.2) -> Pauses:
    """`quiet_s`: before the first change; `between_s`: after each."""
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        url = where.fresh(Path(folder))
        async with postroom.connect(url, migrate=True) as mq, postroom.connect(url) as other:
            await mq.create_topic(_TOPIC, partitions=2)
            sending = _Sending(mq)
            tasks = [asyncio.create_task(sending.one_by_one(number)) for number in range(_TASKS)]
            tasks.append(asyncio.create_task(sending.lists()))
            await asyncio.sleep(quiet_s)
            spans = await _change(other, changes, between_s)
            sending.stopped.set()
            await asyncio.gather(*tasks)
    return pauses(where.store, sending.spans, spans)


@dataclass
class _Sending:
    mq: postroom.Connection
    spans: list[Span] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    async def one_by_one(self, task: int) -> None:
        begin = time.perf_counter()
        for number in itertools.count():
            if await self._stopped(begin + number * _EVERY_S):
                return
            sent = time.perf_counter()
            await self.mq.send(_TOPIC, _VALUE, key=f"{task}-{number % _KEYS}")
            self.spans.append(Span(sent, time.perf_counter()))

    async def lists(self) -> None:
        messages = [postroom.Message(_VALUE, key=f"list-{number % _KEYS}") for number in range(_LIST)]
        begin = time.perf_counter()
        for number in itertools.count():
            if await self._stopped(begin + number * _EVERY_S * 10):
                return
            sent = time.perf_counter()
            await self.mq.send_many(_TOPIC, messages)
            self.spans.append(Span(sent, time.perf_counter()))

    async def _stopped(self, due: float) -> bool:
        """Wait for the moment of the next send; one that is late begins at once."""
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return self.stopped.is_set()


async def _change(mq: postroom.Connection, changes: int, between_s: float) -> list[Span]:
    """Splits and merges in turn, so that every key is moved again and again."""
    spans = []
    for number in range(changes):
        first, second, *_ = (await mq.route(_TOPIC)).ranges
        begin = time.perf_counter()
        if number % 2:
            await mq.merge(_TOPIC, first.partition, second.partition)
        else:
            await mq.split(_TOPIC, first.partition)
        spans.append(Span(begin, time.perf_counter()))
        await asyncio.sleep(between_s)
    return spans
