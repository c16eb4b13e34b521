"""Who has how much of something that all share, and how much more each may take.

Nobody takes more than half of what the others leave. So one alone has half of all there is; of two that take
whatever they can the second has a quarter, and each that comes after them finds something. Whoever has more
than that, since it came before the others, keeps it, and gets no more. All of them together never have more
than there is.

Pure: counts, and remembers nobody who has nothing. Whoever asks says how much there is.
"""

from __future__ import annotations

__all__ = ["FairShares"]


class FairShares:
    """What each has, by name.

    >>> shares = FairShares()
    >>> shares.room("greedy", most=100)
    50
    >>> shares.take("greedy", 50)
    >>> shares.room("greedy", most=100), shares.room("modest", most=100)
    (0, 25)
    """

    __slots__ = ("_of", "total")

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self.total = 0

    def take(self, who: str, count: int) -> None:
        """It has so many more, or (below 0) fewer."""
        left = self._of.get(who, 0) + count
        self.total += count
        if left:
            self._of[who] = left
        else:
            self._of.pop(who, None)

    def room(self, who: str, most: int) -> int:
        """Return how many more it may take, if there are so many for all; 0 is none."""
        mine = self._of.get(who, 0)
        return max(0, (most - self.total + mine + 1) // 2 - mine)

    def __len__(self) -> int:
        return len(self._of)
