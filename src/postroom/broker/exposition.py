"""A broker's figures as metrics: what it counted, and how far groups are behind by the store.

Every metric of a queue has its name, kind and meaning here, and that of a server in `http.monitoring`; both
are shown by `/metrics`, and those here also to a program that embeds the queue (`Connection.metrics`).
Counters are since the broker's start, and of this broker; metrics that have nothing to show yet are named
all the same, so that the documentation and the examples can be checked against them. How far groups are
behind comes from the store, and every process of a queue shows the same: it is looked up when somebody asks,
remembered for a while, and bounded in groups and in time, so that asking never loads the database; what was
left out is counted. Nobody waits for a store that is away: they see what was found last, and how old that is.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from ..config import DEFAULTS, HttpTuning
from ..endpoint.values import PartitionLag, RateInfo
from ..errors import CatalogError, PostroomError, StoreError
from ..metrics import Family, Labels, counter, gauge, histogram, single
from ..model.policy.slow_lane import LaneInfo
from ..model.topology.names import REDRIVE_GROUP, base_of, dead_topic, is_internal, slow_topic
from ..store.contract import Group, Topic
from ..store.sql.outbox import OUTBOX, OutboxLook
from .metrics import BOUNDS_S, WAIT_BOUNDS_S, Figures, Spread, Tally, topic_label
from .served import Servable
from .topology.kafka_groups import KafkaReaders

__all__ = ["MOST_GROUPS", "QueueSample", "Sampler", "of_counts", "of_groups", "of_outbox", "of_process"]

_log = logging.getLogger("postroom.metrics")


# ---- how far groups are behind ----


MOST_GROUPS = 200
_MOST_STOPPED = 100  # messages of a group whose keys are looked at

GroupKey = tuple[str, str]
"""Topic and group."""


@dataclass(slots=True)
class QueueSample:
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
    def __init__(
        self,
        broker: Servable,
        clock: Callable[[], float] = time.monotonic,
        tuning: HttpTuning = DEFAULTS.tuning.http,
    ) -> None:
        self._broker, self._clock, self._tuning = broker, clock, tuning
        self.last = QueueSample()
        self._sampling: asyncio.Task[None] | None = None

    async def sample(self) -> QueueSample:
        """The last look if it is fresh, else a new one; if that takes too long, the last one all the same."""
        if (
            self.last.taken_at is not None
            and self._clock() - self.last.taken_at < self._tuning.sample_fresh_s
        ):
            return self.last
        if self._sampling is None or self._sampling.done():
            self._sampling = asyncio.create_task(self._measure())
        try:
            async with asyncio.timeout(self._tuning.sample_wait_s):
                await asyncio.shield(self._sampling)
        except TimeoutError:
            _log.warning("a scrape shows figures of groups that are old: the store is slow")
        return self.last

    @property
    def age_s(self) -> float:
        """-1: there was no look yet."""
        return -1.0 if self.last.taken_at is None else max(0.0, self._clock() - self.last.taken_at)

    async def _measure(self) -> None:
        broker, sample, began = self._broker, QueueSample(), self._clock()
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
                    await self._measure_groups(topic.name, listed.groups[topic.id], known, sample, began)
            await self._measure_kafka(topics, sample, began)
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
    def _count_sealed(topic: Topic, sample: QueueSample) -> None:
        if topic.route.sealed:
            name = topic_label(topic.name)
            sample.sealed[name] = sample.sealed.get(name, 0) + len(topic.route.sealed)

    async def _measure_groups(
        self, topic: str, groups: Sequence[Group], topics: set[str], sample: QueueSample, began: float
    ) -> None:
        members: Counter[str] = Counter()
        if len(sample.lags) < MOST_GROUPS and self._clock() - began <= self._tuning.sample_work_s:
            members_of, ids = self._broker.store.progress.members_of, [group.id for group in groups]
            live = await self._broker.in_thread(members_of, ids)
            for group in groups:  # those of a broadcast group are in groups of their own
                members[base_of(group.name) or group.name] += len(live.get(group.id, ()))
        for group in groups:
            if base_of(group.name) is not None:
                continue
            key = (topic, group.name)
            if len(sample.lags) >= MOST_GROUPS or self._clock() - began > self._tuning.sample_work_s:
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

    async def _measure_kafka(self, topics: Sequence[Topic], sample: QueueSample, began: float) -> None:
        """Groups of Kafka clients, of the topics that they have committed in."""
        readers = KafkaReaders(self._broker.store)
        by_topic = await self._broker.in_thread(readers.names, [topic.id for topic in topics])
        for topic in topics:
            for name in by_topic.get(topic.id, ()):
                if len(sample.lags) >= MOST_GROUPS or self._clock() - began > self._tuning.sample_work_s:
                    sample.left_out += 1
                    continue
                try:
                    sample.lags[topic.name, name] = (await self._broker.lag(topic.name, name)).total
                except CatalogError:
                    pass  # it was deleted meanwhile

    async def _letters(self, topic: str) -> int:
        return (await self._broker.lag(topic, REDRIVE_GROUP)).total.messages


# ---- families ----

_TG = ("topic", "group")


def of_counts(figures: Figures) -> Iterator[Family]:
    """What a broker counted since its start."""
    f = figures
    yield _counter("messages_published", "Messages stored.", ("topic",), f.published)
    yield _counter("messages_delayed", "Messages stored to be delivered later.", ("topic",), f.delayed)
    yield _counter("batches_published", "Batches stored.", ("topic",), f.batches)
    yield _counter("published_bytes", "Bytes stored, compressed.", ("topic",), f.published_bytes)
    yield _counter("messages_duplicate", "Messages that were there already.", ("topic",), f.duplicates)
    yield _counter("messages_delivered", "Messages handed out.", _TG, f.delivered)
    yield _counter("messages_redelivered", "Messages handed out once more.", _TG, f.redelivered)
    yield _counter("deliveries", "Ranges of messages handed out.", _TG, f.deliveries)
    yield _counter("messages_settled", "Messages settled, late ones too.", (*_TG, "verdict"), f.settled)
    yield _counter("leases_lost", "Ranges settled too late.", _TG, f.lost)
    yield _counter("messages_dead", "Messages moved to the dead letters.", _TG, f.dead)
    found = "Stored batches that cannot be read, met by a delivery or the background check."
    yield _counter("unreadable_batches", found, ("topic", "found_by"), f.unreadable)
    said = "Time from storing a message to handing it out for the first time."
    yield histogram("first_wait_seconds", said, _TG, f.first_waits.items(), WAIT_BOUNDS_S)
    yield from _of_requests(f)


def _of_requests(f: Figures) -> Iterator[Family]:
    yield _counter("requests", "Requests ended.", ("operation", "outcome"), f.requests)
    yield _histogram("request_seconds", "Time of a request.", ("operation",), f.seconds)
    yield _counter("store_errors", "Requests that the store failed.", ("code",), f.store_errors)
    yield _counter("http_requests", "Requests over HTTP.", ("method", "route", "status"), f.http)
    yield _histogram("commit_seconds", "Time of a commit to the log.", ("shard",), f.commit_seconds)
    yield _counter("commit_batches", "Batches in commits to the log.", ("shard",), f.commit_batches)
    yield _counter("commit_bytes", "Bytes in commits to the log.", ("shard",), f.commit_bytes)
    queued = [((shard,), float(waiting())) for shard, waiting in f.queued.items()]
    yield gauge("writer_queue_bytes", "Bytes that wait for a commit.", ("shard",), queued)


def of_groups(sampler: Sampler) -> Iterator[Family]:
    """How far groups are behind, and what else the store knows."""
    s = sampler.last
    lags = list(s.lags.items())
    yield _of_queue("group_lag_messages", "Messages not settled.", _TG, ((k, v.messages) for k, v in lags))
    yield _of_queue("group_lag_bytes", "Bytes not settled.", _TG, ((k, v.bytes) for k, v in lags))
    ages = [(k, v.oldest_age_ms / 1000) for k, v in lags]
    yield _of_queue("group_oldest_age_seconds", "Age of the oldest message not settled.", _TG, ages)
    unsettled = [(k, v.unsettled) for k, v in lags]
    yield _of_queue("group_unsettled_messages", "Messages handed out, not settled.", _TG, unsettled)
    stopped = [(k, v.stopped) for k, v in lags]
    yield _of_queue("group_stopped_messages", "Messages that hold their key for people.", _TG, stopped)
    ages = [(k, v.stopped_age_ms / 1000) for k, v in lags]
    said = "For how long the oldest stopped message has held its key."
    yield _of_queue("group_stopped_oldest_age_seconds", said, _TG, ages)
    behind = [(k, float(s.behind.get(k, 0))) for k, _ in lags]
    yield _of_queue("group_stopped_behind_messages", "Messages behind stopped ones, at least.", _TG, behind)
    slow = [(k, float(len(v.sources))) for k, v in s.lanes.items()]
    yield _of_queue("slow_sources", "Sources whose messages go to the slow lane.", _TG, slow)
    waiting = [(k, float(v.waiting)) for k, v in s.lanes.items()]
    yield _of_queue("slow_lane_messages", "Messages in the slow lane, not settled.", _TG, waiting)
    yield _of_queue("group_members", "Live members.", _TG, s.members.items())
    yield _of_queue("dead_letters", "Dead letters that wait for somebody.", _TG, s.letters.items())
    yield _by_topic("delayed_messages", "Delayed messages that wait.", s.delayed)
    yield _by_topic("sealed_partitions", "Partitions to be read to their end.", s.sealed)
    debts = [((r.kind, r.topic, r.group, r.producer), r.debt_ms / 1000) for r in s.rates]
    labels = ("kind", "topic", "group", "producer")
    yield _of_queue("rate_debt_seconds", "Current wait imposed by a rate limit.", labels, debts)
    yield from of_outbox(sampler)
    yield _one_of_queue("brokers", "Brokers that serve this queue.", s.brokers)
    yield _one_of_queue("groups_left_out", "Groups that this scrape left out: too many.", s.left_out)
    yield _one_of_queue("groups_age_seconds", "Age of the figures of groups; -1: none yet.", sampler.age_s)


def of_outbox(sampler: Sampler) -> Iterator[Family]:
    """Shows an outbox in the queue's own database; others are shown by the process of their relay."""
    found = sampler.last.outbox
    figures = (0.0, 0.0, 0.0) if found is None else (found.messages, found.age_ms / 1000, len(found.stuck))
    values = [[] if found is None else [((OUTBOX,), float(figure))] for figure in figures]
    said = "Messages committed in the outbox, and not sent yet."
    yield _of_queue("outbox_messages", said, ("table",), values[0])
    yield _of_queue("outbox_oldest_age_seconds", "Age of the oldest of them.", ("table",), values[1])
    said = "Topics that can take none of their messages until somebody acts."
    yield _of_queue("outbox_stuck_topics", said, ("table",), values[2])


