"""Staging and decisions: what a job writes is invisible until it is decided, once and for ever (I20)."""

from __future__ import annotations

import pytest

from ...errors import PermissionDenied, StagingConflict
from ...model.messages.batch import BatchBuilder
from ...model.messages.slot import slot_of
from ...model.moves.schedule import Part, Planned
from ...model.moves.staging import Decision, OpenMove, Progress, Span, StagedQuery, Wish
from ...model.policy.settings import TopicSettings
from ...store.contract import Finished, Staged, Store, Topic
from .harness import MovableClock, StoreHarness, append, in_threads, partitions, read_all
from .harness import batch as produced

__all__ = ["StagingContract", "stage", "staged_batch", "wish"]

HOUR = 3_600_000
DAY = 24 * HOUR


def staged_batch(*values: str, key: bytes | None = None) -> bytes:
    """A batch whose keys are the values up to the first point, if none is given."""
    builder = BatchBuilder()
    for value in values:
        assert builder.append(1_000, key or value.partition(".")[0].encode(), value.encode(), [])
    return builder.build()


def stage(
    store: Store, topic: Topic, query: str, batch: int, segment: str, *values: str, first: int = 0
) -> int:
    """Stage a batch for each partition that one of the values belongs to; returns the next number."""
    routed: dict[int, list[str]] = {}
    for value in values:
        piece = topic.route.of_slot(slot_of(value.partition(".")[0].encode()))
        routed.setdefault(piece.partition_id, []).append(value)
    rows = [Staged(topic.id, place, staged_batch(*some)) for place, some in routed.items()]
    store.staging.put(query, batch, segment, first, rows)
    return first + len(rows)


def wish(
    segments: dict[str, int],
    rows: int | None = None,
    source: dict[str, Span] | None = None,
    marks: dict[str, int] | None = None,
) -> Wish:
    rows = sum(segments.values()) if rows is None else rows
    return Wish(tuple(segments.items()), rows, source or {}, marks or {})


