"""Topics, how far groups are behind, and reply topics: blocking use cases, run in worker threads.

A topic goes with its groups and their own topics. Decides nothing about groups: `groups` does.

A reply topic (R38) is made for a requester, kept while it is heard of, and forgotten with it. A requester
opens its topic when it first asks, opens it again now and then to say that it lives, and closes it in the
end. One that was killed is not heard of any more, and a duty deletes what it left. When it was heard of is
the activity of a group without members on the topic, so that all brokers and processes on the store go by the
same. Must never delete the topic of a requester that lives: one that is about to go is retired first, and
whoever opens a retired one gets a new topic under the same name, of which it can tell by the partition's id.
A principal has a limited number of them, and makes a limited number a minute through one broker: each is a
table. Those who come at the same moment are not counted exactly. Whoever has the database itself is not
counted (I23).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import replace

from ...config import DEFAULTS, Limits
from ...endpoint.values import Lag, PartitionLag, TopicInfo
from ...errors import (
    GroupExists,
    InvalidSetting,
    LimitReached,
    StoreBusy,
    TopicExists,
    UnknownGroup,
    UnknownPartition,
    UnknownTopic,
)
from ...model.access import Principal, beginnings, visible
from ...model.delivery import first_waits
from ...model.messages.batch import Kept, TopicBounds
from ...model.messages.requests import ReplyTopic
from ...model.policy.bounds import Positions
from ...model.policy.settings import GroupSettings, Start, TopicSettings
from ...model.topology.names import (
    REPLY_GROUP,
    base_of,
    check_topic,
    is_internal,
    is_reply,
    owner,
    reply_ends,
    reply_topic,
)
from ...model.topology.route import Route
from ...store.contract import Backlog, Group, Peek, Store, Topic
from ..duties import ids_from
from .catalog_cache import CatalogCache, Listing
from .kafka_groups import KafkaReaders

__all__ = ["Admin", "ForgetReplies", "Replies"]


_log = logging.getLogger("postroom.broker")

_MINUTE_S = 60.0
_TRIES = 5  # a topic that is forgotten again and again while its requester opens it


class Admin:
    def __init__(self, store: Store, catalog: CatalogCache, limits: Limits = DEFAULTS) -> None:
        self._store, self._limits = store, limits
        self._catalog = catalog
        self._kafka = KafkaReaders(store)

    # ---- topics ----

    def create_topic(self, name: str, settings: TopicSettings, partitions: int, exist_ok: bool) -> TopicInfo:
        check_topic(name)
        settings.check_kafka()
        fixed = settings.kafka_partitions
        if fixed and fixed != partitions:
            raise InvalidSetting(f"kafka_partitions={fixed}: it has as many partitions, not {partitions}")
        try:
            self._store.catalog.create_topic(name, settings, partitions)
        except TopicExists:
            if not exist_ok:
                raise
        self._catalog.forget()
        return self.topic(name)

    def topics(self, viewer: Principal | None = None) -> list[TopicInfo]:
        """Those that the viewer is shown are found by their names, and only these are loaded and counted."""
        catalog = self._store.catalog
        if viewer is None:
            return self._infos(catalog.topics())
        names = visible(viewer, catalog.names(beginnings(viewer)))
        return self._infos(catalog.topics(names)) if names else []

    def topic(self, name: str) -> TopicInfo:
        return self._infos([self._store.catalog.topic(name)])[0]

    def _infos(self, topics: Sequence[Topic]) -> list[TopicInfo]:
        """A few reads for all of them."""
        delayed = self._store.schedule.delayed()
        edges = self._store.log.edges([r.partition_id for topic in topics for r in topic.route.partitions])
        groups: dict[int, list[str]] = {}
        for group in self._store.catalog.groups_of([topic.id for topic in topics]):
            if not group.name.startswith("_") and base_of(group.name) is None:
                groups.setdefault(group.topic_id, []).append(group.name)
        for topic_id, names in self._kafka.names([topic.id for topic in topics]).items():
            groups.setdefault(topic_id, []).extend(names)
        return [
            TopicInfo(
                name=topic.name,
                partitions=len(topic.route.ranges),
                settings=topic.settings,
                created_at=topic.created_at,
                messages=sum(
                    edges[r.partition_id].messages for r in topic.route.partitions if r.partition_id in edges
                ),
                groups=tuple(groups.get(topic.id, ())),
                internal=is_internal(topic.name),
                delayed=delayed.get(topic.id, 0),
            )
            for topic in topics
        ]

    def alter_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        has = self._store.catalog.topic(name).settings
        settings = replace(settings, kafka_partitions=has.kafka_partitions, keys=has.keys)  # for ever
        settings.check_kafka()
        self._store.catalog.alter_topic(name, settings)
        self._catalog.forget()
        return self.topic(name)

    def delete_topic(self, name: str) -> None:
        """The topic, its groups, and the groups' own topics."""
        found = self._store.catalog.topic(name)  # raises, and says what is near, if there is none
        near = self._store.catalog.names([f"{name}."])
        own = self._store.catalog.topics([t for t in near if (of := owner(t)) is not None and of[0] == name])
        topics = {topic.name: topic for topic in (found, *own)}
        for doomed in topics:
            groups = self._store.catalog.groups(doomed)
            self._store.schedule.purge(topics[doomed].id)  # in slices, before the catalog is locked
            self._store.catalog.delete_topic(doomed)
            for group in groups:
                self._store.progress.forget(group.id)
        self._catalog.forget()

    def purge(self, name: str) -> int:
        """Delayed messages first: those that come due meanwhile are in the log by then."""
        topic = self._store.catalog.topic(name)
        delayed = self._store.schedule.purge(topic.id)
        before = self._store.log.bounds(r.partition_id for r in topic.route.partitions)
        for partition_id, edges in before.items():
            self._store.log.trim(partition_id, edges.end)
        self._make_room(topic, before)
        return delayed + sum(edges.messages for edges in before.values())

    def _make_room(self, topic: Topic, partition_ids: Iterable[int]) -> None:
        """Delete what was purged, for a moment: a full disk waits for it. The rest is left to retention."""
        until = time.monotonic() + self._limits.tuning.broker.purge_s
        for partition_id in self._store.present(partition_ids):
            while time.monotonic() < until and self._store.log.sweep(
                partition_id,
                rows=self._limits.retention_slice_rows,
                appended_before=ids_from(self._store.now_ms(), topic),
            ):
                pass

    def resolve(self, topic: str, start: Start) -> dict[int, int]:
        ranges = self._catalog.topic(topic).route.partitions
        bounds = self._store.log.bounds(r.partition_id for r in ranges)
        named = dict(start.offsets)
        found = {}
        for piece in ranges:
            edge = bounds[piece.partition_id]
            if start.kind == "latest":
                offset = edge.end
            elif start.kind == "time":
                offset = self._store.log.offset_at(piece.partition_id, start.time_ms)
            else:
                offset = named.get(piece.partition, edge.start)
            found[piece.partition_id] = min(max(offset, edge.start), edge.end)
        return found

    def bounds(self, topic: str, at: Positions = ()) -> TopicBounds:
        there = {piece.partition_id for piece in self._catalog.topic(topic).route.partitions}
        log, asked = self._store.log, dict(at)
        marks = log.marks({one: offset for one, offset in asked.items() if one in there})
        kept = {
            one: Kept(edges.start, edges.end, marks.get(one, "")) for one, edges in log.bounds(there).items()
        }
        for one, end in self._removed(topic, asked.keys() - there).items():
            kept[one] = Kept(end, end, removed=True)
        return TopicBounds(self._store.catalog.incarnation(), kept)

    def _removed(self, topic: str, partition_ids: Set[int]) -> dict[int, int]:
        """Where they ended; of partitions of this topic only."""
        if not partition_ids:
            return {}
        older = {r.partition_id for route in self._store.routes.history(topic) for r in route.ranges}
        return self._store.log.removed(sorted(partition_ids & older))

    # ---- backlog ----

    def lag(self, topic: str, group: str) -> Lag:
        """A broadcast group is as far behind as the member that is furthest behind."""
        try:
            readers = self._catalog.readers(topic, group)
        except UnknownGroup as error:
            return self._kafka_lag(topic, group, error)
        lags = [self._lag(topic, reader.name) for reader in readers] or [self._nobody(topic, group)]
        slowest = max(lags, key=lambda lag: (lag.total.messages, lag.total.oldest_age_ms))
        return replace(slowest, group=group)

    def _kafka_lag(self, topic: str, group: str, unknown: UnknownGroup) -> Lag:
        """Of a group of Kafka clients; if there is none, the error stands."""
        found = self._catalog.topic(topic, fresh=True)
        numbers = {r.partition_id: r.partition for r in found.route.partitions}
        try:
            backlogs = self._kafka.backlogs(found, group)
        except UnknownGroup:
            raise unknown from None
        left = [one for one in backlogs if not _is_read(one, None)]
        rows = [_partition_lag(topic, numbers[one.partition_id], one) for one in left]
        return Lag(topic, group, tuple(rows), _total(topic, rows))

    def _nobody(self, topic: str, group: str) -> Lag:
        """A broadcast group without members has nothing to wait for."""
        found = self._catalog.topic(topic)
        edges = self._store.log.bounds(r.partition_id for r in found.route.ranges)
        idle = [
            Backlog(r.partition_id, end, end, end, 0, 0, 0, 0, 0.0, 0.0)
            for r in found.route.ranges
            for end in [edges[r.partition_id].end]
        ]
        rows = [_partition_lag(topic, r.partition, b) for r, b in zip(found.route.ranges, idle, strict=True)]
        return Lag(topic, group, tuple(rows), _total(topic, rows))

    def _lag(self, topic: str, group: str) -> Lag:
        rows: list[PartitionLag] = []
        waits: Counter[int] = Counter()
        for source, reader in self._catalog.sources(topic, group, lane=True):
            numbers = {r.partition_id: r.partition for r in source.route.partitions}
            present = self._store.present(numbers)
            peeks, now = self._store.progress.peek(reader, present), self._store.now_ms()
            backlogs = self._backlogs(source.route, reader, present)
            read = {b.partition_id for b in backlogs if _is_read(b, peeks.get(b.partition_id))}
            for backlog in backlogs:
                if source.name == topic:  # what is in the group's own topics was read before
                    waits.update(backlog.first_waits)
                if backlog.partition_id in read:
                    continue
                peek = peeks.get(backlog.partition_id)
                row = _partition_lag(source.name, numbers[backlog.partition_id], backlog)
                holder = peek.holder.member if peek and peek.holder.until > now else ""
                waits_for = _waits_for(source.route, reader, backlog.partition_id, peeks) - read
                rows.append(
                    replace(row, holder=holder, waits_for=tuple(sorted(numbers[p] for p in waits_for)))
                )
        return Lag(topic, group, tuple(rows), _total(topic, rows, waits))

    def _backlogs(self, route: Route, group: Group, places: Sequence[int]) -> list[Backlog]:
        """A sealed partition may be removed at any moment, and by its shard before the catalog knows: then it
        counts as read (I10)."""
        try:
            return self._store.progress.backlog(group, places)
        except UnknownPartition:
            sealed, found = {piece.partition_id for piece in route.sealed}, []
            for place in places:
                try:
                    found += self._store.progress.backlog(group, [place])
                except UnknownPartition:
                    if place not in sealed:
                        raise
            return found


