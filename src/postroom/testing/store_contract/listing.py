"""`Schedule.listed`: the delayed messages of a topic, page by page (R35)."""

from __future__ import annotations

import pytest

from ...model.messages.batch import records
from ...model.messages.ids import digest
from ...model.moves.schedule import DelayedPosition, DelayedRow
from ...model.policy.settings import TopicSettings
from ...store.contract import Append, Store, Topic
from .harness import MovableClock, StoreHarness
from .schedule import all_due, delay, delayed_batch, lead, stamp

__all__ = ["ListingContract"]

MANY = 1_000_000


def values_of(row: DelayedRow) -> list[str]:
    return [(record.value or b"").decode() for record in records(row.batch)]


def listed(
    store: Store,
    topic: Topic,
    since: DelayedPosition | None = None,
    messages: int = MANY,
    max_bytes: int = MANY,
) -> list[list[str]]:
    rows = store.schedule.listed(topic.id, since=since, messages=messages, max_bytes=max_bytes)
    return [values_of(row) for row in rows]


def in_pages(store: Store, topic: Topic, messages: int) -> list[str]:
    """Every value, from pages of so many messages."""
    found: list[str] = []
    since: DelayedPosition | None = None
    while rows := store.schedule.listed(topic.id, since=since, messages=messages, max_bytes=MANY):
        found += [value for row in rows for value in values_of(row)]
        due_at, partition_id, row_id = rows[-1].position
        since = due_at, partition_id, row_id + 1
    return found


class ListingContract(StoreHarness):
    @pytest.fixture
    def partition_id(self, topic: Topic) -> int:
        """The only partition of `topic`."""
        return topic.route.ranges[0].partition_id

    def test_a_topics_delayed_messages_are_listed_the_soonest_first(
        self, store: Store, topic: Topic, partition_id: int, clock: MovableClock
    ) -> None:
        elsewhere = store.catalog.create_topic("elsewhere", TopicSettings(), 1)
        delay(store, elsewhere.route.ranges[0].partition_id, clock.ms + 1, "z")
        for at, id in ((30, "d"), (10, "a"), (20, "b"), (20, "c")):
            delay(store, partition_id, clock.ms + at, id)
        rows = store.schedule.listed(topic.id, messages=MANY, max_bytes=MANY)
        assert [values_of(row) for row in rows] == [["a"], ["b"], ["c"], ["d"]]
        assert [row.due_at - clock.ms for row in rows] == [10, 20, 20, 30]
        assert {row.home for row in rows} == {(topic.id, partition_id)}
        assert rows[0].ids == digest("a")
        assert listed(store, elsewhere) == [["z"]]

    def test_what_is_overdue_and_what_is_stamped_is_listed_until_it_is_gone(
        self, store: Store, topic: Topic, partition_id: int, other: Store, clock: MovableClock
    ) -> None:
        delay(store, partition_id, clock.ms, "a")
        clock.ms += 60_000
        lead(store)
        assert stamp(store, all_due(store))
        assert listed(other, topic) == [["a"]]

    def test_a_list_has_no_more_than_is_asked_for_but_one_row_always(
        self, store: Store, topic: Topic, partition_id: int, clock: MovableClock
    ) -> None:
        assert listed(store, topic) == []
        for number in range(0, 12, 3):
            delay(store, partition_id, clock.ms, *(str(n) for n in range(number, number + 3)))
        size = len(delayed_batch("0", "1", "2"))
        assert len(listed(store, topic, messages=8)) == 2
        assert len(listed(store, topic, messages=9)) == 3
        assert len(listed(store, topic, max_bytes=2 * size)) == 2
        assert len(listed(store, topic, messages=1)) == len(listed(store, topic, max_bytes=1)) == 1

    def test_a_list_goes_on_from_a_row(
        self, store: Store, topic: Topic, partition_id: int, clock: MovableClock
    ) -> None:
        for at, id in ((1, "a"), (2, "b"), (2, "c"), (3, "d")):
            delay(store, partition_id, clock.ms + at, id)
        rows = store.schedule.listed(topic.id, messages=2, max_bytes=MANY)
        assert listed(store, topic, since=rows[1].position) == [["b"], ["c"], ["d"]]
        assert listed(store, topic, since=(clock.ms + 2, partition_id, 2**62)) == [["d"]]
        assert listed(store, topic, since=(clock.ms + 4, partition_id, 0)) == []

    def test_a_row_that_is_gone_ends_no_list(
        self, store: Store, topic: Topic, partition_id: int, clock: MovableClock
    ) -> None:
        for id in "abc":
            delay(store, partition_id, clock.ms + 1, id)
        second = store.schedule.listed(topic.id, messages=2, max_bytes=MANY)[1]
        assert store.schedule.cancel(topic.id, digest("b"))
        assert listed(store, topic, since=second.position) == [["c"]]

    def test_pages_have_everything_once_also_of_one_moment_and_of_many_partitions(
        self, store: Store, clock: MovableClock
    ) -> None:
        topic = store.catalog.create_topic("wide", TopicSettings(), 4)
        partitions = [piece.partition_id for piece in topic.route.ranges]
        appends = [
            Append(partitions[n % 4], delayed_batch(str(n)), clock.ms + 1 + n // 900, digest(str(n)))
            for n in range(1_100)
        ]
        store.log.append(appends)
        found = in_pages(store, topic, 170)
        assert sorted(map(int, found)) == list(range(1_100))
        assert {*found[:900]} == {str(n) for n in range(900)}
        assert in_pages(store, topic, 700) == found
