"""What travels inside a producer: parcels of messages, and where their receipts go.

A parcel is what one call sends to one partition. Batches are made of parcels, whole or split; a call waits
for its receipts, which may come from several batches and partitions. Must never resolve a call before every
message of it is resolved, so that nothing of it is still under way when its caller goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import PenstockError
from ...model.route import Range
from ..codec import Entry, Packed
from ..message import Receipt

__all__ = ["NOT_SENT", "Call", "Parcel"]

NOT_SENT = "the time was over before the message left: nothing was stored, it may be sent again"


class Call:
    """One `send`, `post` or `send_many`: a future, and the receipts gathered so far."""

    __slots__ = ("_error", "_missing", "_receipts", "_resolved", "_single", "deadline", "future")

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
        self._resolved = resolved  # is told how many messages and bytes are done with
        self._single = single
        self._missing = count
        self._receipts: list[Any] = []
        self._error: PenstockError | None = None

    @property
    def abandoned(self) -> bool:
        """Its caller has gone: what was not sent yet need not be sent."""
        return self.future.done()

    def stored(self, parcel: Parcel, found: list[Receipt]) -> None:
        if len(found) == self._missing and not self._receipts:
            self._receipts = found
        else:
            self._receipts.extend(zip(parcel.indexes, found, strict=True))
        self._done_with(parcel)

    def failed(self, parcel: Parcel, error: PenstockError) -> None:
        self._error = self._error or error
        self._done_with(parcel)

    def forgotten(self, parcel: Parcel) -> None:
        """One-way: it was tried, and nobody waits to hear."""
        self._resolved(len(parcel.entries), parcel.size)

    def _done_with(self, parcel: Parcel) -> None:
        count = len(parcel.entries)
        self._missing -= count
        if not self._missing and not self.future.done():
            self._finish()
        self._resolved(count, parcel.size)

    def _finish(self) -> None:
        if self._error is not None:
            if self._receipts:
                self._error.add_note(f"{len(self._receipts)} messages of this call were stored nevertheless")
            self.future.set_exception(self._error)
        elif self._single:
            self.future.set_result(self._receipts[0])
        elif self._receipts and isinstance(self._receipts[0], tuple):
            self.future.set_result([receipt for _, receipt in sorted(self._receipts, key=_index)])
        else:
            self.future.set_result(self._receipts)


class Parcel:
    __slots__ = ("call", "entries", "ids", "indexes", "keyed", "size", "slot", "timestamps")

    def __init__(self, call: Call, packed: Packed, indexes: Sequence[int], slot: int | None = None) -> None:
        self.call = call
        self.entries: list[Entry] = packed.entries
        self.size = packed.size
        self.ids = packed.ids
        self.timestamps = packed.timestamps
        self.keyed = packed.keyed
        self.indexes = indexes  # places in the call's list
        self.slot = slot  # named by the caller

    def stored(self, topic: str, where: Range, first: int, again: bool) -> None:
        """Its first message is stored at offset `first`, the others follow."""
        partition, partition_id = where.partition, where.partition_id
        offsets = range(first, first + len(self.entries))
        if self.ids is None:
            found = [Receipt(topic, partition, offset, again, None, None, partition_id) for offset in offsets]
        else:
            found = [
                Receipt(topic, partition, offset, again, None, given, partition_id)
                for offset, given in zip(offsets, self.ids, strict=True)
            ]
        self.call.stored(self, found)

    def failed(self, error: PenstockError) -> None:
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
        parts[-1].size += self.size - sum(part.size for part in parts)  # headers are not counted one by one
        return parts

    def _pick(self, places: Sequence[int]) -> Parcel:
        entries = [self.entries[at] for at in places]
        packed = Packed(
            entries,
            sum(len(value) + len(key or b"") for key, value, _ in entries),
            None if self.ids is None else [self.ids[at] for at in places],
            None if self.timestamps is None else [self.timestamps[at] for at in places],
            self.keyed,
        )
        return Parcel(self.call, packed, [self.indexes[at] for at in places], self.slot)


def _index(numbered: tuple[int, Receipt]) -> int:
    return numbered[0]
