"""Background work: small services, each idempotent, each held by one process at a time (I12).

A duty says what to do in `run_once`; the runner takes its lease, runs it in a worker thread and comes
back after a while. A process that dies leaves its lease to run out, and another goes on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..clock import STEP_MS, CautiousTime, Clock, is_real, steady_ms
from ..config import DEFAULTS, BrokerTuning, Limits
from ..errors import DeliveryError, PostroomError, StoreFull, UnknownGroup, UnknownPartition, UnknownTopic
from ..model.topology.names import REDRIVE_GROUP, base_of, dead_topic, is_unnamed
from ..store.contract import Group, Store, Topic
from .topology.catalog_cache import Listed, Listing, readers
from .topology.kafka_groups import KafkaReaders

__all__ = [
    "CutStrays",
    "DropLogs",
    "Duty",
    "DutyRunner",
    "ExpireGroups",
    "ForgetProducers",
    "Retention",
    "cautious_time",
    "ids_from",
]


_log = logging.getLogger("postroom.broker")

_NEVER = 2**62
_SLICES = 200  # at most so many slices of deletes per run, so that no run holds its lease for long


class Duty(Protocol):
    name: str
    every_s: float

    def run_once(self) -> None:
        """Do what is due now. May be cut at any point and run again by anybody."""


@dataclass(frozen=True, slots=True)
class _Visit:
    """How a topic was found when retention last went through it."""

    found: object
    due: int  # there may be more to drop then, even if it is found the same


class Retention:
    """Drop what is older or larger than the topic allows and no group needs (R44).

    A topic is looked at when something in it has moved (its ends, what its groups have settled, its settings)
    or comes of age; the others cost nothing but their share of two reads.
    """

    name: str = "retention"
    every_s: float = 10

    def __init__(
        self,
        store: Store,
        limits: Limits,
        listing: Listing | None = None,
        now_ms: Callable[[], int] | None = None,
    ) -> None:
        """`now_ms`: the time to delete by, if not the store's (`cautious_time`)."""
        self._store = store
        self._limits = limits
        self._listing = listing or Listing(store.catalog)
        self._now_ms = now_ms or store.now_ms
        self._visits: dict[int, _Visit] = {}  # by topic id
        self._kafka = KafkaReaders(store)

    def run_once(self) -> None:
        listed = self._listing.look()
        places = self._places(listed)
        self._visits = {topic_id: visit for topic_id, visit in self._visits.items() if topic_id in places}
        now = self._now_ms()
        positions = self._store.kafka_groups.positions() if places else {}
        for topic_id, (topic, seen) in places.items():
            groups, last = listed.groups.get(topic_id, []), self._visits.get(topic_id)
            kafka = positions.get(topic_id, {})
            found = (seen, topic.settings, tuple((group.id, group.generation) for group in groups), kafka)
            if last is not None and last.found == found and now < last.due:
                continue
            try:
                self._visits[topic_id] = _Visit(found, self._drop(topic, groups, kafka))
            except (UnknownTopic, UnknownPartition):
                pass  # it was deleted meanwhile

    def _places(self, listed: Listed) -> dict[int, tuple[Topic, dict[int, object]]]:
        """By topic, what its partitions hold and how far its groups are; not of topics never used."""
        places: dict[int, tuple[Topic, dict[int, object]]] = {}
        edges = self._store.log.edges()
        marks = self._store.usage.marks() if edges else {}
        for partition_id, bounds in edges.items():
            topic = listed.by_partition.get(partition_id)
            if topic is not None:
                _, seen = places.setdefault(topic.id, (topic, {}))
                seen[partition_id] = (bounds, marks.get(partition_id))
        return places

    def _drop(self, topic: Topic, all_groups: Sequence[Group], kafka: Mapping[str, Mapping[int, int]]) -> int:
        """Returns when there may be more to drop, if nothing happens until then."""
        groups, due = readers(all_groups), _NEVER
        places = self._store.present(piece.partition_id for piece in topic.route.partitions)
        committed = self._store.usage.committed(groups, places)
        others = self._kafka.committed(topic, self._store.log.bounds(places) if kafka else {}, kafka)
        for partition_id in places:
            if topic.settings.volatile:
                self._store.log.skip_lost(partition_id)
                due = min(due, self._now_ms() + self._limits.tuning.broker.volatile_check_ms)
            lowest = [committed[group.id][partition_id] for group in groups]
            lowest += [offsets[partition_id] for offsets in others.values() if partition_id in offsets]
            needed = min(lowest, default=None)
            limit = self._trim(topic, partition_id, needed)
            swept = sweep(self._store, partition_id, self._limits, ids_from(self._now_ms(), topic))
            due = min(due, self._next(topic, partition_id, limit) if swept else 0)
        for partition_id in self._store.present(piece.partition_id for piece in topic.route.sealed):
            self._remove(partition_id)
        return due

    def _next(self, topic: Topic, partition_id: int, limit: int) -> int:
        """When the first batch above the limit comes of age, or the ids of one below the start do."""
        due, settings = _NEVER, topic.settings
        if settings.retention_ms:
            due = min(due, self._age(partition_id, limit, settings.retention_ms))
        if settings.dedup_ms:
            due = min(due, self._age(partition_id, 0, settings.dedup_ms))
        return due

    def _age(self, partition_id: int, offset: int, ms: int) -> int:
        found = self._store.log.read(partition_id, offset, max_messages=1, max_bytes=1)
        return found[0].appended_at + ms if found else _NEVER

    def _remove(self, partition_id: int) -> None:
        """A sealed partition whose last batch is gone goes as a whole (R26)."""
        edges = self._store.log.bounds([partition_id])[partition_id]
        empty = edges.start == edges.end
        if empty and not self._store.log.read(partition_id, 0, max_messages=1, max_bytes=1):
            self._store.routes.remove(partition_id)

    def _trim(self, topic: Topic, partition_id: int, needed: int | None) -> int:
        """`needed` is the lowest offset that a group has not settled; None: there is no group.

        Returns where the log would start if only age and size decided.
        """
        settings = topic.settings
        before = self._now_ms() - settings.retention_ms if settings.retention_ms else 0
        keep_bytes = settings.retention_bytes
        if keep_bytes and (newer := topic.route.descendants(partition_id)):  # what follows it counts too
            present = self._store.present(newer)
            starts = {one: edges.start for one, edges in self._store.log.bounds(present).items()}
            keep_bytes = max(1, keep_bytes - self._store.usage.bytes_from([starts])[0])
        limit = self._store.log.expire_by_limits(partition_id, before_ms=before, keep_bytes=keep_bytes)
        start = limit if settings.keep == "limits" or needed is None else min(limit, needed)
        if settings.drop_settled and needed is not None:
            start = max(start, needed)
        if start > self._store.log.bounds([partition_id])[partition_id].start:
            self._store.log.trim(partition_id, start)
        return limit


