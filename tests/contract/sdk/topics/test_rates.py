"""Rate limits (R40, I17): senders and groups are slowed, in order, and never refused or stuck."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

import postroom
from postroom import Connection, Message, RateInfo
from postroom.clock import ManualClock
from postroom.errors import InvalidSetting, SendTimeout, StoreUnavailable, UnknownGroup, UnknownTopic
from tests.contract.brokers import broker_of
from tests.contract.stores import Open, embedded, everywhere, only_file, real_time


async def waiting(mq: Connection, name: str, count: int = 1) -> None:
    """Until so many wait at that limit."""
    gates = broker_of(mq)._quotas._gates
    await until(lambda: name in gates and len(gates[name]._queue) >= count)


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.002)


async def passed(tasks: list[asyncio.Task[Any]], clock: ManualClock, seconds: float, count: int) -> None:
    """After that time so many are done, and no more."""
    while seconds > 0:  # in steps: no more than a burst is saved up
        before = sum(task.done() for task in tasks)
        clock.advance(min(seconds, 0.5))
        seconds = round(seconds - 0.5, 3)
        if seconds > 0 and count > before:
            await asyncio.sleep(0.1)
    await until(lambda: sum(task.done() for task in tasks) >= count)
    await asyncio.sleep(0.03)
    assert sum(task.done() for task in tasks) == count


async def send(mq: Connection, count: int, topic: str = "orders") -> None:
    await mq.send_many(topic, [Message(b"%d" % n) for n in range(count)])


def sends(mq: Connection, count: int, **more: Any) -> list[asyncio.Task[Any]]:
    """Each a batch of its own, in order."""
    producer = mq.producer("orders", batch_messages=1)
    return [asyncio.ensure_future(producer.send(b"%d" % n, timeout=20, **more)) for n in range(count)]


in_memory = pytest.mark.stores("memory")  # what no database and no wire has to do with

# ---- producers -------------------------------------------------------------------------------------------


@everywhere
async def test_a_topic_takes_a_burst_and_then_its_rate(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=10)
    tasks = sends(mq, 30)
    await waiting(mq, "topic:orders")
    await passed(tasks, clock, 0, 11)  # a second's worth, and the one that goes into debt
    await passed(tasks, clock, 0.1, 12)
    await passed(tasks, clock, 0.5, 17)
    await passed(tasks, clock, 1.3, 30)
    receipts = await asyncio.gather(*tasks)
    assert [receipt.offset for receipt in receipts] == list(range(30))  # nobody was overtaken


@in_memory
async def test_bytes(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", bytes_per_s="1KB")
    producer = mq.producer("orders", batch_messages=1, compression="none")
    tasks = [asyncio.ensure_future(producer.send(b"x" * 954, timeout=20)) for _ in range(4)]  # 1 KB each
    await waiting(mq, "topic:orders")
    await passed(tasks, clock, 0, 2)
    await passed(tasks, clock, 1.1, 3)
    await passed(tasks, clock, 1.1, 4)


async def test_a_batch_larger_than_the_burst_passes_and_others_wait(
    mq: Connection, clock: ManualClock
) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=10)
    await send(mq, 100)
    (info,) = await mq.rates()
    assert info == RateInfo("topic", "orders", "", "", 10, 0, 9000)
    task = asyncio.ensure_future(mq.send("orders", b"late", timeout=20))
    await waiting(mq, "topic:orders")
    await passed([task], clock, 8.8, 0)
    await passed([task], clock, 0.2, 1)


async def test_a_producer_is_slowed_by_its_name(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders")
    await mq.create_topic("other")
    await mq.limit_rate(producer=mq.client_id, messages_per_s=1)
    await mq.limit_rate(producer="somebody", messages_per_s=0.001)
    await send(mq, 10)
    task = asyncio.ensure_future(mq.send("other", b"x", timeout=20))  # whatever the topic
    await waiting(mq, f"producer:{mq.client_id}")
    await passed([task], clock, 8.8, 0)
    await passed([task], clock, 0.3, 1)


@in_memory
async def test_what_a_producer_stages_counts_towards_its_rate(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(producer=mq.client_id, messages_per_s=1)
    await send(mq, 10)
    segment = mq.staging("job").segment()
    await segment.add("orders", [Message(b"1")])
    task = asyncio.ensure_future(segment.close())
    await waiting(mq, f"producer:{mq.client_id}")
    await passed([task], clock, 8.8, 0)
    await passed([task], clock, 0.3, 1)


@in_memory
async def test_a_producer_and_a_topic_both_count(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=1)
    await mq.limit_rate(producer=mq.client_id, messages_per_s=1000)
    tasks = sends(mq, 4)
    await waiting(mq, "topic:orders")
    await passed(tasks, clock, 0, 2)
    await passed(tasks, clock, 2, 4)


async def test_two_connections_share_a_limit(mq: Connection, opened: Open, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=10)
    async with opened() as other:
        await other.topics()
        tasks = [*sends(mq, 15), *sends(other, 15)]
        await waiting(mq, "topic:orders")
        await waiting(other, "topic:orders")
        await passed(tasks, clock, 0, 11)
        await passed(tasks, clock, 0.5, 16)
        await passed(tasks, clock, 0.5, 21)
        await passed(tasks, clock, 1, 30)


async def test_delayed_messages_count_when_they_are_sent_and_not_when_they_are_due(
    mq: Connection, clock: ManualClock
) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "billing")
    await mq.limit_rate(topic="orders", messages_per_s=10)
    await mq.send_many("orders", [Message(b"x") for _ in range(30)], delay=1)
    task = asyncio.ensure_future(mq.send("orders", b"y", timeout=20))
    await waiting(mq, "topic:orders")
    clock.advance(1.1)
    async with asyncio.timeout(20):
        while (await mq.lag("orders", "billing")).total.messages < 30:  # noqa: ASYNC110 - until all are moved
            await asyncio.sleep(0.01)
    await passed([task], clock, 0.7, 0)
    await passed([task], clock, 0.3, 1)


async def test_dead_letters_and_redrive_are_exempt(mq: Connection) -> None:
    """I17: the clock stands still, and what Postroom moves itself is moved."""
    await mq.create_topic("orders", partitions=1)
    await send(mq, 20)
    await mq.limit_rate(topic="orders", messages_per_s=0.001)
    async with mq.consumer("orders", "billing") as consumer:
        for message in await consumer.poll():
            await message.dead("broken")
        assert len(await mq.dead_letters("orders", "billing")) == 20
        assert await mq.redrive("orders", "billing") == 20


# ---- deadlines -------------------------------------------------------------------------------------------


@embedded("a broker elsewhere cannot be asked whether it had begun")
async def test_a_send_whose_time_ends_while_it_waits_was_not_stored(
    mq: Connection, clock: ManualClock
) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=10)
    await send(mq, 20)
    with pytest.raises(SendTimeout, match="waited for a rate limit") as caught:
        await mq.send("orders", b"impatient", timeout=0.05)
    assert caught.value.details["stored"] is False
    patient = asyncio.ensure_future(mq.send("orders", b"patient", timeout=20))
    await waiting(mq, "topic:orders")
    await passed([patient], clock, 1.0, 1)
    assert (await patient).offset == 20  # in the sequence that the other had


async def test_those_behind_one_that_gave_up_go_on_in_order(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=10)
    await send(mq, 100)
    async with mq.producer("orders", batch_messages=1) as producer:
        first = asyncio.ensure_future(producer.send(b"first", timeout=0.3))
        await waiting(mq, "topic:orders")
        rest = [asyncio.ensure_future(producer.send(b"%d" % n, timeout=20)) for n in range(3)]
        with pytest.raises(SendTimeout):
            await first
        async with asyncio.timeout(20):
            while not all(task.done() for task in rest):
                clock.advance(0.5)
                await asyncio.sleep(0.02)
    offsets = [(await task).offset for task in rest]
    assert offsets == sorted(offsets)
    values = [message.value async for message in mq.read("orders")]
    assert values[-3:] == [b"0", b"1", b"2"] and len(values) in (103, 104)


async def test_what_a_batch_that_failed_had_taken_is_there_for_the_next(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=10)
    work = broker_of(mq)._work
    with mock.patch.object(work, "writer_of", side_effect=StoreUnavailable("away")) as append:
        task = asyncio.ensure_future(mq.send("orders", b"x", timeout=20))
        await until(lambda: append.call_count >= 4)
    await task
    await send(mq, 9)
    assert (await mq.rates())[0].debt_ms == 0


# ---- groups ----------------------------------------------------------------------------------------------


async def received(consumer: postroom.Consumer, wait: float = 0.1) -> int:
    messages = await consumer.poll(max_messages=1000, wait=wait)
    await consumer.ack(messages)
    return len(messages)


@everywhere
async def test_a_group_is_handed_no_more_than_its_rate(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=2)
    await mq.create_group("orders", "billing")
    await mq.limit_rate(topic="orders", group="billing", messages_per_s=100)
    await send(mq, 100)
    async with mq.consumer("orders", "billing") as consumer:
        got = 0
        while got < 10:
            got += await received(consumer, wait=30)
        got += await received(consumer)
        assert got <= 20  # a slice that was saved up, and one that goes into debt
        wanted = got + 50
        for _ in range(5):
            clock.advance(0.1)
            got += await received(consumer, wait=0.2)
        while got < wanted:  # on a busy machine
            got += await received(consumer, wait=30)
        got += await received(consumer)
        assert got == wanted
    async with mq.consumer("orders", "other") as consumer:
        assert await received(consumer, wait=30) >= 50  # the limit is of that group alone


async def test_members_in_several_connections_share_it(
    mq: Connection, opened: Open, clock: ManualClock
) -> None:
    await mq.create_topic("orders", partitions=4)
    await mq.create_group("orders", "billing")
    await mq.limit_rate(topic="orders", group="billing", messages_per_s=100)
    await send(mq, 400)
    async with opened() as other:
        consumers = [each.consumer("orders", "billing") for each in (mq, mq, other, other)]
        for consumer in consumers:
            await consumer.__aenter__()
        taken: list[list[bytes]] = [[] for _ in consumers]
        drained = zip(consumers, taken, strict=True)
        polls = [asyncio.ensure_future(_drain(consumer, into)) for consumer, into in drained]
        await waiting(mq, "group:orders/billing", 2)
        await waiting(other, "group:orders/billing", 2)
        for _ in range(20):
            clock.advance(0.1)
            await asyncio.sleep(0.02)
        await waiting(mq, "group:orders/billing", 2)
        await waiting(other, "group:orders/billing", 2)
        counts = [len(each) for each in taken]
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        for consumer in consumers:
            await consumer.close()
    assert 200 <= sum(counts) <= 300  # 200, and slices taken ahead; apart they would have 400
    assert all(counts), counts  # nobody starves


async def _drain(consumer: postroom.Consumer, into: list[bytes]) -> None:
    while True:
        messages = await consumer.poll(max_messages=1000, wait=20)
        into += [message.value for message in messages]
        await consumer.ack(messages)


async def test_an_ordered_group(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=2)
    await mq.create_group("orders", "billing", mode="ordered")
    await mq.limit_rate(topic="orders", group="billing", messages_per_s=100)
    await mq.send_many("orders", [Message(b"%d" % n, key=b"%d" % (n % 7)) for n in range(100)])
    async with mq.consumer("orders", "billing") as consumer:
        got = await received(consumer)
        assert got <= 20
        for _ in range(9):
            clock.advance(0.1)
            got += await received(consumer, wait=0.2)
        assert 90 <= got <= 110


async def test_an_ordered_group_shares_its_partitions_out_while_it_waits(mq: Connection) -> None:
    """The clock stands still, and the limit lets nothing more pass."""
    await mq.create_topic("orders", partitions=2)
    await mq.create_group("orders", "billing", mode="ordered")
    async with mq.consumer("orders", "billing", member="ann") as ann:
        for count in (20, 1):
            await mq.send_many("orders", [Message(b"x", key=b"%d" % n) for n in range(20)])
            got = 0
            while got < count:
                got += await received(ann, wait=5)
            await mq.limit_rate(topic="orders", group="billing", messages_per_s=0.001)
        await waiting(mq, "group:orders/billing")
        assert await _held_by(mq, "ann") == 2
        async with mq.consumer("orders", "billing", member="bob") as bob:
            polls = [asyncio.ensure_future(_drain(consumer, [])) for consumer in (ann, bob)]
            async with asyncio.timeout(20):
                while await _held_by(mq, "ann") > 1:  # noqa: ASYNC110 - until it has handed one over
                    await asyncio.sleep(0.02)
            for poll in polls:
                poll.cancel()
            await asyncio.gather(*polls, return_exceptions=True)


async def _held_by(mq: Connection, member: str) -> int:
    return sum(part.holder == member for part in (await mq.lag("orders", "billing")).partitions)


async def test_retries_count_and_acks_do_not(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "billing")
    await mq.limit_rate(topic="orders", group="billing", messages_per_s=10)
    await send(mq, 2)
    async with mq.consumer("orders", "billing") as consumer:
        (message,) = await consumer.poll(wait=5)
        await message.retry(delay=0)
        first = await consumer.poll(wait=5)
        assert await consumer.poll(wait=0.1) == []  # both are spent: the saved one, and the one in debt
        await consumer.ack(first)
        assert (await mq.lag("orders", "billing")).total.unsettled <= 1
        clock.advance(0.1)
        assert await received(consumer, wait=5) == 1


async def test_bytes_of_a_group_are_counted_after_the_fact(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "billing")
    await mq.limit_rate(topic="orders", group="billing", bytes_per_s=1000)
    for _ in range(3):
        await mq.send("orders", b"x" * 2000)
    async with mq.consumer("orders", "billing") as consumer:
        assert await received(consumer, wait=5) == 1
        assert await received(consumer, wait=0.1) == 0
        clock.advance(1.5)
        assert await received(consumer, wait=0.1) == 0
        clock.advance(1)
        assert await received(consumer, wait=5) == 1


@in_memory
async def test_members_of_a_broadcast_group_have_it_each(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "cache", mode="broadcast")
    await mq.limit_rate(topic="orders", group="cache", messages_per_s=10)
    async with (
        mq.consumer("orders", "cache", mode="broadcast", member="ann") as ann,
        mq.consumer("orders", "cache", mode="broadcast", member="bob") as bob,
    ):
        await send(mq, 10)
        for consumer in (ann, bob):
            assert sum([await received(consumer) for _ in range(4)]) == 2


async def test_a_consumer_that_leaves_leaves_its_place_and_what_was_reserved_to_others(
    mq: Connection, clock: ManualClock
) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "billing")
    await mq.limit_rate(topic="orders", group="billing", messages_per_s=1)
    async with mq.consumer("orders", "billing") as one:
        assert await received(one) == 0  # nothing is there: what it took is in hand again
        await send(mq, 3)
        assert await received(one, wait=5) == 1
        await waiting(mq, "group:orders/billing")
    async with mq.consumer("orders", "billing") as two:
        clock.advance(0.95)
        assert await received(two, wait=5) == 1


# ---- changes ---------------------------------------------------------------------------------------------


@only_file
async def test_a_limit_that_is_raised_or_removed_frees_who_waits(mq: Connection, opened: Open) -> None:
    """The clock stands still: only the change can free them, here and in another connection."""
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=1)
    async with opened() as other:
        await send(other, 100)
        tasks = [asyncio.ensure_future(each.send("orders", b"x", timeout=20)) for each in (mq, other)]
        await waiting(mq, "topic:orders")
        await waiting(other, "topic:orders")
        await mq.limit_rate(topic="orders", messages_per_s=1000)
        async with asyncio.timeout(20):
            await asyncio.gather(*tasks)
        assert (await other.rates())[0].messages_per_s == 1000


@only_file
async def test_a_limit_that_is_lowered_or_removed_is_seen_elsewhere(mq: Connection, opened: Open) -> None:
    await mq.create_topic("orders", partitions=1)
    async with opened() as other:
        await send(other, 100)
        await mq.limit_rate(topic="orders", messages_per_s=0.01)
        async with asyncio.timeout(5):
            while not await broker_of(other)._quotas._rates():  # noqa: ASYNC110 - within a second
                await asyncio.sleep(0.01)
        await send(other, 1)
        task = asyncio.ensure_future(other.send("orders", b"x", timeout=20))
        await waiting(other, "topic:orders")
        await mq.limit_rate(topic="orders", messages_per_s=0, bytes_per_s=None)
        await task
        assert await other.rates() == []


async def test_a_group_that_waits_is_freed_too(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "billing")
    await mq.limit_rate(topic="orders", group="billing", messages_per_s=0.01)
    await send(mq, 50)
    async with mq.consumer("orders", "billing") as consumer:
        assert await received(consumer, wait=5) == 1
        poll = asyncio.ensure_future(received(consumer, wait=20))
        await waiting(mq, "group:orders/billing")
        await mq.limit_rate(topic="orders", group="billing")
        assert await poll == 49


@in_memory
async def test_limits_go_with_what_they_are_about(mq: Connection) -> None:
    for topic in ("orders", "other"):
        await mq.create_topic(topic)
        await mq.create_group(topic, "billing")
        await mq.limit_rate(topic=topic, messages_per_s=1)
        await mq.limit_rate(topic=topic, group="billing", messages_per_s=1)
    await mq.delete_topic("orders")
    await mq.delete_group("other", "billing")
    assert [(info.kind, info.topic) for info in await mq.rates()] == [("topic", "other")]
    await mq.create_topic("orders")
    await send(mq, 100)
    await send(mq, 100)


@in_memory
async def test_rates_are_listed(mq: Connection) -> None:
    await mq.create_topic("orders")
    await mq.create_group("orders", "billing")
    await mq.limit_rate(topic="orders", messages_per_s=1000, bytes_per_s="10MB")
    await mq.limit_rate(topic="orders", group="billing", messages_per_s=0.5)
    await mq.limit_rate(producer="shop", bytes_per_s=100)
    assert await mq.rates() == [
        RateInfo("group", "orders", "billing", "", 0.5, 0),
        RateInfo("producer", "", "", "shop", 0, 100),
        RateInfo("topic", "orders", "", "", 1000, 10 << 20),
    ]


@in_memory
@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({}, InvalidSetting),
        ({"topic": "orders", "producer": "shop"}, InvalidSetting),
        ({"group": "billing"}, InvalidSetting),
        ({"producer": "shop", "group": "billing"}, InvalidSetting),
        ({"topic": 7}, InvalidSetting),
        ({"producer": ""}, InvalidSetting),
        ({"topic": "orders", "messages_per_s": -1}, InvalidSetting),
        ({"topic": "orders", "messages_per_s": "many"}, InvalidSetting),
        ({"topic": "orders", "messages_per_s": float("nan")}, InvalidSetting),
        ({"topic": "orders", "bytes_per_s": "many"}, InvalidSetting),
        ({"topic": "order"}, UnknownTopic),
        ({"topic": "order", "group": "billing"}, UnknownTopic),
        ({"topic": "orders", "group": "billig"}, UnknownGroup),
    ],
)
async def test_bad_input_changes_nothing(
    mq: Connection, wrong: dict[str, Any], error: type[Exception]
) -> None:
    await mq.create_topic("orders")
    await mq.create_group("orders", "billing")
    with pytest.raises(error):
        await mq.limit_rate(**{"messages_per_s": 5, **wrong})
    assert await mq.rates() == []


# ---- what it costs ---------------------------------------------------------------------------------------


@in_memory
async def test_a_queue_without_limits_never_asks_the_store(mq: Connection) -> None:
    await mq.create_topic("orders")
    with mock.patch.object(broker_of(mq).store.rates, "spend", side_effect=AssertionError("it was asked")):
        await send(mq, 100)
        async with mq.consumer("orders", "billing") as consumer:
            assert await received(consumer, wait=5)


@real_time
async def test_a_busy_limit_costs_a_transaction_a_slice(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=100_000)
    rates = broker_of(mq).store.rates
    begin = asyncio.get_running_loop().time()
    with mock.patch.object(rates, "spend", wraps=rates.spend) as spend:
        async with mq.producer("orders", batch_messages=10) as producer:
            for _ in range(5000):
                await producer.post(b"x")
    took = asyncio.get_running_loop().time() - begin
    assert 1 <= spend.call_count <= 2 + took / 0.1


@pytest.mark.slow("works for seconds")
@in_memory
async def test_what_is_not_used_is_given_back(mq: Connection, opened: Open) -> None:
    """A process that ends, or is idle, keeps nothing for itself."""
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=100)
    rates = broker_of(mq).store.rates
    with mock.patch.object(rates, "give_back", wraps=rates.give_back) as give_back:
        await mq.send("orders", b"x")
        await until(lambda: give_back.call_count > 0)
    assert give_back.call_args.args[1:] == (9, 0)


@in_memory
async def test_while_the_store_cannot_be_asked_the_rate_is_kept_here(
    mq: Connection, clock: ManualClock
) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.limit_rate(topic="orders", messages_per_s=10)
    with mock.patch.object(broker_of(mq).store.rates, "spend", side_effect=StoreUnavailable("away")):
        tasks = sends(mq, 20)
        await waiting(mq, "topic:orders")
        await passed(tasks, clock, 0, 11)
        await passed(tasks, clock, 1, 20)
