"""Thousands of groups: what asks about one reads that one, and a list of all is a few reads."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from postroom import Connection
from postroom.broker.exposition import Sampler
from postroom.broker.topology.kafka_groups import ExpireKafkaGroups
from postroom.config import DEFAULTS
from postroom.store.contract.kafka import KafkaOffset
from tests.kafka.integration.clients import PATIENCE_S, Sender, admin
from tests.kafka.integration.test_groups import VALUES, consumer
from tests.tuned import tuned

MANY = 300


class Counted:
    """A part of a store that counts what it is asked."""

    def __init__(self, part: Any) -> None:
        self._part, self.asked = part, Counter[str]()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self._part, name)


@pytest.fixture
async def counted(queue: Connection, monkeypatch: pytest.MonkeyPatch) -> Counted:
    """Many groups that have committed in a topic; what the store is asked of them from then on."""
    made = await queue.create_topic("orders", kafka_partitions=1)
    store: Any = queue._endpoint.store  # type: ignore[attr-defined]
    [topic] = store.catalog.topics([made.name])

    def commit() -> None:
        for number in range(MANY):
            assert store.kafka_groups.put(f"group-{number}", [KafkaOffset(topic.id, 0, 0)])

    await asyncio.to_thread(commit)
    found = Counted(store.kafka_groups)
    monkeypatch.setattr(store, "kafka_groups", found)
    return found


async def test_a_list_of_many_groups_is_a_few_reads(
    queue: Connection, counted: Counted, address: str
) -> None:
    client: AdminClient = admin(address)
    counted.asked.clear()
    listed = await asyncio.to_thread(lambda: client.list_consumer_groups().result(PATIENCE_S))
    assert len(listed.valid) == MANY
    assert counted.asked["group"] == counted.asked["offsets"] == 0, counted.asked
    assert counted.asked["groups"] <= 2 and counted.asked["topics"] <= 2


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_commit_and_a_lag_read_one_group_of_many(
    queue: Connection, counted: Counted, address: str
) -> None:
    await asyncio.to_thread(Sender(address).send, "orders", VALUES)

    def commit() -> None:
        client = consumer(address, "group-7")
        client.commit(offsets=[TopicPartition("orders", 0, 30)], asynchronous=False)
        client.close()

    counted.asked.clear()
    await asyncio.to_thread(commit)
    assert (await queue.lag("orders", "group-7")).total.messages == 70
    assert not {"groups", "positions", "topics"} & set(counted.asked), counted.asked


async def test_metrics_have_the_lag_of_groups_of_kafka_clients(queue: Connection, address: str) -> None:
    await queue.create_topic("orders", kafka_partitions=1)
    await asyncio.to_thread(Sender(address).send, "orders", VALUES)

    def commit() -> None:
        client = consumer(address, "my.group")
        client.commit(offsets=[TopicPartition("orders", 0, 30)], asynchronous=False)
        client.close()

    await asyncio.to_thread(commit)
    broker: Any = queue._endpoint
    patient = tuned(http={"sample_wait_s": PATIENCE_S}).tuning.http
    sample = await Sampler(broker, tuning=patient).sample()
    assert {key: lag.messages for key, lag in sample.lags.items()} == {("orders", "my.group"): 70}


async def test_a_group_that_no_kafka_client_uses_expires_and_its_topic_forgets_it(
    queue: Connection, counted: Counted
) -> None:
    broker: Any = queue._endpoint
    assert len(await queue.groups("orders")) == MANY
    long_ago = tuned(broker={"kafka_offsets_ms": -60_000}).tuning.broker
    kept = ExpireKafkaGroups(broker.store, broker.listing, DEFAULTS.tuning.broker)
    await asyncio.to_thread(kept.run_once)
    assert len(await queue.groups("orders")) == MANY
    await asyncio.to_thread(ExpireKafkaGroups(broker.store, broker.listing, long_ago).run_once)
    assert await queue.groups("orders") == []
    assert (await queue.topic("orders")).groups == ()
