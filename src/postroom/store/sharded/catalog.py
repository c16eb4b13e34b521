"""The catalog of a queue on several shards: it is on the first one, and makes logs on all (R6).

Decides on which shard a new partition is: so that all of them have about the same number, over all topics. A
shard that is away, or is being drained, gets none. What is on a shard is written there before the catalog
says that it is; what is dropped goes there first.

A group's start is found on the shards before the catalog is locked, and holds for exactly the partitions
that were there then: if the route has others by then, it is looked for again (I9).
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from ...errors import RouteConflict, StoreUnavailable
from ...model.policy.settings import GroupSettings, Start, TopicSettings
from ...model.topology.route import Range
from ..contract import Group, Topic
from ..sql.catalog.catalog import SqlCatalog, encode_settings
from ..sql.session import Session, Transaction, verbs
from .shard import Shards, shown

__all__ = ["ShardedCatalog"]

_log = logging.getLogger("postroom.store")

_LOAD = "SELECT shard, COUNT(*) FROM postroom_partitions WHERE state IN ('new', 'open') GROUP BY shard"
_TAKING = "SELECT name FROM postroom_shards WHERE state = 'open'"
_WITH_ID = """INSERT INTO postroom_topics (id, name, settings, route_version, created_at)
              VALUES (?, ?, ?, 1, ?)"""
_TRIES = 8  # routes that change while a group's start, or a topic's place, is looked for


@verbs
class ShardedCatalog(SqlCatalog):
    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.shards: Shards  # set by whoever opens them

    # ---- topics ----

    def topic(self, name: str) -> Topic:
        found = super().topic(name)
        self.shards.learn(found.route.partitions)
        return found

    def topics(self, only: Collection[str] | None = None) -> list[Topic]:
        found = super().topics(only)
        for topic in found:
            self.shards.learn(topic.route.partitions)
        return found

    def create_topic(self, name: str, settings: TopicSettings, partitions: int) -> Topic:
        for _ in range(_TRIES):
            try:
                return super().create_topic(name, settings, partitions)
            except RouteConflict:  # a shard is being drained from now on
                continue
        return super().create_topic(name, settings, partitions)

    def _place(self, tx: Transaction, count: int) -> tuple[int, list[str]]:
        """One by one where the fewest are. The topic's id goes with its partitions: it is drawn first."""
        taking = [name for name in self._taking(tx) if not self.shards[name].is_away and self._is_known(name)]
        load = Counter({name: int(n) for name, n in tx.all(_LOAD)})
        chosen = []
        for _ in range(count):
            name = min(taking, key=lambda one: load[one])
            load[name] += 1
            chosen.append(name)
        drawn = f"/{secrets.token_hex(8)}"  # no topic has such a name, and nobody sees it
        topic_id = tx.insert(
            "INSERT INTO postroom_topics (name, settings, route_version, created_at) VALUES (?, '', 0, 0)",
            drawn,
        )
        tx.do("DELETE FROM postroom_topics WHERE id = ?", topic_id)
        return topic_id, chosen

    def _taking(self, tx: Transaction) -> list[str]:
        """Shards that take new partitions; the first always does."""
        return ["", *(name for (name,) in tx.all(_TAKING + " ORDER BY name") if name in self.shards)]

    def _is_known(self, shard: str) -> bool:
        """Return whether all who use the queue can reach the shard."""
        if not shard:
            return True
        without = [one.name for one in self.shards.first.brokers.announced() if not one.knows(shard)]
        if without:
            _log.warning("shard %r gets no new partitions: %s cannot reach it", shard, ", ".join(without))
        return not without

    def _check_placed(self, tx: Transaction, shards: Sequence[str]) -> None:
        full = set(shards) - set(self._taking(tx))
        if full:
            raise RouteConflict(f"shard {min(full)!r} is being drained; try again")

    def _insert_topic(self, tx: Transaction, reserved: int, name: str, settings: TopicSettings) -> int:
        tx.do(_WITH_ID, reserved, name, encode_settings(settings), tx.now_ms())
        return reserved

    def make_log(self, piece: Range, topic_id: int, volatile: bool) -> None:
        if piece.shard:
            self.shards[piece.shard].places.place(piece, topic_id, volatile)
        else:
            super().make_log(piece, topic_id, volatile)

    def delete_topic(self, name: str) -> list[int]:
        topic_id = self.topic(name).id
        ids = super().delete_topic(name)
        for shard in self.shards.others():
            try:
                shard.places.forget_topic(topic_id)
            except StoreUnavailable as error:  # its logs are dropped when it is back
                _log.warning("what shard %r has of topic %r is dropped later: %s", shard.name, name, error)
        return ids

    def dropped(self) -> list[int]:
        """Not on shards that are away; what was reserved there and never made is forgotten."""
        found = []
        for shard, ids in self.shards.split(super().dropped()).items():
            if not shard.name:
                found += ids
            elif not shard.is_away:
                made = shard.places.here(ids)
                for partition_id in ids:
                    found.append(partition_id) if partition_id in made else self._forget_partition(
                        partition_id
                    )
        return sorted(found)

    def drop_log(self, partition_id: int) -> None:
        shard = self.shards.of(partition_id)
        if shard.name:
            shard.places.drop(partition_id)
            self._forget_partition(partition_id)
        else:
            super().drop_log(partition_id)

    def remove_log(self, partition_id: int) -> None:
        shard = self.shards.of(partition_id)
        if shard.name:
            shard.places.remove(partition_id)
        else:
            super().remove_log(partition_id)

    # ---- groups ----

    def create_group(self, topic: str, name: str, settings: GroupSettings) -> Group:
        for _ in range(_TRIES):
            try:
                return super().create_group(topic, name, settings)
            except RouteConflict:
                continue
        return super().create_group(topic, name, settings)

    def reset_group(self, topic: str, name: str, start: Start) -> Group:
        for _ in range(_TRIES):
            try:
                return super().reset_group(topic, name, start)
            except RouteConflict:
                continue
        return super().reset_group(topic, name, start)

    def _elsewhere(self, topic: str, start: Start, *, all_of_them: bool = False) -> Mapping[int, int]:
        """Return where a group starts in the partitions that are on other shards.

        A shard that is away need not answer if the group starts at the beginning.
        """
        named = dict(start.offsets)
        begins = start.kind == "earliest" and not all_of_them
        found: dict[int, int] = {}
        for piece in self.topic(topic).route.partitions:
            stays = all_of_them and start.kind == "offsets" and piece.partition not in named
            if not piece.shard or stays:
                continue
            if begins and self.shards[piece.shard].is_away:
                found[piece.partition_id] = 0
                continue
            try:
                found[piece.partition_id] = self._start_in(piece, start, named.get(piece.partition))
            except StoreUnavailable as error:
                raise StoreUnavailable(
                    f"where the group starts on shard {shown(piece.shard)!r} cannot be told while it is "
                    f"away; wait for it, or start a new group at 'earliest': {error}",
                    shard=piece.shard,
                ) from error
        return found

    def _missed(self, topic: str, partition_id: int) -> None:
        raise RouteConflict(f"the route of topic {topic!r} was changed meanwhile; try again", topic=topic)

    def _start_in(self, piece: Range, start: Start, named: int | None) -> int:
        log, place = self.shards[piece.shard].log, piece.partition_id
        if start.kind == "time":
            skew = self.shards.skew(self.shards[piece.shard])
            offset = log.offset_at(place, skew.there(start.time_ms))
        bounds = log.bounds([place])[place]
        if start.kind == "latest":
            offset = bounds.end
        elif start.kind != "time":
            offset = bounds.start if named is None else named
        return min(max(offset, bounds.start), bounds.end)
