"""Groups of Kafka clients beside native ones: listed, measured, reset, kept for, and of another kind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException, TopicPartition

import postroom
from postroom import Connection, GroupConflict, GroupLive, InvalidSetting, UnknownGroup
from postroom.broker.duties import Retention
from postroom.config import DEFAULTS
from tests.kafka.integration.clients import Sender
from tests.kafka.integration.test_groups import VALUES, consumer, received, sent


def handled(address: str, count: int, group: str = "my.group") -> None:
    client = consumer(address, group)
    client.subscribe(["orders"])
    assert len(received(client, count)) == count
    client.commit(asynchronous=False)
    client.close()


async def test_a_group_of_kafka_clients_is_listed_and_measured_as_any_other(
    queue: Connection, address: str
) -> None:
    await sent(queue, address)
    await asyncio.to_thread(handled, address, 60)
    [found] = await queue.groups("orders")
    assert (found.name, found.settings.mode, found.members) == ("my.group", "kafka", ())
    assert (await queue.topics())[0].groups == ("my.group",)
    lag = await queue.lag("orders", "my.group")
    assert lag.total.messages == 40 and lag.total.bytes > 0
    assert sum(row.committed for row in lag.partitions) == 60
    with pytest.raises(UnknownGroup):
        await queue.lag("orders", "nobody")


@pytest.mark.slow("waits for clients of Kafka")
async def test_lag_and_reset_go_over_a_move(tmp_path: Path) -> None:
    url, other = f"sqlite:///{tmp_path}/q.db", f"sqlite:///{tmp_path}/other.db"
    async with postroom.connect(url, shards={"other": other}) as queue:
        async with await queue.serve(port=0, kafka=0) as served:
            address = str(served.kafka)
            await sent(queue, address, 1)
            await asyncio.to_thread(handled, address, 60)
            await queue.move("orders", 0)
            await asyncio.to_thread(Sender(address).send, "orders", VALUES)
        assert (await queue.lag("orders", "my.group")).total.messages == 140
        resets: list[tuple[Any, int]] = [
            ("earliest", 200), ("latest", 0), ({1: 30}, 70), ({0: 90}, 110), ({0: 101}, 100),
        ]  # fmt: skip
        for to, messages in resets:
            await queue.reset("orders", "my.group", to=to)
            assert (await queue.lag("orders", "my.group")).total.messages == messages, to
        with pytest.raises(InvalidSetting, match="beyond"):
            await queue.reset("orders", "my.group", to={1: 101})


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_group_that_is_in_use_is_reset_only_by_force(queue: Connection, address: str) -> None:
    await sent(queue, address, 1)
    client = consumer(address, "my.group")

    def begin() -> None:
        client.subscribe(["orders"])
        received(client, 100)
        client.commit(asynchronous=False)

    def commit() -> None:
        client.commit(offsets=[TopicPartition("orders", 0, 100)], asynchronous=False)

    await asyncio.to_thread(begin)
    assert len((await queue.groups("orders"))[0].members) == 1
    with pytest.raises(GroupLive):
        await queue.reset("orders", "my.group", to="earliest")
    with pytest.raises(GroupLive):
        await queue.delete_group("orders", "my.group")
    await queue.reset("orders", "my.group", to="earliest", force=True)
    with pytest.raises(KafkaException):
        await asyncio.to_thread(commit)
    assert (await queue.lag("orders", "my.group")).total.messages == 100, "a late commit changes nothing"
    assert len(await asyncio.to_thread(received, client, 100)) == 100, "it begins anew by itself"
    await asyncio.to_thread(client.close)
    await queue.delete_group("orders", "my.group")
    assert await queue.groups("orders") == []


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_name_is_of_one_kind(queue: Connection, address: str) -> None:
    await sent(queue, address, 1)
    await asyncio.to_thread(handled, address, 10, "billing")
    with pytest.raises(GroupConflict, match="Kafka clients"):
        await queue.create_group("orders", "billing")
    for refused in (queue.pause("orders", "billing"), queue.alter_group("orders", "billing", lease=10)):
        with pytest.raises(GroupConflict, match="Kafka clients"):
            await refused
    with pytest.raises(InvalidSetting, match="Kafka clients"):
        await queue.create_group("orders", "other", mode="kafka")
    await queue.create_group("orders", "native")

    def refused_join() -> Any:
        client = consumer(address, "native")
        try:
            client.subscribe(["orders"])
            message = client.poll(30)
            return message.error().code()
        finally:
            client.close()

    assert await asyncio.to_thread(refused_join) == 23


@pytest.mark.slow("waits for clients of Kafka")
async def test_what_a_group_of_kafka_clients_has_not_committed_is_kept(
    queue: Connection, address: str
) -> None:
    await queue.create_topic("orders", kafka_partitions=1, retention="1ms")
    sender = Sender(address, **{"batch.num.messages": 10})
    await asyncio.to_thread(sender.send, "orders", VALUES)
    await asyncio.to_thread(handled, address, 60)
    store: Any = queue._endpoint.store  # type: ignore[attr-defined]
    await asyncio.to_thread(Retention(store, DEFAULTS).run_once)
    [edge] = store.log.bounds([(await queue.route("orders")).ranges[0].partition_id]).values()
    assert edge.start == 60, "all that it has committed is old enough to go, and nothing else"
    assert (await queue.lag("orders", "my.group")).total.messages == 40
