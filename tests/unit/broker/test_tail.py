"""The tail cache: what it gives back is right, without gaps, and its size is bounded."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postroom.broker.deliver.readable import TailCache
from postroom.store.contract import StoredBatch


def batch(base: int, records: int = 1, size: int = 10) -> StoredBatch:
    return StoredBatch(base, records, 0, b"x" * size)


def bases(found: list[StoredBatch]) -> list[int]:
    return [b.base_offset for b in found]


def read(tail: TailCache, offset: int, messages: int = 100, size: int = 10_000) -> list[int]:
    return bases(tail.read(1, offset, max_messages=messages, max_bytes=size))


def test_reads_from_the_batch_that_contains_the_offset() -> None:
    tail = TailCache(100_000)
    for base in (0, 10, 20):
        tail.add(1, batch(base, 10))
    assert read(tail, 0) == [0, 10, 20]
    assert read(tail, 15) == [10, 20]
    assert read(tail, 29) == [20]
    assert read(tail, 30) == []
    assert tail.read(2, 0, max_messages=1, max_bytes=1) == []


def test_stops_at_a_gap_left_by_another_process() -> None:
    tail = TailCache(100_000)
    for base in (0, 10, 30):
        tail.add(1, batch(base, 10))
    assert read(tail, 5) == [0, 10]
    assert read(tail, 20) == []
    assert read(tail, 30) == [30]


def test_limits_cut_but_one_batch_always_comes() -> None:
    tail = TailCache(100_000)
    for base in range(5):
        tail.add(1, batch(base, 1, 100))
    assert read(tail, 0, messages=2) == [0, 1]
    assert read(tail, 0, size=250) == [0, 1]
    assert read(tail, 0, size=1) == [0]


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    tail = TailCache(5_000)
    for base in range(1000):
        tail.add(1 + base % 2, batch(base, 1, 100))
    assert tail._bytes <= 5_000
    assert read(tail, 1) == []
    newest = tail.read(2, 999, max_messages=1, max_bytes=1)
    assert bases(newest) == [999]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=60), st.integers(0, 200), st.integers(1000, 4000))
def test_agrees_with_a_plain_list(sizes: list[int], offset: int, limit: int) -> None:
    tail, stored, base = TailCache(limit), [], 0
    for records in sizes:
        tail.add(1, batch(base, records))
        stored.append((base, base + records - 1))
        base += records
    found = tail.read(1, offset, max_messages=10**6, max_bytes=10**6)
    if found:
        assert found[0].base_offset <= offset <= found[0].last_offset
        assert [(b.base_offset, b.last_offset) for b in found] == stored[-len(found) :]
    else:
        kept = limit // 310
        assert offset >= base or len(stored) > kept or not any(a <= offset <= b for a, b in stored[-kept:])
