"""A queue on several databases: the store of them all (R6).

The first shard has the catalog: topics, routes, groups and their starts, members, duties. Every partition is
on one shard, with its log, its sequences, its progress and its delayed messages, and never leaves it. So a
verb on a partition is one transaction on one shard, as on a single database; a shard that is away harms its
own partitions only. While the first is away nothing of the catalog can be changed, and the rest goes on with
what is known of it. Must never keep an address anywhere but in memory: they are in the configuration alone.

The catalog makes logs on all shards (R6), and decides on which one a new partition is: so that all of them
have about the same number, over all topics. A shard that is away, or is being drained, gets none. What is on
a shard is written there before the catalog says that it is; what is dropped goes there first. A group's start
is found on the shards before the catalog is locked, and holds for exactly the partitions that were there
then: if the route has others by then, it is looked for again (I9).
"""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...address import Address
from ...config import DEFAULTS, StoreTuning
from ...errors import RouteConflict, StoreUnavailable
from ...model.policy.settings import GroupSettings, Start, TopicSettings
from ...model.topology.route import Range
from ..contract import (
    Access,
    Audit,
    Brokers,
    Catalog,
    Duties,
    Group,
    Lanes,
    Log,
    Progress,
    Rates,
    Routes,
    Schedule,
    ShardState,
    Staging,
    Store,
    Topic,
    Usage,
    Watcher,
)
from ..contract.kafka import KafkaGroups
from ..contract.values import AtOnce
from ..sql.catalog.catalog import SqlCatalog, encode_settings
from ..sql.identity import check, check_alone, join
from ..sql.log.log import SqlLog
from ..sql.outbox import SqlOutboxes
from ..sql.progress.progress import SqlProgress
from ..sql.session import Session, Transaction, verbs
from .shard import Shard, Shards, Watchdog, shown
from .verbs import ShardedLog, ShardedProgress, ShardedSchedule, ShardedUsage

if TYPE_CHECKING:
    from .. import SqlStore


__all__ = ["ShardSource", "ShardedCatalog", "ShardedStore", "open_sharded"]


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
        if not taking:  # the first has answered, and was given up on meanwhile: it is slow
            raise StoreUnavailable(
                "no shard takes new partitions now, since none answers in time: try again, and see "
                "`postroom shard list` if that goes on"
            )
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


class ShardSource(NamedTuple):
    """A database that is to be a shard: `opening` opens it with what it is given for `SqlStore`."""

    kind: str
    opening: Callable[..., SqlStore]


class ShardedStore:
    """Implements `contract.Store`. Any thread may use it."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards
        first = shards.first
        self.log: Log = ShardedLog(shards)
        self.catalog: Catalog = first.catalog
        self.routes: Routes = first.routes
        self._progress = ShardedProgress(shards)
        self.progress: Progress = self._progress
        self.usage: Usage = ShardedUsage(shards)
        self.schedule: Schedule = ShardedSchedule(shards)
        self.duties: Duties = first.duties
        self.brokers: Brokers = first.brokers
        self.access: Access = first.access
        self.audit: Audit = first.audit
        self.rates: Rates = first.rates
        self.lanes: Lanes = first.lanes
        self.staging: Staging = first.staging
        self.kafka_groups: KafkaGroups = first.kafka_groups
        self.at_once: AtOnce | None = None  # a thread waits for each shard
        self.member: Callable[[Address], ShardSource]  # what an address names; set by whoever opens addresses
        self._watchdog = Watchdog(shards.values(), shards.tuning.watchdog_s)
        self._returned: Callable[[], None] = lambda: None

    def now_ms(self) -> int:
        """The first shard's clock, which is known also while it is away."""
        now = self._shards.first.now_ms()
        assert now is not None, "the first shard was there when the store was opened"
        return now

    def adopt(self, store: SqlStore) -> None:
        """The store of a shard: gates and id windows look at predecessors wherever they are (I10, I13)."""
        progress = store.progress
        assert isinstance(progress, SqlProgress), "shards are SQL databases"
        progress.is_drained = self._progress.is_drained
        progress.fence_all = self._progress.fence
        log = store.log
        assert isinstance(log, SqlLog), "shards are SQL databases"
        log.windows.elsewhere = self._shards.windows_of

    def watch(self) -> Watcher:
        return _Watchers([shard.watch() for shard in self._shards.present()])

    def close(self) -> None:
        self._watchdog.stop()
        for shard in self._shards.values():
            shard.close()

    def version(self) -> Hashable | None:
        return None

    others_version = version

    # ---- shards ----

    def parts(self) -> Mapping[str, Store]:
        return {name: _Part(self, self._shards, shard) for name, shard in self._shards.items()}

    def present(self, partition_ids: Iterable[int]) -> list[int]:
        return [one for one in partition_ids if not self._shards.of(one).is_away]

    def shard_of(self, partition_id: int) -> str:
        return self._shards.name_of(partition_id)

    def known_shard(self, partition_id: int) -> str | None:
        return self._shards.known(partition_id)

    def on_return(self, told: Callable[[], None]) -> None:
        self._returned = told
        for shard in self._shards.values():
            shard.on_return = told

    @property
    def outboxes(self) -> SqlOutboxes:
        """The outboxes of callers who keep theirs in the first database."""
        return self._shards.first.opened.outboxes

    def add_shard(self, name: str, address: Address) -> None:
        member = self.member(address)
        shard = Shard(name, member.kind, partial(self.open_shard, name, member), self._shards.tuning)
        shard.on_return = self._returned
        try:
            shard.take(self.open_shard(name, member))
        except StoreUnavailable as error:
            shard.open_later(error)
        self._shards.first.alone = False
        self._shards.add(shard)
        self._watchdog.add(shard)

    def open_shard(self, name: str, member: ShardSource) -> SqlStore:
        """Open a database as the shard of that name, if it is that one; StoreUnavailable: it is away."""
        first = self._shards.first
        store = member.opening(home=first.catalog)
        try:
            check(first.opened.session, {name: store.session})
            join(first.opened.session, store.session, name)
            self.adopt(store)
        except BaseException:
            store.close()
            raise
        return store

    def shards(self) -> list[ShardState]:
        table = self._shards.first.table
        known: dict[str, tuple[str, str]] = {}
        counts: dict[str, dict[str, int]] = {}
        with suppress(StoreUnavailable):  # then it is shown to be away, and nothing is known of what is where
            known, counts = table.known(), table.counts()
        found = []
        for name, shard in self._shards.items():
            here = counts.get(name, {})
            delayed = _delayed(shard)
            state = known[name][1] if name in known else "open"
            if state == "draining" and delayed == 0 and not any(here.values()):
                state = "empty"
                table.set_state(name, state)
            partitions, sealed = here.get("new", 0) + here.get("open", 0), here.get("sealed", 0)
            found.append(ShardState(name, shard.kind, state, shard.is_away, partitions, sealed, delayed or 0))
        return found

    def set_shard(self, name: str, state: str) -> None:
        self._shards.first.table.set_state(name, state)


