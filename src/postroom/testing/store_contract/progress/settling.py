"""`Progress.settle`, `extend` and `committed`: what is done with, and what a late answer is worth (I7)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ....errors import StoreError
from ....model.delivery.delivery import Kind, Settlement, Stamp
from ....model.policy.settings import GroupSettings, TopicSettings
from ....store.contract import Group, Peek, Settled, Store, Topic, Visit, Visited
from ..harness import LEASE, MovableClock, StoreHarness, acks, append, ask, batch, partitions, spans

__all__ = ["SettleContract"]

DEAD = Stamp(producer_id=77, partition_id=9)


def wide(store: Store, count: int) -> tuple[list[int], Group]:
    topic = store.catalog.create_topic("wide", TopicSettings(), count)
    settings = GroupSettings(lease_ms=LEASE, max_attempts=3)
    return partitions(topic), store.catalog.create_group(topic.name, "billing", settings)


def made(store: Store, group: Group, *visits: Visit) -> list[Visited]:
    found = store.progress.visit(group, visits)
    return [one for one in found if isinstance(one, Visited)]


class SettleContract(StoreHarness):
    # ---- ack ----

    def test_the_committed_offset_is_the_lowest_unsettled_one(
        self, store: Store, place: int, group: Group
    ) -> None:
        append(store, place, batch(10))
        assert store.progress.committed(group.id, place) is None
        store.progress.poll(group, place, ask(1, 10, messages=8))
        seen = []
        for span in [(3, 4), (0, 0), (6, 7), (1, 2), (5, 5)]:
            assert store.progress.settle(group, place, 1, acks(span)) == Settled()
            seen.append(store.progress.committed(group.id, place))
        assert seen == [0, 1, 1, 5, 8]
        assert spans(store.progress.poll(group, place, ask(2, 10))) == [(8, 9)]

    def test_several_polls_are_settled_at_once(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """One after the other in one transaction: each is answered by itself."""
        append(store, place, batch(12))
        for token in (1, 2, 3):
            store.progress.poll(group, place, ask(token, 12, messages=4))
        later = clock.ms + 50
        (visited,) = made(
            store,
            group,
            Visit(
                place,
                [
                    (1, acks((0, 3))),
                    (2, [*acks((4, 5)), Settlement(Kind.RETRY, 6, 6, visible_at=later)]),
                    (9, acks((7, 7))),
                    (3, [*acks((8, 10)), Settlement(Kind.MOVE, 11, 11, reason="bad", stamp=DEAD)]),
                ],
            ),
        )
        first, second, stranger, third = visited.settled
        assert (first, second, stranger) == (Settled(), Settled(), Settled(lost=((7, 7),)))
        assert (third.lost, spans(third.leaving)) == ((), [(11, 11)])
        backlog = store.progress.backlog(group, [place], open_spans=10)[0]
        assert (sorted(backlog.open), backlog.committed) == ([(6, 6), (7, 7), (11, 11)], 6)
        again = made(store, group, Visit(place, [(1, acks((0, 3))), (2, acks((4, 5)))]))
        assert again == [Visited((Settled(), Settled()))]

    # ---- visits: settle and poll in several partitions ----

    def test_acks_are_stored_with_the_next_poll(self, store: Store, topic: Topic, group: Group) -> None:
        """In one transaction: what a member is done with, and what it is handed next."""
        log = partitions(topic)[0]
        append(store, log, batch(12))
        store.progress.poll(group, log, ask(1, 12, messages=4))
        store.progress.poll(group, log, ask(2, 12, messages=4))
        settles = [(1, acks((0, 1), (3, 3))), (2, acks((4, 7))), (9, acks((2, 2)))]
        (visited,) = made(store, group, Visit(log, settles, ask(3, 12)))
        assert visited.granted is not None and spans(visited.granted) == [(8, 11)]
        assert visited.settled == (Settled(), Settled(), Settled(lost=((2, 2),)))
        assert store.progress.backlog(group, [log], open_spans=10)[0].open == ((2, 2), (8, 11))
        assert store.progress.peek(group, [log])[log] == Peek(12, visited.granted.next_due, lowest=2)

    def test_a_visit_may_be_repeated(self, store: Store, topic: Topic, group: Group) -> None:
        """If its answer was lost: the acks are stored already, and the deliveries are the same (I6, I7)."""
        log = partitions(topic)[0]
        append(store, log, batch(6))
        store.progress.poll(group, log, ask(1, 6, messages=4))
        for _ in range(2):
            (visited,) = made(store, group, Visit(log, [(1, acks((0, 3)))], ask(2, 6, messages=1)))
            assert visited.granted is not None
            assert (spans(visited.granted), visited.settled) == ([(4, 4)], (Settled(),))
        assert store.progress.committed(group.id, log) == 4

    def test_acks_are_stored_by_a_visit_that_finds_nothing(
        self, store: Store, topic: Topic, group: Group
    ) -> None:
        log = partitions(topic)[0]
        append(store, log, batch(4))
        store.progress.poll(group, log, ask(1, 4))
        for acked, committed in (((0, 2), 3), ((3, 3), 4)):
            (visited,) = made(store, group, Visit(log, [(1, acks(acked))], ask(2, 4)))
            assert visited.granted is not None
            assert (spans(visited.granted), visited.settled) == ([], (Settled(),))
            assert store.progress.committed(group.id, log) == committed
        assert store.progress.peek(group, [log])[log].next_due is None

    def test_several_partitions_are_visited_at_once(self, store: Store) -> None:
        """In whatever order they are named, also those that the group has not polled yet."""
        (first, second, third), group = wide(store, 3)
        for log in (first, second, third):
            append(store, log, batch(4))
        store.progress.poll(group, second, ask(1, 4, messages=2))
        store.progress.poll(group, third, ask(1, 4, messages=3))
        found = made(
            store,
            group,
            Visit(third, [(1, acks((0, 2)))], ask(2, 4), waited_ms=5),
            Visit(second, [(1, acks((0, 0)))]),
            Visit(first, ask=ask(2, 4, messages=2)),
        )
        assert [one.granted and spans(one.granted) for one in found] == [[(3, 3)], None, [(0, 1)]]
        assert [one.settled for one in found] == [(Settled(),), (Settled(),), ()]
        assert [store.progress.committed(group.id, log) for log in (first, second, third)] == [0, 1, 3]

    def test_what_is_visited_at_once_is_undone_at_once(self, store: Store) -> None:
        (first, second), group = wide(store, 2)
        for log in (first, second):
            append(store, log, batch(6))
            store.progress.poll(group, log, ask(1, 6, messages=4))
        visits = [Visit(log, [(1, acks((0, 3)))], ask(2, 6)) for log in (first, second)]
        with self.failing_commits(store), pytest.raises(StoreError):
            store.progress.visit(group, visits)
        assert [store.progress.committed(group.id, log) for log in (first, second)] == [0, 0]
        found = made(store, group, *visits)
        assert [one.granted and spans(one.granted) for one in found] == [[(4, 5)], [(4, 5)]]

    def test_a_visit_for_new_messages_leaves_what_is_due(
        self, store: Store, topic: Topic, group: Group, clock: MovableClock
    ) -> None:
        log = partitions(topic)[0]
        append(store, log, batch(6))
        store.progress.poll(group, log, ask(1, 6, messages=2))
        retry = Settlement(Kind.RETRY, 0, 0, visible_at=clock.ms)
        store.progress.settle(group, log, 1, [retry, *acks((1, 1))])
        fresh = replace(ask(2, 6, messages=3), fresh=True)
        (visited,) = made(store, group, Visit(log, ask=fresh))
        assert visited.granted is not None and spans(visited.granted) == [(2, 4)]
        assert visited.granted.next_due is not None and visited.granted.next_due <= clock.ms
        assert spans(store.progress.poll(group, log, ask(3, 6))) == [(0, 0), (5, 5)]

    # ---- other verdicts ----

    def test_several_are_settled_at_once(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10))
        later = clock.ms + 50
        settlements = [
            *acks((0, 2), (9, 9)),
            Settlement(Kind.RETRY, 4, 5, visible_at=later),
            Settlement(Kind.RELEASE, 7, 7, visible_at=later),
            Settlement(Kind.MOVE, 8, 8, reason="bad", stamp=DEAD),
        ]
        done = store.progress.settle(group, place, 1, settlements)
        assert (done.lost, done.unplaced, spans(done.leaving)) == ((), (), [(8, 8)])
        assert done.leaving[0].reason == "bad"
        backlog = store.progress.backlog(group, [place], open_spans=10)[0]
        assert sorted(backlog.open) == [(3, 3), (4, 5), (6, 6), (7, 7), (8, 8)]
        assert (backlog.unsettled, backlog.committed) == (6, 3)

    def test_a_repeated_ack_is_harmless(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10, messages=6))
        for _ in range(3):
            assert store.progress.settle(group, place, 1, acks((1, 3))) == Settled()
        assert store.progress.settle(group, place, 1, acks((0, 5))) == Settled()
        assert store.progress.committed(group.id, place) == 6
        assert store.progress.backlog(group, [place])[0].unsettled == 0

    def test_a_late_ack_is_refused(self, store: Store, place: int, group: Group, clock: MovableClock) -> None:
        append(store, place, batch(1))
        store.progress.poll(group, place, ask(1, 1))
        clock.ms += LEASE
        assert spans(store.progress.poll(group, place, ask(2, 1, member="bob"))) == [(0, 0)]
        assert store.progress.settle(group, place, 1, acks((0, 0))).lost == ((0, 0),)
        assert store.progress.committed(group.id, place) == 0
        assert store.progress.settle(group, place, 2, acks((0, 0))) == Settled()
        assert store.progress.settle(group, place, 1, acks((0, 0))) == Settled()  # settled, by whomever

    def test_an_ack_after_the_lease_counts_if_nobody_has_taken_it(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(3))
        store.progress.poll(group, place, ask(1, 3))
        clock.ms += 5 * LEASE
        assert store.progress.settle(group, place, 1, acks((0, 2))) == Settled()
        assert store.progress.committed(group.id, place) == 3

    def test_only_the_token_counts(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10, messages=5))
        store.progress.poll(group, place, ask(2, 10, messages=5))
        done = store.progress.settle(group, place, 2, acks((3, 6)))
        assert done.lost == ((3, 4),)
        assert store.progress.settle(group, place, 3, acks((0, 9))).lost == ((0, 4), (7, 9))
        assert store.progress.backlog(group, [place])[0].unsettled == 8

    def test_what_waits_for_its_time_is_lost_to_its_former_holder(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(3))
        store.progress.poll(group, place, ask(1, 3))
        store.progress.settle(group, place, 1, [Settlement(Kind.RETRY, 1, 1, visible_at=clock.ms + 99)])
        assert store.progress.settle(group, place, 1, acks((0, 2))).lost == ((1, 1),)
        assert store.progress.committed(group.id, place) == 1

    def test_what_was_never_handed_out_cannot_be_settled(
        self, store: Store, place: int, group: Group
    ) -> None:
        """Nor what a poll handed out that a crash forgot (I8): whoever holds it must learn that."""
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10, messages=4))
        assert store.progress.settle(group, place, 1, acks((2, 6))).lost == ((4, 6),)
        assert store.progress.settle(group, place, 5, acks((7, 9))).lost == ((7, 9),)
        assert store.progress.extend(group, place, 5, [(7, 9)]) == ((7, 9),)
        assert spans(store.progress.poll(group, place, ask(2, 10))) == [(4, 9)]

    def test_an_ack_that_fails_settles_nothing(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(5))
        store.progress.poll(group, place, ask(1, 5))
        with self.failing_commits(store), pytest.raises(StoreError):
            store.progress.settle(group, place, 1, acks((0, 4)))
        assert store.progress.committed(group.id, place) == 0
        assert store.progress.settle(group, place, 1, acks((0, 4))) == Settled()

    # ---- retry and release ----

    def test_a_retry_comes_again_at_its_time_and_counts(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """R17, R20."""
        append(store, place, batch(3))
        store.progress.poll(group, place, ask(1, 3))
        at = clock.ms + 5000
        store.progress.settle(group, place, 1, [Settlement(Kind.RETRY, 1, 1, visible_at=at, reason="no")])
        clock.ms = at - 1
        store.progress.extend(group, place, 1, [(0, 0), (2, 2)])
        assert spans(store.progress.poll(group, place, ask(2, 3))) == []
        clock.ms = at
        again = store.progress.poll(group, place, ask(3, 3)).deliveries
        assert [(d.first, d.last, d.attempt, d.failures, d.reason) for d in again] == [(1, 1, 2, 1, "no")]

    def test_a_release_comes_again_and_does_not_count(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """R18."""
        append(store, place, batch(2))
        for token in range(1, 8):
            granted = store.progress.poll(group, place, ask(token, 2)).deliveries
            assert [(d.first, d.last, d.attempt, d.failures) for d in granted] == [(0, 1, 1, 0)]
            store.progress.settle(group, place, token, [Settlement(Kind.RELEASE, 0, 1, visible_at=clock.ms)])

    def test_the_last_retry_needs_a_place_to_go(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(1))
        for token in (1, 2):
            store.progress.poll(group, place, ask(token, 1))
            store.progress.settle(group, place, token, [Settlement(Kind.RETRY, 0, 0, visible_at=clock.ms)])
        store.progress.poll(group, place, ask(3, 1))
        last = Settlement(Kind.RETRY, 0, 0, visible_at=clock.ms, reason="third")
        assert store.progress.settle(group, place, 3, [last]) == Settled(unplaced=((0, 0),))
        stamped = Settlement(Kind.RETRY, 0, 0, visible_at=clock.ms, reason="third", stamp=DEAD)
        done = store.progress.settle(group, place, 3, [stamped])
        assert [(d.first, d.last, d.reason) for d in done.leaving] == [(0, 0, "third")]
        assert store.progress.settle(group, place, 3, acks((0, 0))).lost == ((0, 0),)

    # ---- extend ----

    def test_extend_renews_leases(self, store: Store, place: int, group: Group, clock: MovableClock) -> None:
        append(store, place, batch(6))
        store.progress.poll(group, place, ask(1, 6))
        clock.ms += LEASE - 1
        assert store.progress.extend(group, place, 1, [(0, 1), (4, 5)]) == ()
        clock.ms += LEASE - 1
        again = store.progress.poll(group, place, ask(2, 6, member="bob"))
        assert spans(again) == [(2, 2)]  # the first half of what was not extended
        assert store.progress.extend(group, place, 1, [(0, 5)]) == ((2, 3),)
        assert store.progress.settle(group, place, 1, acks((0, 1), (4, 5))) == Settled()

    def test_extending_what_is_settled_tells_so(self, store: Store, place: int, group: Group) -> None:
        """Whoever has it still, because its lease had passed, must not handle it any more."""
        append(store, place, batch(4))
        store.progress.poll(group, place, ask(1, 4))
        store.progress.settle(group, place, 1, acks((0, 3)))
        assert store.progress.extend(group, place, 1, [(0, 3)]) == ((0, 3),)
        assert store.progress.peek(group, [place]) == {place: Peek(4, None)}

    def test_settling_through_another_broker(
        self, store: Store, place: int, group: Group, other: Store
    ) -> None:
        """R2."""
        append(store, place, batch(4))
        store.progress.poll(group, place, ask(1, 4))
        assert other.progress.extend(group, place, 1, [(0, 3)]) == ()
        assert other.progress.settle(group, place, 1, acks((0, 1))) == Settled()
        assert store.progress.settle(group, place, 1, acks((0, 3))) == Settled()
        assert other.progress.committed(group.id, place) == 4
