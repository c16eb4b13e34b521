"""Route changes: split, merge, move and drain, while producers write and groups read (R25, R26).

The procedure: write down the intent, ask every shard that is touched whether it answers, make the logs of the
successors, seal the old partitions with a control batch, activate the next version. Any process can go on
with a change that it finds: each step is idempotent, and the last one is decided by compare-and-set. A change
that cannot be finished, since a shard went away, is turned back: what was sealed gets a fresh successor on
its own range, the rest stays as it was (I11).

Producers learn of a seal by an error. If whoever made it died before the next version was there, the process
whose producers wait goes on with it (`help`), and a sealed partition for which no change is under way is
renewed.

A shard is taken out in two visible phases (R28, I11). `drain` is the first: the shard takes no new
partitions, and each one that is there is moved, live; the topics stay writable. Then it holds sealed
partitions and delayed messages only: once the groups have read the ones and the others were due, `shards`
says that it is empty, and it may be left out. May be cut at any point and called again. Blocking code, run in
worker threads.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from ...address import FIRST_SHARD
from ...config import DEFAULTS, BrokerTuning
from ...endpoint.values import ShardInfo
from ...errors import (
    InvalidSetting,
    PartitionSealed,
    PostroomError,
    RouteConflict,
    StoreError,
    StoreUnavailable,
    UnknownPartition,
    UnknownTopic,
)
from ...model.messages.batch import SEAL, build_control
from ...model.topology import route as routes
from ...model.topology.names import is_internal
from ...model.topology.route import Change, Draft, Range, Route
from ...store.contract import ShardState, Store, Topic
from ..presence import refuse_unknown, unaware
from .catalog_cache import CatalogCache, Listing

__all__ = ["Drain", "FinishChanges", "RouteChanges", "RouteHelp", "shard_name"]


_log = logging.getLogger("postroom.broker")

T = TypeVar("T")


class RouteChanges:
    """Blocking; any thread may call it."""

    def __init__(
        self, store: Store, catalog: CatalogCache, tuning: BrokerTuning = DEFAULTS.tuning.broker
    ) -> None:
        self._store, self._tuning = store, tuning
        self._catalog = catalog

    # ---- what people ask for ----

    def split(self, topic: str, partition: int, at: int | None) -> Route:
        if is_internal(topic):
            raise InvalidSetting(
                f"topic {topic!r} belongs to a group and keeps its one partition; it can be moved, not split"
            )
        self._refuse_fixed(topic, "split")
        return self._change(routes.split(self.route(topic), partition, at))

    def merge(self, topic: str, one: int, other: int) -> Route:
        self._refuse_fixed(topic, "merged")
        return self._change(routes.merge(self.route(topic), one, other))

    def _refuse_fixed(self, topic: str, what: str) -> None:
        """Kafka clients count partitions and know them by number: these stay as they are (I28)."""
        fixed = self._store.catalog.topic(topic).settings.kafka_partitions
        if fixed:
            raise InvalidSetting(
                f"topic {topic!r} was made for Kafka clients, who see {fixed} partitions for ever: they can "
                f"be moved to other shards, and not {what}; make a topic with more kafka_partitions instead"
            )

    def move(self, topic: str, partition: int, shard: str | None) -> Route:
        route = self.route(topic)
        if shard is None:
            shard = self._emptiest(route, route.of_partition(partition).shard)
        return self._change(routes.move(route, partition, "" if shard == FIRST_SHARD else shard))

    def _emptiest(self, route: Route, here: str) -> str:
        """Of the other shards that take partitions the one with the fewest of this topic, then of all."""
        states = self._store.shards()
        found = [s for s in states if s.name != here and s.state == "open" and not s.away]
        mine = Counter(piece.shard for piece in route.ranges)
        if not found:
            _refuse_away(states, here, "move it")
            raise InvalidSetting(
                "there is no other shard that takes partitions: add one with connect(url, shards={…}), or "
                "open one that is being drained (`postroom shard list` shows them)",
                _served="there is no other shard that takes partitions: open one that is being drained "
                "(`postroom shard list` shows them), or ask the operator of the brokers to add one",
            )
        processes = self._store.brokers.announced()
        known = [s for s in found if not unaware(processes, s.name)]
        if not known:
            refuse_unknown(processes, found[0].name)
        return min(known, key=lambda s: (mine[s.name], s.partitions)).name

    def route(self, topic: str) -> Route:
        return self._store.catalog.topic(topic).route

    def _change(self, draft: Draft) -> Route:
        new = {piece.shard for piece in draft.opens} - {piece.shard for piece in draft.seals}
        for shard in sorted(new - {""}):
            processes = self._store.brokers.announced()
            if any(process.knows(shard) for process in processes):  # else there is none, and that is said
                refuse_unknown(processes, shard)
        change = self._begun(draft)
        try:
            return self._carry_out(change)
        except (RouteConflict, UnknownPartition):  # the second: it was made so long ago that its past is gone
            return self._found(change)

    def _begun(self, draft: Draft) -> Change:
        """A change that somebody left, and died, is finished before the caller is told to try again."""
        try:
            return self._store.routes.begin(draft)
        except RouteConflict:
            self.help(draft.topic)
            raise

    def _found(self, change: Change) -> Route:
        """Somebody else went on with our change: what became of it?"""
        if any(made.version == change.version + 1 for made in self._made(change)):
            return self.route(change.topic)
        raise RouteConflict(
            f"the {change.kind} of topic {change.topic!r} was turned back: a database did not answer; "
            "nothing is lost, look at the route (`postroom route show`) and try again",
            topic=change.topic,
        )

    def _made(self, change: Change) -> list[Route]:
        """Versions of the route that have what the change opens."""
        opened = {piece.partition_id for piece in change.opens}
        return [
            version
            for version in self._store.routes.history(change.topic)
            if opened <= {piece.partition_id for piece in version.ranges}
        ]

    # ---- what is left over ----

    def help(self, topic: str) -> bool:
        """Somebody waits for a sealed partition's successors. False: others work on it; look again."""
        change = self._store.routes.change_of(topic)
        try:
            if change is None:
                self._renew(topic)
            elif self._store.routes.take(change, self._tuning.change_idle_ms):
                _log.warning("going on with a %s of topic %r that was left", change.kind, topic)
                self._carry_out(change)
            else:
                return False
        except (RouteConflict, UnknownPartition):
            return False  # somebody else was faster
        return True

    def _renew(self, topic: str) -> None:
        """A partition was sealed for a change that was turned back meanwhile (I11)."""
        route = self.route(topic)
        draft = routes.renew(route, self._sealed(piece.partition_id for piece in route.ranges))
        if draft is not None:
            self._carry_out(self._store.routes.begin(draft))

    # ---- the procedure ----

    def _carry_out(self, change: Change) -> Route:
        """All steps that are left. If a store stays away the change is turned back, and its error raised."""
        try:
            self._repeat(lambda: self._prepare(change))
            ends = {piece.partition_id: self._seal(piece.partition_id, change) for piece in change.seals}
            return self._repeat(lambda: self._activate(change, ends)).route
        except StoreError:
            self._turn_back(change)
            raise
        finally:
            self._catalog.forget()

    def _prepare(self, change: Change) -> None:
        """Every shard answers and the successors are there before the first partition is sealed (I11)."""
        self._store.log.bounds([piece.partition_id for piece in change.seals])
        self._store.routes.make(change)

    def _activate(self, change: Change, ends: Mapping[int, int]) -> Topic:
        """The last step; for Kafka clients, the successor first learns what it follows (I28)."""
        if not self._store.catalog.topic(change.topic).settings.kafka_partitions:
            return self._store.routes.activate(change)
        for opened, before in change.predecessors.items():
            for one in before:
                self._store.log.inherit(opened, self._store.log.hand_down(one))
        return self._store.routes.activate(change, ends)

    def _seal(self, partition_id: int, change: Change) -> int:
        payload = f"{change.topic}:{change.version}".encode()
        batch = build_control(SEAL, payload, timestamp=self._store.now_ms())
        return self._repeat(lambda: self._store.log.seal(partition_id, batch))

    def _repeat(self, step: Callable[[], T]) -> T:
        """Steps are idempotent: a store that is away for a moment does not end a change."""
        give_up_at = time.monotonic() + self._tuning.step_tries_s
        while True:
            try:
                return step()
            except StoreError as error:
                if not error.retriable or time.monotonic() >= give_up_at:
                    raise
            time.sleep(self._tuning.step_pause_s)

    def _turn_back(self, change: Change) -> None:
        try:
            sealed = self._sealed(piece.partition_id for piece in change.seals)
            instead = self._store.routes.turn_back(change, sealed)
            if instead is not None:
                _log.warning("a %s of topic %r is turned back", change.kind, change.topic)
                self._store.routes.make(instead)
                ends = self._store.log.removed(sealed)
                self._activate(instead, ends)
        except PostroomError as error:
            _log.warning("a %s of topic %r waits to be turned back: %s", change.kind, change.topic, error)

    def _sealed(self, partition_ids: Iterable[int]) -> list[int]:
        """Those that are sealed, as far as they answer; others are renewed when somebody finds out."""
        found = []
        for partition_id in partition_ids:
            try:
                if self._store.log.bounds([partition_id])[partition_id].sealed:
                    found.append(partition_id)
            except (StoreError, UnknownPartition):
                pass
        return found


