"""Kafka's clients talk to a queue, unchanged: librdkafka, kafka-python and aiokafka."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.structs import TopicPartition as AioPartition
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import (
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)
from kafka import KafkaConsumer, KafkaProducer
from kafka import TopicPartition as PyPartition

from postroom import Connection, InvalidSetting
from tests.kafka.integration.clients import PATIENCE_S, Sender, admin, read

VALUES = [b"%d" % number for number in range(200)]


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_what_librdkafka_sends_it_reads_again_in_order(
    queue: Connection, address: str, compression: str
) -> None:
    await queue.create_topic("orders", kafka_partitions=2)
    sender = Sender(address, **{"compression.type": compression})
    await asyncio.to_thread(sender.send, "orders", VALUES, 1)
    assert sorted(offset for _, offset, _ in sender.stored) == list(range(len(VALUES)))
    found = await asyncio.to_thread(read, address, "orders", len(VALUES), 1)
    assert found == list(enumerate(VALUES))


@pytest.mark.slow("waits for clients of Kafka")
@pytest.mark.parametrize("acks", ["0", "1", "all"])
async def test_producers_choose_how_they_are_answered(queue: Connection, address: str, acks: str) -> None:
    await queue.create_topic("orders", kafka_partitions=1)
    sender = Sender(address, **{"enable.idempotence": False, "acks": acks})
    await asyncio.to_thread(sender.send, "orders", VALUES)
    found = await asyncio.to_thread(read, address, "orders", len(VALUES))
    assert [value for _, value in found] == VALUES


async def test_kafka_python_sends_and_reads(queue: Connection, address: str) -> None:
    await queue.create_topic("orders", kafka_partitions=1)

    def run() -> list[bytes]:
        producer = KafkaProducer(bootstrap_servers=address, compression_type="gzip")
        sent = [producer.send("orders", value, partition=0) for value in VALUES]
        assert sent[-1].get(PATIENCE_S).offset == len(VALUES) - 1
        producer.close()
        consumer = KafkaConsumer(
            bootstrap_servers=address, auto_offset_reset="earliest", enable_auto_commit=False
        )
        consumer.assign([PyPartition("orders", 0)])
        found = [message.value for _, message in zip(VALUES, consumer, strict=False)]
        consumer.close()
        return found

    assert await asyncio.to_thread(run) == VALUES


async def test_aiokafka_which_speaks_the_oldest_versions_sends_and_reads(
    queue: Connection, address: str
) -> None:
    await queue.create_topic("orders", kafka_partitions=1)
    producer = AIOKafkaProducer(bootstrap_servers=address, enable_idempotence=True)
    await producer.start()
    sent = [await producer.send("orders", value, partition=0) for value in VALUES]
    assert (await sent[-1]).offset == len(VALUES) - 1
    await producer.stop()
    consumer: Any = AIOKafkaConsumer(
        bootstrap_servers=address, auto_offset_reset="earliest", enable_auto_commit=False
    )
    await consumer.start()
    consumer.assign([AioPartition("orders", 0)])
    found = [(await asyncio.wait_for(consumer.getone(), PATIENCE_S)).value for _ in VALUES]
    await consumer.stop()
    assert found == VALUES


@pytest.mark.slow("waits for clients of Kafka")
async def test_kafka_and_native_clients_share_a_topic(queue: Connection, address: str) -> None:
    await queue.create_topic("orders", kafka_partitions=1)
    await queue.send("orders", b"native", key="k", headers={"source": "web"})
    await asyncio.to_thread(Sender(address).send, "orders", [b"kafka"])
    assert await asyncio.to_thread(read, address, "orders", 2) == [(0, b"native"), (1, b"kafka")]
    async with queue.consumer("orders", group="billing") as consumer:
        found = [await anext(consumer) for _ in range(2)]
        await consumer.ack(found)
    assert [message.value for message in found] == [b"native", b"kafka"]


async def test_a_fetch_that_waits_is_woken_by_what_arrives(queue: Connection, address: str) -> None:
    await queue.create_topic("orders", kafka_partitions=1)
    waiting = {"fetch.wait.max.ms": 30_000, "socket.timeout.ms": 60_000, "fetch.min.bytes": 1}
    reading = asyncio.create_task(asyncio.to_thread(lambda: read(address, "orders", 1, **waiting)))
    broker = queue._endpoint
    async with asyncio.timeout(PATIENCE_S):
        while not broker._waiters.awaited("partition"):  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        began = asyncio.get_running_loop().time()
        await queue.send("orders", b"news")
        assert await reading == [(0, b"news")]
    assert asyncio.get_running_loop().time() - began < 25, "it did not wait for its whole time"


@pytest.mark.slow("waits for clients of Kafka")
async def test_other_topics_can_be_read_and_not_sent_to(queue: Connection, address: str) -> None:
    await queue.create_topic("events", partitions=2)
    await queue.send("events", b"one", slot=0)
    assert await asyncio.to_thread(read, address, "events", 1, 0) == [(0, b"one")]
    sender = Sender(address)
    with pytest.raises(AssertionError, match="not confirmed"):
        await asyncio.to_thread(sender.send, "events", [b"two"])
    assert "authorization" in sender.failed[0].lower()


# ---- administration ----


async def test_topics_are_made_described_and_deleted(queue: Connection, address: str) -> None:
    client = admin(address)

    def make() -> None:
        wanted = NewTopic("made", 3, 1, config={"retention.ms": "60000"})
        client.create_topics([wanted])["made"].result(PATIENCE_S)

    await asyncio.to_thread(make)
    info = await queue.topic("made")
    assert (info.partitions, info.settings.kafka_partitions, info.settings.retention_ms) == (3, 3, 60_000)
    listed = await asyncio.to_thread(client.list_topics, "made", PATIENCE_S)
    assert len(listed.topics["made"].partitions) == 3
    await asyncio.to_thread(lambda: client.delete_topics(["made"])["made"].result(PATIENCE_S))
    assert [topic.name for topic in await queue.topics()] == []


async def test_configs_are_shown_and_changed_and_promises_that_are_not_kept_are_refused(
    queue: Connection, address: str
) -> None:
    await queue.create_topic("orders", kafka_partitions=1)
    client = admin(address)

    def alter(name: str, value: str) -> None:
        entry = ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
        resource = ConfigResource(ResourceType.TOPIC, "orders", incremental_configs=[entry])
        client.incremental_alter_configs([resource])[resource].result(PATIENCE_S)

    await asyncio.to_thread(alter, "retention.bytes", "1000000")
    assert (await queue.topic("orders")).settings.retention_bytes == 1_000_000
    with pytest.raises(Exception, match="no compaction"):
        await asyncio.to_thread(alter, "cleanup.policy", "compact")

    def describe() -> dict[str, str]:
        resource = ConfigResource(ResourceType.TOPIC, "orders")
        found = client.describe_configs([resource])[resource].result(PATIENCE_S)
        return {name: entry.value for name, entry in found.items()}

    found = await asyncio.to_thread(describe)
    assert found["cleanup.policy"] == "delete" and found["retention.bytes"] == "1000000"
    assert (found["compression.type"], found["postroom.keys"]) == ("producer", "postroom")


async def test_configs_that_are_about_files_are_taken_and_told_again(queue: Connection, address: str) -> None:
    """Whoever keeps topics by a plan (Terraform, operators) sets them until they are told what they set."""
    client = admin(address)
    plan = {"compression.type": "lz4", "min.insync.replicas": "2", "segment.ms": "3600000"}
    wanted = NewTopic("orders", 1, 1, config=plan)
    await asyncio.to_thread(lambda: client.create_topics([wanted])["orders"].result(PATIENCE_S))

    def described() -> dict[str, tuple[str, bool]]:
        resource = ConfigResource(ResourceType.TOPIC, "orders")
        found = client.describe_configs([resource])[resource].result(PATIENCE_S)
        return {name: (found[name].value, found[name].is_default) for name in (*plan, "segment.bytes")}

    set_now = {name: (value, False) for name, value in plan.items()}
    assert await asyncio.to_thread(described) == {**set_now, "segment.bytes": ("1073741824", True)}
    await queue.alter_topic("orders", retention="1h")
    assert await asyncio.to_thread(described) == {**set_now, "segment.bytes": ("1073741824", True)}
    for name, value in (("compression.type", "rar"), ("segment.ms", "soon"), ("segment.ms", "-5")):
        wrong = NewTopic("others", 1, 1, config={name: value})
        with pytest.raises(Exception, match=name):
            await asyncio.to_thread(
                lambda one=wrong: client.create_topics([one])["others"].result(PATIENCE_S)
            )


async def test_a_topic_has_its_own_limit_of_a_batch(queue: Connection, address: str) -> None:
    client = admin(address)
    wanted = NewTopic("orders", 1, 1, config={"max.message.bytes": "2000"})
    await asyncio.to_thread(lambda: client.create_topics([wanted])["orders"].result(PATIENCE_S))
    sender = Sender(address, **{"compression.type": "none"})
    await asyncio.to_thread(sender.send, "orders", [b"x" * 1000])
    with pytest.raises(AssertionError, match="not confirmed"):
        await asyncio.to_thread(sender.send, "orders", [b"x" * 3000])
    assert "too large" in sender.failed[0].lower()


async def test_a_broker_says_where_it_is_reached(queue: Connection, address: str) -> None:
    client = admin(address)
    [node] = (await asyncio.to_thread(client.list_topics, timeout=PATIENCE_S)).brokers

    def described(name: str) -> dict[str, Any]:
        resource = ConfigResource(ResourceType.BROKER, name)
        return client.describe_configs([resource])[resource].result(PATIENCE_S)

    found = await asyncio.to_thread(described, str(node))
    assert found["advertised.listeners"].value == f"PLAINTEXT://{address}"


async def test_offsets_are_found_by_time(queue: Connection, address: str) -> None:
    """The first message of that time or later, with its own time; and the one with the newest time."""
    await queue.create_topic("orders", kafka_partitions=1)

    def run() -> tuple[list[int], int]:
        producer = KafkaProducer(bootstrap_servers=address, linger_ms=0)
        for at in (1_000, 5_000, 3_000, 9_000, 7_000):
            producer.send("orders", b"x", partition=0, timestamp_ms=at).get(PATIENCE_S)
        producer.close()
        consumer = Consumer({"bootstrap.servers": address, "group.id": "none"})
        times = (0, 1_001, 5_000, 5_001, 9_001)
        found = [
            consumer.offsets_for_times([TopicPartition("orders", 0, at)], timeout=PATIENCE_S)[0].offset
            for at in times
        ]
        consumer.close()
        asked = {TopicPartition("orders", 0): OffsetSpec.max_timestamp()}
        client = admin(address)
        [newest] = [one.result(PATIENCE_S) for one in client.list_offsets(asked).values()]
        return found, newest.offset

    found, newest = await asyncio.to_thread(run)
    assert found == [0, 1, 1, 3, -1]
    assert newest == 3


async def test_partitions_for_kafka_clients_are_neither_split_nor_merged(queue: Connection) -> None:
    await queue.create_topic("orders", kafka_partitions=2)
    with pytest.raises(InvalidSetting, match="Kafka clients"):
        await queue.split("orders", 0)
    with pytest.raises(InvalidSetting, match="Kafka clients"):
        await queue.merge("orders", 0, 1)
