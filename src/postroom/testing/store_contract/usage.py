"""`Usage`: who uses groups and how far all of them are; retention, limits and expiry go by it (R9, R44)."""

from __future__ import annotations

import pytest

from ...errors import UnknownGroup, UnknownPartition
from ...model.delivery import Kind, Settlement
from ...model.settings import GroupSettings, Start, TopicSettings
from ...store.contract import Group, Store
from .harness import MovableClock, StoreHarness, acks, append, ask, batch, in_threads, partitions

__all__ = ["UsageContract"]

IDLE = 60_000


class UsageContract(StoreHarness):
    # ---- activity ----

    def test_when_a_group_was_last_used(
        self, store: Store, other: Store, group: Group, clock: MovableClock
    ) -> None:
        assert group.id not in store.usage.seen()
        assert store.usage.touch(group.id)
        clock.ms += 500
        assert other.usage.touch(group.id)
        assert store.usage.seen()[group.id] == clock.ms

    def test_of_some_groups_alone(self, store: Store, group: Group, clock: MovableClock) -> None:
        audit = store.catalog.create_group(group.topic, "audit", GroupSettings())
        for one in (group, audit):
            store.usage.touch(one.id)
        assert store.usage.seen([audit.id, audit.id + 1000]) == {audit.id: clock.ms}
        assert store.usage.seen([]) == {}
        more = store.catalog.create_topic("more", TopicSettings(), 1)
        other = store.catalog.create_group("more", "billing", GroupSettings())
        assert store.catalog.groups_of([more.id]) == [other]
        assert {one.id for one in store.catalog.groups_of()} == {group.id, audit.id, other.id}
        assert store.catalog.groups_of([]) == store.catalog.groups_of([more.id + 1000]) == []

    def test_marks_move_when_a_group_has_settled(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(4))
        assert store.usage.marks() == {}
        store.progress.poll(group, place, ask(1, 4))
        polled = store.usage.marks()
        assert store.usage.marks() == polled and set(polled) == {place}
        store.progress.settle(group, place, 1, acks((0, 1)))
        settled = store.usage.marks()
        assert settled[place] != polled[place]
        again = store.catalog.reset_group(group.topic, group.name, Start())
        store.progress.rewind(again, [place])
        assert store.usage.marks()[place] not in (polled[place], settled[place])
        store.progress.forget(group.id)
        assert store.usage.marks() == {}

    def test_many_touch_a_new_group_at_once(self, store: Store, other: Store, group: Group) -> None:
        calls = [lambda through=through: through.usage.touch(group.id) for through in (store, other) * 2]
        assert in_threads(*calls) == [True] * 4

    def test_a_group_that_is_idle_is_retired_and_not_touched_again(
        self, store: Store, other: Store, group: Group, clock: MovableClock
    ) -> None:
        store.usage.touch(group.id)
        clock.ms += IDLE - 1
        assert not store.usage.retire(group.id, IDLE)
        assert store.usage.touch(group.id)
        clock.ms += IDLE
        assert store.usage.retire(group.id, IDLE)
        assert not other.usage.touch(group.id)
        assert group.id not in store.usage.seen()
        assert other.usage.retire(group.id, IDLE)  # by whoever goes on with it

    def test_a_group_with_a_live_member_is_not_retired(
        self, store: Store, group: Group, clock: MovableClock
    ) -> None:
        store.usage.touch(group.id)
        store.progress.join(group.id, "ann", "host", 2 * IDLE)
        clock.ms += 2 * IDLE
        assert not store.usage.retire(group.id, IDLE)
        clock.ms += 1
        assert store.usage.retire(group.id, IDLE)

    def test_of_a_group_never_seen_the_time_begins_now(
        self, store: Store, group: Group, clock: MovableClock
    ) -> None:
        """Its activity may have been lost with the progress: it is not forgotten for that."""
        clock.ms += 100 * IDLE
        assert not store.usage.retire(group.id, IDLE)
        clock.ms += IDLE
        assert store.usage.retire(group.id, IDLE)

    def test_forget_forgets_the_activity_too(self, store: Store, group: Group, clock: MovableClock) -> None:
        store.usage.touch(group.id)
        clock.ms += IDLE
        store.usage.retire(group.id, IDLE)
        store.progress.forget(group.id)
        assert store.usage.touch(group.id)

    def test_touch_and_retire_at_once_agree(
        self, store: Store, other: Store, group: Group, clock: MovableClock
    ) -> None:
        for _ in range(5):
            store.usage.touch(group.id)
            clock.ms += IDLE
            touched, retired = in_threads(
                lambda: store.usage.touch(group.id), lambda: other.usage.retire(group.id, IDLE)
            )
            assert touched != retired
            store.progress.forget(group.id)

    def test_only_the_group_of_that_id_is_deleted(self, store: Store, group: Group) -> None:
        store.catalog.delete_group(group.topic, group.name, only=group.id)
        again = store.catalog.create_group(group.topic, group.name, GroupSettings())
        with pytest.raises(UnknownGroup):
            store.catalog.delete_group(group.topic, group.name, only=group.id)
        assert store.catalog.group(group.topic, group.name) == again

    # ---- backlog ----

    def test_how_far_all_groups_are(self, store: Store) -> None:
        topic = store.catalog.create_topic("wide", TopicSettings(), 2)
        one, two = partitions(topic)
        append(store, one, batch(10))
        fresh = store.catalog.create_group("wide", "fresh", GroupSettings())
        late = store.catalog.create_group("wide", "late", GroupSettings(start=Start("latest")))
        busy = store.catalog.create_group("wide", "busy", GroupSettings())
        append(store, two, batch(5))
        store.progress.poll(busy, one, ask(1, 10, messages=6))
        store.progress.settle(busy, one, 1, [*acks((0, 1), (3, 5)), Settlement(Kind.RETRY, 2, 2)])
        store.progress.poll(busy, two, ask(2, 5))
        store.progress.settle(busy, two, 2, acks((0, 4)))
        groups = [fresh, late, busy]
        expected = {
            fresh.id: {one: 0, two: 0},
            late.id: {one: 10, two: 0},
            busy.id: {one: 2, two: 5},
        }
        assert store.usage.committed(groups, [one, two]) == expected
        assert store.usage.committed(groups, [two])[busy.id] == {two: 5}
        assert store.usage.committed([], [one]) == {}
        for group in groups:
            for place in (one, two):
                alone = store.progress.committed(group.id, place)
                start = store.catalog.start_of(group.id, place)[1]
                assert expected[group.id][place] == (start if alone is None else alone)

    def test_after_a_reset_the_new_start_counts(self, store: Store, group: Group, place: int) -> None:
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10))
        store.progress.settle(group, place, 1, acks((0, 9)))
        again = store.catalog.reset_group(group.topic, group.name, Start("offsets", offsets=((0, 4),)))
        assert store.usage.committed([again], [place]) == {group.id: {place: 4}}
        store.progress.rewind(again, [place])
        assert store.usage.committed([again], [place]) == {group.id: {place: 4}}

    def test_bytes_from_an_offset_on(self, store: Store, place: int) -> None:
        assert store.usage.bytes_from([{place: 0}]) == [0]
        pieces = [batch(4, value=b"x" * 100), batch(2), batch(6)]
        append(store, place, *pieces)
        sizes = [len(piece) for piece in pieces]
        assert store.usage.bytes_from([{place: 0}]) == [sum(sizes)]
        assert store.usage.bytes_from([{place: 4}]) == [sum(sizes[1:])]
        assert store.usage.bytes_from([{place: 2}]) == [sum(sizes) - sizes[0] * 2 // 4]
        assert store.usage.bytes_from([{place: 12}]) == [0]
        assert store.usage.bytes_from([{}, {place: 4}, {place: 6}]) == [0, sum(sizes[1:]), sizes[2]]
        assert store.usage.bytes_from([]) == []

    def test_bytes_of_many_positions_at_once(self, store: Store) -> None:
        places = partitions(store.catalog.create_topic("wide", TopicSettings(), 30))
        for place in places:
            append(store, place, batch(1), batch(1))
        positions = [dict.fromkeys(places, offset) for offset in range(3)]
        each = len(batch(1))
        assert store.usage.bytes_from(positions) == [60 * each, 30 * each, 0]

    def test_bytes_below_what_is_kept_do_not_count(self, store: Store, place: int) -> None:
        append(store, place, batch(4), batch(2))
        store.log.trim(place, 4)
        store.log.sweep(place, rows=10)
        assert store.usage.bytes_from([{place: 0}]) == [len(batch(2))]
        store.log.trim(place, 6)
        store.log.sweep(place, rows=10)
        assert store.usage.bytes_from([{place: 0}]) == [0]

    @pytest.mark.parametrize("storage", ["durable", "volatile"])
    def test_both_work_for_each_kind_of_storage(self, store: Store, storage: str) -> None:
        settings = TopicSettings(storage="volatile" if storage == "volatile" else "durable")
        topic = store.catalog.create_topic("kind", settings, 2)
        one, two = partitions(topic)
        append(store, one, batch(3))
        append(store, two, batch(2))
        group = store.catalog.create_group("kind", "late", GroupSettings(start=Start("latest")))
        append(store, two, batch(4))
        ends = store.log.bounds([one, two])
        committed = store.usage.committed([group], [one, two])[group.id]
        assert committed == {one: ends[one].end, two: ends[two].end - 4}
        assert store.usage.bytes_from([committed]) == [len(batch(4))]

    def test_bytes_of_a_partition_that_is_gone_are_unknown(self, store: Store, place: int) -> None:
        append(store, place, batch(3))
        for dropped in store.catalog.delete_topic("orders"):
            store.catalog.drop_log(dropped)
        with pytest.raises(UnknownPartition):
            store.usage.bytes_from([{place: 0}])
