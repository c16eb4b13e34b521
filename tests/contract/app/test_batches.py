"""Handlers that take lists as one unit of work (R37), on every store."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass
from typing import Any

import pytest

import postroom
from postroom import App, Backoff, Batch, Connection, Dead, InvalidSetting, Message
from postroom.clock import ManualClock
from postroom.testing.fixture import run_until_idle
from tests.contract.stores import everywhere


@dataclass
class Order:
    id: int


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    return connection


def orders(count: int) -> list[Message]:
    return [Message(b'{"id": %d}' % n) for n in range(count)]


async def left(mq: Connection) -> int:
    return (await mq.lag("orders", "billing")).total.messages


@pytest.mark.slow("works for seconds")
@everywhere
async def test_a_list_is_one_unit_of_work(mq: Connection) -> None:
    app, got = App(mq), []

    @app.subscribe("orders", group="billing", batch=4, concurrency=1)
    async def bill(orders: list[Order], messages: Any) -> None:
        assert [message.value for message in messages] == [b'{"id": %d}' % order.id for order in orders]
        got.append([order.id for order in orders])

    await mq.send_many("orders", orders(10))
    assert (await run_until_idle(app)).errors == []
    assert got == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert await left(mq) == 0


async def test_a_list_is_no_larger_than_bytes_allow_but_takes_one_message(mq: Connection) -> None:
    app, got = App(mq), []

    @app.subscribe("orders", group="billing", batch=Batch(100, bytes=10), concurrency=1)
    def sizes(bodies: list[bytes]) -> None:
        got.append([len(body) for body in bodies])

    await mq.send_many("orders", [Message(b"x" * size) for size in (5, 5, 1, 50, 9, 2)])
    await run_until_idle(app)
    assert got == [[5, 5], [1], [50], [9], [2]]


async def test_a_failing_list_is_retried_whole_each_by_its_own_attempt(
    mq: Connection, clock: ManualClock
) -> None:
    app, seen = App(mq), []

    @app.subscribe("orders", group="billing", batch=10, concurrency=1, retry=Backoff(10, 2, "10m"))
    async def bill(orders: list[Order], messages: list[postroom.Received]) -> None:
        seen.append(sorted((order.id, m.attempt) for order, m in zip(orders, messages, strict=True)))
        if len(seen) < 3:
            raise ValueError("all of them")

    await mq.send_many("orders", orders(2))
    await run_until_idle(app)
    await mq.send("orders", b'{"id": 9}')
    clock.advance(10)
    await run_until_idle(app)
    assert seen == [[(0, 1), (1, 1)], [(0, 2), (1, 2), (9, 1)]]
    clock.advance(10)  # the second attempt waits 20 seconds, the first one of the newcomer 10
    await run_until_idle(app)
    assert seen[2:] == [[(9, 2)]]
    clock.advance(10)
    await run_until_idle(app)
    assert seen[3:] == [[(0, 3), (1, 3)]]
    assert await left(mq) == 0


@pytest.mark.slow("works for seconds")
@everywhere
async def test_part_of_a_list_may_be_settled_by_the_handler(mq: Connection, clock: ManualClock) -> None:
    """R37: what the handler settled keeps its verdict; the rest gets the verdict of the ending."""
    app, again = App(mq), []

    @app.subscribe("orders", group="billing", batch=10, concurrency=1, retry=Backoff(5, 1, 5))
    async def bill(orders: list[Order], messages: list[postroom.Received]) -> None:
        if messages[0].attempt > 1:
            again.append(sorted(order.id for order in orders))
            return
        await messages[0].ack()
        await messages[1].retry(delay=60)
        await messages[2].dead("by hand")
        raise ValueError("the rest")

    await mq.send_many("orders", orders(5))
    await run_until_idle(app)
    clock.advance(5)
    await run_until_idle(app)
    assert again == [[3, 4]]
    clock.advance(55)
    await run_until_idle(app)
    assert again == [[3, 4], [1]]
    assert [letter.reason for letter in await mq.dead_letters("orders", "billing")] == ["by hand"]
    assert await left(mq) == 0


async def test_a_misfit_does_not_take_its_list_along(mq: Connection) -> None:
    app, got = App(mq), []

    @app.subscribe("orders", group="billing", batch=10, concurrency=1)
    async def bill(orders: list[Order]) -> None:
        got.append([order.id for order in orders])

    await mq.send_many("orders", [Message(b'{"id": 1}'), Message(b"?"), Message(b'{"id": 3}')])
    await run_until_idle(app)
    await mq.send("orders", b"only misfits")
    await run_until_idle(app)
    assert got == [[1, 3]]
    assert {letter.value for letter in await mq.dead_letters("orders", "billing")} == {b"?", b"only misfits"}
    assert await left(mq) == 0


async def test_a_dead_list_is_dead_as_a_whole(mq: Connection) -> None:
    app = App(mq)

    @app.subscribe("orders", group="billing", batch=3)
    async def bill(orders: list[Order]) -> None:
        raise Dead("all")

    await mq.send_many("orders", orders(3))
    await run_until_idle(app)
    assert len(await mq.dead_letters("orders", "billing")) == 3


async def test_a_list_waits_for_others_only_while_it_lingers(mq: Connection) -> None:
    """The first message waits until the list is full; without linger it leaves at once."""
    lingering, hasty = App(mq), App(mq)
    full, alone = asyncio.Event(), asyncio.Event()
    lists: list[int] = []

    @lingering.subscribe("orders", group="billing", batch=(3, "1MB", "60s"))
    async def gather(bodies: list[bytes]) -> None:
        lists.append(len(bodies))
        full.set()

    @hasty.subscribe("orders", group="hasty", batch=3)
    async def at_once(bodies: list[bytes]) -> None:
        alone.set()

    async with lingering, hasty:
        for _ in range(3):
            assert lists == []
            alone.clear()
            await mq.send("orders", b"x")
            await asyncio.wait_for(alone.wait(), 10)
        await asyncio.wait_for(full.wait(), 10)
    assert lists == [3]
    assert await left(mq) == 0


async def test_what_lingers_when_the_app_stops_is_handed_back(mq: Connection) -> None:
    app, ran = App(mq), []

    @app.subscribe("orders", group="billing", batch=Batch(3, linger="60s"))
    async def gather(bodies: list[bytes]) -> None:
        ran.append(bodies)

    async with app:
        await mq.send("orders", b"x")
        async with asyncio.timeout(10):
            for _ in itertools.count():  # until a lane has it
                if app._workers[0].consumer.in_hand and not app._workers[0]._ready:
                    break
                await asyncio.sleep(0)
    assert ran == []
    async with mq.consumer("orders", group="billing") as consumer:
        (message,) = await consumer.poll(wait=10)
        assert message.attempt == 1


def test_batches_are_written_in_three_ways() -> None:
    assert Batch.of(7) == Batch(7) and Batch.of(None) is None
    assert Batch.of((7, "2KB", "1s")) == Batch(7, "2KB", "1s")
    assert Batch(7, "2KB", "500ms").size == 2048 and Batch(7, linger="500ms").linger_s == 0.5
    for wrong in (0, True, "3", (), (1, 2, 3, 4)):
        with pytest.raises(InvalidSetting):
            Batch.of(wrong)  # type: ignore[arg-type]