def _is_read(backlog: Backlog, peek: Peek | None) -> bool:
    """To its end, though the group may not have marked it as drained yet."""
    return backlog.sealed and (backlog.committed >= backlog.end or (peek is not None and peek.drained))


def _waits_for(route: Route, group: Group, partition_id: int, peeks: Mapping[int, Peek]) -> set[int]:
    """Ordered groups: what is to be read before this partition is begun (I10)."""
    if group.settings.mode != "ordered" or partition_id in peeks:
        return set()
    before = route.predecessors.get(partition_id, ())
    return {one for one in before if one not in peeks or not peeks[one].drained}


def _partition_lag(topic: str, number: int, b: Backlog) -> PartitionLag:
    messages = b.messages
    return PartitionLag(
        topic=topic,
        partition=number,
        committed=b.committed,
        end=b.end,
        messages=messages,
        bytes=b.bytes if messages else 0,
        unsettled=b.unsettled,
        oldest_age_ms=b.oldest_age_ms if messages else 0,
        first_wait_ms=b.first_wait_ms,
        arrival_per_s=b.arrival_per_s,
        drain_per_s=b.drain_per_s,
        drain_eta_s=_eta(messages, b.drain_per_s, b.arrival_per_s),
        stopped=b.stopped,
        parked=b.parked,
        sealed=b.sealed,
        stopped_age_ms=b.stopped_age_ms,
        first_wait_p50_ms=first_waits.percentile(b.first_waits, 0.5),
        first_wait_p95_ms=first_waits.percentile(b.first_waits, 0.95),
    )


