"""An endpoint in memory for tests of the client, with faults on demand.

Honest where it counts: offsets are dense, producer sequences are checked by `model.sequence`, deliveries are
decided by `model.delivery`. `faults` are called before and after each call and may raise, wait or lie still.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from postroom.clock import ManualClock
from postroom.endpoint.endpoint import OnSettled, Told
from postroom.endpoint.values import (
    Beat,
    DeadLetters,
    Fetched,
    Grant,
    GroupInfo,
    Held,
    Lag,
    Lease,
    PollReply,
    PollRequest,
    ResetPlan,
    Settle,
    SettleReply,
    TopicInfo,
)
from postroom.errors import PartitionSealed, PostroomError, UnknownPartition, UnknownTopic
from postroom.model.delivery import delivery, settlement
from postroom.model.delivery.delivery import Ask, Delivery, Kind, Settlement, Span, Terms
from postroom.model.messages.batch import (
    BatchHeader,
    TopicBounds,
    read_header,
    records,
    verify,
    with_base_offset,
)
from postroom.model.messages.sequence import SequenceState, check, remember
from postroom.model.policy.bounds import Positions
from postroom.model.policy.settings import GroupSettings, GroupWish, Start, TopicSettings
from postroom.model.topology.route import Range, Route, even_ranges
from postroom.store.contract import Appended, StoredBatch

Fault = Callable[[], Awaitable[None]]
KINDS = {"ack": Kind.ACK, "retry": Kind.RETRY, "release": Kind.RELEASE}


@dataclass
class Partition:
    topic: str
    number: int
    batches: list[StoredBatch] = field(default_factory=list)
    producers: dict[int, SequenceState] = field(default_factory=dict)
    sealed: bool = False

    @property
    def end(self) -> int:
        return self.batches[-1].last_offset + 1 if self.batches else 0


@dataclass
class Progress:
    cursor: int = 0
    rows: dict[int, Delivery] = field(default_factory=dict)

    def apply(self, change: delivery.Change) -> None:
        self.cursor = change.cursor
        for first in change.drop:
            self.rows.pop(first, None)
        self.rows.update((d.first, d) for d in change.put)

    def sorted(self) -> list[Delivery]:
        return [self.rows[first] for first in sorted(self.rows)]


class FakeEndpoint:
    """`on[verb]` is a queue of faults: each is taken by one call and runs before it (or `after[verb]`)."""

    def __init__(
        self, clock: ManualClock | None = None, *, partitions: int = 4, topic: str = "orders"
    ) -> None:
        self.clock = clock or ManualClock()
        self.partitions: dict[int, Partition] = {}
        self.routes: dict[str, Route] = {}
        self.group = GroupSettings()
        self.progress: dict[int, Progress] = defaultdict(Progress)
        self.on: dict[str, deque[Fault]] = defaultdict(deque)
        self.after: dict[str, deque[Fault]] = defaultdict(deque)
        self.calls: list[tuple[str, object]] = []
        self.short_way = False  # batches are queued, and the producer is told (`append_soon`)
        self.queued: set[asyncio.Task[Appended]] = set()
        self.at_once = False  # batches that come alone are stored in the call (`lone_append`)
        self.turn_used = False  # one was, in this turn of the loop
        self.settled: list[list[Settle]] = []
        self.together: list[tuple[list[Settle], PollRequest]] = []  # settled with a poll
        self.delayed: list[tuple[int, int, bytes, bytes]] = []  # partition id, due moment, batch, ids
        self.beats: list[Beat] = []
        self.members: set[str] = set()
        self.news = asyncio.Event()
        self.polled = asyncio.Event()  # a poll has come
        self.closed = False
        self.add_topic(topic, partitions)

    def add_topic(self, name: str, partitions: int) -> None:
        ranges = []
        for number, (first, last) in enumerate(even_ranges(partitions)):
            partition_id = len(self.partitions) + 1
            self.partitions[partition_id] = Partition(name, number)
            ranges.append(Range(first, last, number, partition_id))
        version = self.routes[name].version + 1 if name in self.routes else 1
        self.routes[name] = Route(name, version, tuple(ranges))

    # ---- looking ----

    def headers(self, partition_id: int | None = None) -> list[BatchHeader]:
        chosen = [p for i, p in self.partitions.items() if partition_id in (None, i)]
        return [read_header(b.data) for p in chosen for b in p.batches]

    def values(self, partition_id: int | None = None) -> list[bytes]:
        chosen = [p for i, p in self.partitions.items() if partition_id in (None, i)]
        return [r.value or b"" for p in chosen for b in p.batches for r in records(b.data)]

    def count(self, verb: str) -> int:
        return sum(name == verb for name, _ in self.calls)

    async def _fault(self, queues: dict[str, deque[Fault]], verb: str) -> None:
        if queues[verb]:
            await queues[verb].popleft()()

    # ---- catalog and log ----

    def now_ms(self) -> int:
        return self.clock.now_ms()

    def reached_ms(self) -> int:
        return self.clock.now_ms()

    async def topics(self) -> list[TopicInfo]:
        return [TopicInfo(name, 1, TopicSettings(), 0, 0, (), False) for name in self.routes]

    async def route(self, topic: str) -> Route:
        self.calls.append(("route", topic))
        await self._fault(self.on, "route")
        if topic not in self.routes:
            raise UnknownTopic(f"no topic {topic}")
        return self.routes[topic]

    def append_soon(self, topic: str, partition_id: int, batch: bytes, producer: str, told: Told) -> bool:
        if self.short_way:
            self.calls.append(("queue", batch))
            task = asyncio.ensure_future(self.append(topic, partition_id, batch, producer=producer))
            self.queued.add(task)
            task.add_done_callback(partial(self._tell, told))
        return self.short_way

    def lone_append(self, topic: str, partition_id: int) -> FakeEndpoint | None:
        return self if self.at_once and not self.turn_used and not self.queued else None

    def store_alone(self, partition_id: int, batch: bytes) -> Appended | None:
        if self.on["append"] or self.after["append"]:  # what is to happen to it happens on the other way
            return None
        try:
            appended = self._append(partition_id, batch)
        except PostroomError:
            return None
        self.calls.append(("append", batch))
        self.turn_used = True
        return appended

    def yielded(self) -> None:
        self.turn_used = False
        self.news.set()

    def go(self, way: str) -> None:
        """Take batches by the long way, by the short one, or at once where they come alone."""
        self.short_way, self.at_once = way != "long way", way == "at once"

    def _tell(self, told: Told, task: asyncio.Task[Appended]) -> None:
        self.queued.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, PostroomError):
            told(error)
        elif not task.cancelled() and error is None:
            told(task.result())

    async def append(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        *,
        due_at: int = 0,
        ids: bytes = b"",
        producer: str = "",
    ) -> Appended:
        self.calls.append(("append", batch))
        await self._fault(self.on, "append")
        appended = self._append(partition_id, batch, due_at, ids)
        self.news.set()
        await self._fault(self.after, "append")
        return appended

    def _append(self, partition_id: int, batch: bytes, due_at: int = 0, ids: bytes = b"") -> Appended:
        header = verify(batch)
        partition = self.partitions.get(partition_id)
        if partition is None:
            raise UnknownPartition(f"no partition {partition_id}")
        if header.producer_id >= 0:
            state = partition.producers.get(header.producer_id)
            again = check(state, header.epoch, header.base_sequence, header.records)
            if again is not None:
                return Appended(again, self.now_ms(), duplicate=True)
        if partition.sealed:
            raise PartitionSealed("sealed")
        base = -1 if due_at else partition.end
        if header.producer_id >= 0:
            partition.producers[header.producer_id] = remember(
                state, header.epoch, header.base_sequence, header.records, base, 8
            )
        if due_at:
            self.delayed.append((partition_id, due_at, batch, ids))
            return Appended(base, self.now_ms())
        data = with_base_offset(batch, base)
        partition.batches.append(StoredBatch(base, header.records, self.now_ms(), data))
        return Appended(base, self.now_ms())

    async def fetch(
        self, topic: str, partition_id: int, offset: int, *, max_messages: int, max_bytes: int, wait_ms: int
    ) -> Fetched:
        partition = self.partitions[partition_id]
        while True:
            found = tuple(b for b in partition.batches if b.last_offset >= offset)
            if found or not wait_ms:
                start = partition.batches[0].base_offset if partition.batches else 0
                return Fetched(found[:1], start, partition.end)
            self.news.clear()
            await self.news.wait()

    async def resolve(self, topic: str, start: Start) -> dict[int, int]:
        ids = {r.partition_id: r.partition for r in self.routes[topic].ranges}
        if start.kind == "latest":
            return {i: self.partitions[i].end for i in ids}
        wanted = dict(start.offsets)
        return {i: wanted.get(number, 0) for i, number in ids.items()}

    async def bounds(self, topic: str, at: Positions = ()) -> TopicBounds:
        raise NotImplementedError

    # ---- deliveries ----

    async def subscribe(
        self, topic: str, group: str, wish: GroupWish, member: str, client: str, *, named: bool = True
    ) -> GroupInfo:
        if topic not in self.routes:
            raise UnknownTopic(f"no topic {topic}")
        self.group = wish.over(self.group)
        self.members.add(member)
        return GroupInfo(topic, group, self.group, False, 1, 0, ())

    async def unsubscribe(self, topic: str, group: str, member: str) -> None:
        self.members.discard(member)

    @property
    def terms(self) -> Terms:
        return Terms(self.group.lease_ms, self.group.max_attempts)

    async def poll(self, request: PollRequest) -> PollReply:
        self.calls.append(("poll", request))
        self.polled.set()
        await self._fault(self.on, "poll")
        while True:
            grants, draining = self._poll(request)
            if grants or draining or not request.wait_ms:
                break
            self.news.clear()
            await self.news.wait()
        await self._fault(self.after, "poll")
        return PollReply(tuple(grants), self.group.lease_ms, draining)

    def _poll(self, request: PollRequest) -> tuple[list[Grant], bool]:
        grants: list[Grant] = []
        for piece in self.routes[request.topic].ranges:
            progress, partition = self.progress[piece.partition_id], self.partitions[piece.partition_id]
            left = request.messages - sum(x.last - x.first + 1 for g in grants for x in g.leases)
            granted = tuple(d for d in progress.sorted() if d.token == request.token)
            if not granted:
                if left <= 0:
                    break
                ask = Ask(
                    request.member, request.token, left, self._reach(partition, progress, request.bytes),
                    request.empty_handed and not grants, request.on_delivery,
                )  # fmt: skip
                due = [d for d in progress.sorted() if d.visible_at <= self.now_ms()]
                change = delivery.poll(progress.cursor, due, self.now_ms(), ask, self.terms)
                progress.apply(change)
                granted = change.granted
                if change.draining:
                    return grants, True
            if granted:
                grants.append(self._grant(piece, partition, granted))
                if granted[0].alone:
                    break
        return grants, False

    def _reach(self, partition: Partition, progress: Progress, budget: int) -> int:
        """Up to which offset the byte budget goes: at least one batch."""
        end = progress.cursor
        for batch in partition.batches:
            if batch.last_offset < progress.cursor:
                continue
            if budget <= 0 and end > progress.cursor:
                break
            end, budget = batch.last_offset + 1, budget - len(batch.data)
        return end

    def _grant(self, piece: Range, partition: Partition, granted: Sequence[Delivery]) -> Grant:
        leases = tuple(Lease(d.first, d.last, d.attempt, d.alone) for d in granted)
        batches = tuple(
            b
            for b in partition.batches
            if any(d.first <= b.last_offset and d.last >= b.base_offset for d in granted)
        )
        return Grant(partition.topic, piece.partition, piece.partition_id, leases, batches)

    async def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> SettleReply:
        self.calls.append(("settle", list(parts)))
        await self._fault(self.on, "settle")
        self.settled.append(list(parts))
        lost = [(part, spans) for part in parts if (spans := self._settle(part))]
        self.news.set()
        await self._fault(self.after, "settle")
        return SettleReply(tuple(lost))

    async def settle_and_poll(
        self, topic: str, group: str, parts: Sequence[Settle], request: PollRequest, settled: OnSettled
    ) -> PollReply:
        self.together.append((list(parts), request))
        settled(await self.settle(topic, group, parts))
        return await self.poll(request)

    def _settle(self, part: Settle) -> tuple[Span, ...]:
        progress = self.progress[part.partition_id]
        held = [d for d in progress.sorted() if d.token == part.token]
        settlements = [
            Settlement(
                KINDS.get(v.kind, Kind.ACK), v.first, v.last,
                self.now_ms() + v.delay_ms if v.at_ms is None else v.at_ms,
            )
            for v in part.verdicts
        ]  # fmt: skip
        change = settlement.settle(held, settlements, self.now_ms(), self.terms, progress.cursor)
        progress.apply(change)
        return self._in_other_hands(progress, change.missing, part.token)

    def _in_other_hands(self, progress: Progress, spans: Sequence[Span], token: int) -> tuple[Span, ...]:
        return tuple(settlement.covered(spans, [d for d in progress.sorted() if d.token != token]))

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        lost: list[tuple[Held, tuple[Span, ...]]] = []
        for beat in beats:
            self.beats.append(beat)
            for held in beat.held:
                progress = self.progress[held.partition_id]
                mine = [d for d in progress.sorted() if d.token == held.token]
                until = self.now_ms() + self.group.lease_ms
                change = settlement.extend(mine, held.spans, until, progress.cursor)
                progress.apply(change)
                if change.missing:
                    lost.append((held, change.missing))
        return lost

    def steal(self, partition_id: int, token: int = 999) -> None:
        """Somebody else holds everything of this partition from now on."""
        progress = self.progress[partition_id]
        progress.rows = {first: replace(d, token=token) for first, d in progress.rows.items()}

    def unsettled(self, partition_id: int) -> list[tuple[int, int]]:
        return [(d.first, d.last) for d in self.progress[partition_id].sorted()]

    async def close(self) -> None:
        self.closed = True

    # ---- not needed by these tests ----

    async def create_topic(
        self, name: str, settings: TopicSettings, partitions: int, exist_ok: bool
    ) -> TopicInfo:
        raise NotImplementedError

    async def topic(self, name: str) -> TopicInfo:
        raise NotImplementedError

    async def alter_topic(self, name: str, settings: TopicSettings) -> TopicInfo:
        raise NotImplementedError

    async def delete_topic(self, name: str) -> None:
        del self.routes[name]
        for partition_id in [i for i, p in self.partitions.items() if p.topic == name]:
            self.partitions[partition_id] = Partition("", -1, sealed=True)

    async def purge(self, name: str) -> int:
        raise NotImplementedError

    async def create_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        raise NotImplementedError

    async def groups(self, topic: str) -> list[GroupInfo]:
        raise NotImplementedError

    async def alter_group(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        raise NotImplementedError

    async def pause(self, topic: str, name: str, paused: bool) -> GroupInfo:
        raise NotImplementedError

    async def delete_group(self, topic: str, name: str, force: bool) -> None:
        raise NotImplementedError

    async def reset(
        self, topic: str, name: str, start: Start, force: bool, dry_run: bool = False
    ) -> ResetPlan:
        raise NotImplementedError

    async def lag(self, topic: str, group: str) -> Lag:
        raise NotImplementedError

    async def dead_letters(self, topic: str, group: str, limit: int) -> list[DeadLetters]:
        raise NotImplementedError

    async def redrive(self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None) -> int:
        raise NotImplementedError

    async def discard(self, topic: str, group: str, spots: Sequence[tuple[int, int]] | None) -> int:
        raise NotImplementedError


def failing(error: Exception) -> Fault:
    async def fault() -> None:
        raise error

    return fault


def waiting(event: asyncio.Event) -> Fault:
    async def fault() -> None:
        await event.wait()

    return fault
