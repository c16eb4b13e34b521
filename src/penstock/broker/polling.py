"""Polls, and what comes of them: waiting, handing out, settling, and giving back what nobody received.

A poll registers for news, looks, and waits without a thread or a database connection until there is news,
something is due, or its time is up. Must never lose what a cancelled poll was given: it is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from ..config import Limits
from ..errors import PenstockError
from ..store.contract import Store
from .catalog import CatalogCache, Source
from .deliveries import Deliveries, Departure, Handed, released
from .endpoint import PollReply, PollRequest, Settle, SettleReply
from .mover import Mover
from .ordered import OrderedDeliveries
from .waiters import Key, Waiters, wait

__all__ = ["HOLDERS", "Polling"]

_log = logging.getLogger("penstock.broker")

HOLDERS: Key = ("holders", 0)
"""Partitions of ordered groups may have been handed over, in any process."""


class Polling:
    def __init__(
        self,
        store: Store,
        limits: Limits,
        catalog: CatalogCache,
        deliveries: Deliveries,
        ordered: OrderedDeliveries,
        mover: Mover,
        waiters: Waiters,
        in_thread: Callable[..., Awaitable[Any]],
    ) -> None:
        self._store, self._limits, self._catalog = store, limits, catalog
        self._deliveries, self._ordered, self._mover = deliveries, ordered, mover
        self._waiters, self._in_thread = waiters, in_thread
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        self._closed = False

    async def close(self) -> None:
        """Let all polls return, and give back what those that were cancelled had been given."""
        self._closed = True
        self._waiters.notify_all()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def poll(self, request: PollRequest) -> PollReply:
        deadline = self._loop.time() + min(request.wait_ms, self._limits.poll_wait_ms) / 1000
        watched = [HOLDERS]  # by polls of ordered groups
        while True:
            sources = self._catalog.known_sources(request.topic, request.group)
            if sources is None:
                sources = await self._in_thread(self._catalog.sources, request.topic, request.group)
            settings = sources[0][1].settings
            ordered = settings.mode == "ordered"
            with self._waiters.listening(_keys(sources) + (watched if ordered else [])) as news:
                handed = await self._hand_out(request, self._ordered if ordered else self._deliveries)
                if handed.worth_telling or self._loop.time() >= deadline or self._closed:
                    return PollReply(
                        tuple(handed.grants), settings.lease_ms, handed.draining, handed.revoked, handed.lost,
                        handed.started_ms,
                    )  # fmt: skip
                watched = [HOLDERS] if handed.watchful else []
                await wait(news, min(deadline - self._loop.time(), self._until(handed.next_due)))

    async def _hand_out(self, request: PollRequest, poller: Deliveries | OrderedDeliveries) -> Handed:
        """A poll that is cancelled meanwhile gives back what it was given."""
        looking = asyncio.ensure_future(self._look(request, poller))
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            giving_back = asyncio.create_task(self._give_back(request, looking, poller is self._ordered))
            self._background.add(giving_back)
            giving_back.add_done_callback(self._background.discard)
            raise

    async def _look(self, request: PollRequest, poller: Deliveries | OrderedDeliveries) -> Handed:
        handed: Handed = await self._in_thread(poller.poll, request)
        await self.depart(handed.departures, dead=True)
        return handed

    async def _give_back(self, request: PollRequest, looking: Awaitable[Handed], ordered: bool) -> None:
        try:
            handed = await looking
            if ordered:  # what it held before it holds still, and is sent again what it did not receive (I6)
                await self._in_thread(self._ordered.end, handed.claimed, request.token)
                self.notify_groups(group.id for group, _ in handed.claimed)
            elif handed.grants and not request.on_delivery:
                await self.settle(request.topic, request.group, released(request, handed))
        except PenstockError as error:
            _log.warning("what a cancelled poll was given waits for its lease to end: %s", error)

    def _until(self, due_ms: int | None) -> float:
        """Seconds until something is due. A manual clock wakes all waiters when it is moved."""
        return 3600.0 if due_ms is None else max(0.001, (due_ms - self._store.now_ms()) / 1000)

    async def hand_over(self, topic: str, group: str, token: int, partition_ids: Sequence[int]) -> None:
        ended = await self._in_thread(self._ordered.hand_over, topic, group, token, partition_ids)
        self.notify_groups(ended)

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        outcome = await self._in_thread(self._deliveries.settle, topic, group, parts)
        await self.depart(outcome.departures, dead=True)
        self.notify_groups(outcome.waiting)
        return SettleReply(tuple(outcome.lost), tuple(outcome.kept), tuple(outcome.away))

    async def depart(self, departures: Sequence[Departure], *, dead: bool) -> None:
        for leaving in departures:
            await self._mover.move(
                leaving.group, leaving.partition, leaving.partition_id, leaving.deliveries, dead=dead
            )

    def notify_groups(self, group_ids: Iterable[int]) -> None:
        self._waiters.notify(*(("group", group_id) for group_id in group_ids))


def _keys(sources: Sequence[Source]) -> list[Key]:
    """What a poll of these sources waits for."""
    keys: list[Key] = [("partition", r.partition_id) for topic, _ in sources for r in topic.route.partitions]
    return keys + [("group", reader.id) for _, reader in sources]
