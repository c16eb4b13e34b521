"""What a group's move to another offset of a partition means for its messages.

Decides how many that were settled come again, and how many that were not are passed over. The control batch
that seals a partition is no message.
"""

from __future__ import annotations

from collections.abc import Iterable

from .delivery import Span

__all__ = ["moved"]


def moved(cursor: int, end: int, sealed: bool, unsettled: Iterable[Span], to: int) -> tuple[int, int]:
    """How many messages come again, and how many are skipped, when a group goes on at `to`.

    Everything below `cursor` was handed out, and is settled but for the `unsettled` ranges.
    """
    last = end - int(sealed)
    cursor, to = min(cursor, last), min(to, last)
    ranges = [(first, min(final, last - 1)) for first, final in unsettled if first < last]
    below = sum(min(final, to - 1) - first + 1 for first, final in ranges if first < to)
    above = sum(final - max(first, to) + 1 for first, final in ranges if final >= to)
    return max(0, cursor - to) - above, below + max(0, to - cursor)