class ExpireGroups:
    """Forget groups that nobody has used for as long as they say (R44), and members without a name (R11).

    Members that died in groups that nobody joins any more are forgotten too.
    """

    name: str = "expire-groups"
    every_s: float = 30

    def __init__(
        self,
        store: Store,
        forget: Callable[[Group], None],
        listing: Listing | None = None,
        now_ms: Callable[[], int] | None = None,
        tuning: BrokerTuning = DEFAULTS.tuning.broker,
    ) -> None:
        self._store = store
        self._used_ms, self._dead_ms = tuning.group_used_ms, tuning.dead_member_ms
        self._forget = forget
        self._listing = listing or Listing(store.catalog)
        self._now_ms = now_ms or store.now_ms
        self._told: set[int] = set()  # groups that are kept for their dead letters

    def run_once(self) -> None:
        listed = self._listing.look()
        if self._told:
            self._told &= {group.id for groups in listed.groups.values() for group in groups}
        expiring = [some for some in listed.groups.values() if any(g.settings.expires_ms for g in some)]
        seen = self._store.usage.seen() if expiring else {}
        for groups in expiring:
            try:
                self._expire(groups, seen)
            except UnknownTopic:
                pass  # it was deleted meanwhile
        self._store.progress.forget_dead(self._store.now_ms() - self._dead_ms)

    def _expire(self, groups: Sequence[Group], seen: Mapping[int, int]) -> None:
        """A broadcast group waits until those of its members are gone."""
        now = self._now_ms()
        with_members = {base_of(group.name) for group in groups}
        bases = {group.name: group for group in groups if group.name in with_members}
        for group in groups:
            idle_ms = group.settings.expires_ms + self._used_ms  # activity is written down once in that time
            if not group.settings.expires_ms or group.name in bases or now - seen.get(group.id, 0) < idle_ms:
                continue
            if self._may_go(group) and self._store.usage.retire(group.id, idle_ms):
                _log.info("group %r of topic %r expired: nobody used it", group.name, group.topic)
                self._forget(group)
                if (base := bases.get(base_of(group.name) or "")) is not None:
                    self._store.usage.touch(base.id)

    def _may_go(self, group: Group) -> bool:
        letters = self._letters(group)
        if letters and group.id not in self._told and not is_unnamed(group.name):
            self._told.add(group.id)
            _log.warning(
                "group %r of topic %r is not used, but kept: redrive or discard its %d dead letters first",
                group.name,
                group.topic,
                letters,
            )
        return not letters or is_unnamed(group.name)

    def _letters(self, group: Group) -> int:
        try:
            box = self._store.catalog.topic(dead_topic(group.topic, group.name))
            reader = self._store.catalog.group(box.name, REDRIVE_GROUP)
        except (UnknownTopic, UnknownGroup):
            return 0
        places = [piece.partition_id for piece in box.route.partitions]
        return sum(found.messages for found in self._store.progress.backlog(reader, places))


