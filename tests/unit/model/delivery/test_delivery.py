"""Deliveries by example: what a poll hands out, what a settlement leaves behind, and how suspects end.

Offsets are small, time starts at 0 and a lease lasts 1000 ms. `Partition` does what a store does with a
decision: keep the cursor and the rows.
"""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.model.delivery.delivery import (
    MOVED_TOGETHER,
    NOBODY,
    Ask,
    Change,
    Delivery,
    Kind,
    Settlement,
    Span,
    Stamp,
    Terms,
    poll,
)
from postroom.model.delivery.settlement import covered, extend, seize, settle

LEASE = 1000
TERMS = Terms(lease_ms=LEASE, max_attempts=3, mover_ms=5000)
DEAD = Stamp(producer_id=77, partition_id=9)
ELSEWHERE = Stamp(producer_id=78, partition_id=9)


class Partition:
    """One group's progress in one partition; every verb applies what it decides."""

    def __init__(self, end: int, terms: Terms = TERMS) -> None:
        self.cursor, self.end, self.now, self.terms = 0, end, 0, terms
        self.rows: dict[int, Delivery] = {}
        self._tokens = count(1)

    def poll(
        self,
        messages: int = 100,
        *,
        member: str = "ann",
        empty_handed: bool = True,
        on_delivery: bool = False,
        dead: Stamp | None = DEAD,
    ) -> Change:
        due = [row for row in self.deliveries if row.visible_at <= self.now]
        ask = Ask(member, next(self._tokens), messages, self.end, empty_handed, on_delivery, dead)
        return self._apply(poll(self.cursor, due, self.now, ask, self.terms))

    def seize(self, *wanted: Span) -> Change:
        ask = Ask("operator", next(self._tokens), 1, self.end)
        return self._apply(seize(self.cursor, self.deliveries, wanted, self.now, ask, self.terms))

    def settle(self, token: int, *settlements: Settlement) -> Change:
        return self._apply(settle(self.held(token), settlements, self.now, self.terms, self.cursor))

    def ack(self, token: int, *spans: Span) -> Change:
        return self.settle(token, *(Settlement(Kind.ACK, *span) for span in spans))

    def extend(self, token: int, *spans: Span) -> Change:
        return self._apply(extend(self.held(token), spans, self.now + LEASE, self.cursor))

    def _apply(self, change: Change) -> Change:
        self.cursor = change.cursor
        for first in change.drop:
            del self.rows[first]
        for row in change.put:
            assert row.first not in self.rows
            self.rows[row.first] = row
        return change

    @property
    def deliveries(self) -> list[Delivery]:
        return [self.rows[first] for first in sorted(self.rows)]

    def held(self, token: int) -> list[Delivery]:
        return [row for row in self.deliveries if row.token == token]

    @property
    def committed(self) -> int:
        return min(self.rows, default=self.cursor)


def spans(deliveries: tuple[Delivery, ...] | list[Delivery]) -> list[Span]:
    return [(delivery.first, delivery.last) for delivery in deliveries]


def token_of(change: Change) -> int:
    return change.granted[0].token


# ---- poll: new messages, and the budget -------------------------------------------------------------


def test_a_fresh_poll_moves_the_cursor_and_leaves_one_row() -> None:
    ask = Ask("ann", token=7, messages=10, end=100)
    change = poll(cursor=40, due=[], now=5, ask=ask, terms=TERMS)
    held = Delivery(40, 49, visible_at=5 + LEASE, token=7, holder="ann")
    assert change == Change(cursor=50, put=(held,), granted=(held,))
    assert (held.size, held.attempt) == (10, 1)


def test_a_poll_ends_where_the_log_ends() -> None:
    partition = Partition(end=3)
    assert spans(partition.poll(10).granted) == [(0, 2)]
    assert partition.poll(10) == Change(cursor=3)


def test_an_end_below_the_cursor_hands_out_nothing_new() -> None:
    assert poll(5, [], 0, Ask("ann", 7, messages=10, end=2), TERMS) == Change(cursor=5)


@pytest.mark.parametrize("messages", [0, 1])
def test_the_smallest_budget_is_one_message(messages: int) -> None:
    """An empty window always takes one message (I17)."""
    assert spans(Partition(end=9).poll(messages).granted) == [(0, 0)]


