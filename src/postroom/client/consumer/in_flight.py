"""What a consumer has in flight: deliveries, and what became of each message in them.

A delivery is a range of offsets held under one token; one byte per message says what became of it. There is
no object per message here, and nothing is done per message that can be done per range. Also read by the
heartbeat's thread, which must never change anything here: it only asks `held` and moves `until`.

Keeps I14 (messages handed to the user longer ago than `max_handling` are no longer extended; buffered ones
always are) and I16 (a lease is counted from when it was asked for).
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from ...config import DEFAULTS, Limits
from ...endpoint.values import Beat, Held, Lease, Settle
from ...errors import UsageError
from ...model.delivery.delivery import Span
from ...model.frozen import dataclass
from ..message import Kind, Received

if TYPE_CHECKING:
    from .settle import Run, Settler

__all__ = [
    "ACKED",
    "ACKING",
    "BACK",
    "GIVEN",
    "GIVING",
    "LOST",
    "OPEN",
    "PARKING",
    "Deliveries",
    "GrantedPartition",
    "Leased",
    "LeasedDelivery",
    "Membership",
    "Window",
    "delivery_of",
]

OPEN, ACKING, ACKED, GIVING, GIVEN, PARKING, LOST, BACK = range(8)
# GIVING: a retry, release or dead on its way. In ordered groups, PARKING: on its way to a line of the store,
# and BACK: taken back from the user, still held

_OPEN_RUN = re.compile(rb"\x00+")
_HELD_RUN = re.compile(rb"[\x00\x01\x03]+")  # what is being settled is kept until it is
_ACKING_RUN = re.compile(rb"\x01+")


@dataclass(frozen=True, slots=True)
class Window:
    """How much a consumer may hold (R18)."""

    messages: int = DEFAULTS.window_messages
    bytes: int = DEFAULTS.window_bytes


@dataclass(slots=True)
class Membership:
    """Who a consumer is in its group, and on which terms; all its parts share one."""

    topic: str
    group: str  # in mode "broadcast", once it has joined, the member's own (R11)
    member: str
    client: str
    max_handling_ms: int = DEFAULTS.max_handling_ms
    lease_ms: int = DEFAULTS.lease_ms  # as the broker said last
    limits: Limits = DEFAULTS

    def beat(self, held: Iterable[Held]) -> Beat:
        return Beat(self.topic, self.group, self.member, self.client, tuple(held))


class GrantedPartition(Protocol):
    """A partition, as a grant names it."""

    @property
    def topic(self) -> str: ...
    @property
    def partition(self) -> int: ...
    @property
    def partition_id(self) -> int: ...


class Leased(Protocol):
    """What the heartbeat keeps: held until then, by the endpoint's clock."""

    until: float

    def loses(self, spans: Iterable[Span]) -> bool:
        """Whether something is lost if the store does not know these as held."""


