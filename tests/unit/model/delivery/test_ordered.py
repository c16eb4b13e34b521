"""Ordered groups by example: who holds a partition, what its holder is handed, how a failing message ends.

Offsets are small, time starts at 0 and a lease lasts 1000 ms. `Partition` does what a store does with a
decision: keep the holder, the cursor and the rows.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.model.delivery import ordered
from postroom.model.delivery.delivery import (
    NOBODY,
    WENT_AWAY,
    Change,
    Delivery,
    Holder,
    Kind,
    OrderedAsk,
    Settlement,
    Span,
    Stamp,
    Terms,
)
from postroom.model.delivery.ordered import FAR, Claim, claim

LEASE = 1000
HOLD = 60_000
TERMS = Terms(lease_ms=LEASE, max_attempts=3, mover_ms=5000, max_hold_ms=HOLD)
STOP = Terms(lease_ms=LEASE, max_attempts=3, mover_ms=5000, stop=True, max_hold_ms=HOLD)
DEAD = Stamp(producer_id=77, partition_id=9)


class Partition:
    """One ordered group's progress in one partition; every verb applies what it decides."""

    def __init__(self, end: int, terms: Terms = TERMS) -> None:
        self.cursor, self.end, self.now, self.terms = 0, end, 0, terms
        self.holder = Holder()
        self.rows: dict[int, Delivery] = {}

    @property
    def deliveries(self) -> list[Delivery]:
        return [self.rows[first] for first in sorted(self.rows)]

    def held(self, token: int) -> list[Delivery]:
        return [row for row in self.deliveries if row.token == token]

    def poll(self, token: int, expects: int | None = None, messages: int = 100, **more: Any) -> Change:
        more = {"end": self.end, "dead": DEAD, **more}
        ask = OrderedAsk(f"m{token}", token, messages, expects=expects, **more)
        found = claim(self.holder, ask, self.now, self.cursor)
        assert found is not Claim.REFUSED
        if found is Claim.TAKES_OVER:
            received = self.held(self.holder.token)
            self._apply(ordered.lapse(received, self.holder.until, self.now, self.cursor))
        self.holder = Holder(token, ask.member, self.now + LEASE)
        return self._apply(ordered.poll(self.cursor, self.deliveries, self.now, ask, self.terms))

    def settle(self, *settlements: Settlement) -> Change:
        held = self.held(self.holder.token)
        return self._apply(ordered.settle(held, settlements, self.now, self.terms, self.cursor))

    def ack(self, *spans: Span) -> Change:
        return self.settle(*(Settlement(Kind.ACK, *span) for span in spans))

    def retry(self, offset: int, at: int, stamp: Stamp | None = DEAD) -> Change:
        return self.settle(Settlement(Kind.RETRY, offset, offset, at, "no", stamp))

    def hand_over(self) -> None:
        self._apply(ordered.hand_over(self.held(self.holder.token), self.cursor))
        self.holder = Holder(until=self.now)

    def restart(self) -> Change:
        stopped = [row for row in self.deliveries if row.visible_at >= FAR]
        return self._apply(ordered.restart(stopped, self.now, self.cursor))

    def lapse(self) -> None:
        self.now = self.holder.until

    def _apply(self, change: Change) -> Change:
        for first in change.drop:
            del self.rows[first]
        for row in change.put:
            assert row.first not in self.rows
            self.rows[row.first] = row
        self.cursor = change.cursor
        return change


def spans(change: Change) -> list[Span]:
    return [(d.first, d.last) for d in change.granted]


# ---- who holds it -----------------------------------------------------------------------------------

ANN, BOB = 1, 2
HELD = Holder(ANN, "ann", until=500)


