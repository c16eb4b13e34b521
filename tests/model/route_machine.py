"""Routes change while producers write and ordered groups read, with every step of each in any order.

Several workers make, resume and turn back changes, and die between any two steps. Producers lose requests
and answers, and die. Members of two groups claim, poll, handle, ack, crash and take over. One group is reset,
in three steps that may be cut. Retention removes what all have drained. Each message that is handled is
checked at once (`route_truth`). Every run ends like this: no more faults, and then everything must finish:
per key, each group has handled exactly what was stored, in order (R26, I4, I10, I11).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition

from postroom.broker.deliver.readable import Unread
from postroom.clock import ManualClock
from postroom.errors import GateClosed, GenerationChanged, RouteConflict
from postroom.model.messages.batch import records
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.model.topology.route import Route, renew
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Group
from tests.model.route_member import LEASE_MS, Member
from tests.model.route_producer import Producer, slot
from tests.model.route_truth import Book, Message, Truth
from tests.model.route_worker import IDLE_MS, Away, Cut, Died, Worker, drafted, procedure
from tests.model.steps import guarded, step

__all__ = ["RouteMachine"]

TOPIC = "orders"
GROUPS = ("billing", "audit")
KEYS = 5
MOST_MESSAGES = 80
WHO = st.integers(0, 11)
SLOT = st.integers(0, 1023)
KIND = st.sampled_from(["split", "merge"])
KEY_LIST = st.lists(st.integers(0, KEYS - 1), min_size=3, max_size=8)
FATES = st.lists(st.sampled_from(["answered", "unanswered", "lost"]), min_size=4, max_size=6)
STEPS = st.sampled_from([9, 3, 2, 1])


@dataclass
class Reset:
    """What is left to do of a reset, by whoever asked for it (I10)."""

    group: Group
    before: int  # the generation that it ends
    places: list[int]
    steps: list[Callable[[], None]]


class RouteMachine(RuleBasedStateMachine):
    @initialize(partitions=st.sampled_from([2, 3, 1]), keys=KEY_LIST)
    def begin_run(self, partitions: int, keys: list[int]) -> None:
        self.broken = False
        self.clock = ManualClock()
        store = open_sqlite(None, self.clock)
        assert isinstance(store, SqlStore)
        self.store = store
        self.store.catalog.create_topic(TOPIC, TopicSettings(), partitions)
        self.truth, self.sent = Truth(), 0
        self.numbers = [0] * KEYS
        self.ids, self.tokens = count(1), count(1)
        self.producers = [self._producer() for _ in range(2)]
        self.doubtful: set[Message] = set()  # their producer died: they may be stored, or not
        self.books: dict[str, dict[int, Book]] = {name: {1: Book(self.truth, {})} for name in GROUPS}
        brokers = [Unread(store.progress), Unread(store.progress)]
        settings = GroupSettings(mode="ordered", lease_ms=LEASE_MS, max_attempts=1000)
        self.members = []
        for name in GROUPS:
            group = store.catalog.create_group(TOPIC, name, settings)
            self.members += [
                Member(store, self.truth, unread, self.tokens, group, self.books[name]) for unread in brokers
            ]
        self.workers: list[Worker] = []
        self.resets: list[Reset] = []
        self.removed: dict[int, list[Message]] = {}
        for key in keys:
            self._send(key)

    def _producer(self) -> Producer:
        return Producer(self.store, TOPIC, next(self.ids), self.truth)

    def _route(self) -> Route:
        return self.store.catalog.topic(TOPIC).route

    # ---- producers ----

    @step(keys=KEY_LIST, most=st.integers(1, 3), fates=FATES, which=WHO, fresh=st.booleans())
    def send(self, keys: list[int], most: int, fates: list[str], which: int, fresh: bool) -> None:
        """And a few requests: some are lost, of some the answer is."""
        for key in keys:
            self._send(key)
        for number, fate in enumerate(fates):
            producer = self.producers[number % 2]
            if fresh:
                producer.fetch_route()
            producer.pack(most)
            if fate != "lost":
                producer.transmit(which, answered=fate == "answered")

    def _send(self, key: int) -> None:
        """Each key has one producer at a time."""
        if self.sent < MOST_MESSAGES:
            self.sent += 1
            self.numbers[key] += 1
            self.producers[key % 2].waiting.append((key, self.numbers[key]))

    @step(who=WHO, which=WHO, answered=st.booleans(), fresh=st.booleans())
    def transmit(self, who: int, which: int, answered: bool, fresh: bool) -> None:
        producer = self.producers[who % 2]
        if fresh:
            producer.fetch_route()
        producer.pack(3)
        producer.transmit(which, answered=answered)
        producer.ghost(which)

    @step(who=WHO)
    def producer_dies(self, who: int) -> None:
        """The next one begins behind all that it was given: what was not confirmed is of unknown fate."""
        gone = self.producers[who % 2]
        unresolved = [message for parcel in gone.parcels for message in parcel.messages]
        self.doubtful |= {*unresolved, *gone.waiting}
        self.producers[who % 2] = self._producer()

    # ---- changes ----

    @step(kind=KIND, a=WHO, b=SLOT, old=st.integers(0, 5), steps=STEPS)
    def begin_change(self, kind: str, a: int, b: int, old: int, steps: int) -> None:
        """Sometimes by somebody who looks at an old route."""
        history = self.store.routes.history(TOPIC)
        route = history[-1] if old else history[max(0, len(history) - 2)]
        draft = drafted(route, kind, a, b)
        if draft is None:
            return
        try:
            self.workers.append(Worker(self.store, self.store.routes.begin(draft)))
        except RouteConflict:
            assert self.store.routes.change_of(TOPIC) is not None or route != history[-1]
        else:
            assert route == history[-1], "a change of an old version has begun"
            self._work(-1, steps)

    @precondition(lambda self: self.workers)
    @step(who=WHO, steps=STEPS)
    def work(self, who: int, steps: int) -> None:
        self._work(who, steps)

    def _work(self, who: int, steps: int) -> None:
        worker: Worker | None = self.workers.pop(who % len(self.workers))
        for _ in range(steps):
            worker = worker and worker.work()
        self._goes_on(worker)

    @precondition(lambda self: self.workers)
    @step(who=WHO, steps=st.integers(0, 4))
    def turn_back(self, who: int, steps: int) -> None:
        self._turn_back(who, steps)

    @step(kind=KIND, a=WHO, b=SLOT, sealed=st.integers(0, 2), steps=st.integers(2, 4))
    def change_and_turn_back(self, kind: str, a: int, b: int, sealed: int, steps: int) -> None:
        draft = drafted(self._route(), kind, a, b)
        if draft is not None and self.store.routes.change_of(TOPIC) is None:
            self.workers.append(Worker(self.store, self.store.routes.begin(draft)))
            self._work(-1, 1 + min(sealed, len(draft.seals)))
            self._turn_back(-1, steps)

    def _turn_back(self, who: int, steps: int) -> None:
        """It looks what is sealed, replaces the change, and goes on with that one; 0: it dies."""
        worker: Worker | None = self.workers.pop(who % len(self.workers))
        for number in range(steps):
            worker = worker and (worker.turn_back() if number < 2 else worker.work())
        self._goes_on(worker if steps else None)

    def _goes_on(self, worker: Worker | None) -> None:
        if worker is not None:
            self.workers.append(worker)

    @step(idle=st.booleans(), steps=STEPS)
    def help(self, idle: bool, steps: int) -> None:
        """As `RouteChanges.help` begins: a change that was left, or a sealed partition without one."""
        self._advance(IDLE_MS + 1 if idle else 0)
        before = len(self.workers)
        change = self.store.routes.change_of(TOPIC)
        if change is not None:
            if self.store.routes.take(change, IDLE_MS):
                self._goes_on(Worker(self.store, change))
        elif (draft := renew(self._route(), self._sealed_in_route())) is not None:
            self._goes_on(Worker(self.store, self.store.routes.begin(draft)))
        if len(self.workers) > before:
            self._work(-1, steps)

    def _sealed_in_route(self) -> list[int]:
        ids = [piece.partition_id for piece in self._route().ranges]
        return [one for one, found in self.store.log.bounds(ids).items() if found.sealed]

    @step(
        kind=st.sampled_from(["split", "merge", "help"]),
        a=WHO,
        b=SLOT,
        after=st.integers(0, 11),
        error=st.sampled_from([Died, Away]),
    )
    def real_procedure(self, kind: str, a: int, b: int, after: int, error: type[BaseException]) -> None:
        procedure(Cut(self.store, after, error), TOPIC, kind, a, b)

    @step()
    def drop_logs(self) -> None:
        for partition_id in self.store.catalog.dropped():
            self.store.log.trim(partition_id, 2**62)
            self.store.catalog.drop_log(partition_id)

    # ---- members ----

    @step(
        who=WHO,
        which=WHO,
        messages=st.integers(1, 9),
        fresh=st.booleans(),
        work=st.integers(0, 3),
        anywhere=st.booleans(),
    )
    def poll(self, who: int, which: int, messages: int, fresh: bool, work: int, anywhere: bool) -> None:
        """With no `work` at all its answer is lost. `anywhere`: only the store's gate keeps it back."""
        member = self._member(who)
        if fresh:
            member.refresh()
        member.poll(which, messages, answered=bool(work), anywhere=anywhere)
        self._handle(member, which, times=work - 1, acks=0)

    @step(who=WHO, which=WHO, times=st.integers(1, 5), acks=st.integers(0, 3))
    def handle(self, who: int, which: int, times: int, acks: int) -> None:
        self._handle(self._member(who), which, times, acks)

    def _handle(self, member: Member, which: int, times: int, acks: int) -> None:
        for _ in range(times):
            member.handle(which)
        if acks:
            member.ack(which, acks)

    @step(who=WHO, which=WHO, partitions=st.integers(1, 3), ack=st.booleans())
    def work_through(self, who: int, which: int, partitions: int, ack: bool) -> None:
        """All that it can do now, in a few partitions."""
        member = self._member(who)
        member.refresh()
        member.extend()
        for number in range(which, which + partitions):
            member.poll(number, 20)
        while member.handle(0):
            pass
        if ack:
            member.ack_all()

    @step(
        who=WHO,
        which=WHO,
        how=st.sampled_from(["lives on", "goes", "crashes"]),
        ms=st.sampled_from([0, LEASE_MS]),
    )
    def member_in_trouble(self, who: int, which: int, how: str, ms: int) -> None:
        member = self._member(who)
        if how == "goes":
            member.hand_over(which)
        elif how == "crashes":
            member.crash()
        self._advance(ms)

    def _member(self, who: int) -> Member:
        return self.members[who % len(self.members)]

    def _advance(self, ms: int) -> None:
        self.clock.advance(ms / 1000)

    # ---- reset (I10) ----

    @precondition(lambda self: len(self.books[GROUPS[0]]) < 4 and self._route().sealed)
    @step(
        kind=st.sampled_from(["earliest", "latest", "offsets"]),
        offset=st.integers(0, 9),
        at_once=st.booleans(),
    )
    def reset(self, kind: str, offset: int, at_once: bool) -> None:
        """As `broker.groups` does it, under the hands of the members."""
        route = self._route()
        numbers = [piece.partition for piece in route.partitions]
        number = numbers[offset % len(numbers)]
        partly = kind == "offsets"
        named = ((number, offset),) if partly else ()
        before = self.store.catalog.group(TOPIC, GROUPS[0])
        group = self.store.catalog.reset_group(TOPIC, GROUPS[0], Start(kind, offsets=named))  # type: ignore[arg-type]
        ids = [piece.partition_id for piece in self._route().partitions]
        starts = {place: 2**62 for place, _ in self.truth.at if place not in ids}  # those are removed
        moved = [p.partition_id for p in route.partitions if not partly or p.partition == number]
        starts |= {one: self.store.catalog.start_of(group.id, one)[1] for one in ids if one in moved}
        book = Book(self.truth, starts, before=self.books[GROUPS[0]][before.generation] if partly else None)
        self.books[GROUPS[0]][group.generation] = book
        after = {one for place in moved for one in route.descendants(place)}
        fenced = [piece.partition_id for piece in route.partitions if piece.partition_id in after]
        others = [piece.partition_id for piece in route.partitions if piece.partition_id not in after]
        self.resets.append(
            Reset(
                group,
                before.generation,
                [*fenced, *others],
                [
                    lambda: self.store.progress.fence(group, fenced[::-1]),
                    lambda: self._rewind(group, others),
                ],
            )
        )
        while at_once and self.resets:
            self._go_on_resetting(0)

    def _rewind(self, group: Group, places: list[int]) -> None:
        for place in places:
            with suppress(GateClosed):
                self.store.progress.rewind(group, [place])

    @precondition(lambda self: self.resets)
    @step(who=WHO, dies=st.booleans())
    def go_on_resetting(self, who: int, dies: bool) -> None:
        if dies:
            self.resets.pop(who % len(self.resets))
        else:
            self._go_on_resetting(who)

    def _go_on_resetting(self, who: int) -> None:
        reset = self.resets.pop(who % len(self.resets))
        try:
            reset.steps.pop(0)()
        except GenerationChanged:
            return  # reset once more meanwhile
        if reset.steps:
            self.resets.append(reset)
        else:
            self._check_fence(reset)

    def _check_fence(self, reset: Reset) -> None:
        """All is done: nobody goes on in an earlier generation (I10)."""
        old = replace(reset.group, generation=reset.before)
        for place in reset.places:
            with pytest.raises(GenerationChanged):
                self.store.progress.extend(old, place, 1, [(0, 0)])

    # ---- retention ----

    @precondition(lambda self: self._route().sealed)
    @step(who=WHO, whole=st.booleans(), catch_up=st.sampled_from([False, False, True]))
    def retain(self, who: int, whole: bool, catch_up: bool) -> None:
        """What all groups have drained goes: trimmed, and then, or later, removed."""
        for member in self.members if catch_up else ():
            self._round(member)
        sealed = self._route().sealed
        piece = sealed[who % len(sealed)]
        groups = [self.store.catalog.group(TOPIC, name) for name in GROUPS]
        drained = [group for group in groups if self.store.progress.drain(group, piece.partition_id)]
        for group in drained:
            book = self.books[group.name][group.generation]
            left = [m for m in book.unsettled() if self.truth.stored[m][0] == piece.partition_id]
            assert not left, f"{left} are not settled, and their partition is drained (I10)"
        if drained == groups:
            self._remove(piece.partition_id, whole)

    def _remove(self, place: int, whole: bool) -> None:
        end = self.store.log.bounds([place])[place].end
        self.removed.setdefault(place, self._read(place))
        self.store.log.trim(place, end)
        if whole:
            while self.store.log.sweep(place, rows=100):
                pass
            self.store.routes.remove(place)

    def _read(self, place: int) -> list[Message]:
        found = list[Message]()
        bounds = self.store.log.bounds([place])[place]
        offset = bounds.start
        while offset < bounds.end:
            for piece in self.store.log.read(place, offset, max_messages=1000, max_bytes=10**6):
                offset = piece.last_offset + 1
                if (place, piece.base_offset) in self.truth.at:
                    found += [(int(r.key or b""), int(r.value or b"")) for r in records(piece.data)]
        return found

    # ---- what holds ----

    @step()
    def the_gates_hold(self) -> None:
        self._check_gates()

    def _check_gates(self) -> None:
        """Whoever comes to a successor is refused while a message before it is not settled (I10)."""
        there = {piece.partition_id for piece in self._route().partitions}
        history = self.store.routes.history(TOPIC)
        for name in GROUPS:
            group = self.store.catalog.group(TOPIC, name)
            closed = self.books[name][group.generation].closed(history, slot) & there
            for place in closed:
                with pytest.raises(GateClosed):
                    self.store.progress.extend(group, place, -1, [(0, 0)])

    @invariant()
    @guarded
    def the_route_is_sound(self) -> None:
        """That it covers each slot once is checked where it is made."""
        route = self._route()
        history = self.store.routes.history(TOPIC)
        assert [version.version for version in history] == list(range(1, len(history) + 1))
        assert history[-1].ranges == route.ranges
        there = {piece.partition_id for piece in route.partitions}
        assert len({piece.partition for piece in route.partitions}) == len(there), "a number is used again"
        assert all(set(olds) <= there for olds in route.predecessors.values())
        for place, bounds in self.store.log.bounds([p.partition_id for p in route.sealed]).items():
            assert bounds.sealed, "not in the route, and open"
            last = (place, bounds.end - 1)
            assert bounds.end and last not in self.truth.at, "its last batch does not say that it is sealed"

    @invariant()
    @guarded
    def a_partition_has_one_holder(self) -> None:
        """As far as members of one generation know (I5)."""
        now, held = self.clock.now_ms(), list[tuple[str, int, int]]()
        for member in self.members:
            live = [place for place, hand in member.hands.items() if now < hand.until]
            held += [(member.group.name, member.group.generation, place) for place in live]
        assert len(set(held)) == len(held), "two holders"

    # ---- heal, then everything must finish ----

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        try:
            if not self.broken:
                self.heal()
        finally:
            self.store.close()

    def heal(self) -> None:
        self._check_gates()
        self.workers.clear()
        while self.resets:
            self._go_on_resetting(0)
        for _ in range(60):
            self._advance(IDLE_MS + 1)
            procedure(self.store, TOPIC, "help", 0, 0)
            for producer in self.producers:
                producer.flush()
            for member in self.members:
                self._round(member)
            if self._finished():
                break
        assert self._finished(), f"it never ends: {self._left()}"
        self._check_logs()

    def _round(self, member: Member) -> None:
        member.refresh()
        member.extend()
        for _ in range(20):
            brought = member.poll_all(20)
            while member.handle(0):
                pass
            member.ack_all()
            if not brought:
                return
        raise AssertionError("the same is handed out again and again")

    def _finished(self) -> bool:
        quiet = all(producer.idle for producer in self.producers) and not self._sealed_in_route()
        return quiet and not self._left() and self._drained()

    def _drained(self) -> bool:
        groups = [self.store.catalog.group(TOPIC, name) for name in GROUPS]
        sealed = [piece.partition_id for piece in self._route().sealed]
        return all(self.store.progress.drain(group, place) for group in groups for place in sealed)

    def _left(self) -> dict[str, list[Message]]:
        found = {name: self.books[name][max(self.books[name])].unsettled() for name in GROUPS}
        return {name: left for name, left in found.items() if left}

    def _check_logs(self) -> None:
        """What is in the logs, or was before retention came, is what was sent: each once, none is missing."""
        route = self._route()
        found = [m for messages in self.removed.values() for m in messages]
        found += [
            m
            for p in route.partitions
            if p.partition_id not in self.removed
            for m in self._read(p.partition_id)
        ]
        assert sorted(found) == sorted(self.truth.stored)
        sent = {(key, number) for key in range(KEYS) for number in range(1, self.numbers[key] + 1)}
        assert sent - self.doubtful <= set(found) <= sent
