"""A queue on several databases: the store of them all (R6).

The first shard has the catalog: topics, routes, groups and their starts, members, duties. Every partition is
on one shard, with its log, its sequences, its progress and its delayed messages, and never leaves it. So a
verb on a partition is one transaction on one shard, as on a single database; a shard that is away harms its
own partitions only. While the first is away nothing of the catalog can be changed, and the rest goes on with
what is known of it.

Must never keep an address anywhere but in memory: they are in the configuration alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...address import Address
from ...errors import StoreUnavailable
from ..contract import (
    Access,
    Brokers,
    Catalog,
    Duties,
    Lanes,
    Log,
    Progress,
    Rates,
    Routes,
    Schedule,
    ShardState,
    Staging,
    Store,
    Usage,
    Watcher,
)
from ..contract.values import AtOnce
from ..sql.identity import check, check_alone, join
from ..sql.log.log import SqlLog
from ..sql.outbox import SqlOutboxes
from ..sql.progress.progress import SqlProgress
from .catalog import ShardedCatalog
from .shard import Shard, Shards, Watchdog
from .verbs import ShardedLog, ShardedProgress, ShardedSchedule, ShardedUsage

if TYPE_CHECKING:
    from .. import SqlStore

__all__ = ["ShardSource", "ShardedStore", "open_sharded"]

_log = logging.getLogger("postroom.store")


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
        self.rates: Rates = first.rates
        self.lanes: Lanes = first.lanes
        self.staging: Staging = first.staging
        self.at_once: AtOnce | None = None  # a thread waits for each shard
        self.member: Callable[[Address], ShardSource]  # what an address names; set by whoever opens addresses
        self._watchdog = Watchdog(shards.values())
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
        shard = Shard(name, member.kind, partial(self.open_shard, name, member))
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
        self.rates = whole.rates
        self.lanes = whole.lanes
        self.staging = whole.staging

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


def open_sharded(first: ShardSource, others: Mapping[str, ShardSource]) -> ShardedStore:
    """Open the first shard, and the others as far as they answer; those that do not join later.

    InvalidSetting if a database is not what its name says: then nothing was changed.
    """
    opened: dict[str, SqlStore] = {}
    away: dict[str, StoreUnavailable] = {}
    home = Shard("", first.kind, _never)
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
    return _put_together(home, others, opened, away)


def _put_together(
    home: Shard,
    others: Mapping[str, ShardSource],
    opened: Mapping[str, SqlStore],
    away: Mapping[str, StoreUnavailable],
) -> ShardedStore:
    shards: Shards
    whole: ShardedStore

    def later(name: str) -> SqlStore:
        return whole.open_shard(name, others[name])

    members = [Shard(name, one.kind, partial(later, name)) for name, one in others.items()]
    shards = Shards([home, *members])
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
