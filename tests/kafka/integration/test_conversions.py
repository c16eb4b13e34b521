"""A group that nobody uses is converted between Kafka clients and native ones, and goes on where it was."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer

import postroom
from postroom import Connection, GroupConflict, GroupLive, InvalidSetting, UnknownGroup
from postroom.model.policy.settings import Mode
from tests.kafka.integration.clients import PATIENCE_S

VALUES = [b"%d" % number for number in range(10)]


def consumed(address: str, count: int, *, leave: bool = True) -> Any:
    """The next so many values of a group of librdkafka's; it commits them, and goes if it is to `leave`."""
    settings = {"bootstrap.servers": address, "group.id": "billing", "enable.auto.commit": False}
    consumer = Consumer({**settings, "auto.offset.reset": "earliest", "session.timeout.ms": 6000})
    consumer.subscribe(["orders"])
    found: list[bytes] = []
    while len(found) < count:
        messages = consumer.consume(count - len(found), timeout=PATIENCE_S)
        assert messages, f"only {found}"
        for message in messages:
            assert message.error() is None, message.error()
            found.append(message.value())
    if count:
        consumer.commit(asynchronous=False)
    if leave:
        consumer.close()
    return (found, consumer)


async def by_kafka(address: str, count: int) -> list[bytes]:
    return list((await asyncio.to_thread(consumed, address, count))[0])


async def natively(mq: Connection, count: int, mode: Mode) -> list[bytes]:
    found: list[bytes] = []
    async with mq.consumer("orders", group="billing", mode=mode) as consumer, asyncio.timeout(PATIENCE_S):
        while len(found) < count:
            for message in await consumer.poll(max_messages=count - len(found), wait=5):
                found.append(message.value)
                await message.ack()
    return found


async def filled(mq: Connection) -> None:
    await mq.create_topic("orders", kafka_partitions=1)
    for value in VALUES:
        await mq.send("orders", value)


@pytest.mark.slow("waits for clients of Kafka")
@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_a_group_of_kafka_clients_becomes_native_and_kafkas_again(
    queue: Connection, address: str, mode: Mode
) -> None:
    await filled(queue)
    assert await by_kafka(address, 4) == VALUES[:4]
    plan = await queue.convert_group("orders", "billing", mode, dry_run=True)
    assert [(one.before, one.after, one.again) for one in plan.partitions] == [(4, 4, 0)]
    assert [one.settings.mode for one in await queue.groups("orders")] == ["kafka"], "nothing was done"
    done = await queue.convert_group("orders", "billing", mode)
    assert (done.settings.mode, done.partitions) == (mode, plan.partitions)
    assert [one.settings.mode for one in await queue.groups("orders")] == [mode]
    assert (await queue.lag("orders", "billing")).total.messages == 6
    assert await natively(queue, 3, mode) == VALUES[4:7]
    back = await queue.convert_group("orders", "billing", "kafka")
    assert [(one.after, one.again) for one in back.partitions] == [(7, 0)]
    assert [one.settings.mode for one in await queue.groups("orders")] == ["kafka"]
    assert await by_kafka(address, 3) == VALUES[7:]


async def test_what_a_shared_group_settled_out_of_order_comes_again_and_that_is_said(
    queue: Connection, address: str
) -> None:
    await filled(queue)
    async with queue.consumer("orders", group="billing") as consumer:
        messages = await consumer.poll(max_messages=8, wait=30)
        await consumer.ack([one for one in messages if one.offset != 5])
    plan = await queue.convert_group("orders", "billing", "kafka")
    assert [(one.before, one.after, one.again, one.skipped) for one in plan.partitions] == [(5, 5, 2, 0)]
    assert await by_kafka(address, 5) == VALUES[5:]


@pytest.mark.slow("waits for clients of Kafka")
async def test_offsets_are_carried_over_moves_both_ways(tmp_path: Path) -> None:
    """Kafka's offsets go on over a move, native ones begin at 0 again (I28); gates open (I10)."""
    url, other = f"sqlite:///{tmp_path}/q.db", f"sqlite:///{tmp_path}/other.db"
    async with (
        postroom.connect(url, shards={"other": other}) as mq,
        await mq.serve(port=0, kafka=0) as served,
    ):
        assert served.kafka is not None
        await mq.create_topic("orders", kafka_partitions=1)
        for number, value in enumerate(VALUES):
            if number in (3, 6):
                await mq.move("orders", (await mq.route("orders")).ranges[0].partition)
            await mq.send("orders", value)
        assert await by_kafka(served.kafka, 4) == VALUES[:4]
        plan = await mq.convert_group("orders", "billing", "ordered")
        assert [(one.partition, one.after) for one in plan.partitions] == [(0, 4), (1, 1), (2, 0)]
        assert await natively(mq, 3, "ordered") == VALUES[4:7]
        back = await mq.convert_group("orders", "billing", "kafka")
        assert [(one.partition, one.after) for one in back.partitions] == [(0, 7)]
        assert await by_kafka(served.kafka, 3) == VALUES[7:]


async def test_a_group_that_is_used_is_not_converted(queue: Connection, address: str) -> None:
    await filled(queue)
    found, consumer = await asyncio.to_thread(lambda: consumed(address, 4, leave=False))
    try:
        with pytest.raises(GroupLive, match="stop its consumers"):
            await queue.convert_group("orders", "billing", "shared")
        assert [one.settings.mode for one in await queue.groups("orders")] == ["kafka"]
    finally:
        await asyncio.to_thread(consumer.close)
    await queue.convert_group("orders", "billing", "shared")
    async with queue.consumer("orders", group="billing") as native:
        assert await native.poll(max_messages=1, wait=30)
        with pytest.raises(GroupLive, match="stop its consumers"):
            await queue.convert_group("orders", "billing", "kafka")
    assert found == VALUES[:4]


async def test_dead_letters_are_lost_only_by_force(queue: Connection, address: str) -> None:
    await filled(queue)
    async with queue.consumer("orders", group="billing") as consumer:
        [message] = await consumer.poll(max_messages=1, wait=30)
        await message.dead("no such customer")
    with pytest.raises(GroupConflict, match="1 messages in its dead letters"):
        await queue.convert_group("orders", "billing", "kafka")
    assert len(await queue.dead_letters("orders", "billing")) == 1
    await queue.convert_group("orders", "billing", "kafka", force=True)
    assert await by_kafka(address, 9) == VALUES[1:]


async def test_what_cannot_be_converted_is_refused_with_the_reason(queue: Connection) -> None:
    await queue.create_topic("orders", kafka_partitions=1)
    await queue.create_group("orders", "billing")
    await queue.create_group("orders", "news", mode="broadcast")
    with pytest.raises(GroupConflict, match="native already"):
        await queue.convert_group("orders", "billing", "ordered")
    with pytest.raises(InvalidSetting, match="a group each"):
        await queue.convert_group("orders", "news", "kafka")
    with pytest.raises(InvalidSetting, match="'kafka', 'shared' or 'ordered'"):
        await queue.convert_group("orders", "billing", "broadcast")
    with pytest.raises(UnknownGroup, match="no group 'nobody'"):
        await queue.convert_group("orders", "nobody", "kafka")
    await queue.convert_group("orders", "billing", "kafka")
    with pytest.raises(GroupConflict, match="Kafka clients already"):
        await queue.convert_group("orders", "billing", "kafka")
