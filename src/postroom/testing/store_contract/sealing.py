"""The schedule's mover and partitions that were sealed: what is due goes to their successors (I12, R26)."""

from __future__ import annotations

import pytest

from ...model.batch import BatchBuilder, records
from ...model.dedup import digest
from ...model.route import Route, split
from ...model.settings import TopicSettings
from ...model.slot import slot_of
from ...store import SqlStore
from ...store.contract import Append, Store, Topic
from ...store.session import Lane
from .harness import MovableClock, StoreHarness
from .moving import LEASE, STEPS, Cut, CutError, mover, texts
from .schedule import delay, delayed_batch

__all__ = ["SealedMoveContract"]


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
        with store.session.write(Lane.LOG) as tx:
            tx.run("UPDATE postroom_partitions SET state = 'open' WHERE id = ?", partition_id)


def _together(store: Store, place: int, singles: list[bytes], due_at: int) -> None:
    """One row of all these messages."""
    builder, ids = BatchBuilder(), b""
    for one in singles:
        for record in records(one):
            builder.append(record.timestamp, record.key, record.value, record.headers)
            ids += digest((record.value or b"").decode())
    store.log.append([Append(place, builder.build(), due_at, ids)])
