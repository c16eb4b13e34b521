"""What a server needs of a broker, that of the wire and that of HTTP; and a broker that counts what it is
asked.

`Broker` is one, and so is the same broker counted. Its operations take one more argument where the table says
so (`Operation.told`): a server adds who asks, and no client says it itself (I23).

A metered broker counts every operation, and nothing else, into its `figures`. Everything that is no operation
(`store`, `in_thread`, `duties`, …) is the broker's own, so that it can be served wherever the broker can.
Must never change an answer or an error.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from types import TracebackType
from typing import Any, Protocol

from ..address import Address
from ..endpoint.asking import AskingEndpoint
from ..endpoint.endpoint import Endpoint, LoneAppends, OnSettled, Told
from ..endpoint.operations import Operation
from ..endpoint.values import Beat, Fetched, Grant, Held, PollReply, PollRequest, Settle, SettleReply
from ..errors import PostroomError
from ..model.audit import State
from ..model.delivery.delivery import Span
from ..model.messages.batch import read_header
from ..store.contract import Appended, Store, Topic
from .access import InThread
from .broker import Broker
from .deliver.fetch import Wanted
from .duties import DutyRunner
from .metrics import Figures, Labels, group_label, topic_label
from .presence import Presence
from .topology.catalog_cache import Listing

__all__ = ["MeteredBroker", "Servable", "embedded", "figures_of", "measured", "unmeasured"]


class Servable(Endpoint, Protocol):
    """An endpoint, and the process that it lives in."""

    @property
    def store(self) -> Store: ...

    @property
    def in_thread(self) -> InThread:
        """Runs blocking work in one of the broker's threads."""

    @property
    def presence(self) -> Presence: ...

    @property
    def duties(self) -> DutyRunner: ...

    @property
    def listing(self) -> Listing: ...

    async def append(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        *,
        due_at: int = 0,
        ids: bytes = b"",
        producer: str = "",
        owner: str = "",
        in_line: asyncio.Event | None = None,
    ) -> Appended:
        """Store a batch of a client: see `Endpoint` and `Broker`."""

    def append_soon(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        producer: str,
        told: Told,
        *,
        owner: str | None = None,
        gone: Callable[[], bool] | None = None,
    ) -> bool:
        """Queue a batch, if nothing has to be waited for before: see `Endpoint` and `Broker`."""

    async def fetch_each(self, wanted: Sequence[Wanted], max_bytes: int) -> list[Fetched]:
        """Returns what there is of several partitions now, for Kafka clients."""

    def arrivals(self, partition_ids: Iterable[int]) -> AbstractContextManager[asyncio.Event]:
        """Returns an event that is set when something arrives in one of these partitions."""

    async def catalog_topic(self, name: str, *, fresh: bool = False) -> Topic:
        """Returns the topic as the catalog has it; `fresh`, as it is now."""

    async def identity_key(self) -> bytes:
        """Returns the key that tells apart the ids of principals' producers."""

    async def audited(
        self,
        action: str,
        subject: tuple[str, str],
        work: Callable[[], Awaitable[Any]],
        *,
        asked: State | None = None,
        before: State | None = None,
        after: Callable[[Any], State | None] = ...,
        lasting: bool = False,
    ) -> Any:
        """Does an administrative action that is no operation, with its entry in the audit log."""

    async def add_shards(self, shards: Mapping[str, Address]) -> None:
        """Further databases of the queue, while it is in use. InvalidSetting if one cannot be that shard."""


def measured(broker: Servable) -> Servable:
    """Returns the broker so that what it is asked is counted."""
    return MeteredBroker(broker, Figures()) if isinstance(broker, Broker) else broker


def unmeasured(broker: Servable) -> Servable:
    """Returns the broker itself: what it is asked there is not counted."""
    return broker.itself if isinstance(broker, MeteredBroker) else broker


def embedded(endpoint: Endpoint) -> Broker | None:
    """Returns the broker in this process that the endpoint is; None if it is somewhere else."""
    found = endpoint.itself if isinstance(endpoint, MeteredBroker) else endpoint
    return found if isinstance(found, Broker) else None


