"""Intake: what a channel has fetched for its consumers, never more than they may have.

Runs in the connection's event loop. Prefetch is what is in flight: a channel with `prefetch_count=4` has at
most four messages that are not settled, whatever queues they are from, and asks for exactly what it may have
more. With several queues they take turns. A poll may bring more than there is room for by then; that is
released, which is no attempt, so that another worker has it. Leases are renewed by the heartbeat of the
connection for as long as the process lives, however long a task takes.

What expired once comes alone (I14); a task may take hours, so after a lease in which nothing happened to this
process more is asked for beside it.

Must never hand out a message that its queue's bindings do not take, and never forget one it has fetched.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from ...client.app.handler import ACK, RELEASE, Outcome
from ...client.connection import Connection
from ...client.consumer.driven import DrivenConsumer
from ...client.consumer.fetch import Fetcher
from ...client.message import Received
from ...config import DEFAULTS
from ...endpoint.values import PollReply
from ...tasks import end
from . import letters
from .queues import Source

__all__ = ["Arrival", "Intake"]

_MOST = DEFAULTS.window_messages  # in flight where the channel has no limit of its own
_ENDLESS = "3650d"  # handling may take so long


@dataclass(frozen=True, slots=True)
class Arrival:
    """A message for a consumer of the channel."""

    consumer_tag: str
    tag: int  # of the delivery
    payload: dict[str, Any]


class _PatientFetcher(Fetcher):
    """Asks when it is told to."""

    def __init__(self, *parts: Any, **how: Any) -> None:
        super().__init__(*parts, **how)
        self._alone_until = 0.0  # by the loop's clock

    async def _accept(self, reply: PollReply, token: int, sent_ms: int) -> None:
        if any(lease.alone for grant in reply.grants for lease in grant.leases):
            self._alone_until = asyncio.get_running_loop().time() + reply.lease_ms / 1000
        await super()._accept(reply, token, sent_ms)

    async def ask(self, limit: int, wait_ms: int | None) -> None:
        """Ask for at most so many once that is allowed; without waiting if `wait_ms` is 0."""
        while (left := self._rest_s()) > 0:
            if wait_ms == 0:
                return
            self._in_flight.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._in_flight.changed.wait()
        request = replace(self._request(), messages=limit)
        request = request if wait_ms is None else replace(request, wait_ms=wait_ms)
        sent_ms = self._endpoint.reached_ms()
        reply = await self._ask(request)
        if reply is not None:
            await self._accept(reply, request.token, sent_ms)

    def _rest_s(self) -> float:
        """For how long nothing may be asked for: what is in flight is to be alone, or to be settled first."""
        if not self._in_flight.messages:
            return 0.0
        until = max(self._drain_until, self._alone_until if self._in_flight.alone else 0.0)
        return until - asyncio.get_running_loop().time()


class Reader(DrivenConsumer):
    """A member of the group of a queue that fetches when it is told to."""

    source: Source
    retired = False  # it fetches no more, and leaves when everything is settled

    def _equip(self, order: str | None = None) -> None:
        super()._equip(order)
        settings = self._settings
        self._fetcher: Any = _PatientFetcher(
            self._endpoint, self._who, self._in_flight, self._settler, settings.window, on_delivery=False
        )

    @classmethod
    async def begun(cls, mq: Connection, source: Source) -> Reader:
        plain = mq.consumer(source.topic, source.group, max_handling=_ENDLESS)
        reader = cls.of(plain)
        mq._consumers[mq._consumers.index(plain)] = reader
        reader.source = source
        await reader.__aenter__()
        reader.by_hand()
        return reader

    async def fetch(self, limit: int, wait_ms: int | None = None) -> list[Received]:
        await self._fetcher.ask(limit, wait_ms)
        return await self._take(limit)

    def verdict(self, outcome: Outcome) -> Outcome:
        """Replies and events have no dead letters, and so no attempts that could end there."""
        if not self.source.temporary:
            return outcome
        return {"dead": ACK, "retry": RELEASE}.get(outcome.kind, outcome)


@dataclass(slots=True)
class _Subscription:
    consumer_tag: str
    readers: list[Reader]
    no_ack: bool
    task: asyncio.Task[None] | None = None  # of one that needs no acks


class Intake:
    def __init__(
        self,
        mq: Connection,
        arrived: Callable[[Arrival], None],
        failed: Callable[[Exception], None],
    ) -> None:
        self._mq, self._arrived, self._failed = mq, arrived, failed
        self._subscriptions: dict[str, _Subscription] = {}
        self._getters: dict[Source, Reader] = {}  # for single messages
        self._retired: list[Reader] = []
        self._in_flight: dict[int, tuple[Reader, Received, str]] = {}
        self._unread = 0  # of consumers without acks: handed over and not taken yet
        self._tags = itertools.count(1)
        self._round = 0
        self._prefetch = 0
        self._changed = asyncio.Event()
        self._asking: dict[Reader, asyncio.Task[list[Received]]] = {}
        self._serving: asyncio.Task[None] | None = None
        self._gather_s = DEFAULTS.tuning.client.prefetch_gather_s

    # ---- consumers ----

    async def add(self, consumer_tag: str, sources: Iterable[Source], no_ack: bool) -> None:
        readers = [await Reader.begun(self._mq, source) for source in sources]
        found = self._subscriptions[consumer_tag] = _Subscription(consumer_tag, readers, no_ack)
        if no_ack:
            found.task = asyncio.create_task(self._watched(self._hand_over(found)))
        elif self._serving is None:
            self._serving = asyncio.create_task(self._watched(self._serve()))
        self._changed.set()

    async def remove(self, consumer_tag: str) -> None:
        """Fetch no more for it. What it has been given may still be settled."""
        found = self._subscriptions.pop(consumer_tag, None)
        if found is None:
            return
        if found.task is not None:
            await end((found.task,))
        await end([self._asking.pop(one) for one in found.readers if one in self._asking])
        for reader in found.readers:
            reader.retired = True
            self._retired.append(reader)
            await self._leave_if_done(reader)
        self._changed.set()

    async def _leave_if_done(self, reader: Reader) -> None:
        if reader in self._retired and not any(one is reader for one, _, _ in self._in_flight.values()):
            self._retired.remove(reader)
            await reader.finish()

    def limit(self, prefetch: int) -> None:
        self._prefetch = prefetch
        self._changed.set()

    async def get(self, source: Source, no_ack: bool) -> Arrival | None:
        """One message that is there now."""
        reader = self._getters.get(source)
        if reader is None:
            reader = self._getters[source] = await Reader.begun(self._mq, source)
        for message in await reader.fetch(1, 0):
            return self._taken(reader, message, "", no_ack)
        return None

    # ---- fetching ----

    @property
    def _room(self) -> int:
        return max(0, (self._prefetch or _MOST) - len(self._in_flight))

    async def _watched(self, work: Any) -> None:
        try:
            await work
        except Exception as error:
            self._failed(error)

    async def _serve(self) -> None:
        """For the consumers that ack."""
        while True:
            self._changed.clear()
            readers = self._readers()
            if readers and self._room:
                await self._gather_room()
                if not (len(readers) > 1 and await self._sweep(readers)):
                    await self._wait_for_any(readers)
            else:
                await self._changed.wait()

    def _readers(self) -> list[Reader]:
        """Those that may be asked; another is the first each time."""
        found = [r for one in self._subscriptions.values() if not one.no_ack for r in one.readers]
        self._round += 1
        at = self._round % len(found) if found else 0
        return found[at:] + found[:at]

    async def _gather_room(self) -> None:
        """Tasks that take no time free their room one by one: few polls for many messages are cheaper."""
        if self._prefetch and 2 * self._room < self._prefetch:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._gather_s):
                    while 2 * self._room < self._prefetch:
                        await self._changed.wait()
                        self._changed.clear()

    async def _sweep(self, readers: list[Reader]) -> bool:
        """Ask each queue for what is there now, in turn; tells whether something was."""
        found = False
        for reader in readers:
            if self._room and reader not in self._asking and not reader.retired:
                messages = await reader.fetch(self._room, 0)
                self._hand_out(reader, messages)
                found = found or bool(messages)
        return found

    async def _wait_for_any(self, readers: list[Reader]) -> None:
        """Wait until a message comes, or something else changes."""
        for reader in readers:
            if reader not in self._asking:
                self._asking[reader] = asyncio.create_task(reader.fetch(self._room))
        changed = asyncio.create_task(self._changed.wait())
        await asyncio.wait([changed, *self._asking.values()], return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        for reader in [one for one, asked in self._asking.items() if asked.done()]:
            asked = self._asking.pop(reader)
            if not asked.cancelled():
                self._hand_out(reader, asked.result())

    def _hand_out(self, reader: Reader, messages: list[Received]) -> None:
        tag = next((t for t, one in self._subscriptions.items() if reader in one.readers), None)
        for message in messages:
            if tag is None or not self._room:
                reader.settle([message], RELEASE)
            elif (arrival := self._taken(reader, message, tag, no_ack=False)) is not None:
                self._arrived(arrival)

    async def _hand_over(self, one: _Subscription) -> None:
        """For a consumer without acks: what it gets is settled."""

        async def each(reader: Reader) -> None:
            while True:
                while self._unread >= _MOST:
                    self._changed.clear()
                    await self._changed.wait()
                for message in await reader.fetch(_MOST):
                    arrival = self._taken(reader, message, one.consumer_tag, no_ack=True)
                    if arrival is not None:
                        self._unread += 1
                        self._arrived(arrival)

        async with asyncio.TaskGroup() as group:
            for reader in one.readers:
                group.create_task(each(reader))

    def read(self) -> None:
        """One message of a consumer without acks was taken."""
        self._unread -= 1
        self._changed.set()

    def _taken(self, reader: Reader, message: Received, consumer: str, no_ack: bool) -> Arrival | None:
        """The message as kombu wants it; None if it is not for this queue."""
        tag = next(self._tags)
        payload = letters.opened(message, tag)
        fits = reader.source.takes(letters.routing_key(payload))
        if no_ack or not fits:
            reader.settle([message], ACK)
        else:
            self._in_flight[tag] = (reader, message, consumer)
        return Arrival(consumer, tag, payload) if fits else None

    # ---- settling ----

    def settle(self, tags: Iterable[int], outcome: Outcome) -> None:
        for tag in tags:
            found = self._in_flight.pop(tag, None)
            if found is not None:
                reader, message, _ = found
                reader.settle([message], reader.verdict(outcome))
                if reader.retired:
                    self._leaving = asyncio.create_task(self._leave_if_done(reader))
        self._changed.set()

    def settle_up_to(self, last: int, outcome: Outcome) -> None:
        self.settle([tag for tag in self._in_flight if tag <= last], outcome)

    def release_all(self) -> None:
        self.settle(list(self._in_flight), RELEASE)

    async def close(self) -> None:
        """Settle what is on its way, release the rest, and leave the groups."""
        tasks = [self._serving, *(one.task for one in self._subscriptions.values()), *self._asking.values()]
        await end([task for task in tasks if task is not None])
        readers = [r for one in self._subscriptions.values() for r in one.readers]
        readers += [*self._getters.values(), *self._retired]
        self._subscriptions.clear()
        self._in_flight.clear()
        await asyncio.gather(*(reader.finish() for reader in readers), return_exceptions=True)
