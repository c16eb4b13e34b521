"""What is so while a route changes: what was stored where, and what a group may handle when (I4, I10).

Messages of a key are numbered in the order in which they were sent. Whoever handles one of an ordered group
must have all earlier ones of its key behind it: settled; or, in the same partition, handled under the same
hold. Nothing is handled again once it is settled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from postroom.model.topology.route import Route

__all__ = ["Book", "Message", "Place", "Truth"]

Message = tuple[int, int]  # key, number
Place = tuple[int, int]  # partition id, offset


class Truth:
    """What the store was given and has taken."""

    def __init__(self) -> None:
        self.stored: dict[Message, Place] = {}
        self.at: dict[Place, Message] = {}
        self.numbers: dict[int, list[int]] = {}  # by key, as stored

    def store(self, partition_id: int, offset: int, messages: Iterable[Message]) -> None:
        for at, message in enumerate(messages, offset):
            key, number = message
            known = self.numbers.setdefault(key, [])
            assert message not in self.stored, f"{message} is stored twice"
            assert not known or known[-1] < number, f"{message} is stored behind {known[-1]} (I4)"
            known.append(number)
            self.stored[message] = (partition_id, at)
            self.at[partition_id, at] = message


@dataclass
class Book:
    """One group in one generation."""

    truth: Truth
    starts: dict[int, int]
    """By partition; those that are opened later are read from 0."""
    settled: set[Message] = field(default_factory=set)
    handled: set[Message] = field(default_factory=set)
    under: dict[int, set[Message]] = field(default_factory=dict)  # by hold
    before: Book | None = None
    """The generation from which on the group stays where it is in partitions that `starts` does not name."""

    def _left(self, message: Message) -> bool:
        return self.before is not None and self.truth.stored[message][0] not in self.starts

    def wanted(self, message: Message) -> bool:
        if self.before is not None and self._left(message):
            return self.before.wanted(message)
        partition_id, offset = self.truth.stored[message]
        return offset >= self.starts.get(partition_id, 0)

    def is_settled(self, message: Message) -> bool:
        left = self.before is not None and self._left(message) and self.before.is_settled(message)
        return left or message in self.settled

    def unsettled(self) -> list[Message]:
        return [
            message for message in self.truth.stored if not self.is_settled(message) and self.wanted(message)
        ]

    def closed(self, history: Iterable[Route], slot: Callable[[int], int]) -> set[int]:
        """Partitions that must not be open: an earlier one of a slot has a message left for that slot.

        Told by who had the slot in each version, not by the lineage that the store keeps.
        """
        routes, found = list(history), set[int]()
        for message in self.unsettled():
            owners = [route.of_slot(slot(message[0])).partition_id for route in routes]
            place = self.truth.stored[message][0]
            last = max(at for at, owner in enumerate(owners) if owner == place)
            found.update(owners[last + 1 :])
        return found

    def handle(self, hold: int, message: Message) -> None:
        mine = self.under.setdefault(hold, set())
        assert self.wanted(message), f"{message} lies before the group's start"
        assert not self.is_settled(message), f"{message} is handled again, and was settled"
        assert message not in mine, f"{message} is handled twice under one hold"
        key, number = message
        for before in self.truth.numbers[key]:
            earlier = (key, before)
            if before >= number or self.is_settled(earlier) or not self.wanted(earlier):
                continue
            here = self.truth.stored[earlier][0] == self.truth.stored[message][0]
            assert here, f"{message} is handled before {earlier}, of a partition that it follows (I10)"
            assert earlier in mine, f"{message} is handled before {earlier} (I5)"
        mine.add(message)
        self.handled.add(message)

    def settle(self, message: Message) -> None:
        assert message in self.handled, f"{message} is settled, and nobody handled it"
        self.settled.add(message)
