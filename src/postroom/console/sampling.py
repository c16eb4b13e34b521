"""One sampler for all who view the console: it measures the queue, keeps the last hour, wakes the viewers.

However many view it, the queue is measured once; a page that several see alike is written once. A measurement
that takes long is made less often, so that all of them together take a small share of one core whatever the
size of the queue. Charts are kept in memory: an hour of the queue as a whole, and of topics that moved last.

Must never be in the way of the queue's work: an error is logged once, and shown as the age of the figures.
"""

from __future__ import annotations

import asyncio
import logging
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ..broker.metrics import Figures
from ..broker.served import Servable, figures_of, unmeasured
from ..config import DEFAULTS, ConsoleTuning
from ..errors import PostroomError
from .measuring import Measured, Measuring

__all__ = ["Charts", "Sampler", "TooManyViewers"]

T = TypeVar("T")

_log = logging.getLogger("postroom.console")

POINTS = 360  # of a chart: an hour
_MOST_TOPICS = 1000  # that have charts of their own
_MOST_VIEWERS = 200
_MOST_WRITTEN = 500  # pages that are kept for others who see them alike
_SHARE = 50  # a measurement takes at most this part of the time


class TooManyViewers(Exception):
    """There is no room for another stream of figures."""


class Charts:
    """The last hour: a point every few seconds, oldest first. What was not measured is a hole (None)."""

    NAMES = ("in_per_s", "out_per_s", "lag")
    WHOLE = (*NAMES, "wait_ms", "commit_ms", "dead")

    def __init__(self) -> None:
        self.times: deque[int] = deque(maxlen=POINTS)
        self._whole = {name: deque[float | None](maxlen=POINTS) for name in self.WHOLE}
        self._topics: dict[str, array[float]] = {}  # those that moved last are the last; three a point
        self._commits = (0, 0.0)

    def add(self, measured: Measured, figures: Figures | None) -> None:
        """Add a point of every series."""
        topics = measured.topics.values()
        groups = [group for topic in topics for group in topic.groups.values()]
        self.times.append(measured.at_ms)
        whole: dict[str, float | None] = {
            "in_per_s": sum(topic.in_per_s for topic in topics),
            "out_per_s": sum(group.out_per_s for group in groups),
            "lag": sum(group.lag for group in groups),
            "wait_ms": max((group.wait_ms for group in groups), default=0),
            "commit_ms": self._commit_ms(figures),
            "dead": sum(group.dead for group in groups),
        }
        for name, value in whole.items():
            self._whole[name].append(value)
        self._add_topics(measured)

    def _add_topics(self, measured: Measured) -> None:
        for name, topic in measured.topics.items():
            row = (topic.in_per_s, topic.out_per_s, float(topic.lag))
            if any(row) and name in self._topics:
                self._topics[name] = self._topics.pop(name)
            elif any(row):
                if len(self._topics) >= _MOST_TOPICS:
                    del self._topics[next(iter(self._topics))]
                self._topics[name] = array("f", [0.0] * 3 * (len(self.times) - 1))
            if (points := self._topics.get(name)) is not None:
                points.extend(row)
                del points[: -3 * POINTS]
        for name in self._topics.keys() - measured.topics.keys():
            del self._topics[name]

    def _commit_ms(self, figures: Figures | None) -> float | None:
        """The mean time of a commit since the last point; None: there was none."""
        if figures is None:
            return None
        found = [(sum(counts), total) for _, counts, total in figures.commit_seconds.items()]
        count, total = sum(one for one, _ in found), sum(one for _, one in found)
        before, self._commits = self._commits, (count, total)
        return None if count <= before[0] else 1000 * (total - before[1]) / (count - before[0])

    def whole(self) -> dict[str, list[float | None]]:
        return {name: list(values) for name, values in self._whole.items()}

    def topic(self, name: str) -> dict[str, list[float]]:
        """The series of a topic; all 0: it has not moved for long."""
        points = self._topics.get(name) or array("f", [0.0] * 3 * len(self.times))
        return {series: list(points[at::3]) for at, series in enumerate(self.NAMES)}


class Sampler:
    """For the event loop."""

    def __init__(
        self,
        broker: Servable,
        clock: Callable[[], float] = time.monotonic,
        tuning: ConsoleTuning = DEFAULTS.tuning.console,
    ) -> None:
        self._clock, self._tuning = clock, tuning
        self._measuring = Measuring(unmeasured(broker), clock, tuning)
        self._figures = figures_of(broker)
        self.charts = Charts()
        self.viewers = 0
        self.number = 0  # of measurements: grows with each
        self._wanted = asyncio.Event()
        self._news = asyncio.Condition()
        self._written: dict[object, object] = {}
        self._charted_at = float("-inf")
        self._failed = False
        self._measured_at = float("-inf")
        self._lock = asyncio.Lock()

    @property
    def last(self) -> Measured:
        return self._measuring.last

    @property
    def stale(self) -> bool:
        """Whether the last measurement failed: what is shown is older than it should be."""
        return self._failed

    async def run(self) -> None:
        """Measure for ever."""
        while True:
            await self.measure()
            pause = self._tuning.sample_s if self.viewers else self._tuning.quiet_sample_s
            pause = max(pause, _SHARE * self.last.took_s)
            self._wanted.clear()
            try:
                async with asyncio.timeout(pause):
                    await self._wanted.wait()
            except TimeoutError:
                pass

    async def measure(self) -> Measured:
        """Measure now, unless somebody did just now."""
        async with self._lock:
            now = self._clock()
            if now - self._measured_at < min(self._tuning.sample_s, _SHARE * self.last.took_s):
                return self.last
            try:
                await self._measuring.run()
                self._failed = False
            except PostroomError as error:
                if not self._failed:
                    _log.warning("the console shows figures that are old: %s", error)
                self._failed = True
            self._measured_at = self._clock()
            if not self._failed and self._measured_at - self._charted_at >= self._tuning.chart_step_s:
                self._charted_at = self._measured_at
                self.charts.add(self.last, self._figures)
        await self._tell()
        return self.last

    async def _tell(self) -> None:
        self.number += 1
        self._written.clear()
        async with self._news:
            self._news.notify_all()

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """While somebody views it the queue is measured more often. TooManyViewers if there is no room."""
        if self.viewers >= _MOST_VIEWERS:
            raise TooManyViewers
        self.viewers += 1
        if self.viewers == 1:
            self._wanted.set()
        try:
            yield
        finally:
            self.viewers -= 1

    async def next(self, after: int) -> int:
        """Wait for a measurement later than that one, or for a moment; returns the number of the newest."""
        try:
            async with asyncio.timeout(self._tuning.stop_check_s), self._news:
                await self._news.wait_for(lambda: self.number > after)
        except TimeoutError:
            pass
        return self.number

    def once(self, key: object, write: Callable[[], T]) -> T:
        """What `write` returns, written once for all who ask by the same key between two measurements."""
        if key not in self._written:
            if len(self._written) >= _MOST_WRITTEN:
                self._written.clear()
            self._written[key] = write()
        return self._written[key]  # type: ignore[return-value]
