"""Time is the server's: a process whose own clock is wrong by a minute is right all the same (I16).

The clock of a child is shifted by replacing `time.time` and `time.time_ns` before it connects. Server and
test share the machine's clock, so what the test sees is the server's time.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack
from typing import Any

import pytest

import postroom
from tests.integration.processes.children import Connection, child, received
from tests.ready import Ground

LEASE_S, RETRY_S, DELAY_S = 1.5, 0.6, 1.0


def live_in_another_time(url: str, shift_s: float, topic: str, pipe: Connection) -> None:
    wall, wall_ns = time.time, time.time_ns
    time.time = lambda: wall() + shift_s
    time.time_ns = lambda: wall_ns() + int(shift_s * 1e9)
    asyncio.run(_live(url, topic, pipe))


async def _live(url: str, topic: str, pipe: Connection) -> None:
    async with postroom.connect(url) as mq:
        await mq.send(topic, b"plain")
        receipt = await mq.send(topic, b"later", delay=DELAY_S)
        assert receipt.due is not None
        pipe.send(("due", receipt.due.timestamp() * 1000))
        async with mq.consumer(topic, "mine", lease=LEASE_S) as consumer:
            (plain,) = await consumer.poll(max_messages=1, wait=10)
            begin = time.monotonic()
            await plain.retry(delay=RETRY_S)
            again = plain
            while again.attempt == 1:
                (again,) = await consumer.poll(max_messages=1, wait=10)
                await again.ack()
            pipe.send(("again", again.value, again.attempt, time.monotonic() - begin))
            pipe.send(("timestamp", plain.timestamp))
        async with mq.consumer(topic, "held", lease=LEASE_S) as consumer:
            held = [(await consumer.poll(max_messages=1, wait=10))[0].value]
            pipe.send(("holding", held))
            await asyncio.sleep(60)  # stopped by the test: no more heartbeats


@pytest.fixture
async def topics(ground: Ground) -> dict[str, float]:
    shifts = {"early": -60.0, "late": 60.0}
    async with postroom.connect(ground.url) as mq:
        for topic in shifts:
            await mq.create_topic(topic, partitions=1)
    return shifts


async def test_a_process_whose_clock_is_wrong_by_a_minute(ground: Ground, topics: dict[str, float]) -> None:
    """Time stamps, due times, retries and leases, of one that is early and one that is late, side by side."""
    with ExitStack() as stack:
        lives = {
            topic: stack.enter_context(child(live_in_another_time, ground.url, shift, topic))
            for topic, shift in topics.items()
        }
        async with postroom.connect(ground.url) as mq:
            await asyncio.gather(*(watch(mq, topic, *life) for topic, life in lives.items()))


async def watch(mq: postroom.Connection, topic: str, process: Any, pipe: Connection) -> None:
    async with mq.consumer(topic, "watching") as consumer:
        began_ms = time.time() * 1000
        arrived = {}
        while len(arrived) < 2:
            for message in await consumer.poll(wait=20):
                arrived[message.value] = time.time() * 1000
                await message.ack()
        _, due = await told(pipe)
        assert -1 <= arrived[b"later"] - due < 1_500, "a delayed message came early, or late"
        assert 0 < due - began_ms < DELAY_S * 1000 + 8_000
    _, value, attempt, after_s = await told(pipe)
    assert (value, attempt) == (b"plain", 2) and RETRY_S - 0.02 <= after_s < RETRY_S + 2
    _, timestamp = await told(pipe)
    assert began_ms - 5_000 < timestamp < time.time() * 1000 + 1_000
    await taken_over_after_one_lease(mq, topic, process, pipe)


async def taken_over_after_one_lease(
    mq: postroom.Connection, topic: str, process: Any, pipe: Connection
) -> None:
    """Not before: its clock says that the lease is over, or that it lasts for a minute yet."""
    _, held = await told(pipe)
    os.kill(process.pid, signal.SIGSTOP)
    begin = time.monotonic()
    async with mq.consumer(topic, "held") as consumer:
        while True:
            messages = await consumer.poll(max_messages=1, wait=20)
            values = [m.value for m in messages]
            await consumer.ack(messages)
            if values == held:
                break
    assert LEASE_S / 2 < time.monotonic() - begin < LEASE_S + 20


async def told(pipe: Connection) -> Any:
    return await asyncio.to_thread(received, pipe)


async def test_a_message_expires_by_the_server_s_clock(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the consumer's clock is a minute late or early."""
    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send("orders", b"a minute", expires=30)
        await mq.send("orders", b"a moment", expires=0.2)
        await asyncio.sleep(0.3)
        for number, shift_s in enumerate((60, -60)):
            monkeypatch.setattr(time, "time_ns", lambda shift_s=shift_s: int((WALL() + shift_s) * 1e9))
            async with (
                postroom.connect(ground.url) as other,
                other.consumer("orders", f"group-{number}") as consumer,
            ):
                assert [m.value for m in await consumer.poll(wait=10)] == [b"a minute"]


WALL = time.time
