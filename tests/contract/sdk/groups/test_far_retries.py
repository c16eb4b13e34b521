"""Retries that are far away leave through the schedule, and do not hold back the log (I17, R17, R20)."""

from __future__ import annotations

import asyncio
from unittest import mock

import pytest

import postroom
from postroom import Connection, Received, StoreUnavailable
from postroom.broker.duties import Retention
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.endpoint.values import PollRequest, Settle, Verdict
from postroom.model.messages.batch import BatchBuilder
from postroom.store.contract import Append, Appended
from tests.contract.brokers import broker_of
from tests.contract.stores import embedded, everywhere

FAR = DEFAULTS.far_retry_ms / 1000
RETRIES = "orders.billing.retry"


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    await connection.create_group("orders", "billing", max_attempts=3)
    return connection


async def take(mq: Connection, group: str = "billing") -> tuple[postroom.Consumer, Received]:
    consumer = mq.consumer("orders", group=group)
    await consumer.__aenter__()
    (message,) = await consumer.poll(wait=10)
    return consumer, message


async def fail(mq: Connection, delay: float, group: str = "billing") -> Received:
    """Take the one message there is and hand it back until later."""
    consumer, message = await take(mq, group)
    await message.retry(delay, reason="not now")
    await consumer.close()
    return message


async def handle(mq: Connection, group: str = "billing") -> Received:
    consumer, message = await take(mq, group)
    await message.ack()
    await consumer.close()
    return message


async def waiting(mq: Connection) -> int:
    found = {info.name: info.delayed for info in await mq.topics(internal=True)}
    return found.get(RETRIES, 0)


@everywhere
async def test_a_far_retry_is_settled_here_and_comes_back_when_it_is_due(
    mq: Connection, clock: ManualClock
) -> None:
    await mq.create_group("orders", "audit")
    receipt = await mq.send("orders", b"a", key="k", headers={"h": "1"})
    first = await fail(mq, 2 * FAR)
    lag = await mq.lag("orders", "billing")
    assert (lag.total.messages, lag.partitions[0].committed) == (0, 1)
    assert await waiting(mq) == 1
    assert (await handle(mq, "audit")).value == b"a"
    clock.advance(2 * FAR)
    again = await handle(mq)
    assert (again.value, again.key, dict(again.headers)) == (b"a", b"k", {"h": b"1"})
    assert (again.topic, again.partition, again.offset, again.id) == ("orders", 0, 0, receipt.id)
    assert (first.attempt, again.attempt) == (1, 2)
    assert await waiting(mq) == 0
    assert (await mq.lag("orders", "audit")).total.messages == 0


async def test_not_before_its_time(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"a")
    await fail(mq, 2 * FAR)
    clock.advance(2 * FAR - 0.001)
    assert await waiting(mq) == 1
    clock.advance(0.001)
    assert await waiting(mq) == 0


@pytest.mark.parametrize(("delay", "leaves"), [(FAR, False), (FAR + 0.001, True)])
async def test_what_is_near_waits_in_its_partition(mq: Connection, delay: float, leaves: bool) -> None:
    await mq.send("orders", b"a")
    await fail(mq, delay)
    assert await waiting(mq) == int(leaves)
    assert (await mq.lag("orders", "billing")).total.messages == int(not leaves)


async def test_ordered_groups_keep_it_in_place(mq: Connection) -> None:
    await mq.create_group("orders", "strict", mode="ordered", max_hold="7d")
    await mq.send("orders", b"a")
    await fail(mq, 2 * FAR, "strict")
    assert (await mq.lag("orders", "strict")).total.messages == 1
    assert {info.name for info in await mq.topics(internal=True)} == {"orders"}


