"""The shard's clock from memory: near the server's, whatever the answers were waiting for (I16)."""

from __future__ import annotations

import random

import pytest

from postroom.clock import ToldClock

HOUR_MS = 3_600_000


class World:
    """A steady clock, and a server whose clock is somewhere else."""

    def __init__(self) -> None:
        self.steady_s, self.ahead_ms = 1000.0, 1.7e12
        self.clock = ToldClock(lambda: self.steady_s)

    @property
    def server_ms(self) -> float:
        return self.steady_s * 1000 + self.ahead_ms

    def ask(self, there_ms: float = 0.2, back_ms: float = 0.2) -> None:
        began = self.clock.begin()
        self.steady_s += there_ms / 1000
        said = int(self.server_ms)
        self.steady_s += back_ms / 1000
        self.clock.told(said, began)

    @property
    def error_ms(self) -> float:
        now = self.clock.now_ms()
        assert now is not None
        return abs(now - self.server_ms)


@pytest.fixture
def world() -> World:
    world = World()
    world.ask()
    return world


def test_it_knows_nothing_before_the_server_said_something() -> None:
    assert World().clock.now_ms() is None


def test_it_is_as_near_as_an_answer_is_quick(world: World) -> None:
    assert world.error_ms < 2
    world.steady_s += 3
    assert world.error_ms < 2


def test_answers_that_waited_for_a_lock_do_not_move_it(world: World) -> None:
    """They are read when the lock is there, after seconds; and for minutes there may be no others."""
    for _ in range(100):
        world.ask(there_ms=2_000)
    assert world.error_ms < 250  # what a clock may have drifted in 200 s
    world.ask()
    assert world.error_ms < 2


def test_it_follows_a_clock_that_drifts(world: World) -> None:
    draw = random.Random(1)
    for _ in range(1000):
        world.steady_s += 0.5
        world.ahead_ms += 0.1  # 200 parts in a million
        world.ask(draw.random() * 5, draw.random() * 5)
    assert world.error_ms < 8


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS, 50, -50])
def test_it_follows_a_clock_that_was_set(world: World, step_ms: int) -> None:
    world.ahead_ms += step_ms
    world.ask()
    assert world.error_ms < 2


def test_a_slow_first_answer_is_corrected_by_the_next_quick_one() -> None:
    world = World()
    world.ask(there_ms=3_000)
    assert world.error_ms < 1_510
    world.ask()
    assert world.error_ms < 2


def test_its_bounds_hold_and_what_it_has_reached_is_never_put_back() -> None:
    world, draw = World(), random.Random(7)
    reached = 0
    for _ in range(500):
        world.steady_s += draw.random() / 1000
        world.ask(draw.expovariate(1 / 30), draw.expovariate(1 / 30))
        least, most = world.clock.reached_ms(), world.clock.latest_ms()
        assert least is not None and most is not None
        assert least <= world.server_ms < most + 1
        assert least >= reached
        reached = least
