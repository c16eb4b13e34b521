"""What travels inside a producer: parcels of messages, and where their receipts go.

A parcel is what one call sends to one partition, for one moment: now, or when its messages are due. Batches
are made of parcels, whole or split; a call waits for its receipts, which may come from several batches and
partitions. Must never resolve a call before every message of it is resolved, so that nothing of it is still
under way when its caller goes on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

from ...errors import PostroomError
from ...model.messages.ids import NO_ID, digests
from ...model.topology.route import Range
from ..codec import Entry, Packed, as_datetime
from ..message import Receipt

__all__ = ["NOT_SENT", "Call", "OneWay", "Parcel", "Room", "UnroutedParcels", "ids_of"]


NOT_SENT = "the time was over before the message left: nothing was stored, it may be sent again"


class Call:
    """One `send`, `post` or `send_many`: a future, and the receipts gathered so far."""

    __slots__ = (
        "_count", "_error", "_missing", "_receipts", "_resolved", "_single", "_stored",
        "deadline", "future", "left", "trouble",
    )  # fmt: skip

    def __init__(
        self,
        future: asyncio.Future[Any],
        count: int,
        deadline: float,
        resolved: Callable[[int, int], None],
        *,
        single: bool,
    ) -> None:
        self.future = future
        self.deadline = deadline  # by the loop's clock
        self.left = 0  # messages that left in a batch, and were not surely refused
        self.trouble: PostroomError | None = None  # that a batch with messages of it met last
        self._resolved = resolved  # is told how many messages and bytes are done with
        self._single = single
        self._count = self._missing = count
        self._stored = 0
        self._receipts: list[Any] = []  # in the order of the call's list
        self._error: PostroomError | None = None

    def over(self, now: float) -> bool:
        """Its caller has gone, or its time has: what was not sent yet is not to be sent."""
        return self.deadline <= now or self.future.done()

    def stored(self, parcel: Parcel, found: list[Receipt]) -> None:
        if len(found) == self._count:
            self._receipts = found
        else:
            receipts = self._receipts = self._receipts or [None] * self._count
            for at, receipt in zip(parcel.indexes, found, strict=True):
                receipts[at] = receipt
        self._stored += len(found)
        self._done_with(parcel)

    def stored_at(self, parcel: Parcel, topic: str, where: Range, first: int, again: bool) -> None:
        """The first of its messages is stored at that offset, and the others follow."""
        partition, partition_id, count = where.partition, where.partition_id, len(parcel.entries)
        offsets = range(first, first + count)
        if count == self._count:
            self._receipts = [
                Receipt(topic, partition, offset, again, None, None, partition_id) for offset in offsets
            ]
        else:
            receipts = self._receipts = self._receipts or [None] * self._count
            for at, offset in zip(parcel.indexes, offsets, strict=True):
                receipts[at] = Receipt(topic, partition, offset, again, None, None, partition_id)
        self._stored += count
        self._done_with(parcel)

    def failed(self, parcel: Parcel, error: PostroomError) -> None:
        self._error = self._error or error
        self._done_with(parcel)

    def forgotten(self, parcel: Parcel) -> None:
        """One-way: it was tried, and nobody waits to hear."""
        self._resolved(len(parcel.entries), parcel.size)

    def _done_with(self, parcel: Parcel) -> None:
        count = len(parcel.entries)
        self._missing -= count
        if not self._missing and not self.future.done():
            if self._error is None:
                self.future.set_result(self._receipts[0] if self._single else self._receipts)
            else:
                if self._stored:
                    self._error.add_note(f"{self._stored} messages of this call were stored nevertheless")
                self.future.set_exception(self._error)
        self._resolved(count, parcel.size)


class OneWay(Call):
    """A call that nobody waits for: what fails is only counted. It leaves however late it is."""

    __slots__ = ("_lost",)

    def __init__(
        self,
        future: asyncio.Future[Any],
        count: int,
        deadline: float,
        resolved: Callable[[int, int], None],
        lost: Callable[[Exception, int], None],
    ) -> None:
        super().__init__(future, count, deadline, resolved, single=False)
        self._lost = lost

    def over(self, now: float) -> bool:
        return False

    def failed(self, parcel: Parcel, error: PostroomError) -> None:
        self._lost(error, len(parcel.entries))
        self.forgotten(parcel)


class Parcel:
    __slots__ = (
        "call",
        "due_at",
        "dues",
        "entries",
        "ids",
        "indexes",
        "keyed",
        "origin",
        "size",
        "slot",
        "timestamps",
    )

    def __init__(self, call: Call, packed: Packed, indexes: Sequence[int], slot: int | None = None) -> None:
        self.call = call
        self.entries: list[Entry] = packed.entries
        self.size = packed.size
        self.ids = packed.ids
        self.timestamps = packed.timestamps
        self.keyed = packed.keyed
        self.indexes = indexes  # places in the call's list
        self.slot = slot  # named by the caller
        self.dues = packed.dues
        self.due_at = packed.dues[0] if packed.dues else 0  # of all its messages (`by_due`); 0: now
        self.origin = packed.origin  # of a posted message, which is never divided

    def by_due(self) -> list[Parcel]:
        """Parcels whose messages are due at one moment."""
        if self.dues is None:
            return [self]
        places: dict[int, list[int]] = {}
        for at, due in enumerate(self.dues):
            places.setdefault(due, []).append(at)
        return self.divide(list(places.values()))

    def stored(self, topic: str, where: Range, first: int, again: bool) -> None:
        """Its first message is stored at offset `first`, the others follow; delayed ones have no offset."""
        if not self.due_at and self.ids is None:
            self.call.stored_at(self, topic, where, first, again)
            return
        partition, partition_id = where.partition, where.partition_id
        due = as_datetime(self.due_at)
        offsets = range(first, first + len(self.entries)) if due is None else repeat(-1)
        found = [
            Receipt(topic, partition, offset, again, due, given, partition_id)
            for offset, given in zip(offsets, self.ids or (), strict=due is None)
        ]
        self.call.stored(self, found)

    def stored_in_part(self, topic: str, where: Range, found: Sequence[tuple[int, bool]]) -> None:
        """For each message its offset, and whether it is a repeat: the offset is that of the first then."""
        due = as_datetime(self.due_at) if self.due_at else None
        receipts = [
            Receipt(topic, where.partition, offset, repeat, due, given, where.partition_id)
            for (offset, repeat), given in zip(found, self.ids or [None] * len(found), strict=True)
        ]
        self.call.stored(self, receipts)

    def failed(self, error: PostroomError) -> None:
        self.call.failed(self, error)

    def split(self, count: int) -> tuple[Parcel, Parcel]:
        """The first `count` messages, and the rest."""
        head, rest = self.divide([range(count), range(count, len(self.entries))])
        return head, rest

    def divide(self, places: Sequence[Sequence[int]]) -> list[Parcel]:
        """Parcels of the messages at these places; together they have this one's size."""
        if len(places) == 1:
            return [self]
        parts = [self._pick(chosen) for chosen in places]
        parts[-1].size += self.size - sum([part.size for part in parts])
        return parts

    def _pick(self, places: Sequence[int]) -> Parcel:
        pick = itemgetter(*places)
        entries = list(pick(self.entries)) if len(places) > 1 else [pick(self.entries)]
        packed = Packed(
            entries,
            self.size * len(places) // len(self.entries),  # about: a batch counts its bytes itself
            None if self.ids is None else [self.ids[at] for at in places],
            None if self.timestamps is None else [self.timestamps[at] for at in places],
            self.keyed and any(key is not None for key, _, _ in entries),
            None if self.dues is None else [self.dues[at] for at in places],
        )
        whole = self.indexes == range(len(self.entries))  # the call's list: places are its indexes
        return Parcel(self.call, packed, places if whole else [self.indexes[at] for at in places], self.slot)


