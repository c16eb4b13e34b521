"""Consumer groups of Kafka clients, beside native ones: listed, measured, reset and forgotten.

Kafka's offsets are turned into those of the partitions of a chain, so that retention, limits and lag see such
a group as any other. It belongs to a topic from its first commit there on. Who is in it is its coordinator's
affair: here a group is as it was last written down. Blocking use cases, run in worker threads.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence

from ...config import DEFAULTS, BrokerTuning
from ...endpoint.values import GroupInfo, MemberInfo, PartitionReset, ResetPlan
from ...errors import GroupConflict, GroupLive, UnknownGroup
from ...model.policy.settings import GroupSettings, Start
from ...model.topology.chain import Chain, chains_of, numbered_chains, settled_in
from ...store.contract import Backlog, Bounds, Store, Topic
from ...store.contract.kafka import KafkaGroup, KafkaOffset
from .catalog_cache import Listing

__all__ = ["ExpireKafkaGroups", "KafkaReaders"]

_log = logging.getLogger("postroom.broker")


class KafkaReaders:
    """Groups of Kafka clients on topics."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def chains(self, topic: Topic) -> tuple[Chain, ...]:
        """The topic's partitions as Kafka clients count them."""
        if not topic.settings.kafka_partitions:
            return numbered_chains(topic.route)
        origins = self._store.routes.origins(topic.id) if topic.route.version > 1 else {}
        return chains_of(topic.route, origins)

    def committed(
        self, topic: Topic, bounds: Mapping[int, Bounds], positions: Mapping[str, Mapping[int, int]] | None
    ) -> dict[str, dict[int, int]]:
        """By group, the lowest offset that it has not committed, in those of these partitions it began."""
        if not positions:
            return {}
        chains = self.chains(topic)
        return {
            name: {
                one: min(offset, bounds[one].end)
                for one, offset in settled_in(chains, of_group).items()
                if one in bounds
            }
            for name, of_group in positions.items()
        }

    def names(self, topic_ids: Collection[int]) -> dict[int, list[str]]:
        """By topic, the groups that have committed something there."""
        return {
            id: sorted(of_topic) for id, of_topic in self._store.kafka_groups.positions(topic_ids).items()
        }

    def refuse_taken(self, topic: Topic, name: str) -> None:
        """GroupConflict if Kafka clients have a group of that name on the topic."""
        if self.position(topic, name):
            raise GroupConflict(
                f"group {name!r} of topic {topic.name!r} is one of Kafka clients: only they join it, and it "
                "cannot be paused or altered; take another name, or stop its consumers and delete it",
                topic=topic.name,
                group=name,
            )

    def position(self, topic: Topic, name: str) -> dict[int, int]:
        """By Kafka partition, what the group has committed: its own rows, however many groups there are."""
        offsets = self._store.kafka_groups.offsets(name)
        return {one.partition: one.offset for one in offsets if one.topic_id == topic.id}

    # ---- listing ----

    def of_topic(self, topic: Topic) -> list[GroupInfo]:
        names = self.names([topic.id]).get(topic.id, [])
        found = (self._store.kafka_groups.group(name) for name in names)
        return [self._info(topic, group) for group in found if group is not None]

    def _info(self, topic: Topic, group: KafkaGroup) -> GroupInfo:
        now = self._store.now_ms()
        members = group.generation.members if group.is_live(now) else ()
        return GroupInfo(
            topic=topic.name,
            name=group.name,
            settings=GroupSettings(mode="kafka"),
            paused=False,
            generation=group.generation.number,
            created_at=0,
            members=tuple(MemberInfo(one.id, one.client, 0, group.until + one.session_ms) for one in members),
            idle_ms=None if members else max(0, now - group.until),
        )

    def _known(self, topic: Topic, name: str) -> tuple[KafkaGroup, dict[int, int]]:
        group = self._store.kafka_groups.group(name)
        at = self.position(topic, name)
        if group is None or not at:
            raise UnknownGroup(f"Kafka clients have no group {name!r} on topic {topic.name!r}", group=name)
        return group, at

    # ---- backlog ----

    def backlogs(self, topic: Topic, name: str) -> list[Backlog]:
        """How far a group is behind, where it has begun. UnknownGroup if there is none."""
        _, at = self._known(topic, name)
        here = self._store.present(piece.partition_id for piece in topic.route.partitions)
        bounds = self._store.log.bounds(here)
        found = self.committed(topic, bounds, {name: at})[name]
        return [self._backlog(one, offset, bounds[one]) for one, offset in sorted(found.items())]

    def _backlog(self, partition_id: int, offset: int, edge: Bounds) -> Backlog:
        at = min(max(offset, edge.start), edge.end)
        size, age = 0, 0
        if at < edge.end - int(edge.sealed):
            size = self._store.usage.bytes_from([{partition_id: at}])[0]
            first = self._store.log.read(partition_id, at, max_messages=1, max_bytes=1)
            age = max(0, self._store.now_ms() - first[0].appended_at) if first else 0
        return Backlog(partition_id, at, at, edge.end, 0, size, age, 0, 0.0, 0.0, sealed=edge.sealed)

    # ---- changes ----

    def reset(
        self, topic: Topic, name: str, start: Start, found: Mapping[int, int], *, force: bool, dry_run: bool
    ) -> ResetPlan:
        """Go on elsewhere. `found`: what the start comes to, by partition id."""
        group, at = self._known(topic, name)
        chains, lines, offsets = self.chains(topic), list[PartitionReset](), list[KafkaOffset]()
        named = {number for number, _ in start.offsets}
        for chain in chains:
            links = [one for one in chain.links if start.kind != "offsets" or one.number in named]
            if not links:
                continue
            link = links[0]
            if start.kind in ("latest", "time"):  # the first partition that has something from there on
                edges = self._store.log.bounds([one.partition_id for one in links])
                rest = [o for o in links if found[o.partition_id] < edges[o.partition_id].end - 1]
                link = rest[0] if rest else links[-1]
            following = [one.origin for one in chain.links if one.origin > link.origin]
            to = min([link.origin + found[link.partition_id], *following])  # the seal has no offset (I28)
            before = at.get(chain.index, 0)
            offsets.append(KafkaOffset(topic.id, chain.index, to))
            lines.append(
                PartitionReset(name, chain.index, before, to, max(0, before - to), max(0, to - before))
            )
        if not dry_run and not self._store.kafka_groups.put(name, offsets, force=force):
            raise self._live(topic, name, "reset")
        info = self._info(topic, group)
        given = {one: getattr(info, one) for one in GroupInfo.__dataclass_fields__}
        return ResetPlan(**given, partitions=tuple(lines), dry_run=dry_run)

    def delete(self, topic: Topic, name: str, *, force: bool) -> None:
        """Forget what the group has committed in the topic."""
        self._known(topic, name)
        if not self._store.kafka_groups.drop(name, topic.id, force=force):
            raise self._live(topic, name, "deleted")

    def _live(self, topic: Topic, name: str, what: str) -> GroupLive:
        return GroupLive(
            f"group {name!r} of topic {topic.name!r} is in use by Kafka clients; stop them, or pass "
            f"force=True: then it is {what} at once, and they begin anew",
            topic=topic.name,
            group=name,
        )


class ExpireKafkaGroups:
    """The duty that forgets groups that no Kafka client has used for long, and offsets of deleted topics."""

    name: str = "expire-kafka-groups"
    every_s: float = 60

    def __init__(self, store: Store, listing: Listing, tuning: BrokerTuning = DEFAULTS.tuning.broker) -> None:
        self._store, self._listing, self._idle_ms = store, listing, tuning.kafka_offsets_ms

    def run_once(self) -> None:
        topics: Sequence[Topic] = self._listing.look().topics
        for name in self._store.kafka_groups.expire(self._idle_ms, [topic.id for topic in topics]):
            _log.info("group %r of Kafka clients expired: nobody used it", name)