class DropLogs:
    """Remove the logs of deleted topics: in slices first, since a big DROP holds the lock for long (I19)."""

    name: str = "drop-logs"
    every_s: float = 10

    def __init__(self, store: Store, limits: Limits) -> None:
        self._store = store
        self._limits = limits

    def run_once(self) -> None:
        for partition_id in self._store.catalog.dropped():
            try:
                self._store.log.trim(partition_id, 2**62)
                if sweep(self._store, partition_id, self._limits):
                    self._store.catalog.drop_log(partition_id)
            except UnknownPartition:
                pass  # another did, on a disk too full for leases


class ForgetProducers:
    """Forget the sequences of producers that have been silent for long."""

    name: str = "forget-producers"
    every_s: float = 3600

    def __init__(self, store: Store, limits: Limits, now_ms: Callable[[], int] | None = None) -> None:
        self._store = store
        self._limits = limits
        self._now_ms = now_ms or store.now_ms

    def run_once(self) -> None:
        self._store.log.forget_producers(self._now_ms() - self._limits.producer_memory_ms)


def cautious_time(store: Store, clock: Clock) -> Callable[[], int]:
    """The time to delete by: a clock that was just set does not decide about anybody's messages (I26).

    Whoever set it by mistake has time to see it.
    """

    def doubted(ahead_ms: int) -> None:
        _log.warning(
            "the queue's clock went on by %.0f s that did not pass: what is too old by it is deleted later; "
            "set the clock right if it is wrong",
            ahead_ms / 1000,
        )

    if not is_real(clock):
        return store.now_ms
    cautious = CautiousTime(store.now_ms, doubted=doubted)
    cautious.now_ms()  # from here on a step is seen
    return cautious.now_ms


def ids_from(now_ms: int, topic: Topic) -> int | None:
    """What was stored since then stays, even if nobody can read it: its ids are remembered (R32)."""
    window_ms = topic.settings.dedup_ms
    return now_ms - window_ms if window_ms else None


def sweep(store: Store, partition_id: int, limits: Limits, appended_before: int | None = None) -> bool:
    """Delete what lies below the start, in slices; False if some is left for the next run."""
    for _ in range(_SLICES):
        rows = limits.retention_slice_rows
        if store.log.sweep(partition_id, rows=rows, appended_before=appended_before) == 0:
            return True
    return False