@pytest.mark.parametrize(
    ("holder", "token", "expects", "now", "found"),
    [
        (Holder(), ANN, None, 0, Claim.TAKES),
        (Holder(until=400), ANN, None, 0, Claim.TAKES),  # handed over
        (Holder(), ANN, 5, 0, Claim.REFUSED),  # what it has is of another time
        (HELD, ANN, None, 499, Claim.HOLDS),
        (HELD, ANN, 5, 499, Claim.HOLDS),
        (HELD, ANN, 5, 9999, Claim.HOLDS),  # late, but nobody took over
        (HELD, ANN, None, 500, Claim.TAKES_OVER),  # it has dropped everything
        (HELD, ANN, 11, 499, Claim.REFUSED),  # a crash forgot what it was handed (I8)
        (HELD, BOB, None, 499, Claim.REFUSED),
        (HELD, BOB, None, 500, Claim.TAKES_OVER),
        (HELD, BOB, 5, 500, Claim.REFUSED),
    ],
)
def test_claims(holder: Holder, token: int, expects: int | None, now: int, found: Claim) -> None:
    """I5."""
    assert claim(holder, OrderedAsk("m", token, 1, 10, expects), now, cursor=10) is found


def test_a_lapsed_lease_is_safe_for_a_while_after_a_start() -> None:
    """I8."""
    ask = OrderedAsk("bob", BOB, 1, 10)
    assert claim(HELD, ask, 5000, 10, safe_from=5001) is Claim.REFUSED
    assert claim(HELD, ask, 5001, 10, safe_from=5001) is Claim.TAKES_OVER
    assert claim(Holder(), ask, 5000, 10, safe_from=9999) is Claim.TAKES  # handed over: nobody's lease


# ---- what the holder is handed ----------------------------------------------------------------------


def test_new_messages_follow_each_other() -> None:
    p = Partition(10)
    assert [spans(p.poll(ANN, None, 4)), spans(p.poll(ANN, 4, 4)), spans(p.poll(ANN, 8))] == [
        [(0, 3)],
        [(4, 7)],
        [(8, 9)],
    ]
    assert spans(p.poll(ANN, 10)) == []
    assert {(d.token, d.holder, d.visible_at) for d in p.deliveries} == {(ANN, "m1", 0)}


def test_a_lost_reply_is_sent_again_and_nothing_is_written() -> None:
    """I6."""
    p = Partition(10)
    p.poll(ANN, None, 6)
    again = p.poll(ANN, None, 6)
    assert (spans(again), again.drop, again.put, again.cursor) == ([(0, 5)], (), (), 6)
    partly = p.poll(ANN, 2, 3)
    assert (spans(partly), partly.put) == ([(2, 4)], ())
    assert spans(p.poll(ANN, 5)) == [(5, 5), (6, 9)]


def test_the_next_holder_receives_everything_lowest_first() -> None:
    """I5: with its attempts and its not-before, whatever that is."""
    p = Partition(10)
    p.poll(ANN, None, 6)
    p.ack((1, 1), (4, 4))
    p.retry(2, at=40_000)
    p.hand_over()
    granted = p.poll(BOB, None, 100).granted
    assert [(d.first, d.last, d.attempt, d.visible_at) for d in granted] == [
        (0, 0, 1, 0),
        (2, 2, 2, 40_000),
        (3, 3, 1, 0),
        (5, 5, 1, 0),
        (6, 9, 1, 0),
    ]
    assert {d.token for d in p.deliveries} == {BOB}


def test_a_budget_cuts_what_is_sent_and_the_rest_is_nobodys() -> None:
    p = Partition(10)
    p.poll(ANN, None, 8)
    p.hand_over()
    assert spans(p.poll(BOB, None, 3)) == [(0, 2)]
    assert [(d.first, d.last, d.token) for d in p.deliveries] == [(0, 2, BOB), (3, 7, NOBODY)]
    p.lapse()
    assert [(d.first, d.spent) for d in p.poll(ANN, None, 1).granted] == [(0, 1)]
    assert [(d.first, d.spent, d.suspect) for d in p.deliveries] == [(0, 1, True), (1, 1, True), (2, 1, True),
                                                                   (3, 0, False)]  # fmt: skip


@pytest.mark.parametrize(
    ("end", "messages", "expected"), [(5, 100, (2, 4)), (2, 100, (2, 2)), (0, 100, (2, 2)), (9, 0, (2, 2))]
)
def test_one_message_always_goes_out(end: int, messages: int, expected: Span) -> None:
    """I17."""
    p = Partition(10)
    p.poll(ANN, None, 8)
    p.ack((0, 1))
    p.hand_over()
    assert spans(p.poll(BOB, None, messages, end=end)) == [expected]
    assert p.cursor == 8


