"""Fetching: keeps a consumer's window filled, and turns grants into messages.

Decides when to ask for more: when half of the window is free or nothing is held, never while a delivery is to
be settled alone (I14), and not while the broker waits for empty hands. One request is under way at a time; if
it failed, the very same one is repeated, so that what a lost reply held is not forgotten (I6). Empty hands
always ask for at least one message, however large (I17). Acks that are about to leave go with the poll: it
waits for those of a handler that is done at once, for a few turns of the event loop and no longer.

The window is about memory, and a poll's bytes are those on the wire, where batches are compressed. So batches
are opened one by one until the window is full of what they unpack to; the rest of the answer is released,
which is no attempt, and the next polls ask for as much less.

Must never forget an offset it was given: what has no message in it (control batches, I18; expired messages)
is acked at once; what no batch came for is acked only if the log no longer has it, and else released; of a
batch that cannot be read, the group gives up (`opened`).
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from ...backoff import pause
from ...endpoint.endpoint import Endpoint
from ...endpoint.values import Grant, Lease, PollReply, PollRequest, Settle, SettleReply
from ...errors import CorruptBatch, PostroomError
from ...model.topology.names import is_lane
from ..message import Received
from .in_flight import LOST, Deliveries, LeasedDelivery, Membership, Window
from .opened import ALL, Opened, Opener, give_up, told_of, without
from .settle import Run, Settler, runs_of
from .slow_lane import SlowSources, first_room

__all__ = ["Chunk", "Fetcher", "Window"]

log = logging.getLogger("postroom.consumer")

_FOREVER = float("inf")
_PATIENCE = 3  # rounds of the event loop: the handler, the settler, and one for whoever stands between
_FEW_IN_FLIGHT = 16  # with more there is no hurry to ask, and handlers take their time


class _Taken:
    """Acks that a poll takes along."""

    __slots__ = ("answer", "awaited", "bytes", "messages", "parts")

    def __init__(self, parts: Sequence[Settle], runs: Sequence[Run], awaited: bool) -> None:
        self.parts, self.awaited = parts, awaited
        self.messages = sum([stop - start for _, start, stop in runs])
        self.bytes = sum([(stop - start) * delivery.bytes_each for delivery, start, stop in runs])
        self.answer: asyncio.Future[SettleReply | None] = asyncio.get_running_loop().create_future()

    def settled(self, reply: SettleReply) -> None:
        if not self.answer.done():
            self.answer.set_result(reply)

    def let_off(self) -> None:
        """It is not known what became of them: they are to go by themselves."""
        if not self.answer.done():
            self.answer.set_result(None)


class Chunk:
    """Messages of one delivery that wait for the user."""

    __slots__ = ("at", "delivery", "messages")

    def __init__(self, delivery: LeasedDelivery, messages: list[Received]) -> None:
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
        who: Membership,
        in_flight: Deliveries,
        settler: Settler,
        window: Window,
        *,
        on_delivery: bool,
    ) -> None:
        self._endpoint, self.who, self._in_flight, self._settler = endpoint, who, in_flight, settler
        self._window, self._on_delivery = window, on_delivery
        self._opener = Opener(endpoint.now_ms, window.bytes)
        self._drain_until = 0.0  # by the loop's clock: ask nothing before, unless nothing is held
        self._buffered = 0
        self._chunks: deque[Chunk] = deque()
        self.arrived = asyncio.Event()
        self._wanted = 0  # on_delivery: somebody waits for so many messages
        self.passed_over = 0  # offsets that had no message for the user
        self.passing: set[asyncio.Future[None]] = set()  # answers of the store to that
        self.failure: Exception | None = None
        self.handlers = 1  # so many messages are handled at once
        self.slow: SlowSources | None = None  # attached once the group has slow sources (R42)
        self._boarding = False  # no poll is under way: the next takes acks along
        self._taken: _Taken | None = None  # those that it takes
        if not self.ordered and not on_delivery:
            settler.take_along = self._take_along

    @property
    def expired(self) -> int:
        """Messages that were dropped because their `expires` had passed."""
        return self._opener.expiry.dropped

    # ---- asking ----

    async def run(self) -> None:
        try:
            while True:
                self._boarding = True
                try:
                    await self._may_ask()
                    await self._wait_for_acks()
                    request = self._request()
                    sent_ms = self._endpoint.reached_ms()
                    self._boarding = False
                    reply = await self._ask(request)
                finally:
                    self._let_off()
                if reply is not None:
                    await self._accept(reply, request.token, sent_ms)
        except Exception as error:
            self.failure = error
            self.arrived.set()

    async def _may_ask(self) -> None:
        while not self._has_room():
            self._in_flight.changed.clear()
            left = self._drain_until - asyncio.get_running_loop().time()
            try:
                async with asyncio.timeout(left if left > 0 else None):
                    await self._in_flight.changed.wait()
            except TimeoutError:
                pass

    def _has_room(self) -> bool:
        if self._on_delivery:
            return self._wanted > 0 and not self._buffered
        return self._taken is not None or self._has_room_without(None)

    def _has_room_without(self, taken: _Taken | None) -> bool:
        """Whether there is room for more once these are settled."""
        in_flight, window = self._in_flight, self._window
        messages, size = in_flight.messages, in_flight.bytes
        if taken is not None:
            messages, size = messages - taken.messages, size - taken.bytes
        if not in_flight.messages:
            return True
        if in_flight.alone or asyncio.get_running_loop().time() < self._drain_until:
            return False
        return not messages or (2 * messages <= window.messages and 2 * size <= window.bytes)

    # ---- acks that go with a poll ----

    def _take_along(
        self, parts: Sequence[Settle], runs: Sequence[Run], awaited: bool
    ) -> asyncio.Future[SettleReply | None] | None:
        """What the settler asks before it sends acks by themselves."""
        if not self._boarding or self._taken is not None or self.slow is not None:
            return None
        taken = _Taken(parts, runs, awaited)
        if not self._has_room_without(taken):
            return None
        self._taken = taken
        self._in_flight.changed.set()
        return taken.answer

    async def _wait_for_acks(self) -> None:
        """A handler that needs no time acks in the turn in which it has the message."""
        if self._settler.take_along is not None and 0 < self._in_flight.messages <= _FEW_IN_FLIGHT:
            patience = _PATIENCE
            while patience and self._taken is None:
                await asyncio.sleep(0)
                patience -= 1

    def _let_off(self) -> None:
        """Acks that the poll has taken along, and that were not stored by it, go on by themselves."""
        self._boarding = False
        taken, self._taken = self._taken, None
        if taken is not None:
            taken.let_off()

    def _request(self) -> PollRequest:
        window, messages, size = self._window, self._in_flight.messages, self._in_flight.bytes
        acks_wait_ms = 0
        if self._taken is not None:
            messages, size = messages - self._taken.messages, size - self._taken.bytes
            acks_wait_ms = 0 if self._taken.awaited else self.who.limits.tuning.client.acks_wait_ms
        slow = self.slow
        lane_messages = first_room(self.handlers) if slow is None else slow.room
        return PollRequest(
            topic=self.who.topic,
            group=self.who.group,
            member=self.who.member,
            token=secrets.randbits(63) | 1,
            messages=self._wanted if self._on_delivery else max(1, window.messages - messages),
            bytes=self._asked_bytes(size),
            wait_ms=min(
                self.who.limits.poll_wait_ms, self.who.lease_ms // 2
            ),  # the lease counts from now (I16)
            empty_handed=not messages,
            on_delivery=self._on_delivery,
            lane_messages=0 if self._on_delivery else lane_messages,
            lane_version=0 if self._on_delivery or slow is None else slow.view.version,
            acks_wait_ms=acks_wait_ms,
        )

    def _asked_bytes(self, held: float) -> int:
        """On the wire: batches unpack to more than that."""
        return max(1, int((self._window.bytes - held) / self._opener.ratio))

    async def _ask(self, request: PollRequest) -> PollReply | None:
        """None: it is better to ask for something else now."""
        tries = 0
        while True:
            try:
                if self._taken is not None:
                    if (reply := await self._settle_and_poll(request)) is not None:
                        return reply
                    request = replace(request, repeated=True, empty_handed=False)  # who knows what it holds
                return await (self._endpoint if self.slow is None else self.slow).poll(request)
            except PostroomError as error:
                if not error.retriable:
                    raise
                tries += 1
                if tries == 1:
                    log.warning("a poll of %s failed, trying again: %r", self.who.member, error)
                request = replace(request, repeated=True)
            await asyncio.sleep(pause(tries))

    async def _settle_and_poll(self, request: PollRequest) -> PollReply | None:
        """None: something is wrong with the acks or with the poll, and each is to find out by itself."""
        taken, who = self._taken, self.who
        assert taken is not None
        try:
            return await self._endpoint.settle_and_poll(
                who.topic, who.group, taken.parts, request, taken.settled
            )
        except PostroomError:
            known = taken.answer.done()
            self._let_off()
            if known:
                raise
            return None

    def want(self, messages: int) -> None:
        """Somebody waits. What is settled on delivery is asked for only then, and no more of it (R16)."""
        self._wanted = min(messages, self._window.messages)
        self._in_flight.changed.set()

    async def look(self, messages: int) -> None:
        """Ask once, without waiting, if there is room; for a consumer that is driven by hand."""
        self.want(messages)
        if self._has_room():
            request = replace(self._request(), wait_ms=0)
            sent_ms = self._endpoint.reached_ms()
            await self._accept(await self._endpoint.poll(request), request.token, sent_ms)

    def resize(self, messages: int) -> None:
        """Another window, from the next request on."""
        if self._window.messages != messages:
            self._window = Window(messages, self._window.bytes)
            self._in_flight.changed.set()

    # ---- accepting ----

    async def _accept(self, reply: PollReply, token: int, sent_ms: int) -> None:
        self.who.lease_ms = reply.lease_ms
        if reply.lanes is not None and reply.lanes.version and self._slow_sources().told(reply.lanes):
            self._sift()
        until = _FOREVER if self._on_delivery else sent_ms + reply.lease_ms
        missing: list[Run] = []
        self._opener.room = self._room_left()
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
        opened = self._opener.open(grant, deliver)
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
        if self._on_delivery:
            told_of(grant, unread)
        elif not await give_up(self._endpoint, self.who, grant, token, unread, self.who.lease_ms):
            await asyncio.sleep(pause(1))  # it may come again at once
            return self._not_given_up(rest)
        return rest

    def _not_given_up(self, rest: Grant) -> Grant | None:
        return rest  # the lease on the others runs out, and they come again

    def _keep_all(self, opened: Iterable[Opened[LeasedDelivery]]) -> list[Run]:
        """Take what was opened; returns what of it no batch has."""
        missing: list[Run] = []
        for one in opened:
            delivery = one.delivery
            if delivery is not None:
                delivery.bytes_each = one.bytes_each
                gaps = [(delivery, start - delivery.first, stop - delivery.first) for start, stop in one.gaps]
                self._keep(delivery, one.messages, gaps)
                missing += gaps
        return missing

    def _deliver(self, grant: Grant, token: int, until: float, lease: Lease) -> LeasedDelivery:
        return LeasedDelivery(self._settler, grant, lease, token, until)

    def _room_left(self) -> float:
        """What may be opened. What is settled on delivery cannot be given back: it was asked for."""
        return ALL if self._on_delivery else max(1.0, self._window.bytes - self._in_flight.bytes)

    def _release(self, delivery: LeasedDelivery) -> None:
        """There is no room for it once it is opened: whoever has room may have it."""
        log.debug("%d messages of topic %r are released: the window is full", delivery.open, delivery.topic)
        self._in_flight.take(delivery)
        self._settler.submit([(delivery, 0, delivery.open)], "release")

    def _look_again(self) -> None:
        """Whether there is something to take may have changed."""
        if self._chunks:
            self.arrived.set()
        else:
            self.arrived.clear()

    def _keep(self, delivery: LeasedDelivery, messages: list[Received], missing: list[Run]) -> None:
        if self._on_delivery:
            delivery.settled_already()
            self._buffered += len(messages)
            self._wanted = 0
        else:
            self._in_flight.take(delivery)
            if len(messages) < len(delivery.state):
                self._ack_empty(delivery, messages, missing)
            if self.slow is not None or is_lane(delivery.topic):
                messages = self._slow_sources().received(delivery, messages)
        if messages:
            self._chunks.append(Chunk(delivery, messages))

    def _slow_sources(self) -> SlowSources:
        if self.slow is None:
            self.slow = SlowSources(self._endpoint, self._in_flight, self._settler, self.handlers, self._sift)
        return self.slow

    def _sift(self) -> None:
        """Further sources are slow: what is buffered here of them is not to be tried (R42)."""
        slow = self._slow_sources()
        for chunk in self._chunks:
            chunk.messages, chunk.at = slow.without_slow(chunk.messages[chunk.at :]), 0
        self._chunks = deque(chunk for chunk in self._chunks if chunk.messages)
        self._look_again()

    def _ack_empty(self, delivery: LeasedDelivery, messages: list[Received], missing: list[Run]) -> None:
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

    def _hand_back(self, delivery: LeasedDelivery, start: int, stop: int) -> None:
        self._settler.submit([(delivery, start, stop)], "release")

    # ---- handing out ----

    @property
    def stale(self) -> bool:
        """The lease on what comes next has passed, as far as is known here: the machine slept."""
        return bool(self._chunks) and self._chunks[0].delivery.until <= self._endpoint.reached_ms()

    def take(self, limit: int) -> list[Received]:
        """Messages for the user, none whose lease has passed: those are dropped (I16)."""
        out: list[Received] = []
        now_ms = self._endpoint.reached_ms() if self._chunks else 0
        while self._chunks and len(out) < limit:
            chunk = self._chunks[0]
            part = self._take_from(chunk, limit - len(out), now_ms)
            out = out + part if out else part
            if chunk.done:
                self._chunks.popleft()
        if not self._chunks:
            self.arrived.clear()
        return out

    def unexpired(self, found: list[Received]) -> list[Received]:
        """Without those whose moment has passed while they waited here: they are done with (R39)."""
        expiry = self._opener.expiry
        if not expiry.some:
            return found
        shown, gone = expiry.sift(found, self._endpoint.now_ms())
        if gone:
            log.debug("%d messages of topic %r expired and are not shown", len(gone), self.who.topic)
            self._done_with(gone)
        return shown

    def _done_with(self, gone: Sequence[Received]) -> None:
        if not self._on_delivery:
            if self.slow is not None:
                self.slow.ignore(gone)
            self._settler.submit(runs_of(gone), "ack")

    def _take_from(self, chunk: Chunk, limit: int, now_ms: int) -> list[Received]:
        delivery = chunk.delivery
        part = chunk.next(limit)
        if self._on_delivery:
            self._buffered -= len(part)
            self._in_flight.changed.set()
            return part
        if delivery.until <= now_ms:
            self._expire(delivery, part)
            return []
        delivery.hand_out(delivery.handed, part[-1]._position - delivery.first + 1, now_ms)
        if delivery.some_lost:
            state, first = delivery.state, delivery.first
            return [message for message in part if state[message._position - first] != LOST]
        return part

    def _expire(self, delivery: LeasedDelivery, part: list[Received]) -> None:
        log.warning("%d messages were not handed out: their lease had passed", len(part))
        start, stop = part[0]._position - delivery.first, part[-1]._position - delivery.first + 1
        for run in delivery.open_runs(start, stop):
            self._in_flight.let_go(delivery, *run, LOST)

    def clear(self) -> int:
        """Forget the buffer; returns how many messages were in it."""
        count = sum(len(chunk.messages) - chunk.at for chunk in self._chunks)
        self._chunks.clear()
        self.arrived.clear()
        return count

    def to_release(self, at_work: Sequence[Received] = ()) -> list[Run]:
        """What is held and not at work: whoever leaves gives it to others."""
        busy: dict[LeasedDelivery, list[tuple[int, int]]] = {}
        for delivery, start, stop in runs_of(at_work):
            busy.setdefault(delivery, []).append((start, stop))
        return [
            (delivery, *run)
            for delivery in self._in_flight
            for free in _gaps(busy.get(delivery, []), len(delivery.state))
            for run in delivery.open_runs(*free)
        ]

    async def leave(self) -> None:
        """The last step, when everything is settled: report what is left of slow sources."""
        if self.slow is not None:
            await self.slow.close()

    # ---- for whoever runs handlers ----

    ordered = False  # keys are handed out in order, from partitions that are held

    def begin(self, messages: list[Received]) -> list[Received]:
        """Return those whose handling begins now, without those that are slow by now (R42)."""
        if self.slow is None:
            return messages
        messages = self.slow.without_slow(messages)
        self.slow.began(messages)
        return messages

    def in_order(self, *, one_per_key: bool) -> None:
        """Ordered groups: whether a key has one message at work at a time, or a run of them."""

    def put_back(self, messages: Sequence[Received]) -> None:
        """Ordered groups: these are not begun now; they come again, in order."""

    def handled(self, messages: Sequence[Received]) -> None:
        """Ordered groups: messages that were settled on delivery were handled, and their keys go on."""


def _gaps(taken: list[tuple[int, int]], end: int) -> list[tuple[int, int]]:
    """What of range(end) is not taken."""
    found, at = [], 0
    for start, stop in sorted(taken):
        found.append((at, start))
        at = stop
    return [(start, stop) for start, stop in [*found, (at, end)] if start < stop]