def ids_of(parcels: Sequence[Parcel]) -> bytes:
    """16 bytes for each message: what its id becomes where ids are looked at."""
    return b"".join([digests(p.ids) if p.ids is not None else NO_ID * len(p.entries) for p in parcels])


class Room:
    """Back-pressure: how many bytes a producer may hold, and who waits for room, first come first served.

    Must never refuse for ever: when nothing is held, anything fits (I17). Room is taken for a waiter at the
    moment it is woken, so nobody who comes later gets in before it.
    """

    __slots__ = ("_limit", "_waiters", "taken")

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, size: int) -> bool:
        if self._waiters or (self.taken and self.taken + size > self._limit):
            return False
        self.taken += size
        return True

    async def take(self, size: int) -> None:
        if self.try_take(size):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            taken = waiter.done() and not waiter.cancelled()
            self.give_back(size if taken else 0)
            raise

    def give_back(self, size: int) -> None:
        self.taken -= size
        while self._waiters:
            wanted, waiter = self._waiters[0]
            if not waiter.done():
                if not self._fits(wanted):
                    return
                self.taken += wanted
                waiter.set_result(None)
            self._waiters.popleft()

    def _fits(self, size: int) -> bool:
        return not self.taken or self.taken + size <= self._limit


class UnroutedParcels:
    """Messages that have no partition to go to now, in the order they were sent.

    Decides nothing about when they go on; only that each fails at its own deadline, surely not stored. Must
    never let one out before its turn: what a partition gives back was sent before whatever is here (I4).
    """

    __slots__ = ("_expires_at", "_parcels", "_timer", "_too_late")

    def __init__(self, too_late: Callable[[], PostroomError]) -> None:
        self._too_late = too_late  # what those are told whose time is over
        self._parcels: list[Parcel] = []
        self._timer: asyncio.TimerHandle | None = None
        self._expires_at = 0.0  # a timer of uvloop that is due at once does not know

    def __len__(self) -> int:
        return len(self._parcels)

    def add(self, parcel: Parcel) -> None:
        self._parcels.append(parcel)
        self._wake_at(parcel.call.deadline)

    def add_first(self, parcels: Sequence[Parcel]) -> None:
        if parcels:
            self._parcels[:0] = parcels
            self._wake_at(min(parcel.call.deadline for parcel in parcels))

    def take(self) -> list[Parcel]:
        """Return all of them; none is left here."""
        taken, self._parcels = self._parcels, []
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        return taken

    def _wake_at(self, deadline: float) -> None:
        if self._timer is not None:
            if self._expires_at <= deadline:
                return
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(deadline, self._expire)
        self._expires_at = deadline

    def _expire(self) -> None:
        now = asyncio.get_running_loop().time()
        late: list[Parcel] = []
        kept: list[Parcel] = []
        for parcel in self.take():
            (late if parcel.call.deadline <= now else kept).append(parcel)
        self.add_first(kept)
        if late:
            error = self._too_late()
            for parcel in late:
                parcel.failed(error)
