from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from postroom.wire.client.pool import ranked

KEYS = [f"p{i}" for i in range(2000)]


def brokers(*ids: str) -> list[tuple[str, str]]:
    return [(id, "") for id in ids]


@given(st.lists(st.tuples(st.text(min_size=1, max_size=5), st.sampled_from(["", "east", "west"])), max_size=6,
                unique_by=lambda one: one[0]), st.text(max_size=5), st.randoms())  # fmt: skip
def test_the_order_is_the_same_for_everybody(
    known: list[tuple[str, str]], key: str, random: st.DataObject
) -> None:
    shuffled = list(known)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ranked(key, known, "east") == ranked(key, shuffled, "east")
    assert sorted(ranked(key, known)) == sorted(id for id, _ in known)


def test_keys_are_spread_evenly() -> None:
    firsts = Counter(ranked(key, brokers("a", "b", "c", "d"))[0] for key in KEYS)
    assert all(400 < count < 600 for count in firsts.values())


def test_only_the_keys_of_a_broker_that_goes_move() -> None:
    for key in KEYS:
        before = ranked(key, brokers("a", "b", "c"))
        after = ranked(key, brokers("a", "b"))
        assert after == [id for id in before if id != "c"]


def test_a_broker_that_comes_takes_its_share_and_moves_nothing_else() -> None:
    moved = 0
    for key in KEYS:
        before, after = ranked(key, brokers("a", "b"))[0], ranked(key, brokers("a", "b", "c"))[0]
        assert after in (before, "c")
        moved += after == "c"
    assert 550 < moved < 790


def test_brokers_of_the_own_zone_come_first() -> None:
    known = [("a", "east"), ("b", "west"), ("c", "east"), ("d", "")]
    for key in KEYS[:200]:
        assert set(ranked(key, known, "east")[:2]) == {"a", "c"}
        assert ranked(key, known, "west")[0] == "b"
    firsts = {ranked(key, known, "north")[0] for key in KEYS[:200]}
    assert firsts == {"a", "b", "c", "d"}  # of none of them: they are all the same
