from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import InvalidSetting
from postroom.model.delivery.retry import Backoff


def test_doubles_up_to_the_limit() -> None:
    backoff = Backoff(1, 2, "10s")
    assert [backoff.delay_ms(attempt) for attempt in range(1, 7)] == [1000, 2000, 4000, 8000, 10_000, 10_000]


def test_defaults_are_one_second_doubling_to_ten_minutes() -> None:
    assert Backoff() == Backoff(1, 2, "10m")
    assert Backoff().delay_ms(1) == 1000
    assert Backoff().delay_ms(100) == 600_000


def test_equal_however_the_durations_are_written() -> None:
    assert Backoff("1s", 2, timedelta(minutes=10)) == Backoff(1, 2, "10m")
    assert hash(Backoff("1s", 2, 600)) == hash(Backoff(1, 2, "10m"))
    assert Backoff(1, 2, "10m") != Backoff(1, 2, "11m")


@pytest.mark.parametrize("factor", [1, 1.5, 2, 1000])
def test_a_huge_attempt_does_not_overflow(factor: float) -> None:
    assert Backoff("1ms", factor, "1h").delay_ms(10_000) == (1 if factor == 1 else 3_600_000)
    assert Backoff(0, factor, "1h").delay_ms(10_000) == 0


def test_fraction_spreads_by_a_fifth() -> None:
    backoff = Backoff(10, 2, "20s")
    assert backoff.delay_ms(1, 0.5) == 11_000
    assert 11_990 < backoff.delay_ms(1, 0.9999) < 12_000
    assert backoff.delay_ms(50, 0.5) == 22_000  # also at the limit, where most messages meet


@given(st.integers(1, 10_000), st.floats(1, 1000), st.floats(0, 1, exclude_max=True))
def test_never_shrinks_and_never_passes_the_limit(attempt: int, factor: float, fraction: float) -> None:
    backoff = Backoff(1, factor, 3600)
    assert 1000 <= backoff.delay_ms(attempt) <= backoff.delay_ms(attempt + 1) <= 3_600_000
    assert (
        backoff.delay_ms(attempt)
        <= backoff.delay_ms(attempt, fraction)
        <= 1.2 * backoff.delay_ms(attempt) + 1
    )


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((-1,), "Backoff.first"),
        (("soon",), "Backoff.first"),
        ((1, 2, "later"), "Backoff.limit"),
        ((10, 2, "5s"), "Backoff.limit"),
        ((1, 0.5), "Backoff.factor"),
        ((1, True), "Backoff.factor"),
        ((1, float("nan")), "Backoff.factor"),
        ((1, float("inf")), "Backoff.factor"),
        ((1, "2"), "Backoff.factor"),
    ],
)
def test_wrong_settings_are_named(arguments: tuple[Any, ...], name: str) -> None:
    with pytest.raises(InvalidSetting, match=name):
        Backoff(*arguments)


@pytest.mark.parametrize(("attempt", "fraction"), [(0, 0.0), (-1, 0.0), (1, 1.0), (1, -0.1)])
def test_a_caller_out_of_range_is_told(attempt: int, fraction: float) -> None:
    with pytest.raises(ValueError, match=r"attempts count from 1|fraction must be"):
        Backoff().delay_ms(attempt, fraction)