async def test_it_does_not_hold_back_retention(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("short", retention="1h", partitions=1)
    consumer = mq.consumer("short", group="billing")
    async with consumer:
        await mq.send("short", b"a")
        (message,) = await consumer.poll(wait=10)
        await message.retry("2h")
    clock.advance(3601)
    await asyncio.to_thread(Retention(broker_of(mq).store, DEFAULTS).run_once)
    assert (await mq.topic("short")).messages == 0
    clock.advance(3600)
    async with mq.consumer("short", group="billing") as consumer:
        (message,) = await consumer.poll(wait=10)
        assert message.value == b"a"


# ---- attempts ----


@everywhere
async def test_attempts_count_over_all_of_its_life(mq: Connection, clock: ManualClock) -> None:
    """Three of them: here, there, and there again; then it is a dead letter."""
    await mq.send("orders", b"a")
    attempts = []
    for _ in range(3):
        attempts.append((await fail(mq, 2 * FAR)).attempt)
        clock.advance(2 * FAR)
    assert attempts == [1, 2, 3]
    (letter,) = await mq.dead_letters("orders", "billing")
    assert (letter.value, letter.attempts, letter.reason) == (b"a", 3, "not now")
    assert (letter.topic, letter.offset) == ("orders", 0)


async def test_near_and_far_retries_count_together(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"a")
    attempts = []
    for delay in (1, 2 * FAR, 1):
        attempts.append((await fail(mq, delay)).attempt)
        clock.advance(delay)
    assert attempts == [1, 2, 3]
    (letter,) = await mq.dead_letters("orders", "billing")
    assert letter.attempts == 3


async def test_the_last_attempt_is_no_far_retry(mq: Connection) -> None:
    await mq.alter_group("orders", "billing", max_attempts=1)
    await mq.send("orders", b"a")
    await fail(mq, 2 * FAR)
    assert await waiting(mq) == 0
    assert len(await mq.dead_letters("orders", "billing")) == 1


async def test_what_is_redriven_begins_anew(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"a")
    for _ in range(3):
        await fail(mq, 2 * FAR)
        clock.advance(2 * FAR)
    assert await mq.redrive("orders", "billing") == 1
    assert (await fail(mq, 2 * FAR)).attempt == 1
    clock.advance(2 * FAR)
    assert (await handle(mq)).attempt == 2


async def test_several_of_one_delivery_leave_each_with_its_own_number(
    mq: Connection, clock: ManualClock
) -> None:
    """Of two far retries one has failed before: it is the only one to be a dead letter next time."""
    await mq.alter_group("orders", "billing", max_attempts=2)
    await mq.send("orders", b"old")
    await fail(mq, 2 * FAR)
    clock.advance(2 * FAR)
    broker = broker_of(mq)
    (place,) = (await broker.route(RETRIES)).ranges
    await broker._work.append([Append(place.partition_id, _batch(b"fresh"))])
    async with mq.consumer("orders", group="billing") as consumer:
        found = []
        while len(found) < 2:
            found += await consumer.poll(wait=10)
        await asyncio.gather(*(message.retry(2 * FAR) for message in found))
    assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [b"old"]
    assert await waiting(mq) == 1


def _batch(value: bytes) -> bytes:
    builder = BatchBuilder()
    builder.append(0, None, value, [])
    return builder.build()


# ---- cut off (I12) ----


async def test_a_move_that_was_cut_off_is_finished_once(mq: Connection, clock: ManualClock) -> None:
    """Before it is scheduled, and after that but before it is settled: the next poll takes it over."""
    broker = broker_of(mq)
    for turn, stored in enumerate((False, True)):
        await mq.send("orders", b"%d" % turn)
        append = broker._mover._append

        async def cut(some: list[Append], stored: bool = stored, append: object = append) -> list[Appended]:
            if stored:
                await append(some)  # type: ignore[operator]
            raise StoreUnavailable("cut off")

        with mock.patch.object(broker._mover, "_append", cut):
            await fail(mq, 2 * FAR)
        assert (await mq.lag("orders", "billing")).total.messages == 1
        clock.advance(11)  # another may take it over now
        async with mq.consumer("orders", group="billing") as consumer:
            async with asyncio.timeout(20):
                while (await mq.lag("orders", "billing")).total.messages:
                    assert await consumer.poll(wait=0.3) == []
        assert await waiting(mq) == 1
        clock.advance(2 * FAR)
        again = await handle(mq)
        assert (again.value, again.attempt) == (b"%d" % turn, 2)


@embedded("its mover is cut off")
async def test_retention_may_take_some_of_a_move_that_was_cut_off(mq: Connection, clock: ManualClock) -> None:
    """What was stored is known by its identity, also when it cannot be read as a whole any more."""
    broker = broker_of(mq)
    await mq.send_many("orders", [postroom.Message(b"%d" % number) for number in range(3)])
    await broker.poll(PollRequest("orders", "billing", "ann", 7, 10, 2**20, 5000, True))
    (place,) = (await mq.route("orders")).ranges
    append = broker._mover._append

    async def cut(some: list[Append]) -> list[Appended | BaseException]:
        await append(some)
        raise StoreUnavailable("cut off")

    with mock.patch.object(broker._mover, "_append", cut):
        dead = Settle("orders", place.partition_id, 7, (Verdict("dead", 0, 2, reason="bad"),))
        await broker.settle("orders", "billing", [dead])
    broker.store.log.trim(place.partition_id, 1)
    clock.advance(11)  # another may take it over now
    async with asyncio.timeout(20), mq.consumer("orders", group="billing") as consumer:
        while (await mq.lag("orders", "billing")).total.messages:
            assert await consumer.poll(wait=0.3) == []
    assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [b"0", b"1", b"2"]


async def test_a_far_retry_is_listed_in_the_groups_own_topic_and_a_near_one_is_not(mq: Connection) -> None:
    await mq.send("orders", b"a", id="o-1")
    await fail(mq, FAR + 1)
    (far,) = await mq.delayed(RETRIES)
    assert (far.id, far.value) == ("o-1", b"a")
    await mq.send("orders", b"b")
    await fail(mq, FAR - 1)
    assert await mq.delayed("orders") == [] and len(await mq.delayed(RETRIES)) == 1
