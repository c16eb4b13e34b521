"""The ordered machine with members that park what waits behind a failing message, and take it out again.

The rules of the SDK (I27): behind a message that waits for its time, what was never tried is claimed for a
line of the store; whatever comes of that key later is claimed too; a key whose hands are empty goes on with
its line. Replies to all of that get lost, and members crash in between. The checks are those of the ordered
machine: nothing lost, nothing in two places, every key in order, and everything ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition

from postroom.model.delivery.delivery import Kind, Line, OrderedAsk, Settlement, Span
from postroom.store.contract import Granted
from tests.model.ordered_machine import WHO, OrderedMachine
from tests.model.ordered_member import Item, Member
from tests.model.ordered_rules import LEASE_MS, offsets
from tests.model.steps import step

__all__ = ["ParkingMachine"]

THEN = st.sampled_from(["goes on", "goes on", "goes on", "repeats it", "crashes"])


class ParkingMachine(OrderedMachine):
    backend: Any

    @initialize(
        attempts=st.integers(2, 4),
        stop=st.booleans(),
        keys=st.lists(st.integers(0, 2), min_size=8, max_size=16),
        members=st.integers(1, 2),
        poison=st.sets(st.integers(4, 30), max_size=1),
    )
    def begin_run(self, attempts: int, stop: bool, keys: list[int], members: int, poison: set[int]) -> None:
        """With something in somebody's hands."""
        super().begin_run.__wrapped__(self, attempts, stop, keys, members, poison)  # type: ignore[attr-defined]
        self._poll(self.members[0], self._ask(self.members[0], 12, self.stamp()))

    def _poll(self, member: Member, ask: OrderedAsk, *, lost: bool = False) -> Granted:
        on_delivery = ask.on_delivery and not self.backend.picture().lines
        reply = super()._poll(member, replace(ask, on_delivery=on_delivery), lost=lost)
        if lost or on_delivery or reply.holder is not None:
            return reply
        if not (reply.deliveries or reply.draining or reply.recall or reply.unplaced) and member.lease_until:
            member.position = max(member.position or 0, self.backend.picture().cursor)  # as brokers say
        if ask.expects is None and member.lease_until:
            member.lines = {int(line.key or b""): line for line in reply.lines}
        self._claim_new(member)
        return reply

    def _claim_new(self, member: Member) -> None:
        for key, line in list(member.lines.items()):
            found = [o for o, i in member.hands.items() if i.key == key and o >= line.first]
            if found and member.lease_until:
                self._claim(member, key, sorted(found))

    # ---- parking ----

    @precondition(lambda self: any(self._parkable(m) for m in self.members))
    @step(who=WHO, then=THEN)
    def park(self, who: int, then: str) -> None:
        able = [(m, key, tail) for m in self.members for key, tail in self._parkable(m).items()]
        self._claim(*able[who % len(able)], then=then)

    def _parkable(self, member: Member) -> dict[int, list[int]]:
        """By key, what was never tried behind a message that waits for its time."""
        now, found = self.backend.now(), dict[int, list[int]]()
        if now >= member.lease_until:
            return found
        for key in {item.key for item in member.hands.values()}:
            first, *rest = sorted((i for i in member.hands.values() if i.key == key), key=lambda i: i.offset)
            tail: list[int] = []
            while rest and rest[-1].attempt == 1 and not rest[-1].alone and rest[-1].not_before <= now:
                tail.insert(0, rest.pop().offset)
            if tail and first.not_before > now and not any(i.at_work for i in (first, *rest)):
                found[key] = tail
        return found

    def _claim(self, member: Member, key: int, claimed: Sequence[int], then: str = "goes on") -> None:
        first, last = claimed[0], claimed[-1]
        known = member.lines.get(key)
        id = first if known is None else known.id
        more = Line(id, b"%d" % key, first, last, len(claimed))
        verdicts = [Settlement(Kind.ACK, o, o) for o in claimed]
        verdicts.append(Settlement(Kind.PARK, first, last, line=more))
        reply = self.backend.settle(self.generation, member.token, verdicts)
        if then == "repeats it":
            again = self.backend.settle(self.generation, member.token, verdicts)
            assert again == reply
        if reply.lost:
            assert self.backend.now() >= member.lease_until
            return member.lose()
        if then == "crashes":
            return self._crash(member)
        for offset in claimed:
            del member.hands[offset]
        wide = (
            more
            if known is None
            else replace(known, first=min(first, known.first), last=max(last, known.last))
        )
        member.lines[key] = wide

    # ---- taking out ----

    @step(who=WHO, messages=st.integers(1, 3), lost=st.booleans())
    def unpark(self, who: int, messages: int, lost: bool) -> None:
        able = [(m, key) for m in self.members for key in self._hungry(m)]
        if able:
            self._unpark(*able[who % len(able)], messages, lost=lost)

    def _hungry(self, member: Member) -> list[int]:
        now = self.backend.now()
        if now >= member.lease_until or not member.may_ask(now):
            return []
        busy = {item.key for item in member.hands.values()}
        received = member.position or 0
        return [key for key, line in member.lines.items() if key not in busy and line.first < received]

    def _unpark(self, member: Member, key: int, messages: int, *, lost: bool = False) -> None:
        line, keys = member.lines[key], self.ledger.keys
        last = min(line.last, (member.position or 0) - 1)
        wanted = [o for o in range(line.first, last + 1) if keys[o] == key]
        found = wanted[:messages]
        upto = found[-1] if len(found) == messages else last
        reply = self.backend.unpark(
            self.generation, member.token, member.name, line.id, list(_spans(found)), upto
        )
        if reply.holder is not None:
            return member.lose()
        if reply.draining:  # what stopped was restarted, and comes first
            assert any(not row.token for row in self.backend.picture().deliveries)
            return
        assert offsets(reply.deliveries) == found, "something of the line is missing"
        if lost:
            return
        for delivery in reply.deliveries:
            for o in offsets([delivery]):
                member.hands[o] = Item(o, key, delivery.attempt, delivery.visible_at, delivery.alone)
        if upto >= line.last:
            del member.lines[key]
        else:
            member.lines[key] = replace(line, first=upto + 1)

    # ---- heal ----

    def _round(self, member: Member) -> bool:
        if super()._round(member):
            return True
        hungry = self._hungry(member)
        for key in hungry:
            self._unpark(member, key, 2)
        return bool(hungry)

    @precondition(lambda self: any(self._followed(m) for m in self.members))
    @step(who=WHO, then=THEN, delay=st.sampled_from([1, LEASE_MS // 2, 3 * LEASE_MS]))
    def fail_and_park(self, who: int, then: str, delay: int) -> None:
        """A message with others of its key behind it fails and waits, and they are parked."""
        able = [(m, item) for m in self.members for item in self._followed(m)]
        member, item = able[who % len(able)]
        self._begin(member, item)
        if item.offset in member.hands:
            at = self.backend.now() + delay
            self._settle(member, [Settlement(Kind.RETRY, item.offset, item.offset, at, "no", self.stamp())])
        for key, tail in self._parkable(member).items():
            if key == item.key:
                self._claim(member, key, tail, then=then)

    def _followed(self, member: Member) -> list[Item]:
        followed = [i.key for i in member.hands.values() if i.attempt == 1]
        return [i for i in member.able(self.backend.now()) if followed.count(i.key) > 1]

    @precondition(lambda self: any(m.lines for m in self.members))
    @step(who=WHO, messages=st.integers(1, 3), lost=st.booleans(), ms=st.sampled_from([0, 1, LEASE_MS // 2]))
    def go_on(self, who: int, messages: int, lost: bool, ms: int) -> None:
        """Whoever has parked something handles what it has, and takes out what comes next."""
        self.backend.advance(ms)
        able = [m for m in self.members if m.lines]
        member = able[who % len(able)]
        self._work(member)
        self._settle(member, [Settlement(Kind.ACK, i.offset, i.offset) for i in member.at_work])
        for key in self._hungry(member):
            self._unpark(member, key, messages, lost=lost)


def _spans(found: Iterable[int]) -> Iterable[Span]:
    return ((offset, offset) for offset in found)
