"""Marks: how somebody who keeps offsets elsewhere sees that the log is not the one that was read.

A queue that is restored from an older backup gives offsets a second time, to other messages, and cannot say
so. So whoever keeps an offset keeps the mark of the batch before it as well: where that batch begins, and its
checksum, which covers its messages, their times and who sent them. Another batch in its place has another
mark. Where the batch is not kept any more there is no mark, and the incarnation of the queue has to do: it
is another one in every queue, and a new one once somebody says that the queue was restored.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Kept", "TopicBounds", "mark_of"]


def mark_of(base_offset: int, crc: bytes) -> str:
    """The mark of a stored batch: a short text, to be compared and nothing else."""
    return f"{base_offset}-{crc.hex()}"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a partition."""

    start: int  # the lowest offset that is kept
    end: int  # the next offset to be given
    mark: str = ""  # of the batch before the offset that was asked about; "": not kept, or nobody asked
    removed: bool = False  # it was sealed, and retention has dropped all of it: `end` is where it ended


@dataclass(frozen=True, slots=True)
class TopicBounds:
    incarnation: str  # of the queue
    partitions: dict[int, Kept]  # by partition id