class FinishChanges:
    """The duty: changes that were left, and sealed partitions without successors."""

    name: str = "routes"
    every_s: float = 5

    def __init__(self, store: Store, changes: RouteChanges, listing: Listing | None = None) -> None:
        self._store = store
        self._changes = changes
        self._listing = listing or Listing(store.catalog)

    def run_once(self) -> None:
        left = {change.topic for change in self._store.routes.changes()}
        sealed = self._store.log.edges(sealed=True)
        if sealed:  # most of them have successors
            topics = self._listing.look().topics
            left |= {t.name for t in topics if any(r.partition_id in sealed for r in t.route.ranges)}
        for topic in sorted(left):
            try:
                self._changes.help(topic)
            except (UnknownTopic, UnknownPartition):
                pass  # it was deleted meanwhile
            except StoreUnavailable as error:
                if "shard" not in error.details:
                    raise
                _log.warning("the route of topic %r waits: %s", topic, error)


class RouteHelp:
    """Route changes as the event loop sees them: each in a thread of its own, so that polls do not wait for
    it.

    A change may have to wait for a store. Somebody may also have died in the middle of one, and left a sealed
    partition without successors: the broker whose producer meets it goes on with the change, once for all who
    wait. `changed` is called when a route may be another one.
    """

    def __init__(
        self,
        changes: RouteChanges,
        changed: Callable[[], None],
        tuning: BrokerTuning = DEFAULTS.tuning.broker,
    ) -> None:
        self._pauses = tuning.change_pauses
        self._changes = changes
        self._changed = changed
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def run(self, change: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.to_thread(change, *args)
        finally:
            self._changed()

    async def met_seal(self, topic: str, partition_id: int, error: PartitionSealed) -> None:
        """A producer met a sealed partition: name its successors, or see to it that there are some."""
        with suppress(PostroomError):  # it is refused in any case, and finds out by itself
            route = await asyncio.to_thread(self._changes.route, topic)
            error.details["successors"] = [piece.partition for piece in route.successors(partition_id)]
        if not error.details.get("successors") and topic not in self._under_way:
            self._under_way[topic] = asyncio.create_task(self._help(topic))

    async def _help(self, topic: str) -> None:
        tries = 0
        try:
            while not self._closed and not await asyncio.to_thread(self._changes.help, topic):
                tries += 1
                await asyncio.sleep(self._pauses.after(tries))
        except PostroomError as error:
            _log.warning("the route of topic %r waits: %s", topic, error)
        finally:
            del self._under_way[topic]
            self._changed()

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)


