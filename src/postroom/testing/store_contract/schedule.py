"""`Schedule`, and `Log.append` with `due_at`: delayed messages until they are due (R35, I3, I12)."""

from __future__ import annotations

import pytest

from ...errors import LeaseLost, PartitionSealed, UnknownProducer
from ...model.delivery.delivery import Kind, Settlement, Stamp
from ...model.messages.batch import BatchBuilder, records
from ...model.messages.ids import digest
from ...model.moves.schedule import DUTY, DelayedRow, Part, Planned, leaving
from ...model.policy.settings import TopicSettings
from ...store.contract import Append, Appended, Finished, Group, Move, Store, Topic
from .harness import (
    MovableClock,
    StoreHarness,
    acks,
    append,
    ask,
    batch,
    in_threads,
    read_all,
    refused,
    stored,
)

__all__ = [
    "ANN",
    "CancelContract",
    "ScheduleContract",
    "all_due",
    "delay",
    "delayed_batch",
    "due",
    "gone",
    "lead",
    "stamp",
]


ANN = "ann"
MANY = 1_000_000


def delayed_batch(*ids: str, producer: int = -1, sequence: int = 0, key: bytes | None = b"key") -> bytes:
    """A message for each id, which is its value too."""
    builder = BatchBuilder()
    for id in ids:
        builder.append(1_000, key, id.encode(), [("postroom-id", id.encode())])
    return builder.build() if producer < 0 else builder.build(producer, 0, sequence)


def delay(store: Store, partition_id: int, due_at: int, *ids: str, producer: int = -1) -> Appended:
    """Schedule a batch with these ids."""
    digests = b"".join(digest(id) for id in ids)
    found = store.log.append([Append(partition_id, delayed_batch(*ids, producer=producer), due_at, digests)])
    return stored(found[0])


def lead(store: Store, holder: str = ANN, lease_ms: int = 5_000) -> None:
    assert store.duties.acquire(DUTY, holder, lease_ms)


def due(store: Store, messages: int = MANY, max_bytes: int = MANY) -> list[list[str]]:
    return [waiting_values(row) for row in store.schedule.due(messages=messages, max_bytes=max_bytes)]


def waiting_values(row: DelayedRow) -> list[str]:
    return [(record.value or b"").decode() for record in records(row.batch)]


def plan_of(rows: list[DelayedRow]) -> list[Planned]:
    """Every row a batch of its own; where it goes and under which sequence matters to nobody here."""
    return [Planned(row.partition_id, 0, row.records, (Part(row.id),)) for row in rows]


def gone(rows: list[DelayedRow], move_id: int | None = None) -> Finished:
    by_id = {row.id: row for row in rows}
    return Finished(move_id, frozenset(by_id), messages=leaving(by_id, by_id, {}))


def stamp(
    store: Store, rows: list[DelayedRow], holder: str = ANN, move_id: int = 1, before: Finished | None = None
) -> bool:
    return store.schedule.stamp(holder, Move(move_id, 5, tuple(plan_of(rows))), rows, before)


def all_due(store: Store) -> list[DelayedRow]:
    return store.schedule.due(messages=MANY, max_bytes=MANY)


