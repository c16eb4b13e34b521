"""A member of an ordered group, as the broker and the SDK make it: claim, poll, handle, ack.

What it may read is `broker.unread`'s to say, with a route and a group that may be old. What it handles goes
into its group's book of the generation that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

from postroom.broker.deliver.readable import Unread
from postroom.errors import GateClosed, GenerationChanged, UnknownPartition
from postroom.model.delivery.delivery import Kind, OrderedAsk, Settlement
from postroom.store.contract import Bounds, Granted, Group, Store
from tests.model.route_truth import Book, Message, Truth

__all__ = ["LEASE_MS", "Member"]

LEASE_MS = 1000
_holds = count(1)


@dataclass
class Item:
    offset: int
    message: Message | None  # None: a control batch (I18)
    handled: bool = False


@dataclass
class Hand:
    """A partition that the member holds, as far as it knows."""

    until: int
    hold: int = field(default_factory=lambda: next(_holds))
    position: int | None = None
    items: dict[int, Item] = field(default_factory=dict)

    def able(self) -> list[Item]:
        """What may be handled now: the first of each key."""
        found, keys = list[Item](), set[int]()
        for _, item in sorted(self.items.items()):
            if item.message is not None and not item.handled and item.message[0] not in keys:
                keys.add(item.message[0])
                found.append(item)
        return found


class Member:
    def __init__(
        self,
        store: Store,
        truth: Truth,
        unread: Unread,
        tokens: Iterator[int],
        group: Group,
        books: dict[int, Book],
    ) -> None:
        self._store, self._truth, self._unread, self._tokens = store, truth, unread, tokens
        self._books = books  # by generation
        self.group = group
        self.hands: dict[int, Hand] = {}
        self.token = next(tokens)
        self.refresh()

    def refresh(self) -> None:
        self.route = self._store.catalog.topic(self.group.topic).route
        group = self._store.catalog.group(self.group.topic, self.group.name)
        if group.generation != self.group.generation:
            self.hands.clear()
        self.group = group

    @property
    def book(self) -> Book:
        return self._books[self.group.generation]

    def crash(self) -> None:
        self.hands.clear()
        self.token = next(self._tokens)
        self.refresh()

    # ---- polls ----

    def poll(self, which: int, messages: int, *, answered: bool = True, anywhere: bool = False) -> bool:
        """One partition of those it may read, or of all; whether that brought anything."""
        try:
            found = self._all() if anywhere else self._readable()
            if not found:
                return False
            place = sorted(found)[which % len(found)]
            granted = self._ask(place, found[place], messages, answered)
        except (UnknownPartition, GenerationChanged):
            self.refresh()
            return False
        except GateClosed:
            return False
        return bool(granted and granted.deliveries)

    def poll_all(self, messages: int) -> bool:
        brought = False
        for which in range(len(self.route.partitions)):
            brought |= self.poll(which, messages)
        return brought

    def _all(self) -> dict[int, Bounds]:
        return self._store.log.bounds([piece.partition_id for piece in self.route.partitions])

    def _readable(self) -> dict[int, Bounds]:
        ids = [piece.partition_id for piece in self._unread.partitions(self.route, self.group)]
        bounds = self._store.log.bounds(ids)
        peeks = self._store.progress.peek(self.group, ids)
        wanted = self._unread.look(self.route, self.group, bounds, peeks)
        for place in set(ids) - wanted:
            self.hands.pop(place, None)  # drained
        return {place: bounds[place] for place in wanted}

    def _ask(self, place: int, bounds: Bounds, messages: int, answered: bool) -> Granted | None:
        hand = self.hands.get(place)
        expects = None if hand is None else hand.position
        ask = OrderedAsk(f"m{self.token}", self.token, messages, bounds.end, expects)
        sent_at = self._store.now_ms()
        granted = self._store.progress.poll_ordered(self.group, place, ask, log_start=bounds.start)
        if not answered:
            return None
        if granted.holder is not None:
            self.hands.pop(place, None)
            return granted
        if hand is None or expects is None:
            hand = self.hands[place] = Hand(0)
        hand.until = sent_at + LEASE_MS
        for delivery in granted.deliveries:
            for offset in range(delivery.first, delivery.last + 1):
                message = self._truth.at.get((place, offset))
                hand.items[offset] = Item(offset, message, handled=message is None)
            hand.position = delivery.last + 1
        return granted

    # ---- work ----

    def handle(self, which: int) -> bool:
        now = self._store.now_ms()
        ready = [(hand, item) for hand in self.hands.values() if now < hand.until for item in hand.able()]
        if not ready:
            return False
        hand, item = ready[which % len(ready)]
        assert item.message is not None
        self.book.handle(hand.hold, item.message)
        item.handled = True
        return True

    def ack(self, which: int, most: int) -> None:
        """What was handled of one partition, or the last few of it."""
        able = [place for place, hand in self.hands.items() if any(i.handled for i in hand.items.values())]
        if able:
            self._ack(sorted(able)[which % len(able)], most)

    def _ack(self, place: int, most: int) -> None:
        hand = self.hands[place]
        done = [item for _, item in sorted(hand.items.items()) if item.handled][-most:]
        acks = [Settlement(Kind.ACK, item.offset, item.offset) for item in done]

        def settle() -> None:
            answer = self._store.progress.settle(self.group, place, self.token, acks)
            lost = {offset for first, last in answer.lost for offset in range(first, last + 1)}
            for item in done:
                del hand.items[item.offset]
                if item.offset not in lost and item.message is not None:
                    self.book.settle(item.message)

        self._in_generation(settle)

    def ack_all(self) -> None:
        for place in list(self.hands):
            if place in self.hands:
                self._ack(place, 10**6)

    def extend(self) -> None:
        def renew() -> None:
            for place, hand in list(self.hands.items()):
                now = self._store.now_ms()
                if self._store.progress.extend(self.group, place, self.token, [(0, 0)]):
                    del self.hands[place]
                else:
                    hand.until = now + LEASE_MS

        self._in_generation(renew)

    def hand_over(self, which: int) -> None:
        if self.hands:
            place = sorted(self.hands)[which % len(self.hands)]
            del self.hands[place]
            self._in_generation(lambda: self._store.progress.hand_over(self.group, place, self.token))

    def _in_generation(self, verb: Callable[[], None]) -> None:
        try:
            verb()
        except (GenerationChanged, GateClosed):
            self.hands.clear()
            self.refresh()
