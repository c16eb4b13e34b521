"""What monitors ask over HTTP: whether the process lives, whether it can do its work, and its figures.

`/health` looks at nothing: a broker whose database is away must not be restarted for it. `/ready` writes to
the store, one row, one at a time however many ask, and remembers the answer for a second, good or bad: it is
open to anybody, and must cost the database next to nothing. A store that can be read and not written (a full
disk, a read-only one) is of no use to those who send.

`/metrics` has every metric's name, kind and meaning in one table. A registry belongs to an app, none is
global. Counters are since the broker's start, and of this broker; metrics that have nothing to show yet are
named all the same, so that the documentation and the examples can be checked against them. How far groups
are behind comes from the store, and every broker of a queue shows the same: it is looked up when somebody
scrapes, remembered for `FRESH_S`, and bounded in groups and in time, so that scraping never loads the
database; what was left out is counted. A scrape does not wait for a store that is away: it shows what was
found last, and how old that is.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol, cast

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.samples import Sample as MetricSample

from ..broker.metrics import BOUNDS_S, OTHER, Labels, Spread, Tally, topic_label
from ..broker.served import Servable
from ..config import DEFAULTS, HttpTuning
from ..endpoint.values import PartitionLag, RateInfo
from ..errors import (
    BrokerUnavailable,
    CatalogError,
    PostroomError,
    StoreBusy,
    StoreError,
    StoreFull,
    StoreUnavailable,
)
from ..model.access import Principal, allows, visible
from ..model.policy.slow_lane import LaneInfo
from ..model.topology.names import REDRIVE_GROUP, base_of, dead_topic, is_internal, slow_topic
from ..store.contract import Group, Topic
from ..store.sql.outbox import OUTBOX, OutboxLook
from .failures import failure
from .service import Service

__all__ = [
    "METRICS",
    "MOST_GROUPS",
    "Collector",
    "Metrics",
    "Named",
    "Readiness",
    "Sample",
    "Sampler",
    "health_router",
    "metrics_router",
    "sees_all",
]


health_router = APIRouter(tags=["health"])

_log = logging.getLogger("postroom.http")

_DUTY = "ready"  # the row that is written: a lease that nobody needs
_WHY = {
    StoreFull.code: "the database has no space left: free some, or purge a topic",
    StoreBusy.code: "the database is locked by somebody else",
}


class Readiness:
    def __init__(self, service: Service, tuning: HttpTuning = DEFAULTS.tuning.http) -> None:
        self._service, self._tuning = service, tuning
        self._asking: asyncio.Task[None] | None = None
        self._answered_at = float("-inf")
        self._why: PostroomError | None = None  # what it found last
        self._holder = f"ready-{secrets.token_hex(4)}"

    async def why_not(self) -> PostroomError | None:
        """Returns the reason why it is not ready; None if it is."""
        if self._service.stopping:
            return BrokerUnavailable("this broker is stopping: ask another")
        if time.monotonic() - self._answered_at < self._tuning.ready_fresh_s:
            return self._why
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(_looked_at)
        try:
            async with asyncio.timeout(self._tuning.ready_answer_s):
                await asyncio.shield(self._asking)
        except TimeoutError:
            return StoreUnavailable(
                f"the store has not answered within {self._tuning.ready_answer_s:g} seconds"
            )
        return self._why

    async def _ask(self) -> None:
        """Says nothing of an address: there may be a password in it, and anybody may ask."""
        why: PostroomError | None = None
        try:
            await self._service.broker.in_thread(self._write)
        except PostroomError as error:
            said = _WHY.get(error.code, f"the store does not answer as it should ({error.code})")
            why = StoreUnavailable(f"nothing can be written: {said}; the broker's log has more")
            if self._why is None:
                _log.warning("not ready, nothing can be written: %s", error)
        if why is None and self._why is not None:
            _log.info("ready again")
        self._why, self._answered_at = why, time.monotonic()

    def _write(self) -> None:
        """A row may find room on a disk where messages do not: what appends met lately counts, too."""
        if time.monotonic() - self._service.figures.full_at < self._tuning.full_s:
            raise StoreFull("an append found no space, and nothing was stored since")
        self._service.broker.store.duties.acquire(_DUTY, self._holder, self._tuning.ready_lease_ms)


def _looked_at(done: asyncio.Task[None]) -> None:
    if not done.cancelled():
        done.exception()  # whoever waited for it may be gone


@health_router.head("/health", include_in_schema=False)
@health_router.get("/health")
async def health() -> dict[str, str]:
    """The process lives."""
    return {"status": "ok"}


@health_router.head("/ready", include_in_schema=False)
@health_router.get("/ready", response_model=dict[str, str])
async def ready(request: Request) -> JSONResponse:
    """Something can be written, and the broker is not about to stop; 503 with the reason otherwise."""
    error = await cast(Readiness, request.app.state.readiness).why_not()
    return JSONResponse({"status": "ready"}) if error is None else failure(error)


# ---- how far groups are behind ----


MOST_GROUPS = 200
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
    def __init__(
        self,
        broker: Servable,
        clock: Callable[[], float] = time.monotonic,
        tuning: HttpTuning = DEFAULTS.tuning.http,
    ) -> None:
        self._broker, self._clock, self._tuning = broker, clock, tuning
        self.last = Sample()
        self._looking: asyncio.Task[None] | None = None

    async def look(self) -> Sample:
        """The last look if it is fresh, else a new one; if that takes too long, the last one all the same."""
        if (
            self.last.taken_at is not None
            and self._clock() - self.last.taken_at < self._tuning.sample_fresh_s
        ):
            return self.last
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        try:
            async with asyncio.timeout(self._tuning.sample_wait_s):
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

    async def _letters(self, topic: str) -> int:
        return (await self._broker.lag(topic, REDRIVE_GROUP)).total.messages


# ---- names ----
# A scrape shows the names of topics and groups to those who would see them in a list: of a topic one has a
# permission on, and of all to whoever has one on `_metrics`, which `*` includes. Everything else is added up
# as `(other)`, so that totals are right for anybody. Ages and debts of others are the largest of them.

METRICS = "_metrics"
"""A topic that nobody has: a permission on it is one to see all names in figures."""

_NAMES = ("topic", "group", "producer")
_LARGEST = ("_age_seconds", "_debt_seconds")


class Collected(Protocol):
    def collect(self) -> Iterable[Any]: ...


def sees_all(principal: Principal) -> bool:
    return allows(principal, "any", METRICS)


class Named:
    """A collector that shows names as this principal may see them."""

    def __init__(self, collected: Collected, principal: Principal) -> None:
        self._collected, self._principal = collected, principal
        self._shown: dict[str, bool] = {OTHER: True}

    def collect(self) -> Iterator[Any]:
        for family in self._collected.collect():
            if any("topic" in sample.labels for sample in family.samples):
                family = copy(family)
                family.samples = self._named(family.samples)
            yield family

    def _named(self, samples: Iterable[MetricSample]) -> list[MetricSample]:
        found: dict[tuple[str, tuple[tuple[str, str], ...]], MetricSample] = {}
        for sample in samples:
            if not self._shows(sample.labels.get("topic", "")):
                labels = {name: OTHER if name in _NAMES else value for name, value in sample.labels.items()}
                sample = sample._replace(labels=labels)
            key = (sample.name, tuple(sorted(sample.labels.items())))
            if (before := found.get(key)) is not None:
                add = _adding(sample.name)
                sample = sample._replace(value=add((before.value, sample.value)))
            found[key] = sample
        return list(found.values())

    def _shows(self, topic: str) -> bool:
        shown = self._shown.get(topic)
        if shown is None:
            shown = self._shown[topic] = bool(topic) and bool(visible(self._principal, [topic]))
        return shown


def _adding(name: str) -> Callable[[Iterable[float]], float]:
    return max if name.endswith(_LARGEST) else sum


# ---- metrics ----

metrics_router = APIRouter(tags=["metrics"])

_TG = ("topic", "group")

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
Values = Iterable[tuple[Labels, float]]


class Collector:
    """What `generate_latest` asks."""

    def __init__(self, service: Service, sampler: Sampler) -> None:
        self._service, self._sampler = service, sampler

    def collect(self) -> Iterator[Family]:
        yield from self._messages()
        yield from self._requests()
        yield from self._groups()
        yield from self._broker()

    def _messages(self) -> Iterator[Family]:
        f = self._service.figures
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

    def _requests(self) -> Iterator[Family]:
        f = self._service.figures
        yield _counter("requests", "Requests ended.", ("operation", "outcome"), f.requests)
        yield _histogram("request_seconds", "Time of a request.", ("operation",), f.seconds)
        yield _counter("store_errors", "Requests that the store failed.", ("code",), f.store_errors)
        yield _counter("http_requests", "Requests over HTTP.", ("method", "route", "status"), f.http)
        yield _histogram("commit_seconds", "Time of a commit to the log.", ("shard",), f.commit_seconds)
        yield _counter("commit_batches", "Batches in commits to the log.", ("shard",), f.commit_batches)
        yield _counter("commit_bytes", "Bytes in commits to the log.", ("shard",), f.commit_bytes)
        queued = [((shard,), float(waiting())) for shard, waiting in f.queued.items()]
        yield _gauge("writer_queue_bytes", "Bytes that wait for a commit.", ("shard",), queued)

    def _groups(self) -> Iterator[Family]:
        s = self._sampler.last
        lags = list(s.lags.items())
        yield _gauge("group_lag_messages", "Messages not settled.", _TG, ((k, v.messages) for k, v in lags))
        yield _gauge("group_lag_bytes", "Bytes not settled.", _TG, ((k, v.bytes) for k, v in lags))
        ages = [(k, v.oldest_age_ms / 1000) for k, v in lags]
        yield _gauge("group_oldest_age_seconds", "Age of the oldest message not settled.", _TG, ages)
        unsettled = [(k, v.unsettled) for k, v in lags]
        yield _gauge("group_unsettled_messages", "Messages handed out, not settled.", _TG, unsettled)
        stopped = [(k, v.stopped) for k, v in lags]
        yield _gauge("group_stopped_messages", "Messages that hold their key for people.", _TG, stopped)
        ages = [(k, v.stopped_age_ms / 1000) for k, v in lags]
        said = "For how long the oldest stopped message has held its key."
        yield _gauge("group_stopped_oldest_age_seconds", said, _TG, ages)
        behind = [(k, float(s.behind.get(k, 0))) for k, _ in lags]
        yield _gauge("group_stopped_behind_messages", "Messages behind stopped ones, at least.", _TG, behind)
        slow = [(k, float(len(v.sources))) for k, v in s.lanes.items()]
        yield _gauge("slow_sources", "Sources whose messages go to the slow lane.", _TG, slow)
        waiting = [(k, float(v.waiting)) for k, v in s.lanes.items()]
        yield _gauge("slow_lane_messages", "Messages in the slow lane, not settled.", _TG, waiting)
        yield _gauge("group_members", "Live members.", _TG, s.members.items())
        yield _gauge("dead_letters", "Dead letters that wait for somebody.", _TG, s.letters.items())
        yield _by_topic("delayed_messages", "Delayed messages that wait.", s.delayed)
        yield _by_topic("sealed_partitions", "Partitions to be read to their end.", s.sealed)
        debts = [((r.kind, r.topic, r.group, r.producer), r.debt_ms / 1000) for r in s.rates]
        labels = ("kind", "topic", "group", "producer")
        yield _gauge("rate_debt_seconds", "Current wait imposed by a rate limit.", labels, debts)
        yield from self._outbox()
        yield _one("brokers", "Brokers that serve this queue.", s.brokers)
        yield _one("groups_left_out", "Groups that this scrape left out: too many.", s.left_out)
        yield _one("groups_age_seconds", "Age of the figures of groups; -1: none yet.", self._sampler.age_s)

    def _outbox(self) -> Iterator[Family]:
        """Shows an outbox in the queue's own database; others are shown by the process of their relay."""
        found = self._sampler.last.outbox
        figures = (
            (0.0, 0.0, 0.0) if found is None else (found.messages, found.age_ms / 1000, len(found.stuck))
        )
        values = [[] if found is None else [((OUTBOX,), float(figure))] for figure in figures]
        said = "Messages committed in the outbox, and not sent yet."
        yield _gauge("outbox_messages", said, ("table",), values[0])
        yield _gauge("outbox_oldest_age_seconds", "Age of the oldest of them.", ("table",), values[1])
        said = "Topics that can take none of their messages until somebody acts."
        yield _gauge("outbox_stuck_topics", said, ("table",), values[2])

    def _broker(self) -> Iterator[Family]:
        service = self._service
        server, duties = service.server, service.broker.duties
        connections = len(server.connections) if server is not None else 0
        limit = server.listening.max_connections if server is not None else 0
        yield _one("connections", "Connections of clients, without HTTP.", connections)
        yield _one("connections_limit", "Connections that are allowed.", limit)
        answers = service.answers
        yield _one("answer_bytes", "Bytes of answers being made, or not read yet.", answers.held)
        yield _one("answer_bytes_limit", "Bytes of answers that are allowed.", answers.most)
        yield _one("answers_waiting", "Requests that wait for room for their answer.", answers.waiting)
        held = [((name,), float(name in duties.held)) for name in duties.names]
        yield _gauge("duty_held", "1: this broker does this background work.", ("duty",), held)
        yield _one("stopping", "1: this broker is about to stop.", float(service.stopping))
        yield _one("uptime_seconds", "Since the start.", time.time() - service.figures.started_at)
        ahead_s = service.broker.now_ms() / 1000 - time.time()
        yield _one("clock_ahead_seconds", "The queue's time, ahead of this machine's.", ahead_s)
        yield _gauge("build_info", "The version.", ("version",), [((_version(),), 1.0)])


