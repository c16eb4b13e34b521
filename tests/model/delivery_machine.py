"""Members poll, settle, hang, crash and come back, in any order, against a naive model of what may happen.

One machine, any backend: the pure decisions over a list, or a store. Every step is checked (nothing is
lost, nothing is in two hands, the committed offset is right …), and every run ends like this: no more
faults except the poisonous messages themselves, and then everything must finish: what is harmless is
settled, what is poisonous is in the dead letters (I14).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle
from typing import ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition

from postroom.errors import GenerationChanged
from postroom.model.delivery.delivery import NOBODY, Ask, Delivery, Kind, Settlement, Span, Stamp
from postroom.store.contract import Granted, Settled
from tests.model.naive_progress import LEASE_MS, MOVER_MS, Naive, State, offsets
from tests.model.steps import Mover, guarded, step

__all__ = ["Backend", "DeliveryMachine", "Picture"]

MOST_MESSAGES = 60
DEAD_PARTITION = 9


@dataclass(frozen=True)
class Picture:
    """All there is of a group's progress in its partition."""

    cursor: int
    end: int
    committed: int
    deliveries: Sequence[Delivery]


class Backend(Protocol):
    """One group of one partition. `generation` is the one in which the asker got to know the group."""

    def now(self) -> int: ...
    def append(self, messages: int) -> None: ...
    def poll(self, generation: int, ask: Ask) -> Granted: ...
    def seize(self, generation: int, ask: Ask, spans: Sequence[Span]) -> Granted: ...
    def settle(self, generation: int, token: int, settlements: Sequence[Settlement]) -> Settled: ...
    def extend(self, generation: int, token: int, spans: Sequence[Span]) -> Sequence[Span]: ...
    def finish_move(self, generation: int, moving: Delivery) -> None: ...
    def advance(self, ms: int) -> None: ...
    def limit(self, max_attempts: int) -> None: ...
    def reset(self, offset: int) -> None: ...
    def picture(self) -> Picture: ...
    def close(self) -> None: ...


@dataclass
class Hand:
    """What a member got from one poll and, as far as it knows, still has to settle."""

    token: int
    generation: int
    alone: bool
    offsets: set[int]


@dataclass
class Member:
    name: str
    hands: list[Hand] = field(default_factory=list)
    unanswered: tuple[int, Ask] | None = None  # a poll whose reply was lost: (generation, what was asked)

    @property
    def empty_handed(self) -> bool:
        return not self.hands

    @property
    def may_ask(self) -> bool:
        """Who holds a suspect alone asks for nothing more, as the SDK does."""
        return not any(hand.alone for hand in self.hands)

    def forget(self) -> None:
        self.hands, self.unanswered = [], None

    def done(self, hand: Hand, offsets: Iterable[int]) -> None:
        hand.offsets.difference_update(offsets)
        self.hands = [hand for hand in self.hands if hand.offsets]


def spans_of(chosen: Iterable[int]) -> list[Span]:
    return [(first, last) for _, first, last in runs((offset, Kind.ACK) for offset in chosen)]


def runs(chosen: Iterable[tuple[int, Kind]]) -> Iterator[tuple[Kind, int, int]]:
    """Neighbours of one kind become one span."""
    current: tuple[Kind, int, int] | None = None
    for offset, kind in sorted(chosen, key=lambda pair: pair[0]):
        if current and current[0] is kind and current[2] == offset - 1:
            current = (kind, current[1], offset)
            continue
        if current:
            yield current
        current = (kind, offset, offset)
    if current:
        yield current


