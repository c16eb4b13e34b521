"""A member of an ordered group, by the rules of the SDK: what it has, what it may begin, what it knows.

One poll at a time, from the offset it expects next (I6). A key's messages begin in offset order, one at a
time, not before their time, and never after the lease has passed, which counts from when the poll was
sent (I16). While it has something alone it begins nothing else, and while it can handle that it asks for
nothing; what it cannot even begin, since its key waits, it releases (I14).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from postroom.model.delivery.delivery import Delivery, Line, OrderedAsk

__all__ = ["Item", "Member"]


@dataclass
class Item:
    """A message in hand."""

    offset: int
    key: int
    attempt: int
    not_before: int
    alone: bool
    at_work: bool = False


@dataclass
class Member:
    name: str
    token: int
    position: int | None = None  # the next offset it has not received
    lease_until: int = 0
    hands: dict[int, Item] = field(default_factory=dict)
    unanswered: OrderedAsk | None = None  # a poll whose reply was lost
    lines: dict[int, Line] = field(default_factory=dict)  # by key, what is parked in the store (I27)

    def lose(self) -> None:
        """The partition is not its own any more, or it handed it over."""
        self.hands, self.position, self.lease_until, self.unanswered = {}, None, 0, None
        self.lines = {}

    def crash(self, token: int) -> None:
        self.lose()
        self.token = token

    @property
    def at_work(self) -> list[Item]:
        return [item for item in self.hands.values() if item.at_work]

    def may_ask(self, now: int) -> bool:
        """Who can handle something alone asks for nothing."""
        return not any(item.alone for item in (*self.at_work, *self._ready(now)))

    def empty_handed(self, now: int) -> bool:
        """Whether it handles nothing: what waits for its time, or behind such a one, does not count."""
        return not self.at_work and not self._ready(now)

    def able(self, now: int) -> list[Item]:
        """What may begin now."""
        solo = any(item.alone for item in self.hands.values())
        ready = [item for item in self._ready(now) if item.alone or not solo]
        return ready if now < self.lease_until else []

    def stuck(self, now: int) -> list[Item]:
        """What it has alone and cannot begin: an earlier message of the key waits for its time."""
        if self.at_work:
            return []
        ready = {item.offset for item in self._ready(now)}
        return [item for item in self.hands.values() if item.alone and item.offset not in ready]

    def _ready(self, now: int) -> list[Item]:
        items = sorted(self.hands.values(), key=lambda item: item.offset)
        first = {item.key: item for item in reversed(items)}
        return [item for item in first.values() if not item.at_work and item.not_before <= now]

    def receive(self, deliveries: Sequence[Delivery], keys: Sequence[int], lease_until: int) -> None:
        """Take what a poll brought. What it had alone it has in company now."""
        for item in self.hands.values():
            item.alone = False
        self.lease_until = lease_until
        assert all(d.first >= (self.position or 0) for d in deliveries), "sent without need"
        for delivery in deliveries:
            for offset in range(delivery.first, delivery.last + 1):
                key = keys[offset]
                assert offset not in self.hands, "it has that already (I6)"
                self.hands[offset] = Item(offset, key, delivery.attempt, delivery.visible_at, delivery.alone)
            self.position = delivery.last + 1
