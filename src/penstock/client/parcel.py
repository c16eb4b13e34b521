"""What travels inside a producer: parcels of messages, and where their receipts go.

A parcel is what one call sends to one partition. Batches are made of parcels, whole or split; a call waits
for its receipts, which may come from several batches and partitions. Must never resolve a call before every
message of it is resolved, so that nothing of it is still under way when its caller goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from ..errors import PenstockError
from ..model.route import Range
from .codec import Entry
from .message import Receipt

__all__ = ["Call", "Parcel", "receipts"]


class Call:
    """One `send`, `post` or `send_many`: a future, and the receipts gathered so far."""

    __slots__ = ("_error", "_missing", "_receipts", "_single", "deadline", "future")

    def __init__(self, future: asyncio.Future[Any], count: int, deadline: float, *, single: bool) -> None:
        self.future = future
        self.deadline = deadline  # by the loop's clock
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
        self._resolve(len(found))

    def failed(self, parcel: Parcel, error: PenstockError) -> None:
        self._error = self._error or error
        self._resolve(len(parcel.entries))

    def _resolve(self, count: int) -> None:
        self._missing -= count
        if self._missing or self.future.done():
            return
        if self._error is not None:
            self.future.set_exception(self._noted(self._error))
        elif self._single:
            self.future.set_result(self._receipts[0])
        else:
            self.future.set_result(self._in_order())

    def _in_order(self) -> list[Receipt]:
        if self._receipts and isinstance(self._receipts[0], tuple):
            return [receipt for _, receipt in sorted(self._receipts, key=_index)]
        return self._receipts

    def _noted(self, error: PenstockError) -> PenstockError:
        if self._receipts:
            error.add_note(f"{len(self._receipts)} messages of this call were stored nevertheless")
        return error


class Parcel:
    __slots__ = ("call", "entries", "ids", "indexes", "size", "slot", "timestamps")

    def __init__(
        self,
        call: Call,
        entries: list[Entry],
        size: int,
        indexes: Sequence[int],
        ids: list[str | None] | None = None,
        timestamps: list[int | None] | None = None,
        slot: int | None = None,
    ) -> None:
        self.call = call
        self.entries = entries
        self.size = size
        self.indexes = indexes  # places in the call's list
        self.ids = ids
        self.timestamps = timestamps
        self.slot = slot  # named by the caller

    def split(self, count: int) -> tuple[Parcel, Parcel]:
        """The first `count` messages, and the rest."""
        head_size = sum(len(value) + len(key or b"") for key, value, _ in self.entries[:count])
        head_size = min(head_size, self.size)
        return self._part(0, count, head_size), self._part(count, len(self.entries), self.size - head_size)

    def pick(self, places: Sequence[int]) -> Parcel:
        """The messages at these places, which go elsewhere than the others."""
        entries = [self.entries[at] for at in places]
        return Parcel(
            self.call,
            entries,
            sum(len(value) + len(key or b"") for key, value, _ in entries),
            [self.indexes[at] for at in places],
            None if self.ids is None else [self.ids[at] for at in places],
            None if self.timestamps is None else [self.timestamps[at] for at in places],
            self.slot,
        )

    def _part(self, start: int, stop: int, size: int) -> Parcel:
        return Parcel(
            self.call,
            self.entries[start:stop],
            size,
            self.indexes[start:stop],
            None if self.ids is None else self.ids[start:stop],
            None if self.timestamps is None else self.timestamps[start:stop],
            self.slot,
        )


def receipts(topic: str, where: Range, first: int, again: bool, parcel: Parcel) -> list[Receipt]:
    """Receipts for a parcel whose first message is stored at offset `first`."""
    partition, partition_id = where.partition, where.partition_id
    offsets = range(first, first + len(parcel.entries))
    if parcel.ids is None:
        return [Receipt(topic, partition, offset, again, None, None, partition_id) for offset in offsets]
    return [
        Receipt(topic, partition, offset, again, None, given, partition_id)
        for offset, given in zip(offsets, parcel.ids, strict=True)
    ]


def _index(numbered: tuple[int, Receipt]) -> int:
    return numbered[0]
