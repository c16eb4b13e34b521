"""Rates (R40, I17): what passes within any time, and that nothing is ever stuck."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.errors import InvalidName, InvalidSetting
from postroom.model.policy.rate import (
    BURST_US,
    NOTHING,
    Rate,
    Spent,
    debt_us,
    give_back,
    group_rate,
    producer_rate,
    spend,
    topic_rate,
)

SECOND = 1_000_000
NOW = 1_700_000_000 * SECOND


def taken(rate: Rate, *schedule: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    """(when it may be used, messages, bytes) of spends (pause before it, messages, bytes)."""
    spent, now, found = NOTHING, NOW, []
    for pause, messages, size in schedule:
        now += pause
        spent, usable = spend(spent, rate, now, messages, size)
        found.append((usable, messages, size))
    return found


def waits(rate: Rate, *messages: int) -> list[float]:
    return [(usable - NOW) / SECOND for usable, _, _ in taken(rate, *((0, n, 0) for n in messages))]


# ---- single decisions ------------------------------------------------------------------------------------


def test_a_burst_then_the_rate() -> None:
    assert waits(topic_rate("t", 2), *[1] * 6) == [0, 0, 0, 0.5, 1, 1.5]


def test_a_group_saves_up_less() -> None:
    assert waits(group_rate("t", "g", 20), *[1] * 6) == pytest.approx([0, 0, 0, 0.05, 0.1, 0.15])


def test_rates_below_one_a_second() -> None:
    assert waits(group_rate("t", "g", 0.5), 1, 1, 1) == pytest.approx([0, 1.9, 3.9])
    assert waits(topic_rate("t", 0.5), 1, 1, 1) == pytest.approx([0, 1, 3])


def test_a_batch_larger_than_a_second_goes_into_debt() -> None:
    assert waits(topic_rate("t", 10), 1000, 1, 1) == pytest.approx([0, 99, 99.1])


def test_debt_ends_with_time() -> None:
    rate = topic_rate("t", 10)
    spent, _ = spend(NOTHING, rate, NOW, 100, 0)
    assert debt_us(spent, rate, NOW) == 9 * SECOND
    assert debt_us(spent, rate, NOW + 9 * SECOND) == 0
    assert spend(spent, rate, NOW + 9 * SECOND, 1, 0)[1] == NOW + 9 * SECOND


def test_both_limits_count_at_the_moment_of_use() -> None:
    """While bytes are waited for, messages save up a burst of them, and not more."""
    rate = topic_rate("t", 10, 1000)
    spent, _ = spend(NOTHING, rate, NOW, 1, 61_000)  # 60 s of debt
    spent, usable = spend(spent, rate, NOW, 1, 0)
    assert usable == NOW + 60 * SECOND
    assert spent.messages_at == usable - SECOND + SECOND // 10


def test_what_is_given_back_was_never_taken() -> None:
    rate = topic_rate("t", 7, 300)
    spent, _ = spend(NOTHING, rate, NOW, 5, 100)
    after, _ = spend(spent, rate, NOW, 90, 9_000)
    assert give_back(after, rate, 90, 9_000) == spent
    assert give_back(spent, rate, -90, -9_000) == after


def test_no_limit_is_spent_on_nothing() -> None:
    spent, usable = spend(Spent(3, 4), Rate("topic:t"), NOW, 10**9, 10**12)
    assert (spent, usable) == (Spent(3, 4), NOW)


# ---- any schedule ----------------------------------------------------------------------------------------

PER_S = st.one_of(st.just(0), st.floats(0.001, 10), st.integers(1, 10_000), st.integers(1_000_000, 2**53))
SCHEDULES = st.lists(
    st.tuples(st.integers(0, 3 * SECOND), st.integers(0, 5000), st.integers(0, 10_000_000)),
    min_size=1,
    max_size=30,
)
KINDS = st.sampled_from(["topic:t", "group:t/g", "producer:p"])


def assert_kept(rate: Rate, uses: list[tuple[int, int, int]]) -> None:
    """Within any time no more than a burst, what the rate gives then, and one batch."""
    for per_s, which in ((rate.messages_per_s, 1), (rate.bytes_per_s, 2)):
        if not per_s:
            continue
        burst = per_s * BURST_US[rate.kind] / SECOND
        for first, last in itertools.combinations_with_replacement(range(len(uses)), 2):
            amount = sum(use[which] for use in uses[first : last + 1])
            most = burst + per_s * (uses[last][0] - uses[first][0]) / SECOND
            assert amount <= most * (1 + 1e-9) + uses[last][which] + 1e-6


@given(KINDS, PER_S, st.one_of(st.just(0), st.integers(1, 10**9)), SCHEDULES)
def test_the_rate_is_kept_within_any_time(
    name: str, messages_per_s: float, bytes_per_s: int, schedule: list[tuple[int, int, int]]
) -> None:
    rate = Rate(name, messages_per_s, bytes_per_s)
    assert_kept(rate, taken(rate, *schedule))


@given(KINDS, PER_S, st.one_of(st.just(0), st.integers(1, 10**9)), SCHEDULES)
def test_nothing_is_stuck_and_nobody_overtakes(
    name: str, messages_per_s: float, bytes_per_s: int, schedule: list[tuple[int, int, int]]
) -> None:
    """Each waits no longer than all before it cost, and not for itself, whatever it asks for."""
    rate = Rate(name, messages_per_s, bytes_per_s)
    uses = taken(rate, *schedule)
    assert uses == sorted(uses, key=lambda use: use[0])
    cost = 0
    for (usable, messages, size), asked in zip(
        uses, itertools.accumulate(s[0] for s in schedule), strict=True
    ):
        assert NOW + asked <= usable <= NOW + asked + cost
        for amount, per_s in ((messages, rate.messages_per_s), (size, rate.bytes_per_s)):
            cost += math.ceil(amount * SECOND / per_s) if per_s else 0


def test_every_schedule_of_a_few_spends() -> None:
    for per_s, kind in itertools.product((0.5, 1, 3), ("topic:t", "group:t/g")):
        rate = Rate(kind, per_s, 0)
        for schedule in itertools.product(itertools.product((0, SECOND // 4, 2 * SECOND), (1, 5)), repeat=4):
            assert_kept(rate, taken(rate, *((pause, messages, 0) for pause, messages in schedule)))


# ---- slices, names ---------------------------------------------------------------------------------------


def test_a_slice_is_a_tenth_of_a_second_and_never_nothing() -> None:
    assert topic_rate("t", 1000, 10_000).slice == (100, 1000)
    assert topic_rate("t", 0.5, 1).slice == (1, 1)
    assert topic_rate("t", 0, 100).slice == (0, 10)


def test_what_a_limit_is_about() -> None:
    assert (topic_rate("orders", 1).kind, topic_rate("orders", 1).subject) == ("topic", ("orders", "", ""))
    assert group_rate("orders", "billing", 1).subject == ("orders", "billing", "")
    assert producer_rate("a/b:c", 1).check().subject == ("", "", "a/b:c")


@pytest.mark.parametrize(
    "wrong",
    [{"messages_per_s": n} for n in (-1, 0.0001, float("nan"), float("inf"), 2**60, "9", True, None)]
    + [{"bytes_per_s": n} for n in (-1, 1.5, 2**60, "9", True, None)],
)
def test_amounts_that_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting, match=next(iter(wrong))):
        Rate("topic:orders", **wrong).check()


@pytest.mark.parametrize("name", ["topic:", "topic:a b", "topic:_x", "group:orders/", "group:orders/a.b"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidName):
        Rate(name, 1).check()


@pytest.mark.parametrize("name", ["producer:", "producer:a\nb", f"producer:{'x' * 121}", "queue:x", "orders"])
def test_other_names_that_are_refused(name: str) -> None:
    with pytest.raises(InvalidSetting):
        Rate(name, 1).check()