class LeasedDelivery:
    """A range of offsets of one partition, held under one token."""

    __slots__ = (
        "alone", "attempt", "bytes_each", "extended", "first", "joined", "last", "not_before", "open",
        "partition", "partition_id", "ranges", "refused", "settler", "some_lost", "sources", "state",
        "token", "topic", "until",
    )  # fmt: skip

    def __init__(
        self, settler: Settler, place: GrantedPartition, lease: Lease, token: int, until: float
    ) -> None:
        self.settler = settler
        self.topic, self.partition, self.partition_id = place.topic, place.partition, place.partition_id
        self.first, self.last, self.attempt, self.alone = lease.first, lease.last, lease.attempt, lease.alone
        self.not_before = lease.not_before  # in ordered groups: when it may be handed out
        self.token = token
        self.until = until  # the lease, by the endpoint's clock
        self.open = lease.last - lease.first + 1  # neither settled nor lost
        self.state = bytearray(self.open)
        self.bytes_each = 0.0
        self.ranges: list[tuple[int, int, int]] = []  # (start, stop, when): handed to the user then
        self.extended: dict[int, int] = {}  # index → when the user asked for more time
        self.some_lost = False
        self.sources: dict[int, str] = {}  # index → whom it comes from, if that is watched: `lanes`
        self.refused: set[int] = set()  # indexes the store would not settle: not renewed until they are (I25)
        self.joined: set[int] = set()  # indexes whose ack is in a transaction of the user's: `joining`

    @property
    def key(self) -> tuple[str, int, int]:
        return (self.topic, self.partition_id, self.token)

    def hand_out(self, start: int, stop: int, now_ms: int) -> None:
        """The user gets these messages now: one range behind the other, or key by key in ordered groups."""
        ranges = self.ranges
        if ranges and ranges[-1][1] == start and now_ms - ranges[-1][2] < self.settler.together_ms:
            ranges[-1] = (ranges[-1][0], stop, ranges[-1][2])
        else:
            ranges.append((start, stop, now_ms))

    @property
    def handed(self) -> int:
        """Where the last range ends that was handed out."""
        return self.ranges[-1][1] if self.ranges else 0

    @property
    def at_work(self) -> int:
        """How many messages of it are handed out and not settled, nor on their way there."""
        return sum(
            self.state.count(OPEN, start, stop) + self.state.count(GIVING, start, stop)
            for start, stop, _ in self.ranges
        )

    def settled_already(self) -> None:
        """It was settled as it was handed out (R16)."""
        self.open, self.state[:] = 0, bytes((ACKED,)) * len(self.state)

    def open_runs(self, start: int = 0, stop: int | None = None) -> list[tuple[int, int]]:
        """Index ranges (end excluded) of messages that nobody has settled."""
        return [
            m.span() for m in _OPEN_RUN.finditer(self.state, start, len(self.state) if stop is None else stop)
        ]

    def handed_runs(self, offset: int) -> list[tuple[int, int]]:
        """Those of the open runs that were handed out, up to that offset."""
        stop = offset - self.first + 1
        return [
            run
            for start, end, _ in sorted(self.ranges)
            if start < stop
            for run in self.open_runs(start, min(end, stop))
        ]

    def hung(self, before_ms: int) -> list[int]:
        """Indexes of messages handed out before then and neither settled nor extended since."""
        return [
            index
            for start, stop, at in tuple(self.ranges)
            if at <= before_ms
            for run in self.open_runs(start, stop)
            for index in range(*run)
            if self.extended.get(index, 0) <= before_ms
        ]

    def held_spans(self, now_ms: int, max_handling_ms: int) -> list[Span]:
        """Offsets whose lease is to be kept: neither what hangs (I14), nor what was refused (I25)."""
        state = bytearray(self.state)
        for index in (*self.hung(now_ms - max_handling_ms), *tuple(self.refused)):
            if state[index] == OPEN:
                state[index] = LOST
        return [(self.first + m.start(), self.first + m.end() - 1) for m in _HELD_RUN.finditer(state)]

    def spans_of(self, run: re.Pattern[bytes]) -> list[Span]:
        return [(self.first + m.start(), self.first + m.end() - 1) for m in run.finditer(bytes(self.state))]

    def loses(self, spans: Iterable[Span]) -> bool:
        return any(
            self.open_runs(max(first - self.first, 0), last - self.first + 1)
            for first, last in spans
            if first <= self.last and last >= self.first
        )

    # ---- what a received message asks of its delivery ----

    async def settle(
        self, position: int, kind: Kind, *, delay_ms: int = 0, at_ms: int | None = None, reason: str = ""
    ) -> None:
        index = position - self.first
        if kind == "ack":
            await self.settler.ack(self, index)
            return
        await self.settler.settle(
            [(self, index, index + 1)], kind, delay_ms=delay_ms, at_ms=at_ms, reason=reason
        )

    async def extend(self, position: int) -> None:
        await self.settler.extend(self, position - self.first)


