"""Polls, and what comes of them: waiting, handing out, settling, and giving back what nobody received.

A poll registers for news, looks, and waits without a thread or a database connection until there is news,
something is due, or its time is up. Polls of a shared group take turns at looking (`crowd`, R41); in an
ordered group each looks for itself, since what it is to know depends on what it holds. Must never lose what
a cancelled poll was given: it is given back.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from ...config import Limits
from ...endpoint.values import PollReply, PollRequest, Settle, SettleReply, UnparkRequest
from ...errors import GateClosed, GenerationChanged, PostroomError, UsageError
from ...model.delivery.delivery import NOBODY
from ...model.policy.settings import GroupSettings
from ...store.contract import Store
from ..moves.departures import Mover
from ..publish.rates import Quotas
from ..topology.catalog_cache import CatalogCache, Source
from ..waiters import Key, Waiters, wait
from ..workers import Workers
from .ordered import OrderedDeliveries
from .poll_queue import Crowds, Permit
from .shared import Deliveries, Departure, Handed
from .slow_lanes import Lanes

__all__ = ["HOLDERS", "Polling"]

_log = logging.getLogger("postroom.broker")

T = TypeVar("T")

_Look = Callable[[PollRequest], Coroutine[Any, Any, Handed]]
_SHORT_MS = 1000  # a poll that waits no longer looks in any case: news of other processes takes a moment
_FEW_ACKS = 100  # verdicts, and parts: what is more is settled in a thread
_FEW_MESSAGES = 10_000  # the same for a poll

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
        quotas: Quotas,
        workers: Workers,
        lanes: Lanes,
    ) -> None:
        self._store, self._limits, self._catalog = store, limits, catalog
        self._deliveries, self._ordered, self._mover = deliveries, ordered, mover
        self._waiters, self._quotas, self._workers, self._lanes = waiters, quotas, workers, lanes
        self._crowds = Crowds(waiters, workers.threads)
        self._loop = asyncio.get_running_loop()
        self._background: set[asyncio.Task[None]] = set()
        self._returning: dict[int, asyncio.Task[None]] = {}  # by token, what is given back just now
        self._closed = False

    async def close(self) -> None:
        """Let all polls return, and give back what those that were cancelled had been given."""
        self._closed = True
        self._crowds.dismiss()
        self._waiters.notify_all()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def poll(self, request: PollRequest) -> PollReply:
        if request.token <= NOBODY:
            raise UsageError("a poll names a token of its own: a random number from 1 up")
        if request.repeated and (returning := self._returning.get(request.token)) is not None:
            await asyncio.wait([returning])  # it would take away what this poll is handed under the token
        with self._quotas.polling(request):
            return await self._poll(request)

    async def _poll(self, request: PollRequest) -> PollReply:
        deadline = self._loop.time() + min(request.wait_ms, self._limits.poll_wait_ms) / 1000
        while True:
            sources = await self._sources(request)
            if sources[0][1].settings.mode == "ordered":
                reply = await self._poll_ordered(request, deadline)
            else:
                reply = await self._poll_shared(request, sources, deadline)
            if reply is not None:
                return reply

    async def _sources(self, request: PollRequest) -> list[Source]:
        """Who takes nothing of the slow lane does not wait for it (R42)."""
        place, lane = (request.topic, request.group), request.lane_messages > 0
        known = self._catalog.known_sources(*place, lane=lane)
        if known is None:
            look = self._catalog.all_sources if lane else self._catalog.sources
            known = await self._for_group(*place, look, *place)
        return known

    async def _for_group(
        self, topic: str, group: str, function: Callable[..., T], *args: Any, short: bool = False
    ) -> T:
        """In a thread, or at once if it is short; groups take turns."""
        return await self._workers.run_for((topic, group), function, *args, short=short)

    # ---- shared groups ----

    async def _poll_shared(
        self, request: PollRequest, sources: list[Source], deadline: float
    ) -> PollReply | None:
        """None: the group is another one now."""
        settings = sources[0][1].settings
        fresh_s = min(self._limits.poll_wait_ms, settings.lease_ms // 2) / 1000
        name = (request.topic, request.group, sources[-1][0].name)
        crowd = self._crowds.of(name, sources, partial(_keys, sources), fresh_s)
        allowed = asyncio.Event()  # set when the group's rate limit lets this poll look again
        at_once = request.repeated or request.wait_ms < _SHORT_MS
        with crowd.attended():
            while True:
                turn = crowd.begin() if at_once else await crowd.turn(deadline)
                if turn is None or self._closed:
                    return _reply(Handed(), settings)
                with turn:
                    if await self._sources(request) is not sources:
                        return None
                    hand_out = partial(self._hand_out, partial(self._look_in_turn, turn), False)
                    handed = await self._quotas.within(request, allowed, hand_out, ordered=False)
                if handed.worth_telling or self._loop.time() >= deadline or self._closed:
                    return _reply(handed, settings)
                at_once = not turn.looked
                if at_once:
                    await wait(allowed, deadline - self._loop.time())
                    allowed.clear()

    def _look_in_turn(self, turn: Permit, request: PollRequest) -> Coroutine[Any, Any, Handed]:
        turn.begin()  # now: whatever becomes of the poll, what it finds counts
        return self._looking(turn, request)

    async def _looking(self, turn: Permit, request: PollRequest) -> Handed:
        try:
            handed = await self._look(self._deliveries, request)
        except BaseException as error:
            turn.failed(error)
            raise
        if handed.worth_telling:
            turn.found(_messages(handed) >= request.messages)
        else:
            turn.found_nothing(self._until(handed.next_due))
        return handed

    def due_at(self, group_id: int, due_ms: int) -> None:
        """Another process knows that the group has something due then."""
        self._crowds.due(group_id, self._until(due_ms))

    # ---- ordered groups ----

    async def _poll_ordered(self, request: PollRequest, deadline: float) -> PollReply | None:
        """None: the group is not ordered any more."""
        hand_out = partial(self._hand_out, partial(self._look, self._ordered), True)
        watched = [HOLDERS]
        while True:
            sources = await self._sources(request)
            settings = sources[0][1].settings
            if settings.mode != "ordered":
                return None
            with self._waiters.listening(_keys(sources) + watched) as news:
                handed = await self._quotas.within(request, news, hand_out, ordered=True)
                until = self._loop.time() + self._until(handed.next_due)
                if not handed.worth_telling and self._loop.time() < deadline and not self._closed:
                    watched = [HOLDERS] if handed.watchful else []
                    await wait(news, min(deadline, until) - self._loop.time())
                    if news.is_set() or until <= deadline:
                        continue  # else nothing can be there that was not there before
                return _reply(handed, settings)

    # ---- handing out ----

    async def _hand_out(self, look: _Look, ordered: bool, request: PollRequest) -> Handed:
        """A poll that is cancelled meanwhile gives back what it was given."""
        looking = asyncio.ensure_future(look(request))
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            giving_back = asyncio.create_task(self._give_back(request, looking, ordered))
            self._background.add(giving_back)
            giving_back.add_done_callback(self._background.discard)
            self._returning[request.token] = giving_back
            giving_back.add_done_callback(lambda done: self._returning.pop(request.token, None))
            raise

    async def _look(self, poller: Deliveries | OrderedDeliveries, request: PollRequest) -> Handed:
        shared = poller is self._deliveries  # a look that was cut short may be begun anew
        short = shared and not request.repeated  # which is answered whole (I6)
        short = short and request.messages <= _FEW_MESSAGES and request.bytes <= self._limits.window_bytes
        handed = await self._for_group(request.topic, request.group, poller.poll, request, short=short)
        await self.depart(handed.departures, dead=True)
        if shared and handed.grants:
            group = (await self._sources(request))[0][1]
            handed.lanes = await self._lanes.view(group, request.lane_version)
        return handed

    async def _give_back(self, request: PollRequest, looking: Awaitable[Handed], ordered: bool) -> None:
        try:
            handed = await looking
        except PostroomError:
            return  # nothing was handed out
        # What it had before it has still, and is sent again what it did not receive of that. What another
        # broker has handed out under its token meanwhile was renewed by that, and stays (I6).
        fresh = handed.fresh if ordered or not request.on_delivery else []
        for one in fresh:
            place = (one.group, one.partition_id, request.token, one.until)
            try:
                await self._workers.run(self._store.progress.give_back, *place)
            except (GateClosed, GenerationChanged):
                pass  # the group was reset: nobody holds it
            except PostroomError as error:
                _log.warning("what a cancelled poll was given waits for its lease to end: %s", error)
        self.notify_groups(one.group.id for one in fresh)

    def _until(self, due_ms: int | None) -> float:
        """Seconds until something is due. A manual clock wakes all waiters when it is moved."""
        return 3600.0 if due_ms is None else max(0.001, (due_ms - self._store.now_ms()) / 1000)

    async def unpark(self, request: UnparkRequest) -> PollReply:
        return await self._for_group(request.topic, request.group, self._deliveries.parked.unpark, request)

    async def hand_over(self, topic: str, group: str, token: int, partition_ids: Sequence[int]) -> None:
        ended = await self._for_group(
            topic, group, self._ordered.hand_over, topic, group, token, partition_ids
        )
        self.notify_groups(ended)

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        outcome = await self._for_group(
            topic, group, self._deliveries.settle, topic, group, parts, short=_is_short(parts)
        )
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


def _is_short(parts: Sequence[Settle]) -> bool:
    """Acks may be begun anew; and few of them take no time, whoever sends them."""
    if len(parts) > _FEW_ACKS or sum(len(part.verdicts) for part in parts) > _FEW_ACKS:
        return False
    return all(verdict.kind == "ack" for part in parts for verdict in part.verdicts)


def _reply(handed: Handed, settings: GroupSettings) -> PollReply:
    return PollReply(
        tuple(handed.grants), settings.lease_ms, handed.draining, handed.revoked, handed.lost,
        handed.started_ms, handed.lanes,
    )  # fmt: skip


def _messages(handed: Handed) -> int:
    return sum(lease.last - lease.first + 1 for grant in handed.grants for lease in grant.leases)


def _keys(sources: Sequence[Source]) -> list[Key]:
    """What a poll of these sources waits for."""
    keys: list[Key] = [("partition", r.partition_id) for topic, _ in sources for r in topic.route.partitions]
    return keys + [("group", reader.id) for _, reader in sources]