def test_members_share_a_partition() -> None:
    partition = Partition(end=9)
    assert spans(partition.poll(4, member="ann").granted) == [(0, 3)]
    assert spans(partition.poll(4, member="bob").granted) == [(4, 7)]
    assert partition.committed == 0


def test_a_live_lease_is_not_handed_out_again() -> None:
    partition = Partition(end=4)
    partition.poll()
    partition.now = LEASE - 1
    assert partition.poll(member="bob").granted == ()


# ---- poll: what is due ------------------------------------------------------------------------------


def with_waiting(size: int, end: int) -> Partition:
    """0…size-1 were handed out, given back, and are due."""
    partition = Partition(end)
    token = token_of(partition.poll(size))
    partition.settle(token, Settlement(Kind.RELEASE, 0, size - 1))
    return partition


def test_what_is_due_comes_before_what_is_new() -> None:
    assert spans(with_waiting(3, end=100).poll(10).granted) == [(0, 2), (3, 9)]


def test_what_is_due_takes_at_most_half_while_something_is_new() -> None:
    partition = with_waiting(50, end=100)
    assert spans(partition.poll(10).granted) == [(0, 4), (50, 54)]
    assert spans(partition.deliveries) == [(0, 4), (5, 49), (50, 54)]


def test_what_is_due_takes_the_room_that_new_messages_leave() -> None:
    assert spans(with_waiting(50, end=52).poll(10).granted) == [(0, 7), (50, 51)]
    assert spans(with_waiting(50, end=50).poll(10).granted) == [(0, 9)]


def test_a_budget_of_one_goes_to_what_is_due() -> None:
    assert spans(with_waiting(50, end=100).poll(1).granted) == [(0, 0)]


def test_many_small_holes_share_the_budget() -> None:
    partition = Partition(end=20)
    token = token_of(partition.poll(10))
    partition.ack(token, *((offset, offset) for offset in range(1, 10, 2)))
    partition.settle(token, *(Settlement(Kind.RELEASE, o, o) for o in range(0, 10, 2)))
    assert spans(partition.poll(6).granted) == [(0, 0), (2, 2), (4, 4), (10, 12)]


def test_deliveries_not_due_yet_are_left_alone() -> None:
    partition = Partition(end=2)
    token = token_of(partition.poll())
    partition.settle(token, Settlement(Kind.RETRY, 0, 1, visible_at=700))
    partition.now = 699
    assert partition.poll().granted == ()
    partition.now = 700
    assert spans(partition.poll().granted) == [(0, 1)]


# ---- on delivery ------------------------------------------------------------------------------------


def test_on_delivery_settles_as_it_hands_out() -> None:
    partition = Partition(end=5)
    change = partition.poll(3, on_delivery=True)
    assert spans(change.granted) == [(0, 2)]
    assert (change.settled, change.put, partition.committed) == (3, (), 3)


def test_on_delivery_also_settles_what_was_due() -> None:
    partition = with_waiting(4, end=4)
    change = partition.poll(3, on_delivery=True)
    assert spans(change.granted) == [(0, 2)]
    assert change.settled == 3
    assert spans(partition.deliveries) == [(3, 3)]


# ---- settle: acks -----------------------------------------------------------------------------------


def test_an_ack_of_all_leaves_nothing() -> None:
    partition = Partition(end=5)
    change = partition.ack(token_of(partition.poll()), (0, 4))
    assert (change.drop, change.put, change.settled, change.missing) == ((0,), (), 5, ())
    assert partition.committed == 5


def test_a_partial_ack_leaves_a_hole_that_keeps_its_lease() -> None:
    partition = Partition(end=10)
    (held,) = partition.poll().granted
    change = partition.ack(held.token, (0, 1), (4, 5))
    assert change.settled == 4
    assert partition.deliveries == [held.part(2, 3), held.part(6, 9)]
    assert partition.committed == 2


def test_one_ack_may_span_several_deliveries_of_its_token() -> None:
    partition = with_waiting(3, end=10)
    token = token_of(partition.poll(10))
    assert len(partition.held(token)) == 2
    assert partition.ack(token, (1, 8)).settled == 8
    assert spans(partition.deliveries) == [(0, 0), (9, 9)]


