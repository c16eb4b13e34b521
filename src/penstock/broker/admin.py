"""Managing topics and groups: the blocking use cases behind an endpoint's calls. Run in worker threads."""

from __future__ import annotations

from collections.abc import Sequence

from ..config import DEFAULTS
from ..errors import GroupExists, GroupLive, TopicExists, UnknownGroup, UnknownTopic
from ..model.names import check_group, check_topic, dead_topic, is_internal, owner, retry_topic
from ..model.settings import GroupSettings, GroupWish, Start, TopicSettings
from ..store.contract import Backlog, Group, Store, Topic
from .catalog import CatalogCache
from .endpoint import GroupInfo, Lag, MemberInfo, PartitionLag, TopicInfo

__all__ = ["Admin"]


class Admin:
    def __init__(self, store: Store, catalog: CatalogCache) -> None:
        self._store = store
        self._catalog = catalog

    # ---- topics ----

    def create_topic(self, name: str, settings: TopicSettings, partitions: int, exist_ok: bool) -> TopicInfo:
        check_topic(name)
        try:
            self._store.catalog.create_topic(name, settings, partitions)
        except TopicExists:
            if not exist_ok:
                raise
        self._catalog.forget()
        return self.topic(name)

    def topics(self) -> list[TopicInfo]:
        return [self._topic_info(topic) for topic in self._store.catalog.topics()]

    def topic(self, name: str) -> TopicInfo:
        return self._topic_info(self._store.catalog.topic(name))

    def _topic_info(self, topic: Topic) -> TopicInfo:
        bounds = self._store.log.bounds(r.partition_id for r in topic.route.ranges)
        return TopicInfo(
            name=topic.name,
            partitions=len(topic.route.ranges),
            settings=topic.settings,
            created_at=topic.created_at,
            messages=sum(b.end - b.start for b in bounds.values()),
            groups=tuple(
                g.name for g in self._store.catalog.groups(topic.name) if not g.name.startswith("_")
            ),
            internal=is_internal(topic.name),
        )

    def alter_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        self._store.catalog.alter_topic(name, settings)
        self._catalog.forget()
        return self.topic(name)

    def delete_topic(self, name: str) -> None:
        """The topic, its groups, and the groups' own topics."""
        topics = {t.name: t for t in self._store.catalog.topics()}
        if name not in topics:
            self._store.catalog.topic(name)  # raises, and says what is near
        own = [t for t in topics if (of := owner(t)) is not None and of[0] == name]
        for doomed in (name, *own):
            groups = self._store.catalog.groups(doomed)
            self._store.catalog.delete_topic(doomed)
            for group in groups:
                self._store.progress.forget(group.id)
        self._catalog.forget()

    def purge(self, name: str) -> int:
        ids = [r.partition_id for r in self._store.catalog.topic(name).route.ranges]
        before = self._store.log.bounds(ids)
        return sum(self._store.log.trim(pid, before[pid].end) - before[pid].start for pid in ids)

    def resolve(self, topic: str, start: Start) -> dict[int, int]:
        ranges = self._catalog.topic(topic).route.ranges
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

    # ---- groups ----

    def create_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        check_group(name)
        group = self._store.catalog.create_group(topic, name, wish.over(GroupSettings()))
        self._catalog.forget()
        return self._group_info(group)

    def subscribe(self, topic: str, name: str, wish: GroupWish, member: str, client: str) -> GroupInfo:
        check_group(name)
        try:
            group = self._store.catalog.group(topic, name)
        except UnknownGroup:
            try:
                group = self._store.catalog.create_group(topic, name, wish.over(GroupSettings()))
            except GroupExists:  # another consumer was faster
                group = self._store.catalog.group(topic, name)
            self._catalog.forget()
        wish.check(group.settings, topic=topic, group=name)
        self.join(group, member, client)
        return self._group_info(group)

    def join(self, group: Group, member: str, client: str) -> None:
        ttl = DEFAULTS.member_ttl_factor * group.settings.lease_ms
        self._store.progress.join(group.id, member, client, ttl)

    def unsubscribe(self, topic: str, name: str, member: str) -> None:
        try:
            self._store.progress.leave(self._catalog.group(topic, name).id, member)
        except (UnknownTopic, UnknownGroup):
            pass  # it was deleted, and its members with it

    def groups(self, topic: str) -> list[GroupInfo]:
        return [self._group_info(g) for g in self._store.catalog.groups(topic)]

    def alter_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        """Change the group, and with it the group on its retry topic."""
        group = self._store.catalog.group(topic, name)
        changed = self._store.catalog.alter_group(topic, name, wish.over(group.settings), group.paused)
        try:
            retry = self._store.catalog.group(retry_topic(topic, name), name)
            self._store.catalog.alter_group(retry.topic, name, wish.over(retry.settings), retry.paused)
        except (UnknownTopic, UnknownGroup):
            pass  # nothing was redriven yet
        self._catalog.forget()
        return self._group_info(changed)

    def pause(self, topic: str, name: str, paused: bool) -> GroupInfo:
        group = self._store.catalog.group(topic, name)
        changed = self._store.catalog.alter_group(topic, name, group.settings, paused)
        self._catalog.forget()
        return self._group_info(changed)

    def delete_group(self, topic: str, name: str, force: bool) -> None:
        self._refuse_live(topic, name, "deleted", force)
        group = self._store.catalog.delete_group(topic, name)
        self._store.progress.forget(group.id)
        for own in (dead_topic(topic, name), retry_topic(topic, name)):
            try:
                self.delete_topic(own)
            except UnknownTopic:
                pass
        self._catalog.forget()

    def reset(self, topic: str, name: str, start: Start, force: bool) -> GroupInfo:
        self._refuse_live(topic, name, "reset", force)
        group = self._store.catalog.reset_group(topic, name, start)
        ranges = self._store.catalog.topic(topic).route.ranges
        self._store.progress.rewind(group, [r.partition_id for r in ranges])
        self._catalog.forget()
        return self._group_info(group)

    def _refuse_live(self, topic: str, name: str, what: str, force: bool) -> None:
        members = self._store.progress.members(self._store.catalog.group(topic, name).id)
        if members and not force:
            names = ", ".join(m.name for m in members[:3])
            raise GroupLive(
                f"group {name!r} of topic {topic!r} is in use by {len(members)} member(s) ({names}); "
                f"stop them, or pass force=True: then it is {what} under their hands",
                topic=topic,
                group=name,
            )

    def _group_info(self, group: Group) -> GroupInfo:
        members = tuple(
            MemberInfo(m.name, m.client, m.joined_at, m.until) for m in self._store.progress.members(group.id)
        )
        return GroupInfo(
            group.topic, group.name, group.settings, group.paused, group.generation, group.created_at, members
        )

    # ---- backlog ----

    def lag(self, topic: str, group: str) -> Lag:
        rows = []
        for source, reader in self._catalog.sources(topic, group):
            numbers = {r.partition_id: r.partition for r in source.route.ranges}
            for backlog in self._store.progress.backlog(reader, list(numbers)):
                rows.append(_partition_lag(source.name, numbers[backlog.partition_id], backlog))
        return Lag(topic, group, tuple(rows), _total(topic, rows))


def _partition_lag(topic: str, number: int, b: Backlog) -> PartitionLag:
    messages = max(0, b.end - b.cursor) + b.unsettled
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
    )


def _total(topic: str, rows: Sequence[PartitionLag]) -> PartitionLag:
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
    )


def _eta(messages: int, drain_per_s: float, arrival_per_s: float) -> float | None:
    if messages == 0:
        return 0.0
    return messages / (drain_per_s - arrival_per_s) if drain_per_s > arrival_per_s else None
