"""The clock of a database server is set while a queue is in use: what is promised then (I26).

The server's clock is moved where it is read, for all programs of a test at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import pytest

import postroom
from postroom.broker.broker import Broker
from postroom.broker.duties import CutStrays
from postroom.clock import CautiousTime, ToldClock
from postroom.endpoint.values import PollRequest
from postroom.store import SqlStore
from postroom.store.dialects.postgres import PostgresDialect

HOUR_MS = 3_600_000
LEASE = 2


def broker_of(mq: postroom.Connection) -> Broker:
    endpoint = mq._endpoint
    assert isinstance(endpoint, Broker) and isinstance(endpoint.store, SqlStore)
    return endpoint


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    honest = PostgresDialect.now

    def set_by(ms: int) -> None:
        monkeypatch.setattr(PostgresDialect, "now", f"{honest} + {ms}")

    return set_by


@pytest.fixture
async def open_programs(postgres_ready: str) -> AsyncIterator[list[postroom.Connection]]:
    async with AsyncExitStack() as stack:
        programs = [await stack.enter_async_context(postroom.connect(postgres_ready)) for _ in range(2)]
        await programs[0].create_topic("orders", partitions=1, retention="10m", keep="limits")
        yield programs


@pytest.mark.slow("waits for a server that fails or hangs")
@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_an_hour_on_takes_nothing_from_a_member_that_lives(
    open_programs: list[postroom.Connection],
    set_clock: Callable[[int], None],
    mode: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = open_programs
    await one.send("orders", b"1", key="k")
    how = {"mode": mode, "lease": LEASE}
    async with one.consumer("orders", "billing", **how) as first:  # type: ignore[arg-type]
        (message,) = await first.poll(1, wait=30)
        async with other.consumer("orders", "billing") as second:
            set_clock(HOUR_MS)
            assert await second.poll(wait=2 * LEASE) == []
            await message.ack()
    assert "was set by +36" in caplog.text


@pytest.mark.slow("waits for a server that fails or hangs")
async def test_ten_minutes_back_make_no_lease_last(
    open_programs: list[postroom.Connection], set_clock: Callable[[int], None]
) -> None:
    mq, _ = open_programs
    broker = broker_of(mq)
    await mq.send("orders", b"1")
    await mq.create_group("orders", "billing", lease=LEASE)
    duty = CutStrays(broker.store)
    await broker.in_thread(duty.run_once)
    request = PollRequest("orders", "billing", "killed", 4711, 10, 10_000, 0, True)
    assert (await broker.poll(request)).grants
    set_clock(-10 * 60_000)
    await mq.send("orders", b"2")  # whose answer tells what the time is
    await broker.in_thread(duty.run_once)
    async with mq.consumer("orders", "billing") as consumer, asyncio.timeout(60):
        found = set[bytes]()
        while len(found) < 2:
            message = await anext(consumer)
            found.add(message.value)
            await message.ack()


# ---- what is pure ----


class World:
    def __init__(self) -> None:
        self.steady_ms, self.ahead_ms = 1_000, 1_700_000_000_000

    def now_ms(self) -> int:
        return self.steady_ms + self.ahead_ms


def test_deletions_by_age_do_not_follow_a_step() -> None:
    world = World()
    doubts = list[int]()
    cautious = CautiousTime(world.now_ms, lambda: world.steady_ms, doubts.append)
    assert cautious.now_ms() == world.now_ms()
    world.steady_ms += 10_000
    assert cautious.now_ms() == world.now_ms()
    before = cautious.now_ms()
    world.ahead_ms += HOUR_MS
    for _ in range(6):
        world.steady_ms += 10_000
        cautious.now_ms()
    assert cautious.now_ms() - before == 75_000
    assert doubts == [HOUR_MS]
    world.ahead_ms -= HOUR_MS  # it was a mistake
    assert cautious.now_ms() == world.now_ms()
    world.ahead_ms += HOUR_MS
    for _ in range(4 * 360):
        world.steady_ms += 10_000
        cautious.now_ms()
    assert cautious.now_ms() == world.now_ms()  # it was none


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS, 500, -500])
def test_a_server_whose_clock_is_set_is_noticed_with_its_next_answer(step_ms: int) -> None:
    world, told = World(), list[float]()
    clock = ToldClock(lambda: world.steady_ms / 1000, told.append)
    for _ in range(3):
        clock.told(world.now_ms(), clock.begin())
        world.steady_ms += 1_000
    world.ahead_ms += step_ms
    clock.told(world.now_ms(), clock.begin())
    if abs(step_ms) > 1_000:
        assert [round(one / 1000) for one in told] == [step_ms // 1000]
        assert clock.stepped_ms == world.now_ms()
    else:
        assert told == [] and clock.stepped_ms == 0