def test_a_repeated_ack_changes_nothing_and_says_what_is_missing() -> None:
    partition = Partition(end=10)
    token = token_of(partition.poll())
    partition.ack(token, (2, 5))
    before = partition.deliveries
    change = partition.ack(token, (2, 5))
    assert (change.settled, change.missing) == (0, ((2, 5),))
    assert partition.deliveries == before


def test_an_ack_with_a_foreign_token_is_missing() -> None:
    partition = Partition(end=4)
    partition.poll()
    assert partition.ack(999, (0, 3)) == Change(cursor=4, missing=((0, 3),))


def test_an_ack_with_gaps_names_each_gap() -> None:
    partition = Partition(end=10)
    token = token_of(partition.poll())
    partition.ack(token, (2, 3), (6, 7))
    change = partition.ack(token, (1, 12))
    assert change.missing == ((2, 3), (6, 7), (10, 12))
    assert spans(partition.deliveries) == [(0, 0)]


def test_an_ack_after_expiry_counts_until_somebody_else_has_it() -> None:
    partition = Partition(end=1)
    token = token_of(partition.poll())
    partition.now = 5 * LEASE
    assert partition.ack(token, (0, 0)).settled == 1


def test_a_late_ack_is_missing_once_somebody_else_has_it() -> None:
    partition = Partition(end=1)
    late = token_of(partition.poll(member="ann"))
    partition.now = LEASE
    assert token_of(partition.poll(member="bob")) != late
    change = partition.ack(late, (0, 0))
    assert (change.settled, change.missing) == (0, ((0, 0),))
    assert list(covered(change.missing, partition.deliveries)) == [(0, 0)]


def test_missing_and_settled_already_are_told_apart_by_what_is_left() -> None:
    left = [Delivery(5, 9, 0), Delivery(20, 29, 0)]
    assert list(covered([(0, 6), (8, 21), (40, 41)], left)) == [(5, 6), (8, 9), (20, 21)]


def test_a_hundred_acks_in_random_order() -> None:
    partition = Partition(end=100)
    token = token_of(partition.poll())
    offsets = list(range(100))
    random.Random(4).shuffle(offsets)
    left = set(offsets)
    for offset in offsets:
        left.remove(offset)
        assert partition.ack(token, (offset, offset)).settled == 1
        assert {o for d in partition.deliveries for o in range(d.first, d.last + 1)} == left
        assert partition.committed == min(left, default=100)
        assert len(partition.rows) <= 50


# ---- settle: back to the group ----------------------------------------------------------------------


def test_a_retry_splits_off_its_offset_until_the_agreed_time() -> None:
    partition = Partition(end=5)
    (held,) = partition.poll().granted
    partition.settle(held.token, Settlement(Kind.RETRY, 2, 2, visible_at=60_000, reason="later"))
    hole = Delivery(2, 2, visible_at=60_000, spent=1, failures=1, reason="later")
    assert partition.deliveries == [held.part(0, 1), hole, held.part(3, 4)]


def test_a_release_is_not_an_attempt() -> None:
    partition = Partition(end=1)
    for _ in range(10):
        (held,) = partition.poll().granted
        assert (held.attempt, held.failures) == (1, 0)
        partition.settle(held.token, Settlement(Kind.RELEASE, 0, 0))


def test_a_retry_without_a_reason_keeps_the_earlier_one() -> None:
    partition = Partition(end=1)
    partition.settle(token_of(partition.poll()), Settlement(Kind.RETRY, 0, 0, reason="boom"))
    partition.settle(token_of(partition.poll()), Settlement(Kind.RELEASE, 0, 0))
    assert partition.deliveries[0].reason == "boom"


def test_kinds_can_be_mixed_in_one_settlement() -> None:
    partition = Partition(end=6)
    token = token_of(partition.poll())
    change = partition.settle(
        token,
        Settlement(Kind.ACK, 0, 1),
        Settlement(Kind.RETRY, 2, 2, visible_at=50),
        Settlement(Kind.RELEASE, 3, 3, visible_at=20),
        Settlement(Kind.MOVE, 4, 4, stamp=ELSEWHERE, reason="bad"),
    )
    assert (change.settled, change.missing) == (2, ())
    assert spans(change.leaving) == [(4, 4)]
    assert [(d.first, d.spent, d.failures) for d in partition.deliveries] == [
        (2, 1, 1),
        (3, 0, 0),
        (4, 1, 0),
        (5, 0, 0),
    ]


