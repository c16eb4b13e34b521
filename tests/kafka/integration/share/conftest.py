"""A topic with two partitions for Kafka clients, and a share consumer of it that begins at the beginning."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from postroom import Connection
from tests.kafka.integration.share.client import ShareConsumer
from tests.kafka.integration.test_bad_input import connected


@pytest.fixture
async def orders(queue: Connection) -> str:
    await queue.create_topic("orders", kafka_partitions=2)
    await queue.create_group("orders", "billing")
    return "orders"


@pytest.fixture
async def consumer(orders: str, address: str) -> AsyncIterator[ShareConsumer]:
    async with connected(address) as wire:
        consumer = ShareConsumer(wire)
        await consumer.join(orders)
        yield consumer
