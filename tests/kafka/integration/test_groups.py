"""Consumer groups of Kafka's clients: librdkafka, kafka-python and aiokafka subscribe, commit and go on."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from kafka import KafkaConsumer

from postroom import Connection
from tests.kafka.integration.clients import PATIENCE_S, Sender, admin

VALUES = [b"%d" % number for number in range(100)]
ODD_NAME = "büro.group/1 'x' " + "y" * 200


def consumer(address: str, group: str = "billing", **more: Any) -> Any:
    return Consumer(
        {"bootstrap.servers": address, "group.id": group, "auto.offset.reset": "earliest",
         "enable.auto.commit": False, "session.timeout.ms": 10_000, "heartbeat.interval.ms": 500, **more}
    )  # fmt: skip


def received(client: Any, count: int) -> list[bytes]:
    found: list[bytes] = []
    give_up_at = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < give_up_at:
        for message in client.consume(count - len(found), timeout=0.5):
            assert message.error() is None, message.error()
            found.append(message.value())
    return found


async def sent(queue: Connection, address: str, partitions: int = 2, topic: str = "orders") -> None:
    await queue.create_topic(topic, kafka_partitions=partitions)
    sender = Sender(address)
    for partition in range(partitions):
        await asyncio.to_thread(sender.send, topic, VALUES[partition::partitions], partition)


@pytest.mark.slow("waits for clients of Kafka")
@pytest.mark.parametrize("group", ["billing", ODD_NAME])
async def test_librdkafka_goes_on_where_its_group_has_committed(
    queue: Connection, address: str, group: str
) -> None:
    await sent(queue, address)

    def run() -> tuple[list[bytes], list[bytes], Any]:
        first = consumer(address, group)
        first.subscribe(["orders"])
        half = received(first, 50)
        first.commit(asynchronous=False)
        first.close()
        second = consumer(address, group)
        second.subscribe(["orders"])
        rest = received(second, 50)
        marked = TopicPartition("orders", 0, 17, "as far as here")
        second.commit(offsets=[marked], asynchronous=False)
        found = second.committed([TopicPartition("orders", 0)], timeout=PATIENCE_S)[0]
        second.close()
        return half, rest, (found.offset, found.metadata)

    half, rest, marked = await asyncio.to_thread(run)
    assert sorted(half + rest) == sorted(VALUES)
    assert marked == (17, "as far as here")


@pytest.mark.slow("waits for clients of Kafka")
async def test_kafka_python_goes_on_where_its_group_has_committed(queue: Connection, address: str) -> None:
    await sent(queue, address, 1)

    def run(count: int) -> list[bytes]:
        client = KafkaConsumer(
            "orders", bootstrap_servers=address, group_id="billing", auto_offset_reset="earliest",
            enable_auto_commit=False, max_poll_records=count,
        )  # fmt: skip
        found = [message.value for _, message in zip(range(count), client, strict=False)]
        client.commit()
        client.close()
        return found

    assert await asyncio.to_thread(run, 60) + await asyncio.to_thread(run, 40) == VALUES


@pytest.mark.slow("waits for clients of Kafka")
async def test_aiokafka_goes_on_where_its_group_has_committed(queue: Connection, address: str) -> None:
    await sent(queue, address, 1)

    async def run(count: int) -> list[bytes]:
        client: Any = AIOKafkaConsumer(
            "orders", bootstrap_servers=address, group_id="billing", auto_offset_reset="earliest",
            enable_auto_commit=False,
        )  # fmt: skip
        await client.start()
        async with asyncio.timeout(PATIENCE_S):
            found = [(await client.getone()).value for _ in range(count)]
        await client.commit()
        await client.stop()
        return found

    assert await run(60) + await run(40) == VALUES


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_static_member_is_back_without_a_rebalance(queue: Connection, address: str) -> None:
    await sent(queue, address)

    def run() -> tuple[int, int]:
        other = consumer(address, **{"group.instance.id": "other", "session.timeout.ms": 60_000})
        revoked: list[Any] = []
        other.subscribe(["orders"], on_revoke=lambda _, parts: revoked.append(parts))
        mine = consumer(address, **{"group.instance.id": "mine", "session.timeout.ms": 60_000})
        mine.subscribe(["orders"])
        give_up_at = time.monotonic() + PATIENCE_S
        while not (len(mine.assignment()) == len(other.assignment()) == 1):
            assert time.monotonic() < give_up_at
            other.poll(0.1)
            mine.poll(0.1)
        before, had = len(revoked), mine.assignment()
        mine.close()  # a static member leaves without a word
        again = consumer(address, **{"group.instance.id": "mine", "session.timeout.ms": 60_000})
        again.subscribe(["orders"])
        while not again.assignment():
            assert time.monotonic() < give_up_at
            again.poll(0.1)
            other.poll(0.1)
        assert again.assignment() == had
        again.close()
        after = len(revoked)
        other.close()
        return before, after

    before, after = await asyncio.to_thread(run)
    assert before == after, "nothing was taken from the other"


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_second_member_shares_the_partitions_and_gets_all_when_it_is_alone(
    queue: Connection, address: str
) -> None:
    await sent(queue, address)

    def run() -> None:
        one, two = consumer(address), consumer(address)
        give_up_at = time.monotonic() + PATIENCE_S
        one.subscribe(["orders"])
        while len(one.assignment()) < 2:
            assert time.monotonic() < give_up_at
            one.poll(0.1)
        two.subscribe(["orders"])
        while not (len(one.assignment()) == len(two.assignment()) == 1):
            assert time.monotonic() < give_up_at
            one.poll(0.1)
            two.poll(0.1)
        one.close()
        while len(two.assignment()) < 2:
            assert time.monotonic() < give_up_at
            two.poll(0.1)
        two.close()

    await asyncio.to_thread(run)


@pytest.mark.slow("waits for clients of Kafka")
async def test_admin_clients_list_describe_change_and_delete_groups(queue: Connection, address: str) -> None:
    await sent(queue, address)

    def run() -> None:
        client = consumer(address)
        client.subscribe(["orders"])
        received(client, 100)
        client.commit(asynchronous=False)
        asking = admin(address)
        listed = asking.list_consumer_groups().result(PATIENCE_S)
        assert [(one.group_id, one.state.name) for one in listed.valid] == [("billing", "STABLE")]
        found = asking.describe_consumer_groups(["billing"])["billing"].result(PATIENCE_S)
        assert [len(one.assignment.topic_partitions) for one in found.members] == [2]
        with pytest.raises(KafkaException, match="not empty"):
            asking.delete_consumer_groups(["billing"])["billing"].result(PATIENCE_S)
        client.close()
        moved = ConsumerGroupTopicPartitions("billing", [TopicPartition("orders", 0, 3)])
        asking.alter_consumer_group_offsets([moved])["billing"].result(PATIENCE_S)
        asked = ConsumerGroupTopicPartitions("billing")
        at = asking.list_consumer_group_offsets([asked])["billing"].result(PATIENCE_S)
        assert sorted((one.partition, one.offset) for one in at.topic_partitions) == [(0, 3), (1, 50)]
        asking.delete_consumer_groups(["billing"])["billing"].result(PATIENCE_S)
        assert asking.list_consumer_groups().result(PATIENCE_S).valid == []

    await asyncio.to_thread(run)
