"""A clock that does not step: it follows the wall clock, and never in a jump (I26)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.clock import FURTHEST_MS, Pace, SteadyClock

HOUR_MS = 3_600_000


class World:
    """A wall clock that somebody sets, and a steady one beside it."""

    def __init__(self) -> None:
        self.steady_ms, self.ahead_ms = 5_000, 1_700_000_000_000
        self.clock = SteadyClock(self.wall, lambda: self.steady_ms)

    def wall(self) -> int:
        return self.steady_ms + self.ahead_ms

    def pass_ms(self, ms: int, pieces: int = 50) -> None:
        for _ in range(pieces):
            self.steady_ms += ms // pieces
            self.clock.now_ms()

    @property
    def behind_ms(self) -> int:
        return self.wall() - self.clock.now_ms()


@pytest.fixture
def world() -> World:
    return World()


def test_it_begins_with_the_wall_clock_and_runs_with_it(world: World) -> None:
    assert world.behind_ms == 0
    world.pass_ms(HOUR_MS)
    assert world.behind_ms == 0


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS, 10 * 60_000, -10 * 60_000])
def test_a_step_is_followed_by_a_quarter_of_the_time_that_passes(world: World, step_ms: int) -> None:
    before = world.clock.now_ms()
    world.ahead_ms += step_ms
    assert world.clock.now_ms() == before
    world.pass_ms(40_000)
    sign = 1 if step_ms > 0 else -1
    assert abs(world.clock.now_ms() - (before + 40_000 + sign * 10_000)) <= 250  # it is seen a little later
    world.pass_ms(4 * abs(step_ms))
    assert world.behind_ms == 0


@pytest.mark.parametrize("days", [1, -1, 4000, -4000])
def test_a_step_that_cannot_be_followed_is_taken(world: World, days: int) -> None:
    world.ahead_ms += days * 24 * HOUR_MS
    world.pass_ms(1_000)
    assert world.behind_ms == 0


def test_a_second_step_while_one_is_followed(world: World) -> None:
    world.ahead_ms += HOUR_MS
    world.pass_ms(60_000)
    before = world.clock.now_ms()
    world.ahead_ms -= HOUR_MS  # it was a mistake
    world.pass_ms(1_000)
    assert 700 <= world.clock.now_ms() - before <= 1_300
    world.pass_ms(120_000)
    assert world.behind_ms == 0


def test_less_than_a_second_is_no_step(world: World) -> None:
    world.ahead_ms += 900
    world.pass_ms(10_000)
    assert world.behind_ms == 900


def test_a_thread_that_is_held_up_between_two_readings_sees_no_step() -> None:
    steady = [1_000]

    def wall() -> int:
        steady[0] += 60_000  # a minute passes before it is read, and one after
        found = steady[0] + 1_700_000_000_000
        steady[0] += 60_000
        return found

    clock = SteadyClock(lambda: steady[0] + 1_700_000_000_000, lambda: steady[0])
    clock.wall = wall
    assert clock.step_ms() == 0


@pytest.mark.parametrize("stops", [3, 1_000], ids=["now and then", "always"])
def test_a_process_that_stands_still_between_two_readings_is_not_ahead(stops: int) -> None:
    """What is delayed by such a clock would come early (R35)."""
    steady, left, most = [1_000], [stops], [0]

    def hold_up() -> None:
        if left[0] > 0:
            left[0] -= 1
            steady[0] += 700
            most[0] = 700

    def read_steady() -> int:
        found = steady[0]
        hold_up()
        return found

    clock = SteadyClock(lambda: steady[0] + 1_700_000_000_000, read_steady)
    left[0] = 0
    behind_ms = steady[0] + 1_700_000_000_000 - clock.now_ms()
    assert 0 <= behind_ms <= (0 if stops == 3 else most[0])


@given(
    st.integers(-FURTHEST_MS, FURTHEST_MS),
    st.lists(st.integers(0, 3 * HOUR_MS), min_size=2, max_size=6).map(sorted),
)
def test_it_never_goes_back_and_never_runs_away(step_ms: int, moments: list[int]) -> None:
    pace = Pace(0, 10**12, 10**12).after_step(0, 10**12 + step_ms)
    for one, other in pairwise(moments):
        went = pace.at(other) - pace.at(one)
        assert (other - one) * 3 // 4 - 1 <= went <= (other - one) * 5 // 4 + 1
        assert abs(pace.behind_ms(other)) <= abs(pace.behind_ms(one)) <= abs(step_ms)