def figures_of(broker: Endpoint) -> Figures | None:
    """Returns what was counted; None if this broker is not measured."""
    return broker.figures if isinstance(broker, MeteredBroker) else None


class _Counted:
    """Counts one call, however it ends."""

    __slots__ = ("_began", "_figures", "_operation")

    def __init__(self, figures: Figures, operation: str) -> None:
        self._figures, self._operation = figures, operation

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._figures.ended(self._operation, time.perf_counter() - self._began, error)


class MeteredBroker(AskingEndpoint):
    """A broker that counts what it is asked."""

    def __init__(self, broker: Broker, figures: Figures) -> None:
        self.itself, self.figures = broker, figures
        broker.watch(figures)

    async def _ask(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        with _Counted(self.figures, operation.name):
            return await getattr(self.itself, operation.name)(**arguments)

    # ---- the process that it lives in ----

    @property
    def store(self) -> Store:
        return self.itself.store

    @property
    def in_thread(self) -> InThread:
        return self.itself.in_thread

    @property
    def presence(self) -> Presence:
        return self.itself.presence

    @property
    def duties(self) -> DutyRunner:
        return self.itself.duties

    @property
    def listing(self) -> Listing:
        return self.itself.listing

    async def fetch_each(self, wanted: Sequence[Wanted], max_bytes: int) -> list[Fetched]:
        with _Counted(self.figures, "fetch"):
            return await self.itself.fetch_each(wanted, max_bytes)

    def arrivals(self, partition_ids: Iterable[int]) -> AbstractContextManager[asyncio.Event]:
        return self.itself.arrivals(partition_ids)

    async def catalog_topic(self, name: str, *, fresh: bool = False) -> Topic:
        return await self.itself.catalog_topic(name, fresh=fresh)

    async def identity_key(self) -> bytes:
        return await self.itself.identity_key()

    async def audited(self, *args: Any, **named: Any) -> Any:
        return await self.itself.audited(*args, **named)

    async def add_shards(self, shards: Mapping[str, Address]) -> None:
        await self.itself.add_shards(shards)

    def now_ms(self) -> int:
        return self.itself.now_ms()

    def reached_ms(self) -> int:
        return self.itself.reached_ms()

    async def close(self) -> None:
        await self.itself.close()

    # ---- operations that are about messages ----

    async def append(
        self, topic: str, partition_id: int, batch: bytes, *, due_at: int = 0, **more: Any
    ) -> Appended:
        with _Counted(self.figures, "append"):
            stored = await self.itself.append(topic, partition_id, batch, due_at=due_at, **more)
        self._count_stored(topic, batch, stored, due_at)
        return stored

    def append_soon(
        self, topic: str, partition_id: int, batch: bytes, producer: str, told: Told, **more: Any
    ) -> bool:
        began = time.perf_counter()

        def counted(found: Appended | PostroomError) -> None:
            failure = found if isinstance(found, PostroomError) else None
            self.figures.ended("append", time.perf_counter() - began, failure)
            if not isinstance(found, PostroomError):
                self._count_stored(topic, batch, found)
            told(found)

        return self.itself.append_soon(topic, partition_id, batch, producer, counted, **more)

    def lone_append(self, topic: str, partition_id: int) -> LoneAppends | None:
        lone = self.itself.lone_append(topic, partition_id)
        return None if lone is None else _MeteredLone(self, topic, lone)

    def _count_stored(self, topic: str, batch: bytes, stored: Appended, due_at: int = 0) -> None:
        figures, label = self.figures, (topic_label(topic),)
        header = read_header(batch)
        repeats = header.records if stored.duplicate else len(stored.repeats)
        if repeats:
            figures.duplicates.add(label, repeats)
        if repeats < header.records:
            (figures.delayed if due_at else figures.published).add(label, header.records - repeats)
            figures.batches.add(label)
            figures.published_bytes.add(label, header.size)

    async def poll(self, request: PollRequest) -> PollReply:
        with _Counted(self.figures, "poll"):
            reply = await self.itself.poll(request)
        self._count_delivered(request, reply)
        return reply

    def _count_delivered(self, request: PollRequest, reply: PollReply) -> None:
        leases = [lease for grant in reply.grants for lease in grant.leases]
        if leases:
            figures, label = self.figures, (topic_label(request.topic), group_label(request.group))
            again = sum(lease.last - lease.first + 1 for lease in leases if lease.attempt > 1)
            figures.delivered.add(label, sum(lease.last - lease.first + 1 for lease in leases))
            figures.deliveries.add(label, len(leases))
            if again:
                figures.redelivered.add(label, again)
            self._count_waits(request.topic, label, reply.grants)

    def _count_waits(self, topic: str, label: Labels, grants: Sequence[Grant]) -> None:
        """Count how long messages waited that are handed out for the first time, once for each batch.

        What comes from a topic of the group's own has been read before, or waits on purpose.
        """
        now = self.itself.now_ms()
        for grant in grants:
            if grant.topic == topic:
                for appended_at, messages in _first_read(grant):
                    self.figures.first_waits.add(label, max(0, now - appended_at) / 1000, messages)

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        with _Counted(self.figures, "settle"):
            reply = await self.itself.settle(topic, group, parts)
        self._count_settled(topic, group, parts, reply)
        return reply

    async def settle_and_poll(
        self, topic: str, group: str, parts: Sequence[Settle], request: PollRequest, settled: OnSettled
    ) -> PollReply:
        def counted(reply: SettleReply) -> None:
            self._count_settled(topic, group, parts, reply)
            settled(reply)

        with _Counted(self.figures, "settle_and_poll"):
            found = await self.itself.settle_and_poll(topic, group, parts, request, counted)
        self._count_delivered(request, found)
        return found

    def _count_settled(self, topic: str, group: str, parts: Sequence[Settle], reply: SettleReply) -> None:
        label = (topic_label(topic), group_label(group))
        sums: dict[str, int] = {}
        for part in parts:
            if part not in reply.away:
                for verdict in part.verdicts:
                    if verdict.line is not None:  # what is parked is acked beside it, and not settled
                        sums["ack"] = sums.get("ack", 0) - verdict.line.messages
                    else:
                        sums[verdict.kind] = sums.get(verdict.kind, 0) + verdict.last - verdict.first + 1
        for kind, messages in sums.items():
            self.figures.settled.add((*label, kind), max(0, messages))
        if reply.lost:
            self.figures.lost.add(label, sum(len(spans) for _, spans in reply.lost))

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        with _Counted(self.figures, "beat"):
            return self.itself.beat(beats)


class _MeteredLone:
    """Lone batches of a topic. What was tried in vain is counted when it is known what became of it."""

    def __init__(self, broker: MeteredBroker, topic: str, lone: LoneAppends) -> None:
        self._broker, self._topic, self._lone = broker, topic, lone
        self.yielded = lone.yielded

    def store_alone(self, partition_id: int, batch: bytes) -> Appended | None:
        began = time.perf_counter()
        stored = self._lone.store_alone(partition_id, batch)
        if stored is not None:
            self._broker.figures.ended("append", time.perf_counter() - began, None)
            self._broker._count_stored(self._topic, batch, stored)
        return stored


_last = attrgetter("last_offset")


def _first_read(grant: Grant) -> Iterator[tuple[int, int]]:
    """Yield when each batch was stored, and how many messages of it are handed out for the first time."""
    for lease in grant.leases:
        if lease.attempt == 1:
            for at in range(bisect_left(grant.batches, lease.first, key=_last), len(grant.batches)):
                batch = grant.batches[at]
                if batch.base_offset > lease.last:
                    break
                messages = min(batch.last_offset, lease.last) - max(batch.base_offset, lease.first) + 1
                yield batch.appended_at, messages
