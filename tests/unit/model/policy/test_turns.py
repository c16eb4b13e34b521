"""Whose turn it is (R41), and that within a line nothing is overtaken (I3)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postroom.model.policy.fair_queue import EACH_BYTES, TURN_BYTES, FairQueue

MB = 1024 * 1024


def everything(turns: FairQueue[str], size: int = MB) -> list[str]:
    found: list[str] = []
    while turns:
        found += turns.take(size=size, count=256)
    return found


def test_a_newcomer_is_in_what_is_taken_next() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(500):
        turns.add(("busy", 1), MB, f"busy {number}")
    turns.add(("quiet", 2), 100, "quiet")
    assert "quiet" in turns.take(size=4 * MB, count=256)


def test_many_small_ones_are_a_flood_too() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(5000):
        turns.add(("busy", 1), 10, f"busy {number}")
    turns.add(("quiet", 2), 10, "quiet")
    assert "quiet" in turns.take(size=4 * MB, count=256)


def test_a_producer_has_its_turn_beside_others_of_its_topic() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(100):
        turns.add(("orders", 1), MB, f"busy {number}")
    turns.add(("orders", 2), 100, "quiet")
    assert "quiet" in turns.take(size=4 * MB, count=256)


def test_a_topic_with_many_producers_has_one_turn() -> None:
    turns: FairQueue[str] = FairQueue()
    for producer in range(1000):
        for number in range(4):
            turns.add(("busy", producer), TURN_BYTES, f"busy {producer} {number}")
    turns.add(("quiet", 1), 100, "quiet")
    assert "quiet" in turns.take(size=4 * MB, count=256)


def test_equal_lines_get_equal_bytes() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(400):
        turns.add(("small", 1), 12 * 1024, f"small {number}")  # with its cost, a quarter of a turn
    for number in range(100):
        turns.add(("large", 1), 60 * 1024, f"large {number}")  # with its cost, a whole turn
    taken = turns.take(size=2 * MB, count=256)
    small = sum(12 * 1024 for name in taken if name.startswith("small"))
    large = sum(60 * 1024 for name in taken if name.startswith("large"))
    assert 0.6 < small / large < 1.2


def test_no_more_is_taken_than_was_asked_for() -> None:
    turns: FairQueue[str] = FairQueue()
    for number in range(10):
        turns.add(("orders", number), 1000, str(number))
    assert len(turns.take(size=2500, count=256)) == 3  # the third one reaches it
    assert len(turns.take(size=MB, count=4)) == 4
    assert len(turns.take(size=MB, count=256)) == 3
    assert not turns
    assert turns.take(size=MB, count=256) == []


def test_what_is_larger_than_many_turns_is_taken_all_the_same() -> None:
    turns: FairQueue[str] = FairQueue()
    turns.add(("one", 1), 100 * TURN_BYTES, "huge")
    turns.add(("other", 1), 100 * TURN_BYTES, "huge too")
    assert sorted(everything(turns)) == ["huge", "huge too"]


LINES = st.tuples(st.integers(0, 3), st.integers(0, 3))


@given(st.lists(st.tuples(LINES, st.integers(0, 3 * TURN_BYTES)), max_size=60), st.integers(1, MB))
def test_all_is_taken_once_and_each_line_in_its_order(
    added: list[tuple[tuple[int, int], int]], size: int
) -> None:
    turns: FairQueue[str] = FairQueue()
    for number, (line, cost) in enumerate(added):
        turns.add(line, cost, f"{line} {number}")
    found = everything(turns, size)
    assert sorted(found) == sorted(f"{line} {number}" for number, (line, _) in enumerate(added))
    for line in {line for line, _ in added}:
        mine = [int(name.rsplit(" ", 1)[1]) for name in found if name.startswith(f"{line} ")]
        assert mine == sorted(mine)


@given(st.lists(st.tuples(LINES, st.integers(0, 3 * TURN_BYTES)), min_size=1, max_size=60))
def test_nobody_waits_for_more_than_two_turns_of_each_other_line(
    added: list[tuple[tuple[int, int], int]],
) -> None:
    """A newcomer to a topic of its own that asks for little."""
    turns: FairQueue[str] = FairQueue()
    for line, cost in added:
        turns.add(line, cost, "other")
    turns.add((9, 9), 0, "mine")
    before = 0
    costs = 3 * TURN_BYTES + EACH_BYTES
    for taken in iter(lambda: turns.take(size=1, count=1)[0], "mine"):
        assert taken == "other"
        before += 1
    assert before * EACH_BYTES <= len({line[0] for line, _ in added}) * (2 * TURN_BYTES + costs)