# ---- extend -----------------------------------------------------------------------------------------


def test_extend_moves_the_lease_of_what_it_names() -> None:
    partition = Partition(end=6)
    token = token_of(partition.poll())
    partition.now = 900
    assert partition.extend(token, (2, 3)).missing == ()
    assert [(d.first, d.last, d.visible_at) for d in partition.deliveries] == [
        (0, 1, LEASE),
        (2, 3, 900 + LEASE),
        (4, 5, LEASE),
    ]


def test_extend_of_all_stays_one_row() -> None:
    partition = Partition(end=6)
    token = token_of(partition.poll())
    partition.now = 900
    partition.extend(token, (0, 5))
    assert [(d.first, d.last, d.visible_at) for d in partition.deliveries] == [(0, 5, 900 + LEASE)]


def test_extend_says_what_is_lost() -> None:
    partition = Partition(end=2)
    late = token_of(partition.poll())
    partition.now = LEASE
    partition.poll(member="bob")
    assert partition.extend(late, (0, 1)) == Change(cursor=2, missing=((0, 1),))


# ---- suspects (I14) ---------------------------------------------------------------------------------


def test_what_expired_is_halved_down_to_one() -> None:
    """Each consumer dies with its delivery; the lowest messages come back alone, in halves of halves."""
    partition = Partition(end=8)
    seen = [spans(partition.poll().granted)]
    for _ in range(4):
        partition.now += LEASE
        seen.append(spans(partition.poll().granted))
    assert seen == [[(0, 7)], [(0, 3)], [(0, 1)], [(0, 0)], [(0, 0)]]
    assert spans(partition.deliveries) == [(0, 0), (1, 1), (2, 3), (4, 7)]


def test_a_suspect_goes_out_alone_even_if_there_is_room() -> None:
    partition = Partition(end=100)
    partition.poll(8)
    partition.now = LEASE
    (granted,) = partition.poll(50).granted
    assert (granted.first, granted.last, granted.alone, granted.suspect) == (0, 3, True, True)
    assert (granted.attempt, granted.failures) == (2, 0)
    assert partition.cursor == 8


def test_a_suspect_alone_still_keeps_to_the_budget() -> None:
    partition = Partition(end=100)
    partition.poll(8)
    partition.now = LEASE
    assert spans(partition.poll(3).granted) == [(0, 2)]
    assert [(d.first, d.last, d.suspect) for d in partition.deliveries] == [
        (0, 2, True),
        (3, 3, True),
        (4, 7, True),
    ]


def test_each_empty_handed_member_gets_a_suspect_of_its_own() -> None:
    partition = Partition(end=8)
    partition.poll()
    partition.now = LEASE
    assert spans(partition.poll(member="ann").granted) == [(0, 3)]
    assert spans(partition.poll(member="bob").granted) == [(4, 7)]


def test_a_member_with_something_in_hand_gets_nothing_new_while_a_suspect_waits() -> None:
    partition = Partition(end=100)
    partition.poll(8)
    partition.now = LEASE
    before = partition.deliveries
    assert partition.poll(empty_handed=False) == Change(cursor=8, draining=True)
    assert partition.deliveries == before
    assert spans(partition.poll(empty_handed=True).granted) == [(0, 3)]


def test_a_member_with_something_in_hand_still_gets_what_is_due_and_no_suspect() -> None:
    partition = Partition(end=100)
    partition.poll(4, member="dies")
    token = token_of(partition.poll(4))
    partition.settle(token, Settlement(Kind.RETRY, 4, 7))
    partition.now = LEASE
    assert spans(partition.poll(empty_handed=False).granted) == [(4, 7)]


def test_a_suspect_is_not_put_with_a_retry_of_the_same_poll() -> None:
    partition = Partition(end=100)
    token = token_of(partition.poll(4))
    partition.poll(4, member="dies")
    partition.settle(token, Settlement(Kind.RETRY, 0, 3))
    partition.now = LEASE
    change = partition.poll()
    assert spans(change.granted) == [(0, 3)]  # and neither the suspects nor anything new
    assert change.draining