def test_the_cursor_waits_for_rows_the_store_has_not_shown() -> None:
    p = Partition(10)
    p.poll(ANN, None, 4)
    p.hand_over()
    ask = OrderedAsk("bob", BOB, 100, 10)
    change = ordered.poll(p.cursor, p.deliveries[:1], p.now, ask, TERMS, all_known=False)
    assert (spans(change), change.cursor) == ([(0, 3)], 4)


# ---- suspects (I14) ---------------------------------------------------------------------------------


def test_what_waits_for_its_time_was_not_at_work() -> None:
    p = Partition(3)
    p.poll(ANN)
    p.retry(0, at=LEASE)  # due when the lease ends: it may have been at work
    p.retry(1, at=LEASE + 1)
    p.lapse()
    p.poll(BOB)
    assert [(d.first, d.spent, d.failures, d.suspect) for d in p.deliveries] == [
        (0, 2, 1, True),
        (1, 1, 1, False),
        (2, 1, 0, True),
    ]


def test_a_suspect_is_resolved_before_anything_behind_it() -> None:
    p = Partition(9)
    p.poll(ANN, None, 5)
    p.lapse()
    first = p.poll(BOB)
    assert [(d.first, d.last, d.alone) for d in first.granted] == [(0, 2, True)]
    p.ack((0, 0))
    assert [(d.first, d.suspect, d.alone) for d in p.held(BOB)] == [(1, True, False)]  # the rest of it
    p.ack((1, 2))
    assert [(d.first, d.last, d.alone) for d in p.poll(BOB, 3).granted] == [(3, 4, True)]
    p.ack((3, 4))
    assert spans(p.poll(BOB, 5)) == [(5, 8)]


def test_a_member_that_is_busy_drains_first() -> None:
    p = Partition(4)
    p.poll(ANN, None, 2)
    p.lapse()
    busy = p.poll(BOB, None, empty_handed=False)
    assert (spans(busy), busy.draining) == ([], True)
    p.now += LEASE
    company = p.poll(BOB, None, empty_handed=False)
    assert ([d.alone for d in company.granted], company.draining) == ([False] * 3, False)
    p.lapse()
    p.poll(ANN)
    assert {d.failures for d in p.deliveries} == {0}, "in company nothing counts"


def test_empty_hands_never_get_a_suspect_in_company() -> None:
    """Or a poisonous message behind one that waits would kill its holders for ever and never be counted."""
    p = Partition(2)
    p.poll(ANN)
    p.retry(0, at=50_000)
    p.lapse()
    p.poll(BOB, None, empty_handed=False)
    p.now += 5 * LEASE
    p.holder = Holder(BOB, "m2", p.now + LEASE)
    waiting = p.poll(BOB)
    assert (spans(waiting), waiting.draining) == ([(0, 0)], True)
    assert [(d.first, d.alone) for d in p.poll(BOB, 1).granted] == [(1, True)]


def test_whoever_asks_for_more_has_nothing_alone() -> None:
    p = Partition(2)
    p.poll(ANN)
    p.lapse()
    p.poll(BOB)
    assert [d.alone for d in p.held(BOB)] == [True]
    p.poll(BOB, 1)
    assert [(d.first, d.alone) for d in p.held(BOB)] == [(0, False), (1, True)]
    p.lapse()
    p.poll(ANN)
    assert [(d.first, d.failures) for d in p.deliveries] == [(0, 0), (1, 1)]


def test_a_message_that_kills_three_holders_alone_leaves() -> None:
    p = Partition(2)
    for token in range(1, 5):
        p.poll(token)
        p.lapse()
    unplaced = p.poll(9, None, dead=None)
    assert (unplaced.unplaced, unplaced.granted) == (((0, 0),), ())
    left = p.poll(9)
    assert [(d.first, d.failures, d.reason) for d in left.leaving] == [(0, 3, WENT_AWAY)]
    assert spans(left) == [(1, 1)], "its key goes on"
    assert p.poll(9, 2).leaving == ()
    p.now += 5000
    assert p.poll(9, 2).leaving[0].stamp == left.leaving[0].stamp, "its mover went away (I12)"


