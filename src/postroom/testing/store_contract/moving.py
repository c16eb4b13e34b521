"""The schedule's mover on a store: what is due is stored once, in order, wherever a process is cut off (I12).

The mover is the broker's; the promises it leans on are the store's, so it is run on every store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from ...broker.moves.schedule import ScheduleMover
from ...config import Limits
from ...errors import PostroomError, StoreUnavailable
from ...model.messages.batch import BatchBuilder, records
from ...model.messages.ids import digest
from ...model.messages.slot import slot_of
from ...model.policy.settings import TopicSettings
from ...model.topology.route import Route, split
from ...store import SqlStore
from ...store.contract import Append, Store, StoredBatch, Topic
from ...store.sql.session import Area
from .harness import (
    MovableClock,
    StoreHarness,
    append,
    batch,
    in_threads,
    partitions,
    read_all,
    stored,
    values,
)
from .schedule import delay, delayed_batch, lead

__all__ = ["LEASE", "STEPS", "Cut", "CutError", "MoveContract", "SealedMoveContract", "mover", "texts"]


LEASE = 1_000
LIMITS = Limits(schedule_lease_ms=LEASE)
STEPS = ("stamp", "append", "finish")


class CutError(Exception):
    """The process ended here."""


class Cut:
    """A store that is cut off at one call of one verb: before it is made, or once it is committed."""

    def __init__(self, store: Store, verb: str, *, after: bool, call: int = 1) -> None:
        self._store, self._verb, self._after, self._left = store, verb, after, call
        self.done = False

    def __getattr__(self, name: str) -> Any:
        part = getattr(self._store, name)
        return _CutPart(part, self) if name in ("schedule", "staging", "log") else part

    def call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
        if self.done:
            raise CutError("a process that has ended does nothing more")
        self._left -= name == self._verb
        self.done = self._left == 0 and name == self._verb
        if self.done and not self._after:
            raise CutError(f"before {name}")
        result = verb(*args, **named)
        if self.done:
            raise CutError(f"after {name}")
        return result


class _CutPart:
    def __init__(self, part: Any, cut: Cut) -> None:
        self._part, self._cut = part, cut

    def __getattr__(self, name: str) -> Any:
        verb = getattr(self._part, name)
        return lambda *args, **named: self._cut.call(name, verb, *args, **named)


def mover(store: Store | Cut, name: str, told: list[tuple[int, StoredBatch]] | None = None) -> ScheduleMover:
    def moved(stored: Any) -> None:
        if told is not None:
            told.extend(stored)

    return ScheduleMover(store, LIMITS, name, moved)


def texts(store: Store, partition_id: int) -> list[str]:
    return [value.decode() for value in values(read_all(store, partition_id))]


class MoveContract(StoreHarness):
    # ---- in the good case ----

    def test_what_is_due_is_stored_in_order(self, store: Store, place: int, clock: MovableClock) -> None:
        append(store, place, batch(1, value=b"first"))
        for at, id in ((30, "d"), (10, "a"), (20, "b"), (20, "c"), (31, "later")):
            delay(store, place, clock.ms + at, id)
        told: list[tuple[int, StoredBatch]] = []
        ann = mover(store, "ann", told)
        assert ann.tick() == 10
        clock.ms += 30
        assert ann.tick() == 1
        assert texts(store, place) == ["first-0", "a", "b", "c", "d"]
        assert [(partition, one.base_offset, one.records) for partition, one in told] == [(place, 1, 4)]
        assert told[0][1] == read_all(store, place)[1]
        assert store.schedule.moves() == []
        assert sum(store.schedule.delayed().values()) == 1

    def test_messages_keep_what_they_were_sent_with(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        whole = delayed_batch(*(f"id {number}" for number in range(300)))
        for one in (delayed_batch("a", key=None), delayed_batch("b"), whole):
            store.log.append([Append(place, one, clock.ms)])
        mover(store, "ann").tick()
        sent = [r for one in (delayed_batch("a", key=None), delayed_batch("b"), whole) for r in _content(one)]
        assert [r for one in read_all(store, place) for r in _content(one.data)] == sent

    def test_large_batches_are_not_opened_and_small_ones_are_put_together(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        store.log.append([Append(place, delayed_batch(str(number)), clock.ms) for number in range(1_200)])
        many = [f"x{number}" for number in range(2_500)]
        store.log.append([Append(place, delayed_batch(*many), clock.ms)])
        store.log.append([Append(place, delayed_batch("end"), clock.ms)])
        mover(store, "ann").tick()
        assert [one.records for one in read_all(store, place)] == [1_000, 200, 2_500, 1]
        assert texts(store, place) == [*map(str, range(1_200)), *many, "end"]

    def test_more_than_fits_into_a_move_needs_several(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        sent = []
        for turn in range(30):
            ids = [f"{turn}.{number}" for number in range(1_000)]
            store.log.append([Append(place, delayed_batch(*ids), clock.ms)])
            sent += ids
        mover(store, "ann").tick()
        assert texts(store, place) == sent

    def test_a_volatile_topic_gets_its_delayed_messages(self, store: Store, clock: MovableClock) -> None:
        swift = store.catalog.create_topic("swift", TopicSettings(storage="volatile"), 1)
        target = swift.route.ranges[0].partition_id
        delay(store, target, clock.ms, "a", "b")
        mover(store, "ann").tick()
        assert texts(store, target) == ["a", "b"]

    def test_without_delayed_messages_nothing_is_written(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms + 10 * LEASE, "far away")
        with self.failing_commits(store):
            assert mover(store, "ann").tick() == 1_000

    # ---- cut off ----

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("step", STEPS)
    def test_whoever_comes_next_finishes_what_was_cut_off(
        self, store: Store, other: Store, clock: MovableClock, step: str, after: bool
    ) -> None:
        """In two partitions; some come due only while nobody moves them."""
        pair = store.catalog.create_topic("pair", TopicSettings(), 2)
        places = partitions(pair)
        for number in range(40):
            delay(store, places[number % 2], clock.ms + number // 10, str(number), f"{number}+")
        clock.ms += 2
        with pytest.raises(CutError):
            mover(Cut(store, step, after=after), "ann").tick()
        clock.ms += 2
        bob = mover(other, "bob")
        assert bob.tick() == 1_000 and bob.refused
        clock.ms += LEASE
        bob.tick()
        assert not bob.refused
        for side in range(2):
            expected = [id for n in range(side, 40, 2) for id in (str(n), f"{n}+")]
            assert texts(store, places[side]) == expected
        assert (store.schedule.moves(), sum(store.schedule.delayed().values())) == ([], 0)

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("step", STEPS[:2])
    def test_the_second_of_two_moves_is_cut_off(
        self, store: Store, place: int, other: Store, clock: MovableClock, step: str, after: bool
    ) -> None:
        """Its stamp is one with the end of the first."""
        sent = []
        for turn in range(12):
            ids = [f"{turn}.{number}" for number in range(900)]
            store.log.append([Append(place, delayed_batch(*ids), clock.ms)])
            sent += ids
        with pytest.raises(CutError):
            mover(Cut(store, step, after=after, call=2), "ann").tick()
        clock.ms += LEASE
        mover(other, "bob").tick()
        assert texts(store, place) == sent
        assert (store.schedule.moves(), sum(store.schedule.delayed().values())) == ([], 0)

    @pytest.mark.parametrize("step", ["", *STEPS])
    def test_its_ids_are_known_from_then_on(
        self, store: Store, other: Store, clock: MovableClock, step: str
    ) -> None:
        """They are not looked at when it is due (I13), and whoever moves it leaves them with it."""
        once = store.catalog.create_topic("once", TopicSettings(dedup_ms=600_000), 1)
        target = once.route.ranges[0].partition_id
        known: Any = {"ids": digest("a"), "dedup_ms": 600_000}
        store.log.append([Append(target, delayed_batch("a"), clock.ms, **known)])
        if step:
            with pytest.raises(CutError):
                mover(Cut(store, step, after=True), "ann").tick()
            clock.ms += LEASE
        mover(other, "bob").tick()
        again = stored(other.log.append([Append(target, delayed_batch("a"), **known)])[0])
        assert again.repeats == ((0, 0),)
        assert texts(store, target) == ["a"]

    def test_one_cut_off_after_the_other_finish_it_in_the_end(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        for number in range(30):
            delay(store, place, clock.ms, str(number))
        for turn, (step, after) in enumerate((s, a) for s in STEPS for a in (False, True)):
            with pytest.raises(CutError):
                mover(Cut(store, step, after=after), f"mover {turn}").tick()
            delay(store, place, clock.ms, str(30 + turn))
            clock.ms += LEASE
        mover(store, "last").tick()
        assert texts(store, place) == [str(number) for number in range(36)]

    def test_a_store_that_fails_for_a_while_is_asked_again_by_the_same_mover(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        ann = mover(store, "ann")
        delay(store, place, clock.ms + 1, "a")
        ann.tick()
        clock.ms += 1
        for _ in range(3):
            with pytest.raises(StoreUnavailable), self.failing_commits(store):
                ann.tick()
        ann.tick()
        delay(store, place, clock.ms, "b")
        ann.tick()
        assert texts(store, place) == ["a", "b"]

    # ---- two at once ----

    def test_one_that_slept_over_its_lease_does_no_harm(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        """Bob finishes Ann's move, and begins the next one, while Ann is about to append."""
        delay(store, place, clock.ms, "a")

        class Asleep(Cut):
            def call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
                if name == "append" and not self.done:
                    self.done = True
                    clock.ms += LEASE
                    mover(other, "bob").tick()
                    delay(other, place, clock.ms, "b")
                    mover(other, "bob").tick()
                return verb(*args, **named)

        ann = mover(Asleep(store, "", after=False), "ann")
        assert ann.tick() == 1_000
        assert texts(store, place) == ["a", "b"]
        clock.ms += LEASE
        delay(store, place, clock.ms, "c")
        ann.tick()
        assert texts(store, place) == ["a", "b", "c"]

    def test_one_that_comes_back_finishes_what_others_left_meanwhile(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        ann = mover(store, "ann")
        delay(store, place, clock.ms, "a")
        ann.tick()
        clock.ms += LEASE
        delay(store, place, clock.ms, "b")
        with pytest.raises(CutError):
            mover(Cut(other, "append", after=True), "bob").tick()
        clock.ms += LEASE
        ann.tick()
        assert texts(store, place) == ["a", "b"]
        assert store.schedule.moves() == []

    def test_movers_that_take_the_lease_from_each_other_store_everything_once(
        self, store: Store, other: Store, clock: MovableClock
    ) -> None:
        """Their leases end at once, so that both always believe to be the only one."""
        pair = store.catalog.create_topic("pair", TopicSettings(), 2)
        places = partitions(pair)
        sent: dict[int, list[str]] = {place: [] for place in places}
        stop = threading.Event()

        def run(through: Store, name: str) -> None:
            one = ScheduleMover(through, Limits(schedule_lease_ms=1), name, lambda stored: None)
            while not stop.is_set():
                clock.ms += 1
                try:
                    one.tick()
                except StoreUnavailable:  # pragma: no cover - a server under load
                    pass

        def send() -> None:
            due = 0
            try:
                for number in range(150):
                    due = max(due, clock.ms)  # two threads move the clock, which may step back a little
                    for place in places:
                        delay(store, place, due, f"{place}.{number}")
                        sent[place].append(f"{place}.{number}")
            finally:
                stop.set()

        in_threads(lambda: run(store, "ann"), lambda: run(other, "bob"), send, limit_s=60)
        clock.ms += LEASE
        mover(store, "last").tick()
        for place in places:
            assert texts(store, place) == sent[place]

    def test_one_that_gives_its_lease_back_need_not_be_waited_for(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        ann, bob = mover(store, "ann"), mover(other, "bob")
        delay(store, place, clock.ms + 1, "a")
        ann.tick()
        clock.ms += 1
        bob.tick()
        assert texts(store, place) == []
        ann.stop()
        bob.tick()
        assert texts(store, place) == ["a"]

    # ---- what is gone, forgotten or damaged ----

    def test_a_topic_that_was_deleted_meanwhile_gets_nothing(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        elsewhere = store.catalog.create_topic("elsewhere", TopicSettings(), 1)
        delay(store, place, clock.ms, "a")
        delay(store, elsewhere.route.ranges[0].partition_id, clock.ms, "b")
        with pytest.raises(CutError):
            mover(Cut(store, "stamp", after=True), "ann").tick()
        store.catalog.delete_topic(topic.name)
        clock.ms += LEASE
        mover(store, "bob").tick()
        assert texts(store, elsewhere.route.ranges[0].partition_id) == ["b"]
        assert (store.schedule.moves(), store.schedule.next_due()) == ([], None)

    def test_a_mover_whose_sequences_were_forgotten_goes_on_under_another_name(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        ann = mover(store, "ann")
        for id in "abc":
            delay(store, place, clock.ms, id)
            ann.tick()
            store.log.forget_producers(clock.ms + 1)
            clock.ms += 100
        ann.tick()
        assert texts(store, place) == ["a", "b", "c"]

    def test_a_damaged_row_is_kept_and_holds_up_nobody(
        self, store: Store, topic: Topic, place: int, clock: MovableClock, caplog: pytest.LogCaptureFixture
    ) -> None:
        broken = bytearray(delayed_batch("a"))
        broken[-1] ^= 1
        store.log.append([Append(place, bytes(broken), clock.ms)])
        delay(store, place, clock.ms, "b")
        mover(store, "ann").tick()
        assert texts(store, place) == ["b"]
        assert "cannot be read" in caplog.text
        assert store.schedule.delayed() == {topic.id: 1}
        assert store.schedule.next_due() == clock.ms + 3_600_000

    def test_an_error_of_unknown_fate_leaves_the_move_open(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")

        class Unsure(Cut):
            def call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
                return [PostroomError("who knows")] if name == "append" else verb(*args, **named)

        with pytest.raises(PostroomError, match="who knows"):
            mover(Unsure(store, "", after=False), "ann").tick()
        assert len(store.schedule.moves()) == 1
        clock.ms += LEASE
        mover(store, "bob").tick()
        assert texts(store, place) == ["a"]

    def test_what_is_cancelled_while_it_is_planned_is_not_delivered(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")
        delay(store, place, clock.ms, "b", "c")

        class Late(Cut):
            def call(self, name: str, verb: Callable[..., Any], *args: Any, **named: Any) -> Any:
                if name == "stamp" and not self.done:
                    self.done = True
                    assert other.schedule.cancel(topic.id, digest("b"))
                return verb(*args, **named)

        mover(Late(store, "", after=False), "ann").tick()
        assert texts(store, place) == ["a", "c"]
        lead(store, "ann", LEASE)
        assert store.schedule.moves() == []


def _content(data: bytes) -> list[tuple[int, bytes | None, bytes | None, tuple[Any, ...]]]:
    return [(r.timestamp, r.key, r.value, tuple(r.headers)) for r in records(data)]


# ---- the schedule's mover and sealed partitions: what is due goes to their successors (I12, R26) ----


class SealedMoveContract(StoreHarness):
    def succeed(self, store: Store, topic: Topic, partition_id: int) -> Route:
        """Two successors, each with half of the slots, in place of the only partition of a topic."""
        number = next(p.partition for p in topic.route.ranges if p.partition_id == partition_id)
        change = store.routes.begin(split(topic.route, number))
        store.routes.make(change)
        return store.routes.activate(change).route

    def test_a_sealed_partition_sends_its_messages_to_its_successors(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        keys = [b"%d" % number for number in range(60)]
        for key in keys:
            store.log.append([Append(place, delayed_batch(key.decode(), key=key), clock.ms)])
        store.log.append(
            [Append(place, delayed_batch(*(f"+{k.decode()}" for k in keys), key=None), clock.ms)]
        )
        self.seal(store, place)
        route = self.succeed(store, topic, place)
        mover(store, "ann").tick()
        found = {piece.partition_id: texts(store, piece.partition_id) for piece in route.ranges}
        for key in keys:
            assert key.decode() in found[route.of_slot(slot_of(key)).partition_id]
        assert sum(map(len, found.values())) == 120
        assert (store.schedule.moves(), sum(store.schedule.delayed().values())) == ([], 0)

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("step", STEPS)
    def test_sealed_in_the_middle_of_a_move(
        self,
        store: Store,
        topic: Topic,
        place: int,
        other: Store,
        clock: MovableClock,
        step: str,
        after: bool,
    ) -> None:
        """Stored there before it was sealed, or on the successors: once."""
        keys = [b"%d" % number for number in range(20)]
        for key in keys:
            store.log.append([Append(place, delayed_batch(key.decode(), key=key), clock.ms)])
        with pytest.raises(CutError):
            mover(Cut(store, step, after=after), "ann").tick()
        self.seal(store, place)
        clock.ms += LEASE
        bob = mover(other, "bob")
        bob.tick()  # the route knows no successor yet
        route = self.succeed(store, topic, place)
        clock.ms += 100
        bob.tick()
        there = texts(store, place)
        moved = [text for piece in route.ranges for text in texts(store, piece.partition_id)]
        assert sorted(there + moved) == sorted(key.decode() for key in keys)
        assert bool(there) == (step == "finish" or (step == "append" and after))

    def test_what_was_refused_is_not_overtaken_on_the_successor(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        """A later message of its key is sent to the successor while it waits to be moved there."""
        store.log.append([Append(place, delayed_batch("early", key=b"k"), clock.ms)])
        with pytest.raises(CutError):
            mover(Cut(store, "stamp", after=True), "ann").tick()
        self.seal(store, place)
        route = self.succeed(store, topic, place)
        clock.ms += LEASE
        successor = route.of_slot(slot_of(b"k")).partition_id
        store.log.append([Append(successor, delayed_batch("late", key=b"k"), clock.ms)])
        bob = mover(other, "bob")  # it meets the stamp, and the seal; the row waits to be moved elsewhere
        for _ in range(4):
            bob.tick()
            clock.ms += 50
        assert texts(store, successor) == ["early", "late"]

    def test_a_partition_without_successor_holds_up_nobody_else(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        elsewhere = store.catalog.create_topic("elsewhere", TopicSettings(), 1)
        other_place = elsewhere.route.ranges[0].partition_id
        for number in range(25):
            ids = [f"{number}.{n}" for n in range(1_000)]
            store.log.append([Append(place, delayed_batch(*ids), clock.ms)])
        delay(store, other_place, clock.ms, "a")
        self.seal(store, place)
        ann = mover(store, "ann")
        assert 0 < ann.tick() <= 100
        assert texts(store, other_place) == ["a"]
        assert store.schedule.delayed()[topic.id] == 25_000
        route = self.succeed(store, topic, place)
        clock.ms += 100
        ann.tick()
        assert sum(len(texts(store, piece.partition_id)) for piece in route.ranges) == 25_000

    def test_of_a_row_that_was_refused_in_part_the_rest_is_moved_later(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        keys = [b"%d" % number for number in range(40)]
        builder = [delayed_batch(key.decode(), key=key) for key in keys]
        _together(store, place, builder, clock.ms)
        self.seal(store, place)
        route = self.succeed(store, topic, place)
        left, right = (piece.partition_id for piece in route.ranges)
        self.seal(store, right)
        ann = mover(store, "ann")
        ann.tick()
        on_left = [key.decode() for key in keys if route.of_slot(slot_of(key)).partition_id == left]
        rest = [key.decode() for key in keys if key.decode() not in on_left]
        assert on_left and rest
        assert texts(store, left) == on_left
        assert store.schedule.delayed()[topic.id] == len(rest)
        assert not store.schedule.cancel(topic.id, digest(on_left[0]))
        assert store.schedule.cancel(topic.id, digest(rest[0]))
        self._unseal(store, right)
        clock.ms += 100
        ann.tick()
        assert (texts(store, left), texts(store, right)) == (on_left, rest[1:])

    def _unseal(self, store: Store, partition_id: int) -> None:
        """No partition is ever opened again; here it saves a second split."""
        assert isinstance(store, SqlStore)
        with store.session.write(Area.LOG) as tx:
            tx.run("UPDATE postroom_partitions SET state = 'open' WHERE id = ?", partition_id)


def _together(store: Store, place: int, singles: list[bytes], due_at: int) -> None:
    """One row of all these messages."""
    builder, ids = BatchBuilder(), b""
    for one in singles:
        for record in records(one):
            builder.append(record.timestamp, record.key, record.value, record.headers)
            ids += digest((record.value or b"").decode())
    store.log.append([Append(place, builder.build(), due_at, ids)])
