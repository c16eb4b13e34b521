"""The producer: sends messages to one topic, in batches that form by themselves.

Decides who waits and for how long: for the route, for room in the buffer (R40: slowed, never dropped), for
receipts. What happens to batches is decided in `accumulator`, where they go in `router`. Must never drop a
failure: what nobody awaited is raised when the producer is left. One-way failures are counted in `failed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeGuard, cast

from ...config import DEFAULTS, SLOTS
from ...endpoint.endpoint import Endpoint, LoneAppends
from ...errors import ClosedError, InvalidSetting, PostroomError, SendTimeout, UsageError
from ...model.topology.route import Route
from ...units import Duration, Moment, duration_ms
from ..codec import Packed, as_datetime, due_at, listed, pack, pack_all
from ..message import Message, Receipt, Value
from ..owner_check import Guard
from ..tracing import posting, sending
from .accumulator import Accumulator, Batching
from .appending import last_error
from .parcel import Call, OneWay, Parcel, Room
from .router import Router

if TYPE_CHECKING:
    from ..forward.spool_file import Spooled

__all__ = ["Producer", "check_slot"]

log = logging.getLogger("postroom.producer")

_NO_SPOOL = "this producer has no spool: make one that has with mq.producer(…, spool='orders.spool')"
_MANY = 10_000  # failed posts that are kept before those somebody has seen are sorted out
_TOLD: set[str] = set()  # topics of which it was said that they do not look at ids


class Producer:
    """Made by `Connection.producer`; use it as `async with`."""

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        topic: str,
        find_route: Callable[[str], Awaitable[Route]],
        batching: Batching,
        *,
        timeout_ms: int = DEFAULTS.send_timeout_ms,
        buffer_bytes: int = DEFAULTS.buffer_bytes,
    ) -> None:
        self.topic = topic
        self.failed = 0  # messages sent one-way that were not stored
        self._endpoint, self._guard, self._batching = endpoint, guard, batching
        self._timeout_ms = timeout_ms
        self._usual_s, self._answer_s = batching.tuning.usual_timeout_s, batching.tuning.answer_s
        self._room = Room(buffer_bytes)
        self._router = Router(endpoint, topic, find_route, batching, self._lost)
        self._unresolved = 0  # messages
        self._posts = 0
        self._idle: asyncio.Future[None] | None = None
        self._awaited: dict[Call, None] = {}  # calls whose receipts somebody waits for
        self._watch: asyncio.TimerHandle | None = None  # the next look at those
        self._earliest = 0.0  # the deadline that it was set for
        self._unawaited: set[asyncio.Future[Receipt]] = set()  # posted futures: unresolved, or failed
        self._never: asyncio.Future[Any] = guard.loop.create_future()  # one-way: nobody waits or goes away
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
        """Send a message and wait until it is stored. What the value may be: see `Connection.send`.

        With `delay` or `at` it is stored aside and delivered then; `cancel` takes it back until then. A
        repeat of an `id` is dropped if the topic has a `dedup_window`, and only then.
        """
        self._guard.check()
        now_ms = self._endpoint.now_ms()
        packed = self._packed(Message(value, key, headers, id, source, expires), delay, at, slot, now_ms)
        span = sending(self.topic, packed)
        if span is None and slot is None and not self._unresolved:
            lone = self._lone(packed, timeout)
            if lone is not None:
                return await self._send_alone(packed, timeout, now_ms, *lone)
        receipt: Receipt = await self._sent(packed, span, slot, timeout, single=True)
        return receipt

    async def send_many(
        self,
        messages: Iterable[Any],
        *,
        slot: int | None = None,
        delay: Duration | None = None,
        at: Moment | None = None,
        timeout: Duration | None = None,
    ) -> list[Receipt]:
        """Send messages, or values, and wait until all are stored. A wrong one is refused before any is sent.

        `delay` or `at` is for those that have none of their own: they are all due at one moment.
        """
        now_ms, reached_ms = self._endpoint.now_ms(), self._endpoint.reached_ms()
        due = due_at(delay, at, now_ms, reached_ms)
        packed = pack_all(listed(messages), now_ms, due, check_slot(slot), reached_ms)
        if not packed.entries:
            return []
        span = sending(self.topic, packed)
        found: list[Receipt] = await self._sent(packed, span, slot, timeout, single=False)
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
        message = Message(value, key, headers, id, source, expires)
        packed = self._packed(message, delay, at, slot, self._endpoint.now_ms())
        posting(packed)
        call = await self._submit(packed, slot, timeout, single=True)
        future: asyncio.Future[Receipt] = call.future
        if not future.done():
            self._unawaited.add(future)
            future.add_done_callback(self._posted_resolved)
        self._posts += 1
        if self._posts % self._batching.batch_messages == 0:
            await asyncio.sleep(0)  # whoever posts in a tight loop lets full batches leave
        return future

    def _packed(
        self, message: Message, delay: Duration | None, at: Moment | None, slot: int | None, now_ms: int
    ) -> Packed:
        if delay is None and at is None:
            return pack(message, now_ms)
        due = due_at(delay, at, now_ms, self._endpoint.reached_ms())
        return pack(message, now_ms, due, check_slot(slot))

    async def _sent(
        self, packed: Packed, span: Any, slot: int | None, timeout: Duration | None, *, single: bool
    ) -> Any:
        if span is None:
            return await self._receipts(packed, slot, timeout, single)
        with span:
            found = await self._receipts(packed, slot, timeout, single)
            if single:
                span.stored(found)
            return found

    async def _receipts(
        self, packed: Packed, slot: int | None, timeout: Duration | None, single: bool
    ) -> Any:
        call = await self._submit(packed, slot, timeout, single=single)
        return await self._receipt_of(call)

    async def _receipt_of(self, call: Call) -> Any:
        self._awaited[call] = None
        if self._watch is None or call.deadline < self._earliest:
            self._watch_from(call.deadline)
        try:
            return await call.future
        finally:
            del self._awaited[call]

    def _lone(self, packed: Packed, timeout: Duration | None) -> tuple[Accumulator, LoneAppends] | None:
        """Return where a message is stored in this very call; None: it is to be submitted, since others send
        just now, or it or somebody has to be waited for."""
        if self._closed or packed.ids is not None or packed.timestamps is not None or packed.dues is not None:
            return None
        if timeout is not None and not self._is_usual(timeout):
            return None
        batching = self._batching
        target = None if batching.linger_ms or not batching.confirm else self._router.lone(packed)
        if target is None:
            return None
        lone = self._endpoint.lone_append(self.topic, target.where.partition_id)
        return None if lone is None else (target, lone)

    async def _send_alone(
        self, packed: Packed, timeout: Duration | None, now_ms: int, target: Accumulator, lone: LoneAppends
    ) -> Receipt:
        try:
            found = target.store_alone(packed.entries[0], now_ms, lone)
            if type(found) is Receipt:
                await asyncio.sleep(0)
                return found
        finally:  # also of a fault behind the commit: those who poll are told, and the next may come alone
            lone.yielded()
        self._room.try_take(packed.size)  # there is some: nothing was under way
        call = self._call(1, self._deadline(timeout), single=True)
        target.take_over(Parcel(call, packed, range(1)), cast(bytes, found))
        receipt: Receipt = await self._receipt_of(call)
        return receipt

    def _watch_from(self, deadline: float) -> None:
        """Look for late calls after this deadline: one timer for many, as nearly all are done by then."""
        if self._watch is not None:
            self._watch.cancel()
        self._earliest = deadline
        self._watch = self._guard.loop.call_at(deadline + self._answer_s, self._give_up_late)

    def _give_up_late(self) -> None:
        self._watch, until = None, max(self._earliest, self._guard.loop.time() - self._answer_s)
        left = []
        for call in self._awaited:
            if call.deadline <= until:
                self._give_up(call)
            else:
                left.append(call.deadline)
        if left:
            self._watch_from(min(left))

    async def _submit(
        self, packed: Packed, slot: int | None, timeout: Duration | None, *, single: bool
    ) -> Call:
        self._guard.check()
        if self._closed:
            self._check()
        if slot is not None:
            check_slot(slot)
        deadline = self._deadline(timeout)
        if not self._router.ready:
            await self._in_time(self._router.load(), deadline)
        elif packed.ids is not None and self._router.stale:
            await self._in_time(self._router.look_again(), deadline)
        if not self._room.try_take(packed.size):
            await self._in_time(self._room.take(packed.size), deadline)
        if self._closed:
            self._room.give_back(packed.size)
            self._check()
        return self._place(packed, slot, deadline, single)

    def _note_ids(self, packed: Packed) -> None:
        """Ids are given, and the topic does not look at them: say so, once for a topic and process."""
        delayed = packed.dues is not None and all(packed.dues)  # the id is what takes it back
        if delayed or self.topic in _TOLD or len(_TOLD) >= _MANY:
            return
        _TOLD.add(self.topic)
        log.warning(
            "topic %s does not look at ids: what is sent twice under one id is stored twice. To have repeats "
            "dropped, give it a window: alter_topic(%r, dedup_window='10m'). (This is said once.)",
            self.topic,
            self.topic,
        )

    def _place(self, packed: Packed, slot: int | None, deadline: float, single: bool) -> Call:
        if packed.ids is not None and not self._router.by_id:
            self._note_ids(packed)
        count = len(packed.entries)
        call = told = self._call(count, deadline, single=single)
        if not self._batching.confirm:
            call = OneWay(self._never, count, deadline, self._resolved, self._lost)
        parcel = Parcel(call, packed, range(count), slot)
        for part in (parcel,) if packed.dues is None else parcel.by_due():
            self._router.place(part)
        if call is told:
            return call
        unknown = self._unknown(packed)
        told.future.set_result(unknown[0] if single else unknown)
        return told

    def _call(self, count: int, deadline: float, *, single: bool) -> Call:
        self._unresolved += count
        return Call(self._guard.loop.create_future(), count, deadline, self._resolved, single=single)

    def _unknown(self, packed: Packed) -> list[Receipt]:
        """Receipts of messages sent one-way: of a delayed one the id is known, by which it is cancelled."""
        if packed.dues is None or packed.ids is None:
            return [Receipt(self.topic, -1, -1)] * len(packed.entries)
        return [
            Receipt(self.topic, -1, -1, due=as_datetime(due), _id=id)
            for due, id in zip(packed.dues, packed.ids, strict=True)
        ]

    def _give_up(self, call: Call) -> None:
        """The time of a call is over, and that of its batches: they would have said more."""
        if call.future.done():
            return
        if not call.left:
            call.future.set_exception(self._router.too_late(call.trouble))
            return
        why = "" if call.trouble is None else f"; {last_error(call.trouble)}"
        late = SendTimeout(
            "no receipt within the time: it is not known whether the message was stored; look before "
            f"sending it again, or let the handler drop an id it has seen{why}"
        )
        late.__cause__ = call.trouble
        call.future.set_exception(late)

    def _is_usual(self, timeout: Duration) -> TypeGuard[float]:
        """Whether it needs no second look."""
        return (type(timeout) is float or type(timeout) is int) and 1 <= timeout <= self._usual_s

    def _deadline(self, timeout: Duration | None) -> float:
        if timeout is not None and self._is_usual(timeout):
            return self._guard.loop.time() + timeout
        ms = self._timeout_ms if timeout is None else duration_ms(timeout, name="timeout")
        return self._guard.loop.time() + ms / 1000

    async def _in_time(self, waiting: Awaitable[None], deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await waiting
        except TimeoutError:
            late = self._router.too_late()
            raise late from late.__cause__

    # ---- what became of messages ----

    def _lost(self, error: Exception, messages: int) -> None:
        if not messages:
            return
        if not self.failed:
            log.warning("a one-way send to topic %r failed, more are only counted: %s", self.topic, error)
        self.failed += messages

    def _resolved(self, messages: int, size: int) -> None:
        self._unresolved -= messages
        self._room.give_back(size)
        if not self._unresolved and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _posted_resolved(self, future: asyncio.Future[Receipt]) -> None:
        if future.cancelled() or not _unseen(future):
            self._unawaited.discard(future)  # stored; a failed one stays until somebody has looked at it
        elif len(self._unawaited) > _MANY:
            self._unawaited = {other for other in self._unawaited if not other.done() or _unseen(other)}

    # ---- a spool (R31) ----

    @property
    def spooled(self) -> Spooled:
        """What waits in its spool: messages of all topics that are sent through that file."""
        raise UsageError(_NO_SPOOL)

    async def forwarded(self, timeout: Duration | None = None) -> bool:
        """Wait until the queue has everything that is in the spool; False: the time was over before."""
        raise UsageError(_NO_SPOOL)

    # ---- life ----

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def _at_rest(self) -> bool:
        """Whether everything that was given to it is resolved."""
        return not self._unresolved

    def _check(self) -> None:
        self._guard.check()
        if self._closed:
            raise ClosedError("this producer is closed: make a new one with mq.producer()")

    async def flush(self) -> None:
        """Wait until everything posted so far is resolved."""
        self._guard.check()
        while self._unresolved:
            for accumulator in self._router.accumulators:
                accumulator.flush()
            if self._idle is None or self._idle.done():
                self._idle = self._guard.loop.create_future()
            await asyncio.shield(self._idle)

    async def close(self) -> None:
        """Flush; raises failures that nobody awaited."""
        if self._closed:
            return
        self._closed = True
        try:
            await self.flush()
        finally:
            await self._router.stop()
            if self._watch is not None:
                self._watch.cancel()
        failures = self._failures()
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup(f"{len(failures)} posts to topic {self.topic!r} failed", failures)

    def _failures(self) -> list[Exception]:
        found: list[Exception] = []
        for future in self._unawaited:
            if future.done() and not future.cancelled() and _unseen(future):
                error = future.exception()
                if isinstance(error, Exception) and not any(error is known for known in found):
                    found.append(error)
        self._unawaited.clear()
        return found

    async def __aenter__(self) -> Self:
        self._check()
        await self._in_time(self._router.load(), self._deadline(None))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except (PostroomError, ExceptionGroup) as failure:
            if error is None:
                raise
            error.add_note(f"besides, posts to topic {self.topic!r} failed: {failure!r}")


def _unseen(future: asyncio.Future[Receipt]) -> bool:
    """It failed, and nobody awaited it: asyncio keeps this to complain about it."""
    return bool(getattr(future, "_log_traceback", False))


def check_slot(slot: int | None) -> int | None:
    if slot is None or (type(slot) is int and 0 <= slot < SLOTS):
        return slot
    raise InvalidSetting(
        f"slot={slot!r}: a slot is a whole number from 0 to {SLOTS - 1}; a key finds its own"
    )