class StagingContract(StoreHarness):
    def test_a_decision_is_written_once_and_comes_back(
        self, store: Store, topic: Topic, place: int, other: Store
    ) -> None:
        for segment in "ab":
            stage(store, topic, "q", 0, segment, "x", "y")
        assert (store.staging.known("q"), store.staging.decision("q", 0)) == (StagedQuery(-1), None)
        assert store.staging.unfinished() == []
        first = store.staging.decide("q", 0, wish({"a": 2}), 7)
        assert (first.segments, first.rows, first.revision, first.topics) == ((("a", 2),), 2, 1, (topic.id,))
        assert (first.published_at, first.producer_id, first.move) == (0, 7, None)
        again = other.staging.decide("q", 0, wish({"b": 2}), 8)
        assert again == first == other.staging.decision("q", 0)
        assert store.staging.unfinished() == store.staging.unfinished("q") == [first]
        assert store.staging.unfinished("another") == []
        assert store.staging.known("q").batch == 0
        assert read_all(store, place) == []  # it is in no log

    def test_a_segment_has_to_be_there_as_it_was_staged(self, store: Store, topic: Topic) -> None:
        for _ in range(2):  # a repeated put changes nothing
            assert stage(store, topic, "q", 0, "a", "x", "y") == 1
            assert stage(store, topic, "q", 0, "a", "z", first=1) == 2
        for batch, wrong in ((0, {"a": 2}), (0, {"a": 3, "b": 1}), (0, {"c": 1}), (1, {"a": 3})):
            with pytest.raises(StagingConflict, match="run the batch again"):
                store.staging.decide("q", batch, wish(wrong), 7)
        with pytest.raises(StagingConflict, match="name them all"):
            store.staging.decide("q", 0, wish({"a": 3}), 7, topics=[topic.id + 1])
        assert (store.staging.decision("q", 0), store.staging.known("q").batch) == (None, -1)
        store.staging.decide("q", 0, wish({"a": 3}), 7, topics=[topic.id, topic.id + 1])

    def test_the_batch_before_is_published_first(self, store: Store, topic: Topic) -> None:
        for batch in (0, 1):
            stage(store, topic, "q", batch, "a", "x")
            stage(store, topic, "other", batch, "a", "x")
        first = store.staging.decide("q", 0, wish({"a": 1}), 7)
        with pytest.raises(StagingConflict) as raised:
            store.staging.decide("q", 1, wish({"a": 1}), 8)
        assert raised.value.details["unfinished"] == 0
        store.staging.decide("other", 1, wish({"a": 1}), 9)
        self._published(store, first)
        assert store.staging.decide("q", 1, wish({"a": 1}), 8).batch == 1

    @staticmethod
    def _published(store: Store, decision: Decision) -> Decision:
        rows = store.staging.next_rows(decision, messages=1_000, max_bytes=10**6)
        gone = Finished(None, frozenset(row.id for row in rows))
        done = store.staging.finish(decision, gone, decision.progress, done=True)
        assert done is not None and done.published_at > 0
        return done

    def test_whoever_does_not_know_the_last_step_changes_nothing(self, store: Store, topic: Topic) -> None:
        stage(store, topic, "q", 0, "a", "x")
        first = store.staging.decide("q", 0, wish({"a": 1}), 7)
        [row] = store.staging.next_rows(first, messages=1, max_bytes=1)
        move = OpenMove((Planned(row.partition_id, 0, 1, (Part(row.id),)),))
        stamped = store.staging.stamp(first, move)
        assert stamped is not None and stamped == store.staging.decision("q", 0)
        assert (stamped.step, stamped.move) == (1, move)
        gone, progress = Finished(None, frozenset({row.id})), Progress({}, {row.partition_id: 1}, 3)
        assert store.staging.stamp(first, move) is None
        assert store.staging.finish(first, gone, progress, done=True) is None
        assert store.staging.decision("q", 0) == stamped
        assert row.id in store.staging.rows([row.id])
        done = store.staging.finish(stamped, gone, progress, producer_id=9, done=True)
        assert done is not None and done == store.staging.decision("q", 0)
        assert (done.progress, done.producer_id, done.move) == (progress, 9, None)
        assert store.staging.finish(stamped, gone, progress) is None

    def test_a_decided_segment_takes_no_more(self, store: Store, topic: Topic) -> None:
        """Also not what was in it: a repeat that comes late would be published again."""
        stage(store, topic, "q", 0, "a", "x", "y")
        decision = store.staging.decide("q", 0, wish({"a": 2}), 7)
        stage(store, topic, "q", 0, "a", "x", "y")  # is there
        [row] = store.staging.next_rows(decision, messages=9, max_bytes=10**6)
        gone = Finished(None, frozenset({row.id}))
        assert store.staging.finish(decision, gone, decision.progress) is not None
        for number in (0, 1):
            with pytest.raises(StagingConflict, match="takes no more"):
                stage(store, topic, "q", 0, "a", "x", "y", first=number)
        assert store.staging.next_rows(decision, messages=9, max_bytes=10**6) == []
        stage(store, topic, "q", 0, "b", "x")

    # ---- batches that come back ----

    def test_other_rows_without_source_offsets_are_refused(self, store: Store, topic: Topic) -> None:
        stage(store, topic, "q", 3, "a", "x", "y")
        self._published(store, store.staging.decide("q", 3, wish({"a": 2}), 7))
        stage(store, topic, "q", 3, "b", "x", "y", "z")
        with pytest.raises(StagingConflict, match="source_offset"):
            store.staging.decide("q", 3, wish({"b": 3}), 8)
        with pytest.raises(StagingConflict, match="not remembered"):
            store.staging.decide("q", 2, wish({}, rows=5), 8)

    def test_the_marks_of_a_query_never_go_back(self, store: Store, topic: Topic) -> None:
        ranges: list[dict[str, Span]] = [{"s0": (0, 9), "s1": (5, 6)}, {"s0": (10, 12)}, {"s1": (2, 3)}]
        for batch, source in enumerate(ranges):
            marks = dict(store.staging.known("q").marks)
            stage(store, topic, "q", batch, "a", "x", "y")
            segments = {"a": 2} if batch < 2 else {}  # of the last all rows lie below the marks
            self._published(store, store.staging.decide("q", batch, wish(segments, 5, source, marks), 7))
        assert store.staging.known("q") == StagedQuery(2, {"s0": 12, "s1": 6})
        with pytest.raises(StagingConflict, match="one driver alone"):  # what was left out is too little
            store.staging.decide("q", 3, wish({}, 3, {"s0": (12, 14)}, {"s0": 11}), 8)

    def test_rows_are_not_decided_away(self, store: Store, topic: Topic) -> None:
        """What was seen is staged, or lies below the marks; and nothing is written down of the rest."""
        stage(store, topic, "q", 0, "a", "x")
        spans: list[dict[str, Span]] = [{}, {"s": (0, 4)}, {"s": (3, 2)}, {"s": (-1, 0)}]
        for source in spans:
            with pytest.raises(StagingConflict):
                store.staging.decide("q", 0, wish({}, 5, source), 7)
        with pytest.raises(StagingConflict, match="1 messages are staged"):  # one for two sources
            store.staging.decide("q", 0, wish({"a": 1}, 2, {"s": (0, 0), "t": (0, 2**62)}), 7)
        assert (store.staging.known("q"), store.staging.unfinished()) == (StagedQuery(-1), [])

    # ---- whose it is (I23) ----

    def test_a_query_is_whose_first_row_was_staged(self, store: Store, other: Store, topic: Topic) -> None:
        row = Staged(topic.id, partitions(topic)[0], staged_batch("x"))
        store.staging.put("q", 0, "a", 0, [row], "shop")
        other.staging.put("q", 0, "a", 0, [row], "shop")
        other.staging.put("q", 0, "b", 0, [row], "")  # a job with the database itself may
        assert other.staging.known("q").owner == "shop"
        for attempt in (
            lambda: other.staging.put("q", 0, "c", 0, [row], "evil"),
            lambda: other.staging.put("q", 5, "a", 0, [row], "evil"),
            lambda: other.staging.decide("q", 0, wish({}), 7, owner="evil"),
            lambda: other.staging.decide("q", 9, wish({}), 7, owner="evil"),
            lambda: other.staging.drop("q", 0, owner="evil"),
            lambda: other.staging.drop("q", 5, owner="evil"),
        ):
            with pytest.raises(PermissionDenied, match="belongs to another"):
                attempt()
        decision = store.staging.decide("q", 0, wish({"a": 1}), 7, owner="shop")
        assert store.staging.drop("q", 0, owner="shop") == 1
        self._published(store, decision)
        with pytest.raises(PermissionDenied):
            store.staging.decide("q", 1, wish({}), 7, owner="evil")
        store.staging.put("inside", 0, "a", 0, [row])
        with pytest.raises(PermissionDenied):
            store.staging.put("inside", 0, "b", 0, [row], "shop")

    def test_of_two_who_want_a_query_at_once_one_has_it(
        self, store: Store, other: Store, topic: Topic
    ) -> None:
        row = Staged(topic.id, partitions(topic)[0], staged_batch("x"))

        def attempt(through: Store, owner: str, query: str) -> str:
            try:
                through.staging.put(query, 0, owner, 0, [row], owner)
            except PermissionDenied:
                return "refused"
            return owner

        for turn in range(3):
            query = f"q{turn}"
            told = in_threads(
                lambda query=query: attempt(store, "one", query),  # type: ignore[misc]
                lambda query=query: attempt(other, "two", query),  # type: ignore[misc]
            )
            assert set(told) == {"refused", store.staging.known(query).owner}
            assert store.staging.drop(query, 0) == 1

    def test_a_query_is_given_to_another(self, store: Store, topic: Topic) -> None:
        assert not store.staging.give("q", "shop")
        row = Staged(topic.id, partitions(topic)[0], staged_batch("x"))
        store.staging.put("q", 0, "a", 0, [row], "old")
        assert store.staging.give("q", "shop")
        with pytest.raises(PermissionDenied):
            store.staging.drop("q", 0, owner="old")
        assert store.staging.drop("q", 0, owner="shop") == 1

    def test_what_is_dropped_is_of_the_topics_that_are_named(self, store: Store, topic: Topic) -> None:
        pair = store.catalog.create_topic("pair", TopicSettings(), 1)
        at = stage(store, topic, "q", 0, "a", "x", "y")
        stage(store, pair, "q", 0, "a", "z", first=at)
        assert store.staging.drop("q", 0, topics=[]) == store.staging.drop("q", 0, ["a"], [pair.id + 9]) == 0
        assert store.staging.drop("q", 0, None, [pair.id]) == 1
        assert store.staging.drop("q", 0, ["a"]) == 2

    def test_a_batch_with_another_range_brings_what_is_new(self, store: Store, topic: Topic) -> None:
        stage(store, topic, "q", 0, "a", "x", "y")
        done = self._published(store, store.staging.decide("q", 0, wish({"a": 2}, 2, {"s": (0, 1)}), 7))
        stage(store, topic, "q", 0, "b", "z")
        wider = wish({"b": 1}, 3, {"s": (0, 2)}, {"s": 1})
        second = store.staging.decide("q", 0, wider, 8)
        assert (second.revision, second.segments, second.producer_id) == (2, (("b", 1),), 8)
        self._published(store, second)
        assert store.staging.decide("q", 0, wider, 9).revision == 2
        narrower = wish({}, 1, {"s": (0, 0)}, {"s": 2})
        assert store.staging.decide("q", 0, narrower, 9).revision == 2
        assert done.revision == 1
        assert store.staging.known("q") == StagedQuery(0, {"s": 2})

    def test_of_two_who_decide_at_once_both_get_one_decision(
        self, store: Store, topic: Topic, other: Store
    ) -> None:
        for turn in range(3):
            stage(store, topic, f"q{turn}", 0, "a", "x")
            stage(store, topic, f"q{turn}", 0, "b", "x")
            found = in_threads(
                lambda turn=turn: store.staging.decide(f"q{turn}", 0, wish({"a": 1}), 1),  # type: ignore[misc]
                lambda turn=turn: other.staging.decide(f"q{turn}", 0, wish({"b": 1}), 2),  # type: ignore[misc]
            )
            assert found[0] == found[1]

    # ---- what is dropped ----

    def test_drop_spares_what_was_decided(self, store: Store, topic: Topic, place: int) -> None:
        for segment in "abc":
            stage(store, topic, "q", 0, segment, "x", "y")
        stage(store, topic, "q", 1, "a", "x")
        decision = store.staging.decide("q", 0, wish({"a": 2}), 7)
        assert store.staging.drop("q", 0, ["a", "b", "nobody's"]) == 2
        assert store.staging.drop("q", 0) == 2
        assert store.staging.drop("q", 0) == store.staging.drop("nobody's", 0) == 0
        assert len(store.staging.next_rows(decision, messages=100, max_bytes=10**6)) == 1
        self._published(store, decision)
        store.staging.decide("q", 1, wish({"a": 1}), 8)

    def test_what_nobody_decides_ages_out_and_what_was_decided_never_does(
        self, store: Store, topic: Topic, clock: MovableClock
    ) -> None:
        stage(store, topic, "late", 0, "a", "x", "y")
        stage(store, topic, "slow", 0, "a", "x")
        stage(store, topic, "sure", 0, "a", "x")
        decision = store.staging.decide("sure", 0, wish({"a": 1}), 7)
        clock.ms += DAY
        stage(store, topic, "slow", 0, "b", "x")  # one of its tasks is at it: all of them are waited for
        assert store.staging.age(DAY, 30 * DAY, 365 * DAY) == (0, 0)
        clock.ms += 1
        assert store.staging.age(DAY, 30 * DAY, 365 * DAY) == (2, 0)
        clock.ms += 800 * DAY
        assert store.staging.age(DAY, 30 * DAY, 365 * DAY)[0] == 2
        assert store.staging.unfinished() == [decision]
        assert len(store.staging.next_rows(decision, messages=100, max_bytes=10**6)) == 1

    def test_decisions_are_forgotten_and_the_newest_of_a_query_last(
        self, store: Store, topic: Topic, clock: MovableClock
    ) -> None:
        for batch in range(3):
            source = {"s": (batch, batch)}
            marks = dict(store.staging.known("q").marks)
            stage(store, topic, "q", batch, "a", "x")
            self._published(store, store.staging.decide("q", batch, wish({"a": 1}, 1, source, marks), 7))
        self._published(store, store.staging.decide("once", 0, wish({}), 7))
        clock.ms += 30 * DAY + 1
        store.staging.age(DAY, 30 * DAY, 365 * DAY)
        assert [store.staging.decision("q", batch) is None for batch in range(3)] == [True, True, False]
        assert store.staging.known("q") == StagedQuery(2, {"s": 2})
        assert (store.staging.decision("once", 0), store.staging.known("once")) == (None, StagedQuery(-1))
        clock.ms += 365 * DAY
        store.staging.age(DAY, 30 * DAY, 365 * DAY)
        assert (store.staging.decision("q", 2), store.staging.known("q")) == (None, StagedQuery(-1))

    def test_the_sequences_of_a_decision_under_way_are_not_forgotten(
        self, store: Store, topic: Topic, place: int, clock: MovableClock
    ) -> None:
        decision = store.staging.decide("q", 0, wish({}), 7)
        for producer in (7, 8):
            append(store, place, produced(1, producer=producer))
        clock.ms += 10
        assert store.log.forget_producers(clock.ms) == 1
        self._published(store, decision)
        assert store.log.forget_producers(clock.ms) == 1

    def test_rows_come_segment_by_segment_in_their_order(self, store: Store) -> None:
        pair = store.catalog.create_topic("pair", TopicSettings(), 2)
        at = {"a": 0, "b": 0}
        for turn in range(70):
            for segment in "ab":
                at[segment] = stage(
                    store, pair, "q", 0, segment, f"k{turn % 5}.{segment}{turn}", first=at[segment]
                )
        decision = store.staging.decide("q", 0, wish({"b": 70, "a": 70}), 7)
        found: list[int] = []
        while rows := store.staging.next_rows(decision, messages=9, max_bytes=10**6, skip=set(found)):
            assert sum(row.records for row in rows) <= 9
            found += [row.id for row in rows]
        assert len(found) == 140
        assert set(store.staging.rows(found)) == set(found)
        assert {row.partition_id for row in store.staging.rows(found).values()} == set(partitions(pair))
        one = store.staging.next_rows(decision, messages=0, max_bytes=0)
        assert [row.id for row in one] == found[:1]
