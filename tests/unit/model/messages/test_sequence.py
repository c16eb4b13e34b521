"""The sequence check against a naive model that never forgets and counts without wrapping."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import (
    AppendError,
    ProducerFenced,
    SequenceGap,
    StoreCorrupt,
    UnknownFate,
    UnknownProducer,
)
from postroom.model.messages.sequence import (
    MODULUS,
    SequenceState,
    check,
    expected,
    followed,
    next_sequence,
    recent,
    remember,
)

KEEP = 2
Outcome = int | None | type[AppendError]


def outcome(state: SequenceState | None, epoch: int, first: int, count: int) -> Outcome:
    try:
        return check(state, epoch, first, count)
    except AppendError as error:
        return type(error)


@dataclass
class Naive:
    """Every batch ever stored as (unwrapped first, count, offset); `start` is where the sequence began."""

    start: int
    epoch: int = 0
    batches: list[tuple[int, int, int]] = field(default_factory=list)
    end: int = 0  # next offset of the partition

    @property
    def next(self) -> int:
        return self.start + sum(count for _, count, _ in self.batches)

    def expects(self, epoch: int, first: int, count: int) -> Outcome:
        if self.batches and epoch < self.epoch:
            return ProducerFenced
        if epoch > self.epoch or not self.batches:
            return None if first == 0 else UnknownProducer
        for known_first, known_count, offset in self.batches[-KEEP:]:
            if (known_first, known_count) == (first, count):
                return offset
        if first == self.next:
            return None
        return SequenceGap if first > self.next else UnknownFate

    def store(self, epoch: int, first: int, count: int) -> None:
        if epoch > self.epoch:
            self.batches, self.start = [], 0
        self.epoch = epoch
        self.batches.append((first, count, self.end))
        self.end += count + 3  # others write in between


# Before the walk one batch ends just below `start`, so that a walk meets the wrap at its 1st … 5th message.
@pytest.mark.parametrize("start", [0, 1, MODULUS - 1, MODULUS - 2, MODULUS - 4])
def test_every_walk_agrees_with_the_naive_model(start: int) -> None:
    counts = (1, 2, 3)
    for steps in itertools.product(counts, repeat=4):
        naive, state = Naive(start), None
        if start:
            naive.start = start - 1
            naive.batches.append((start - 1, 1, 0))
            naive.end = 1
            state = remember(None, 0, start - 1, 1, 0, KEEP)
        for stored in steps:
            for first, count, epoch in itertools.product(range(start - 2, start + 14), counts, (0, 1)):
                if first >= 0 and not (
                    start and epoch and first == MODULUS
                ):  # there a wrapped 0 starts the epoch
                    got = outcome(state, epoch, first % MODULUS, count)
                    assert got == naive.expects(epoch, first, count), (steps, stored, epoch, first, count)
            first = naive.next
            state = remember(state, 0, first % MODULUS, stored, naive.end, KEEP)
            naive.store(0, first, stored)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-6, 6), st.integers(1, 4)), max_size=60))
def test_random_producers_agree_with_the_naive_model(tries: list[tuple[int, int, int]]) -> None:
    naive, state = Naive(0), None
    for newer, distance, count in tries:
        epoch = naive.epoch + newer - 1
        first = max(0, (0 if newer == 2 else naive.next) + distance)
        wanted = naive.expects(epoch, first, count)
        assert outcome(state, epoch, first, count) == wanted
        if wanted is None:
            state = remember(state, epoch, first, count, naive.end, KEEP)
            naive.store(epoch, first, count)
            assert len(recent(state)) == min(KEEP, len(naive.batches))
            assert expected(state) == naive.next


def test_a_repeat_across_the_wrap_returns_its_first_offset() -> None:
    state = remember(None, 0, MODULUS - 2, 5, 700, keep=8)
    assert recent(state) == [(MODULUS - 2, 2, 700)]
    assert check(state, 0, MODULUS - 2, 5) == 700
    assert check(state, 0, 3, 1) is None
    assert outcome(state, 0, 4, 1) is SequenceGap
    assert outcome(state, 0, 2, 1) is UnknownFate
    assert outcome(state, 0, MODULUS - 1, 1) is UnknownFate


def test_a_partial_overlap_is_never_success() -> None:
    state = remember(None, 0, 0, 10, 0, keep=8)
    for first, count in ((0, 9), (0, 11), (1, 9), (9, 1), (5, 10)):
        assert outcome(state, 0, first, count) is UnknownFate


def test_a_forgotten_batch_is_of_unknown_fate_not_a_gap() -> None:
    state = None
    for number in range(10):
        state = remember(state, 0, number, 1, number, keep=8)
    assert outcome(state, 0, 1, 1) is UnknownFate
    assert outcome(state, 0, 2, 1) == 2


def test_only_the_gap_is_retriable() -> None:
    assert SequenceGap.retriable
    assert not any(error.retriable for error in (UnknownFate, UnknownProducer, ProducerFenced))


def test_a_new_epoch_starts_at_zero_and_fences_the_old() -> None:
    state = remember(None, 3, 0, 4, 100, keep=8)
    assert outcome(state, 4, 4, 1) is UnknownProducer
    assert check(state, 4, 0, 4) is None  # not the repeat of epoch 3
    state = remember(state, 4, 0, 4, 200, keep=8)
    assert recent(state) == [(0, 3, 200)]
    assert outcome(state, 3, 0, 4) is ProducerFenced


def test_next_sequence_wraps() -> None:
    assert next_sequence(MODULUS - 1, 1) == 0
    assert next_sequence(MODULUS - 3, 10) == 7
    assert next_sequence(0, 5) == 5
    assert expected(remember(None, 0, MODULUS - 1, 1, 0, keep=8)) == 0


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (MODULUS, 1), (0, 0), (0, -1), (0, MODULUS)])
def test_impossible_batches_are_the_callers_fault(first: int, count: int) -> None:
    with pytest.raises(ValueError, match="no batch has"):
        check(None, 0, first, count)


def test_something_must_be_remembered() -> None:
    with pytest.raises(ValueError, match="at least one"):
        remember(None, 0, 0, 1, 0, keep=0)


@given(st.integers(0, 2**15 - 1), st.lists(st.integers(1, 1000), min_size=1, max_size=12), st.integers(1, 8))
def test_the_newest_batches_are_remembered(epoch: int, counts: list[int], keep: int) -> None:
    state, first, stored = None, 0, []
    for number, count in enumerate(counts):
        state = remember(state, epoch, first, count, number, keep)
        stored.append((first, first + count - 1, number))
        first += count
    assert state is not None
    assert recent(state) == stored[-keep:]
    assert len(state) == 3 + 16 * len(stored[-keep:])


def test_the_packed_form_is_fixed() -> None:
    packed = remember(None, 2, 5, 5, 77, keep=8)
    assert packed.hex() == "0100020000000500000009000000000000004d"


@pytest.mark.parametrize("packed", [b"", b"\x01\x00", b"\x02\x00\x00", b"\x01\x00\x00" + bytes(15)])
def test_damaged_states_are_refused(packed: bytes) -> None:
    with pytest.raises(StoreCorrupt):
        recent(packed)
    with pytest.raises(StoreCorrupt):
        check(packed, 0, 0, 1)
    with pytest.raises(StoreCorrupt):
        remember(packed, 0, 0, 1, 0, keep=8)


@given(
    st.integers(0, MODULUS - 1), st.integers(0, 3), st.integers(0, 3), st.integers(1, 5), st.integers(-2, 2),
    st.integers(1, 4),
)  # fmt: skip
def test_what_follows_is_what_is_checked_and_remembered(
    start: int, epoch: int, other: int, count: int, apart: int, keep: int
) -> None:
    state = remember(None, epoch, start, count, 5, keep)
    first = (next_sequence(start, count) + apart) % MODULUS
    after = followed(state, other, first, count, 9, keep)
    if other == epoch and apart == 0:
        assert check(state, other, first, count) is None
        assert after == remember(state, other, first, count, 9, keep)
    else:
        assert after is None
    assert followed(state[:3], epoch, 0, count, 9, keep) is None  # nothing is remembered
    with pytest.raises(StoreCorrupt):
        followed(state + b"x", epoch, first, count, 9, keep)