def _total(topic: str, rows: Sequence[PartitionLag], waits: Mapping[int, int] | None = None) -> PartitionLag:
    messages = sum(r.messages for r in rows)
    arrival, drain = sum(r.arrival_per_s for r in rows), sum(r.drain_per_s for r in rows)
    return PartitionLag(
        topic=topic,
        partition=-1,
        committed=sum(r.committed for r in rows),
        end=sum(r.end for r in rows),
        messages=messages,
        bytes=sum(r.bytes for r in rows),
        unsettled=sum(r.unsettled for r in rows),
        oldest_age_ms=max((r.oldest_age_ms for r in rows), default=0),
        first_wait_ms=max((r.first_wait_ms for r in rows), default=0),
        arrival_per_s=arrival,
        drain_per_s=drain,
        drain_eta_s=_eta(messages, drain, arrival),
        stopped=sum(r.stopped for r in rows),
        parked=sum(r.parked for r in rows),
        stopped_age_ms=max((r.stopped_age_ms for r in rows), default=0),
        first_wait_p50_ms=first_waits.percentile(waits or {}, 0.5),
        first_wait_p95_ms=first_waits.percentile(waits or {}, 0.95),
    )


def _eta(messages: int, drain_per_s: float, arrival_per_s: float) -> float | None:
    if messages == 0:
        return 0.0
    return messages / (drain_per_s - arrival_per_s) if drain_per_s > arrival_per_s else None


