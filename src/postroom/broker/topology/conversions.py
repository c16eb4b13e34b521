"""A group that nobody uses becomes one of Kafka clients, or a native one, and goes on where it was.

Kafka's groups know one offset of a partition; native ones know each message. So nothing is passed over either
way, and what a shared group has settled above its lowest unsettled message comes again for Kafka clients: the
answer says how much. What only a native group has (dead letters, retries, a slow lane) has to be empty, or
given up by `force`. A group of Kafka clients is one for all of its topics: it is converted on one of them.

The new one is made, flushed, before the old one is forgotten: cut between the two, both are there and nobody
can join, until it is done again. Blocking use cases, run in worker threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from ...endpoint.values import GroupInfo, PartitionReset, ResetPlan
from ...errors import GroupConflict, GroupLive, InvalidSetting, UnknownGroup
from ...model.policy.settings import GroupSettings, Mode, Start
from ...model.topology.chain import Chain
from ...model.topology.names import check_group, dead_topic, retry_topic, slow_topic
from ...store.contract import Backlog, Group, Store, Topic
from ...store.contract.kafka import KafkaOffset
from ..waiters import Waiters
from ..workers import Workers
from .catalog_cache import CatalogCache
from .groups import Groups, moved
from .kafka_groups import KafkaReaders

__all__ = ["ConversionVerbs", "Conversions"]

_ALL = 2**31 - 1  # unsettled ranges, however many there are


class ConversionVerbs:
    """The part of a broker that converts groups."""

    store: Store
    _catalog: CatalogCache
    _groups: Groups
    _workers: Workers
    _waiters: Waiters

    async def convert_group(
        self, topic: str, name: str, mode: Mode, force: bool, dry_run: bool = False
    ) -> ResetPlan:
        convert = Conversions(self.store, self._catalog, self._groups).run
        plan = await self._workers.run(convert, topic, name, mode, force, dry_run)
        self._waiters.notify_all()
        return plan


class Conversions:
    def __init__(self, store: Store, catalog: CatalogCache, groups: Groups) -> None:
        self._store, self._catalog, self._groups = store, catalog, groups
        self._kafka = KafkaReaders(store)

    def run(self, topic: str, name: str, mode: Mode, force: bool, dry_run: bool) -> ResetPlan:
        """What was done, or would be, with a line for each partition. GroupLive if somebody is at work."""
        if mode not in ("kafka", "shared", "ordered"):
            raise InvalidSetting(f"mode={mode!r}: a group becomes 'kafka', 'shared' or 'ordered'")
        found = self._store.catalog.topic(topic)
        native = next((one for one in self._store.catalog.groups(topic) if one.name == name), None)
        positions = self._kafka.position(found, name)
        if mode == "kafka" and native is not None:
            return self._to_kafka(found, native, force, dry_run)
        if mode != "kafka" and positions:
            return self._to_native(found, name, mode, positions, native, force, dry_run)
        if native is None and not positions:
            raise UnknownGroup(f"topic {topic!r} has no group {name!r}: look at its groups", group=name)
        raise GroupConflict(
            f"group {name!r} of topic {topic!r} is {'one of Kafka clients' if native is None else 'native'} "
            "already" + ("" if mode == "kafka" else ": delete it and make it anew for another mode"),
            topic=topic,
            group=name,
        )

    # ---- to native ----

    def _to_native(
        self, topic: Topic, name: str, mode: Mode, positions: Mapping[int, int], made: Group | None,
        force: bool, dry_run: bool,
    ) -> ResetPlan:  # fmt: skip
        """Where it has committed nothing it begins at the earliest message. `made`: by a call before."""
        bounds = self._store.log.bounds([one.partition_id for one in topic.route.partitions])
        at = self._kafka.committed(topic, bounds, {name: positions})[name]
        numbers = {one.partition_id: one.partition for one in topic.route.partitions}
        offsets = {numbers[one]: max(offset, bounds[one].start) for one, offset in at.items()}
        lines = [
            PartitionReset(
                name, link.number, positions.get(chain.index, 0), offsets.get(link.number, 0), 0, 0
            )
            for chain in self._kafka.chains(topic)
            for link in chain.links
        ]
        self._refuse_live(topic, name, force)
        settings = GroupSettings(mode=mode, start=Start("offsets", offsets=tuple(sorted(offsets.items()))))
        if dry_run:
            [info] = [one for one in self._kafka.of_topic(topic) if one.name == name]
            return _plan(replace(info, settings=settings), lines, dry_run=True)
        group = made or self._store.catalog.create_group(topic.name, check_group(name), settings)
        if not self._store.kafka_groups.drop(name, topic.id, force=force):  # somebody came meanwhile
            self._groups.forget(group)
            raise self._live(topic, name)
        self._catalog.forget()
        return _plan(self._groups.info(group), lines)

    def _refuse_live(self, topic: Topic, name: str, force: bool) -> None:
        group = self._store.kafka_groups.group(name)
        if group is not None and group.is_live(self._store.now_ms()) and not force:
            raise self._live(topic, name)

    def _live(self, topic: Topic, name: str) -> GroupLive:
        return GroupLive(
            f"group {name!r} of topic {topic.name!r} is in use; stop its consumers, or pass force=True: then "
            "they lose what they have in their hands, and are refused from now on",
            topic=topic.name,
            group=name,
        )

    # ---- to Kafka ----

    def _to_kafka(self, topic: Topic, group: Group, force: bool, dry_run: bool) -> ResetPlan:
        if group.settings.mode == "broadcast" or "@" in group.name:
            raise InvalidSetting(
                "a broadcast group has no offsets of its own: Kafka clients take a group each instead"
            )
        if not force and self._store.progress.members(group.id):
            raise self._live(topic, group.name)
        self._refuse_own(group, force)
        there = self._store.present(piece.partition_id for piece in topic.route.partitions)
        backlogs = self._store.progress.backlog(group, there, open_spans=_ALL)
        found = {one.partition_id: one for one in backlogs}
        found_lines = [_line_of(group.name, one, found) for one in self._kafka.chains(topic) if one.links]
        lines = [line for line in found_lines if line is not None]
        if not dry_run:
            offsets = [KafkaOffset(topic.id, line.partition, line.after) for line in lines]
            if not self._store.kafka_groups.put(group.name, offsets, force=force):
                raise self._live(topic, group.name)
            self._groups.forget(group)
        settings = GroupSettings(mode="kafka")
        info = replace(self._groups.info(group), settings=settings) if dry_run else self._listed(topic, group)
        return _plan(info, lines, dry_run=dry_run)

    def _listed(self, topic: Topic, group: Group) -> GroupInfo:
        [info] = [one for one in self._kafka.of_topic(topic) if one.name == group.name]
        return info

    def _refuse_own(self, group: Group, force: bool) -> None:
        """Topics of the group's own are deleted with it: nothing may be left there."""
        for what, own in (("dead letters", dead_topic), ("retries", retry_topic), ("slow lane", slow_topic)):
            name = own(group.topic, group.name)
            left = self._left(name)
            if left and not force:
                raise GroupConflict(
                    f"group {group.name!r} of topic {group.topic!r} has {left} messages in its {what}, which "
                    "a group of Kafka clients does not have: consume, redrive or discard them first, or "
                    "pass force=True: then they are lost",
                    topic=group.topic,
                    group=group.name,
                )

    def _left(self, topic: str) -> int:
        if topic not in self._store.catalog.names([topic]):
            return 0
        found = self._store.catalog.topic(topic)
        there = self._store.present(piece.partition_id for piece in found.route.partitions)
        readers = self._store.catalog.groups(topic)
        return sum(one.messages for group in readers for one in self._store.progress.backlog(group, there))


