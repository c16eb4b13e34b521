"""The broker in this process: the `Endpoint` over a store.

Holds no state that the store does not have: caches and waiters only (R2). Blocking work runs in a small
pool of threads; appends go through the writer. One broker belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

from ..address import Address
from ..clock import Clock, SystemClock
from ..config import DEFAULTS, Limits
from ..endpoint.values import (
    Beat,
    DeadLetters,
    GroupInfo,
    Held,
    Lag,
    RateInfo,
    ResetPlan,
    ShardInfo,
    StoppedMessage,
    TopicInfo,
)
from ..model.access import Principal
from ..model.delivery.delivery import Span
from ..model.messages.batch import TopicBounds
from ..model.messages.requests import ReplyTopic
from ..model.policy.bounds import Positions, make_room
from ..model.policy.rate import Rate
from ..model.policy.settings import GroupWish, Start, TopicSettings
from ..model.policy.slow_lane import LaneInfo, LaneView, Seen
from ..model.topology.route import Change, Route
from ..store import open_store
from ..store.contract import News, Store, StoredBatch, Topic
from ..tasks import SingleFlight
from .access import InThread
from .audit import AuditVerbs, ForgetAudit
from .deliver.fetch import FetchVerbs, ReadAhead
from .deliver.heartbeats import Beating
from .deliver.ordered import OrderedDeliveries
from .deliver.poll import HOLDERS, Polling, PollVerbs
from .deliver.readable import TailCache
from .deliver.shared import Deliveries
from .deliver.slow_lanes import Lanes
from .deliver.stopped import Spot, StoppedMessages
from .duties import (
    CutStrays,
    DropLogs,
    Duty,
    DutyRunner,
    ExpireGroups,
    ForgetProducers,
    Retention,
    cautious_time,
)
from .metrics import Figures
from .moves.dead_letters import DeadLetterOffice
from .moves.departures import Mover, leads_to_lane
from .moves.schedule import DelayedVerbs
from .moves.staged import FinishDecisions, Publisher, StagingVerbs, StagingWork
from .moves.unreadable import CheckBatches, letter_box
from .presence import Presence
from .publish.append import AppendVerbs
from .publish.backlog import BacklogGate
from .publish.rates import Quotas
from .shard_workers import ShardWork
from .topology.catalog_cache import CatalogCache, Listing
from .topology.conversions import ConversionVerbs
from .topology.groups import Groups, Resets
from .topology.kafka_groups import ExpireKafkaGroups
from .topology.route_changes import Drain, FinishChanges, RouteChanges, RouteHelp
from .topology.topics import Admin, ForgetReplies, Replies
from .waiters import Waiters
from .workers import Workers

__all__ = ["Broker", "open_endpoint"]

_log = logging.getLogger("postroom.broker")

_MOST_ENDS = 50_000  # partitions whose ends are remembered; whoever waits for another is woken once more


async def open_endpoint(
    address: Address,
    *,
    clock: Clock | None = None,
    limits: Limits = DEFAULTS,
    migrate: bool = False,
    shards: Mapping[str, Address] | None = None,
    name: str = "",
    growing: bool = False,
) -> Broker:
    """A broker in this process on the store that the address names, and those of its other shards.

    `name`: how others who use the queue call this process. `growing`: shards may be added later.
    """
    opening = partial(open_store, make_tables=migrate, shards=shards, growing=growing)
    store = await asyncio.to_thread(opening, address, clock, limits)
    broker = Broker(store, clock or SystemClock(), limits)
    await broker.presence.enter(name or f"{socket.gethostname()}-{os.getpid()}")
    return broker


class Broker(AppendVerbs, StagingVerbs, FetchVerbs, ConversionVerbs, DelayedVerbs, AuditVerbs, PollVerbs):
    def __init__(self, store: Store, clock: Clock, limits: Limits = DEFAULTS) -> None:
        self.store, self.now_ms, self.reached_ms = store, store.now_ms, store.now_ms
        self._clock, self._loop = clock, asyncio.get_running_loop()
        self._limits, self._tuning = limits, (tuning := limits.tuning.broker)
        shards = len(store.parts())  # one that hangs does not take all threads
        self._workers = Workers(limits.reader_threads * shards, "postroom-worker", store.at_once)
        self._in_thread = self._workers.run
        self._flights = SingleFlight(self._in_thread)
        self._catalog = CatalogCache(store.catalog, lasting=shards > 1, fresh_s=tuning.catalog_fresh_s)
        self._tail = TailCache(limits.tail_cache_bytes)
        self._deliveries = Deliveries(store, self._catalog, self._tail, limits.far_retry_ms)
        self._ahead = ReadAhead(self._in_thread, self._deliveries.read, limits)
        self._ordered = OrderedDeliveries(store, self._catalog, self._deliveries, limits)
        self._admin = Admin(store, self._catalog, limits)
        resets = Resets(store, self._admin.resolve)
        self._groups = Groups(store, self._catalog, limits, self._admin.delete_topic, resets)
        self._beating = Beating(store, self._catalog, self._groups, self._deliveries)
        self._routes = RouteChanges(store, self._catalog, tuning)
        self._drain = Drain(store, self._routes, tuning)
        self._help = RouteHelp(self._routes, self._route_changed, tuning)
        self.presence = Presence(store, self._in_thread, tuning)
        self._letters = DeadLetterOffice(store, self._catalog, self._deliveries)
        self._stopped = StoppedMessages(store, self._catalog, self._deliveries)
        self._waiters, self.listing = Waiters(tuning.lull_s), Listing(store.catalog)
        holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._work = ShardWork(
            store, limits, holder, self._tail, self._in_thread,
            appended=self._appended, due_moved=self._due_moved, told=self._news,
            awaited=self._waiters.awaited, heeds_own=self._has_ordered,
        )  # fmt: skip
        self._mover = Mover(store, self._deliveries.read_span, self._work.append, self._in_thread)
        self._mover.to_lane = partial(leads_to_lane, self._catalog)
        self._mover.letter_box = partial(letter_box, self._catalog)
        self._lanes = Lanes(store, self._catalog, self._in_thread, tuning.slow_sources_fresh_s)
        self._backlog = BacklogGate(store, limits, self._in_thread)
        self._quotas = Quotas(store, self._catalog, self._in_thread, tuning)
        self._polling = Polling(
            store, limits, self._catalog, self._deliveries, self._ordered, self._mover, self._waiters,
            self._quotas, self._workers, self._lanes,
        )  # fmt: skip
        publisher = Publisher(store, self._due_moved, self._routes.help, tuning=tuning)
        self._staging = StagingWork(store, self._catalog, publisher, self._backlog, self._quotas, tuning)
        self._ends: dict[int, int] = {}  # of partitions, as far as waiters were told
        self._dues: dict[str, dict[int, int]] = {}  # by shard, when groups have something due
        self._waiters.on_first, self._waiters.on_none = self._work.resume, self._work.pause
        store.on_return(self._shard_returned)
        self._unsubscribe = clock.subscribe(self._clock_moved)
        cautious = cautious_time(store, clock)
        self._replies = Replies(store, limits, self._admin.delete_topic, self._catalog.forget)
        self._check = CheckBatches(store, tuning)
        duties: list[Duty] = [
            DropLogs(store, limits),
            ForgetProducers(store, limits, cautious),
            CutStrays(store),
            Retention(store, limits, self.listing, cautious),
            ExpireGroups(store, self._groups.forget, self.listing, cautious, tuning),
            ExpireKafkaGroups(store, self.listing, tuning),
            FinishChanges(store, self._routes, self.listing),
            FinishDecisions(store, publisher, limits),
            ForgetReplies(store, limits, self._replies.drop, self.listing),
            ForgetAudit(store, limits, cautious),
            self._check,
        ]
        self.duties = DutyRunner(store, duties, holder, limits, self._in_thread, cautious)
        self._identity_key: bytes | None = None
        self._holders_timer: asyncio.TimerHandle | None = None
        self._closed = False

    @property
    def in_thread(self) -> InThread:
        """Runs blocking work of this broker in one of its threads."""
        return self._in_thread

    def watch(self, figures: Figures) -> None:
        """Count commits and dead letters there, from now on."""
        self._work.watch(figures)
        self._mover.died = figures.died
        self._mover.met_unreadable = partial(figures.found_unreadable, found_by="delivery")
        self._check.found = partial(figures.found_unreadable, found_by="check")

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        self._waiters.notify_all()
        await self._polling.close()
        await self.presence.leave()  # which polls would take for news
        await self._quotas.close()
        await self._help.close()
        await self._staging.close()
        await self._work.close_writers()
        await asyncio.to_thread(self._work.stop)
        await self.duties.close()
        await self._work.close_watchers()
        await self._workers.close()
        await asyncio.to_thread(self.store.close)

    # ---- news ----

    def _clock_moved(self) -> None:
        self._work.clock_moved()
        self._loop.call_soon_threadsafe(self._quotas.clock_moved)
        self._loop.call_soon_threadsafe(self._waiters.notify_all)

    def _shard_returned(self) -> None:
        """What was waiting on it is delivered; told in any thread."""
        self._work.wake()
        with suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._waiters.notify_all)

    def _appended(self, ends: dict[int, int]) -> None:
        for partition_id, end in ends.items():
            if partition_id not in self._ends:
                make_room(self._ends, _MOST_ENDS)
            self._ends[partition_id] = max(end, self._ends.get(partition_id, 0))
            self._waiters.notify(("partition", partition_id))

    def _due_moved(self, stored: Sequence[tuple[int, StoredBatch]]) -> None:
        """Delayed messages are in their logs now; told by the schedule's mover, in its thread."""
        ends: dict[int, int] = {}
        for partition_id, batch in stored:
            self._tail.add(partition_id, batch)
            ends[partition_id] = batch.last_offset + 1
        with suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            self._loop.call_soon_threadsafe(self._appended, ends)

    def _news(self, shard: str, news: News | None, dues: dict[int, int] | None) -> None:
        """Something was committed, here or in another process: wake whom it concerns."""
        if news is not None:
            if not shard and self._catalog.saw_version(news.catalog_version):
                self._quotas.look_again()
                self._waiters.notify_all()
            make_room(self._ends, _MOST_ENDS)
            for partition_id, end in news.ends.items():
                if end > self._ends.get(partition_id, 0):
                    self._ends[partition_id] = end
                    self._waiters.notify(("partition", partition_id))
        if dues is not None:
            self._notify_due(dues, self._dues.get(shard, {}))
            self._dues[shard] = dues
            if self._has_ordered() and self._holders_timer is None:
                self._holders_timer = self._loop.call_later(self._tuning.holders_s, self._notify_holders)

    def _has_ordered(self) -> bool:
        """Whether members of ordered groups are here. Any thread."""
        return self._ordered.remembers_members or self._waiters.listens(HOLDERS)

    def _notify_holders(self) -> None:
        """Partitions of ordered groups may have been handed over elsewhere; looked at now and then only."""
        self._holders_timer = None
        self._ordered.forget_members()
        self._waiters.notify(HOLDERS)

    def _notify_due(self, dues: dict[int, int], before: dict[int, int]) -> None:
        """Wake groups with something due soon, if that is new: it moved, or came due just now."""
        now = self.now_ms()
        soon, just = now + self._tuning.due_soon_ms, now - self._tuning.just_due_ms
        for group_id, due in dues.items():
            if due < soon and (due != before.get(group_id) or due > just):
                self._waiters.notify(("group", group_id))
            elif due != before.get(group_id):
                self._polling.due_in(group_id, (due - now) / 1000)

    def _route_changed(self) -> None:
        self._catalog.forget()
        self._waiters.notify_all()

    # ---- catalog ----

    async def create_topic(
        self, name: str, settings: TopicSettings, partitions: int, exist_ok: bool
    ) -> TopicInfo:
        return await self._in_thread(self._admin.create_topic, name, settings, partitions, exist_ok)

    async def topics(self, viewer: Principal | None = None) -> list[TopicInfo]:
        """All of them, or what a list shows to that principal: no other is loaded."""
        return await self._in_thread(self._admin.topics, viewer)

    async def topic(self, name: str) -> TopicInfo:
        return await self._in_thread(self._admin.topic, name)

    async def alter_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        return await self._in_thread(self._admin.alter_topic, name, settings)

    async def delete_topic(self, name: str) -> None:
        await self._in_thread(self._admin.delete_topic, name)
        self._waiters.notify_all()

    async def purge(self, name: str) -> int:
        return await self._in_thread(self._admin.purge, name)

    # ---- routes ----

    async def route(self, topic: str) -> Route:
        return await self._in_thread(self._route_now, topic)

    def _route_now(self, topic: str) -> Route:
        """With what is known to be away: who sends without a key goes elsewhere (R6)."""
        route = self._catalog.topic(topic, fresh=True).route
        here = [piece.partition_id for piece in route.ranges]
        away = set(here).difference(self.store.present(here))
        return replace(route, away=tuple(sorted(away))) if away else route

    async def route_history(self, topic: str) -> list[Route]:
        return await self._in_thread(self.store.routes.history, topic)

    async def route_change(self, topic: str) -> Change | None:
        return await self._in_thread(self.store.routes.change_of, topic)

    async def split(self, topic: str, partition: int, at: int | None) -> Route:
        return await self._help.run(self._routes.split, topic, partition, at)

    async def merge(self, topic: str, one: int, other: int) -> Route:
        return await self._help.run(self._routes.merge, topic, one, other)

    async def move(self, topic: str, partition: int, shard: str | None) -> Route:
        return await self._help.run(self._routes.move, topic, partition, shard)

    # ---- shards ----

    async def shards(self) -> list[ShardInfo]:
        return await self._in_thread(self._drain.shards)

    async def drain_shard(self, name: str) -> ShardInfo:
        return await self._help.run(self._drain.drain, name)

    async def open_shard(self, name: str) -> ShardInfo:
        return await self._in_thread(self._drain.open, name)

    async def add_shards(self, shards: Mapping[str, Address]) -> None:
        """Further databases of the queue, while it is in use. InvalidSetting if one cannot be that shard."""
        for name, address in shards.items():
            await asyncio.to_thread(self.store.add_shard, name, address)
            self._catalog.last()
            self._work.add(name)
        self._route_changed()
        await self.presence.changed()

    # ---- limits ----

    async def set_rate(self, rate: Rate) -> None:
        await self._quotas.set(rate)
        self._waiters.notify_all()

    async def rates(self) -> list[RateInfo]:
        return await self._quotas.listed()

    # ---- log ----

    async def catalog_topic(self, name: str, *, fresh: bool = False) -> Topic:
        """The topic as the catalog has it; `fresh`, as it is now."""
        read = partial(self._catalog.topic, name, fresh=True)
        return await (self._in_thread(read) if fresh else self._topic(name))

    async def resolve(self, topic: str, start: Start) -> dict[int, int]:
        return await self._in_thread(self._admin.resolve, topic, start)

    async def bounds(self, topic: str, at: Positions = ()) -> TopicBounds:
        return await self._in_thread(self._admin.bounds, topic, at)

    # ---- groups ----

    async def create_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        return await self._in_thread(self._groups.create, topic, name, wish)

    async def groups(self, topic: str) -> list[GroupInfo]:
        return await self._in_thread(self._groups.of_topic, topic)

    async def alter_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        return await self._in_thread(self._groups.alter, topic, name, wish)

    async def pause(self, topic: str, name: str, paused: bool) -> GroupInfo:
        info = await self._in_thread(self._groups.pause, topic, name, paused)
        self._waiters.notify_all()
        return info

    async def delete_group(self, topic: str, name: str, force: bool) -> None:
        await self._in_thread(self._groups.delete, topic, name, force)
        self._waiters.notify_all()

    async def reset(
        self, topic: str, name: str, start: Start, force: bool, dry_run: bool = False
    ) -> ResetPlan:
        plan = await self._in_thread(self._groups.reset, topic, name, start, force, dry_run)
        self._waiters.notify_all()
        return plan

    async def lag(self, topic: str, group: str) -> Lag:
        return await self._in_thread(self._admin.lag, topic, group)

    # ---- deliveries ----

    async def subscribe(
        self, topic: str, group: str, wish: GroupWish, member: str, client: str, *, named: bool = True
    ) -> GroupInfo:
        info = await self._in_thread(self._groups.subscribe, topic, group, wish, member, client, named)
        if info.settings.mode == "ordered":
            self._polling.notify_groups(await self._in_thread(self._ordered.joined, topic, info.name))
        return info

    async def unsubscribe(self, topic: str, group: str, member: str) -> None:
        concerned = await self._in_thread(self._ordered.leave, topic, group, member)
        await self._in_thread(self._groups.unsubscribe, topic, group, member)
        self._polling.notify_groups(concerned)

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        return self._beating.beat(beats)

    # ---- slow lanes ----

    async def lanes(self, topic: str, group: str) -> LaneInfo:
        return await self._lanes.listed(topic, group)

    async def report_sources(
        self, topic: str, group: str, seen: Sequence[Seen], version: int = 0
    ) -> LaneView | None:
        return await self._lanes.report(topic, group, seen, version)

    # ---- replies ----

    async def open_replies(self, client: str, owner: str = "") -> ReplyTopic:
        return await self._in_thread(self._replies.open, client, owner)

    async def close_replies(self, client: str, owner: str = "") -> None:
        await self._in_thread(self._replies.close, client, owner)

    # ---- dead letters ----

    async def dead_letters(
        self, topic: str, group: str, limit: int, after: Spot | None = None
    ) -> list[DeadLetters]:
        return await self._in_thread(self._letters.letters, topic, group, limit, after)

    async def redrive(self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None) -> int:
        count, departures = await self._in_thread(self._letters.redrive, topic, group, spots)
        if spots is None:
            count += await self._in_thread(self._stopped.restart, topic, group, None)
        await self._polling.depart(departures, dead=False)
        self._waiters.notify_all()
        return count

    async def discard(self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None) -> int:
        return await self._in_thread(self._letters.discard, topic, group, spots)

    # ---- what stopped ----

    async def stopped(
        self, topic: str, group: str, limit: int, after: Spot | None = None, behind: bool = True
    ) -> list[StoppedMessage]:
        listed = partial(self._stopped.listed, behind=behind)
        return await self._in_thread(listed, topic, group, limit, after)

    async def restart_stopped(self, topic: str, group: str, spots: Sequence[Spot] | None = None) -> int:
        count = await self._in_thread(self._stopped.restart, topic, group, spots)
        self._waiters.notify_all()
        return count

    async def skip_stopped(self, topic: str, group: str, spots: Sequence[Spot] | None = None) -> int:
        count, departures = await self._in_thread(self._stopped.skip, topic, group, spots)
        await self._polling.depart(departures, dead=True)
        self._waiters.notify_all()
        return count

    async def drop_stopped(self, topic: str, group: str, spots: Sequence[Spot] | None = None) -> int:
        count = await self._in_thread(self._stopped.drop, topic, group, spots)
        self._waiters.notify_all()
        return count
