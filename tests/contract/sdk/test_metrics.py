"""`mq.metrics()`: a program that embeds the queue sees what a broker shows, and how long messages waited."""

from __future__ import annotations

import pytest

import postroom
import postroom.metrics
from postroom import sync
from postroom.clock import ManualClock
from tests.contract.brokers import serving

BOTH = {"topic": "orders", "group": "billing"}


def waits(found: postroom.metrics.Metrics, up_to: str) -> float | None:
    return found.value("postroom_first_wait_seconds_bucket", **BOTH, le=up_to)


async def test_an_embedded_program_sees_its_counts_and_how_far_groups_are(
    any_url: str, clock: ManualClock
) -> None:
    async with postroom.connect(any_url, migrate=True, metrics=True, clock=clock) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send_many("orders", [b"1", b"2", b"3"])
        for _ in range(30):  # by the short ways
            await mq.send("orders", b"4")
        async with mq.consumer("orders", group="billing") as consumer:
            await consumer.ack(await consumer.poll(max_messages=2))
            found = await mq.metrics()
    assert found.value("postroom_messages_published", topic="orders") == 33
    assert found.value("postroom_messages_settled", **BOTH, verdict="ack") == 2
    assert found.value("postroom_group_lag_messages", **BOTH) == 31
    assert found.value("postroom_group_members", **BOTH) == 1
    assert 'postroom_messages_published_total{topic="orders"} 33.0\n' in found.text


async def test_the_wait_for_the_first_read_is_counted_once_for_each_message(
    any_url: str, clock: ManualClock
) -> None:
    """R43, R52: a message that comes again has been read before."""
    async with postroom.connect(any_url, migrate=True, metrics=True, clock=clock) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send_many("orders", [b"1", b"2", b"3"])
        clock.advance(20)
        await mq.send("orders", b"4")
        clock.advance(2)
        async with mq.consumer("orders", group="billing", window=1) as consumer:
            (first,) = await consumer.poll(max_messages=1)
            await first.retry(delay=0)
            left = 4
            while left:
                got = await consumer.poll(max_messages=4)
                await consumer.ack(got)
                left -= len(got)
        found = await mq.metrics()
    assert found.value("postroom_first_wait_seconds_count", **BOTH) == 4
    assert (waits(found, "1.0"), waits(found, "2.5"), waits(found, "10.0")) == (0, 1, 1)
    assert (waits(found, "30.0"), waits(found, "+Inf")) == (4, 4)
    assert found.value("postroom_first_wait_seconds_sum", **BOTH) == pytest.approx(3 * 22 + 2)


async def test_without_counting_there_is_still_how_far_groups_are(any_url: str) -> None:
    async with postroom.connect(any_url, migrate=True) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.create_group("orders", "billing")
        await mq.send("orders", b"1")
        found = await mq.metrics()
    assert found.value("postroom_group_lag_messages", **BOTH) == 1
    assert found.value("postroom_messages_published") is None


async def test_a_connection_to_a_broker_has_none_of_its_own(any_url: str) -> None:
    async with (
        postroom.connect(any_url, migrate=True) as host,
        serving(host) as url,
        postroom.connect(url, metrics=True) as mq,
    ):
        assert (await mq.metrics()).text == ""


async def test_a_counted_queue_can_be_served_and_joined_by_an_outbox(any_url: str) -> None:
    """What needs the broker itself finds it behind the counting."""
    async with postroom.connect(any_url, migrate=True, metrics=True) as mq:
        await mq.create_topic("orders")
        async with await mq.serve("127.0.0.1", 0) as served, postroom.connect(served.url) as other:
            await other.send("orders", b"1")
            assert (await mq.topic("orders")).messages == 1


def test_the_blocking_side_has_them_too(any_url: str) -> None:
    with sync.connect(any_url, migrate=True, metrics=True) as mq:
        mq.create_topic("orders", partitions=1)
        mq.send("orders", b"1")
        assert mq.metrics().value("postroom_messages_published", topic="orders") == 1