class Replies:
    """Blocking; any thread may call it. `drop_topic` deletes a topic and whatever is remembered of it."""

    def __init__(
        self, store: Store, limits: Limits, drop_topic: Callable[[str], None], changed: Callable[[], None]
    ) -> None:
        self._store, self._limits = store, limits
        self._drop_topic, self._changed = drop_topic, changed
        self._made: dict[str, deque[float]] = {}  # by principal, when it made its last ones
        self._counting = threading.Lock()

    def open(self, client: str, owner: str) -> ReplyTopic:
        """LimitReached if it is not there, and the principal may not make another."""
        name = reply_topic(client, owner)
        for _ in range(_TRIES):
            try:
                group = self._found_or_made(name, owner)
                if self._store.usage.touch(group.id):
                    (piece,) = self._store.catalog.topic(name).route.ranges
                    return ReplyTopic(name, piece.partition_id)
            except (UnknownTopic, UnknownGroup):
                continue  # it was deleted meanwhile
            self.drop(name)
        raise StoreBusy(f"reply topic {name!r} was forgotten while it was opened; open it again")

    def close(self, client: str, owner: str) -> None:
        self.drop(reply_topic(client, owner))

    def drop(self, name: str) -> None:
        try:
            self._drop_topic(name)
        except UnknownTopic:
            pass  # somebody else was faster

    def _found_or_made(self, name: str, owner: str) -> Group:
        try:
            return self._store.catalog.group(name, REPLY_GROUP)
        except (UnknownTopic, UnknownGroup):
            pass
        if owner:
            self._count(owner)
        settings = TopicSettings("volatile", retention_ms=self._limits.reply_kept_ms, keep="limits")
        try:
            self._store.catalog.create_topic(name, settings, 1)
        except TopicExists:
            pass  # whoever made it was cut off before it made the group
        try:
            self._store.catalog.create_group(name, REPLY_GROUP, GroupSettings())
        except GroupExists:
            pass
        self._changed()
        return self._store.catalog.group(name, REPLY_GROUP)

    def _count(self, owner: str) -> None:
        """The principal is about to make one more."""
        most = self._limits.reply_topics
        if self._store.catalog.count_topics(*reply_ends(owner)) >= most:
            raise LimitReached(
                f"principal {owner!r} has {most} reply topics, which is the limit (reply_topics): ask "
                "through fewer connections, or again once some are closed; those of programs that were "
                "killed are deleted after some minutes",
                principal=owner,
            )
        now = time.monotonic()
        with self._counting:
            recent = self._made.setdefault(owner, deque(maxlen=2 * most))
            if len(recent) == recent.maxlen and now - recent[0] < _MINUTE_S:
                raise LimitReached(
                    f"principal {owner!r} has made {2 * most} reply topics within a minute: keep connections "
                    "open and ask again through them; try again in a minute",
                    principal=owner,
                )
            recent.append(now)
            for other in [name for name, times in self._made.items() if now - times[-1] > _MINUTE_S]:
                del self._made[other]


class ForgetReplies:
    """Delete the reply topics of requesters that nobody has heard of for long."""

    name: str = "forget-replies"
    every_s: float = 30

    def __init__(
        self, store: Store, limits: Limits, drop: Callable[[str], None], listing: Listing | None = None
    ) -> None:
        self._store, self._limits, self._drop = store, limits, drop
        self._listing = listing or Listing(store.catalog)

    def run_once(self) -> None:
        listed = self._listing.look()
        topics = [topic for topic in listed.topics if is_reply(topic.name)]
        seen = self._store.usage.seen() if topics else {}
        for topic in topics:
            named = [one for one in listed.groups.get(topic.id, ()) if one.name == REPLY_GROUP]
            if self._is_left(topic, named[0] if named else None, seen):
                _log.info("reply topic %r is deleted: its requester is gone", topic.name)
                self._drop(topic.name)

    def _is_left(self, topic: Topic, group: Group | None, seen: dict[int, int]) -> bool:
        idle_ms, now = self._limits.reply_idle_ms, self._store.now_ms()
        if group is None:  # whoever made it was cut off, or is about to make it
            return now - topic.created_at >= idle_ms
        if now - seen.get(group.id, 0) < idle_ms:
            return False
        return self._store.usage.retire(group.id, idle_ms)