def test_a_suspect_nobody_could_take_alone_goes_out_with_others_and_its_expiry_counts_for_nothing() -> None:
    partition = Partition(end=100)
    partition.poll(1)
    partition.now = 2 * LEASE - 1
    assert partition.poll(4, empty_handed=False).granted == ()
    partition.now = 2 * LEASE
    first, new = partition.poll(4, empty_handed=False).granted
    assert (first.first, first.last, first.alone, first.suspect) == (0, 0, False, True)
    assert (new.first, new.last, new.alone, new.suspect) == (1, 3, False, False)
    partition.now = 3 * LEASE
    (again,) = partition.poll().granted
    assert (again.attempt, again.failures, again.alone) == (3, 0, True)


def test_the_first_expiry_of_a_single_message_does_not_count() -> None:
    """It may have been held beside others of another partition: it was not alone."""
    partition = Partition(end=1)
    partition.poll()
    partition.now = LEASE
    (again,) = partition.poll().granted
    assert (again.attempt, again.failures) == (2, 0)


def test_the_expiry_of_a_single_message_held_alone_counts() -> None:
    partition = Partition(end=1)
    counted = []
    for _ in range(4):
        (granted,) = partition.poll().granted
        counted.append((granted.attempt, granted.failures))
        partition.now += LEASE
    assert counted == [(1, 0), (2, 0), (3, 1), (4, 2)]


def test_the_expiry_of_a_range_held_alone_counts_for_none_of_it() -> None:
    partition = Partition(end=8)
    partition.poll()
    for _ in range(2):
        partition.now += LEASE
        (granted,) = partition.poll().granted
        assert granted.failures == 0


def test_what_is_left_of_a_range_held_alone_is_not_one_message_held_alone() -> None:
    """Of a range of three the middle one is done; whoever kills the member, the other must not pay."""
    partition = Partition(end=6)
    partition.poll()
    partition.now = LEASE
    (alone,) = partition.poll().granted
    partition.ack(alone.token, (1, 1))
    assert spans(partition.held(alone.token)) == [(0, 0), (2, 2)]
    partition.now += LEASE
    assert [partition.poll(member=m).granted[0].failures for m in ("ann", "bob")] == [0, 0]


def test_extending_one_of_a_range_held_alone_does_not_make_the_others_count() -> None:
    partition = Partition(end=4)
    partition.poll()
    partition.now = LEASE
    (alone,) = partition.poll().granted
    partition.now += LEASE - 1
    partition.extend(alone.token, (0, 0))
    partition.now += 1
    (granted,) = partition.poll().granted
    assert (granted.first, granted.last, granted.failures) == (1, 1, 0)


def test_extending_all_of_a_message_held_alone_keeps_it_alone() -> None:
    partition = Partition(end=1)
    partition.poll()
    partition.now = LEASE
    (alone,) = partition.poll().granted
    partition.extend(alone.token, (0, 0))
    assert partition.deliveries[0].alone


@pytest.mark.parametrize("kind", [Kind.RETRY, Kind.RELEASE])
def test_who_lives_to_hand_a_suspect_back_clears_it(kind: Kind) -> None:
    partition = Partition(end=10)
    partition.poll(2)
    partition.now = LEASE
    (suspect,) = partition.poll(2).granted
    partition.settle(suspect.token, Settlement(kind, 0, 0))
    assert [d.suspect for d in partition.deliveries] == [False, True]


# ---- leaving for another topic (I12) ----------------------------------------------------------------


def test_move_stamps_and_leaves() -> None:
    partition = Partition(end=3)
    token = token_of(partition.poll())
    change = partition.settle(token, Settlement(Kind.MOVE, 1, 1, stamp=ELSEWHERE, reason="no such customer"))
    (moving,) = change.leaving
    assert (moving.first, moving.last, moving.reason) == (1, 1, "no such customer")
    assert (moving.holder, moving.visible_at, moving.spent) == ("", TERMS.mover_ms, 1)
    assert change.settled == 0
    assert partition.committed == 0
    assert partition.ack(moving.token, (1, 1)).settled == 1  # the mover is done
    assert spans(partition.deliveries) == [(0, 0), (2, 2)]


def test_each_delivery_leaves_under_an_identity_of_its_own() -> None:
    """Two of them under one identity would look like a repeated append: the second would be dropped."""
    partition = Partition(end=6)
    token = token_of(partition.poll())
    moves = [Settlement(Kind.MOVE, o, o, stamp=ELSEWHERE) for o in (0, 2, 4)]
    leaving = partition.settle(token, *moves).leaving
    identities = {d.stamp.producer_id for d in leaving if d.stamp}
    assert len(identities) == 3
    assert {d.stamp.partition_id for d in leaving if d.stamp} == {ELSEWHERE.partition_id}
    assert [d.token for d in leaving] == [d.stamp.producer_id for d in leaving if d.stamp]


