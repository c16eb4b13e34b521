"""How rows that wait are put into batches, whatever moves them: the rules that every plan keeps (I3, I12).

A line is what is appended one batch after the other: a partition, and for delayed messages a strand of it.
The first row that does not fit into a batch begins the next. A line has no more batches at a time than a
partition remembers, so that all of them are still known if they are resumed; what comes when they are full is
left for later, and all that comes after it there, so that the order is kept.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from ...config import DEFAULTS

__all__ = ["LINE_BATCHES", "BatchLine", "PlannedBatch", "strand_of"]

T = TypeVar("T")

LINE_BATCHES = DEFAULTS.remembered_batches
"""Batches of one line that are planned at a time: a partition remembers so many (I3)."""

_STRANDS = 7  # of delayed messages, per partition; prime, since people like round moments


def strand_of(due_at: int) -> int:
    """The strand of a partition for messages of that due moment; 0 is that of what is stored at once.

    >>> strand_of(0), strand_of(7), strand_of(15)
    (0, 1, 2)
    """
    return 1 + due_at % _STRANDS if due_at else 0


@dataclass(slots=True)
class PlannedBatch(Generic[T]):
    """A batch that is being planned."""

    kind: int | None  # what is put together is of one kind; None: nothing is put together with this
    items: list[T] = field(default_factory=list)
    messages: int = 0
    bytes: int = 0

    def takes(self, messages: int, size: int, kind: int | None) -> bool:
        return (
            kind is not None
            and kind == self.kind
            and self.messages + messages <= DEFAULTS.batch_messages
            and self.bytes + size <= DEFAULTS.batch_bytes
        )


class BatchLine(Generic[T]):
    """The batches of one line; the last one takes more."""

    __slots__ = ("batches", "closed")

    def __init__(self) -> None:
        self.batches: list[PlannedBatch[T]] = []
        self.closed = False  # something was left for later, and so is all behind it

    def takes(self, messages: int, size: int, kind: int | None) -> bool:
        """Whether there is room for that, in the last batch or in one more."""
        if self.closed:
            return False
        return len(self.batches) < LINE_BATCHES or self.batches[-1].takes(messages, size, kind)

    def add(self, item: T, messages: int, size: int, kind: int | None) -> bool:
        """Put something in that the line takes; returns whether a batch was begun for it."""
        begun = not self.batches or not self.batches[-1].takes(messages, size, kind)
        if begun:
            self.batches.append(PlannedBatch(kind))
        batch = self.batches[-1]
        batch.items.append(item)
        batch.messages += messages
        batch.bytes += size
        return begun
