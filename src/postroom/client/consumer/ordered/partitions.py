"""What a member of an ordered group has in flight: partitions, and what it received of them.

The partition is what is held: it has one lease, renewed as a whole and lost as a whole (I5). Its deliveries
say, as in shared groups, what became of each message; a message that comes back to its key gets a delivery of
its own, since its attempt differs. Decides nothing about keys: `keys` does.

Must never let a message out of sight: what the store leaves with this member (retried, released) goes back to
its key before the settling is over, and what is taken back from the user stays held. Also read by the
heartbeat's thread, which must never change anything here but `until`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from ....endpoint.values import Held, Lease, Settle
from ....model.delivery.delivery import Span
from ...message import Received
from ..in_flight import (
    ACKING,
    BACK,
    GIVING,
    LOST,
    OPEN,
    PARKING,
    Deliveries,
    GrantedPartition,
    LeasedDelivery,
    Membership,
    delivery_of,
)
from .key_queue import KeyQueue

if TYPE_CHECKING:
    from ..settle import Run

__all__ = ["AssignedPartition", "AssignedPartitions"]

_position = attrgetter("_position")
_Tell: TypeAlias = Callable[[KeyQueue, Sequence[Received]], None]


class AssignedPartition:
    """A partition that is held."""

    __slots__ = (
        "chunks", "dropped", "give_up_at", "partition", "partition_id", "position", "queue", "topic", "until",
    )  # fmt: skip

    def __init__(self, place: GrantedPartition, queue: KeyQueue) -> None:
        self.topic, self.partition, self.partition_id = place.topic, place.partition, place.partition_id
        self.queue = queue
        self.position = -1  # the offset to expect next (I6); -1: from the lowest that is unsettled
        self.until: float = 0  # the lease, by the endpoint's clock
        self.give_up_at: float | None = None  # it is somebody else's turn: to be handed over by then
        self.chunks: dict[LeasedDelivery, list[Received]] = {}  # what was received and is not settled
        self.dropped = False  # held no more; the partition may be held again, as another one of these

    def messages(self, delivery: LeasedDelivery, start: int, stop: int) -> list[Received]:
        """The messages at these indexes of a delivery. Offsets without a message have none."""
        found = self.chunks.get(delivery, [])
        if len(found) == len(delivery.state):
            return found if stop - start == len(found) else found[start:stop]
        low = bisect_left(found, delivery.first + start, key=_position)
        return found[low : bisect_left(found, delivery.first + stop, key=_position)]

    @property
    def at_work(self) -> bool:
        """Whether something that was handed out is not settled yet, as far as the store has told."""
        under_way = (ACKING, GIVING, PARKING)
        return bool(self.queue.out) or any(state in d.state for d in self.chunks for state in under_way)

    def loses(self, spans: Iterable[Span]) -> bool:
        return not self.dropped  # the partition is held as a whole, or not at all

    def hung(self, before_ms: int) -> list[tuple[LeasedDelivery, list[int]]]:
        return [(d, found) for d in list(self.chunks) if (found := d.hung(before_ms))]


class AssignedPartitions(Deliveries):
    """All partitions that one consumer holds."""

    def __init__(self, who: Membership, token: int, *, whole: bool, on_delivery: bool = False) -> None:
        super().__init__()
        self._who = who
        self.token = token  # the holder's, as long as the consumer lives (I7)
        self.holdings: dict[int, AssignedPartition] = {}  # by partition id
        self._whole, self._on_delivery = whole, on_delivery
        self.arrived = asyncio.Event()  # set exactly while there may be something to hand out
        self._unsure: set[tuple[LeasedDelivery, int]] = set()  # acks that failed once: their keys wait (I25)
        self.freed = asyncio.Event()  # a key may go on with what is stored of it

    # ---- partitions ----

    def hold(self, place: GrantedPartition) -> AssignedPartition:
        holding = self.holdings.get(place.partition_id)
        if holding is None:
            holding = AssignedPartition(place, KeyQueue(whole=self._whole, keeps=self._on_delivery))
            with self._lock:
                self.holdings[place.partition_id] = holding
        return holding

    def drop(self, holding: AssignedPartition) -> None:
        """It is held no more. What is being settled is decided by the settling, everything else is lost."""
        with self._lock:
            self.holdings.pop(holding.partition_id, None)
        holding.dropped = True
        for delivery in holding.chunks:
            for run in delivery.open_runs():
                super().let_go(delivery, *run, LOST)
        holding.chunks = {}
        self.changed.set()

    def lose(self, key: tuple[str, int, int], spans: Iterable[Span]) -> bool:
        """A holder that has lost something has lost the partition (I5)."""
        holding = self.holdings.get(key[1])
        if holding is not None and key[2] == self.token:
            self.drop(holding)
        return True

    def held(self, now_ms: int, max_handling_ms: int) -> Mapping[Held, Sequence[AssignedPartition]]:
        """For the heartbeat. What hangs is retried by the loop; if that hangs itself, the lease runs out."""
        with self._lock:
            holdings = list(self.holdings.values())
        before_ms = now_ms - max_handling_ms - self._who.lease_ms
        return {
            Held(h.topic, h.partition_id, self.token, ((0, max(0, h.position)),)): [h]
            for h in holdings
            if not h.hung(before_ms)
        }

    @property
    def solo(self) -> tuple[AssignedPartition, LeasedDelivery] | None:
        """What is to be handled while nothing else is: a suspect (I14)."""
        if not self.alone:
            return None
        return next(((h, d) for h in self.holdings.values() for d in h.chunks if d.alone), None)

    def is_like_any(self, delivery: LeasedDelivery) -> None:
        """It need not be handled alone any more."""
        if delivery.alone and delivery.open:
            delivery.alone = False
            self.alone -= 1

    # ---- messages ----

    def receive(self, holding: AssignedPartition, delivery: LeasedDelivery, messages: list[Received]) -> None:
        self.take(delivery)
        holding.chunks[delivery] = messages

    def mark(self, delivery: LeasedDelivery, start: int, stop: int, state: int) -> None:
        before = delivery.state[start]
        unsure = bool(self._unsure) and state == OPEN and self._was_unsure(delivery, start)
        super().mark(delivery, start, stop, state)
        if state == ACKING:
            self._tell(delivery, start, stop, KeyQueue.done)  # its key goes on while the ack is on its way
        elif state == OPEN and not self._has(delivery):  # it was not stored, and the partition is lost
            super().let_go(delivery, start, stop, LOST)
        elif state == OPEN and before == ACKING and not unsure:
            self._tell(delivery, start, stop, KeyQueue.undone)
        elif state == OPEN and before == PARKING:
            self._tell(delivery, start, stop, KeyQueue.claim_again)

    def _has(self, delivery: LeasedDelivery) -> bool:
        holding = self.holdings.get(delivery.partition_id)
        return holding is not None and delivery in holding.chunks

    def unsure(self, runs: Sequence[Run]) -> None:
        """Keys go on while an ack is on its way; once it has failed they wait until it is known."""
        for delivery, start, stop in runs:
            if delivery.state[start] == ACKING and (delivery, start) not in self._unsure:
                self._unsure.add((delivery, start))
                self._tell(delivery, start, stop, KeyQueue.undone)

    def _was_unsure(self, delivery: LeasedDelivery, start: int) -> bool:
        was = (delivery, start) in self._unsure
        self._unsure.discard((delivery, start))
        return was

    def let_go(self, delivery: LeasedDelivery, start: int, stop: int, state: int) -> None:
        if delivery.state[start] == GIVING or (self._unsure and self._was_unsure(delivery, start)):
            self._tell(delivery, start, stop, KeyQueue.done)
        super().let_go(delivery, start, stop, state)
        holding = self.holdings.get(delivery.partition_id)
        if not delivery.open and holding is not None:
            holding.chunks.pop(delivery, None)

    def _tell(self, delivery: LeasedDelivery, start: int, stop: int, what: _Tell) -> None:
        holding = self.holdings.get(delivery.partition_id)
        if holding is None:
            return
        messages = holding.messages(delivery, start, stop)
        if messages:
            what(holding.queue, messages)
            self.arrived.set()
            self.freed.set()

    # ---- coming back ----

    def keep(self, runs: Sequence[Run], kept: Iterable[tuple[Settle, tuple[Lease, ...]]]) -> None:
        """What the store left with this member goes back to its key, as another delivery."""
        for part, leases in kept:
            holding = self.holdings.get(part.partition_id)
            given = {} if holding is None else _given(holding, runs)
            for lease in leases if given else ():
                messages = [given[at] for at in range(lease.first, lease.last + 1) if at in given]
                if messages and holding is not None:
                    again = self._again(holding, messages, lease)
                    holding.queue.back(again, lease.not_before)

    def held_up(self, runs: Sequence[Run]) -> None:
        """What was handed out behind these, of their keys, is taken back: it comes again behind them."""
        for delivery, start, stop in runs:
            holding = self.holdings.get(delivery.partition_id)
            if holding is None:
                continue
            for message in holding.messages(delivery, start, stop):
                given = delivery.state[message._position - delivery.first] == GIVING
                if given and holding.queue.run_of(message) > 1:
                    self.take_back(holding, _behind(holding, message))

    def take_back(self, holding: AssignedPartition, messages: Sequence[Received]) -> None:
        """Messages that the user has, and is not to settle any more; they are handed out again in order."""
        again = self.renew(holding, messages)
        holding.queue.done(again)
        holding.queue.back(again)
        self.arrived.set()

    def renew(self, holding: AssignedPartition, messages: Sequence[Received]) -> list[Received]:
        """The same messages in deliveries of their own. Whoever has the old ones can settle them no more."""
        by_delivery: dict[LeasedDelivery, list[Received]] = {}
        for message in messages:
            delivery = delivery_of(message)
            if delivery in holding.chunks:
                by_delivery.setdefault(delivery, []).append(message)
        renewed: list[Received] = []
        for delivery, parts in by_delivery.items():
            lease = Lease(parts[0]._position, parts[-1]._position, delivery.attempt, False)
            renewed += self._again(holding, parts, lease)
            for message in parts:
                index = message._position - delivery.first
                self.let_go(delivery, index, index + 1, BACK)
        return renewed

    def _again(
        self, holding: AssignedPartition, messages: Sequence[Received], lease: Lease
    ) -> list[Received]:
        """The same messages in a delivery of their own; the offsets between them are not part of it."""
        old = delivery_of(messages[0])
        new = LeasedDelivery(old.settler, holding, lease, self.token, holding.until)
        new.bytes_each = old.bytes_each
        new.state[:] = bytes((BACK,)) * len(new.state)
        for message in messages:
            new.state[message._position - new.first] = OPEN
        new.open = len(messages)
        again = [msgspec.structs.replace(message, _delivery=new) for message in messages]
        self.receive(holding, new, again)
        return again


def _given(holding: AssignedPartition, runs: Sequence[Run]) -> dict[int, Received]:
    """By offset, the messages of this partition that are being retried or released."""
    return {
        message._position: message
        for delivery, start, stop in runs
        if delivery.state[start] == GIVING
        for message in holding.messages(delivery, start, stop)
    }


def _behind(holding: AssignedPartition, message: Received) -> list[Received]:
    """What is out of the same key, open, at higher offsets."""
    return [
        other
        for delivery, messages in holding.chunks.items()
        if delivery.last > message._position
        for start, stop in delivery.handed_runs(delivery.last)
        for other in holding.messages(delivery, start, stop)
        if other._position > message._position and holding.queue.same_key(other, message)
    ]
