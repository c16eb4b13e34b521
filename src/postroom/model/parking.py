"""Parked lines: what waits behind a failing message of its key, kept in the store (I27).

A line claims every message of its key from `first` to `last`, and says nothing about the other offsets in
between: those have been settled, or are deliveries. So a million messages behind one failing key are one
row, the member that holds the partition keeps none of them in memory, and the other keys go on. Claimed
offsets leave the deliveries in the same transaction, so that each offset is in one place.

Pure, like `model.delivery`. Must never let an offset fall between a line and the deliveries: a line shrinks
only from its start, by offsets that were looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .bounds import Key, Offset, Whole

__all__ = ["Line", "cut", "received", "widened"]


@dataclass(frozen=True, slots=True)
class Line:
    """The messages of a key, from `first` to `last`, that wait behind an earlier message of it."""

    id: Offset  # the offset of the message that was parked first; stays the same while the line exists
    key: Key | None  # None: messages without a key, which count as one key
    first: Offset
    last: Offset
    messages: Whole  # how many; retention may have taken some of them


def received(line: Line, cursor: int) -> Line | None:
    """What of a line its holder can have received: nothing was handed out from the cursor on."""
    last = min(line.last, cursor - 1)
    if last < line.first:
        return None
    return replace(line, last=last, messages=min(line.messages, last - line.first + 1))


def widened(line: Line | None, more: Line) -> Line | None:
    """The line with what `more` claims as well; None if it claims nothing new (a repeated request)."""
    if line is None:
        return more
    first, last = min(line.first, more.first), max(line.last, more.last)
    if (first, last) == (line.first, line.last):
        return None
    return replace(line, first=first, last=last, messages=line.messages + more.messages)


def cut(line: Line, upto: int, taken: int) -> Line | None:
    """What is left of the line once everything up to an offset was looked at; None: nothing."""
    if upto >= line.last:
        return None
    return replace(line, first=max(line.first, upto + 1), messages=max(1, line.messages - taken))