def _line_of(group: str, chain: Chain, found: Mapping[int, Backlog]) -> PartitionReset | None:
    """Where Kafka clients go on in a chain: at the first message that is not settled; None: all is away."""
    links = [link for link in chain.links if link.partition_id in found]
    if not links:
        return None
    last = next((link for link in links if not _is_read(found[link.partition_id])), links[-1])
    was = found[last.partition_id]
    following = [link.origin for link in links if link.origin > last.origin]
    to = min([last.origin + was.committed, *following])  # the seal has no offset (I28)
    again = _settled_above(was, was.committed)
    again += sum(_settled_above(found[one.partition_id], 0) for one in links if one.origin > last.origin)
    return PartitionReset(group, chain.index, was.committed, to, again, 0)


def _is_read(one: Backlog) -> bool:
    return one.sealed and one.committed >= one.end - 1


def _settled_above(one: Backlog, offset: int) -> int:
    return moved(one.cursor, one.end, one.sealed, one.open, offset)[0]


def _plan(info: GroupInfo, lines: Sequence[PartitionReset], *, dry_run: bool = False) -> ResetPlan:
    given = {field.name: getattr(info, field.name) for field in fields(GroupInfo)}
    return ResetPlan(**given, partitions=tuple(lines), dry_run=dry_run)
