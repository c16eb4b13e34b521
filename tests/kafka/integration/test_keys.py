"""A key has one partition, whoever sends it, if the topic names the rule of its Kafka clients (R29)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic
from kafka import KafkaProducer

import postroom
from postroom import Connection, InvalidSetting
from tests.kafka.integration.clients import PATIENCE_S, admin

KEYS = [f"customer-{number}".encode() for number in range(40)]
PARTITIONS = 5

Found = dict[bytes, int]
"""By key, the partition as Kafka clients count them."""


def by_librdkafka(address: str, **more: Any) -> Found:
    found: Found = {}
    producer = Producer({"bootstrap.servers": address, **more})

    def told(error: Any, message: Any) -> None:
        assert error is None, error
        found[message.key()] = message.partition()

    for key in KEYS:
        producer.produce("orders", b"x", key=key, on_delivery=told)
    assert not producer.flush(PATIENCE_S)
    return found


def by_kafka_python(address: str) -> Found:
    producer = KafkaProducer(bootstrap_servers=address)
    sent = {key: producer.send("orders", b"x", key=key) for key in KEYS}
    found = {key: one.get(PATIENCE_S).partition for key, one in sent.items()}
    producer.close()
    return found


async def by_aiokafka(address: str) -> Found:
    async with AIOKafkaProducer(bootstrap_servers=address) as producer:
        return {key: (await producer.send_and_wait("orders", b"x", key=key)).partition for key in KEYS}


async def natively(mq: Connection) -> Found:
    """By all ways of sending: one by one, as a list, with some messages that have no key."""
    numbers = {piece.partition: at for at, piece in enumerate((await mq.route("orders")).ranges)}
    single = {key: (await mq.send("orders", b"x", key=key)).partition for key in KEYS}
    plain = [postroom.Message(b"x", key=key) for key in KEYS]
    listed = [receipt.partition for receipt in await mq.send_many("orders", plain)]
    mixed = await mq.send_many("orders", [*plain, postroom.Message(b"y")])
    assert list(single.values()) == listed == [receipt.partition for receipt in mixed][:-1]
    return {key: numbers[partition] for key, partition in single.items()}


async def test_native_producers_agree_with_clients_that_take_javas_rule(
    queue: Connection, address: str
) -> None:
    await queue.create_topic("orders", kafka_partitions=PARTITIONS, keys="java")
    found = await natively(queue)
    assert set(found.values()) == set(range(PARTITIONS))
    assert await by_aiokafka(address) == found
    assert await asyncio.to_thread(by_kafka_python, address) == found
    assert await asyncio.to_thread(by_librdkafka, address, partitioner="murmur2_random") == found


async def test_native_producers_agree_with_librdkafka(queue: Connection, address: str) -> None:
    await queue.create_topic("orders", kafka_partitions=PARTITIONS, keys="librdkafka")
    found = await natively(queue)
    assert await asyncio.to_thread(by_librdkafka, address) == found


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_key_stays_in_its_partition_over_a_move_and_when_it_is_delayed(tmp_path: Path) -> None:
    url, other = f"sqlite:///{tmp_path}/q.db", f"sqlite:///{tmp_path}/other.db"
    async with postroom.connect(url, shards={"other": other}) as mq:
        await mq.create_topic("orders", kafka_partitions=PARTITIONS, keys="java")
        before = await natively(mq)
        for key in KEYS:
            await mq.send("orders", b"later", key=key, delay=1)
        for number in range(PARTITIONS):
            await mq.move("orders", number)
        assert await natively(mq) == before
        numbers = {piece.partition: at for at, piece in enumerate((await mq.route("orders")).ranges)}
        delayed: Found = {}
        async with mq.consumer("orders", group="readers") as consumer, asyncio.timeout(PATIENCE_S):
            async for message in consumer:
                if message.value == b"later":
                    assert message.key is not None
                    delayed[message.key] = numbers.get(message.partition, message.partition)
                await message.ack()
                if len(delayed) == len(KEYS):
                    break
        assert delayed == before


async def test_a_topic_that_a_kafka_client_makes_has_javas_rule_unless_it_names_another(
    queue: Connection, address: str
) -> None:
    client = admin(address)

    def make(name: str, **config: str) -> None:
        wanted = NewTopic(name, 3, 1, config={f"postroom.{key}": value for key, value in config.items()})
        client.create_topics([wanted])[name].result(PATIENCE_S)

    await asyncio.to_thread(make, "one")
    await asyncio.to_thread(make, "two", keys="librdkafka")
    assert [topic.settings.keys for topic in await queue.topics()] == ["java", "librdkafka"]
    with pytest.raises(Exception, match="choose 'postroom'"):
        await asyncio.to_thread(make, "three", keys="murmur")


async def test_the_rule_of_a_topic_stays_and_is_only_for_kafka_clients(queue: Connection) -> None:
    made = await queue.create_topic("orders", kafka_partitions=2, keys="librdkafka")
    assert (await queue.alter_topic("orders", retention="1h")).settings.keys == made.settings.keys
    with pytest.raises(InvalidSetting, match="set kafka_partitions="):
        await queue.create_topic("others", keys="java")
