"""Members of an ordered group poll, work, fail, hang, crash and come back, in any order.

One machine, any backend: the pure decisions over a list, or a store. Each step is checked against the
rules (`ordered_rules`), and each message that begins against what users are promised (`ordered_ledger`).
Every run ends like this: no more faults except the poisonous messages themselves, and then everything must
finish: what is harmless is acked, once, in order; what is poisonous is in the dead letters, or stopped
until somebody cures and restarts it (I10, I14, R22, R23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import count, cycle
from typing import ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition

from postroom.errors import GenerationChanged
from postroom.model.delivery.delivery import (
    NOBODY,
    Delivery,
    Holder,
    Kind,
    OrderedAsk,
    Settlement,
    Span,
    Stamp,
)
from postroom.store.contract import Granted, Settled
from tests.model.ordered_ledger import Ledger
from tests.model.ordered_member import Item, Member
from tests.model.ordered_rules import (
    FAR,
    LEASE_MS,
    MAX_HOLD_MS,
    MOVER_MS,
    Limits,
    Picture,
    check_poll,
    check_settle,
    offsets,
)
from tests.model.steps import Mover, guarded, step

__all__ = ["Backend", "OrderedMachine"]

MOST_MESSAGES = 40
DEAD_PARTITION = 9
NOBODY_HOLDS = Holder(NOBODY, "", 0)
_QUIET_ROUNDS = (MOVER_MS + MAX_HOLD_MS) // LEASE_MS  # nothing waits longer
_MOST_ROUNDS = 20 * MOST_MESSAGES  # suspects come one by one after each crash, until the poison is found


class Backend(Protocol):
    """One ordered group of one partition. `generation` is the one in which the asker knows the group."""

    def now(self) -> int: ...
    def append(self, messages: int) -> None: ...
    def poll(self, generation: int, ask: OrderedAsk) -> Granted: ...
    def settle(self, generation: int, token: int, settlements: Sequence[Settlement]) -> Settled: ...
    def extend(self, generation: int, token: int, spans: Sequence[Span]) -> Sequence[Span]: ...
    def hand_over(self, generation: int, token: int) -> None: ...
    def restart_stopped(self, generation: int) -> int: ...
    def restart_server(self) -> None: ...
    def advance(self, ms: int) -> None: ...
    def limit(self, max_attempts: int) -> None: ...
    def reset(self, offset: int) -> None: ...
    def picture(self) -> Picture: ...
    def close(self) -> None: ...


WHO = st.integers(0, 5)
WHICH = st.integers(0, 9)
DELAY = st.sampled_from([0, 0, 1, LEASE_MS // 2, 3 * LEASE_MS, MAX_HOLD_MS + 1])


class OrderedMachine(RuleBasedStateMachine):
    backend_class: ClassVar[Callable[[int, bool], Backend]]

    @initialize(
        attempts=st.integers(1, 3),
        stop=st.booleans(),
        keys=st.lists(st.integers(0, 3), max_size=16),
        members=st.integers(1, 3),
        poison=st.sets(st.integers(0, 20), max_size=2),
    )
    def begin_run(self, attempts: int, stop: bool, keys: list[int], members: int, poison: set[int]) -> None:
        self.backend = type(self).backend_class(attempts, stop)
        self.limits = Limits(attempts, stop)
        self.tokens = count(1)
        self.stamps = count(10**6, 10**4)  # apart from each other and from the tokens
        self.budgets = cycle([8, 2, 8, 1, 20, 5])  # of healing members
        self.members = [Member(f"member-{i}", next(self.tokens)) for i in range(members)]
        self.ledger = Ledger()
        self.poison = poison
        self.generation = 1
        self.past: list[tuple[int, int, list[int]]] = []  # of members that crashed: generation, token, hands
        self.movers: list[Mover] = []
        self.dead_log: dict[int, tuple[int, Span]] = {}  # identity → (generation, what was appended)
        self.committed = 0
        self.safe_from = 0
        self.broken = False
        self._append(keys)

    def stamp(self) -> Stamp:
        return Stamp(next(self.stamps), DEAD_PARTITION)

    # ---- appends and time ----

    @step(keys=st.lists(st.integers(0, 3), min_size=1, max_size=8))
    def append(self, keys: list[int]) -> None:
        self._append(keys)

    def _append(self, keys: Sequence[int]) -> None:
        keys = keys[: MOST_MESSAGES - len(self.ledger.keys)]
        if keys:
            self.backend.append(len(keys))
            self.ledger.append(keys)

    @step(ms=st.sampled_from([LEASE_MS, 250, LEASE_MS - 1, LEASE_MS, 2 * LEASE_MS, MOVER_MS]))
    def time_passes(self, ms: int) -> None:
        self.backend.advance(ms)

    @step()
    def server_restarts(self) -> None:
        """Renewals may have been lost: no lease is taken over for the time of one (I8)."""
        self.backend.restart_server()
        self.safe_from = self.backend.now() + LEASE_MS

    # ---- polls ----

    @step(who=WHO, messages=st.integers(0, 12), dies=st.booleans())
    def poll(self, who: int, messages: int, dies: bool) -> None:
        if (member := self._asking(who)) is not None:
            self._poll(member, self._ask(member, messages, self.stamp()))
            if dies:
                self._work(member)

    @step(
        who=WHO, messages=st.integers(0, 12), known=st.booleans(), lost=st.booleans(), cut=st.integers(0, 40)
    )
    def poll_in_trouble(self, who: int, messages: int, known: bool, lost: bool, cut: int) -> None:
        """Nobody knows where the dead letters are, few bytes are to be read, or the reply is lost."""
        if (member := self._asking(who)) is not None:
            ask = self._ask(member, messages, self.stamp() if known else None)
            self._poll(member, replace(ask, end=min(ask.end, cut)), lost=lost)

    @step(who=WHO, messages=st.integers(1, 6))
    def poll_on_delivery(self, who: int, messages: int) -> None:
        if (member := self._asking(who)) is not None and not member.hands:
            self._poll(member, replace(self._ask(member, messages, self.stamp()), on_delivery=True))

    @precondition(lambda self: any(m.unanswered for m in self.members))
    @step(who=WHO, messages=st.integers(1, 12))
    def poll_again(self, who: int, messages: int) -> None:
        """The reply was lost: the member asks again for what it expects."""
        asking = [m for m in self.members if m.unanswered]
        member = asking[who % len(asking)]
        member.unanswered = None
        self._poll(member, self._ask(member, messages, self.stamp()))

    def _asking(self, who: int) -> Member | None:
        now = self.backend.now()
        able = [m for m in self.members if m.may_ask(now) and m.unanswered is None]
        return able[who % len(able)] if able else None

    def _ask(self, member: Member, messages: int, dead: Stamp | None) -> OrderedAsk:
        now, end = self.backend.now(), len(self.ledger.keys)
        empty = member.empty_handed(now)
        return OrderedAsk(member.name, member.token, messages, end, member.position, empty, dead=dead)

    def _poll(self, member: Member, ask: OrderedAsk, *, lost: bool = False) -> Granted:
        before, now = self.backend.picture(), self.backend.now()
        reply = self.backend.poll(self.generation, ask)
        after = self.backend.picture()
        check_poll(before, after, now, self.safe_from, ask, reply, self.limits)
        self._to_movers(reply.leaving, new=[o for o, r in before.by_offset().items() if r.stamp is None])
        if ask.on_delivery:
            for offset in set(offsets(reply.deliveries)) - after.by_offset().keys():
                self.ledger.ack(offset)
        for delivery in reply.deliveries:
            if delivery.visible_at == FAR:
                self._wait(delivery)
        if lost:
            member.unanswered = ask
        elif reply.holder is not None:
            member.lose()
        elif not ask.on_delivery:
            member.receive(reply.deliveries, self.ledger.keys, now + LEASE_MS)
            if reply.recall and not member.at_work:
                self._hand_over(member)
        return reply

    def _wait(self, delivery: Delivery) -> None:
        for offset in offsets([delivery]):
            self.ledger.waits(offset, delivery.visible_at)

    # ---- work ----

    @step(who=WHO, which=WHICH)
    def begin(self, who: int, which: int) -> None:
        now = self.backend.now()
        ready = [(m, item) for m in self.members for item in m.able(now)]
        if ready:
            self._begin(*ready[(who + 7 * which) % len(ready)])

    def _begin(self, member: Member, item: Item) -> None:
        self.ledger.began(item.offset, item.attempt, self.backend.now())
        item.at_work = True
        if item.offset in self.poison:
            self._crash(member)

    def _work(self, member: Member) -> None:
        """Begin whatever may begin: a poisonous one ends it."""
        for item in member.able(self.backend.now()):
            if member.hands.get(item.offset) is item:
                self._begin(member, item)

    @step(
        who=WHO,
        kind=st.sampled_from([Kind.ACK, Kind.ACK, Kind.RETRY, Kind.RETRY, Kind.RELEASE, Kind.MOVE]),
        delay=DELAY,
        stamped=st.booleans(),
        again=st.booleans(),
    )
    def finish(self, who: int, kind: Kind, delay: int, stamped: bool, again: bool) -> None:
        """One message is done with; `again`: the reply was lost, and it is said once more."""
        busy = [(m, item) for m in self.members for item in m.at_work]
        if not busy:
            return
        member, item = busy[who % len(busy)]
        place = self.stamp() if stamped or kind is Kind.MOVE else None
        verdict = Settlement(kind, item.offset, item.offset, self.backend.now() + delay, "why", place)
        self._settle(member, [verdict], again=again)

    @step(
        who=WHO, kinds=st.lists(st.sampled_from([Kind.ACK, Kind.RETRY]), min_size=1, max_size=3), delay=DELAY
    )
    def handle(self, who: int, kinds: list[Kind], delay: int) -> None:
        """All that may begin begins, and is done with at once."""
        now = self.backend.now()
        busy = [m for m in self.members if m.able(now) or m.at_work]
        if not busy:
            return
        member = busy[who % len(busy)]
        self._work(member)
        verdicts = [
            Settlement(kinds[n % len(kinds)], item.offset, item.offset, now + delay, "why", self.stamp())
            for n, item in enumerate(member.at_work)
        ]
        self._settle(member, verdicts)

    @step(who=WHO)
    def release_stuck(self, who: int) -> None:
        self._release_stuck(self.members[who % len(self.members)])

    def _release_stuck(self, member: Member) -> None:
        """Else it would count as handled alone if the member went away, and it was not (I14)."""
        now = self.backend.now()
        stuck = sorted(item.offset for item in member.stuck(now))
        self._settle(member, [Settlement(Kind.RELEASE, o, o, now) for o in stuck])

    def _settle(self, member: Member, verdicts: Sequence[Settlement], *, again: bool = False) -> None:
        if not verdicts:
            return
        mine = self.backend.now() < member.lease_until
        reply = self._checked(member.token, verdicts)
        assert not (mine and reply.lost), "lost under a live lease"
        if again:
            waits = {o for d in reply.kept for o in offsets([d]) if d.visible_at > self.backend.now()}
            sure = [v for v in verdicts if v.kind is Kind.ACK or v.first in waits]
            self._checked(member.token, sure)
        if reply.lost:
            return member.lose()
        self._keep(member, reply)
        stays = set(offsets(reply.unplaced))
        for verdict in verdicts:
            if verdict.first not in stays and not any(o == verdict.first for o in offsets(reply.kept)):
                member.hands.pop(verdict.first, None)

    def _keep(self, member: Member, reply: Settled) -> None:
        for kept in reply.kept:
            self._wait(kept)
            for offset in offsets([kept]):
                key = self.ledger.keys[offset]
                member.hands[offset] = Item(offset, key, kept.attempt, kept.visible_at, kept.alone)

    def _checked(self, token: int, verdicts: Sequence[Settlement]) -> Settled:
        before, now = self.backend.picture(), self.backend.now()
        reply = self.backend.settle(self.generation, token, verdicts)
        check_settle(before, self.backend.picture(), now, token, verdicts, reply, self.limits)
        held = [o for o, row in before.by_offset().items() if row.token == token]
        for verdict in verdicts:
            if verdict.kind is Kind.ACK and verdict.first in held:
                self.ledger.ack(verdict.first)
        self._to_movers(reply.leaving, new=held)
        return reply

    @precondition(lambda self: self.past)
    @step(which=WHICH, kind=st.sampled_from([kind for kind in Kind if kind is not Kind.PARK]))
    def settle_late(self, which: int, kind: Kind) -> None:
        """Of a member that is gone: nothing of it counts any more (I7)."""
        generation, token, hands = self.past[-1 - which % len(self.past)]
        now = self.backend.now()
        verdicts = [Settlement(kind, o, o, now, "late", self.stamp()) for o in hands]
        if generation != self.generation:
            self._refused(lambda: self.backend.settle(generation, token, verdicts))
        elif self.backend.picture().holder.token == token:
            self._checked(token, verdicts[:1])  # nobody has taken over: it is as good as in time
        else:
            reply = self._checked(token, verdicts)
            assert set(offsets(reply.lost)) == set(hands) - self._done(hands)

    def _done(self, hands: Iterable[int]) -> set[int]:
        unsettled = self.backend.picture()
        rows = unsettled.by_offset()
        return {o for o in hands if o not in rows and o < unsettled.cursor}

    @step(who=WHO)
    def extend(self, who: int) -> None:
        self._extend(self.members[who % len(self.members)])

    def _extend(self, member: Member) -> None:
        before = self.backend.picture()
        spans = [(o, o) for o in sorted(member.hands)] or [(0, 0)]
        lost = self.backend.extend(self.generation, member.token, spans)
        if before.holder.token == member.token:
            assert not lost
            after = self.backend.picture()
            assert after.holder == replace(before.holder, until=self.backend.now() + LEASE_MS)
            assert after.deliveries == before.deliveries
            if member.lease_until:
                member.lease_until = after.holder.until
        else:
            assert list(lost) == spans and self.backend.picture() == before
            member.lose()

    @step(who=WHO)
    def hand_over(self, who: int) -> None:
        self._hand_over(self.members[who % len(self.members)])

    def _hand_over(self, member: Member) -> None:
        before = self.backend.picture()
        self.backend.hand_over(self.generation, member.token)
        after = self.backend.picture()
        if before.holder.token == member.token:
            assert after.holder.token == NOBODY
            counts = [
                (o, r.spent, r.failures, r.suspect, r.visible_at) for o, r in before.by_offset().items()
            ]
            assert counts == [
                (o, r.spent, r.failures, r.suspect, r.visible_at) for o, r in after.by_offset().items()
            ]
            assert all(row.token == NOBODY for row in after.deliveries if row.stamp is None)
        else:
            assert after == before
        member.lose()

    # ---- faults ----

    @step(who=WHO, ms=st.sampled_from([0, LEASE_MS]))
    def crash(self, who: int, ms: int) -> None:
        self._crash(self.members[who % len(self.members)])
        self.backend.advance(ms)

    @step(who=WHO, gracefully=st.booleans())
    def fail_and_vanish(self, who: int, gracefully: bool) -> None:
        """A retry waits for its time while its holder changes (I5)."""
        now = self.backend.now()
        busy = [m for m in self.members if m.able(now)]
        if not busy:
            return
        member = busy[who % len(busy)]
        item = member.able(now)[0]
        self._begin(member, item)
        if item.offset in member.hands:
            retry = Settlement(Kind.RETRY, item.offset, item.offset, now + 3 * LEASE_MS, "no", self.stamp())
            self._settle(member, [retry])
        if gracefully:
            self._hand_over(member)
        else:
            self._crash(member)
            self.backend.advance(LEASE_MS)

    def _crash(self, member: Member) -> None:
        if member.hands:
            self.past.append((self.generation, member.token, sorted(member.hands)))
        member.crash(next(self.tokens))

    @precondition(lambda self: self.generation < 2 and len(self.ledger.settled) > 4)
    @step(offset=st.integers(0, 20))
    def reset(self, offset: int) -> None:
        """Under the hands of its members: they learn of it as they go on."""
        self.backend.reset(offset)
        self.ledger.reset(offset)
        stale = self.generation
        self.generation += 1
        self.committed = self.ledger.start
        token = self.members[0].token
        ack = [Settlement(Kind.ACK, 0, 0)]
        self._refused(lambda: self.backend.poll(stale, self._ask(self.members[0], 1, None)))
        self._refused(lambda: self.backend.settle(stale, token, ack))
        self._refused(lambda: self.backend.extend(stale, token, [(0, 0)]))
        self._refused(lambda: self.backend.hand_over(stale, token))
        self._refused(lambda: self.backend.restart_stopped(stale))
        for member in self.members:
            member.lease_until = 0  # whatever they begin until they know belongs to the past

    def _refused(self, verb: Callable[[], object]) -> None:
        try:
            verb()
        except GenerationChanged:
            return
        raise AssertionError("a verb of an earlier generation was not refused (I10)")

    @precondition(lambda self: self.limits.max_attempts > 1)
    @step(attempts=st.integers(1, 4))
    def alter_limit(self, attempts: int) -> None:
        self.backend.limit(attempts)
        self.limits.max_attempts = attempts

    # ---- stopped messages ----

    @step()
    def restart_stopped(self) -> None:
        self._restart_stopped()

    def _restart_stopped(self) -> None:
        before = self.backend.picture()
        stopped = [o for o, row in before.by_offset().items() if row.visible_at == FAR]
        assert self.backend.restart_stopped(self.generation) == len(stopped)
        self.ledger.restarted()
        after = self.backend.picture().by_offset()
        for offset, row in before.by_offset().items():
            if offset in stopped:
                fresh = after[offset]
                assert (fresh.failures, fresh.failing_since, fresh.visible_at) == (0, 0, self.backend.now())
                assert fresh.spent == row.spent
            else:
                assert after[offset] == row

    # ---- movers (I12) ----

    def _to_movers(self, leaving: Iterable[Delivery], new: Sequence[int]) -> None:
        for moving in leaving:
            self.movers.append(Mover(self.generation, moving))
            for offset in offsets([moving]):
                if offset in new:
                    self.ledger.leave(offset)

    @precondition(lambda self: self.movers)
    @step(which=st.integers(0, 5), how=st.sampled_from(["crashes", "appends, crashes", "appends, deletes"]))
    def mover(self, which: int, how: str) -> None:
        mover = self.movers.pop(which % len(self.movers))
        if "appends" in how:
            self._append_dead(mover)
        if "deletes" in how:
            self._finish_move(mover)

    def _append_dead(self, mover: Mover) -> None:
        """Into the dead letters, where an identity is taken only once: a repeat is dropped (I3)."""
        span = (mover.moving.first, mover.moving.last)
        known = self.dead_log.setdefault(mover.moving.token, (mover.generation, span))
        assert known == (mover.generation, span), "two under one identity (I12)"

    def _finish_move(self, mover: Mover) -> None:
        ack = [Settlement(Kind.ACK, mover.moving.first, mover.moving.last)]
        if mover.generation != self.generation:
            self._refused(lambda: self.backend.settle(mover.generation, mover.moving.token, ack))
        else:
            assert not self.backend.settle(mover.generation, mover.moving.token, ack).lost

    # ---- what holds after every step ----

    @invariant()
    @guarded
    def the_picture_is_sound(self) -> None:
        picture, now = self.backend.picture(), self.backend.now()
        rows = picture.by_offset()
        assert picture.end == len(self.ledger.keys)
        parked = self._parked(picture)
        lost = [o for o in self.ledger.unsettled if o < picture.cursor and o not in rows and o not in parked]
        assert not lost, f"{lost} were lost"
        assert not parked & rows.keys(), "in a line, and a delivery (I27)"
        assert parked <= set(self.ledger.unsettled), "settled, and in a line (I27)"
        assert all(o not in self.ledger.settled for o, row in rows.items() if row.stamp is None)
        lowest = min([*rows, *(line.first for line in picture.lines)], default=picture.cursor)
        assert picture.committed == lowest, "committed is the lowest unsettled"
        assert picture.committed >= self.committed, "committed went back"
        self.committed = picture.committed
        for row in picture.deliveries:
            assert row.stamp is not None or row.token in (NOBODY, picture.holder.token)
        live = [m for m in self.members if now < m.lease_until]
        assert len(live) <= 1, "two holders (I5)"
        assert all(m.token == picture.holder.token for m in live)
        self._check_dead(picture)

    def _parked(self, picture: Picture) -> set[int]:
        """Offsets that lines of the store claim (I27)."""
        keys = self.ledger.keys
        return {
            offset
            for line in picture.lines
            for offset in range(line.first, line.last + 1)
            if b"%d" % keys[offset] == line.key
        }

    def _check_dead(self, picture: Picture) -> None:
        appended = [o for generation, span in self.dead_log.values() if generation == self.generation
                    for o in offsets([span])]  # fmt: skip
        assert len(set(appended)) == len(appended), "twice in the dead letters"
        assert not self.ledger.acked.intersection(appended)
        gone = self.ledger.settled - self.ledger.acked - picture.by_offset().keys()
        assert gone <= set(appended), "gone, but not in the dead letters"

    # ---- heal, then everything must finish ----

    def teardown(self) -> None:
        if not hasattr(self, "backend"):
            return
        try:
            if not self.broken:
                self.heal()
        finally:
            self.backend.close()

    def _free(self, offsets: set[int], stopped: set[int]) -> set[int]:
        """Those with nothing of their key stopped before them. What waits behind a stopped message in the
        hands of a member that goes away is counted as if it had been at work: the store sees no keys.
        """
        keys = self.ledger.keys
        return {o for o in offsets if not any(s < o and keys[s] == keys[o] for s in stopped)}

    def heal(self) -> None:
        """Members live (but for the poison), movers work, replies arrive. Whoever was alive goes on."""
        rows = self.backend.picture().by_offset()
        doomed = {
            o for o, r in rows.items() if r.stamp is not None or r.visible_at == FAR or self._exhausted(r)
        }
        innocent = set(self.ledger.unsettled) - doomed - self.poison
        for member in self.members:
            member.unanswered = None
        self._drain()
        stopped = {o for o, r in self.backend.picture().by_offset().items() if r.visible_at == FAR}
        if stopped:
            assert self.limits.stop
            assert not self._free(innocent, stopped) & stopped, "innocent, and stopped (I14)"
            behind = [o for o in self.ledger.unsettled if o not in stopped]
            keys = {self.ledger.keys[o] for o in stopped}
            assert all(self.ledger.keys[o] in keys for o in behind), "a key is held that nobody stopped"
            self.poison = set()
            self._restart_stopped()
            self._drain()
        assert not self.ledger.unsettled, "it never ends"
        assert innocent <= self.ledger.acked, "innocent, and dead (I14)"
        assert not self.poison & self.ledger.acked & innocent
        picture = self.backend.picture()
        assert not picture.deliveries
        assert picture.committed == picture.cursor == picture.end
        assert picture.settled == picture.end - self.ledger.start, "not settled exactly once"

    def _exhausted(self, row: Delivery) -> bool:
        counted = row.failures + (row.alone and row.size == 1)
        return counted >= self.limits.max_attempts

    def _drain(self) -> None:
        """Rounds, a lease apart, until nothing can be done any more but to restart what is stopped."""
        quiet, before = 0, None
        for _ in range(_MOST_ROUNDS):
            for member in self.members:
                while self._round(member):
                    self.the_picture_is_sound()
            for mover in self.movers:
                self._append_dead(mover)
                self._finish_move(mover)
            self.movers.clear()
            picture = self.backend.picture()
            if not self.ledger.unsettled and not picture.deliveries and not picture.lines:
                return
            after = replace(picture, holder=NOBODY_HOLDS), [sorted(m.hands) for m in self.members]
            quiet, before = quiet + 1 if after == before else 0, after
            if quiet > _QUIET_ROUNDS:
                return
            self.backend.advance(LEASE_MS)
        raise AssertionError("it goes on for ever")

    def _round(self, member: Member) -> bool:
        """Heartbeat, ask, release what is stuck, begin, ack. Whether anything was acked."""
        if member.hands:
            self._extend(member)
        if member.may_ask(self.backend.now()):
            self._poll(member, self._ask(member, next(self.budgets), self.stamp()))
        self._release_stuck(member)
        self._work(member)
        done = [Settlement(Kind.ACK, item.offset, item.offset) for item in member.at_work]
        self._settle(member, done)
        return bool(done)