def of_process(broker: Servable, started_at: float | None) -> Iterator[Family]:
    """What there is to say of the process that a broker lives in; `started_at`: it is counted since then."""
    duties = broker.duties
    active = [((name,), float(name in duties.held)) for name in duties.names]
    yield gauge("duty_held", "1: this broker does this background work.", ("duty",), active)
    if started_at is not None:
        yield single("uptime_seconds", "Since the start.", time.time() - started_at)
    ahead_s = broker.now_ms() / 1000 - time.time()
    yield single("clock_ahead_seconds", "The queue's time, ahead of this machine's.", ahead_s)
    yield gauge("build_info", "The version.", ("version",), [((_version(),), 1.0)])


# ---- making them ----


def _counter(name: str, help: str, labels: Labels, tally: Tally) -> Family:
    return counter(name, help, labels, tally.items())


def _histogram(name: str, help: str, labels: Labels, spread: Spread) -> Family:
    return histogram(name, help, labels, spread.items(), BOUNDS_S)


def _of_queue(name: str, help: str, labels: Labels, values: Iterable[tuple[Labels, float]]) -> Family:
    return gauge(name, help, labels, values, of_queue=True)


def _one_of_queue(name: str, help: str, value: float) -> Family:
    return single(name, help, value, of_queue=True)


def _by_topic(name: str, help: str, values: dict[str, int]) -> Family:
    return _of_queue(name, help, ("topic",), (((topic,), float(value)) for topic, value in values.items()))


def _version() -> str:
    try:
        return version("postroom")
    except PackageNotFoundError:
        return "unknown"
