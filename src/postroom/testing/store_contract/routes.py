"""`Routes`: changes of routes, step by step, by whoever comes (R26, I3, I11)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ...errors import (
    InvalidSetting,
    PartitionSealed,
    RouteConflict,
    SequenceGap,
    UnknownPartition,
    UnknownTopic,
)
from ...model.messages.batch import SEAL, build_control
from ...model.policy.settings import TopicSettings
from ...model.topology.route import Change, Draft, Route, merge, move, renew, split
from ...store.contract import Append, Appended, Store, Topic
from .harness import (
    MovableClock,
    StoreHarness,
    append,
    batch,
    in_threads,
    partitions,
    read_all,
    refused,
    stored,
    values,
)

__all__ = ["KafkaRouteContract", "RouteContract", "TurnBackContract", "carried_out", "control", "finished"]

HOUR_MS = 3_600_000


def control() -> bytes:
    return build_control(SEAL, b"sealed", timestamp=1_000)


def carried_out(store: Store, draft: Draft) -> Change:
    """Take all steps of a change."""
    change = store.routes.begin(draft)
    finished(store, change)
    return change


def finished(store: Store, change: Change) -> Topic:
    store.routes.make(change)
    for piece in change.seals:
        store.log.seal(piece.partition_id, control())
    return store.routes.activate(change)


def _route(store: Store, topic: Topic) -> Route:
    return store.catalog.topic(topic.name).route


def _tried(verb: Callable[[], Change | Topic]) -> object:
    try:
        return verb()
    except RouteConflict as conflict:
        return conflict


class RouteContract(StoreHarness):
    def test_what_is_begun_is_written_down(self, store: Store, other: Store, topic: Topic) -> None:
        assert store.routes.changes() == []
        assert store.routes.change_of(topic.name) is None
        change = store.routes.begin(split(topic.route, 0, 100))
        assert [(p.first_slot, p.last_slot, p.partition) for p in change.opens] == [
            (0, 99, 1), (100, 1023, 2),
        ]  # fmt: skip
        assert (change.topic_id, change.kind, change.version) == (topic.id, "split", 1)
        assert other.routes.changes() == [change]
        assert other.routes.change_of(topic.name) == change
        assert _route(other, topic) == topic.route  # nothing has changed yet

    def test_a_change_step_by_step(self, store: Store, other: Store, topic: Topic, place: int) -> None:
        version = store.catalog.version()
        change = store.routes.begin(split(topic.route, 0))
        made = finished(store, change)
        assert made.route.version == 2
        assert made.route.ranges == change.opens
        assert made.route.sealed == topic.route.ranges
        left, right = (piece.partition_id for piece in change.opens)
        assert made.route.predecessors == {left: (place,), right: (place,)}
        assert other.catalog.topic(topic.name) == made
        assert [found.route for found in other.catalog.topics()] == [made.route]
        assert other.catalog.version() > version
        assert store.routes.changes() == []
        append(other, left, batch())
        append(other, right, batch())

    def test_merges_and_long_lines(self, store: Store) -> None:
        topic = store.catalog.create_topic("many", TopicSettings(), 3)
        first, second, third = partitions(topic)
        merged = carried_out(store, merge(topic.route, 1, 0))
        (both,) = (piece.partition_id for piece in merged.opens)
        assert _route(store, topic).predecessors == {both: (first, second)}
        whole = carried_out(store, merge(_route(store, topic), 3, 2))
        (all_of_it,) = (piece.partition_id for piece in whole.opens)
        route = _route(store, topic)
        assert set(route.predecessors[all_of_it]) == {both, third}
        assert {piece.partition_id for piece in route.sealed} == {first, second, third, both}
        history = store.routes.history(topic.name)
        assert [version.version for version in history] == [1, 2, 3]
        assert [len(version.ranges) for version in history] == [3, 2, 1]
        assert history[0].ranges == topic.route.ranges and history[2].ranges == route.ranges

    def test_each_step_may_be_repeated_by_anybody(
        self, store: Store, other: Store, topic: Topic, place: int
    ) -> None:
        append(store, place, batch(3))
        change = store.routes.begin(split(topic.route, 0))
        for through in (store, other, store):
            through.routes.make(change)
        for through in (other, store):
            assert through.log.seal(place, control()) == 4
            through.routes.make(change)
        other.routes.activate(change)
        append(store, change.opens[0].partition_id, batch(2))
        store.routes.make(change)  # by one who is late
        assert store.log.seal(place, control()) == 4
        with pytest.raises(RouteConflict, match="finished or turned back by somebody else"):
            store.routes.activate(change)
        assert _route(store, topic).version == 2
        assert len(values(read_all(store, change.opens[0].partition_id))) == 2

    def test_one_change_at_a_time(self, store: Store, other: Store, topic: Topic) -> None:
        change = store.routes.begin(split(topic.route, 0))
        with pytest.raises(RouteConflict, match="a split of partition 0 of topic 'orders' is under way"):
            other.routes.begin(split(topic.route, 0))
        assert other.routes.changes() == [change]
        elsewhere = store.catalog.create_topic("elsewhere", TopicSettings(), 1)
        assert store.routes.begin(split(elsewhere.route, 0)) in other.routes.changes()

    def test_of_two_that_begin_at_once_one_wins(self, store: Store, other: Store, topic: Topic) -> None:
        draft = split(topic.route, 0)
        found = in_threads(
            lambda: _tried(lambda: store.routes.begin(draft)),
            lambda: _tried(lambda: other.routes.begin(draft)),
        )
        won = [one for one in found if isinstance(one, Change)]
        assert len(won) == 1 and store.routes.changes() == won

    def test_of_two_that_activate_at_once_one_wins(self, store: Store, other: Store, topic: Topic) -> None:
        change = store.routes.begin(split(topic.route, 0))
        store.routes.make(change)
        store.log.seal(change.seals[0].partition_id, control())
        found = in_threads(
            lambda: _tried(lambda: store.routes.activate(change)),
            lambda: _tried(lambda: other.routes.activate(change)),
        )
        assert sorted(isinstance(one, Topic) for one in found) == [False, True]
        assert [version.version for version in store.routes.history(topic.name)] == [1, 2]

    def test_a_change_of_an_old_version_is_refused(self, store: Store, topic: Topic) -> None:
        carried_out(store, split(topic.route, 0))
        with pytest.raises(RouteConflict, match="has version 2 by now, and this change is one of version 1"):
            store.routes.begin(split(topic.route, 0))
        assert store.routes.changes() == []

    def test_a_shard_that_is_not_there(self, store: Store, topic: Topic) -> None:
        with pytest.raises(InvalidSetting, match="there is no shard 'mars'"):
            store.routes.begin(move(topic.route, 0, "mars"))
        assert store.routes.changes() == []
        carried_out(store, split(topic.route, 0))

    def test_a_change_that_was_left_is_taken_by_one(
        self, store: Store, other: Store, topic: Topic, clock: MovableClock
    ) -> None:
        change = store.routes.begin(split(topic.route, 0))
        assert not other.routes.take(change, 500)
        clock.ms += 501
        assert sorted(in_threads(*(lambda t=t: t.routes.take(change, 500) for t in (store, other)))) == [
            False,
            True,
        ]
        clock.ms += 501
        assert other.routes.take(change, 500)
        finished(other, change)
        clock.ms += 501
        assert not store.routes.take(change, 500)

    @pytest.mark.parametrize("made", [False, True])
    def test_the_topic_is_deleted_meanwhile(
        self, store: Store, other: Store, topic: Topic, clock: MovableClock, made: bool
    ) -> None:
        change = store.routes.begin(split(topic.route, 0))
        if made:
            store.routes.make(change)
        other.catalog.delete_topic(topic.name)
        assert store.routes.changes() == []
        for step in (store.routes.make, store.routes.activate, lambda c: store.routes.turn_back(c, [])):
            with pytest.raises(UnknownTopic):
                step(change)
        assert not store.routes.take(change, 0)
        with pytest.raises(UnknownTopic):
            store.routes.begin(split(topic.route, 0))
        clock.ms += HOUR_MS + 1
        left = {piece.partition_id for piece in change.opens}
        assert not made or left <= set(store.catalog.dropped())
        for partition_id in store.catalog.dropped():
            store.catalog.drop_log(partition_id)
        assert not left & set(store.catalog.dropped())

    def test_a_topic_of_the_same_name_has_no_past(self, store: Store, topic: Topic) -> None:
        change = carried_out(store, split(topic.route, 0))
        store.catalog.delete_topic(topic.name)
        again = store.catalog.create_topic(topic.name, TopicSettings(), 1)
        assert (again.route.version, again.route.sealed, again.route.predecessors) == (1, (), {})
        assert not {*partitions(again)} & {piece.partition_id for piece in (*change.seals, *change.opens)}
        with pytest.raises(RouteConflict):
            store.routes.activate(change)

    def test_what_is_reserved_is_kept_while_its_change_is_under_way(
        self, store: Store, topic: Topic, clock: MovableClock
    ) -> None:
        """However long that takes."""
        change = store.routes.begin(split(topic.route, 0))
        clock.ms += 2 * HOUR_MS
        assert store.catalog.dropped() == []
        finished(store, change)
        assert store.catalog.dropped() == []

    # ---- what is removed ----

    def _removed(self, store: Store, topic: Topic) -> Change:
        (place,) = partitions(topic)
        append(store, place, batch(2, producer=5))
        change = carried_out(store, split(topic.route, 0))
        store.log.trim(place, store.log.bounds([place])[place].end)
        while store.log.sweep(place, rows=10):
            pass
        store.routes.remove(place)
        return change

    @pytest.mark.parametrize("storage", ["durable", "volatile"])
    def test_a_removed_partition_is_a_tombstone(self, store: Store, other: Store, storage: str) -> None:
        topic = store.catalog.create_topic("gone", TopicSettings(storage=storage), 1)  # type: ignore[arg-type]
        change = self._removed(store, topic)
        (place,) = partitions(topic)
        route = _route(other, topic)
        assert (route.sealed, route.predecessors, route.ranges) == ((), {}, change.opens)
        with pytest.raises(UnknownPartition):
            other.log.bounds([place])
        with pytest.raises(UnknownPartition):
            other.log.read(place, 0, max_messages=1, max_bytes=100)
        with pytest.raises(UnknownPartition):
            other.log.seal(place, control())
        assert [version.version for version in other.routes.history(topic.name)] == [1, 2]
        assert place not in other.catalog.dropped()
        store.routes.remove(place)  # once more, by one who was cut

    @pytest.mark.parametrize("storage", ["durable", "volatile"])
    def test_what_a_removed_partition_had_stored_is_not_stored_again(
        self, store: Store, other: Store, storage: str
    ) -> None:
        """Its producer was away for long, and still does not know (I3, I11)."""
        topic = store.catalog.create_topic("gone", TopicSettings(storage=storage), 1)  # type: ignore[arg-type]
        self._removed(store, topic)
        (place,) = partitions(topic)
        for through in (store, other):
            found = stored(through.log.append([Append(place, batch(2, producer=5), 0, b"i" * 32, 60_000)])[0])
            assert (found.base_offset, found.duplicate) == (0, True)
            refused(through.log.append([Append(place, batch(producer=5, sequence=2))])[0], PartitionSealed)
            refused(through.log.append([Append(place, batch())])[0], PartitionSealed)

    def test_numbers_and_ids_are_never_used_again(self, store: Store, topic: Topic) -> None:
        self._removed(store, topic)
        seen = {0, 1, 2}
        ids = {piece.partition_id for version in store.routes.history(topic.name) for piece in version.ranges}
        for _ in range(3):
            route = _route(store, topic)
            change = carried_out(store, merge(route, *(piece.partition for piece in route.ranges[:2])))
            change2 = carried_out(store, split(_route(store, topic), change.opens[0].partition))
            opened = (*change.opens, *change2.opens)
            assert not seen & {piece.partition for piece in opened}
            assert not ids & {piece.partition_id for piece in opened}
            seen |= {piece.partition for piece in opened}
            ids |= {piece.partition_id for piece in opened}
            for piece in (*change.seals, *change2.seals):
                store.routes.remove(piece.partition_id)


class TurnBackContract(StoreHarness):
    @pytest.fixture
    def pair(self, store: Store) -> Topic:
        return store.catalog.create_topic("pair", TopicSettings(), 3)

    def _begun(self, store: Store, pair: Topic, sealed: int) -> tuple[Change, list[int]]:
        """A merge of the first two partitions, so many of which are sealed already."""
        change = store.routes.begin(merge(pair.route, 0, 1))
        store.routes.make(change)
        ids = [piece.partition_id for piece in change.seals][:sealed]
        for partition_id in ids:
            store.log.seal(partition_id, control())
        return change, ids

    def test_with_nothing_sealed_it_is_as_if_it_had_never_begun(
        self, store: Store, other: Store, pair: Topic
    ) -> None:
        change, _ = self._begun(store, pair, 0)
        assert other.routes.turn_back(change, []) is None
        assert store.routes.changes() == []
        assert _route(store, pair) == pair.route
        for partition_id in partitions(pair):
            append(store, partition_id, batch())
        assert store.catalog.dropped() == [piece.partition_id for piece in change.opens]
        carried_out(store, merge(pair.route, 0, 1))

    @pytest.mark.parametrize("sealed", [1, 2])
    def test_what_is_sealed_gets_a_fresh_successor_and_the_rest_stays(
        self, store: Store, other: Store, pair: Topic, sealed: int
    ) -> None:
        change, ids = self._begun(store, pair, sealed)
        instead = other.routes.turn_back(change, ids)
        assert instead is not None and instead.kind == "renew" and instead.id != change.id
        assert [piece.partition_id for piece in instead.seals] == ids
        assert [(p.first_slot, p.last_slot) for p in instead.opens] == [
            (p.first_slot, p.last_slot) for p in instead.seals
        ]
        assert store.routes.changes() == [instead]
        assert _route(store, pair) == pair.route
        made = finished(store, instead).route
        assert made.version == 2
        assert made.ranges[sealed:] == pair.route.ranges[sealed:]
        assert made.predecessors == {
            new.partition_id: (old,) for new, old in zip(instead.opens, ids, strict=True)
        }
        for piece in made.ranges:
            append(store, piece.partition_id, batch())
        used = {piece.partition_id for piece in (*change.opens, *change.seals)}
        assert not used & {piece.partition_id for piece in instead.opens}
        assert store.catalog.dropped() == [piece.partition_id for piece in change.opens]

    def test_what_was_turned_back_is_not_activated(self, store: Store, other: Store, pair: Topic) -> None:
        change, ids = self._begun(store, pair, 1)
        instead = store.routes.turn_back(change, ids)
        assert instead is not None
        for step in (other.routes.activate, lambda c: other.routes.turn_back(c, ids)):
            with pytest.raises(RouteConflict, match="finished or turned back by somebody else"):
                step(change)
        assert not other.routes.take(change, -1)
        assert other.routes.take(instead, -1)
        finished(other, instead)
        with pytest.raises(RouteConflict):
            store.routes.turn_back(instead, ids)

    def test_what_was_finished_is_not_turned_back(self, store: Store, other: Store, pair: Topic) -> None:
        change, _ = self._begun(store, pair, 2)
        store.routes.activate(change)
        with pytest.raises(RouteConflict):
            other.routes.turn_back(change, [piece.partition_id for piece in change.seals])
        assert _route(store, pair).version == 2
        assert store.catalog.dropped() == []

    def test_turned_back_and_activated_at_once(self, store: Store, other: Store, pair: Topic) -> None:
        change, ids = self._begun(store, pair, 2)
        found = in_threads(
            lambda: _tried(lambda: store.routes.activate(change)),
            lambda: _tried(lambda: other.routes.turn_back(change, ids)),  # type: ignore[arg-type,return-value]
        )
        activated, turned = found
        assert isinstance(activated, Topic) != isinstance(turned, Change)
        assert _route(store, pair).version == (2 if isinstance(activated, Topic) else 1)

    def test_a_seal_that_comes_late_is_made_up_for_by_a_renewal(
        self, store: Store, other: Store, pair: Topic
    ) -> None:
        """Whoever was slow seals a partition whose change is no more (I11)."""
        change, ids = self._begun(store, pair, 1)
        instead = store.routes.turn_back(change, ids)
        late = change.seals[1].partition_id
        other.log.seal(late, control())
        assert instead is not None
        finished(store, instead)
        refused(store.log.append([Append(late, batch())])[0], PartitionSealed)
        draft = renew(_route(store, pair), [late])
        assert draft is not None
        made = finished(other, other.routes.begin(draft)).route
        for piece in made.ranges:
            append(store, piece.partition_id, batch())


KAFKA = -8  # the id under which a Kafka client's producer is remembered: below 0


class KafkaRouteContract(StoreHarness):
    """What Kafka clients need of a move: offsets and sequences that go on (I28)."""

    def _moved(self, store: Store, topic: Topic) -> tuple[int, int]:
        """Renew the partition as that of a topic for Kafka clients; returns the old one and the new one."""
        draft = renew(_route(store, topic), [_route(store, topic).ranges[0].partition_id])
        assert draft is not None
        change = store.routes.begin(draft)
        store.routes.make(change)
        [old], [new] = change.seals, change.opens
        ends = {old.partition_id: store.log.seal(old.partition_id, control())}
        store.log.inherit(new.partition_id, store.log.hand_down(old.partition_id))
        store.routes.activate(change, ends)
        return old.partition_id, new.partition_id

    def _send(self, store: Store, partition_id: int, sequence: int, messages: int) -> Appended:
        sent = batch(messages, producer=7, sequence=sequence)
        return stored(store.log.append([Append(partition_id, sent, producer_id=KAFKA)])[0])

    def test_each_partition_begins_where_the_one_before_ended(
        self, store: Store, other: Store, topic: Topic
    ) -> None:
        """The seal has no offset of its own."""
        first = topic.route.ranges[0].partition_id
        append(store, first, batch(10))
        _, second = self._moved(store, topic)
        append(store, second, batch(5))
        _, third = self._moved(store, topic)
        assert other.routes.origins(topic.id) == {second: 10, third: 15}

    def test_other_topics_have_no_origins(self, store: Store, topic: Topic) -> None:
        append(store, topic.route.ranges[0].partition_id, batch(10))
        carried_out(store, split(topic.route, 0))
        assert store.routes.origins(topic.id) == {}

    def test_a_producer_goes_on_in_the_successor(self, store: Store, topic: Topic) -> None:
        """A repeat has the offset that it had: counted from where the successor begins, it lies before it."""
        first = topic.route.ranges[0].partition_id
        self._send(store, first, 0, 10)
        self._send(store, first, 10, 2)
        _, second = self._moved(store, topic)
        repeat = self._send(store, second, 10, 2)
        assert (repeat.duplicate, 12 + repeat.base_offset) == (True, 10)
        assert self._send(store, second, 12, 3).base_offset == 0
        refused(
            store.log.append([Append(second, batch(1, producer=7, sequence=90), producer_id=KAFKA)])[0],
            SequenceGap,
        )

    def test_what_is_inherited_twice_does_not_undo_what_came_since(self, store: Store, topic: Topic) -> None:
        """Whoever was slow repeats a step of a change that others have finished (I11)."""
        self._send(store, topic.route.ranges[0].partition_id, 0, 10)
        first, second = self._moved(store, topic)
        self._send(store, second, 10, 1)
        store.log.inherit(second, store.log.hand_down(first))
        assert self._send(store, second, 11, 1).base_offset == 1

    def test_sequences_of_other_producers_begin_anew(self, store: Store, topic: Topic) -> None:
        append(store, topic.route.ranges[0].partition_id, batch(3, producer=7, sequence=0))
        _, second = self._moved(store, topic)
        assert append(store, second, batch(3, producer=7, sequence=0))[0].base_offset == 0

    def test_a_kafka_producer_that_nobody_remembers_begins_anywhere(self, store: Store, topic: Topic) -> None:
        assert self._send(store, topic.route.ranges[0].partition_id, 500, 1).base_offset == 0

    def test_batches_are_found_by_the_times_of_their_messages(self, store: Store, topic: Topic) -> None:
        """Which need not rise: they are the producers' own."""
        one = topic.route.ranges[0].partition_id
        append(store, one, *(batch(2, timestamp=at) for at in (1_000, 9_000, 5_000)))

        def found(at_least: int | None, start: int = 0) -> int | None:
            batch = store.log.stamped(one, at_least, start)
            return None if batch is None else batch.base_offset

        assert [found(at) for at in (0, 1_001, 1_002, 9_001, 9_002)] == [0, 0, 2, 2, None]
        assert [found(5_000, 4), found(None), found(None, 4)] == [4, 2, 4]
