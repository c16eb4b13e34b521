"""Nobody takes all of what is there for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postroom.model.policy.fair_shares import FairShares

wishes = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 200)), max_size=60)


@given(st.integers(1, 500), wishes)
def test_all_together_never_have_more_than_there_is(most: int, asked: list[tuple[str, int]]) -> None:
    shares = FairShares()
    for who, count in asked:
        room = shares.room(who, most)
        shares.take(who, min(count, room))
        assert shares.total <= most


@given(st.integers(16, 500), wishes)
def test_whatever_others_have_taken_whoever_comes_finds_something(
    most: int, asked: list[tuple[str, int]]
) -> None:
    shares = FairShares()
    for who, count in asked:
        shares.take(who, min(count, shares.room(who, most)))
    assert shares.room("newcomer", most) >= most // 2**5


def test_what_is_given_back_is_there_again_and_its_owner_is_forgotten() -> None:
    shares = FairShares()
    shares.take("a", 5)
    assert (shares.room("a", 10), shares.room("b", 10), len(shares)) == (0, 3, 1)
    shares.take("a", -5)
    assert (shares.room("a", 10), shares.total, len(shares)) == (5, 0, 0)


def test_whoever_has_more_than_its_part_gets_no_more_and_owes_nothing() -> None:
    shares = FairShares()
    shares.take("a", 50)
    shares.take("b", 25)
    assert shares.room("a", 100) == 0