class DutyRunner:
    def __init__(
        self,
        store: Store,
        duties: Sequence[Duty],
        holder: str,
        limits: Limits,
        in_thread: Callable[..., Awaitable[object]],
        look: Callable[[], object] | None = None,
    ) -> None:
        """`look` is called whenever something is due, whoever has the leases."""
        self._look = look
        self._store = store
        self._duties = duties
        self._holder = holder
        self._limits = limits
        self._in_thread = in_thread
        self.held: set[str] = set()  # whose lease this process had when they were last due
        self._stopping = asyncio.Event()
        self._task = asyncio.create_task(self._run())

    @property
    def names(self) -> list[str]:
        return [duty.name for duty in self._duties]

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = {duty.name: loop.time() + duty.every_s for duty in self._duties}
        while not await self._stopped_within(max(0.0, min(due.values()) - loop.time())):
            for duty in self._duties:
                if due[duty.name] <= loop.time() and not self._stopping.is_set():
                    await self._in_thread(self.run_once, duty)
                    due[duty.name] = loop.time() + duty.every_s

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            pass
        return self._stopping.is_set()

    def run_once(self, duty: Duty) -> bool:
        """Run a duty if its lease can be had; True if it ran."""
        try:
            if self._look is not None:
                self._look()
            if not self._may_run(duty):
                self.held.discard(duty.name)
                return False
            self.held.add(duty.name)
            duty.run_once()
        except PostroomError as error:
            _log.warning("duty %s waits: %s", duty.name, error)
            return False
        except Exception:
            _log.exception("duty %s failed in an unexpected way; the others go on", duty.name)
            return False
        return True

    def _may_run(self, duty: Duty) -> bool:
        try:
            return self._store.duties.acquire(duty.name, self._holder, self._limits.duty_lease_ms)
        except StoreFull:
            if isinstance(duty, Retention | DropLogs):  # they make room, and several may do so at once
                return True
            raise

    async def close(self) -> None:
        """Let a duty that runs now finish (its thread cannot be cancelled), then give the leases back."""
        self._stopping.set()
        await asyncio.wait((self._task,))  # cancelled already, if the loop is being closed
        await self._in_thread(self._release)

    def _release(self) -> None:
        for name in tuple(self.held):
            try:
                self._store.duties.release(name, self._holder)
            except PostroomError as error:
                _log.warning("lease of duty %s is left to run out: %s", name, error)


class CutStrays:
    """The background job that cuts the leases of a clock that was set back (I26).

    It looks when it first runs, since the clock may have been set while nobody was there, and whenever the
    store's time goes on by less than the steady clock has.
    """

    name: str = "cut-strays"
    every_s: float = 10

    def __init__(self, store: Store, steady: Callable[[], int] = steady_ms) -> None:
        self._store, self._steady = store, steady
        self._last: tuple[int, int] | None = None  # the steady clock's time, and the store's

    def run_once(self) -> None:
        steady, now = self._steady(), self._store.now_ms()
        if self._last is not None:
            ran = steady - self._last[0]
            if now >= self._last[1] + ran - ran // 4 - STEP_MS:  # a quarter: it follows a step (`clock.Pace`)
                self._last = (steady, now)
                return
        found = sum(self._cut(topic.name) for topic in self._store.catalog.topics())
        if found:
            _log.warning("%d leases were of a clock that was set back: they end within a lease now", found)
        self._last = (steady, now)

    def _cut(self, topic: str) -> int:
        found = 0
        try:
            route = self._store.catalog.topic(topic).route
            places = self._store.present(piece.partition_id for piece in route.partitions)
            for group in self._store.catalog.groups(topic):
                found += self._store.progress.cut_leases(group, places)
        except (UnknownTopic, UnknownGroup, UnknownPartition, DeliveryError):
            pass  # deleted or reset meanwhile: then nothing is held
        return found
