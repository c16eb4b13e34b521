"""`Duties`, and the members of a group: both are leases on the store's clock (I12, I16, R14)."""

from __future__ import annotations

import pytest

from ...errors import UnknownGroup, UnknownPartition
from ...model.delivery.delivery import Kind, OrderedAsk, Settlement
from ...model.policy.settings import GroupSettings, Start, TopicSettings
from ...store.contract import Group, Member, Store
from .harness import (
    LEASE,
    MovableClock,
    StoreHarness,
    acks,
    append,
    ask,
    batch,
    in_threads,
    partitions,
    spans,
)

__all__ = ["DutyContract", "UsageContract"]


class DutyContract(StoreHarness):
    # ---- duties ----

    def test_a_duty_has_one_holder(self, store: Store, other: Store, clock: MovableClock) -> None:
        assert store.duties.acquire("retention", "ann", 1000)
        clock.ms += 999
        assert not other.duties.acquire("retention", "bob", 1000)
        assert other.duties.acquire("expiry", "bob", 1000)

    def test_its_holder_renews_it(self, store: Store, clock: MovableClock) -> None:
        for _ in range(3):
            assert store.duties.acquire("retention", "ann", 1000)
            clock.ms += 900
        assert not store.duties.acquire("retention", "bob", 1000)

    def test_a_duty_whose_lease_ran_out_is_anybodys(self, store: Store, clock: MovableClock) -> None:
        store.duties.acquire("retention", "ann", 1000)
        clock.ms += 1000
        assert store.duties.acquire("retention", "bob", 1000)
        assert not store.duties.acquire("retention", "ann", 1000)

    def test_a_released_duty_is_anybodys(self, store: Store) -> None:
        store.duties.acquire("retention", "ann", 1000)
        store.duties.release("retention", "bob")
        assert not store.duties.acquire("retention", "bob", 1000)
        store.duties.release("retention", "ann")
        store.duties.release("retention", "ann")
        assert store.duties.acquire("retention", "bob", 1000)

    def test_a_late_release_does_not_end_the_lease_of_the_next(
        self, store: Store, clock: MovableClock
    ) -> None:
        store.duties.acquire("retention", "ann", 1000)
        clock.ms += 1000
        store.duties.acquire("retention", "bob", 1000)
        store.duties.release("retention", "ann")
        assert not store.duties.acquire("retention", "cat", 1000)

    def test_of_many_who_ask_at_once_one_gets_it(
        self, store: Store, other: Store, clock: MovableClock
    ) -> None:
        """New ones, and ones whose lease has just run out."""
        for turn in range(6):
            duty = f"duty{turn % 3}"
            calls = [
                lambda through=through, name=f"{turn}.{n}", duty=duty: through.duties.acquire(
                    duty, name, 1000
                )
                for n, through in enumerate([store, other] * 2)
            ]
            assert sum(in_threads(*calls)) == 1
            clock.ms += 1000

    # ---- members ----

    def test_members_live_for_their_time(self, store: Store, group: Group, clock: MovableClock) -> None:
        begin = clock.ms
        store.progress.join(group.id, "ann", "host-1", 1000)
        clock.ms += 400
        store.progress.join(group.id, "bob", "host-2", 1000)
        ann, bob = (
            Member(group.id, "ann", "host-1", begin, begin + 1000),
            Member(group.id, "bob", "host-2", begin + 400, begin + 1400),
        )
        assert store.progress.members(group.id) == [ann, bob]
        clock.ms = ann.until + 1
        assert store.progress.members(group.id) == [bob]
        clock.ms = bob.until + 1
        assert store.progress.members(group.id) == []

    def test_members_of_many_groups_and_those_that_died(
        self, store: Store, group: Group, clock: MovableClock
    ) -> None:
        audit = store.catalog.create_group(group.topic, "audit", GroupSettings())
        empty = store.catalog.create_group(group.topic, "empty", GroupSettings())
        for one, member, ttl in ((group, "ann", 1000), (group, "bob", 9000), (audit, "cid", 1000)):
            store.progress.join(one.id, member, "host", ttl)
        ids = [group.id, audit.id, empty.id]
        found = store.progress.members_of(ids)
        assert found == {one: store.progress.members(one) for one in (group.id, audit.id)}
        assert store.progress.members_of([empty.id]) == store.progress.members_of([]) == {}
        clock.ms += 2000
        assert [member.name for member in store.progress.members_of(ids)[group.id]] == ["bob"]
        assert store.progress.forget_dead(clock.ms - 1500) == 0  # not for so long
        assert store.progress.forget_dead(clock.ms) == 2
        assert store.progress.forget_dead(clock.ms) == 0
        assert store.progress.renew_each([(group.id, "bob", 1), (audit.id, "cid", 1)]) == [(audit.id, "cid")]

    def test_a_member_that_renews_stays(
        self, store: Store, group: Group, other: Store, clock: MovableClock
    ) -> None:
        begin = clock.ms
        for _ in range(5):
            store.progress.join(group.id, "ann", "host-1", 1000)
            clock.ms += 900
        assert other.progress.members(group.id) == [Member(group.id, "ann", "host-1", begin, clock.ms + 100)]

    def test_a_member_that_was_gone_comes_back(self, store: Store, group: Group, clock: MovableClock) -> None:
        store.progress.join(group.id, "ann", "host-1", 1000)
        clock.ms += 5000
        store.progress.join(group.id, "bob", "host-2", 1000)
        store.progress.join(group.id, "ann", "host-1", 1000)
        assert {member.name for member in store.progress.members(group.id)} == {"ann", "bob"}
        assert {member.until for member in store.progress.members(group.id)} == {clock.ms + 1000}

    def test_a_member_leaves_its_own_group_only(self, store: Store, group: Group) -> None:
        audit = store.catalog.create_group("orders", "audit", GroupSettings())
        for one in (group, audit):
            store.progress.join(one.id, "ann", "host-1", 1000)
            store.progress.join(one.id, "bob", "host-1", 1000)
        store.progress.leave(group.id, "ann")
        store.progress.leave(group.id, "nobody")
        assert [member.name for member in store.progress.members(group.id)] == ["bob"]
        assert [member.name for member in store.progress.members(audit.id)] == ["ann", "bob"]

    def test_members_are_renewed_together(
        self, store: Store, group: Group, other: Store, clock: MovableClock
    ) -> None:
        """Those that are not there are named, and not entered: they may have left."""
        audit = store.catalog.create_group("orders", "audit", GroupSettings())
        begin = clock.ms
        store.progress.join(group.id, "ann", "host-1", 1000)
        store.progress.join(group.id, "bob", "host-1", 1000)
        store.progress.join(audit.id, "ann", "host-2", 1000)
        clock.ms += 900
        asked = [(audit.id, "ann", 2000), (group.id, "bob", 3000), (audit.id, "bob", 1000), (2**40, "ann", 1)]
        assert store.progress.renew_each(asked) == [(audit.id, "bob"), (2**40, "ann")]
        assert other.progress.members(group.id) == [
            Member(group.id, "ann", "host-1", begin, begin + 1000),
            Member(group.id, "bob", "host-1", begin, clock.ms + 3000),
        ]
        assert other.progress.members(audit.id) == [Member(audit.id, "ann", "host-2", begin, clock.ms + 2000)]
        assert store.progress.renew_each([]) == []

    def test_many_members_are_renewed_from_many_sides(self, store: Store, group: Group, other: Store) -> None:
        groups = [
            group.id,
            *(store.catalog.create_group("orders", f"g{n}", GroupSettings()).id for n in range(20)),
        ]
        for group_id in groups:
            store.progress.join(group_id, "ann", "host", 60_000)
        asked = [(group_id, name, 60_000) for group_id in groups for name in ("ann", "bob")]

        def renew(through: Store, some: list[tuple[int, str, int]]) -> None:
            for _ in range(5):
                missing = through.progress.renew_each(some)
                assert {name for _, name in missing} == {"bob"} and len(missing) == len(groups)

        in_threads(lambda: renew(store, asked), lambda: renew(other, asked[::-1]))

    def test_members_join_from_many_sides(self, store: Store, group: Group, other: Store) -> None:
        def join(through: Store, name: str) -> None:
            for _ in range(5):
                through.progress.join(group.id, name, "host", 60_000)

        names = ["ann", "bob", "ann", "cat"]
        in_threads(*(lambda t=t, n=n: join(t, n) for t, n in zip([store, other] * 2, names, strict=True)))
        assert sorted(member.name for member in store.progress.members(group.id)) == ["ann", "bob", "cat"]

    # ---- a clock that was set back (I26) ----

    def test_a_duty_of_a_clock_that_was_set_back_is_anybodys(self, store: Store, clock: MovableClock) -> None:
        store.duties.acquire("retention", "ann", 1000)
        clock.ms -= 600_000
        assert store.duties.acquire("retention", "bob", 1000)

    def test_leases_of_a_clock_that_was_set_back_are_cut(
        self, store: Store, place: int, group: Group, other: Store, clock: MovableClock
    ) -> None:
        append(store, place, batch(3))
        store.progress.poll(group, place, ask(1, 3, messages=2))
        later = [Settlement(Kind.RETRY, 0, 0, visible_at=clock.ms + 700_000)]
        store.progress.settle(group, place, 1, later)  # waits, and is in nobody's hands
        store.progress.join(group.id, "ann", "host-1", 2 * LEASE)
        assert store.progress.cut_leases(group, [place]) == 0  # nothing is wrong
        clock.ms -= 600_000
        assert store.progress.cut_leases(group, [place]) == 1
        assert store.progress.cut_leases(group, [place]) == 0
        assert store.progress.extend(group, place, 1, [(1, 1)]) == ()  # its holder lives: it goes on
        clock.ms += LEASE
        assert spans(other.progress.poll(group, place, ask(2, 3, member="bob"))) == [(1, 1)]
        clock.ms += 4 * LEASE
        assert store.progress.members(group.id) == []

    def test_a_holder_of_a_clock_that_was_set_back_is_cut(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        line = store.catalog.create_group("orders", "line", GroupSettings(mode="ordered", lease_ms=LEASE))
        append(store, place, batch(2))
        store.progress.poll_ordered(line, place, OrderedAsk("ann", 1, 10, 2))
        far = clock.ms + 700_000
        store.progress.settle(line, place, 1, [Settlement(Kind.RETRY, 0, 0, visible_at=far)])
        clock.ms -= 600_000
        assert store.progress.cut_leases(line, [place]) == 1
        clock.ms += LEASE
        found = store.progress.poll_ordered(line, place, OrderedAsk("bob", 2, 10, 2)).deliveries
        assert (found[0].first, found[0].visible_at) == (0, far)


# ---- `Usage`: who uses groups and how far all are; retention, limits and expiry go by it (R9, R44) ----

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
