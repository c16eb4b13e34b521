"""A partition is moved under Kafka clients: offsets stay dense, and an idempotent producer goes on (I28)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import postroom
from tests.kafka.integration.clients import Sender, read

FIRST = [b"a%d" % number for number in range(50)]
SECOND = [b"b%d" % number for number in range(50)]
_MOVES = 5
THIRD = [b"c%d" % number for number in range(50)]


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_producer_and_a_reader_go_on_over_moves(tmp_path: Path) -> None:
    """The sequences of the producer are carried over: librdkafka would fail for good otherwise."""
    url, other = f"sqlite:///{tmp_path}/q.db", f"sqlite:///{tmp_path}/other.db"
    async with postroom.connect(url, shards={"other": other}) as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        async with await mq.serve(port=0, kafka=0) as served:
            assert served.kafka is not None
            sender = Sender(served.kafka)
            await asyncio.to_thread(sender.send, "orders", FIRST)
            await mq.move("orders", 0, shard=None)
            await asyncio.to_thread(sender.send, "orders", SECOND)
            await mq.move("orders", 1, shard=None)
            await asyncio.to_thread(sender.send, "orders", THIRD)
            everything = FIRST + SECOND + THIRD
            assert [offset for _, offset, _ in sender.stored] == list(range(150))
            found = await asyncio.to_thread(read, served.kafka, "orders", 150)
            assert found == list(enumerate(everything))
            later = await asyncio.to_thread(read, served.kafka, "orders", 60, 0, 90)
            assert later == list(enumerate(everything))[90:], "a committed offset stays valid"


@pytest.mark.slow("waits for clients of Kafka")
async def test_nothing_is_lost_or_reordered_while_partitions_move_under_load(tmp_path: Path) -> None:
    url, other = f"sqlite:///{tmp_path}/q.db", f"sqlite:///{tmp_path}/other.db"
    async with postroom.connect(url, shards={"other": other}) as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        async with await mq.serve(port=0, kafka=0) as served:
            assert served.kafka is not None
            sender = Sender(served.kafka, **{"linger.ms": 0, "batch.num.messages": 10})
            values = [b"%d" % number for number in range(3_000)]
            sending = asyncio.create_task(asyncio.to_thread(sender.send, "orders", values))
            for _ in range(_MOVES):
                await mq.move("orders", (await mq.route("orders")).ranges[0].partition)
            await sending
            found = await asyncio.to_thread(read, served.kafka, "orders", len(values))
            assert found == list(enumerate(values))