class ScheduleContract(StoreHarness):
    # ---- scheduling ----

    def test_a_delayed_batch_waits_beside_the_log(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        assert delay(store, place, clock.ms + 500, "a", "b") == Appended(-1, clock.ms)
        assert read_all(store, place) == []
        assert store.log.bounds([place])[place].end == 0
        assert store.schedule.next_due() == clock.ms + 500
        assert store.schedule.delayed() == {topic.id: 2}
        assert due(store) == []
        clock.ms += 500
        (row,) = all_due(store)
        assert waiting_values(row) == ["a", "b"]
        assert (row.topic_id, row.partition_id, row.due_at, row.records) == (topic.id, place, clock.ms, 2)
        assert row.ids == digest("a") + digest("b")

    def test_it_is_still_there_for_another_process(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms + 10, "a")
        clock.ms += 10
        assert due(other) == [["a"]]

    def test_no_time_is_too_far_away(self, store: Store, place: int, clock: MovableClock) -> None:
        thousand_years = clock.ms + 1000 * 366 * 86_400_000
        delay(store, place, thousand_years, "a")
        assert store.schedule.next_due() == thousand_years
        clock.ms = thousand_years - 1
        assert due(store) == []
        clock.ms += 1
        assert due(store) == [["a"]]

    def test_a_time_in_the_past_is_due_now(self, store: Store, place: int, clock: MovableClock) -> None:
        delay(store, place, clock.ms - 5_000, "a")
        assert store.schedule.next_due() == clock.ms
        assert due(store) == [["a"]]

    def test_due_rows_come_by_their_moment_and_then_as_they_were_sent(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        for at, id in ((30, "d"), (10, "a"), (20, "b"), (20, "c"), (40, "e")):
            delay(store, place, clock.ms + at, id)
        clock.ms += 30
        assert due(store) == [["a"], ["b"], ["c"], ["d"]]

    def test_no_more_is_read_than_is_asked_for_but_one_row_always(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        for number in range(0, 12, 3):
            delay(store, place, clock.ms, *(str(n) for n in range(number, number + 3)))
        size = len(delayed_batch("0", "1", "2"))
        assert len(due(store, messages=8)) == 2
        assert len(due(store, messages=9)) == 3
        assert len(due(store, max_bytes=2 * size)) == 2
        assert len(due(store, messages=1)) == 1
        assert len(due(store, max_bytes=1)) == 1

    def test_partitions_can_be_left_out(self, store: Store, clock: MovableClock) -> None:
        pair = store.catalog.create_topic("pair", TopicSettings(), 2)
        one, two = (piece.partition_id for piece in pair.route.ranges)
        delay(store, one, clock.ms, "a")
        delay(store, two, clock.ms, "b")
        rows = store.schedule.due(messages=MANY, max_bytes=MANY, without=[one])
        assert [waiting_values(row) for row in rows] == [["b"]]
        assert store.schedule.next_due(without=[one]) == clock.ms
        assert store.schedule.next_due(without=[one, two]) is None

    def test_what_was_due_before_a_moment_can_be_left_out(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms + 1, "a")
        delay(store, place, clock.ms + 5, "b")
        assert store.schedule.next_due(since=clock.ms + 2) == clock.ms + 5
        clock.ms += 9
        rows = store.schedule.due(messages=MANY, max_bytes=MANY, since=clock.ms - 5)
        assert [waiting_values(row) for row in rows] == [["b"]]

    def test_many_messages_of_one_instant_are_all_there(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        appends = [
            Append(place, delayed_batch(str(number)), clock.ms + 1, digest(str(number)))
            for number in range(1_100)
        ]
        assert all(isinstance(result, Appended) for result in store.log.append(appends))
        clock.ms += 1
        assert due(store) == [[str(number)] for number in range(1_100)]

    # ---- sequences ----

    def test_a_repeated_batch_is_scheduled_once(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        assert delay(store, place, clock.ms + 10, "a", producer=7) == Appended(-1, clock.ms)
        for through in (store, other):
            assert delay(through, place, clock.ms + 10, "a", producer=7).duplicate
        assert store.schedule.delayed() == {topic.id: 1}

    def test_a_batch_is_recognised_also_when_it_is_delivered_already(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a", producer=7)
        lead(store)
        store.schedule.finish(ANN, gone(all_due(store)))
        again = delay(store, place, clock.ms, "a", producer=7)
        assert (again.base_offset, again.duplicate) == (-1, True)
        assert store.schedule.next_due() is None

    def test_delayed_batches_and_others_share_a_producers_sequence(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        early = Append(place, delayed_batch("b", producer=7, sequence=1), clock.ms + 10)
        refused(store.log.append([early])[0], UnknownProducer)
        assert store.schedule.next_due() is None
        found = store.log.append(
            [
                Append(place, batch(1, producer=7, sequence=0)),
                early,
                Append(place, batch(1, producer=7, sequence=2)),
            ]
        )
        assert [stored(result).base_offset for result in found] == [0, -1, 1]

    def test_a_sealed_partition_takes_no_delayed_batch_but_knows_what_it_has(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms + 10, "a", producer=7)
        self.seal(store, place)
        results = store.log.append(
            [
                Append(place, delayed_batch("a", producer=7), clock.ms + 10),
                Append(place, delayed_batch("b", producer=7, sequence=1), clock.ms + 10),
            ]
        )
        assert stored(results[0]).duplicate
        refused(results[1], PartitionSealed)

    def test_of_a_volatile_topic_delayed_messages_wait_like_all_others(
        self, store: Store, clock: MovableClock
    ) -> None:
        swift = store.catalog.create_topic("swift", TopicSettings(storage="volatile"), 1)
        target = swift.route.ranges[0].partition_id
        delay(store, target, clock.ms + 10, "a", producer=7)
        assert delay(store, target, clock.ms + 10, "a", producer=7).duplicate
        append(store, target, batch(1, producer=8))
        assert store.schedule.delayed() == {swift.id: 1}

    def test_if_the_commit_fails_nothing_is_scheduled(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        with pytest.raises(Exception, match="the test wants it so"), self.failing_commits(store):
            delay(store, place, clock.ms, "a", producer=7)
        assert (store.schedule.next_due(), store.schedule.delayed()) == (None, {})
        assert not delay(store, place, clock.ms, "a", producer=7).duplicate

    # ---- moving ----

    def test_only_the_holder_of_the_lease_stamps_and_finishes(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")
        rows = all_due(store)
        for _ in range(2):
            with pytest.raises(LeaseLost):
                stamp(store, rows)
            with pytest.raises(LeaseLost):
                store.schedule.finish(ANN, gone(rows))
            lead(store, "bob")
        assert store.schedule.moves() == []
        assert due(store) == [["a"]]
        clock.ms += 5_000
        lead(store)
        assert stamp(store, rows)

    def test_a_stamp_says_what_goes_where_until_it_is_finished(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a", "b")
        lead(store)
        rows = all_due(store)
        planned = [Planned(place, 3, 2, (Part(rows[0].id, (1, 0)),)), Planned(place + 1, 0, 1, (Part(9),))]
        move = Move(2**62 - 1, 2**62 - 2, tuple(planned))
        assert store.schedule.stamp(ANN, move, rows)
        assert other.schedule.moves() == [move]
        store.schedule.finish(ANN, gone(rows, move.id))
        assert other.schedule.moves() == []
        assert due(other) == []
        assert sum(other.schedule.delayed().values()) == 0

    def test_a_move_can_be_finished_together_with_the_next_stamp(
        self, store: Store, topic: Topic, place: int, other: Store, clock: MovableClock
    ) -> None:
        for id in "abcd":
            delay(store, place, clock.ms, id)
        lead(store)
        rows = all_due(store)
        assert stamp(store, rows[:1], move_id=1)
        done = gone(rows[:1], move_id=1)
        rest = store.schedule.due(messages=MANY, max_bytes=MANY, skip=done.gone)
        assert rest == rows[1:]
        assert stamp(store, rest[:1], move_id=2, before=done)
        assert [move.id for move in other.schedule.moves()] == [2]
        assert due(other) == [["b"], ["c"], ["d"]]
        assert other.schedule.cancel(topic.id, digest("c"))
        assert not stamp(store, rest[1:], move_id=3, before=gone(rest[:1], move_id=2))
        assert (store.schedule.moves(), due(store)) == ([], [["d"]])
        assert store.schedule.delayed() == {topic.id: 1}

    def test_a_move_that_is_finished_twice_changes_nothing_the_second_time(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")
        delay(store, place, clock.ms, "b")
        lead(store)
        rows = all_due(store)
        assert stamp(store, rows[:1], move_id=1)
        store.schedule.finish(ANN, gone(rows[:1], move_id=1))
        store.schedule.finish(ANN, gone(rows, move_id=1))
        assert due(store) == [["b"]]
        assert store.schedule.delayed() == {topic.id: 1}

    def test_a_row_can_be_left_in_part(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a", "b", "c")
        lead(store)
        (row,) = all_due(store)
        rest = DelayedRow(row.id, row.topic_id, place, row.due_at, 1, delayed_batch("b"), digest("b"))
        store.schedule.finish(ANN, Finished(None, changed=(rest,), messages={row.home: 2}))
        assert all_due(store) == [rest]
        assert store.schedule.delayed() == {topic.id: 1}
        assert store.schedule.cancel(topic.id, digest("b"))

    def test_rows_are_read_by_id_as_far_as_they_are_there(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        for id in "abc":
            delay(store, place, clock.ms, id)
        rows = all_due(store)
        found = store.schedule.rows([rows[0].id, rows[2].id, 10**9])
        assert found == {rows[0].id: rows[0], rows[2].id: rows[2]}
        assert store.schedule.rows([]) == {}

    def test_sequences_of_a_move_under_way_are_not_forgotten(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        delay(store, place, clock.ms, "a")
        append(store, place, batch(1, producer=5), batch(1, producer=6))
        clock.ms += 1_000
        lead(store)
        rows = all_due(store)
        assert stamp(store, rows)
        store.log.forget_producers(clock.ms)
        assert append(store, place, batch(1, producer=5))[0].duplicate
        assert not append(store, place, batch(1, producer=6))[0].duplicate

    # ---- retries that leave through the schedule ----

    def test_a_stamped_retry_keeps_its_moment_for_whoever_moves_it(
        self, store: Store, place: int, group: Group, other: Store, clock: MovableClock
    ) -> None:
        append(store, place, batch(3))
        store.progress.rewind(group, [place])
        store.progress.poll(group, place, ask(5, 3))
        far = clock.ms + 10**9
        retry = Settlement(Kind.RETRY, 1, 1, far, "later", later=Stamp(77, 9, far))
        (leaving,) = store.progress.settle(group, place, 5, [retry, *acks((0, 0), (2, 2))]).leaving
        assert leaving.stamp is not None
        assert (leaving.first, leaving.stamp.partition_id, leaving.stamp.due_at) == (1, 9, far)
        assert (leaving.spent, leaving.failures, leaving.reason) == (1, 1, "later")
        clock.ms += group.terms.mover_ms
        again = other.progress.poll(group, place, ask(6, 3)).leaving
        assert [(one.first, one.stamp) for one in again] == [(1, leaving.stamp)]

    # ---- news ----

    def test_news_tell_when_the_next_one_is_due(
        self, store: Store, place: int, other: Store, clock: MovableClock
    ) -> None:
        assert other.log.news().next_due is None
        delay(store, place, clock.ms + 700, "a")
        delay(store, place, clock.ms + 400, "b")
        assert other.log.news().next_due == clock.ms + 400


# ---- `Schedule.cancel` and `purge`: what is delayed is taken back, what is stamped is not (R35, I12) ----


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

            def move(rows: list[DelayedRow] = rows) -> bool:
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
