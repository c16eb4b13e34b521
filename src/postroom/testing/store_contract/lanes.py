"""`Lanes`: which sources of a group are slow, known to all; and moves to the lane (R42, I12)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ...model.delivery import Kind, Settlement, Stamp
from ...model.lanes import MOST_SOURCES, LanePolicy, LaneState, Seen
from ...model.settings import GroupSettings
from ...store.contract import Group, Store, Topic
from .harness import MovableClock, StoreHarness, acks, append, ask, batch, in_threads, partitions, spans

__all__ = ["LaneContract"]

POLICY = LanePolicy(failures=0.5, handling_ms=5_000, at_least=10, window_ms=60_000, clean_ms=120_000)
STAMP = Stamp(77, 4711)


class LaneContract(StoreHarness):
    @pytest.fixture
    def watched(self, store: Store, topic: Topic) -> Group:
        return store.catalog.create_group("orders", "shipping", GroupSettings(slow_lane=POLICY))

    # ---- counting ----

    def test_the_policy_is_kept_with_the_group(self, other: Store, watched: Group) -> None:
        assert other.catalog.group("orders", "shipping").settings.slow_lane == POLICY

    def test_counts_of_all_come_together(
        self, store: Store, other: Store, watched: Group, clock: MovableClock
    ) -> None:
        assert store.lanes.count(watched, [(clock.ms, Seen("a", 5, 5))]) == LaneState((), frozenset({"a"}))
        clock.ms += 20_000
        found = other.lanes.count(watched, [(clock.ms, Seen("a", 5, 0)), (clock.ms, Seen("b", 9, 9))])
        assert [(one.source, one.since, one.failed_at) for one in found.slow] == [("a", clock.ms, clock.ms)]
        assert "5 of 10" in found.slow[0].reason
        assert store.lanes.state(watched) == found
        assert found.watched == {"a", "b"}

    def test_what_is_older_than_the_window_does_not_count(
        self, store: Store, watched: Group, clock: MovableClock
    ) -> None:
        store.lanes.count(watched, [(clock.ms, Seen("a", 9, 9))])
        clock.ms += 80_000
        found = store.lanes.count(
            watched, [(clock.ms, Seen("a", 1, 1)), (clock.ms - 80_000, Seen("a", 9, 9))]
        )
        assert found == LaneState((), frozenset({"a"}))
        clock.ms += 80_000
        assert store.lanes.state(watched) == LaneState()

    def test_a_source_that_takes_long_is_slow(
        self, store: Store, watched: Group, clock: MovableClock
    ) -> None:
        seen = Seen("a", 10, 0, 50_001)
        assert store.lanes.count(watched, [(clock.ms, replace(seen, spent_ms=50_000))]).slow == ()
        clock.ms += 200_000
        assert [one.source for one in store.lanes.count(watched, [(clock.ms, seen)]).slow] == ["a"]

    def test_a_source_returns_after_a_clean_period(
        self, store: Store, other: Store, watched: Group, clock: MovableClock
    ) -> None:
        began = clock.ms
        store.lanes.count(watched, [(clock.ms, Seen("a", 10, 10))])
        clock.ms += 100_000
        (one,) = store.lanes.count(watched, [(clock.ms, Seen("a", 2, 1))]).slow
        assert (one.since, one.failed_at, one.handled_at) == (began, clock.ms, 0)
        clock.ms += 119_999
        (one,) = other.lanes.count(watched, [(clock.ms, Seen("a", 3, 0))]).slow
        assert one.handled_at == clock.ms
        clock.ms += 1
        assert store.lanes.count(watched, []) == LaneState()
        clock.ms += 1
        assert store.lanes.count(watched, [(clock.ms, Seen("a", 9, 9))]).slow == ()  # it begins anew

    def test_groups_are_counted_apart_and_forgotten_with_their_progress(
        self, store: Store, watched: Group, clock: MovableClock
    ) -> None:
        again = store.catalog.create_group("orders", "again", GroupSettings(slow_lane=POLICY))
        for group in (watched, again):
            assert len(store.lanes.count(group, [(clock.ms, Seen("a", 10, 10))]).slow) == 1
        store.progress.forget(watched.id)
        assert store.lanes.state(watched) == LaneState()
        assert len(store.lanes.state(again).slow) == 1

    def test_without_a_policy_nobody_is_slow(self, store: Store, watched: Group, clock: MovableClock) -> None:
        store.lanes.count(watched, [(clock.ms, Seen("a", 10, 10))])
        off = store.catalog.alter_group("orders", "shipping", GroupSettings(), False)
        assert store.lanes.count(off, [(clock.ms, Seen("b", 10, 10))]).slow == ()

    def test_many_count_at_once(
        self, store: Store, other: Store, watched: Group, clock: MovableClock
    ) -> None:
        now = clock.ms
        calls = [lambda to=to: to.lanes.count(watched, [(now, Seen("a", 1, 1))]) for to in (store, other) * 5]
        in_threads(*calls)
        assert [one.source for one in store.lanes.state(watched).slow] == ["a"]

    def test_the_number_of_sources_is_bounded(
        self, store: Store, watched: Group, clock: MovableClock
    ) -> None:
        found = store.lanes.count(
            watched, [(clock.ms, Seen(f"s{n}", 10, 10)) for n in range(MOST_SOURCES + 5)]
        )
        assert (len(found.slow), len(found.watched)) == (MOST_SOURCES, MOST_SOURCES)

    def test_a_source_may_have_any_name(self, store: Store, watched: Group, clock: MovableClock) -> None:
        names = ["A", "a", "a ", "ä", "漢字", "'; --", "🙂", "x" * 100]
        found = store.lanes.count(watched, [(clock.ms, Seen(name, 10, 10)) for name in names])
        assert {one.source for one in found.slow} == set(names)

    # ---- moves ----

    def test_messages_that_are_set_aside_have_one_identity(
        self, store: Store, other: Store, topic: Topic, group: Group
    ) -> None:
        (place,) = partitions(topic)[:1]
        append(store, place, batch(4))
        store.progress.poll(group, place, ask(1, 4))
        lane = [Settlement(Kind.LANE, at, at, stamp=STAMP) for at in (0, 2)]
        done = store.progress.settle(group, place, 1, [*lane, *acks((1, 1))])
        assert spans(done.leaving) == [(0, 0), (2, 2)]
        (token,) = {delivery.token for delivery in done.leaving}
        found = other.progress.leaving(group, place, token)
        assert found == list(done.leaving)
        assert {(d.stamp and d.stamp.producer_id, d.stamp and d.stamp.partition_id) for d in found} == {
            (token, 4711)
        }
        assert [d.spent for d in found] == [0, 0]  # not an attempt
        assert store.progress.settle(group, place, token, acks((0, 0), (2, 2))).lost == ()
        assert other.progress.leaving(group, place, token) == []
