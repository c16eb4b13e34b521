"""`Schedule.cancel` and `Schedule.purge`: what waits is taken back, what is stamped is not (R35, I12)."""

from __future__ import annotations

from ...model.dedup import digest
from ...model.schedule import Waiting
from ...model.settings import TopicSettings
from ...store.contract import Append, Store, Topic
from .harness import MovableClock, StoreHarness, in_threads
from .schedule import ANN, all_due, delay, delayed_batch, due, gone, lead, stamp

__all__ = ["CancelContract"]


class CancelContract(StoreHarness):
    # ---- cancel ----

    def test_a_waiting_message_is_cancelled_by_its_id(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        for id in ("a", "b", "a long id of more than fifteen bytes"):
            delay(store, place, clock.ms, id)
        assert other.schedule.cancel(topic.id, digest("a"))
        assert other.schedule.cancel(topic.id, digest("a long id of more than fifteen bytes"))
        assert not store.schedule.cancel(topic.id, digest("a"))
        assert not store.schedule.cancel(topic.id, digest("never sent"))
        assert due(store) == [["b"]]
        assert store.schedule.delayed() == {topic.id: 1}

    def test_one_of_many_in_a_batch_is_cancelled_alone(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a", "b", "c")
        assert store.schedule.cancel(topic.id, digest("b"))
        assert due(store) == [["a", "c"]]
        assert store.schedule.cancel(topic.id, digest("a"))
        assert due(store) == [["c"]]
        assert store.schedule.cancel(topic.id, digest("c"))
        assert due(store) == []
        assert sum(store.schedule.delayed().values()) == 0

    def test_all_that_wait_under_an_id_are_cancelled(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")
        delay(store, place, clock.ms, "a", "b", "a")
        delay(store, place, clock.ms + 500, "a")
        assert store.schedule.cancel(topic.id, digest("a"))
        clock.ms += 500
        assert due(store) == [["b"]]

    def test_an_id_is_found_among_many_batches(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        for number in range(0, 500, 2):
            delay(store, place, clock.ms, str(number), str(number + 1))
        assert store.schedule.cancel(topic.id, digest("499"))
        assert store.schedule.cancel(topic.id, digest("0"))
        assert store.schedule.delayed() == {topic.id: 498}

    def test_an_id_belongs_to_its_topic(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        elsewhere = store.catalog.create_topic("elsewhere", TopicSettings(), 1)
        delay(store, place, clock.ms, "a")
        assert not store.schedule.cancel(elsewhere.id, digest("a"))
        assert due(store) == [["a"]]

    def test_what_is_stamped_is_not_cancelled(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")
        delay(store, place, clock.ms, "b", "c")
        delay(store, place, clock.ms, "d")
        lead(store)
        rows = all_due(store)[:2]
        assert stamp(store, rows)
        for id in ("a", "b", "c"):
            assert not other.schedule.cancel(topic.id, digest(id))
        assert other.schedule.cancel(topic.id, digest("d"))
        assert due(store) == [["a"], ["b", "c"]]

    def test_what_was_cancelled_is_not_stamped(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")
        delay(store, place, clock.ms, "b", "c")
        lead(store)
        rows = all_due(store)
        assert other.schedule.cancel(topic.id, digest("b"))
        assert not stamp(store, rows)
        assert store.schedule.moves() == []
        assert other.schedule.cancel(topic.id, digest("a"))
        rows = all_due(store)
        assert stamp(store, rows)

    def test_of_cancel_and_stamp_at_once_one_wins(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        lead(store)
        for turn in range(12):
            ids = [f"{turn}.{n}" for n in range(1 + turn % 2)]
            delay(store, place, clock.ms, *ids)
            rows = all_due(store)

            def move(rows: list[Waiting] = rows) -> bool:
                return stamp(store, rows)

            def cancel(id: str = ids[-1]) -> bool:
                return other.schedule.cancel(topic.id, digest(id))

            stamped, cancelled = in_threads(move, cancel)
            assert stamped != cancelled
            for left in store.schedule.moves():
                store.schedule.finish(ANN, gone([], left.id))
            store.schedule.finish(ANN, gone(all_due(store)))
        assert sum(store.schedule.delayed().values()) == 0

    # ---- purge ----

    def test_a_purge_drops_what_waits_and_leaves_what_is_stamped(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        elsewhere = store.catalog.create_topic("elsewhere", TopicSettings(), 1)
        delay(store, elsewhere.route.ranges[0].partition_id, clock.ms + 1, "z")
        delay(store, place, clock.ms, "a")
        lead(store)
        rows = all_due(store)
        assert stamp(store, rows)
        appends = [
            Append(place, delayed_batch(str(number)), clock.ms + number, digest(str(number)))
            for number in range(2_100)
        ]
        store.log.append(appends)
        delay(store, place, clock.ms + 10**9, "far", "away")
        assert store.schedule.purge(topic.id) == 2_102
        assert store.schedule.purge(topic.id) == 0
        assert store.schedule.delayed() == {topic.id: 1, elsewhere.id: 1}
        clock.ms += 10**9
        assert due(store) == [["a"], ["z"]]

    def test_a_deleted_topic_takes_its_delayed_messages_with_it(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")
        store.catalog.delete_topic(topic.name)
        assert (due(store), store.schedule.delayed()) == ([], {})
