"""Whose turn it is: many lines of waiting things, and one who takes from them (R41).

A line is of a topic and a producer of it. Topics take turns, and so do the producers of a topic. What a
turn is worth is counted in bytes (deficit round robin): a line that has little is served whole when its
turn comes, and one that has much goes on when all others had theirs. Within a line the order never changes
(I3). Something larger than a turn is worth waits for several; nothing waits for ever, and nothing is
dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["EACH_BYTES", "TURN_BYTES", "FairQueue"]

T = TypeVar("T")

TURN_BYTES = 64 * 1024
"""What a turn is worth."""

EACH_BYTES = 4096
"""What a thing costs beside its own bytes: many small ones are work too."""


class _Line(Generic[T]):
    """First come, first served."""

    __slots__ = ("_waiting", "credit", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.credit = TURN_BYTES
        self._waiting: deque[tuple[int, T]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, cost: int, thing: T) -> None:
        self._waiting.append((cost, thing))

    def cost(self) -> int:
        return self._waiting[0][0]

    def pop(self) -> T:
        return self._waiting.popleft()[1]


class _Round(Generic[T]):
    """Lines, or rounds of them, that take turns. The first in `_order` has its turn."""

    __slots__ = ("_known", "_order", "credit", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.credit = TURN_BYTES
        self._known: dict[Hashable, _Line[T] | _Round[T]] = {}
        self._order: deque[_Line[T] | _Round[T]] = deque()

    def __bool__(self) -> bool:
        return bool(self._order)

    def enter(self, key: Hashable, kind: type[_Line[T]] | type[_Round[T]]) -> _Line[T] | _Round[T]:
        """The one with that key; if nothing waited there, it comes last."""
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = kind(key)
            self._order.append(found)
        return found

    def cost(self) -> int:
        """The cost of what comes next."""
        while True:
            first = self._order[0]
            cost = first.cost()
            if cost <= first.credit or len(self._order) == 1:
                return cost
            first.credit += TURN_BYTES
            self._order.rotate(-1)

    def pop(self) -> T:
        cost, first = self.cost(), self._order[0]
        thing = first.pop()
        first.credit = max(0, first.credit - cost)
        if not first:
            self._order.popleft()
            del self._known[first.key]
        return thing


class FairQueue(Generic[T]):
    """A queue of lines that take turns, by cost. It is not for several threads at once."""

    def __init__(self) -> None:
        self._topics: _Round[T] = _Round(None)

    def __bool__(self) -> bool:
        return bool(self._topics)

    def add(self, line: tuple[Hashable, Hashable], size: int, thing: T) -> None:
        """`line`: the topic, and who of it."""
        topic = self._topics.enter(line[0], _Round)
        assert isinstance(topic, _Round)
        mine = topic.enter(line[1], _Line)
        assert isinstance(mine, _Line)
        mine.add(size + EACH_BYTES, thing)

    def take(self, *, size: int, count: int) -> list[T]:
        """Up to that many, until their bytes are that many or more."""
        taken: list[T] = []
        while self._topics and size > 0 and len(taken) < count:
            size -= self._topics.cost() - EACH_BYTES
            taken.append(self._topics.pop())
        return taken
