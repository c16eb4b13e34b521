"""How far groups are behind, as scrapes show it: looked up when somebody scrapes, and not often.

A look is remembered for `FRESH_S`; those who scrape meanwhile are given the same. What topics and groups
there are is read when the catalog has changed; topics without groups cost nothing. A look is bounded in
groups and in time, one look-up after another, so that scraping never loads the database; what was left out is
counted. A scrape does not wait for a store that is away: it shows the last look, and how old that is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ...broker.metrics import topic_label
from ...broker.served import Servable
from ...endpoint.values import PartitionLag, RateInfo
from ...errors import CatalogError, PostroomError, StoreError
from ...model.policy.slow_lane import LaneInfo
from ...model.topology.names import REDRIVE_GROUP, base_of, dead_topic, is_internal, slow_topic
from ...store.contract import Group, Topic
from ...store.sql.outbox import OUTBOX, OutboxLook

__all__ = ["FRESH_S", "MOST_GROUPS", "Sample", "Sampler"]

_log = logging.getLogger("postroom.http")

FRESH_S = 5.0
MOST_GROUPS = 200
_WORK_S = 2.0  # for one look
_WAIT_S = 3.0  # of a scrape
_MOST_STOPPED = 100  # messages of a group whose keys are looked at

GroupKey = tuple[str, str]
"""Topic and group."""


@dataclass(slots=True)
class Sample:
    taken_at: float | None = None  # None: there was none yet
    lags: dict[GroupKey, PartitionLag] = field(default_factory=dict)
    letters: dict[GroupKey, int] = field(default_factory=dict)  # dead letters that wait for somebody
    behind: dict[GroupKey, int] = field(default_factory=dict)  # what waits behind stopped messages
    members: dict[GroupKey, int] = field(default_factory=dict)
    lanes: dict[GroupKey, LaneInfo] = field(default_factory=dict)  # of groups that have a slow lane
    delayed: dict[str, int] = field(default_factory=dict)  # by topic
    sealed: dict[str, int] = field(default_factory=dict)  # by topic
    rates: list[RateInfo] = field(default_factory=list)
    outbox: OutboxLook | None = None  # in the queue's own database
    brokers: int = 0
    left_out: int = 0  # groups


class Sampler:
    def __init__(self, broker: Servable, clock: Callable[[], float] = time.monotonic) -> None:
        self._broker, self._clock = broker, clock
        self.last = Sample()
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> Sample:
        """The last look if it is fresh, else a new one; if that takes too long, the last one all the same."""
        if self.last.taken_at is not None and self._clock() - self.last.taken_at < FRESH_S:
            return self.last
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(_WAIT_S):
                await asyncio.shield(self._looking)
        except TimeoutError:
            _log.warning("a scrape shows figures of groups that are old: the store is slow")
        return self.last

    @property
    def age_s(self) -> float:
        """-1: there was no look yet."""
        return -1.0 if self.last.taken_at is None else max(0.0, self._clock() - self.last.taken_at)

    async def _look(self) -> None:
        broker, sample, began = self._broker, Sample(), self._clock()
        try:
            listed = await broker.in_thread(broker.listing.look)
            topics = listed.topics
            delayed = await broker.in_thread(broker.store.schedule.delayed)
            names = {topic.id: topic.name for topic in topics}
            sample.delayed = {names[id]: count for id, count in delayed.items() if id in names}
            sample.rates = await broker.rates()
            sample.outbox = await self._outbox()
            sample.brokers = len(await broker.in_thread(broker.store.brokers.live))
            for topic in topics:
                self._count_sealed(topic, sample)
            known = {one.name for one in topics}
            for topic in topics:
                if topic.id in listed.groups and not is_internal(topic.name):
                    await self._look_at(topic.name, listed.groups[topic.id], known, sample, began)
        except PostroomError as error:
            _log.warning("a scrape shows figures of groups that are old: %s", error)
            return
        except Exception:
            _log.exception("figures of groups could not be looked up in an unexpected way")
            return
        sample.taken_at = self._clock()
        self.last = sample

    async def _outbox(self) -> OutboxLook | None:
        outboxes = getattr(self._broker.store, "outboxes", None)  # of the first database, if it is SQL
        if outboxes is None:
            return None
        try:
            found: OutboxLook | None = await self._broker.in_thread(outboxes.look, OUTBOX)
            return found
        except StoreError as error:  # its tables are the caller's affair
            _log.debug("the outbox could not be looked at: %s", error)
            return None

    @staticmethod
    def _count_sealed(topic: Topic, sample: Sample) -> None:
        if topic.route.sealed:
            name = topic_label(topic.name)
            sample.sealed[name] = sample.sealed.get(name, 0) + len(topic.route.sealed)

    async def _look_at(
        self, topic: str, groups: Sequence[Group], topics: set[str], sample: Sample, began: float
    ) -> None:
        members: Counter[str] = Counter()
        if len(sample.lags) < MOST_GROUPS and self._clock() - began <= _WORK_S:
            members_of, ids = self._broker.store.progress.members_of, [group.id for group in groups]
            live = await self._broker.in_thread(members_of, ids)
            for group in groups:  # those of a broadcast group are in groups of their own
                members[base_of(group.name) or group.name] += len(live.get(group.id, ()))
        for group in groups:
            if base_of(group.name) is not None:
                continue
            key = (topic, group.name)
            if len(sample.lags) >= MOST_GROUPS or self._clock() - began > _WORK_S:
                sample.left_out += 1
                continue
            try:
                sample.lags[key] = (await self._broker.lag(*key)).total
                sample.members[key] = members[group.name]
                if sample.lags[key].stopped:
                    found = await self._broker.stopped(*key, _MOST_STOPPED)
                    sample.behind[key] = sum(one.behind or 0 for one in found)
                if group.settings.slow_lane.on or slow_topic(*key) in topics:
                    sample.lanes[key] = await self._broker.lanes(*key)
                if dead_topic(*key) in topics:
                    sample.letters[key] = await self._letters(dead_topic(*key))
            except CatalogError:
                sample.lags.pop(key, None)  # it was deleted meanwhile

    async def _letters(self, topic: str) -> int:
        return (await self._broker.lag(topic, REDRIVE_GROUP)).total.messages
