"""The producer: sends messages to one topic, in batches that form by themselves.

Decides which partition a message goes to: the one its slot is routed to; without a key, the partitions in turn,
one batch each. Messages of one key are stored in the order they were posted. When a partition takes no more,
the route is read again and what was refused goes first (I4); what is posted meanwhile waits behind it.

Must never hold more than `buffer_bytes` of unresolved messages: `post` waits instead (but an empty buffer takes
any message, I17). Must never drop a failure: what nobody awaited is raised when the producer is left.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import Any, Self, TypeVar

from ..broker.endpoint import Endpoint
from ..config import DEFAULTS, SLOTS
from ..errors import ClosedError, InvalidSetting, PenstockError, SendTimeout
from ..model.route import Range, Route
from ..model.slot import slot_of
from ..units import Duration, Moment, duration_ms
from .accumulator import Accumulator, Batching
from .appending import pause
from .codec import Packed, pack, pack_all
from .guard import Guard
from .message import Message, Receipt, Value
from .parcel import Call, Parcel

__all__ = ["Producer"]

log = logging.getLogger("penstock.producer")

T = TypeVar("T")


class Producer:
    """Made by `Connection.producer`; use it as `async with`."""

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        topic: str,
        batching: Batching,
        *,
        find_route: Callable[[str], Awaitable[Route]],
        timeout_ms: int = DEFAULTS.send_timeout_ms,
        buffer_bytes: int = DEFAULTS.buffer_bytes,
        closed: Callable[[Producer], None] = lambda _: None,
    ) -> None:
        self.topic = topic
        self.failed = 0  # messages sent one-way that were not stored
        self._endpoint, self._guard, self._batching = endpoint, guard, batching
        self._find_route, self._on_closed = find_route, closed
        self._timeout_ms, self._buffer_bytes = timeout_ms, buffer_bytes
        self._buffered = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()  # for room
        self._accumulators: dict[int, Accumulator] = {}  # by partition id
        self._by_slot: list[Accumulator] = []
        self._in_turn: list[Accumulator] = []
        self._turn = 0
        self._routing: asyncio.Task[None] | None = None
        self._version = -1
        self._held: list[Parcel] = []  # to be routed, in order, once the route is known
        self._unresolved = 0
        self._idle: list[asyncio.Future[None]] = []
        self._posted: set[asyncio.Future[Receipt]] = set()  # failed or unresolved
        self._never = guard.loop.create_future()  # one-way: nobody waits, nobody has gone
        self._closed = False

    # ---- sending ----

    async def send(
        self,
        value: Value,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        id: str | None = None,
        source: str | None = None,
        expires: Duration | datetime | None = None,
        slot: int | None = None,
        delay: Duration | None = None,
        at: Moment | None = None,
        timeout: Duration | None = None,
    ) -> Receipt:
        """Send a message and wait until it is stored."""
        self._check()
        refuse_delay(delay, at)
        packed = pack(Message(value, key, headers, id, source, expires), self._endpoint.now_ms())
        deadline = self._deadline(timeout)
        call = await self._submit(packed, check_slot(slot), deadline, single=True)
        receipt: Receipt = await self._result(call, deadline)
        return receipt

    async def send_many(
        self, messages: Iterable[Message], *, slot: int | None = None, timeout: Duration | None = None
    ) -> list[Receipt]:
        """Send messages and wait until all are stored. A wrong one is refused before any is sent."""
        self._check()
        listed = messages if isinstance(messages, list | tuple) else list(messages)
        packed = pack_all(listed, self._endpoint.now_ms())
        if not packed.entries:
            return []
        deadline = self._deadline(timeout)
        call = await self._submit(packed, check_slot(slot), deadline, single=False)
        found: list[Receipt] = await self._result(call, deadline)
        return found

    async def post(
        self,
        value: Value,
        *,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        id: str | None = None,
        source: str | None = None,
        expires: Duration | datetime | None = None,
        slot: int | None = None,
        delay: Duration | None = None,
        at: Moment | None = None,
        timeout: Duration | None = None,
    ) -> asyncio.Future[Receipt]:
        """Send without waiting for the receipt: the future has it. Waits only while the buffer is full."""
        self._check()
        refuse_delay(delay, at)
        packed = pack(Message(value, key, headers, id, source, expires), self._endpoint.now_ms())
        call = await self._submit(packed, check_slot(slot), self._deadline(timeout), single=True)
        future: asyncio.Future[Receipt] = call.future
        if self._batching.confirm:
            self._posted.add(future)
            future.add_done_callback(self._resolved)
        return future

    async def flush(self) -> None:
        """Wait until everything posted so far is resolved."""
        self._check()
        await self._drained()

    async def _submit(self, packed: Packed, slot: int | None, deadline: float, *, single: bool) -> Call:
        if not self._by_slot and not self._held:
            await self._in_time(self._load_route(), deadline)
        if self._waiters or (self._buffered and self._buffered + packed.size > self._buffer_bytes):
            await self._in_time(self._room(packed.size), deadline)
        self._check()
        loop = self._guard.loop
        future = loop.create_future() if self._batching.confirm else self._never
        count = len(packed.entries)
        call = Call(future, count, deadline, single=single)
        parcel = Parcel(call, packed.entries, packed.size, range(count), packed.ids, packed.timestamps, slot)
        self._buffered += packed.size
        self._place(parcel, keyed=packed.keyed)
        if not self._batching.confirm:
            call.future = _one_way(loop, self.topic, count, single)
        return call

    async def _result(self, call: Call, deadline: float) -> Any:
        if call.future.done():
            return call.future.result()
        try:
            async with asyncio.timeout_at(deadline + _GRACE):
                return await call.future
        except TimeoutError:
            raise SendTimeout(
                "no receipt within the time: it is not known whether the message was stored; look, "
                "or send it again with the same id"
            ) from None

    def _deadline(self, timeout: Duration | None) -> float:
        ms = self._timeout_ms if timeout is None else duration_ms(timeout, name="timeout")
        if not self._batching.confirm:
            return math.inf
        return self._guard.loop.time() + ms / 1000

    async def _in_time(self, waiting: Awaitable[T], deadline: float) -> T:
        if math.isinf(deadline):
            return await waiting
        try:
            async with asyncio.timeout_at(deadline):
                return await waiting
        except TimeoutError:
            raise SendTimeout("the time was over before the message left: nothing was stored") from None

    # ---- routing ----

    def _place(self, parcel: Parcel, *, keyed: bool) -> None:
        """Hand a parcel to the partitions it belongs to."""
        self._unresolved += 1
        if self._routing is not None or not self._by_slot:
            self._held.append(parcel)
        elif parcel.slot is not None:
            self._by_slot[parcel.slot].add(parcel)
        elif not keyed:
            self._in_turn[self._turn].add(parcel)
            if len(parcel.entries) > 1:
                self._turn = (self._turn + 1) % len(self._in_turn)
        else:
            self._place_by_key(parcel)

    def _place_by_key(self, parcel: Parcel) -> None:
        places: dict[Accumulator, list[int]] = {}
        for at, (key, _, _) in enumerate(parcel.entries):
            target = self._in_turn[self._turn] if key is None else self._by_slot[slot_of(key)]
            places.setdefault(target, []).append(at)
        if len(places) == 1:
            next(iter(places)).add(parcel)
            return
        self._unresolved -= 1
        self._buffered -= parcel.size
        for target, chosen in places.items():
            part = parcel.pick(chosen)
            self._unresolved += 1
            self._buffered += part.size
            target.add(part)

    async def _load_route(self) -> None:
        """Read the route, once for all who wait for it."""
        if self._routing is None:
            self._routing = self._guard.loop.create_task(self._apply_route())
        await asyncio.shield(self._routing)

    async def _apply_route(self) -> None:
        try:
            route = await self._find_route(self.topic)
            if route.version == self._version and self._held:
                await asyncio.sleep(pause(8))  # the change is not finished yet
        except Exception as error:
            self._unroute(error)
            raise
        finally:
            self._routing = None
        self._version = route.version
        self._by_slot, self._in_turn = [], [self._accumulator(piece) for piece in route.ranges]
        for piece, accumulator in zip(route.ranges, self._in_turn, strict=True):
            self._by_slot.extend([accumulator] * (piece.last_slot - piece.first_slot + 1))
        self._turn %= len(self._in_turn)
        held, self._held = self._held, []
        for parcel in held:
            self._unresolved -= 1
            self._place(parcel, keyed=any(key is not None for key, _, _ in parcel.entries))

    def _accumulator(self, where: Range) -> Accumulator:
        found = self._accumulators.get(where.partition_id)
        if found is None:
            found = Accumulator(self._endpoint, self.topic, where, self._batching, self)
            self._accumulators[where.partition_id] = found
        return found

    def _unroute(self, error: Exception) -> None:
        """The topic is gone, or cannot be found: what waits for it fails, and the next send asks again."""
        self._by_slot, held, self._held = [], self._held, []
        failure = error if isinstance(error, PenstockError) else PenstockError(f"no route: {error!r}")
        for parcel in held:
            parcel.call.failed(parcel, failure)
            self.parcel_resolved(parcel)

    # ---- what accumulators report ----

    def batch_left(self, where: Range) -> None:
        """Keyless messages stay with a partition until a batch has left it."""
        if self._in_turn and self._in_turn[self._turn].where.partition_id == where.partition_id:
            self._turn = (self._turn + 1) % len(self._in_turn)

    def parcel_resolved(self, parcel: Parcel) -> None:
        self._unresolved -= 1
        self._buffered -= parcel.size
        while self._waiters and (not self._buffered or self._fits(self._waiters[0][0])):
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)
                break  # it takes its room when it runs, and lets the next one in
        if not self._unresolved:
            for idle in self._idle:
                if not idle.done():
                    idle.set_result(None)
            self._idle.clear()
