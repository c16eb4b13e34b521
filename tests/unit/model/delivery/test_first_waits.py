"""How long messages waited until they were first read: a small histogram, of the last minutes (R43)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from postroom.model.delivery.first_waits import noted, percentile, recent

PERIOD = 300_000


def of(*waits: int, now_ms: int = 0) -> str:
    text = ""
    for waited_ms in waits:
        text = noted(text, waited_ms, 1, now_ms=now_ms, period_ms=PERIOD)
    return text


def at(text: str, share: float, now_ms: int = 0) -> int | None:
    return percentile(recent(text, now_ms=now_ms, period_ms=PERIOD), share)


@given(st.integers(0, 50 * 86_400_000))
def test_a_wait_is_told_to_a_fifth(waited_ms: int) -> None:
    found = at(of(waited_ms), 0.5)
    assert found is not None and abs(found - waited_ms) <= 0.2 * waited_ms + 1


def test_half_and_most_are_told_apart() -> None:
    text = of(*[10] * 94, *[5_000] * 6)
    median, most = at(text, 0.5), at(text, 0.95)
    assert median is not None and median <= 12 and most is not None and most >= 4_000


def test_what_is_older_than_two_periods_is_forgotten() -> None:
    text = of(1_000)
    assert at(text, 0.5, now_ms=PERIOD) is not None
    assert at(text, 0.5, now_ms=2 * PERIOD) is None
    later = noted(text, 4, 1, now_ms=PERIOD, period_ms=PERIOD)
    assert at(later, 0.95, now_ms=PERIOD) == at(text, 0.95)
    assert at(later, 0.95, now_ms=2 * PERIOD) == at(of(4), 0.95)


@given(
    st.lists(st.tuples(st.integers(-5, 2**62), st.integers(1, 10**9), st.integers(0, 10**13)), max_size=300)
)
def test_it_never_outgrows_its_column(seen: list[tuple[int, int, int]]) -> None:
    text = ""
    for waited_ms, messages, now_ms in seen:
        text = noted(text, waited_ms, messages, now_ms=now_ms, period_ms=PERIOD)
    assert len(text) <= 1_200


def test_a_full_one_fits_its_column() -> None:
    text = ""
    for period in (0, 1):
        for _ in range(3):
            for bucket in range(70):
                text = noted(text, 2 ** (bucket // 2), 10_000, now_ms=period * PERIOD, period_ms=PERIOD)
    assert len(text) <= 1_200


@given(st.text(max_size=60))
def test_a_text_that_is_none_counts_as_empty_or_stops_nobody(text: str) -> None:
    again = noted(text, 50, 1, now_ms=0, period_ms=PERIOD)
    assert at(again, 0.5) is not None