@pytest.mark.parametrize("kind", [Kind.MOVE, Kind.LANE, Kind.RETRY])
def test_a_long_delivery_leaves_in_parts(kind: Kind) -> None:
    """Whoever moves one has its messages in memory: a thousand of 4 MB, if a consumer could choose."""
    held = Delivery(100, 399, LEASE, token=7, failures=TERMS.max_attempts - 1)
    change = settle([held], [Settlement(kind, 0, 2**62, stamp=ELSEWHERE)], 0, TERMS)
    leaving = change.leaving
    assert [offset for d in leaving for offset in range(d.first, d.last + 1)] == list(range(100, 400))
    assert max(d.size for d in leaving) <= MOVED_TOGETHER
    assert len({d.stamp.producer_id for d in leaving if d.stamp}) == len(leaving)  # each by itself
    assert [d.token for d in leaving] == [d.stamp.producer_id for d in leaving if d.stamp]


def test_an_identity_is_a_positive_number_of_63_bits() -> None:
    largest = Stamp(2**63 - 1, 1)
    for first in (0, 1, 2**62):
        held = Delivery(first, first, LEASE, token=7)
        (moving,) = settle([held], [Settlement(Kind.MOVE, first, first, stamp=largest)], 0, TERMS).leaving
        assert moving.stamp is not None
        assert 0 < moving.stamp.producer_id < 2**63


@pytest.mark.parametrize("kind", Kind)
def test_what_is_leaving_is_out_of_its_former_holders_hands(kind: Kind) -> None:
    partition = Partition(end=1)
    token = token_of(partition.poll())
    partition.settle(token, Settlement(Kind.MOVE, 0, 0, stamp=ELSEWHERE))
    before = partition.deliveries
    assert partition.settle(token, Settlement(kind, 0, 0, stamp=DEAD)).missing == ((0, 0),)
    assert partition.extend(token, (0, 0)).missing == ((0, 0),)
    assert partition.deliveries == before


def test_a_stamped_delivery_is_taken_over_when_its_mover_is_gone() -> None:
    partition = Partition(end=1)
    token = token_of(partition.poll())
    (moving,) = partition.settle(token, Settlement(Kind.MOVE, 0, 0, stamp=ELSEWHERE)).leaving
    partition.now = TERMS.mover_ms - 1
    assert partition.poll().leaving == ()
    partition.now = TERMS.mover_ms
    change = partition.poll()
    (resumed,) = change.leaving
    assert change.granted == ()
    assert resumed == replace(moving, visible_at=2 * TERMS.mover_ms)
    assert partition.ack(resumed.token, (0, 0)).settled == 1
    assert partition.ack(moving.token, (0, 0)).settled == 0  # the first mover comes back: nothing to do


def test_the_last_retry_leaves_with_the_stamp_it_brought() -> None:
    partition = Partition(end=1)
    for _ in range(TERMS.max_attempts - 1):
        token = token_of(partition.poll())
        assert partition.settle(token, Settlement(Kind.RETRY, 0, 0, stamp=DEAD)).leaving == ()
    (granted,) = partition.poll().granted
    assert granted.attempt == TERMS.max_attempts
    change = partition.settle(granted.token, Settlement(Kind.RETRY, 0, 0, stamp=DEAD, reason="boom"))
    (moving,) = change.leaving
    assert moving.stamp is not None
    assert (moving.stamp.partition_id, moving.reason) == (DEAD.partition_id, "boom")
    assert (moving.spent, moving.failures) == (3, 3)


def test_the_last_retry_without_a_stamp_stays_in_hand_until_it_is_repeated_with_one() -> None:
    partition = Partition(end=3, terms=replace(TERMS, max_attempts=1))
    (held,) = partition.poll().granted
    change = partition.settle(held.token, Settlement(Kind.RETRY, 1, 1, reason="boom"))
    assert (change.unplaced, change.leaving, change.missing) == (((1, 1),), (), ())
    assert partition.deliveries == [held.part(0, 0), held.part(1, 1), held.part(2, 2)]
    change = partition.settle(held.token, Settlement(Kind.RETRY, 1, 1, reason="boom", stamp=DEAD))
    assert (spans(change.leaving), change.unplaced) == ([(1, 1)], ())