def _refuse_away(states: Iterable[ShardState], here: str, what: str) -> None:
    """StoreUnavailable if another shard than this would take partitions, and is away."""
    for state in states:
        if state.name != here and state.state == "open" and state.away:
            away = f"shard {state.name or FIRST_SHARD!r} is away, and no other takes partitions now"
            raise StoreUnavailable(
                f"{away}: start its database and {what} once `postroom shard list` shows it open, or add "
                "another shard with connect(url, shards={…})",
                shard=state.name,
                _served=f"{away}: {what} once `postroom shard list` shows it open, or ask the operator of "
                "the brokers to add another shard",
            )


def shard_name(shown: str) -> str:
    """A shard's name as the store has it."""
    return "" if shown == FIRST_SHARD else shown


class Drain:
    def __init__(
        self, store: Store, routes: RouteChanges, tuning: BrokerTuning = DEFAULTS.tuning.broker
    ) -> None:
        self._tuning = tuning
        self._store = store
        self._routes = routes

    def shards(self) -> list[ShardInfo]:
        return [_info(state) for state in self._store.shards()]

    def drain(self, shown: str) -> ShardInfo:
        """The first phase. Moves what is there; returns once nothing is left that takes messages."""
        name = self._allowed(shown)
        if self._state(name).state == "open":
            self._store.set_shard(name, "draining")
        give_up_at, fewest = time.monotonic() + self._tuning.drain_give_up_s, 2**31
        while left := self._left(name):
            if len(left) < fewest:
                give_up_at, fewest = time.monotonic() + self._tuning.drain_give_up_s, len(left)
            if time.monotonic() > give_up_at:
                raise RouteConflict(
                    f"{len(left)} partitions are still on shard {shown!r}: other changes of their routes are "
                    "under way; it takes no new ones, drain it again to move them"
                )
            for topic, piece in left:
                self._move(topic, piece)
            time.sleep(self._tuning.drain_taken_s)
        return _info(self._state(name))

    def open(self, shown: str) -> ShardInfo:
        """It takes new partitions again."""
        name = self._known(shown)
        if name:
            self._store.set_shard(name, "open")
        return _info(self._state(name))

    def _known(self, shown: str) -> str:
        names = [state.name or FIRST_SHARD for state in self._store.shards()]
        if shown not in names:
            raise InvalidSetting(f"there is no shard {shown!r}; there is {', '.join(names)}")
        return shard_name(shown)

    def _allowed(self, shown: str) -> str:
        name = self._known(shown)
        if not name:
            raise InvalidSetting(
                "the first shard cannot be drained: topics and groups are kept there. Move single partitions "
                "off it with move()"
            )
        states = self._store.shards()
        if any(state.name == name and state.away for state in states):
            raise StoreUnavailable(
                f"shard {shown!r} is away, and a drain needs it: what is stored there is sealed and read to "
                "its end. Start its database, then drain it",
                shard=name,
            )
        if not any(s.name != name and s.state == "open" and not s.away for s in states):
            _refuse_away(states, name, "drain this one")
            raise InvalidSetting(
                f"shard {shown!r} cannot be drained: no other shard takes partitions now; add one, or open "
                "one again"
            )
        return name

    def _state(self, name: str) -> ShardState:
        return next(state for state in self._store.shards() if state.name == name)

    def _left(self, name: str) -> list[tuple[str, Range | None]]:
        """What takes messages there, and what a change is about to open there."""
        left: list[tuple[str, Range | None]] = [
            (topic.name, piece)
            for topic in self._store.catalog.topics()
            for piece in topic.route.ranges
            if piece.shard == name
        ]
        for change in self._store.routes.changes():
            left += [(change.topic, None) for piece in change.opens if piece.shard == name]
        return left

    def _move(self, topic: str, piece: Range | None) -> None:
        try:
            if piece is None:
                self._routes.help(topic)
            else:
                self._routes.move(topic, piece.partition, None)
        except (RouteConflict, UnknownTopic, UnknownPartition):
            pass  # another change came first, or it is gone: it is looked at again


def _info(state: ShardState) -> ShardInfo:
    shown = "away" if state.away else state.state
    name = state.name or FIRST_SHARD
    return ShardInfo(name, state.kind, shown, state.partitions, state.sealed, state.delayed)