# ---- failing messages (I10) -------------------------------------------------------------------------


def test_attempts_are_used_up() -> None:
    p = Partition(2)
    p.poll(ANN)
    for attempt in (2, 3):
        (kept,) = p.retry(0, at=p.now).kept
        assert (kept.attempt, kept.token, kept.failing_since) == (attempt, ANN, p.now or 0)
    assert p.retry(0, at=p.now, stamp=None).unplaced == ((0, 0),)
    assert [d.failures for d in p.retry(0, at=p.now).leaving] == [3]


def test_time_is_used_up() -> None:
    p = Partition(2)
    p.now = 100
    p.poll(ANN)
    assert p.retry(0, at=100 + HOLD).kept[0].failing_since == 100
    p.now = 100 + HOLD
    assert p.retry(1, at=p.now + HOLD).kept
    assert [d.first for d in p.retry(0, at=101 + HOLD).leaving] == [0]


def test_a_retry_said_twice_is_one_failure() -> None:
    p = Partition(1)
    p.poll(ANN)
    first = p.retry(0, at=500).kept
    assert p.retry(0, at=700).kept == first
    p.now = 500
    assert p.retry(0, at=700).kept[0].failures == 2


def test_a_stopped_message_stays_until_it_is_restarted() -> None:
    p = Partition(3, STOP)
    p.poll(ANN, None, 2)
    for _ in range(3):
        kept = p.retry(0, at=p.now, stamp=None).kept
    assert [(d.visible_at, d.failures) for d in kept] == [(FAR, 3)]
    p.lapse()
    assert [(d.first, d.visible_at) for d in p.poll(BOB).granted] == [(0, FAR)]  # and 1 is a suspect
    p.restart()
    told = p.poll(BOB, 1)
    assert (told.recall, told.granted) == (True, ())
    p.hand_over()
    fresh = p.poll(ANN).granted[0]
    assert (fresh.first, fresh.failures, fresh.failing_since, fresh.attempt) == (0, 0, 0, 4)


def test_a_stopped_message_is_never_settled_on_delivery() -> None:
    p = Partition(3, STOP)
    p.poll(ANN, None, 2)
    for _ in range(3):
        p.retry(0, at=p.now)
    p.hand_over()
    once = p.poll(BOB, None, on_delivery=True)
    assert (spans(once), once.settled) == ([(0, 0), (1, 1), (2, 2)], 2)
    assert [(d.first, d.visible_at) for d in p.deliveries] == [(0, FAR)]


# ---- a group that was ordered -----------------------------------------------------------------------


def test_parting_ways_leaves_to_the_holder_what_it_may_be_handling() -> None:
    p = Partition(4, STOP)
    p.poll(ANN)
    p.retry(0, at=9 * LEASE)
    for _ in range(3):
        p.retry(1, at=p.now)
    change = ordered.part_ways(p.deliveries, p.holder, p.now, p.cursor)
    assert [(d.first, d.last, d.token, d.visible_at) for d in change.put] == [
        (0, 0, NOBODY, 9 * LEASE),
        (1, 1, NOBODY, 0),
        (2, 3, ANN, LEASE),
    ]


# ---- whatever happens -------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.sampled_from([0, LEASE])), max_size=30))
def test_polls_alone_bring_every_message_once_a_holder_and_in_order(
    steps: list[tuple[int, bool, int]],
) -> None:
    """Budgets, hand-overs and lapses of any kind: a holder that settles what it is given gets everything."""
    p, seen, position, token = Partition(20), list[int](), None, 1
    for messages, gives_up, wait in [*steps, *([(12, False, 0)] * 30)]:
        change = p.poll(token, position, messages)
        for first, last in spans(change):
            seen += range(first, last + 1)
            p.ack((first, last))
            position = last + 1
        if gives_up:
            p.hand_over()
            token, position = token + 1, None
        p.now += wait
    assert seen == list(range(20))