def exhausted() -> Partition:
    """Message 0 has killed everybody who held it alone, as often as the group allows."""
    partition = Partition(end=5)
    for _ in range(TERMS.max_attempts + 1):
        partition.poll(1)
        partition.now += LEASE
    return partition


def test_an_exhausted_suspect_leaves_with_the_stamp_of_the_poll_and_the_poll_goes_on() -> None:
    change = exhausted().poll(2)
    (moving,) = change.leaving
    assert (moving.first, moving.last, moving.failures) == (0, 0, TERMS.max_attempts)
    assert moving.stamp is not None and moving.stamp.partition_id == DEAD.partition_id
    assert "went away" in moving.reason
    assert spans(change.granted) == [(1, 2)]


def test_an_exhausted_suspect_stays_while_nobody_knows_where_to_put_it() -> None:
    partition = exhausted()
    before = partition.deliveries
    change = partition.poll(2, dead=None)
    assert (change.leaving, change.unplaced) == ((), ((0, 0),))
    assert spans(change.granted) == [(1, 2)]
    assert partition.deliveries[:1] == before
    assert spans(partition.poll(2, dead=DEAD).leaving) == [(0, 0)]


def test_only_the_poisonous_one_reaches_the_dead_letters() -> None:
    partition, poison, dead = Partition(end=40), 13, list[Span]()
    for _ in range(100):
        change = partition.poll(16)
        dead += spans(change.leaving)
        for granted in change.granted + change.leaving:
            if not granted.first <= poison <= granted.last or granted in change.leaving:
                partition.ack(granted.token, (granted.first, granted.last))
        partition.now += LEASE
    assert dead == [(poison, poison)]
    assert (partition.committed, partition.rows) == (40, {})


@pytest.mark.parametrize("held", [True, False])
def test_a_limit_lowered_below_what_has_failed_lets_the_whole_range_leave(held: bool) -> None:
    """If it is held until it expires, no half of it may vanish."""
    partition = Partition(end=4)
    partition.settle(token_of(partition.poll()), Settlement(Kind.RETRY, 0, 3))
    if held:
        partition.poll()
    partition.now = LEASE
    partition.terms = replace(TERMS, max_attempts=1)
    assert spans(partition.poll().leaving) == [(0, 3)]
    assert spans(partition.deliveries) == [(0, 3)]


# ---- seize: exactly these ---------------------------------------------------------------------------


def test_seize_takes_what_is_named_and_what_it_passes_waits_its_turn() -> None:
    partition = Partition(end=10)
    change = partition.seize((2, 3), (6, 6))
    assert spans(change.granted) == [(2, 3), (6, 6)]
    assert partition.cursor == 7
    waiting = [(d.first, d.last) for d in partition.deliveries if d.token == NOBODY]
    assert waiting == [(0, 1), (4, 5)]
    assert spans(partition.poll(20).granted) == [(0, 1), (4, 5), (7, 9)]


def test_seize_does_not_wait_for_a_retry_but_leaves_live_leases_alone() -> None:
    partition = Partition(end=3)
    token = token_of(partition.poll())
    partition.settle(token, Settlement(Kind.RETRY, 1, 1, visible_at=60_000))
    change = partition.seize((0, 9))
    assert [(d.first, d.last, d.attempt) for d in change.granted] == [(1, 1, 2)]
    assert change.missing == ((0, 0), (2, 2))


def test_seize_takes_what_expired_and_resumes_what_its_mover_left() -> None:
    partition = Partition(end=2)
    token = token_of(partition.poll())
    partition.settle(token, Settlement(Kind.MOVE, 0, 0, stamp=ELSEWHERE))
    partition.now = TERMS.mover_ms
    change = partition.seize((0, 1))
    assert (spans(change.leaving), spans(change.granted)) == ([(0, 0)], [(1, 1)])
    assert spans(partition.deliveries) == [(0, 0), (1, 1)]


# ---- cutting ----------------------------------------------------------------------------------------


