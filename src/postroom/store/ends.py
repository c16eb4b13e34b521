"""Where partitions ended when this process last saw them: offsets never go back (R6).

A failover to a server that lacks the last commits, or a file restored under a running process, loses messages
that were confirmed, and would give their offsets to others. Whoever has seen the higher end notices, and
stops: nothing is stored there or handed out until somebody has decided.

InnoDB shows a commit to others before it is flushed, and a crash may take that back: nobody was told yet that
it is stored. There an end that was only read counts when it is read again a while later.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from ..errors import StoreCorrupt
from ..model.cache import make_room
from .session import Lane

__all__ = ["Ends"]

_MOST = 100_000  # partitions; of one that was not used for long nothing is noticed

FLUSHED_S = 5.0  # a commit that others saw so long ago is on the disk

Place = tuple[Lane, int]
"""The lane whose table has the partition's row, and the partition."""


class Ends:
    """Any thread may use it. `expected` is asked before the database is, `saw` after the commit (I2)."""

    def __init__(self) -> None:
        self._highest: dict[Place, int] = {}
        self._read: dict[Place, tuple[int, float]] = {}  # ends that may not be flushed, and since when

    def expected(self, places: Iterable[Place]) -> dict[Place, int]:
        return {place: self._highest.get(place, 0) for place in places}

    def saw(self, ends: Mapping[Place, int]) -> None:
        for place, end in ends.items():
            known = self._highest.get(place, 0)
            if not known:
                make_room(self._highest, _MOST)
            if end > known:
                self._highest[place] = end

    def read(self, ends: Mapping[Place, int], *, flushed: bool) -> None:
        """They were read. `flushed`: this database shows nothing that a crash could take back."""
        if flushed:
            self.saw(ends)
            return
        now = time.monotonic()
        for place, end in ends.items():
            before, since = self._read.get(place, (0, now))
            if end < before or not before:  # a crash took it back, or it is new here
                make_room(self._read, _MOST)
                self._read[place] = (end, now)
            elif now - since >= FLUSHED_S:
                self.saw({place: before})
                self._read[place] = (end, now)

    @staticmethod
    def check(expected: Mapping[Place, int], found: Mapping[Place, int]) -> None:
        """StoreCorrupt if one of them ends before an offset that was given."""
        for place, end in found.items():
            if end < expected.get(place, 0):
                raise StoreCorrupt(
                    f"a partition ends at offset {end}, and offsets up to {expected[place] - 1} were given "
                    "before: the database is older than it was (a failover that lost commits, or a restored "
                    "copy), so confirmed messages are missing. Nothing more is stored or handed out there: "
                    "bring the newer database back; or accept the loss and start every process anew",
                    partition_id=place[1],
                )
