"""Fetching: keeps a consumer's window filled, and turns grants into messages.

Decides when to ask for more: when half of the window is free or nothing is held, never while a delivery is to
be settled alone (I14), and not while the broker waits for empty hands. One request is under way at a time; if
it failed, the very same one is repeated, so that what a lost reply held is not forgotten (I6). Empty hands
always ask for at least one message, however large (I17).

The window is about memory, and a poll's bytes are those on the wire, where batches are compressed. So batches
are opened one by one until the window is full of what they unpack to; the rest of the answer is released,
which is no attempt, and the next polls ask for as much less.

Must never forget an offset it was given: what has no message in it (control batches, I18; expired messages)
is acked at once; what no batch came for is acked only if the log no longer has it, and else released; of a
batch that cannot be read, the group gives up (`unreadable`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from ...backoff import pause
from ...config import DEFAULTS
from ...endpoint.endpoint import Beat, Endpoint, Grant, Lease, PollReply, PollRequest
from ...errors import CorruptBatch, PostroomError
from ...model.messages.batch import Record, opened
from ...store.contract import StoredBatch
from ..codec import Expiry, unpack
from ..message import Received
from .in_flight import LOST, Hands, HeldDelivery, Window
from .reading import give_up, told_of, without
from .settle import Run, Settler, runs_of
from .slow_lane import Lanes

__all__ = ["ALL", "Chunk", "Fetcher", "Opened", "Window"]

log = logging.getLogger("postroom.consumer")

_OVERHEAD_BYTES = 64  # what a message costs besides its bytes
ALL = float("inf")
_FOREVER = float("inf")


class Opened(NamedTuple):
    """What of a lease there was room for."""

    delivery: HeldDelivery | None  # None: for nothing
    messages: list[Received]
    missing: list[Run]  # offsets that no batch has
    cut: int  # the first offset for which there was no room, or the one behind the lease


class Chunk:
    """Messages of one delivery that wait for the user."""

    __slots__ = ("at", "delivery", "messages")

    def __init__(self, delivery: HeldDelivery, messages: list[Received]) -> None:
        self.delivery, self.messages, self.at = delivery, messages, 0

    def next(self, count: int) -> list[Received]:
        whole = not self.at and len(self.messages) <= count
        part = self.messages if whole else self.messages[self.at : self.at + count]
        self.at += len(part)
        return part

    @property
    def done(self) -> bool:
        return self.at >= len(self.messages)


class Fetcher:
    def __init__(
        self,
        endpoint: Endpoint,
        who: Beat,
        hands: Hands,
        settler: Settler,
        window: Window,
        *,
        on_delivery: bool,
        lease_changed: Callable[[int], None],
    ) -> None:
        self._endpoint, self.who, self._hands, self._settler = endpoint, who, hands, settler
        self._window, self._on_delivery, self._lease_changed = window, on_delivery, lease_changed
        self._opened: dict[int, tuple[int, list[Record], int]] = {}  # a batch that leases cut, by partition
        self._room = ALL  # bytes that may still be opened of an answer
        self._ratio = 1.0  # what batches unpack to, of late
        self._drain_until = 0.0  # by the loop's clock: ask nothing before, unless nothing is held
        self._buffered = 0
        self._chunks: deque[Chunk] = deque()
        self.arrived = asyncio.Event()
        self._wanted = 0  # on_delivery: somebody waits for so many messages
        self.expiry = Expiry()
        self.passed_over = 0  # offsets that had no message for the user
        self.passing: set[asyncio.Future[None]] = set()  # answers of the store to that
        self.failure: Exception | None = None
        self.lanes = Lanes(endpoint, hands, settler)
        self.lanes.changed = self._sift

    # ---- asking ----

    async def run(self) -> None:
        try:
            while True:
                await self._may_ask()
                request = self._request()
                sent_ms = self._endpoint.now_ms()
                reply = await self._ask(request)
                if reply is not None:
                    await self._accept(reply, request.token, sent_ms)
        except Exception as error:
            self.failure = error
            self.arrived.set()

    async def _may_ask(self) -> None:
        while not self._has_room():
            self._hands.changed.clear()
            left = self._drain_until - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(left if left > 0 else None):
                    await self._hands.changed.wait()
            except TimeoutError:
                pass

    def _has_room(self) -> bool:
        hands, window = self._hands, self._window
        if self._on_delivery:
            return self._wanted > 0 and not self._buffered
        if not hands.messages:
            return True
        if hands.alone or asyncio.get_running_loop().time() < self._drain_until:
            return False
        return 2 * hands.messages <= window.messages and 2 * hands.bytes <= window.bytes

    def _request(self) -> PollRequest:
        hands, window = self._hands, self._window
        request = PollRequest(
            topic=self.who.topic,
            group=self.who.group,
            member=self.who.member,
            token=secrets.randbits(63) | 1,
            messages=self._wanted if self._on_delivery else max(1, window.messages - hands.messages),
            bytes=self._asked_bytes(hands.bytes),
            wait_ms=min(
                DEFAULTS.poll_wait_ms, self._settler.lease_ms // 2
            ),  # the lease counts from now (I16)
            empty_handed=not hands.messages,
            on_delivery=self._on_delivery,
        )
        return self.lanes.asks(request)

    def _asked_bytes(self, held: float) -> int:
        """On the wire: batches unpack to more than that."""
        return max(1, int((self._window.bytes - held) / self._ratio))

    async def _ask(self, request: PollRequest) -> PollReply | None:
        """None: it is better to ask for something else now."""
        tries = 0
        while True:
            try:
                return await self.lanes.poll(request)
            except PostroomError as error:
                if not error.retriable:
                    raise
                tries += 1
                if tries == 1:
                    log.warning("a poll of %s failed, trying again: %r", self.who.member, error)
                request = replace(request, repeated=True)
            await asyncio.sleep(pause(tries))

    def want(self, messages: int) -> None:
        """Somebody waits. What is settled on delivery is asked for only then, and no more of it (R16)."""
        self._wanted = min(messages, self._window.messages)
        self._hands.changed.set()

    async def look(self, messages: int) -> None:
        """Ask once, without waiting, if there is room; for a consumer that is driven by hand."""
        self.want(messages)
        if self._has_room():
            request = replace(self._request(), wait_ms=0)
            sent_ms = self._endpoint.now_ms()
            await self._accept(await self._endpoint.poll(request), request.token, sent_ms)

    def resize(self, messages: int) -> None:
        """Another window, from the next request on."""
        if self._window.messages != messages:
            self._window = Window(messages, self._window.bytes)
            self._hands.changed.set()

    # ---- accepting ----

    async def _accept(self, reply: PollReply, token: int, sent_ms: int) -> None:
        self._lease_changed(reply.lease_ms)
        if self.lanes.told(reply.lanes):
            self._sift()
        until = _FOREVER if self._on_delivery else sent_ms + reply.lease_ms
        missing: list[Run] = []
        self._room = self._room_left()
        for grant in reply.grants:
            try:
                missing += self._receive(grant, token, until)
            except CorruptBatch:
                missing += await self._receive_readable(grant, token, until)
        loop_time = asyncio.get_running_loop().time()
        self._drain_until = loop_time + reply.lease_ms / 1000 if reply.draining else 0.0
        if reply.grants:
            self._look_again()
        if missing:
            await self._account_for(missing)

    def _receive(self, grant: Grant, token: int, until: float) -> list[Run]:
        """What was granted of a partition; returns offsets that no batch has. All of it, or CorruptBatch."""
        deliver = partial(self._deliver, grant, token, until)
        opened = self._open_all(grant, deliver)
        missing = self._keep_all(opened)
        for lease, one in zip(grant.leases, opened, strict=True):
            if one.cut <= lease.last:
                self._release(deliver(replace(lease, first=one.cut, alone=False)))
        return missing

    async def _receive_readable(self, grant: Grant, token: int, until: float) -> list[Run]:
        """The same of a grant with a batch that cannot be read, once the group is done with that."""
        rest = await self._readable(grant, token)
        return [] if rest is None else self._receive(rest, token, until)

    async def _readable(self, grant: Grant, token: int) -> Grant | None:
        """What of the grant can be read. None: nothing of it is to be handled now."""
        rest, unread = without(grant)
        self._opened.pop(grant.partition_id, None)
        if self._on_delivery:
            told_of(grant, unread)
        elif not await give_up(self._endpoint, self.who, grant, token, unread, self._settler.lease_ms):
            await asyncio.sleep(pause(1))  # it may come again at once
            return self._not_given_up(rest)
        return rest

    def _not_given_up(self, rest: Grant) -> Grant | None:
        return rest  # the lease on the others runs out, and they come again

    def _keep_all(self, opened: Iterable[Opened]) -> list[Run]:
        missing: list[Run] = []
        for one in opened:
            if one.delivery is not None:
                self._keep(one.delivery, one.messages, one.missing)
                missing += one.missing
        return missing

    def _deliver(self, grant: Grant, token: int, until: float, lease: Lease) -> HeldDelivery:
        return HeldDelivery(self._settler, grant, lease, token, until)

    def _room_left(self) -> float:
        """What may be opened. What is settled on delivery cannot be given back: it was asked for."""
        return ALL if self._on_delivery else max(1.0, self._window.bytes - self._hands.bytes)

    def _release(self, delivery: HeldDelivery) -> None:
        """There is no room for it once it is opened: whoever has room may have it."""
        log.debug("%d messages of topic %r are released: the window is full", delivery.open, delivery.topic)
        self._hands.take(delivery)
        self._settler.submit([(delivery, 0, delivery.open)], "release")

    def _look_again(self) -> None:
        """Whether there is something to take may have changed."""
        if self._chunks:
            self.arrived.set()
        else:
            self.arrived.clear()

    def _open_all(self, grant: Grant, deliver: Callable[[Lease], HeldDelivery]) -> list[Opened]:
        """The leases of a grant, as far as there is room for their messages; all of them, or CorruptBatch."""
        room = self._room
        try:
            return [self._open(grant, lease, deliver) for lease in grant.leases]
        except CorruptBatch:
            self._room = room
            raise

    def _open(self, grant: Grant, lease: Lease, deliver: Callable[[Lease], HeldDelivery]) -> Opened:
        parts: list[list[Record]] = []
        gaps: list[tuple[int, int]] = []
        position, end, size = lease.first, lease.last, 0.0
        for batch in grant.batches:
            if batch.last_offset < position or batch.base_offset > lease.last:
                continue
            if self._room <= 0:
                end = max(position, batch.base_offset) - 1
                break
            if batch.base_offset > position:
                gaps.append((position, batch.base_offset))
            found, unpacked = self._records(grant.partition_id, batch, position, lease.last)
            self._room -= unpacked
            size += unpacked
            parts.append(found)
            position = min(batch.last_offset, lease.last) + 1
        if position <= end:
            gaps.append((position, end + 1))
        if end < lease.first:
            return Opened(None, [], [], end + 1)
        delivery = deliver(lease if end == lease.last else replace(lease, last=end))
        self.expiry.now_ms = self._endpoint.now_ms()
        shown = [unpack(part, delivery, self.expiry) for part in parts]
        messages = shown[0] if len(shown) == 1 else list(chain.from_iterable(shown))
        missing = [(delivery, start - lease.first, stop - lease.first) for start, stop in gaps]
        delivery.bytes_each = size / (end - lease.first + 1) + _OVERHEAD_BYTES
        return Opened(delivery, messages, missing, end + 1)

    def _keep(self, delivery: HeldDelivery, messages: list[Received], missing: list[Run]) -> None:
        if self._on_delivery:
            delivery.settled_already()
            self._buffered += len(messages)
            self._wanted = 0
        else:
            self._hands.take(delivery)
            if len(messages) < len(delivery.state):
                self._ack_empty(delivery, messages, missing)
            messages = self.lanes.received(delivery, messages)
        if messages:
            self._chunks.append(Chunk(delivery, messages))

    def _sift(self) -> None:
        """Further sources are slow: what waits here of them is not to be tried (R42)."""
        for chunk in self._chunks:
            chunk.messages, chunk.at = self.lanes.without_slow(chunk.messages[chunk.at :]), 0
        self._chunks = deque(chunk for chunk in self._chunks if chunk.messages)
        self._look_again()

    def _records(
        self, partition_id: int, batch: StoredBatch, first: int, last: int
    ) -> tuple[list[Record], float]:
        """Records of a batch from `first` to `last`, and their bytes. A batch that is cut is opened once."""
        base = batch.base_offset
        kept = self._opened.get(partition_id)
        if kept is not None and kept[0] == base:
            del self._opened[partition_id]
            _, found, size = kept
        else:
            found, size = opened(batch)
            self._saw_ratio(size / len(batch.data))
        if not found:
            return found, 0
        if batch.last_offset > last:
            self._remember(partition_id, base, found, size)
        if base >= first and batch.last_offset <= last:
            return found, size
        some = found[max(0, first - base) : last - base + 1]
        return some, size * len(some) / len(found)

    def _saw_ratio(self, ratio: float) -> None:
        """Follow what batches unpack to; at once if it is much more than it was."""
        self._ratio = max(1.0, 0.9 * self._ratio + 0.1 * ratio, ratio / 4)

    def _remember(self, partition_id: int, base: int, found: list[Record], size: int) -> None:
        """The rest of the batch may come next; what is remembered is no more than a window."""
        self._opened[partition_id] = (base, found, size)
        while len(self._opened) > 1 and sum(one[2] for one in self._opened.values()) > self._window.bytes:
            del self._opened[next(iter(self._opened))]

    def _ack_empty(self, delivery: HeldDelivery, messages: list[Received], missing: list[Run]) -> None:
        """Offsets without a message for the user: nothing to handle, so they are done with."""
        shown = {message._position - delivery.first for message in messages}
        shown.update(i for _, start, stop in missing for i in range(start, stop))
        empty = [i for i in range(len(delivery.state)) if i not in shown]
        log.debug("%d offsets of topic %r expired, or hold no message", len(empty), delivery.topic)
        self.passed_over += len(empty)
        waiting = self._settler.submit([(delivery, i, i + 1) for i in empty], "ack")
        if waiting is not None:
            self.passing.add(waiting.done)
            waiting.done.add_done_callback(self.passing.discard)

    async def _account_for(self, missing: list[Run]) -> None:
        """Offsets for which no batch came: gone by retention, or to be asked for again."""
        for delivery, start, stop in missing:
            fetched = await self._endpoint.fetch(
                delivery.topic,
                delivery.partition_id,
                delivery.first + start,
                max_messages=1,
                max_bytes=1,
                wait_ms=0,
            )
            gone = min(max(fetched.start - delivery.first, start), stop)
            if start < gone:
                self._settler.submit([(delivery, start, gone)], "ack")
            if gone < stop:
                log.error("no batch came for offsets of a delivery in topic %r; released", delivery.topic)
                self._hand_back(delivery, gone, stop)

    def _hand_back(self, delivery: HeldDelivery, start: int, stop: int) -> None:
        self._settler.submit([(delivery, start, stop)], "release")

    # ---- handing out ----

    @property
    def stale(self) -> bool:
        """The lease on what comes next has passed, as far as is known here: the machine slept."""
        return bool(self._chunks) and self._chunks[0].delivery.until <= self._endpoint.now_ms()

    def take(self, limit: int) -> list[Received]:
        """Messages for the user, none whose lease has passed: those are dropped (I16)."""
        out: list[Received] = []
        now_ms = self._endpoint.now_ms()
        while self._chunks and len(out) < limit:
            chunk = self._chunks[0]
            part = self._take_from(chunk, limit - len(out), now_ms)
            out = out + part if out else part
            if chunk.done:
                self._chunks.popleft()
        self._look_again()
        return out

    def unexpired(self, found: list[Received]) -> list[Received]:
        """Without those whose moment has passed while they waited here: they are done with (R39)."""
        if not self.expiry.some:
            return found
        shown, gone = self.expiry.sift(found, self._endpoint.now_ms())
        if gone:
            log.debug("%d messages of topic %r expired and are not shown", len(gone), self.who.topic)
            self._done_with(gone)
        return shown

    def _done_with(self, gone: Sequence[Received]) -> None:
        if not self._on_delivery:
            self.lanes.ignore(gone)
            self._settler.submit(runs_of(gone), "ack")

    def _take_from(self, chunk: Chunk, limit: int, now_ms: int) -> list[Received]:
        delivery = chunk.delivery
        part = chunk.next(limit)
        if self._on_delivery:
            self._buffered -= len(part)
            self._hands.changed.set()
            return part
        if delivery.until <= now_ms:
            self._expire(delivery, part)
            return []
        delivery.hand_out(part[-1]._position - delivery.first + 1, now_ms)
        if delivery.some_lost:
            state, first = delivery.state, delivery.first
            return [message for message in part if state[message._position - first] != LOST]
        return part

    def _expire(self, delivery: HeldDelivery, part: list[Received]) -> None:
        log.warning("%d messages were not handed out: their lease had passed", len(part))
        start, stop = part[0]._position - delivery.first, part[-1]._position - delivery.first + 1
        for run in delivery.open_runs(start, stop):
            self._hands.let_go(delivery, *run, LOST)

    def clear(self) -> int:
        """Forget the buffer; returns how many messages were in it."""
        count = sum(len(chunk.messages) - chunk.at for chunk in self._chunks)
        self._chunks.clear()
        self.arrived.clear()
        return count