@st.composite
def held_rows(draw: st.DrawFn) -> list[Delivery]:
    """Disjoint deliveries of one token, lowest first, each with an attempt of its own."""
    rows: list[Delivery] = []
    at = 0
    for gap, size in draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), max_size=6)):
        rows.append(Delivery(at + gap, at + gap + size - 1, LEASE, token=7, holder="ann", spent=len(rows)))
        at += gap + size
    return rows


some_spans = st.lists(
    st.tuples(st.integers(0, 50), st.integers(0, 12)).map(lambda pair: (pair[0], pair[0] + pair[1])),
    max_size=8,
)


def offsets_of(pairs: list[Span] | tuple[Span, ...]) -> set[int]:
    return {offset for first, last in pairs for offset in range(first, last + 1)}


def by_offset(rows: list[Delivery]) -> dict[int, Delivery]:
    """Every offset with its delivery, shorn of its range; fails where two overlap."""
    flat = [(o, row.part(0, 0)) for row in rows for o in range(row.first, row.last + 1)]
    assert len(dict(flat)) == len(flat)
    return dict(flat)


def applied(rows: list[Delivery], change: Change) -> list[Delivery]:
    assert len(set(change.drop)) == len(change.drop)
    assert set(change.drop) <= {row.first for row in rows}
    return [row for row in rows if row.first not in change.drop] + list(change.put)


@given(held_rows(), some_spans)
def test_an_ack_removes_what_it_names_and_nothing_else(rows: list[Delivery], asked: list[Span]) -> None:
    change = settle(rows, [Settlement(Kind.ACK, *span) for span in asked], 0, TERMS)
    before, after = by_offset(rows), by_offset(applied(rows, change))
    assert after == {o: row for o, row in before.items() if o not in offsets_of(asked)}
    assert change.settled == len(before) - len(after)
    assert offsets_of(change.missing) >= offsets_of(asked) - before.keys()
    if len(offsets_of(asked)) == sum(last - first + 1 for first, last in asked):  # none overlap
        assert offsets_of(change.missing) == offsets_of(asked) - before.keys()


@given(held_rows(), some_spans, st.sampled_from([Kind.RETRY, Kind.RELEASE, Kind.MOVE]))
def test_every_other_kind_keeps_every_offset(rows: list[Delivery], asked: list[Span], kind: Kind) -> None:
    terms = replace(TERMS, max_attempts=100)
    change = settle(rows, [Settlement(kind, *span, visible_at=5, stamp=DEAD) for span in asked], 0, terms)
    before, after = by_offset(rows), by_offset(applied(rows, change))
    assert before.keys() == after.keys()
    for offset, row in after.items():
        if offset not in offsets_of(asked):
            assert row == before[offset]
        elif kind is Kind.MOVE:
            assert row.stamp is not None and row.token == row.stamp.producer_id != 7
        else:
            counted = 1 if kind is Kind.RETRY else 0
            assert (row.token, row.visible_at) == (NOBODY, 5)
            assert row.spent == before[offset].spent + counted


@given(held_rows(), some_spans)
def test_extend_moves_the_lease_of_what_it_names_and_nothing_else(
    rows: list[Delivery], asked: list[Span]
) -> None:
    change = extend(rows, asked, until=9 * LEASE)
    before, after = by_offset(rows), by_offset(applied(rows, change))
    named = offsets_of(asked)
    assert after == {o: replace(r, visible_at=9 * LEASE) if o in named else r for o, r in before.items()}


@given(held_rows(), st.integers(1, 30), st.integers(0, 60), st.booleans(), st.integers(0, 3 * LEASE))
def test_a_poll_loses_nothing_and_keeps_to_its_budget(
    rows: list[Delivery], messages: int, end: int, empty_handed: bool, now: int
) -> None:
    cursor = rows[-1].last + 1 if rows else 0
    due = [row for row in rows if row.visible_at <= now]
    ask = Ask("bob", 8, messages, end, empty_handed, dead=DEAD)
    change = poll(cursor, due, now, ask, TERMS)
    before, after = by_offset(rows), by_offset(applied(rows, change))
    granted = by_offset(list(change.granted))
    assert after.keys() == before.keys() | set(range(cursor, change.cursor))
    assert len(granted) <= messages
    assert all(o >= cursor or before[o].visible_at <= now for o in granted)
    assert all(after[o].spent >= before[o].spent for o in before)
