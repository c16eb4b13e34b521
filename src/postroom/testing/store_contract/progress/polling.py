"""`Progress.poll`, `peek`, `rewind`, `forget` and `seize`: who is given what, and when again."""

from __future__ import annotations

import pytest

from ....errors import GenerationChanged, StoreError, UnknownGroup
from ....model.delivery.delivery import Kind, Settlement, Stamp
from ....model.policy.settings import GroupSettings, Start, TopicSettings
from ....store.contract import Granted, Group, Peek, Settled, Store, Topic
from ..harness import LEASE, MovableClock, StoreHarness, acks, append, ask, batch, partitions, spans

__all__ = ["PollContract"]

DEAD = Stamp(producer_id=77, partition_id=9)


class PollContract(StoreHarness):
    # ---- new messages ----

    def test_polls_hand_out_new_messages_in_order(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(10))
        first = store.progress.poll(group, place, ask(1, 10, messages=4))
        then = store.progress.poll(group, place, ask(2, 10, member="bob"))
        nothing = store.progress.poll(group, place, ask(3, 10))
        assert (spans(first), spans(then), spans(nothing)) == ([(0, 3)], [(4, 9)], [])
        held = first.deliveries[0]
        assert (held.token, held.holder, held.attempt) == (1, "ann", 1)
        assert held.visible_at == clock.ms + LEASE
        assert nothing.next_due == clock.ms + LEASE

    def test_a_poll_does_not_go_beyond_the_end_it_was_given(
        self, store: Store, place: int, group: Group
    ) -> None:
        append(store, place, batch(10))
        assert spans(store.progress.poll(group, place, ask(1, 6))) == [(0, 5)]
        assert spans(store.progress.poll(group, place, ask(2, 4))) == []  # an asker that is behind
        assert spans(store.progress.poll(group, place, ask(3, 10))) == [(6, 9)]

    def test_groups_and_partitions_do_not_touch_each_other(self, store: Store) -> None:
        """R10."""
        one, two = partitions(store.catalog.create_topic("orders", TopicSettings(), 2))
        append(store, one, batch(3))
        append(store, two, batch(3))
        groups = [store.catalog.create_group("orders", name, GroupSettings()) for name in ("a", "b")]
        for group in groups:
            for place in (one, two):
                assert spans(store.progress.poll(group, place, ask(5, 3))) == [(0, 2)]
        store.progress.settle(groups[0], one, 5, acks((0, 2)))
        left = [store.progress.committed(group.id, place) for group in groups for place in (one, two)]
        assert left == [3, 0, 0, 0]

    # ---- the same poll again (I6) ----

    def test_a_repeated_poll_returns_the_same_deliveries(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(10))
        first = store.progress.poll(group, place, ask(1, 10, messages=4))
        clock.ms += 400
        again = store.progress.poll(group, place, ask(1, 10, messages=4))
        assert spans(again) == spans(first) == [(0, 3)] and again.again and not first.again
        assert [(d.token, d.attempt) for d in again.deliveries] == [(1, 1)]
        assert again.deliveries[0].visible_at == clock.ms + LEASE  # the asker counts from this answer
        assert store.progress.peek(group, [place])[place].cursor == 4

    def test_a_repeated_poll_leaves_out_what_is_settled(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10, messages=6))
        store.progress.settle(group, place, 1, acks((0, 1), (4, 4)))
        assert spans(store.progress.poll(group, place, ask(1, 10))) == [(2, 3), (5, 5)]

    def test_a_repeated_poll_returns_redeliveries_too(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(4))
        store.progress.poll(group, place, ask(1, 4))
        clock.ms += LEASE
        first = store.progress.poll(group, place, ask(2, 4))
        again = store.progress.poll(group, place, ask(2, 4))
        assert [(d.first, d.attempt, d.alone) for d in again.deliveries] == [
            (d.first, d.attempt, d.alone) for d in first.deliveries
        ]

    def test_what_nobody_received_is_given_back(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(10))
        granted = store.progress.poll(group, place, ask(1, 10, messages=4))
        store.progress.settle(group, place, 1, acks((0, 0)))
        for token, until in ((2, granted.until), (1, granted.until + 1)):
            assert store.progress.give_back(group, place, token, until) == 0
        for given in (3, 0):  # once more is harmless
            assert store.progress.give_back(group, place, 1, granted.until) == given
        again = store.progress.poll(group, place, ask(3, 10, messages=10))
        assert sorted((d.first, d.last, d.attempt) for d in again.deliveries) == [(1, 3, 1), (4, 9, 1)]

    def test_what_was_renewed_is_not_given_back(
        self, store: Store, place: int, group: Group, clock: MovableClock, other: Store
    ) -> None:
        """I6: the repetition was answered by another broker, within the same millisecond even."""
        append(store, place, batch(4))
        first = store.progress.poll(group, place, ask(1, 4, messages=2))
        for _ in range(2):
            again = other.progress.poll(group, place, ask(1, 4, messages=2))
            assert spans(again) == [(0, 1)]
            assert store.progress.give_back(group, place, 1, first.until) == 0
        assert spans(store.progress.poll(group, place, ask(2, 4, empty_handed=False))) == [(2, 3)]
        clock.ms += LEASE // 3
        assert other.progress.extend(group, place, 1, [(0, 1)]) == ()  # a heartbeat renews as well
        assert other.progress.give_back(group, place, 1, again.until) == 0
        assert store.progress.settle(group, place, 1, acks((0, 1))) == Settled()

    def test_a_lost_answer_is_found_through_another_broker(
        self, store: Store, place: int, group: Group, other: Store
    ) -> None:
        append(store, place, batch(5))
        first = store.progress.poll(group, place, ask(1, 5))
        assert spans(other.progress.poll(group, place, ask(1, 5))) == spans(first) == [(0, 4)]

    # ---- leases ----

    def test_a_live_lease_is_not_handed_out_again(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """R19."""
        append(store, place, batch(2))
        store.progress.poll(group, place, ask(1, 2))
        clock.ms += LEASE - 1
        assert spans(store.progress.poll(group, place, ask(2, 2, member="bob"))) == []
        clock.ms += 1
        again = store.progress.poll(group, place, ask(3, 2, member="bob"))
        assert spans(again) == [(0, 0)]  # a suspect, halved (I14)
        assert [(d.token, d.holder, d.attempt, d.alone) for d in again.deliveries] == [(3, "bob", 2, True)]

    def test_every_suspect_comes_again_in_the_end(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(9))
        store.progress.poll(group, place, ask(1, 9))
        clock.ms += LEASE
        found: list[int] = []
        for token in range(2, 30):
            granted = store.progress.poll(group, place, ask(token, 9))
            for first, last in spans(granted):
                found += range(first, last + 1)
            store.progress.settle(group, place, token, acks(*spans(granted)))
        assert sorted(found) == list(range(9))
        assert store.progress.committed(group.id, place) == 9

    def test_peek_and_next_due_follow_the_deliveries(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        now = clock.ms
        append(store, place, batch(10))
        assert store.progress.peek(group, [place]) == {}
        assert store.progress.poll(group, place, ask(1, 10, messages=3)).next_due == now + LEASE
        assert store.progress.peek(group, [place]) == {place: Peek(3, now + LEASE)}
        clock.ms += 10
        store.progress.poll(group, place, ask(2, 10, messages=3))
        assert store.progress.peek(group, [place])[place].next_due == now + LEASE
        store.progress.extend(group, place, 1, [(0, 2)])
        clock.ms += 5
        store.progress.extend(group, place, 2, [(3, 5)])
        assert store.progress.peek(group, [place])[place].next_due == now + 10 + LEASE
        store.progress.settle(group, place, 1, acks((0, 2)))
        assert store.progress.peek(group, [place])[place].next_due == now + 15 + LEASE
        store.progress.settle(group, place, 2, [Settlement(Kind.RETRY, 4, 4, visible_at=now + 20)])
        assert store.progress.peek(group, [place])[place].next_due == now + 20
        clock.ms = now + 20
        assert spans(store.progress.poll(group, place, ask(3, 6))) == [(4, 4)]
        store.progress.settle(group, place, 2, acks((3, 3), (5, 5)))
        store.progress.settle(group, place, 3, acks((4, 4)))
        assert store.progress.peek(group, [place]) == {place: Peek(6, None)}

    def test_what_a_token_holds_can_be_found(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(4))
        assert store.progress.held_by(group.id, 1) == set()
        store.progress.poll(group, place, ask(1, 4, messages=2))
        assert store.progress.held_by(group.id, 1) == {place}
        assert store.progress.held_by(group.id, 2) == store.progress.held_by(group.id + 1, 1) == set()
        store.progress.settle(group, place, 1, acks((0, 1)))
        assert store.progress.held_by(group.id, 1) == set()

    def test_dues_are_the_earliest_of_each_group(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(4))
        assert store.progress.dues() == {}
        store.progress.poll(group, place, ask(1, 4))
        assert store.progress.dues() == {group.id: clock.ms + LEASE}
        store.progress.settle(group, place, 1, [Settlement(Kind.RETRY, 1, 1, visible_at=clock.ms + 7)])
        assert store.progress.dues() == store.progress.dues([group.id]) == {group.id: clock.ms + 7}
        assert store.progress.dues([]) == store.progress.dues([group.id + 1]) == {}

    def test_peek_sees_nothing_of_an_older_generation(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(4))
        store.progress.poll(group, place, ask(1, 4))
        again = store.catalog.reset_group(group.topic, group.name, Start())
        assert store.progress.peek(again, [place]) == {}
        store.progress.rewind(again, [place])
        assert store.progress.peek(again, [place]) == {place: Peek(0, None)}

    def test_peek_is_for_the_partitions_asked_for(self, store: Store, group: Group, place: int) -> None:
        more = partitions(store.catalog.create_topic("more", TopicSettings(), 2))
        append(store, place, batch(2))
        store.progress.poll(group, place, ask(1, 2))
        assert store.progress.peek(group, more) == {}
        assert set(store.progress.peek(group, [place, *more])) == {place}
        assert store.progress.peek(group, []) == {}

    def test_held_by_names_the_partitions_of_a_token(self, store: Store) -> None:
        one, two, three = partitions(store.catalog.create_topic("wide", TopicSettings(), 3))
        group, other = (store.catalog.create_group("wide", name, GroupSettings()) for name in ("a", "b"))
        for place in (one, two, three):
            append(store, place, batch(4))
        for place in (one, two):
            store.progress.poll(group, place, ask(1, 4, messages=2))
        store.progress.poll(group, three, ask(2, 4))
        store.progress.poll(other, three, ask(1, 4))
        assert store.progress.held_by(group.id, 1) == {one, two}
        assert store.progress.held_by(group.id, 2) == store.progress.held_by(other.id, 1) == {three}
        assert store.progress.held_by(group.id, 9) == set()
        store.progress.settle(group, one, 1, acks((0, 1)))
        store.progress.settle(group, two, 1, acks((0, 0)))
        assert store.progress.held_by(group.id, 1) == {two}

    def test_many_that_are_due_come_one_poll_after_another(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """More than one poll looks at; none is forgotten behind the others."""
        append(store, place, batch(300))
        store.progress.poll(group, place, ask(1, 300))
        waiting = [Settlement(Kind.RETRY, n, n, visible_at=clock.ms + 300 - n) for n in range(300)]
        store.progress.settle(group, place, 1, waiting)
        clock.ms += 400
        found: list[int] = []
        for token in range(2, 20):
            for first, last in spans(store.progress.poll(group, place, ask(token, 300, messages=40))):
                found += range(first, last + 1)
        assert sorted(found) == list(range(300))

    # ---- at most once ----

    def test_on_delivery_settles_as_it_hands_out(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """R16: never handed out twice."""
        append(store, place, batch(5))
        granted = store.progress.poll(group, place, ask(1, 5, messages=3, on_delivery=True))
        assert spans(granted) == [(0, 2)]
        assert store.progress.committed(group.id, place) == 3
        clock.ms += 10 * LEASE
        assert spans(store.progress.poll(group, place, ask(2, 5, on_delivery=True))) == [(3, 4)]
        assert store.progress.backlog(group, [place])[0].unsettled == 0

    # ---- dead letters ----

    def test_the_exhausted_leave_under_a_stamp(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """I12: stamped before it is moved, and found again by the next mover if this one dies."""
        append(store, place, batch(1))
        for token in range(1, 6):  # once with others, then alone until the limit of 3 is reached
            assert len(store.progress.poll(group, place, ask(token, 1)).deliveries) == (1 if token < 5 else 0)
            clock.ms += LEASE
        unplaced = store.progress.poll(group, place, ask(7, 1))
        assert (unplaced.deliveries, unplaced.unplaced) == ((), ((0, 0),))
        leaving = store.progress.poll(group, place, ask(8, 1, dead=DEAD)).leaving
        assert spans(leaving) == [(0, 0)]
        assert leaving[0].stamp is not None and leaving[0].stamp.partition_id == DEAD.partition_id
        assert store.progress.poll(group, place, ask(9, 1, dead=DEAD)).leaving == ()
        clock.ms += 60_000
        later = store.progress.poll(group, place, ask(10, 1, dead=Stamp(producer_id=5, partition_id=6)))
        assert later.leaving[0].stamp == leaving[0].stamp
        assert store.progress.committed(group.id, place) == 0
        done = store.progress.settle(group, place, leaving[0].token, acks((0, 0)))
        assert (done.lost, store.progress.committed(group.id, place)) == ((), 1)

    # ---- what retention took away ----

    def test_what_lies_below_the_log_is_passed_over(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, *(batch(10) for _ in range(3)))
        store.progress.poll(group, place, ask(1, 30, messages=8))
        store.progress.settle(group, place, 1, [Settlement(Kind.RETRY, 2, 2, visible_at=clock.ms)])
        store.log.trim(place, 5)
        granted = store.progress.poll(group, place, ask(2, 30, messages=4), log_start=5)
        assert spans(granted) == [(8, 11)]
        assert store.progress.committed(group.id, place) == 5
        assert store.progress.settle(group, place, 1, acks((0, 7))).lost == ()
        granted = store.progress.poll(group, place, ask(3, 30, messages=4), log_start=20)
        assert spans(granted) == [(20, 23)]
        assert store.progress.committed(group.id, place) == 20
        assert store.progress.peek(group, [place])[place].cursor == 24

    def test_a_repeated_poll_leaves_out_what_is_gone(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10, messages=6))
        assert spans(store.progress.poll(group, place, ask(1, 10), log_start=4)) == [(4, 5)]
        assert store.progress.committed(group.id, place) == 4

    def test_a_poll_that_only_passes_over_is_remembered(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10, messages=2))
        assert spans(store.progress.poll(group, place, ask(2, 10), log_start=10)) == []
        assert store.progress.peek(group, [place]) == {place: Peek(10, None)}
        assert store.progress.committed(group.id, place) == 10

    # ---- generations (I10) ----

    def test_a_group_of_an_older_generation_is_refused(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(5))
        store.progress.poll(group, place, ask(1, 5, messages=2))
        reset = store.catalog.reset_group("orders", "billing", Start())
        store.progress.rewind(reset, [place])
        for verb in (
            lambda: store.progress.poll(group, place, ask(1, 5)),
            lambda: store.progress.settle(group, place, 1, acks((0, 1))),
            lambda: store.progress.extend(group, place, 1, [(0, 1)]),
            lambda: store.progress.seize(group, place, ask(3, 5), [(0, 0)]),
            lambda: store.progress.rewind(group, [place]),
        ):
            with pytest.raises(GenerationChanged) as caught:
                verb()
            assert caught.value.retriable
        assert store.progress.peek(reset, [place]) == {place: Peek(0, None)}
        assert spans(store.progress.poll(reset, place, ask(2, 5))) == [(0, 4)]

    def test_a_group_that_never_polled_is_refused_after_a_reset(
        self, store: Store, place: int, group: Group
    ) -> None:
        append(store, place, batch(5))
        store.catalog.reset_group("orders", "billing", Start("latest"))
        with pytest.raises(GenerationChanged):
            store.progress.poll(group, place, ask(1, 5))

    def test_the_first_verb_of_a_reset_group_starts_over(
        self, store: Store, place: int, group: Group
    ) -> None:
        append(store, place, batch(9))
        store.progress.poll(group, place, ask(1, 9))
        reset = store.catalog.reset_group("orders", "billing", Start("offsets", offsets=((0, 3),)))
        assert store.progress.committed(group.id, place) is None  # so that its new start counts
        assert spans(store.progress.poll(reset, place, ask(2, 9, messages=2))) == [(3, 4)]
        with pytest.raises(GenerationChanged):
            store.progress.settle(group, place, 1, acks((0, 8)))
        assert store.progress.committed(group.id, place) == 3

    def test_rewind_begins_where_the_group_starts(self, store: Store, group: Group) -> None:
        one, two = partitions(store.catalog.create_topic("wide", TopicSettings(), 2))
        append(store, one, batch(4))
        append(store, two, batch(6))
        late = store.catalog.create_group("wide", "late", GroupSettings(start=Start("latest")))
        store.progress.rewind(late, [one, two])
        assert store.progress.peek(late, [one, two]) == {one: Peek(4, None), two: Peek(6, None)}
        append(store, one, batch(2))
        store.progress.poll(late, one, ask(1, 6))
        store.progress.rewind(late, [one, two])  # of the same generation: nothing to do
        assert store.progress.peek(late, [one])[one].cursor == 6

    def test_a_poll_that_fails_hands_out_nothing(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(5))
        for turn in range(2):  # the first makes the progress row, the second only uses it
            with self.failing_commits(store), pytest.raises(StoreError):
                store.progress.poll(group, place, ask(1 + turn, 5))
            store.progress.rewind(group, [place])
            assert store.progress.peek(group, [place]) == {place: Peek(0, None)}
        assert spans(store.progress.poll(group, place, ask(9, 5))) == [(0, 4)]

    # ---- forget ----

    def test_a_forgotten_group_leaves_nothing(self, store: Store, place: int, group: Group) -> None:
        stays = store.catalog.create_group("orders", "stays", GroupSettings())
        append(store, place, batch(5))
        for one in (group, stays):
            store.progress.poll(one, place, ask(1, 5))
            store.progress.join(one.id, "ann", "client", 10_000)
        store.catalog.delete_group("orders", "billing")
        store.progress.forget(group.id)
        assert store.progress.peek(group, [place]) == {}
        assert store.progress.committed(group.id, place) is None
        assert store.progress.members(group.id) == []
        with pytest.raises(UnknownGroup):
            store.progress.poll(group, place, ask(2, 5))
        assert store.progress.committed(stays.id, place) == 0
        assert [member.name for member in store.progress.members(stays.id)] == ["ann"]
        assert store.progress.settle(stays, place, 1, acks((0, 4))).lost == ()

    # ---- seize ----

    def test_seize_takes_exactly_what_was_named(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(20))
        store.progress.poll(group, place, ask(1, 20, messages=5))
        store.progress.settle(group, place, 1, [Settlement(Kind.RETRY, 3, 3, visible_at=clock.ms + 10**6)])
        taken = store.progress.seize(group, place, ask(2, 20, member="bob"), [(2, 3), (8, 9)])
        assert sorted(spans(taken)) == [(3, 3), (8, 9)]  # not 2, which is in other hands
        assert {d.token for d in taken.deliveries} == {2}
        assert store.progress.settle(group, place, 2, acks((3, 3), (8, 9))).lost == ()
        rest = store.progress.poll(group, place, ask(3, 20))
        assert sorted(spans(rest)) == [(5, 7), (10, 19)]
        assert store.progress.committed(group.id, place) == 0

    def test_seize_of_nothing_takes_nothing(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(3))
        assert store.progress.seize(group, place, ask(1, 3), []) == Granted(())
        assert spans(store.progress.seize(group, place, ask(1, 3), [(3, 5)])) == []
        assert spans(store.progress.poll(group, place, ask(2, 3))) == [(0, 2)]

    def test_what_is_settled_cannot_be_seized(
        self, store: Store, topic: Topic, place: int, group: Group
    ) -> None:
        append(store, place, batch(4))
        store.progress.poll(group, place, ask(1, 4))
        store.progress.settle(group, place, 1, acks((0, 1)))
        assert spans(store.progress.seize(group, place, ask(2, 4), [(0, 3)])) == []
        assert store.progress.settle(group, place, 1, acks((2, 3))).lost == ()
