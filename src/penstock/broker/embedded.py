"""The broker in this process: the `Endpoint` over a store.

Holds no state that the store does not have: caches and waiters only (R2). Blocking work runs in a small
pool of threads; appends go through the writer. One broker belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Awaitable, Sequence
from functools import partial
from pathlib import Path

from ..clock import Clock, SystemClock
from ..config import DEFAULTS, Limits
from ..errors import GenerationChanged, PenstockError, UsageError
from ..model.batch import verify
from ..model.delivery import Span
from ..model.route import Route
from ..model.settings import GroupWish, Start, TopicSettings
from ..store import open_memory, open_sqlite
from ..store.contract import Append, Appended, News, Store
from .admin import Admin
from .catalog import CatalogCache, Source
from .deadletters import DeadLetterOffice
from .deliveries import Deliveries, Departure, Handed, released
from .duties import DropLogs, Duty, DutyRunner, ForgetProducers, Retention
from .endpoint import (
    Beat,
    DeadLetters,
    Fetched,
    GroupInfo,
    Held,
    Lag,
    PollReply,
    PollRequest,
    Settle,
    TopicInfo,
)
from .mover import Mover
from .tail import TailCache
from .waiters import Key, Waiters, WatcherThread
from .workers import Workers
from .writer import Writer

__all__ = ["Broker", "open_endpoint"]

_log = logging.getLogger("penstock.broker")

_JUST_MS = 100  # equal moments may stand for two releases
_SOON_MS = 10_000  # what is due later is found by the next poll: no long poll lasts that much longer


async def open_endpoint(
    path: Path | None, *, memory: str = "", clock: Clock | None = None, limits: Limits = DEFAULTS
) -> Broker:
    """A broker on a file, or in memory (`memory` names one that this process shares)."""
    clock = clock or SystemClock()
    opening = partial(open_memory, memory, clock) if path is None else partial(open_sqlite, path, clock)
    return Broker(await asyncio.to_thread(opening), clock, limits)


class Broker:
    def __init__(self, store: Store, clock: Clock, limits: Limits = DEFAULTS) -> None:
        self.store = store
        self._clock = clock
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._workers = Workers(limits.reader_threads, "penstock-worker")
        self._in_thread = self._workers.run
        self._catalog = CatalogCache(store.catalog)
        self._tail = TailCache(limits.tail_cache_bytes)
        self._deliveries = Deliveries(store, self._catalog, self._tail)
        self._admin = Admin(store, self._catalog)
        self._letters = DeadLetterOffice(store, self._catalog, self._deliveries)
        self._waiters = Waiters()
        self._writer = Writer(store.log, self._tail, limits, self._appended)
        self._mover = Mover(store, self._deliveries.read_span, self._writer.append, self._in_thread)
        self._ends: dict[int, int] = {}  # of partitions, as far as waiters were told
        self._dues: dict[int, int] = {}  # when groups have something due
        self._watcher = WatcherThread(store, limits.watch_interval_ms, self._news)
        self._waiters.on_first, self._waiters.on_none = self._watcher.resume, self._watcher.pause
        self._unsubscribe = clock.subscribe(self._clock_moved)
        duties: list[Duty] = [kind(store, limits) for kind in (Retention, DropLogs, ForgetProducers)]
        holder = f"{socket.gethostname()}:{os.getpid()}:{id(self):x}"
        self.duties = DutyRunner(store, duties, holder, limits, self._in_thread)
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    def now_ms(self) -> int:
        return self._clock.now_ms()

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._unsubscribe()
        self._waiters.notify_all()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._writer.close()
        await self.duties.close()
        await self._watcher.close()
        await self._workers.close()
        await asyncio.to_thread(self.store.close)

    # ---- news ----

    def _clock_moved(self) -> None:
        self._loop.call_soon_threadsafe(self._waiters.notify_all)

    def _appended(self, ends: dict[int, int]) -> None:
        for partition_id, end in ends.items():
            self._ends[partition_id] = max(end, self._ends.get(partition_id, 0))
            self._waiters.notify(("partition", partition_id))

    def _news(self, news: News | None, dues: dict[int, int] | None) -> None:
        """Something was committed, here or in another process: wake whom it concerns."""
        if news is not None:
            if self._catalog.saw_version(news.catalog_version):
                self._waiters.notify_all()
            for partition_id, end in news.ends.items():
                if end > self._ends.get(partition_id, 0):
                    self._ends[partition_id] = end
                    self._waiters.notify(("partition", partition_id))
        if dues is not None:
            self._notify_due(dues)

    def _notify_due(self, dues: dict[int, int]) -> None:
        """Wake groups with something due soon, if that is new: it moved, or came due just now."""
        now = self._clock.now_ms()
        for group_id, due in dues.items():
            if due < now + _SOON_MS and (due != self._dues.get(group_id) or due > now - _JUST_MS):
                self._waiters.notify(("group", group_id))
        self._dues = dues

    # ---- catalog ----

    async def create_topic(
        self, name: str, settings: TopicSettings, partitions: int, exist_ok: bool
    ) -> TopicInfo:
        return await self._in_thread(self._admin.create_topic, name, settings, partitions, exist_ok)

    async def topics(self) -> list[TopicInfo]:
        return await self._in_thread(self._admin.topics)

    async def topic(self, name: str) -> TopicInfo:
        return await self._in_thread(self._admin.topic, name)

    async def alter_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        return await self._in_thread(self._admin.alter_topic, name, settings)

    async def delete_topic(self, name: str) -> None:
        await self._in_thread(self._admin.delete_topic, name)
        self._waiters.notify_all()

    async def purge(self, name: str) -> int:
        return await self._in_thread(self._admin.purge, name)

    async def route(self, topic: str) -> Route:
        return (await self._in_thread(self._catalog.topic, topic)).route

    # ---- log ----

    async def append(self, topic: str, partition_id: int, batch: bytes) -> Appended:
        if verify(batch).control:
            raise UsageError("control batches are Penstock's own; send messages")
        return await self._writer.append(Append(partition_id, batch))

    async def fetch(
        self, partition_id: int, offset: int, *, max_messages: int, max_bytes: int, wait_ms: int
    ) -> Fetched:
        deadline = self._loop.time() + wait_ms / 1000
        while True:
            with self._waiters.listening([("partition", partition_id)]) as news:
                fetched = await self._in_thread(self._fetch, partition_id, offset, max_messages, max_bytes)
                if fetched.batches or self._loop.time() >= deadline or self._closed:
                    return fetched
                await _wait(news, deadline - self._loop.time())

    def _fetch(self, partition_id: int, offset: int, max_messages: int, max_bytes: int) -> Fetched:
        bounds = self.store.log.bounds([partition_id])[partition_id]
        start = max(offset, bounds.start)
        found = (
            self._deliveries.read(partition_id, start, max_messages, max_bytes) if start < bounds.end else []
        )
        return Fetched(tuple(found), bounds.start, bounds.end)

    async def resolve(self, topic: str, start: Start) -> dict[int, int]:
        return await self._in_thread(self._admin.resolve, topic, start)

    # ---- groups ----

    async def create_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        return await self._in_thread(self._admin.create_group, topic, name, wish)

    async def groups(self, topic: str) -> list[GroupInfo]:
        return await self._in_thread(self._admin.groups, topic)

    async def alter_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        return await self._in_thread(self._admin.alter_group, topic, name, wish)

    async def pause(self, topic: str, name: str, paused: bool) -> GroupInfo:
        info = await self._in_thread(self._admin.pause, topic, name, paused)
        self._waiters.notify_all()
        return info

    async def delete_group(self, topic: str, name: str, force: bool) -> None:
        await self._in_thread(self._admin.delete_group, topic, name, force)
        self._waiters.notify_all()

    async def reset(self, topic: str, name: str, start: Start, force: bool) -> GroupInfo:
        info = await self._in_thread(self._admin.reset, topic, name, start, force)
        self._waiters.notify_all()
        return info

    async def lag(self, topic: str, group: str) -> Lag:
        return await self._in_thread(self._admin.lag, topic, group)

    # ---- deliveries ----

    async def subscribe(self, topic: str, group: str, wish: GroupWish, member: str, client: str) -> GroupInfo:
        return await self._in_thread(self._admin.subscribe, topic, group, wish, member, client)

    async def unsubscribe(self, topic: str, group: str, member: str) -> None:
        await self._in_thread(self._admin.unsubscribe, topic, group, member)

    async def poll(self, request: PollRequest) -> PollReply:
        deadline = self._loop.time() + min(request.wait_ms, self._limits.poll_wait_ms) / 1000
        while True:
            sources = self._catalog.known_sources(request.topic, request.group)
            if sources is None:
                sources = await self._in_thread(self._catalog.sources, request.topic, request.group)
            with self._waiters.listening(_keys(sources)) as news:
                handed = await self._hand_out(request)
                if handed.grants or handed.draining or self._loop.time() >= deadline or self._closed:
                    return PollReply(tuple(handed.grants), sources[0][1].settings.lease_ms, handed.draining)
                await _wait(news, min(deadline - self._loop.time(), self._until(handed.next_due)))

    async def _hand_out(self, request: PollRequest) -> Handed:
        """A poll that is cancelled meanwhile gives back what it was given."""
        looking = asyncio.ensure_future(self._look(request))
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            giving_back = asyncio.create_task(self._give_back(request, looking))
            self._background.add(giving_back)
            giving_back.add_done_callback(self._background.discard)
            raise

    async def _look(self, request: PollRequest) -> Handed:
        handed = await self._in_thread(self._deliveries.poll, request)
        await self._depart(handed.departures, dead=True)
        return handed

    async def _give_back(self, request: PollRequest, looking: Awaitable[Handed]) -> None:
        try:
            handed = await looking
            if handed.grants and not request.on_delivery:
                await self.settle(request.topic, request.group, released(request, handed))
        except PenstockError as error:
            _log.warning("what a cancelled poll was given waits for its lease to end: %s", error)

    def _until(self, due_ms: int | None) -> float:
        """Seconds until something is due. A manual clock wakes all waiters when it is moved."""
        return 3600.0 if due_ms is None else max(0.001, (due_ms - self._clock.now_ms()) / 1000)

    async def settle(
        self, topic: str, group: str, parts: Sequence[Settle]
    ) -> list[tuple[Settle, tuple[Span, ...]]]:
        outcome = await self._in_thread(self._deliveries.settle, topic, group, parts)
        await self._depart(outcome.departures, dead=True)
        self._waiters.notify(*(("group", group_id) for group_id in outcome.waiting))
        return outcome.lost

    async def _depart(self, departures: Sequence[Departure], *, dead: bool) -> None:
        for leaving in departures:
            await self._mover.move(
                leaving.group, leaving.partition, leaving.partition_id, leaving.deliveries, dead=dead
            )

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        lost = []
        for beat in beats:
            self._admin.join(self._catalog.group(beat.topic, beat.group), beat.member, beat.client)
            for held in beat.held:
                reader = self._catalog.group(held.topic, beat.group)
                try:
                    gone = self.store.progress.extend(reader, held.partition_id, held.token, held.spans)
                except GenerationChanged:
                    self._catalog.forget()
                    gone = held.spans
                if gone:
                    lost.append((held, gone))
        return lost

    # ---- dead letters ----

    async def dead_letters(self, topic: str, group: str, limit: int) -> list[DeadLetters]:
        return await self._in_thread(self._letters.letters, topic, group, limit)

    async def redrive(self, topic: str, group: str, offsets: Sequence[int] | None) -> int:
        count, departures = await self._in_thread(self._letters.redrive, topic, group, offsets)
        await self._depart(departures, dead=False)
        self._waiters.notify_all()
        return count

    async def discard(self, topic: str, group: str, offsets: Sequence[int] | None) -> int:
        return await self._in_thread(self._letters.discard, topic, group, offsets)


def _keys(sources: Sequence[Source]) -> list[Key]:
    """What a poll of these sources waits for."""
    keys: list[Key] = [("partition", r.partition_id) for topic, _ in sources for r in topic.route.ranges]
    return keys + [("group", reader.id) for _, reader in sources]


async def _wait(news: asyncio.Event, seconds: float) -> None:
    """Not `wait_for`, which may swallow a cancellation that comes together with the news."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await news.wait()
    except TimeoutError:
        pass