def _delayed(shard: Shard) -> int | None:
    """How many messages wait there; None: it is away."""
    try:
        return shard.places.delayed()
    except StoreUnavailable:
        return None


class _Part:
    """The store as one shard sees it: its own schedule, leases, clock and news; all else is everybody's."""

    def __init__(self, whole: ShardedStore, shards: Shards, shard: Shard) -> None:
        self._whole = whole
        self._shard = shard
        self.log: Log = ShardedLog(shards, shard)
        self.catalog = whole.catalog
        self.routes = whole.routes
        self.progress: Progress = ShardedProgress(shards, shard)
        self.usage = whole.usage
        self.schedule = shard.schedule
        self.duties = shard.duties
        self.brokers = whole.brokers
        self.access = whole.access
        self.audit = whole.audit
        self.rates = whole.rates
        self.lanes = whole.lanes
        self.staging = whole.staging
        self.kafka_groups = whole.kafka_groups

    def now_ms(self) -> int:
        now = self._shard.now_ms()
        return self._whole.now_ms() if now is None else now

    def watch(self) -> Watcher:
        return self._shard.watch()

    def close(self) -> None:
        """A part is closed with the whole."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    if TYPE_CHECKING:
        at_once: AtOnce | None

        def version(self) -> Hashable | None: ...
        def others_version(self) -> Hashable | None: ...
        def parts(self) -> Mapping[str, Store]: ...
        def present(self, partition_ids: Iterable[int]) -> list[int]: ...
        def shard_of(self, partition_id: int) -> str: ...
        def known_shard(self, partition_id: int) -> str | None: ...
        def on_return(self, told: Callable[[], None]) -> None: ...
        def shards(self) -> list[ShardState]: ...
        def set_shard(self, name: str, state: str) -> None: ...
        def add_shard(self, name: str, address: Address) -> None: ...


class _Watchers:
    """A watcher of all shards at once. For one thread."""

    def __init__(self, watchers: list[Watcher]) -> None:
        self._watchers = watchers

    def changed(self) -> tuple[bool, bool]:
        found = [watcher.changed() for watcher in self._watchers]
        return any(log for log, _ in found), any(progress for _, progress in found)

    def wake(self) -> None:
        for watcher in self._watchers:
            watcher.wake()

    def close(self) -> None:
        for watcher in self._watchers:
            watcher.close()


def open_sharded(
    first: ShardSource, others: Mapping[str, ShardSource], tuning: StoreTuning = DEFAULTS.tuning.store
) -> ShardedStore:
    """Open the first shard, and the others as far as they answer; those that do not join later.

    InvalidSetting if a database is not what its name says: then nothing was changed.
    """
    opened: dict[str, SqlStore] = {}
    away: dict[str, StoreUnavailable] = {}
    home = Shard("", first.kind, _never, tuning)
    try:
        opened[""] = first.opening(catalog=ShardedCatalog)
        session = opened[""].session
        check_alone(session, frozenset(others))
        home.take(opened[""])
        for name, member in others.items():
            try:
                opened[name] = member.opening(home=home.catalog)
            except StoreUnavailable as error:
                away[name] = error
        check(session, {name: store.session for name, store in opened.items() if name})
        for name, store in opened.items():
            if name:
                join(session, store.session, name)
    except BaseException:
        for store in opened.values():
            store.close()
        raise
    return _put_together(home, others, opened, away, tuning)


def _put_together(
    home: Shard,
    others: Mapping[str, ShardSource],
    opened: Mapping[str, SqlStore],
    away: Mapping[str, StoreUnavailable],
    tuning: StoreTuning,
) -> ShardedStore:
    shards: Shards
    whole: ShardedStore

    def later(name: str) -> SqlStore:
        return whole.open_shard(name, others[name])

    members = [Shard(name, one.kind, partial(later, name), tuning) for name, one in others.items()]
    shards = Shards([home, *members], tuning)
    home.alone = not members
    whole = ShardedStore(shards)
    catalog = opened[""].catalog
    assert isinstance(catalog, ShardedCatalog), "it was opened with one"
    catalog.shards = shards
    for name, store in opened.items():
        whole.adopt(store)
        shards[name].take(store)
    for name, error in away.items():
        shards[name].open_later(error)
    return whole


def _never() -> SqlStore:
    raise AssertionError("the first shard is open from the beginning")