class Deliveries:
    """All deliveries of one consumer, and how much they are."""

    def __init__(self) -> None:
        self.messages = 0
        self.bytes = 0.0
        self.alone = 0  # deliveries to be settled before anything else is asked for
        self.changed = asyncio.Event()  # set when something is in flight no more
        self._deliveries: dict[LeasedDelivery, None] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[LeasedDelivery]:
        with self._lock:
            return iter(list(self._deliveries))

    def take(self, delivery: LeasedDelivery) -> None:
        with self._lock:
            self._deliveries[delivery] = None
        self.messages += delivery.open
        self.bytes += delivery.open * delivery.bytes_each
        self.alone += delivery.alone

    def mark(self, delivery: LeasedDelivery, start: int, stop: int, state: int) -> None:
        if stop - start == 1:
            delivery.state[start] = state
        else:
            delivery.state[start:stop] = bytes((state,)) * (stop - start)

    def let_go(self, delivery: LeasedDelivery, start: int, stop: int, state: int) -> None:
        """These messages are settled, or lost: they are in flight no more."""
        count = stop - start
        self.mark(delivery, start, stop, state)
        delivery.some_lost = delivery.some_lost or state >= LOST
        delivery.open -= count
        self.messages -= count
        self.bytes -= count * delivery.bytes_each
        if not delivery.open:
            self.alone -= delivery.alone
            with self._lock:
                self._deliveries.pop(delivery, None)
        self.changed.set()

    def held_up(self, runs: Sequence[Run]) -> None:
        """These are on their way to be retried or released."""

    def unsure(self, runs: Sequence[Run]) -> None:
        """The store has failed to take a verdict on these; it is tried again."""

    def keep(self, runs: Sequence[Run], kept: Iterable[tuple[Settle, tuple[Lease, ...]]]) -> None:
        """Ordered groups: what of these the store says is still this consumer's."""

    def lose(self, key: tuple[str, int, int], spans: Iterable[Span]) -> bool:
        """The store gave these to somebody else. What is being settled is decided by the settling.

        Returns whether that is a loss: what was acked in the user's transaction is gone since that committed.
        """
        wanted, lost = list(spans), False
        for delivery in self:
            if delivery.key != key:
                continue
            for first, last in wanted:
                start, stop = (
                    max(first - delivery.first, 0),
                    min(last - delivery.first + 1, len(delivery.state)),
                )
                for index in [i for i in delivery.joined if start <= i < stop and delivery.state[i] == OPEN]:
                    self.let_go(delivery, index, index + 1, ACKED)
                for run in delivery.open_runs(start, stop) if start < stop else ():
                    self.let_go(delivery, *run, LOST)
                    lost = True
        return lost

    def acking(self) -> list[Held]:
        """What the user has acked, and the store has not confirmed."""
        return [
            Held(*delivery.key, tuple(spans))
            for delivery in self
            if (spans := delivery.spans_of(_ACKING_RUN))
        ]

    def held(self, now_ms: int, max_handling_ms: int) -> Mapping[Held, Sequence[Leased]]:
        """For the heartbeat: what to keep, by token."""
        by_key: dict[tuple[str, int, int], tuple[list[Span], list[LeasedDelivery]]] = {}
        for delivery in self:
            spans, deliveries = by_key.setdefault(delivery.key, ([], []))
            spans.extend(delivery.held_spans(now_ms, max_handling_ms))
            deliveries.append(delivery)
        return {
            Held(topic, partition_id, token, tuple(sorted(spans))): deliveries
            for (topic, partition_id, token), (spans, deliveries) in by_key.items()
            if spans
        }


def delivery_of(message: Received) -> LeasedDelivery:
    """Return the delivery that the message is settled by. UsageError: it was only read."""
    if not isinstance(message._delivery, LeasedDelivery):
        raise UsageError("this message was read, not delivered: there is nothing to settle")
    return message._delivery
