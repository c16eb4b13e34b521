"""One partition's share of a producer: messages gather here, leave as batches, and are resolved in order.

Decides when a batch leaves (R37): at once while at most one is under way, so that the store has the next one
at hand when a commit ends; otherwise when it is full and fewer than `in_flight_batches` are under way, or
when one returns. `linger` waits for more.

Keeps I3: a batch keeps its bytes and its sequence over all repeats, so the store takes it once and in its
turn, however the repeats overtake each other. When a batch is given up, nothing new leaves until all behind
it are stored or refused; what was refused then leaves again under a new epoch, in order. A batch that was
surely not stored gives its sequence back instead. Must never stamp a message anew while an earlier stamp of
it is unresolved. The epoch counts for this partition alone, as it does in the store.

Delayed messages have accumulators of their own, and with them identities of their own: the store may keep the
schedule apart from the log. A batch has messages of one due moment only, so there may be many small ones; as
many are under way as the store remembers.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any

from ...config import DEFAULTS, ClientTuning
from ...endpoint.endpoint import Endpoint, LoneAppends
from ...errors import ClosedError, PartitionSealed, PostroomError, SendTimeout, UnknownFate
from ...model.messages.batch import BatchBuilder
from ...model.messages.compression import AUTO
from ...model.messages.sequence import next_sequence
from ...model.topology.route import Range
from ...store.contract import Appended
from ..codec import Entry
from ..message import Receipt
from ..tracing import of_batch
from .appending import (
    MOVED,
    Failed,
    InFlight,
    Refused,
    append,
    append_until,
    is_away,
    last_error,
    unstored,
)
from .parcel import NOT_SENT, Parcel

if TYPE_CHECKING:
    from .router import Router

__all__ = ["Accumulator", "Batching"]

log = logging.getLogger("postroom.producer")

_LAST_EPOCH = 2**15 - 1


@dataclass(frozen=True, slots=True)
class Batching:
    linger_ms: int = 0
    compression: str = AUTO
    confirm: bool = True
    batch_messages: int = DEFAULTS.batch_messages
    batch_bytes: int = DEFAULTS.batch_bytes
    in_flight_batches: int = DEFAULTS.in_flight_batches
    client: str = ""  # whose limits the batches count against (R40)
    tuning: ClientTuning = DEFAULTS.tuning.client


class Accumulator:
    def __init__(
        self,
        endpoint: Endpoint,
        topic: str,
        where: Range,
        batching: Batching,
        router: Router,
        *,
        delayed: bool = False,
    ) -> None:
        self._endpoint, self._topic, self.where = endpoint, topic, where
        self.delayed = delayed
        self._batching, self._router = batching, router
        self._silent_s, self._one_way_s = batching.tuning.silent_s, batching.tuning.one_way_s
        self._loop = asyncio.get_running_loop()
        self._pending: deque[Parcel] = deque()
        self._messages = 0  # pending
        self._bytes = 0
        self._since = 0.0  # when the oldest pending one came
        self._wake: asyncio.TimerHandle | None = None  # the end of lingering
        self._awake = False  # what may leave does so in this turn of the loop
        self._flushing = False
        self._in_flight: dict[InFlight, asyncio.Task[None] | None] = {}  # oldest first; None: the short way
        self._tasks = 0  # of those
        self._watch: asyncio.TimerHandle | None = None  # the next look at those without one
        self._left = 0  # batches so far
        self._refused: list[InFlight] = []
        self._broken: InFlight | None = None  # the first batch that failed
        self._uncertain = False  # a failed or refused batch may have been, or may yet be, stored
        self._away = False  # a batch under way found the store away
        self._producer_id, self._epoch, self._sequence = secrets.randbits(63), 0, 0

    # ---- gathering ----

    def add(self, parcel: Parcel) -> None:
        if not self._pending:
            self._since = self._loop.time()
        self._pending.append(parcel)
        self._messages += len(parcel.entries)
        self._bytes += parcel.size
        if not self._awake and self._may_leave():
            self._wake_soon()

    def store_alone(self, entry: Entry, now_ms: int, lone: LoneAppends) -> Receipt | bytes:
        """Store one message in this very call, while nothing of the producer is under way.

        Bytes: they were tried, and go on by `take_over`.
        """
        builder = BatchBuilder(self._router.compression, self._batching.batch_bytes)
        builder.extend(now_ms, (entry,))
        batch = builder.build(self._producer_id, self._epoch, self._sequence)
        where, stored = self.where, None
        try:
            stored = lone.store_alone(where.partition_id, batch)
        except Exception:  # it may be stored: whoever takes it over meets this again, and tells
            return batch
        except BaseException:
            self._new_epoch()  # nor is its sequence ever that of another
            raise
        if stored is None:
            return batch
        self._sequence = next_sequence(self._sequence, 1)
        self._left += 1
        self._router.batch_left(where)
        return Receipt(
            self._topic, where.partition, stored.base_offset, stored.duplicate, None, None, where.partition_id
        )

    def take_over(self, parcel: Parcel, data: bytes) -> None:
        """Go on with a message that `store_alone` has tried: its batch is under way."""
        self.hand_over(self._leaves([parcel], data, self._sequence, 1))

    def flush(self) -> None:
        """Do not linger for what is here now."""
        self._flushing = bool(self._pending)
        self._pump()

    def take_back(self, chosen: Callable[[Parcel], bool] | None = None) -> list[Parcel]:
        """What has not left, or is known not to be stored; it is not here any more."""
        parcels = [self._pop() for _ in range(len(self._pending))]
        if chosen is None:
            return parcels
        self._push_back([parcel for parcel in parcels if not chosen(parcel)])
        return [parcel for parcel in parcels if chosen(parcel)]

    def stop(self) -> list[asyncio.Task[None]]:
        """Give up; returns the tasks to end."""
        if self._wake is not None:
            self._wake.cancel()
        while self._pending:
            self._pop().failed(ClosedError("the producer was closed before the message left"))
        if self._watch is not None:
            self._watch.cancel()
        for batch, task in tuple(self._in_flight.items()):
            if task is None:
                self._resolve(batch, _closed_before(batch))
        return [task for task in self._in_flight.values() if task is not None]

    @property
    def busy(self) -> bool:
        return bool(self._pending or self._in_flight)

    @property
    def _full(self) -> bool:
        return self._messages >= self._batching.batch_messages or self._bytes >= self._batching.batch_bytes

    def _may_leave(self) -> bool:
        if not self._pending or self._broken is not None:
            return False
        if not self._in_flight:
            return True
        if self.delayed:
            return self._remembered()
        most = self._batching.in_flight_batches if self._full else min(2, self._batching.in_flight_batches)
        return len(self._in_flight) < most and self._remembered()

    def _remembered(self) -> bool:
        """Whether the store will still know the oldest batch under way, should it be repeated (I3)."""
        return self._left - next(iter(self._in_flight)).number < DEFAULTS.remembered_batches

    def _wake_soon(self) -> None:
        """Once what else is posted in this turn of the loop is here too."""
        if self._wake is not None:
            if not self._full:
                return  # it lingers
            self._wake.cancel()
            self._wake = None
        self._awake = True
        self._router.wake_soon(self)

    def wake(self, leaving: list[tuple[Accumulator, InFlight]]) -> None:
        """Add the batches that leave now; they are handed over once those of others are made, too."""
        self._awake = False
        self._pump(leaving)

    def _lingered(self) -> None:
        self._wake = None
        self._pump()

    def _pump(self, leaving: list[tuple[Accumulator, InFlight]] | None = None) -> None:
        while self._pending and self._may_leave():
            wait = self._lingers() if self._batching.linger_ms else 0.0
            if wait > 0:
                if self._wake is None:
                    self._wake = self._loop.call_later(wait, self._lingered)
                return
            batch = self._leave()
            if batch is not None:
                if leaving is None:
                    self.hand_over(batch)
                else:
                    leaving.append((self, batch))
        if not self._pending and not self._in_flight:
            self._router.resolved(self)

    def _lingers(self) -> float:
        """Seconds to wait for more."""
        if self._full or self._flushing:
            return 0
        return self._since + self._batching.linger_ms / 1000 - self._loop.time()

    # ---- leaving ----

    def _leave(self) -> InFlight | None:
        """Make a batch of what is here; None: nobody waits for it any more."""
        parcels, builder = self._gather()
        self._flushing = self._flushing and bool(self._pending)
        if not parcels:
            return None
        if not self._batching.confirm:
            return self._leaves(parcels, builder.build(), -1, 0)
        data = builder.build(self._producer_id, self._epoch, self._sequence)
        return self._leaves(parcels, data, self._sequence, builder.count)

    def _leaves(self, parcels: list[Parcel], data: bytes, sequence: int, count: int) -> InFlight:
        """A batch is under way from now on. `count`: its messages, if they count in the sequence."""
        batch = self._under_way(parcels, data, sequence)
        self._sequence = next_sequence(self._sequence, count)
        for parcel in parcels:
            parcel.call.left += len(parcel.entries)
        self._in_flight[batch] = None
        self._left += 1
        self._router.batch_left(self.where)
        return batch

    def hand_over(self, batch: InFlight) -> None:
        if not self._batching.confirm:
            self._begin(batch, self._fire(batch))
        elif not self._queued(batch):
            self._begin(batch, self._deliver(batch))

    def _begin(self, batch: InFlight, delivery: Coroutine[Any, Any, None]) -> None:
        """The long way: a task that waits, and repeats."""
        self._in_flight[batch] = self._loop.create_task(delivery)
        self._tasks += 1

    def _queued(self, batch: InFlight) -> bool:
        """The short way: the endpoint queues the batch, and tells what became of it. False: it cannot now.

        None overtakes one that goes the long way. Whatever is not stored, or not answered for some time, goes
        on by that one.
        """
        now = self._loop.time()
        if self._tasks or batch.due_at or batch.ids or batch.deadline < now + 2 * self._silent_s:
            return False
        told, where = partial(self._told, batch), self.where.partition_id
        try:
            if not self._endpoint.append_soon(self._topic, where, batch.data, batch.client, told):
                return False
        except PostroomError:  # it is closed, say: the long way tells those who wait
            return False
        batch.begin_try(now)
        if self._watch is None:
            self._watch = self._loop.call_later(self._silent_s, self._take_over_silent)
        return True

    def _told(self, batch: InFlight, result: Appended | PostroomError) -> None:
        if batch not in self._in_flight:
            return  # it was given up
        if self._in_flight[batch] is not None:  # it was not answered for some time, and is waited for
            if batch.answer is not None and not batch.answer.done():
                _answer(batch.answer, result)
        elif isinstance(result, Appended):
            self._resolve(batch, result)
        else:
            if not isinstance(result, PartitionSealed):  # the long way asks for its successors
                batch.answer = self._loop.create_future()
                _answer(batch.answer, result)
            self._begin(batch, self._deliver(batch))

    def _take_over_silent(self) -> None:
        """Those that were not answered for some time wait by the long way, which knows what to do then."""
        self._watch, now = None, self._loop.time()
        for batch, task in self._in_flight.items():
            if task is not None:
                continue
            if batch.began + self._silent_s <= now:
                batch.answer = self._loop.create_future()
                self._begin(batch, self._deliver(batch))
            elif self._watch is None:
                self._watch = self._loop.call_at(batch.began + self._silent_s, self._take_over_silent)

    def _under_way(self, parcels: list[Parcel], data: bytes, sequence: int) -> InFlight:
        by_id, client = self._router.by_id, self._batching.client
        batch = InFlight(self._left, self.where, parcels, data, sequence, self._unresolved, by_id, client)
        batch.span = of_batch(self._topic, self.where, parcels)
        return batch

    def _gather(self) -> tuple[list[Parcel], BatchBuilder]:
        """Parcels off the queue and into a batch, as many as fit and are due together; not those whose caller
        has gone."""
        builder = BatchBuilder(self._router.compression, self._batching.batch_bytes)
        taken: list[Parcel] = []
        now_ms, now = self._endpoint.now_ms(), self._loop.time()
        while self._pending and builder.count < self._batching.batch_messages:
            if taken and self._pending[0].due_at != taken[0].due_at:
                break
            parcel = self._pop()
            if parcel.call.over(now):
                parcel.failed(_too_late(parcel.call.trouble))
                continue
            count = _fill(builder, parcel, now_ms, self._batching.batch_messages - builder.count)
            if count < len(parcel.entries):
                head, rest = parcel.split(count) if count else (None, parcel)
                self._push_back([rest])
                if head:
                    taken.append(head)
                break
            taken.append(parcel)
        return taken, builder

    def _pop(self) -> Parcel:
        parcel = self._pending.popleft()
        self._messages -= len(parcel.entries)
        self._bytes -= parcel.size
        return parcel

    def _push_back(self, parcels: Sequence[Parcel]) -> None:
        for parcel in reversed(parcels):
            self._pending.appendleft(parcel)
            self._messages += len(parcel.entries)
            self._bytes += parcel.size

    def _unresolved(self, batch: InFlight) -> InFlight | None:
        """The batch right before this one, if it is still under way."""
        before = None
        for other in self._in_flight:
            if other is batch:
                return before
            before = other
        return None

    # ---- resolving ----

    async def _deliver(self, batch: InFlight) -> None:
        try:
            outcome = await append_until(
                self._endpoint,
                self._topic,
                batch,
                self._loop,
                broken=lambda: self._broken is not None and _before(self._broken, batch),
                away=lambda error: self._found_away(batch, error),
                tuning=self._batching.tuning,
            )
        except asyncio.CancelledError:
            outcome = _closed_before(batch)
        self._resolve(batch, outcome)

    def _resolve(self, batch: InFlight, outcome: Appended | Failed | Refused) -> None:
        """The fate of a batch is known, or nobody waits for it any more."""
        if batch.span is not None:
            batch.span.over(getattr(outcome, "error", None))
        self._over(batch)
        if self._away and not any(other.away for other in self._in_flight):
            self._away = False
            self._router.quiet(self)
        if isinstance(outcome, Appended):
            self._router.well(self.where)
            self._stored(batch, outcome)
        else:
            self._unstored(batch, outcome)
        if self._broken is not None and not self._in_flight:
            self._mend()
        self._pump()

    def _over(self, batch: InFlight) -> None:
        if self._in_flight.pop(batch) is not None:
            self._tasks -= 1
        if batch.resolved is not None and not batch.resolved.done():
            batch.resolved.set_result(None)

    def _found_away(self, batch: InFlight, error: PostroomError | None) -> bool:
        """Whether something of the batch can go elsewhere; if nothing can, it is repeated as it is."""
        batch.away = self._away = True
        elsewhere = self._router.in_trouble(self, error)
        return elsewhere and any(map(self._router.goes_anywhere, batch.parcels))

    def _stored(self, batch: InFlight, appended: Appended) -> None:
        again = appended.duplicate and batch.tries == 1  # a repeat of our own is not news to the caller
        first = appended.base_offset
        if appended.repeats:
            self._stored_in_part(batch, _outcomes(batch, appended, again))
            return
        for parcel in batch.parcels:
            parcel.stored(self._topic, self.where, first, again)
            first += len(parcel.entries)

    def _stored_in_part(self, batch: InFlight, outcomes: Sequence[tuple[int, bool]]) -> None:
        at = 0
        for parcel in batch.parcels:
            until = at + len(parcel.entries)
            parcel.stored_in_part(self._topic, self.where, outcomes[at:until])
            at = until

    def _unstored(self, batch: InFlight, outcome: Failed | Refused) -> None:
        self._uncertain = self._uncertain or batch.uncertain
        if self._broken is None or _before(batch, self._broken):
            self._broken = batch
        if isinstance(outcome, Refused):
            if batch.elsewhere:
                batch.parcels = self._send_elsewhere(batch.parcels)
            self._refused.append(batch)
            return
        for parcel in batch.parcels:
            parcel.failed(outcome.error)

    def _goes_elsewhere(self, error: Exception) -> bool:
        """One-way: whether what met this error may be tried elsewhere."""
        if not isinstance(error, PostroomError) or not is_away(error):
            return False
        elsewhere = self._router.in_trouble(self, error)
        self._router.quiet(self)
        return elsewhere and unstored(error)

    def _send_elsewhere(self, parcels: list[Parcel]) -> list[Parcel]:
        """Those without an order need not wait until this partition is mended; returns the others."""
        kept = self._router.go_elsewhere(parcels)
        for parcel in set(parcels).difference(kept):
            parcel.call.left -= len(parcel.entries)
        return kept

    def _mend(self) -> None:
        """Everything under way is resolved: go on with a clean sequence, the refused ones first."""
        first = self._broken
        assert first is not None
        if self._uncertain:
            self._new_epoch()
        else:
            self._sequence = first.sequence
        refused = sorted(self._refused, key=lambda batch: batch.number)
        self._broken, self._refused, self._uncertain = None, [], False
        again = [parcel for batch in refused for parcel in batch.parcels]
        for parcel in again:
            parcel.call.left -= len(parcel.entries)
        self._push_back(again)
        if any(batch.moved for batch in refused):
            self._router.moved_away(self, self.take_back())

    def _new_epoch(self) -> None:
        self._epoch, self._sequence = self._epoch + 1, 0
        if self._epoch > _LAST_EPOCH:
            self._producer_id, self._epoch = secrets.randbits(63), 0

    async def _fire(self, batch: InFlight) -> None:
        """One-way: tried once where it belongs, failures are only counted."""
        moved, failure, lost = False, None, batch.parcels
        try:
            async with asyncio.timeout_at(max(batch.deadline, self._loop.time() + self._one_way_s)):
                await append(self._endpoint, self._topic, batch)
            self._router.well(self.where)
        except MOVED:
            moved = True
        except Exception as error:
            failure = error
            if self._goes_elsewhere(error):
                lost = self._send_elsewhere(batch.parcels)
            self._router.lost(error, sum(len(p.entries) for p in lost))
        finally:
            if batch.span is not None:
                batch.span.over(failure)
            self._over(batch)
            for parcel in () if moved else lost:
                parcel.call.forgotten(parcel)
        if moved:
            self._router.moved_away(self, [*batch.parcels, *self.take_back()])
        self._pump()


def _answer(first: asyncio.Future[Appended], result: Appended | PostroomError) -> None:
    if isinstance(result, Appended):
        first.set_result(result)
    else:
        first.set_exception(result)


def _closed_before(batch: InFlight) -> Failed:
    batch.uncertain = True
    return Failed(UnknownFate("the producer was closed before the receipt came: look whether it is there"))


def _outcomes(batch: InFlight, appended: Appended, again: bool) -> list[tuple[int, bool]]:
    """For each message its offset, and whether it was there: a repeat has got no offset of its own (R32)."""
    repeats, places = dict(appended.repeats), range(sum(len(parcel.entries) for parcel in batch.parcels))
    own = count_from(appended.base_offset) if appended.base_offset >= 0 else repeat(appended.base_offset)
    return [(repeats[place], True) if place in repeats else (next(own), again) for place in places]


def _too_late(trouble: PostroomError | None) -> SendTimeout:
    error = SendTimeout(NOT_SENT if trouble is None else f"{NOT_SENT}; {last_error(trouble)}", stored=False)
    error.__cause__ = trouble
    return error


def _before(batch: InFlight, other: InFlight) -> bool:
    return batch.number < other.number


def _fill(builder: BatchBuilder, parcel: Parcel, now_ms: int, room: int) -> int:
    """Messages of the parcel into the batch; how many were taken."""
    if parcel.timestamps is not None:
        return _fill_stamped(builder, parcel, parcel.timestamps, now_ms, room)
    if len(parcel.entries) <= room:
        return builder.extend(now_ms, parcel.entries)
    return builder.extend(now_ms, islice(parcel.entries, room))


def _fill_stamped(
    builder: BatchBuilder, parcel: Parcel, timestamps: list[int | None], now_ms: int, room: int
) -> int:
    append: Callable[..., bool] = builder.append
    for count, ((key, value, headers), stamp) in enumerate(zip(parcel.entries, timestamps, strict=True)):
        if count == room or not append(now_ms if stamp is None else stamp, key, value, headers):
            return count
    return len(parcel.entries)
