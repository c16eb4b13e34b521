"""`Duties`, and the members of a group: both are leases on the store's clock (I12, I16, R14)."""

from __future__ import annotations

from ...model.delivery import Kind, OrderedAsk, Settlement
from ...model.settings import GroupSettings
from ...store.contract import Group, Member, Store
from .harness import LEASE, MovableClock, StoreHarness, append, ask, batch, in_threads, spans

__all__ = ["DutyContract"]


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
