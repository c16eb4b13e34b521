"""Who reads what: everything once, in few tasks of about equal weight."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from postroom.spark.planning import (
    Offsets,
    Partition,
    Snapshot,
    Span,
    advance,
    backlog,
    below_start,
    pack,
    until,
)

lists_of_spans = st.lists(st.tuples(st.integers(0, 50), st.integers(1, 300_000)), max_size=12).map(
    lambda found: [Span("t", n, n + 100, first, first + rows) for n, (first, rows) in enumerate(found)]
)


@given(
    wanted=lists_of_spans,
    cores=st.integers(1, 16),
    min_tasks=st.none() | st.integers(1, 40),
    max_rows=st.none() | st.integers(2000, 500_000),
)
def test_tasks_read_everything_once(
    wanted: list[Span], cores: int, min_tasks: int | None, max_rows: int | None
) -> None:
    tasks = pack(wanted, cores=cores, min_tasks=min_tasks, max_rows=max_rows)
    read: dict[int, list[Span]] = {}
    for task in tasks:
        assert task, "no task is empty"
        for span in task:
            read.setdefault(span.partition, []).append(span)
    assert set(read) == {span.partition for span in wanted}
    for span in wanted:
        pieces = sorted(read[span.partition], key=lambda piece: piece.first)
        assert (pieces[0].first, pieces[-1].end) == (span.first, span.end)
        assert all(one.end == two.first for one, two in pairwise(pieces))
        assert {piece.partition_id for piece in pieces} == {span.partition_id}
        assert max_rows is None or all(piece.rows <= max_rows for piece in pieces)
    total = sum(span.rows for span in wanted)
    if min_tasks and total >= min_tasks:
        assert len(tasks) >= min(min_tasks, total)
    if tasks:
        weights = [sum(span.rows for span in task) for task in tasks]
        assert max(weights) <= 2 * -(-total // len(tasks)), "about equal"


def test_there_are_as_many_tasks_as_asked_for() -> None:
    tasks = pack([Span("t", 0, 0, 0, 5)], cores=1, min_tasks=4)
    assert sorted(sum(span.rows for span in task) for task in tasks) == [1, 1, 1, 2]


def test_many_small_partitions_are_few_tasks() -> None:
    assert len(pack([Span("t", n, n, 0, 10) for n in range(64)], cores=4)) == 1
    assert len(pack([Span("t", n, n, 0, 10_000) for n in range(64)], cores=4)) == 4
    assert len(pack([Span("t", 0, 0, 0, 30_000_000)], cores=4)) == 30
    assert pack([], cores=4) == []


@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=8),
    starts=st.lists(st.integers(0, 50), min_size=8, max_size=8),
    limit=st.integers(1, 2000),
)
def test_a_limit_is_shared_by_backlog(sizes: list[int], starts: list[int], limit: int) -> None:
    begin = Offsets({("t", n): starts[n] for n in range(len(sizes))}, ids={"t": 1})
    now = Snapshot({("t", n): Partition(n, starts[n] + size) for n, size in enumerate(sizes)}, {"t": 1})
    taken = [advance(begin, now, limit).at["t", n] - starts[n] for n in range(len(sizes))]
    assert all(0 <= got <= size for got, size in zip(taken, sizes, strict=True))
    assert sum(taken) == min(limit, sum(sizes)), "kept, and used"
    if limit >= sum(1 for size in sizes if size):
        assert all(bool(got) == bool(size) for got, size in zip(taken, sizes, strict=True))


def test_a_limit_is_kept_with_more_partitions_than_messages() -> None:
    """And each of them has its turn, whatever comes meanwhile into the first ones."""
    ends = {("t", n): 3 for n in range(100)}
    at = Offsets(dict.fromkeys(ends, 0), ids={"t": 1})
    read: list[int] = []
    for _ in range(10):
        now = Snapshot({place: Partition(place[1], end) for place, end in ends.items()}, {"t": 1})
        end = advance(at, now, 10)
        moved = [place[1] for place in ends if end.at[place] > at.at[place]]
        assert backlog(at, end) == len(moved) == 10
        read += moved
        ends = {place: end + 50 * (place[1] < 5) for place, end in ends.items()}
        at = end
    assert sorted(read) == list(range(100))


def test_what_came_after_the_target_is_not_read() -> None:
    start = Offsets({("t", 0): 2}, ids={"t": 1})
    target = Snapshot({("t", 0): Partition(1, 5)}, {"t": 1})
    now = Snapshot({("t", 0): Partition(1, 9, sealed=True), ("t", 1): Partition(2, 4, before=(0,))}, {"t": 1})
    end = advance(start, until(now, target, start))
    assert (end.at, end.sealed) == ({("t", 0): 5}, frozenset())
    assert advance(end, until(now, target, end)) == end


def test_what_was_dropped() -> None:
    now = Snapshot({("t", 0): Partition(1, 9, start=4), ("t", 1): Partition(8, 9)})
    wanted = [Span("t", 0, 1, 2, 6), Span("t", 0, 1, 5, 6), Span("t", 1, 2, 0, 3), Span("t", 2, 3, 0, 1)]
    assert below_start(wanted, now) == [Span("t", 0, 1, 2, 4), Span("t", 1, 2, 0, 3), Span("t", 2, 3, 0, 1)]
