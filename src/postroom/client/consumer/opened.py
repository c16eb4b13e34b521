"""Batches into messages: the one place where what a queue hands out is opened.

A consumer's grants are opened batch by batch, as far as there is room for what batches unpack to (`Opener`);
those who read without a group (browsing, dead letters, replies) open one batch at a time (`readable`), and
their messages cannot be settled (`Browsed`).

Nobody is stopped by a batch that cannot be read: who only reads skips it, and the log says where it is. A
group gives it up, and what is behind it follows: the consumer says "dead" of its offsets, under its lease as
always, and takes the rest of what it was granted once that is stored (`without`, `give_up`). In an ordered
group the keys of such a batch are not known, so its partition waits for that step. The broker reads the batch
itself and keeps its bytes as one dead letter; what it can read all the same becomes dead letters as usual. If
that cannot be stored, nothing of the batch is kept here: it comes again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Generic, Protocol, TypeVar

from ...backoff import pause
from ...endpoint.endpoint import Endpoint
from ...endpoint.values import Grant, Lease, Settle, Verdict
from ...errors import CorruptBatch, PostroomError, UsageError
from ...model.delivery.delivery import Span
from ...model.frozen import dataclass
from ...model.messages.batch import Record, stored_records
from ...model.messages.batch import opened as open_batch
from ...store.contract import StoredBatch
from ..codec import Expiry, unpack
from ..message import Delivered, Kind, Received

__all__ = ["ALL", "GIVEN_UP", "Browsed", "Opened", "Opener", "give_up", "readable", "told_of", "without"]

log = logging.getLogger("postroom.consumer")

Unread = tuple[StoredBatch, CorruptBatch]

GIVEN_UP = "the group gives it up, and the broker keeps its bytes as a dead letter"
_SETTLED = "it was settled on delivery, so that it is skipped"
_OVERHEAD_BYTES = 64  # what a message costs besides its bytes
ALL = float("inf")

D = TypeVar("D", bound=Delivered)


# ---- what a consumer is granted ----


@dataclass(slots=True)
class Opened(Generic[D]):
    """What of a lease there was room for."""

    delivery: D | None  # None: for nothing
    messages: list[Received]
    gaps: list[tuple[int, int]]  # offsets that no batch has: the first, and the one behind the last
    cut: int  # the first offset for which there was no room, or the one behind the lease
    bytes_each: float = 0.0  # what a message of it takes, about


class Opener:
    """Opens the grants of one consumer; batches that a lease cuts are opened once.

    `room` is how many bytes may still be opened, and `ratio` what batches unpack to, of late: the bytes of a
    poll are those on the wire, where batches are compressed. Remembers no more than `most_bytes`.
    """

    def __init__(self, now_ms: Callable[[], int], most_bytes: float) -> None:
        self._now_ms, self._most_bytes = now_ms, most_bytes
        self._cut: dict[int, tuple[int, list[Record], int]] = {}  # by partition: base offset, records, bytes
        self.room = ALL
        self.ratio = 1.0
        self.expiry = Expiry()

    def open(self, grant: Grant, deliver: Callable[[Lease], D]) -> list[Opened[D]]:
        """The leases of a grant, as far as there is room for their messages; all of them, or CorruptBatch.

        `deliver` makes what the messages of a lease are delivered in.
        """
        room = self.room
        try:
            return [self._open(grant, lease, deliver) for lease in grant.leases]
        except CorruptBatch:
            self.room = room
            self._cut.pop(grant.partition_id, None)
            raise

    def _open(self, grant: Grant, lease: Lease, deliver: Callable[[Lease], D]) -> Opened[D]:
        parts: list[list[Record]] = []
        gaps: list[tuple[int, int]] = []
        position, end, size = lease.first, lease.last, 0.0
        for batch in grant.batches:
            if batch.last_offset < position or batch.base_offset > lease.last:
                continue
            if self.room <= 0:
                end = max(position, batch.base_offset) - 1
                break
            if batch.base_offset > position:
                gaps.append((position, batch.base_offset))
            found, unpacked = self._records(grant.partition_id, batch, position, lease.last)
            self.room -= unpacked
            size += unpacked
            parts.append(found)
            position = min(batch.last_offset, lease.last) + 1
        if position <= end:
            gaps.append((position, end + 1))
        if end < lease.first:
            return Opened(None, [], [], end + 1)
        delivery = deliver(lease if end == lease.last else replace(lease, last=end))
        self.expiry.now_ms = self._now_ms()
        shown = [unpack(part, delivery, self.expiry) for part in parts]
        messages = shown[0] if len(shown) == 1 else list(chain.from_iterable(shown))
        return Opened(delivery, messages, gaps, end + 1, size / (end - lease.first + 1) + _OVERHEAD_BYTES)

    def _records(
        self, partition_id: int, batch: StoredBatch, first: int, last: int
    ) -> tuple[list[Record], float]:
        """Records of a batch from `first` to `last`, and their bytes."""
        base = batch.base_offset
        kept = self._cut.get(partition_id)
        if kept is not None and kept[0] == base:
            del self._cut[partition_id]
            _, found, size = kept
        else:
            found, size = open_batch(batch)
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
        self.ratio = max(1.0, 0.9 * self.ratio + 0.1 * ratio, ratio / 4)

    def _remember(self, partition_id: int, base: int, found: list[Record], size: int) -> None:
        """The rest of the batch may come next."""
        self._cut[partition_id] = (base, found, size)
        while len(self._cut) > 1 and sum(one[2] for one in self._cut.values()) > self._most_bytes:
            del self._cut[next(iter(self._cut))]


# ---- without a group ----


@dataclass(frozen=True, slots=True)
class Browsed:
    """Stands where a delivery would: a browsed message cannot be settled."""

    topic: str
    partition: int
    partition_id: int
    attempt: int = 0

    async def settle(
        self, position: int, kind: Kind, *, delay_ms: int = 0, at_ms: int | None = None, reason: str = ""
    ) -> None:
        raise UsageError(f"this message was read, not delivered: there is nothing to {kind}; use a consumer")

    async def extend(self, position: int) -> None:
        raise UsageError("this message was read, not delivered: it has no lease; use a consumer")


def readable(batch: StoredBatch, at: Browsed, first: int = 0, end: int | None = None) -> list[Record]:
    """Return the messages of a batch from `first` up to `end`, or none, with a line in the log."""
    try:
        found = stored_records(batch)
    except CorruptBatch as error:
        log.warning(
            "%s:%d:%d, a batch of %d messages, cannot be read (%s) and is skipped: run `postroom doctor`",
            at.topic,
            at.partition,
            batch.base_offset,
            batch.records,
            error,
        )
        return []
    return [record for record in found if record.offset >= first and (end is None or record.offset < end)]


# ---- what cannot be read ----


class _Member(Protocol):
    @property
    def topic(self) -> str: ...
    @property
    def group(self) -> str: ...


def without(grant: Grant) -> tuple[Grant, list[Unread]]:
    """The grant without batches that cannot be read and their offsets; and those batches."""
    unread = list(_unread(grant.batches))
    spans = [(batch.base_offset, batch.last_offset) for batch, _ in unread]
    leases = tuple(part for lease in grant.leases for part in _around(lease, spans))
    bad = {batch.base_offset for batch, _ in unread}
    batches = tuple(batch for batch in grant.batches if batch.base_offset not in bad)
    return replace(grant, leases=leases, batches=batches), unread


async def give_up(
    endpoint: Endpoint, who: _Member, grant: Grant, token: int, unread: Sequence[Unread], lease_ms: int
) -> bool:
    """Whether the store has it that the group is done with these; tried for as long as a lease lasts."""
    told_of(grant, unread, GIVEN_UP)
    verdicts = tuple(
        Verdict("dead", max(batch.base_offset, lease.first), min(batch.last_offset, lease.last), reason=said)
        for batch, error in unread
        for said in (f"a consumer could not read the batch: {str(error)[:300]}",)
        for lease in grant.leases
        if batch.base_offset <= lease.last and batch.last_offset >= lease.first
    )
    part = Settle(grant.topic, grant.partition_id, token, verdicts)
    loop = asyncio.get_running_loop()
    until, tries = loop.time() + lease_ms / 1000, 0
    while True:
        try:
            reply = await endpoint.settle(who.topic, who.group, [part])
            return not (reply.lost or reply.away)
        except PostroomError as error:
            tries += 1
            if not error.retriable or loop.time() >= until:
                log.warning("an unreadable batch of topic %r comes again: %s", grant.topic, error)
                return False
        await asyncio.sleep(pause(tries))


def told_of(grant: Grant, unread: Iterable[Unread], then: str = _SETTLED) -> None:
    for batch, error in unread:
        place = f"{grant.topic}:{grant.partition}:{batch.base_offset}"
        log.error("%s, a batch of %d messages, cannot be read (%s): %s", place, batch.records, error, then)


def _unread(batches: Iterable[StoredBatch]) -> Iterator[Unread]:
    for batch in batches:
        try:
            stored_records(batch)
        except CorruptBatch as error:
            yield batch, error


def _around(lease: Lease, spans: Iterable[Span]) -> Iterator[Lease]:
    """What is left of a lease without these offsets, which are in order."""
    first = lease.first
    for low, high in spans:
        if high < first or low > lease.last:
            continue
        if first < low:
            yield replace(lease, first=first, last=low - 1)
        first = high + 1
    if first <= lease.last:
        yield replace(lease, first=first)
