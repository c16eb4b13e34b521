"""`Log.marks` and `removed`, `Catalog.incarnation` and `restored`: what tells a log from the one it was."""

from __future__ import annotations

import pytest

from ...errors import UnknownPartition
from ...model.route import split
from ...model.settings import TopicSettings
from ...store.contract import Store, Topic
from .harness import StoreHarness, append, batch, partitions
from .routes import carried_out

__all__ = ["MarkContract"]

NOWHERE = 987_654_321


def _mark(store: Store, place: int, offset: int) -> str | None:
    return store.log.marks({place: offset}).get(place)


class MarkContract(StoreHarness):
    def test_offsets_behind_one_batch_have_its_mark(self, store: Store, place: int) -> None:
        append(store, place, batch(3), batch(2, value=b"other"))
        marks = [_mark(store, place, offset) for offset in range(1, 6)]
        assert marks[0] is not None and marks[3] is not None
        assert marks == [marks[0]] * 3 + [marks[3]] * 2
        assert marks[0] != marks[3]
        assert _mark(store, place, 0) is None and _mark(store, place, 6) is None

    def test_other_messages_in_the_same_place_have_another_mark(self, store: Store) -> None:
        topic = store.catalog.create_topic("many", TopicSettings(), 3)
        one, other, same = partitions(topic)
        append(store, one, batch(3, value=b"one"))
        append(store, other, batch(3, value=b"other"))
        append(store, same, batch(3, value=b"one"))
        found = store.log.marks({one: 3, other: 3, same: 3})
        assert found[one] == found[same] != found[other]

    def test_marks_of_many_partitions_come_in_one_call(self, store: Store, other: Store) -> None:
        topic = store.catalog.create_topic("many", TopicSettings(), 64)
        places = partitions(topic)
        for place in places[::2]:
            append(store, place, batch(2, value=b"%d" % place))
        found = other.log.marks(dict.fromkeys(places, 2))
        assert set(found) == set(places[::2])
        assert len(set(found.values())) == len(found)

    def test_what_is_not_kept_has_no_mark(self, store: Store, place: int) -> None:
        append(store, place, batch(3), batch(2))
        before = _mark(store, place, 5)
        store.log.trim(place, 3)
        assert store.log.sweep(place, rows=100) == 1
        assert _mark(store, place, 3) is None
        assert _mark(store, place, 5) == before is not None

    def test_a_partition_that_is_gone_has_none(self, store: Store, topic: Topic, place: int) -> None:
        append(store, place, batch())
        store.catalog.delete_topic(topic.name)
        store.catalog.drop_log(place)
        with pytest.raises(UnknownPartition):
            store.log.marks({place: 1})

    def test_where_a_removed_partition_ended_is_known(self, store: Store, topic: Topic, place: int) -> None:
        append(store, place, batch(3))
        opened = carried_out(store, split(topic.route, topic.route.ranges[0].partition)).opens
        store.log.trim(place, 4)
        while store.log.sweep(place, rows=10):
            pass
        store.routes.remove(place)
        successor = opened[0].partition_id
        assert store.log.removed([place, successor, NOWHERE]) == {place: 4}

    def test_a_queue_has_one_incarnation_until_it_was_restored(self, store: Store, other: Store) -> None:
        first = store.catalog.incarnation()
        assert first and other.catalog.incarnation() == first
        second = other.catalog.restored()
        assert second != first and store.catalog.incarnation() == second
