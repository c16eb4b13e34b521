"""A naive model of one group's progress in one partition: one record per message, no ranges.

Written without looking at `postroom.model.delivery`, from the rules alone. It does not predict what a poll
hands out. It says whether what was handed out was allowed, and what every message has gone through since.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from postroom.model.delivery.delivery import Ask, Delivery, Kind, Settlement, Span
from postroom.store.contract import Granted, Settled

LEASE_MS = 1000
MOVER_MS = 10_000


class State(Enum):
    NEW = "above the cursor"
    WAITING = "in nobody's hands"
    HELD = "in somebody's hands"
    LEAVING = "stamped, on its way to the dead letters"
    SETTLED = "done"
    DEAD = "in the dead letters"


UNSETTLED = (State.WAITING, State.HELD, State.LEAVING)


@dataclass
class Message:
    state: State = State.NEW
    token: int = 0
    at: int = 0  # HELD: the lease ends; WAITING: not before; LEAVING: another mover may resume
    spent: int = 0
    failures: int = 0
    suspect: bool = False
    solo: bool = False  # handed out as the only message of a member with nothing else
    given_up: bool = False  # somebody said it belongs to the dead letters

    def expire(self) -> None:
        """Its lease ran out and was taken away (I14)."""
        self.spent += 1
        self.failures += self.solo
        self.suspect, self.solo, self.state, self.token = True, False, State.WAITING, 0

    def leave(self, moving: Delivery, now: int) -> None:
        self.state, self.token, self.at = State.LEAVING, moving.token, now + MOVER_MS


def offsets(spans: Iterable[Span | Delivery]) -> list[int]:
    pairs = ((s.first, s.last) if isinstance(s, Delivery) else s for s in spans)
    return [offset for first, last in pairs for offset in range(first, last + 1)]


@dataclass
class Naive:
    max_attempts: int
    cursor: int = 0
    messages: list[Message] = field(default_factory=list)
    identities: dict[int, Span] = field(default_factory=dict)  # every stamp ever given
    lanes: set[int] = field(default_factory=set)  # identities under which many move together

    def append(self, count: int) -> None:
        self.messages += (Message() for _ in range(count))

    def reset(self, offset: int) -> None:
        self.cursor = min(offset, len(self.messages))
        self.messages = [
            Message(State.SETTLED if o < self.cursor else State.NEW) for o in range(len(self.messages))
        ]

    # ---- what may be handed out ----

    def exhausted(self, offset: int) -> bool:
        message = self.messages[offset]
        counted = message.failures + (message.state is State.HELD and message.solo)
        return counted >= self.max_attempts

    def due(self, now: int) -> list[int]:
        """What a poll may hand out again, lowest first."""
        return [
            offset
            for offset, message in enumerate(self.messages)
            if message.state in (State.WAITING, State.HELD)
            and message.at <= now
            and not self.exhausted(offset)
        ]

    def suspect(self, offset: int) -> bool:
        message = self.messages[offset]
        return message.suspect or message.state is State.HELD  # held and due: its lease ran out

    def lot(self, offset: int) -> int:
        """How many messages lie in one piece around a held one, at most."""

        def alike(other: int) -> bool:
            one, two = self.messages[offset], self.messages[other]
            return (two.state, two.token, two.at) == (one.state, one.token, one.at)

        first = last = offset
        while first > 0 and alike(first - 1):
            first -= 1
        while last + 1 < len(self.messages) and alike(last + 1):
            last += 1
        return last - first + 1

    # ---- poll ----

    def polled(self, now: int, ask: Ask, reply: Granted) -> None:
        due = self.due(now)
        self._check_shares(due, ask, reply)
        self._check_suspects(now, due, ask, reply)
        for moving in reply.leaving:
            self._takes_leave(moving, now)
        for span in reply.unplaced:
            assert ask.dead is None
            assert all(self.exhausted(o) for o in offsets([span]))
        for delivery in reply.deliveries:
            self._handed_out(delivery, now, ask)

    def _check_shares(self, due: list[int], ask: Ask, reply: Granted) -> None:
        """The budget holds; due ones take at most half of it while there is something new (I17)."""
        fresh = len(self.messages) - self.cursor
        granted = offsets(reply.deliveries)
        assert len(granted) <= max(1, ask.messages)
        if not any(d.alone for d in reply.deliveries):
            assert len([o for o in granted if o < self.cursor]) <= self._share(ask)
        if ask.empty_handed and due:
            assert due[0] in granted, "holes first (R21)"
        elif [o for o in due if not self.suspect(o)]:
            assert granted, "a retry was withheld"
        elif fresh and not due:
            assert granted, "new messages were withheld"

    def _share(self, ask: Ask) -> int:
        """How many due messages a poll may give."""
        fresh, budget = len(self.messages) - self.cursor, max(1, ask.messages)
        return max((budget + 1) // 2, budget - fresh)

    def _check_suspects(self, now: int, due: list[int], ask: Ask, reply: Granted) -> None:
        """Suspects go out in halves, and alone unless no hands were empty for a whole lease (I14)."""
        for delivery in reply.deliveries:
            old = [o for o in offsets([delivery]) if o < self.cursor]
            if delivery.alone:
                assert ask.empty_handed and reply.deliveries == (delivery,)
                assert all(self.suspect(o) for o in old) and len(old) == delivery.size
            for offset in old:
                message = self.messages[offset]
                if message.state is State.HELD:
                    assert delivery.size <= (self.lot(offset) + 1) // 2
                if self.suspect(offset) and not delivery.alone:
                    assert now - message.at >= LEASE_MS, "a suspect in company"
        granted = offsets(reply.deliveries)
        again = [o for o in granted if o < self.cursor]
        waiting = [o for o in due if self.suspect(o) and now - self.messages[o].at < LEASE_MS]
        withheld = set(waiting).difference(granted)
        if withheld and len(again) < self._share(ask) and not any(d.alone for d in reply.deliveries):
            assert granted == again, "something new was given while a suspect waits"
            assert reply.draining
        assert withheld or not reply.draining

    def _takes_leave(self, moving: Delivery, now: int) -> None:
        span = (moving.first, moving.last)
        self._identified(moving)
        for offset in offsets([span]):
            message = self.messages[offset]
            assert message.at <= now, "taken from a live holder or mover"
            if message.state is State.LEAVING:
                assert message.token == moving.token, "resumed under another identity (I12)"
            else:
                assert self.exhausted(offset), "an innocent leaves (I14)"
                if message.state is State.HELD:
                    message.expire()
            message.leave(moving, now)
            assert (moving.spent, moving.failures) == (message.spent, message.failures)

    def _handed_out(self, delivery: Delivery, now: int, ask: Ask) -> None:
        assert (delivery.token, delivery.visible_at) == (ask.token, now + LEASE_MS)
        assert delivery.stamp is None
        for offset in offsets([delivery]):
            message = self.messages[offset]
            if message.state is State.NEW:
                assert offset == self.cursor, "the cursor jumps"
                self.cursor += 1
            else:
                assert message.state in (State.WAITING, State.HELD), f"{message.state} was handed out"
                assert message.at <= now, "handed out while it is in other hands (I7)"
                assert not self.exhausted(offset)
                if message.state is State.HELD:
                    message.expire()
            assert (delivery.spent, delivery.failures) == (message.spent, message.failures)
            message.token, message.at = ask.token, delivery.visible_at
            message.solo = delivery.alone and delivery.size == 1
            message.state = State.SETTLED if ask.on_delivery else State.HELD

    def held(self, token: int) -> list[int]:
        return [o for o, m in enumerate(self.messages) if m.state is State.HELD and m.token == token]

    def polled_again(self, now: int, token: int, reply: Granted) -> None:
        """The same poll again gives the same messages, and the lease counts from now (I6, I16)."""
        assert offsets(reply.deliveries) == self.held(token)
        before = max((self.messages[offset].at for offset in self.held(token)), default=0)
        until = now + LEASE_MS if before < now + LEASE_MS else before + 1  # never that of an earlier answer
        assert all(d.visible_at == until for d in reply.deliveries), "a lease that is no lease"
        self.extended(until - LEASE_MS, token, ((d.first, d.last) for d in reply.deliveries), [])

    def seized(self, now: int, ask: Ask, spans: Iterable[Span], reply: Granted) -> None:
        """Exactly what was asked for, unless it is settled, leaving, or in live hands."""
        wanted = [o for o in offsets(spans) if o < len(self.messages)]
        reach = max(wanted, default=-1) + 1
        for message in self.messages[self.cursor : reach]:
            message.state, message.at = State.WAITING, now
        self.cursor = max(self.cursor, reach)
        free = [o for o in wanted if self._free(self.messages[o], now)]
        assert sorted(offsets(reply.deliveries)) == free
        for moving in reply.leaving:
            self._takes_leave(moving, now)
        for delivery in reply.deliveries:
            for offset in offsets([delivery]):
                message = self.messages[offset]
                message.state, message.token, message.at = State.HELD, ask.token, now + LEASE_MS
                message.solo = False

    def _free(self, message: Message, now: int) -> bool:
        return message.state is State.WAITING or (message.state is State.HELD and message.at <= now)

    # ---- settle ----

    def settled(self, now: int, token: int, settlements: Iterable[Settlement], reply: Settled) -> None:
        lost, unplaced, leaving = list[int](), list[int](), dict[int, Delivery]()
        for moving in reply.leaving:
            leaving.update(dict.fromkeys(offsets([moving]), moving))
        left = set[int]()
        for settlement in settlements:
            for offset in offsets([(settlement.first, settlement.last)]):
                message = self.messages[offset]
                if message.state is not State.HELD or message.token != token:
                    lost += [offset] if message.state in UNSETTLED else []
                elif settlement.kind is Kind.ACK:
                    message.state = State.SETTLED
                elif settlement.kind is Kind.RELEASE:
                    self._waits(message, settlement.visible_at)
                elif settlement.kind is Kind.LANE:  # not an attempt
                    left.add(offset)
                    self.lanes.add(leaving[offset].token)
                    self._sent_away(offset, leaving[offset], now)
                elif self._stays(message, settlement):
                    unplaced.append(offset)
                else:
                    message.spent += 1
                    message.failures += settlement.kind is Kind.RETRY
                    message.given_up |= settlement.kind is Kind.MOVE
                    if settlement.kind is Kind.MOVE or message.failures >= self.max_attempts:
                        left.add(offset)
                        self._sent_away(offset, leaving[offset], now)
                    else:
                        self._waits(message, settlement.visible_at)
        assert sorted(offsets(reply.lost)) == lost
        assert sorted(offsets(reply.unplaced)) == unplaced
        assert leaving.keys() == left

    def _stays(self, message: Message, settlement: Settlement) -> bool:
        last = settlement.kind is Kind.RETRY and message.failures + 1 >= self.max_attempts
        return last and settlement.stamp is None

    def _waits(self, message: Message, at: int) -> None:
        message.state, message.token, message.at = State.WAITING, 0, at
        message.suspect = message.solo = False

    def _sent_away(self, offset: int, moving: Delivery, now: int) -> None:
        self._identified(moving)
        self.messages[offset].leave(moving, now)

    def _identified(self, moving: Delivery) -> None:
        assert moving.stamp is not None and moving.token == moving.stamp.producer_id
        span = (moving.first, moving.last)
        if moving.token not in self.lanes:
            assert self.identities.setdefault(moving.token, span) == span, "two under one identity (I12)"

    def extended(self, now: int, token: int, spans: Iterable[Span], lost: Iterable[Span]) -> None:
        mine = set(self.held(token))
        asked = offsets(spans)
        assert sorted(offsets(lost)) == [o for o in asked if o not in mine]
        for offset in mine.intersection(asked):
            self.messages[offset].at = now + LEASE_MS

    def moved(self, identity: int) -> None:
        """A mover has deleted what it appended."""
        for message in self.messages:
            if message.state is State.LEAVING and message.token == identity:
                message.state = State.DEAD

    # ---- the whole picture ----

    def unsettled(self) -> Iterator[tuple[int, Message]]:
        return ((o, m) for o, m in enumerate(self.messages) if m.state in UNSETTLED)

    def committed(self) -> int:
        return min((offset for offset, _ in self.unsettled()), default=self.cursor)

    def follow(self, now: int, rows: dict[int, Delivery]) -> None:
        """A lease that ran out may be taken away whenever somebody polls: the rest of a halved range."""
        for offset, message in self.unsettled():
            row = rows.get(offset)
            if message.state is State.HELD and message.at <= now and row is not None and row.token == 0:
                message.expire()
