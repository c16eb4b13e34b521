"""A consumer of a share group: the epochs of its session, and what it has acquired."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.model.share_session import (
    CLOSES,
    OPENS,
    Acknowledged,
    AckType,
    Acquired,
    EpochError,
    InvalidAckError,
    ShareSession,
    acknowledged,
    next_epoch,
)

PLACE = (UUID(int=7), 0)
LAST = 2**31 - 1


def acquired(first: int, last: int, until: int = 100, token: int = 5) -> Acquired:
    return Acquired(first, last, "orders", 3, 0, token, 1, until)


def opened() -> ShareSession:
    session = ShareSession()
    session.advance(OPENS)
    return session


def accepted(first: int, last: int) -> Acknowledged:
    return Acknowledged(first, last, AckType.ACCEPT)


def spans(rows: list[Acquired]) -> list[tuple[int, int]]:
    return [(row.first, row.last) for row in rows]


# ---- epochs ----


def test_requests_of_a_session_follow_one_another() -> None:
    session = opened()
    session.advance(1)
    session.advance(2)
    for wrong in (1, 2, 4, -2):
        with pytest.raises(EpochError):
            session.advance(wrong)
    session.advance(3)


def test_after_the_last_epoch_comes_the_first() -> None:
    session = opened()
    session.epoch = LAST
    session.advance(LAST)
    session.advance(1)
    assert next_epoch(1) == 2


def test_a_closed_session_takes_nothing_until_it_is_opened() -> None:
    session = opened()
    session.advance(CLOSES)
    for epoch in (1, CLOSES):
        with pytest.raises(EpochError):
            session.advance(epoch)
    session.advance(OPENS)
    session.advance(1)


def test_whoever_opens_it_again_names_its_partitions_anew_and_has_what_it_had() -> None:
    session = opened()
    session.partitions[PLACE] = None
    session.acquire(PLACE, acquired(0, 9))
    session.advance(OPENS)
    assert not session.partitions
    assert session.settle(PLACE, accepted(0, 9)) == ([acquired(0, 9)], True)


# ---- acknowledgements ----


def test_one_type_is_for_the_whole_range_and_many_are_for_each_offset() -> None:
    assert acknowledged([(0, 2**62, [1])]) == [accepted(0, 2**62)]
    found = acknowledged([(5, 8, [2, 2, 3, 0]), (10, 10, [1])])
    assert [(one.first, one.last, one.kind.name) for one in found] == [
        (5, 6, "RELEASE"),
        (7, 7, "REJECT"),
        (8, 8, "GAP"),
        (10, 10, "ACCEPT"),
    ]


@pytest.mark.parametrize(
    "batches",
    [
        [(5, 4, [1])],
        [(-1, 4, [1])],
        [(0, 4, [])],
        [(0, 4, [1, 1])],
        [(0, 4, [1]), (4, 6, [1])],
        [(5, 6, [1]), (0, 1, [1])],
        [(0, 0, [5])],
        [(0, 0, [-1])],
        [(0, 0, [4])],
    ],
)
def test_what_is_no_acknowledgement_is_refused(batches: list[tuple[int, int, list[int]]]) -> None:
    with pytest.raises(InvalidAckError):
        acknowledged(batches)


def test_a_lease_is_renewed_only_by_a_request_for_it() -> None:
    assert acknowledged([(0, 0, [4])], renews=True) == [Acknowledged(0, 0, AckType.RENEW)]


# ---- what is acquired ----


def test_what_is_settled_is_cut_out_of_what_was_acquired() -> None:
    session = opened()
    session.acquire(PLACE, acquired(0, 9))
    found, whole = session.settle(PLACE, accepted(3, 5))
    assert (spans(found), whole, session.in_flight) == ([(3, 5)], True, 7)
    found, whole = session.settle(PLACE, accepted(0, 9))
    assert (spans(found), whole, session.in_flight) == ([(0, 2), (6, 9)], False, 0)
    assert session.settle(PLACE, accepted(0, 9)) == ([], False)


def test_a_range_without_end_costs_no_more_than_what_was_acquired() -> None:
    session = opened()
    session.acquire(PLACE, acquired(10, 10))
    assert spans(session.settle(PLACE, accepted(0, 2**62))[0]) == [(10, 10)]


def test_nothing_is_settled_in_another_partition() -> None:
    session = opened()
    session.acquire(PLACE, acquired(0, 9))
    assert session.settle((PLACE[0], 1), accepted(0, 9)) == ([], False)
    assert session.settle((UUID(int=8), 0), accepted(0, 9)) == ([], False)


def test_what_is_acquired_again_has_the_new_token() -> None:
    session = opened()
    session.acquire(PLACE, acquired(0, 9))
    session.acquire(PLACE, acquired(4, 5, token=6))
    found, whole = session.settle(PLACE, accepted(0, 9))
    assert whole and [row.token for row in found] == [5, 6, 5]


def test_what_was_not_acknowledged_within_its_lease_is_forgotten() -> None:
    session = opened()
    session.acquire(PLACE, acquired(0, 4, until=50))
    session.acquire(PLACE, acquired(5, 9, until=51))
    session.forget_ended(50)
    assert session.in_flight == 5
    assert spans(list(session.drained())) == [(5, 9)]
    assert session.in_flight == 0


SPANS = st.tuples(st.integers(0, 40), st.integers(0, 8)).map(lambda one: (one[0], one[0] + one[1]))


@given(st.lists(st.tuples(st.booleans(), SPANS), max_size=30))
def test_it_has_what_was_acquired_and_not_settled(steps: list[tuple[bool, tuple[int, int]]]) -> None:
    session, naive = opened(), set[int]()
    for acquires, (first, last) in steps:
        offsets = set(range(first, last + 1))
        if acquires:
            session.acquire(PLACE, acquired(first, last))
            naive |= offsets
        else:
            found, whole = session.settle(PLACE, accepted(first, last))
            mine = {offset for row in found for offset in range(row.first, row.last + 1)}
            assert mine == naive & offsets and whole == (mine == offsets)
            naive -= offsets
        assert session.in_flight == len(naive)
    left = [offset for row in session.drained() for offset in range(row.first, row.last + 1)]
    assert left == sorted(naive)
