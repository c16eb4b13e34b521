"""Limits on the backlog of a topic (R9): a send beyond it is refused at once, with what to do about it."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest import mock

import pytest

import postroom
from postroom import BacklogFull, Connection, Message
from postroom.clock import ManualClock
from postroom.errors import StoreUnavailable
from postroom.model.messages.batch import BatchBuilder
from tests.contract.brokers import broker_of
from tests.contract.stores import Open, everywhere


async def send(mq: Connection, count: int, *, size: int = 10) -> None:
    await mq.send_many("orders", [Message(b"x" * size) for _ in range(count)])


async def accepted(mq: Connection) -> None:
    """The next look comes within a moment: by then there is room."""
    async with asyncio.timeout(10):
        while True:
            try:
                return await send(mq, 1)
            except BacklogFull:
                await asyncio.sleep(0.02)


async def settle(mq: Connection, group: str, count: int) -> None:
    async with mq.consumer("orders", group) as consumer:
        while count > 0:
            messages = await consumer.poll(max_messages=count, wait=10)
            assert messages
            await consumer.ack(messages)
            count -= len(messages)


# ---- what counts -----------------------------------------------------------------------------------------


@everywhere
async def test_a_full_topic_refuses_until_the_slowest_group_has_caught_up(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2, max_backlog=10)
    for group in ("billing", "shipping"):
        await mq.create_group("orders", group)
    await send(mq, 6)
    await send(mq, 4)
    with pytest.raises(BacklogFull, match=r"takes no more.*has 10 messages.*max_backlog=10") as caught:
        await send(mq, 1)
    assert caught.value.retriable and caught.value.details["topic"] == "orders"
    await settle(mq, "billing", 10)
    await asyncio.sleep(0.25)  # a fresh look: shipping has settled nothing
    with pytest.raises(BacklogFull, match="its slowest group 'shipping'"):
        await send(mq, 1)
    assert (await mq.topic("orders")).messages == 10
    await settle(mq, "shipping", 3)
    await accepted(mq)
    assert (await mq.topic("orders")).messages == 11


@everywhere
async def test_bytes(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2, max_backlog_bytes="20KB")
    await mq.create_group("orders", "billing")
    await send(mq, 4, size=4096)
    await send(mq, 1, size=8192)
    with pytest.raises(BacklogFull, match="max_backlog_bytes='20 KB'"):
        await send(mq, 1)
    await settle(mq, "billing", 4)
    await accepted(mq)


async def test_without_groups_all_that_is_kept_counts(mq: Connection) -> None:
    await mq.create_topic("orders", max_backlog=5)
    await send(mq, 5)
    with pytest.raises(BacklogFull, match="no group reads it"):
        await send(mq, 1)
    await mq.purge("orders")
    await accepted(mq)


async def test_what_a_member_holds_unsettled_counts(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1, max_backlog=5)
    await mq.create_group("orders", "billing")
    await send(mq, 5)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        await asyncio.sleep(0.25)
        with pytest.raises(BacklogFull):
            await send(mq, 1)
        await consumer.ack(messages)
        await accepted(mq)


async def test_a_broadcast_group_counts_by_its_members(mq: Connection) -> None:
    await mq.create_topic("orders", max_backlog=5)
    await mq.create_group("orders", "cache", mode="broadcast")
    await mq.create_group("orders", "billing")
    async with mq.consumer("orders", "cache", member="ann"):
        pass
    await send(mq, 5)
    await settle(mq, "billing", 5)
    await asyncio.sleep(0.25)
    with pytest.raises(BacklogFull, match="'cache@ann'"):
        await send(mq, 1)
    await mq.delete_group("orders", "cache@ann")
    await accepted(mq)


async def test_one_batch_may_overshoot_and_no_second(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1, max_backlog=10)
    await mq.create_group("orders", "billing")
    await send(mq, 100)
    with pytest.raises(BacklogFull):
        await send(mq, 1)


async def test_many_at_once_do_not_overshoot_together(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=4, max_backlog=10)
    await mq.create_group("orders", "billing")
    producers = [mq.producer("orders", batch_messages=1) for _ in range(5)]
    sends = [producer.send(b"x") for producer in producers for _ in range(10)]
    outcomes = await asyncio.gather(*sends, return_exceptions=True)
    assert {type(o) for o in outcomes} == {postroom.Receipt, BacklogFull}
    assert sum(isinstance(o, postroom.Receipt) for o in outcomes) == 10
    assert (await mq.topic("orders")).messages == 10


async def test_another_process_is_seen_at_the_next_look(mq: Connection, opened: Open) -> None:
    await mq.create_topic("orders", max_backlog=10)
    await mq.create_group("orders", "billing")
    async with opened() as other:
        await send(mq, 1)
        await send(other, 9)
        await asyncio.sleep(0.25)
        with pytest.raises(BacklogFull):
            await send(mq, 1)


# ---- what does not ---------------------------------------------------------------------------------------


async def test_dead_letters_and_redrive_are_exempt(mq: Connection) -> None:
    """I17: what Postroom moves itself is never refused."""
    await mq.create_topic("orders", partitions=1, max_backlog=2)
    await mq.create_group("orders", "billing")
    await send(mq, 2)
    async with mq.consumer("orders", "billing") as consumer:
        for message in await consumer.poll():
            await message.dead("broken")
        assert len(await mq.dead_letters("orders", "billing")) == 2
        await accepted(mq)
        await accepted(mq)
        with pytest.raises(BacklogFull):
            await send(mq, 1)
        assert await mq.redrive("orders", "billing") == 2


async def test_a_due_moment_that_is_past_is_no_way_around_the_limit(mq: Connection) -> None:
    """Nor one that comes before the backlog is looked at again."""
    await mq.create_topic("orders", partitions=1, max_backlog=3)
    await send(mq, 3)
    partition_id = (await mq.route("orders")).ranges[0].partition_id
    now_ms = mq._endpoint.now_ms()
    builder = BatchBuilder()
    builder.append(1, None, b"late", [])
    for due_at in (1, now_ms - 1, now_ms, now_ms + 5):
        with pytest.raises(BacklogFull):
            await mq._endpoint.append("orders", partition_id, builder.build(), due_at=due_at)
    await mq._endpoint.append("orders", partition_id, builder.build(), due_at=now_ms + 60_000)


async def test_delayed_messages_count_once_they_are_due(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1, max_backlog=2)
    await mq.create_group("orders", "billing")
    await send(mq, 2)
    for _ in range(3):
        await mq.send("orders", b"later", delay=60)
    clock.advance(61)
    async with asyncio.timeout(10):
        while (await mq.lag("orders", "billing")).total.messages < 5:  # noqa: ASYNC110 - until all are moved
            await asyncio.sleep(0.01)
    with pytest.raises(BacklogFull):
        await send(mq, 1)


async def test_topics_without_a_limit_are_never_measured(mq: Connection) -> None:
    await mq.create_topic("orders")
    await mq.create_group("orders", "billing")
    broker = broker_of(mq)
    with mock.patch.object(broker._backlog, "_measure", side_effect=AssertionError("it was measured")):
        for _ in range(3):
            await send(mq, 10)


async def test_a_busy_topic_is_measured_only_now_and_then(mq: Connection) -> None:
    await mq.create_topic("orders", max_backlog=1_000_000)
    await mq.create_group("orders", "billing")
    broker = broker_of(mq)
    begin = asyncio.get_running_loop().time()
    with mock.patch.object(broker._backlog, "_measure", wraps=broker._backlog._measure) as measure:
        for _ in range(100):
            await send(mq, 1)
    passed = asyncio.get_running_loop().time() - begin
    assert 1 <= measure.call_count <= 1 + passed / 0.2


# ---- settings -------------------------------------------------------------------------------------------


async def test_a_limit_can_be_altered(mq: Connection) -> None:
    await mq.create_topic("orders")
    await send(mq, 5)
    info = await mq.alter_topic("orders", max_backlog=5, max_backlog_bytes="1GB")
    assert (info.settings.max_backlog, info.settings.max_backlog_bytes) == (5, 1 << 30)
    with pytest.raises(BacklogFull):
        await send(mq, 1)
    await mq.alter_topic("orders", max_backlog=0)
    await send(mq, 1)
    assert (await mq.topic("orders")).settings.max_backlog_bytes == 1 << 30  # unchanged


@pytest.mark.parametrize(
    "wrong", [{"max_backlog": -1}, {"max_backlog": 1.5}, {"max_backlog": "9"}, {"max_backlog_bytes": "many"}]
)
async def test_wrong_limits_are_refused(mq: Connection, wrong: dict[str, Any]) -> None:
    with pytest.raises(postroom.InvalidSetting):
        await mq.create_topic("orders", **wrong)
    assert await mq.topics() == []


# ---- how senders learn of it -------------------------------------------------------------------------------


async def test_a_producer_is_told_at_once_and_goes_on_in_order(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1, max_backlog=3)
    await mq.create_group("orders", "billing")
    begin = asyncio.get_running_loop().time()
    async with mq.producer("orders", batch_messages=1) as producer:
        futures = [await producer.post(b"%d" % n) for n in range(6)]
        outcomes = await asyncio.gather(*futures, return_exceptions=True)
        assert [isinstance(o, BacklogFull) for o in outcomes] == [False] * 3 + [True] * 3
        await settle(mq, "billing", 3)
        async with asyncio.timeout(10):
            while True:
                try:
                    receipt = await producer.send(b"again")
                    break
                except BacklogFull:
                    await asyncio.sleep(0.02)
    assert receipt.offset == 3
    assert asyncio.get_running_loop().time() - begin < 5  # not the send's time-out


async def test_a_batch_of_unknown_fate_is_not_told_as_unstored(mq: Connection) -> None:
    """It was stored, its receipt was lost, and then the topic was full: "nothing was stored" is no answer."""
    await mq.create_topic("orders", partitions=1, max_backlog=1)
    await mq.create_group("orders", "billing")
    endpoint, lost = mq._endpoint, asyncio.Event()
    append, append_soon = endpoint.append, endpoint.append_soon

    async def losing(*args: Any, **more: Any) -> Any:
        appended = await append(*args, **more)
        if not lost.is_set():
            lost.set()
            raise StoreUnavailable("the reply was lost")
        return appended

    def losing_soon(*args: Any) -> bool:
        *asked, told = args

        def answered(result: Any) -> None:
            told(result if lost.is_set() else StoreUnavailable("the reply was lost"))
            lost.set()

        return append_soon(*asked, answered)

    with mock.patch.multiple(endpoint, append=losing, append_soon=losing_soon):
        sending = asyncio.ensure_future(mq.send("orders", b"x", timeout=20))
        await lost.wait()
        await asyncio.sleep(0.1)  # it is repeated, and refused, meanwhile
        await settle(mq, "billing", 1)
        assert (await sending).offset == 0
    assert (await mq.topic("orders")).messages == 1
