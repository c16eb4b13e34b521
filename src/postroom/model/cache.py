"""Room in what is remembered: a cache that is keyed by what clients name must not grow for ever.

Decides which entries go; never whether something is true, so it is for caches alone: whatever goes is looked
up again.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

__all__ = ["make_room"]


def make_room(known: dict[Any, Any], most: int) -> None:
    """Before one more is put there: if it is full, the older half goes.

    >>> known = {1: "a", 2: "b", 3: "c", 4: "d"}
    >>> make_room(known, 4)
    >>> known
    {3: 'c', 4: 'd'}
    """
    if len(known) < most:
        return
    try:
        oldest = list(islice(known, len(known) // 2))
    except RuntimeError:  # another thread has put something there just now: it is the next one's turn
        return
    for key in oldest:
        known.pop(key, None)
