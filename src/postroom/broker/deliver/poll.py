"""Polls, and what comes of them: waiting, handing out, settling, and giving back what nobody received.

A poll registers for news, asks the store, and waits without a thread or a database connection until there is
news, something is due, or its time is up. Polls of a shared group wait in a queue (`poll_queue`, R41); in an
ordered group each asks for itself, since what it is to know depends on what it holds. Must never lose what
a cancelled poll was given: it is given back.

Acks that come with a poll are stored in its transaction if it asks the store at once. They never wait for a
limit on messages (I17), and for messages only a few milliseconds, if their sender has said that it may be:
where the poll would have to wait longer, they are stored before.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...config import Limits
from ...endpoint.endpoint import OnSettled
from ...endpoint.values import PollReply, PollRequest, Settle, SettleReply, UnparkRequest
from ...errors import GateClosed, GenerationChanged, PostroomError, UsageError
from ...model.delivery.delivery import NOBODY
from ...model.policy.settings import GroupSettings
from ...store.contract import Group, Store
from ...store.contract.values import WouldWaitError
from ..moves.departures import Mover
from ..publish.rates import Quotas
from ..topology.catalog_cache import CatalogCache, Source, sources_key
from ..waiters import Key, Waiters, wait
from ..workers import Workers
from .handed import Departure, Handed, Outcome, PartialPoll, PollAcks
from .ordered import OrderedDeliveries
from .poll_queue import Permit, PollQueue, PollQueues
from .shared import Deliveries
from .slow_lanes import Lanes

__all__ = ["HOLDERS", "PollVerbs", "Polling"]

_log = logging.getLogger("postroom.broker")

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
        self._queues = PollQueues(waiters, workers.threads, limits.tuning.broker)
        self._short_ms, self._acks_wait_ms = (
            limits.tuning.broker.short_poll_ms,
            limits.tuning.broker.acks_wait_ms,
        )
        self._loop, self._now_ms = asyncio.get_running_loop(), store.now_ms
        self._background: set[asyncio.Task[None]] = set()
        self._returning: dict[int, asyncio.Task[None]] = {}  # by token, what is given back just now
        self._closed = False

    async def close(self) -> None:
        """Let all polls return, and give back what those that were cancelled had been given."""
        self._closed = True
        self._queues.dismiss()
        self._waiters.notify_all()
        await asyncio.gather(*self._background, return_exceptions=True)

    async def settle_and_poll(
        self, topic: str, group: str, parts: Sequence[Settle], request: PollRequest, settled: OnSettled
    ) -> PollReply:
        """`settled` is called as soon as they are stored; before that, whatever is raised is about both."""
        if not _go_along(topic, parts) or (topic, group) != (request.topic, request.group):
            reply = await self.settle(topic, group, parts)
            settled(reply)
            return await self.poll(replace(request, empty_handed=False) if reply.away else request)
        along = _Along(PollAcks(topic, group, parts), settled)
        polled = await self.poll(request, along)
        await self._settle_first(along)  # the store was not asked: all polls are to return
        return polled

    async def _settle_first(self, along: _Along | None) -> None:
        if along is not None and along.settled is not None:
            acks = along.acks
            settled, along.settled = along.settled, None
            settled(await self.settle(acks.topic, acks.group, acks.parts))
            acks.outcome = Outcome()

    def _tell_settled(self, along: _Along | None) -> None:
        """To be called once the store was asked, whatever came of that."""
        if along is not None and along.settled is not None and along.acks.outcome is not None:
            settled, along.settled = along.settled, None
            self.notify_groups(along.acks.outcome.waiting)
            settled(_settle_reply(along.acks.outcome))

    async def poll(self, request: PollRequest, along: _Along | None = None) -> PollReply:
        if request.token <= NOBODY:
            raise UsageError("a poll names a token of its own: a random number from 1 up")
        if request.repeated and (returning := self._returning.get(request.token)) is not None:
            await asyncio.wait([returning])  # it would take away what this poll is handed under the token
        deadline = self._loop.time() + min(request.wait_ms, self._limits.poll_wait_ms) / 1000
        try:
            while True:
                sources = await self._sources(request)
                if sources[0][1].settings.mode == "ordered":
                    await self._settle_first(along)
                    reply = await self._poll_ordered(request, deadline)
                else:
                    reply = await self._poll_shared(request, sources, deadline, along)
                if reply is not None:
                    return reply
        finally:
            self._quotas.poll_ended(request)

    async def _sources(self, request: PollRequest) -> list[Source]:
        """What the poll reads. A poll that takes nothing of the slow lane does not wait for it (R42)."""
        key = sources_key(request.topic, request.group, request.lane_messages > 0)
        known: list[Source] | None = self._catalog.known(key)
        if known is None:
            topic, group = request.topic, request.group
            read = partial(self._catalog.sources, topic, group, lane=request.lane_messages > 0)
            known = await self._workers.run_for((topic, group), read)
        return known

    # ---- shared groups ----

    async def _poll_shared(
        self, request: PollRequest, sources: list[Source], deadline: float, along: _Along | None
    ) -> PollReply | None:
        """None: the group is another one now."""
        settings = sources[0][1].settings
        key = sources_key(request.topic, request.group, request.lane_messages > 0)
        fresh_s = min(self._limits.poll_wait_ms, settings.lease_ms // 2) / 1000
        name = (request.topic, request.group, sources[-1][0].name, *_part(request))
        queue = self._queues.of(name, sources, partial(_keys, sources), fresh_s)
        allowed = asyncio.Event()  # set when the group's rate limit lets this poll ask again
        at_once = request.repeated or request.wait_ms < self._short_ms
        with queue.attended():
            while True:
                permit = None
                if along is not None and not ((at_once or queue.lets_in) and self._quotas.off):
                    permit = await self._permit_soon(queue, request, along, deadline)
                if permit is None:
                    permit = queue.at_once() if at_once else await queue.permit(deadline)
                if permit is None or self._closed:
                    return _reply(Handed(), settings)
                try:
                    known = self._catalog.known(key)
                    if known is not sources and await self._sources(request) is not sources:
                        return None
                    group = sources[0][1]
                    if self._quotas.off:
                        handed = await self._hand_out_shared(group, permit, request, along)
                    else:
                        hand_out = partial(self._hand_out_shared, group, permit)
                        handed = await self._quotas.within(request, allowed, hand_out, ordered=False)
                finally:
                    permit.end()
                if handed.worth_telling or self._loop.time() >= deadline or self._closed:
                    return _reply(handed, settings)
                at_once = not permit.used
                if at_once:
                    await wait(allowed, deadline - self._loop.time())
                    allowed.clear()

    async def _permit_soon(
        self, queue: PollQueue, request: PollRequest, along: _Along, deadline: float
    ) -> Permit | None:
        """A permit that comes while the acks wait for messages, if they may; None: they are stored now."""
        wait_ms = min(request.acks_wait_ms, self._acks_wait_ms)
        if wait_ms and along.settled is not None and self._quotas.off:
            soon = self._loop.time() + wait_ms / 1000
            permit = await queue.permit(min(soon, deadline))
            if permit is not None:
                return permit
        await self._settle_first(along)
        return None

    async def _hand_out_shared(
        self, group: Group, permit: Permit, request: PollRequest, along: _Along | None = None
    ) -> Handed:
        """What the group has for this poll: asked for here if that takes no time, else in a thread."""
        if not permit.waited:
            await asyncio.sleep(0)  # whoever polls on and on lets others have the event loop
        permit.begin()  # now: whatever becomes of the poll, what it finds counts
        handed, acks = None, None if along is None else along.acks
        short = not request.repeated and request.messages <= _FEW_MESSAGES  # else it is answered whole (I6)
        if short and request.bytes <= self._limits.window_bytes:
            try:
                handed = self._workers.run_here(self._deliveries.poll, request, acks, permit.news)
            except WouldWaitError:
                request = replace(request, repeated=True)  # it may have been granted something (I6)
            except BaseException as error:
                permit.failed(error)
                raise
            finally:
                self._tell_settled(along)
        aside = group.settings.slow_lane.on or request.lane_version
        if handed is not None and not handed.departures and not (aside and handed.grants):
            self._tell(permit, request, handed)
            return handed
        look = self._look(group, permit, request, handed, along)
        return await self._unless_cancelled(request, look, False)

    async def _look(
        self, group: Group, permit: Permit, request: PollRequest, handed: Handed | None, along: _Along | None
    ) -> Handed:
        try:
            if handed is None:
                key, acks = (request.topic, request.group), None if along is None else along.acks
                news = None if request.repeated else permit.news
                try:
                    handed = await self._workers.run_for(key, self._deliveries.poll, request, acks, news)
                finally:
                    self._tell_settled(along)
            await self.depart(handed.departures, dead=True)
            if handed.grants:
                handed.lanes = await self._lanes.view(group, request.lane_version)
        except BaseException as error:
            permit.failed(error)
            raise
        self._tell(permit, request, handed)
        return handed

    def _tell(self, permit: Permit, request: PollRequest, handed: Handed) -> None:
        if not handed.worth_telling:
            permit.found_nothing(self._until(handed.next_due))
        elif handed.took_all:
            permit.found(False, self._until(handed.next_due))
        else:
            permit.found(_messages(handed) >= request.messages)

    def due_in(self, group_id: int, seconds: float) -> None:
        """Another process knows that the group has something due then."""
        self._queues.due(group_id, seconds)

    # ---- ordered groups ----

    async def _poll_ordered(self, request: PollRequest, deadline: float) -> PollReply | None:
        """None: the group is not ordered any more."""
        watched = [HOLDERS]
        while True:
            sources = await self._sources(request)
            settings = sources[0][1].settings
            if settings.mode != "ordered":
                return None
            with self._waiters.listening(_keys(sources) + watched) as news:
                handed = await self._quotas.within(request, news, self._hand_out_ordered, ordered=True)
                until = self._loop.time() + self._until(handed.next_due)
                if not handed.worth_telling and self._loop.time() < deadline and not self._closed:
                    watched = [HOLDERS] if handed.watchful else []
                    await wait(news, min(deadline, until) - self._loop.time())
                    if news.is_set() or until <= deadline:
                        continue  # else nothing can be there that was not there before
                return _reply(handed, settings)

    async def _hand_out_ordered(self, request: PollRequest) -> Handed:
        return await self._unless_cancelled(request, self._look_ordered(request), True)

    async def _look_ordered(self, request: PollRequest) -> Handed:
        handed = await self._workers.run_for((request.topic, request.group), self._ordered.poll, request)
        await self.depart(handed.departures, dead=True)
        return handed

    # ---- handing out ----

    async def _unless_cancelled(
        self, request: PollRequest, look: Coroutine[Any, Any, Handed], ordered: bool
    ) -> Handed:
        """A poll that is cancelled meanwhile gives back what it was given."""
        looking = asyncio.ensure_future(look)
        try:
            return await asyncio.shield(looking)
        except asyncio.CancelledError:
            giving_back = asyncio.create_task(self._give_back(request, looking, ordered))
            self._background.add(giving_back)
            giving_back.add_done_callback(self._background.discard)
            self._returning[request.token] = giving_back
            giving_back.add_done_callback(lambda done: self._returning.pop(request.token, None))
            raise

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
        return 3600.0 if due_ms is None else max(0.001, (due_ms - self._now_ms()) / 1000)

    # ---- settling ----

    async def unpark(self, request: UnparkRequest) -> PollReply:
        key = (request.topic, request.group)
        return await self._workers.run_for(key, self._deliveries.parked.unpark, request)

    async def hand_over(self, topic: str, group: str, token: int, partition_ids: Sequence[int]) -> None:
        asked = (topic, group, token, partition_ids)
        self.notify_groups(await self._workers.run_for((topic, group), self._ordered.hand_over, *asked))

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        settle, outcome = self._deliveries.settle, None
        if _few_acks(parts):
            with suppress(WouldWaitError):  # acks may be begun anew
                outcome = self._workers.run_here(settle, topic, group, parts)
        if outcome is None:
            outcome = await self._workers.run_for((topic, group), settle, topic, group, parts)
        if outcome.departures:
            await self.depart(outcome.departures, dead=True)
        if outcome.waiting:
            self.notify_groups(outcome.waiting)
        return _settle_reply(outcome)

    async def depart(self, departures: Sequence[Departure], *, dead: bool) -> None:
        for leaving in departures:
            await self._mover.move(
                leaving.group, leaving.partition, leaving.partition_id, leaving.deliveries, dead=dead
            )

    def notify_groups(self, group_ids: Iterable[int]) -> None:
        self._waiters.notify(*[("group", group_id) for group_id in group_ids])


@dataclass(slots=True)
class _Along:
    """Acks that came with a poll, and who is told once they are stored; None: it was told."""

    acks: PollAcks
    settled: OnSettled | None


class PollVerbs:
    """The part of a broker that hands out and settles."""

    _polling: Polling

    def poll(self, request: PollRequest) -> Coroutine[Any, Any, PollReply]:
        return self._polling.poll(request)

    def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> Coroutine[Any, Any, SettleReply]:
        return self._polling.settle(topic, group, parts)

    def settle_and_poll(
        self, topic: str, group: str, parts: Sequence[Settle], request: PollRequest, settled: OnSettled
    ) -> Coroutine[Any, Any, PollReply]:
        return self._polling.settle_and_poll(topic, group, parts, request, settled)

    async def unpark(self, request: UnparkRequest) -> PollReply:
        return await self._polling.unpark(request)

    async def hand_over(self, topic: str, group: str, token: int, partition_ids: Sequence[int]) -> None:
        await self._polling.hand_over(topic, group, token, partition_ids)


def _go_along(topic: str, parts: Sequence[Settle]) -> bool:
    """Whether these may be stored in the transaction of a poll: few acks, and of the topic itself."""
    return bool(parts) and {part.topic for part in parts} == {topic} and _few_acks(parts)


def _settle_reply(outcome: Outcome) -> SettleReply:
    return SettleReply(tuple(outcome.lost), tuple(outcome.kept), tuple(outcome.away))


def _part(request: PollRequest) -> tuple[str, ...]:
    """Polls of other partitions find something else: they wait in a queue of their own."""
    return tuple(map(str, sorted(request.only))) if isinstance(request, PartialPoll) else ()


def _few_acks(parts: Sequence[Settle]) -> bool:
    """Whether there are acks alone, and so few that they take no time, whoever sends them."""
    if len(parts) > _FEW_ACKS:
        return False
    verdicts = [verdict.kind for part in parts for verdict in part.verdicts]
    return len(verdicts) <= _FEW_ACKS and verdicts.count("ack") == len(verdicts)


def _reply(handed: Handed, settings: GroupSettings) -> PollReply:
    return PollReply(
        tuple(handed.grants), settings.lease_ms, handed.draining, handed.revoked, handed.lost,
        handed.started_ms, handed.lanes,
    )  # fmt: skip


def _messages(handed: Handed) -> int:
    return sum([lease.last - lease.first + 1 for grant in handed.grants for lease in grant.leases])


def _keys(sources: Sequence[Source]) -> list[Key]:
    """What a poll of these sources waits for."""
    keys: list[Key] = [("partition", r.partition_id) for topic, _ in sources for r in topic.route.partitions]
    return keys + [("group", reader.id) for _, reader in sources]
