"""The ids that a partition remembers (R32): those of its newest messages, and when they were stored.

Decides whether a message that was stored earlier still counts: for as long as the topic's window says, and in
any case until every group has settled it; but of the newest `limit` messages only, so that memory has a bound
(I13). It is told of rows in the order of their offsets, and must never be told of one that is not committed
(I2). What it no longer needs it forgets by and by.

The window covers this partition alone. When partitions have predecessors, it also has to cover those that
were sealed within it (I13).
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence

from .idtable import IdTable

__all__ = ["NO_FLOOR", "Window"]

NO_FLOOR = 2**62
"""Where no group has anything to settle."""

_TRIM = 4096  # marks that are dropped at once


class Window:
    """Not for several threads at once."""

    __slots__ = ("_limit", "_numbers", "_offsets", "_table", "_times", "end", "start")

    def __init__(self, start: int, limit: int, expected: int = 0) -> None:
        self.start = start  # the ids of messages from here on are known,
        self.end = start  # up to here
        self._limit = limit
        self._table = IdTable(min(expected, limit))
        # marks: from a number of the table on, messages have consecutive offsets and were stored at one time
        self._numbers = array("q")
        self._offsets = array("q")
        self._times = array("q")  # never falls (I16)

    @property
    def size(self) -> int:
        """Bytes of memory, nearly."""
        return self._table.size + 3 * self._times.itemsize * len(self._times)

    def see(
        self, base: int, records: int, appended_at: int, ids: bytes, digests: Sequence[bytes] | None = None
    ) -> None:
        """A stored row, and its ids if it has any. One that was seen before changes nothing."""
        if base < self.end:
            return
        if ids:
            number = self._table.add(ids, digests)
            if not self._continues(number, base, appended_at):
                self._numbers.append(number)
                self._offsets.append(base)
                self._times.append(appended_at)
        self.end = base + records
        if self.end - self.start > self._limit:
            self.forget_below(self.end - self._limit)

    def _continues(self, number: int, base: int, appended_at: int) -> bool:
        if not self._times or self._times[-1] != appended_at:
            return False
        return base - self._offsets[-1] == number - self._numbers[-1]

    def known(self, digests: Sequence[bytes]) -> list[bytes]:
        """Those that may be remembered."""
        return self._table.known(digests)

    def offset(self, digest: bytes) -> int:
        """Where the newest message with that id is; -1 if none is known."""
        number = self._table.number(digest)
        if number < 0:
            return -1
        mark = bisect_right(self._numbers, number) - 1
        return self._offsets[mark] + number - self._numbers[mark]

    def remembered(self, offset: int, now: int, window_ms: int, floor: int) -> bool:
        """Whether the message at that offset counts. From `floor` on some group has not settled it."""
        if offset < self.end - self._limit:
            return False
        stored_at = self._times[bisect_right(self._offsets, offset) - 1]
        return offset >= floor or now - stored_at < window_ms

    def needed(self, now: int, window_ms: int, floor: int) -> int:
        """The first offset whose id counts, as far as this window knows the times."""
        mark = bisect_right(self._times, now - window_ms)
        by_time = self._offsets[mark] if mark < len(self._offsets) else self.end
        return max(min(by_time, floor), self.end - self._limit)

    def forget_below(self, offset: int) -> None:
        if offset <= self.start:
            return
        self.start = offset
        mark = bisect_right(self._offsets, offset) - 1  # this one is still needed, those before it are not
        if mark < 0:
            return
        until = self._numbers[mark + 1] if mark + 1 < len(self._numbers) else self._table.end
        self._table.forget_below(min(self._numbers[mark] + offset - self._offsets[mark], until))
        if mark >= _TRIM:
            del self._numbers[:mark], self._offsets[:mark], self._times[:mark]
