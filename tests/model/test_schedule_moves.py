"""Schedule, cancel and move, cut off anywhere, against a model that knows nothing of stamps (R35, I12).

The model keeps what was scheduled and what was cancelled. Whatever the movers do, at any time: nothing is in
a log twice, before its time, or although it was cancelled; equal keys are in order. In the end, when all who
were cut off are gone and one mover has run undisturbed, everything is in the logs that was not cancelled.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from postroom.broker.moves.schedule import ScheduleMover
from postroom.model.messages.batch import BatchBuilder, records
from postroom.model.messages.ids import digest
from postroom.model.messages.slot import slot_of
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Appended
from postroom.store.sql.session import Area
from postroom.testing.store_contract import MovableClock
from postroom.testing.store_contract.moving import STEPS, Cut, CutError, SealedMoveContract, mover
from tests.model.examples import examples

LEASE_MS = 1_000  # of `mover`
KEYS = (None, b"a", b"b", b"c", b"42")


@dataclass
class Sent:
    """What the model knows of a message."""

    id: str
    key: bytes | None
    due: int
    number: int  # in the order of sending
    cancelled: bool = False
    stored_at: int | None = None  # when it was first seen in a log: how many were sent by then


class ScheduleMachine(RuleBasedStateMachine):
    @initialize()
    def open(self) -> None:
        self.clock = MovableClock()
        store = open_sqlite(None, self.clock)
        assert isinstance(store, SqlStore)
        self.store = store
        self.topic = store.catalog.create_topic("orders", TopicSettings(), 1)
        self.sealed: int | None = None  # a partition that has no successors yet
        self.sent: dict[str, Sent] = {}
        self.sequences: dict[int, int] = {}  # by partition
        self.producer = 5
        self.last: Append | None = None
        self.movers = [self.fresh(number) for number in range(2)]
        self.names = 2

    def fresh(self, number: int) -> ScheduleMover:
        return mover(self.store, f"mover {number}")

    def place(self, key: bytes | None) -> int:
        route = self.store.catalog.topic("orders").route
        piece = route.ranges[0] if key is None else route.of_slot(slot_of(key))
        return piece.partition_id

    # ---- users ----

    @precondition(lambda self: self.sealed is None)
    @rule(delay=st.integers(0, 50), key=st.sampled_from(KEYS), count=st.integers(1, 3))
    def schedule(self, delay: int, key: bytes | None, count: int) -> None:
        place, due = self.place(key), self.clock.ms + delay
        ids = [f"id-{len(self.sent) + number}" for number in range(count)]
        builder = BatchBuilder()
        for id in ids:
            builder.append(1, key, id.encode(), [])
            self.sent[id] = Sent(id, key, due, len(self.sent))
        sequence = self.sequences.get(place, 0)
        self.sequences[place] = sequence + count
        append = Append(place, builder.build(self.producer, 0, sequence), due, b"".join(map(digest, ids)))
        (result,) = self.store.log.append([append])
        assert isinstance(result, Appended) and not result.duplicate
        self.last = append

    @precondition(lambda self: self.last is not None)
    @rule()
    def repeat(self) -> None:
        """Its receipt was lost."""
        assert self.last is not None
        (result,) = self.store.log.append([self.last])
        assert isinstance(result, Appended) and result.duplicate

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = self.sent[data.draw(st.sampled_from(sorted(self.sent)), label="id")]
        open_rows = {part.row for m in self.store.schedule.moves() for p in m.planned for part in p.parts}
        done = self.store.schedule.cancel(self.topic.id, digest(one.id))
        if done:
            assert not one.cancelled and one.stored_at is None
            one.cancelled = True
        else:
            assert one.cancelled or one.stored_at is not None or open_rows, "it waits, and nobody moves it"

    # ---- movers ----

    @rule(ms=st.integers(1, 60))
    def wait(self, ms: int) -> None:
        self.clock.ms += ms

    @rule()
    def outlast(self) -> None:
        self.clock.ms += LEASE_MS

    @rule(which=st.integers(0, 1))
    def tick(self, which: int) -> None:
        assert self.movers[which].tick() >= 1

    @rule(
        which=st.integers(0, 1),
        step=st.sampled_from(STEPS),
        after=st.booleans(),
        call=st.sampled_from([1, 1, 2]),
    )
    def cut_off(self, which: int, step: str, after: bool, call: int) -> None:
        """A new process, which ends in the middle; another takes its place."""
        doomed = mover(Cut(self.store, step, after=after, call=call), f"doomed {self.names}")
        try:
            doomed.tick()
        except CutError:
            pass
        self.names += 1
        self.movers[which] = self.fresh(self.names)

    @rule()
    def forget(self) -> None:
        """Sequences that nobody has used for a while; whoever sends is another one from now on."""
        self.store.log.forget_producers(self.clock.ms - 2 * LEASE_MS)
        self.producer, self.sequences, self.last = self.producer + 1, {}, None

    @precondition(lambda self: self.sealed is None and len(self.topic.route.ranges) == 1)
    @rule()
    def seal(self) -> None:
        """A route change begins: the partition takes no more, and has no successors yet."""
        self.sealed = self.topic.route.ranges[0].partition_id
        SealedMoveContract().seal(self.store, self.sealed)

    @precondition(lambda self: self.sealed is not None)
    @rule()
    def succeed(self) -> None:
        assert self.sealed is not None
        SealedMoveContract().succeed(self.store, self.topic, self.sealed)
        self.topic, self.sealed = self.store.catalog.topic("orders"), None

    # ---- what must hold ----

    def logs(self) -> dict[int, list[str]]:
        with self.store.session.read(Area.LOG) as tx:
            places = [row[0] for row in tx.all("SELECT id FROM postroom_partitions ORDER BY id")]
        found = {}
        for place in places:
            batches = self.store.log.read(place, 0, max_messages=10**6, max_bytes=10**9)
            found[place] = [(r.value or b"").decode() for b in batches for r in records(b.data)]
        return found

    @invariant()
    def logs_are_right(self) -> None:
        if not hasattr(self, "store"):
            return
        seen: set[str] = set()
        for ids in self.logs().values():
            for id in ids:
                one = self.sent[id]
                assert id not in seen, f"{id} is there twice"
                assert not one.cancelled, f"{id} was cancelled"
                assert one.due <= self.clock.ms, f"{id} came too early"
                one.stored_at = len(self.sent) if one.stored_at is None else one.stored_at
                seen.add(id)
            self.in_order([self.sent[id] for id in ids])
        stored = {one.id for one in self.sent.values() if one.stored_at is not None}
        assert stored == seen, "something is gone that was there"

    def in_order(self, log: list[Sent]) -> None:
        """Of equal keys none is behind one that is due later, unless it was sent when that one was there."""
        for at, later in enumerate(log):
            for earlier in log[:at]:
                if (
                    later.key is not None
                    and earlier.key == later.key
                    and (later.due, later.number) < (earlier.due, earlier.number)
                ):
                    assert earlier.stored_at is not None
                    assert later.number >= earlier.stored_at, f"{later.id} is behind {earlier.id}"

    @invariant()
    def the_count_is_right(self) -> None:
        if not hasattr(self, "store"):
            return
        with self.store.session.read(Area.LOG) as tx:
            (rows,) = tx.one("SELECT COALESCE(SUM(records), 0) FROM postroom_schedule") or (0,)
        assert sum(self.store.schedule.delayed().values()) == rows

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        if self.sealed is not None:
            self.succeed()
        self.clock.ms += 10 * LEASE_MS
        last = self.fresh(self.names + 1)
        for _ in range(4):
            last.tick()
            self.clock.ms += 200
        self.logs_are_right()
        assert self.store.schedule.next_due() is None
        assert self.store.schedule.moves() == []
        missing = [one.id for one in self.sent.values() if not one.cancelled and one.stored_at is None]
        assert not missing, f"{missing} never came"
        self.store.close()


TestScheduleMoves = ScheduleMachine.TestCase
TestScheduleMoves.settings = settings(max_examples=examples(80), stateful_step_count=40, deadline=None)