WHO = st.integers(0, 5)
MASK = st.integers(1, 2**10 - 1)
DELAY = st.sampled_from([0, 0, 1, LEASE_MS // 2, 3 * LEASE_MS])
AWAY = (Kind.MOVE, Kind.LANE)
KINDS = st.lists(st.sampled_from([kind for kind in Kind if kind is not Kind.PARK]), min_size=1, max_size=4)


def pick(mask: int, among: Iterable[int]) -> list[int]:
    return [offset for i, offset in enumerate(sorted(among)) if mask >> (i % 10) & 1]


class DeliveryMachine(RuleBasedStateMachine):
    backend_class: ClassVar[Callable[[int], Backend]]

    @initialize(
        attempts=st.integers(1, 3),
        messages=st.integers(0, 20),
        members=st.integers(1, 3),
        poison=st.sets(st.integers(0, 30), max_size=3),
    )
    def begin(self, attempts: int, messages: int, members: int, poison: set[int]) -> None:
        self.backend = type(self).backend_class(attempts)
        self.naive = Naive(attempts)
        self.members = [Member(f"member-{i}") for i in range(members)]
        self.operator = Member("operator")  # takes single messages to look at or to move: they do not kill it
        self.poison = poison
        self.generation = 1
        self.past: list[Hand] = []  # grants that reached somebody: acks of them may be on their way for ever
        self.movers: list[Mover] = []
        self.dead_log: dict[int, tuple[int, list[Span]]] = {}  # identity → (generation, what was appended)
        self.tokens = count(1)
        self.budgets = cycle([8, 2, 8, 1, 20, 5])  # of healing members
        self.stamps = count(10**6, 10**4)  # apart from each other and from the tokens
        self.committed = 0
        self.counts: dict[int, tuple[int, int]] = {}
        self.broken = False
        self._append(messages)

    @property
    def everybody(self) -> list[Member]:
        return [*self.members, self.operator]

    def _append(self, messages: int) -> None:
        messages = min(messages, MOST_MESSAGES - len(self.naive.messages))
        if messages > 0:
            self.backend.append(messages)
            self.naive.append(messages)

    def stamp(self) -> Stamp:
        return Stamp(next(self.stamps), DEAD_PARTITION)

    # ---- appends and time ----

    @step(messages=st.integers(1, 12))
    def append(self, messages: int) -> None:
        self._append(messages)

    @step(ms=st.sampled_from([LEASE_MS, 250, LEASE_MS - 1, LEASE_MS, 2 * LEASE_MS, MOVER_MS]))
    def time_passes(self, ms: int) -> None:
        self.backend.advance(ms)

    # ---- polls ----

    @step(who=WHO, messages=st.integers(0, 12), acks_before_dying=st.booleans())
    def poll(self, who: int, messages: int, acks_before_dying: bool) -> None:
        self._ask_for_more(who, messages, True, False, acks_before_dying)

    @step(who=WHO, messages=st.integers(0, 12), known=st.booleans(), lost=st.booleans())
    def poll_in_trouble(self, who: int, messages: int, known: bool, lost: bool) -> None:
        """Nobody knows where the dead letters are, or the reply is lost."""
        self._ask_for_more(who, messages, known, lost, False)

    def _ask_for_more(
        self, who: int, messages: int, known: bool, lost: bool, acks_before_dying: bool
    ) -> None:
        able = [m for m in self.members if m.may_ask and m.unanswered is None]
        if not able:
            return
        member = able[who % len(able)]
        ask = self._ask(member, messages, self.stamp() if known else None)
        reply = self._poll(ask)
        if lost and reply.deliveries:
            member.unanswered = (self.generation, ask)
        else:
            self._receive(member, ask, reply, acks_before_dying)

    @step(who=WHO, messages=st.integers(1, 6))
    def poll_on_delivery(self, who: int, messages: int) -> None:
        able = [m for m in self.members if m.may_ask and m.unanswered is None]
        if able:
            member = able[who % len(able)]
            reply = self._poll(self._ask(member, messages, self.stamp(), on_delivery=True))
            if self.poison.intersection(offsets(reply.deliveries)):
                member.forget()

    @precondition(lambda self: any(m.unanswered for m in self.members))
    @step(who=WHO, acks_before_dying=st.booleans())
    def poll_again(self, who: int, acks_before_dying: bool) -> None:
        """The reply was lost: the same poll comes a second time."""
        asking = [m for m in self.members if m.unanswered]
        member = asking[who % len(asking)]
        assert member.unanswered is not None
        generation, ask = member.unanswered
        member.unanswered, ask = None, replace(ask, end=len(self.naive.messages))
        if generation != self.generation:
            self._refused(lambda: self.backend.poll(generation, ask))
        elif self.naive.held(ask.token):
            reply = self.backend.poll(generation, ask)
            self.naive.polled_again(self.backend.now(), ask.token, reply)
            self._receive(member, ask, reply, acks_before_dying)
        else:
            self._receive(member, ask, self._poll(ask), acks_before_dying)

    def _ask(self, member: Member, messages: int, dead: Stamp | None, on_delivery: bool = False) -> Ask:
        token, end = next(self.tokens), len(self.naive.messages)
        return Ask(member.name, token, messages, end, member.empty_handed, on_delivery, dead)

    def _poll(self, ask: Ask) -> Granted:
        reply = self.backend.poll(self.generation, ask)
        self.naive.polled(self.backend.now(), ask, reply)
        self.naive.follow(self.backend.now(), self._rows(self.backend.picture()))
        self._to_movers(reply.leaving)
        return reply

    def _receive(self, member: Member, ask: Ask, reply: Granted, acks_before_dying: bool) -> None:
        got = offsets(reply.deliveries)
        if not got:
            return
        hand = Hand(ask.token, self.generation, any(d.alone for d in reply.deliveries), set(got))
        if self.poison.intersection(got):
            harmless = got[: next(i for i, offset in enumerate(got) if offset in self.poison)]
            if acks_before_dying and harmless:
                self._settle(hand, [Settlement(Kind.ACK, *span) for span in spans_of(harmless)])
            return member.forget()
        self._hold(member, hand)

    def _hold(self, member: Member, hand: Hand) -> None:
        member.hands.append(hand)
        self.past.append(replace(hand, offsets=set(hand.offsets)))

    @step(first=st.integers(0, 40), size=st.integers(1, 4), second=st.integers(0, 40))
    def seize(self, first: int, size: int, second: int) -> None:
        end = len(self.naive.messages)
        spans = spans_of({*range(first, first + size), second})
        ask = self._ask(self.operator, 1, None)
        reply = self.backend.seize(self.generation, ask, spans)
        self.naive.seized(self.backend.now(), ask, spans, reply)
        self._to_movers(reply.leaving)
        if got := offsets(reply.deliveries):
            assert max(got) < end
            self._hold(self.operator, Hand(ask.token, self.generation, False, set(got)))

    # ---- settlements ----

    def _busy(self, who: int) -> tuple[Member, Hand] | None:
        held = [(member, hand) for member in self.everybody for hand in member.hands]
        return held[who % len(held)] if held else None

    @step(who=WHO, kind=st.sampled_from([Kind.ACK, Kind.ACK, Kind.RETRY]))
    def settle_all(self, who: int, kind: Kind) -> None:
        if busy := self._busy(who):
            member, hand = busy
            self._settle(hand, self._settlements(sorted(hand.offsets), [kind], 0, stamped=True))
            member.done(hand, set(hand.offsets))

    @step(who=WHO, mask=MASK, kinds=KINDS, delay=DELAY, stamped=st.booleans(), again=st.booleans())
    def settle_some(
        self, who: int, mask: int, kinds: list[Kind], delay: int, stamped: bool, again: bool
    ) -> None:
        if busy := self._busy(who):
            member, hand = busy
            chosen = pick(mask, hand.offsets)
            settlements = self._settlements(chosen, kinds, delay, stamped)
            stay = self._settle(hand, settlements)
            if again:
                self._settle(hand, settlements)
            member.done(hand, set(chosen) - stay)

    @precondition(lambda self: self.past)
    @step(which=st.integers(0, 9), mask=MASK, kinds=KINDS, delay=DELAY, stamped=st.booleans())
    def settle_late(self, which: int, mask: int, kinds: list[Kind], delay: int, stamped: bool) -> None:
        """A settlement that was long on its way, of any grant there ever was."""
        hand = self.past[-1 - which % len(self.past)]
        self._settle(hand, self._settlements(pick(mask, hand.offsets), kinds, delay, stamped))

    def _settlements(
        self, chosen: list[int], kinds: list[Kind], delay: int, stamped: bool
    ) -> list[Settlement]:
        at = self.backend.now() + delay
        kind_of = ((offset, kinds[i % len(kinds)]) for i, offset in enumerate(chosen))
        return [
            Settlement(kind, first, last, at, "why", self.stamp() if stamped or kind in AWAY else None)
            for kind, first, last in runs(kind_of)
        ]

    def _settle(self, hand: Hand, settlements: list[Settlement]) -> set[int]:
        """Returns what stays in hand, because nobody said where it goes."""
        if hand.generation != self.generation:
            self._refused(lambda: self.backend.settle(hand.generation, hand.token, settlements))
            return set()
        reply = self.backend.settle(hand.generation, hand.token, settlements)
        self.naive.settled(self.backend.now(), hand.token, settlements, reply)
        self._to_movers(reply.leaving)
        return set(offsets(reply.unplaced))

    @step(who=WHO, mask=MASK, late=st.sampled_from([False, False, True]))
    def extend(self, who: int, mask: int, late: bool) -> None:
        if late and self.past:
            self._extend(self.past[-1 - who % len(self.past)], mask)
        elif busy := self._busy(who):
            self._extend(busy[1], mask)

    def _extend(self, hand: Hand, mask: int) -> None:
        spans = spans_of(pick(mask, hand.offsets))
        if hand.generation != self.generation:
            self._refused(lambda: self.backend.extend(hand.generation, hand.token, spans))
        else:
            lost = self.backend.extend(hand.generation, hand.token, spans)
            self.naive.extended(self.backend.now(), hand.token, spans, lost)

    def _refused(self, verb: Callable[[], object]) -> None:
        try:
            verb()
        except GenerationChanged:
            return
        raise AssertionError("a verb of an earlier generation was not refused (I10)")

    # ---- faults ----

    @step(who=WHO, ms=st.sampled_from([0, LEASE_MS]))
    def crash(self, who: int, ms: int) -> None:
        self.everybody[who % len(self.everybody)].forget()
        self.backend.advance(ms)

    @precondition(lambda self: self.generation < 2 and self.naive.cursor > 10)
    @step(offset=st.integers(0, 30))
    def reset(self, offset: int) -> None:
        self.backend.reset(offset)
        self.naive.reset(offset)
        self.generation += 1
        self.committed, self.counts = self.naive.cursor, {}

    @precondition(lambda self: self.naive.max_attempts > 1)
    @step(attempts=st.integers(1, 4), ms=st.sampled_from([0, LEASE_MS]))
    def alter_limit(self, attempts: int, ms: int) -> None:
        self.backend.limit(attempts)
        self.naive.max_attempts = attempts
        self.backend.advance(ms)

    # ---- movers (I12) ----

    def _to_movers(self, leaving: Iterable[Delivery]) -> None:
        self.movers += (Mover(self.generation, moving) for moving in leaving)

    @precondition(lambda self: self.movers)
    @step(which=st.integers(0, 5), how=st.sampled_from(["crashes", "appends, crashes", "appends, deletes"]))
    def mover(self, which: int, how: str) -> None:
        mover = self.movers.pop(which % len(self.movers))
        if "appends" in how:
            self._append_dead(mover)
        if "deletes" in how:
            self._finish(mover)

    def _append_dead(self, mover: Mover) -> None:
        """Into the dead letters, where an identity is taken only once: a repeat is dropped (I3)."""
        spans = [(one.first, one.last) for one in self._together(mover)]
        self.dead_log.setdefault(mover.moving.token, (mover.generation, spans))

    def _together(self, mover: Mover) -> list[Delivery]:
        """All that leaves for a lane under one identity is moved in one append, and settled in one verb."""
        moving = mover.moving
        if moving.token not in self.naive.lanes or mover.generation != self.generation:
            return [moving]
        return [one for one in self.backend.picture().deliveries if one.token == moving.token]

    def _finish(self, mover: Mover) -> None:
        if mover.generation != self.generation:
            self._refused(lambda: self.backend.finish_move(mover.generation, mover.moving))
        else:
            for moving in self._together(mover):
                self.backend.finish_move(mover.generation, moving)
            self.naive.moved(mover.moving.token)

    # ---- what holds after every step ----

    @invariant()
    @guarded
    def the_model_agrees(self) -> None:
        picture, naive = self.backend.picture(), self.naive
        rows, unsettled = self._rows(picture), dict(naive.unsettled())
        assert (picture.cursor, picture.end) == (naive.cursor, len(naive.messages))
        assert rows.keys() == unsettled.keys(), "a message was lost, or came back"
        for offset, message in unsettled.items():
            row = rows[offset]
            assert (row.token, row.visible_at) == (message.token, message.at)
            assert (row.spent, row.failures) == (message.spent, message.failures)
            assert (row.stamp is not None) == (message.state is State.LEAVING)
            assert row.suspect == message.suspect or row.stamp is not None
            assert (row.token == NOBODY) == (message.state is State.WAITING)
        self._check_committed(picture)
        self._check_counts(rows)
        self._check_dead()

    def _rows(self, picture: Picture) -> dict[int, Delivery]:
        rows: dict[int, Delivery] = {}
        for row in picture.deliveries:
            for offset in offsets([row]):
                assert offset not in rows, "two deliveries overlap"
                assert offset < picture.cursor, "a delivery above the cursor"
                rows[offset] = row
        return rows

    def _check_committed(self, picture: Picture) -> None:
        assert picture.committed == self.naive.committed(), "committed is the lowest unsettled offset"
        assert picture.committed >= self.committed, "committed went back"
        self.committed = picture.committed

    def _check_counts(self, rows: dict[int, Delivery]) -> None:
        for offset, row in rows.items():
            spent, failures = self.counts.get(offset, (0, 0))
            assert row.spent >= spent and row.failures >= failures, "attempts shrank"
            self.counts[offset] = (row.spent, row.failures)

    def _check_dead(self) -> None:
        appended = [o for generation, spans in self.dead_log.values() if generation == self.generation
                    for o in offsets(spans)]  # fmt: skip
        assert len(set(appended)) == len(appended), "twice in the dead letters"
        states = [message.state for message in self.naive.messages]
        assert all(states[o] in (State.LEAVING, State.DEAD) for o in appended)
        assert all(o in appended for o, state in enumerate(states) if state is State.DEAD)

    # ---- heal, then everything must finish ----

    def teardown(self) -> None:
        if not hasattr(self, "backend"):
            return
        try:
            if not self.broken:
                self.heal()
        finally:
            self.backend.close()

    def heal(self) -> None:
        """Members live (but for the poison), movers work, leases do not run out any more."""
        doomed = {o for o, m in self.naive.unsettled() if m.state is State.LEAVING or self.naive.exhausted(o)}
        healthy = {o for o, m in enumerate(self.naive.messages) if m.state is not State.DEAD} - doomed
        open_poison = {o for o in self.poison & healthy if self.naive.messages[o].state is not State.SETTLED}
        self.movers.clear()
        for member in self.everybody:
            member.forget()
        for _ in range(self._rounds_allowed()):
            if self._finished():
                break
            self._round()
        assert self._finished(), "it never ends"
        states = [message.state for message in self.naive.messages]
        assert all(states[o] is State.SETTLED for o in healthy - self.poison), "innocent, and dead (I14)"
        assert all(states[o] is State.DEAD for o in open_poison), "poisonous, and settled"
        picture = self.backend.picture()
        assert not picture.deliveries
        assert picture.committed == picture.cursor == picture.end

    def _rounds_allowed(self) -> int:
        """Old leases and retries; each message once; each poisonous one halved down to, and tried alone."""
        return 15 + len(self.naive.messages) // 2 + 8 * len(self.poison)

    def _finished(self) -> bool:
        return all(m.state in (State.SETTLED, State.DEAD) for m in self.naive.messages)

    def _round(self) -> None:
        """Everybody asks twice, settles all, and a lease of time passes."""
        for member in (*self.members, *self.members):
            if member.may_ask:
                ask = self._ask(member, next(self.budgets), self.stamp())
                self._receive(member, ask, self._poll(ask), acks_before_dying=False)
        for member in self.members:
            for hand in member.hands:
                self._settle(hand, [Settlement(Kind.ACK, *span) for span in spans_of(hand.offsets)])
            member.forget()
        for mover in self.movers:
            self._append_dead(mover)
            self._finish(mover)
        self.movers.clear()
        self.the_model_agrees()
        self.backend.advance(LEASE_MS)