class Metrics:
    def __init__(self, service: Service, sampler: Sampler) -> None:
        self.sampler = sampler
        self._turn = asyncio.Lock()
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(cast(Any, Collector(service, sampler)))

    async def text(self, principal: Principal) -> bytes:
        """Written in a thread, one after the other: with thousands of topics it takes its time."""
        await self.sampler.look()
        shown: Any = self.registry if sees_all(principal) else Named(self.registry, principal)
        async with self._turn:
            return await asyncio.to_thread(generate_latest, shown)


@metrics_router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Figures for Prometheus, for any principal; names of topics for those who may see them."""
    found = cast(Metrics, request.app.state.metrics)
    text = await found.text(request.scope["state"]["principal"])
    return Response(text, media_type=CONTENT_TYPE_LATEST)


# ---- families ----


def _counter(name: str, help: str, labels: Labels, tally: Tally) -> Family:
    family = CounterMetricFamily(f"postroom_{name}", help, labels=labels)
    for values, amount in tally.items():
        family.add_metric(values, amount)
    return family


def _gauge(name: str, help: str, labels: Labels, values: Values) -> Family:
    family = GaugeMetricFamily(f"postroom_{name}", help, labels=labels)
    for found, value in values:
        family.add_metric(found, value)
    return family


def _by_topic(name: str, help: str, values: dict[str, int]) -> Family:
    return _gauge(name, help, ("topic",), (((topic,), float(value)) for topic, value in values.items()))


def _one(name: str, help: str, value: float) -> Family:
    return GaugeMetricFamily(f"postroom_{name}", help, value=value)


def _histogram(name: str, help: str, labels: Labels, spread: Spread) -> Family:
    family = HistogramMetricFamily(f"postroom_{name}", help, labels=labels)
    edges = [*map(str, BOUNDS_S), "+Inf"]
    for values, counts, total in spread.items():
        up_to = [sum(counts[: at + 1]) for at in range(len(counts))]
        family.add_metric(values, list(zip(edges, up_to, strict=True)), total)
    return family


def _version() -> str:
    try:
        return version("postroom")
    except PackageNotFoundError:
        return "unknown"
