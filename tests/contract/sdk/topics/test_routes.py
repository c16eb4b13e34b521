"""Splits and merges as users see them: live, with order kept, history readable (R24 to R27, I9, I10)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import pytest

import postroom
from postroom import Connection, InvalidSetting, Message, Received, RouteConflict, UnknownPartition
from postroom.broker.duties import Retention
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.model.messages.batch import SEAL, build_control, control_kind
from postroom.model.messages.slot import slot_of
from postroom.model.topology import route as routes
from tests.contract.brokers import broker_of
from tests.contract.stores import Open, everywhere

KEYS = [f"k{n}" for n in range(12)]


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    return connection


async def send(mq: Connection, first: int, last: int) -> None:
    """A message for each number, to the keys in turn."""
    await mq.send_many("orders", [Message(b"%d" % n, key=KEYS[n % len(KEYS)]) for n in range(first, last)])


def numbers(messages: list[Received]) -> list[int]:
    return sorted(int(m.value) for m in messages)


def in_order(messages: list[Received]) -> bool:
    by_key = defaultdict(list)
    for message in messages:
        by_key[message.key].append(int(message.value))
    return all(found == sorted(found) for found in by_key.values())


async def take(consumer: postroom.Consumer, count: int) -> list[Received]:
    found: list[Received] = []
    while len(found) < count:
        messages = await consumer.poll(wait=20)
        assert messages, f"only {numbers(found)} of {count} came"
        found += messages
        await consumer.ack(messages)
    return found


async def until(holds: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def nothing_waits(mq: Connection, group: str) -> bool:
    """Control batches are settled by the consumer, after what was asked of it."""
    return (await mq.lag("orders", group)).total.messages == 0


# ---- groups ----


@pytest.mark.slow("works for seconds")
@everywhere
async def test_a_group_walks_from_the_beginning_through_every_change(mq: Connection) -> None:
    """R27: it starts when all changes are made, and gets everything, each key in order."""
    await send(mq, 0, 50)
    await mq.split("orders", 0)
    await send(mq, 50, 100)
    await mq.split("orders", 2, at=700)
    await send(mq, 100, 150)
    route = await mq.merge("orders", 1, 3)
    await send(mq, 150, 200)
    assert (route.version, [r.partition for r in route.ranges]) == (4, [5, 4])
    for mode in ("ordered", "shared", "broadcast"):
        async with mq.consumer("orders", mode, mode=mode, start="earliest", member="one") as consumer:
            found = await take(consumer, 200)
            assert numbers(found) == list(range(200))
            assert mode != "ordered" or in_order(found)
            assert await consumer.poll(wait=0) == []
            await until(lambda group=mode: nothing_waits(mq, group))


@everywhere
async def test_a_successor_opens_when_all_before_it_is_settled(mq: Connection) -> None:
    """I10; shared groups need not wait. `lag` says who waits for what."""
    await send(mq, 0, 12)
    async with (
        mq.consumer("orders", "ordered", mode="ordered") as ordered,
        mq.consumer("orders", "shared") as shared,
    ):
        held = await ordered.poll(12, wait=20)
        assert numbers(held) == list(range(12))
        await mq.split("orders", 0)
        await send(mq, 12, 24)
        assert numbers(await take(shared, 24)) == list(range(24))
        assert await ordered.poll(wait="100ms") == []
        lag = await mq.lag("orders", "ordered")
        assert [(p.partition, p.sealed, p.waits_for) for p in lag.partitions] == [
            (0, True, ()),
            (1, False, (0,)),
            (2, False, (0,)),
        ]
        assert lag.total.messages == 24
        await ordered.ack(held[:-1])
        assert await ordered.poll(wait="100ms") == []
        await ordered.ack(held[-1:])
        assert numbers(await take(ordered, 12)) == list(range(12, 24))
    lag = await mq.lag("orders", "ordered")
    assert [(p.partition, p.messages, p.waits_for) for p in lag.partitions] == [(1, 0, ()), (2, 0, ())]


async def test_a_merge_opens_when_both_are_drained(mq: Connection) -> None:
    await mq.split("orders", 0)
    await send(mq, 0, 24)
    async with mq.consumer("orders", "billing", mode="ordered") as consumer:
        held = await consumer.poll(24, wait=20)
        while len(held) < 24:
            held += await consumer.poll(24, wait=20)
        await mq.merge("orders", 1, 2)
        await send(mq, 24, 48)
        await consumer.ack([m for m in held if m.partition == 1])
        assert await consumer.poll(wait="100ms") == []
        assert [(p.partition, p.waits_for) for p in (await mq.lag("orders", "billing")).partitions] == [
            (2, ()),
            (3, (2,)),
        ]
        await consumer.ack([m for m in held if m.partition == 2])
        assert numbers(await take(consumer, 24)) == list(range(24, 48))


@everywhere
async def test_starts_are_of_one_moment(mq: Connection) -> None:
    """I9: what was made before a change and reads for the first time after it misses nothing."""
    await send(mq, 0, 10)
    await mq.create_group("orders", "early", start="latest", mode="ordered")
    await send(mq, 10, 20)
    await mq.split("orders", 0)
    await send(mq, 20, 30)
    await mq.create_group("orders", "late", start="latest", mode="ordered")
    await send(mq, 30, 40)
    for group, first in (("early", 10), ("late", 30)):
        async with mq.consumer("orders", group) as consumer:
            assert numbers(await take(consumer, 40 - first)) == list(range(first, 40))


@everywhere
async def test_a_reset_goes_back_over_changes(mq: Connection) -> None:
    await send(mq, 0, 20)
    async with mq.consumer("orders", "billing", mode="ordered") as consumer:
        await take(consumer, 20)
        await mq.split("orders", 0)
        await send(mq, 20, 40)
        await take(consumer, 20)
    await mq.reset("orders", "billing", to="earliest")
    async with mq.consumer("orders", "billing") as consumer:
        again = await take(consumer, 40)
    assert numbers(again) == list(range(40)) and in_order(again)
    await mq.reset("orders", "billing", to="latest")
    await send(mq, 40, 50)
    async with mq.consumer("orders", "billing") as consumer:
        assert numbers(await take(consumer, 10)) == list(range(40, 50))


async def test_reset_while_a_successor_is_read(mq: Connection) -> None:
    """I10: the successor is fenced; it is not read on while its predecessor is read again."""
    await send(mq, 0, 12)
    async with mq.consumer("orders", "billing", mode="ordered") as consumer:
        await take(consumer, 12)
        await mq.split("orders", 0)
        await send(mq, 12, 24)
        held = await consumer.poll(24, wait=20)
        assert held
        await mq.reset("orders", "billing", to="earliest", force=True)
        with pytest.raises(postroom.LeaseLost):
            await consumer.ack(held)
        again = await take(consumer, 24)
        assert numbers(again) == list(range(24)) and in_order(again)


# ---- who sends ----


@everywhere
async def test_a_list_is_split_with_its_partition(mq: Connection) -> None:
    """I4: sent through another connection, which learns of the change by being refused."""
    route = await mq.split("orders", 0)
    assert [(r.first_slot, r.last_slot) for r in route.ranges] == [(0, 511), (512, 1023)]
    receipts = await mq.send_many("orders", [Message(b"x", key=key) for key in KEYS])
    assert [r.partition for r in receipts] == [1 if slot_of(key.encode()) < 512 else 2 for key in KEYS]


async def test_order_of_each_key_while_partitions_split_and_merge(mq: Connection, opened: Open) -> None:
    """Two processes' worth of connections; the group reads meanwhile."""
    sent: dict[str, list[int]] = defaultdict(list)
    handled: dict[str, list[int]] = defaultdict(list)
    stop = asyncio.Event()

    async def produce(number: int, other: Connection) -> None:
        count = 0
        while not stop.is_set():
            key = f"{number}-{count % 7}"
            sent[key].append(count)
            await other.send("orders", b"%d" % count, key=key)
            count += 1

    async def consume(member: str, other: Connection) -> None:
        async with other.consumer("orders", "billing", mode="ordered", member=member) as consumer:
            async for message in consumer:
                handled[(message.key or b"").decode()].append(int(message.value))
                await message.ack()

    async with opened() as one, opened() as two:
        tasks = [asyncio.create_task(produce(n, (one, two)[n % 2])) for n in range(3)]
        readers = [asyncio.create_task(consume(f"m{n}", (one, two)[n % 2])) for n in range(2)]
        for _ in range(4):
            route = await mq.route("orders")
            for piece in route.ranges:
                await mq.split("orders", piece.partition)
                await asyncio.sleep(0.02)
            for _ in range(len(route.ranges)):
                left, right = (await mq.route("orders")).ranges[:2]
                await mq.merge("orders", right.partition, left.partition)
                await asyncio.sleep(0.02)
        stop.set()
        await asyncio.gather(*tasks)
        async with asyncio.timeout(60):
            while sum(map(len, handled.values())) < sum(map(len, sent.values())):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
    assert (await mq.route("orders")).version >= 9
    assert handled == sent


# ---- what else moves ----


@everywhere
async def test_delayed_messages_are_due_on_the_newest_route(mq: Connection, clock: ManualClock) -> None:
    await mq.send_many("orders", [Message(b"%d" % n, key=KEYS[n % 12]) for n in range(24)], delay=60)
    await mq.split("orders", 0)
    async with mq.consumer("orders", "billing", mode="ordered") as consumer:
        assert await consumer.poll(wait=0) == []
        clock.advance(60_000)
        found = await take(consumer, 24)
    assert numbers(found) == list(range(24)) and in_order(found)
    assert {m.partition for m in found} == {1, 2}


@everywhere
async def test_dead_letters_leave_for_where_their_topic_is_now(mq: Connection) -> None:
    """I12: the target was sealed; letters before and after that are listed, redriven and discarded alike."""
    changes = broker_of(mq)._routes
    await send(mq, 0, 6)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll(6, wait=20)
        await messages[0].dead("one")
        box = await mq._endpoint.route("orders.billing.dead")
        draft = routes.renew(box, [box.ranges[0].partition_id])
        assert draft is not None
        await asyncio.to_thread(changes._change, draft)
        for message in messages[1:]:
            await message.dead("more")
    letters = await mq.dead_letters("orders", "billing")
    assert [letter.reason for letter in letters] == ["one"] + ["more"] * 5
    assert {letter.partition for letter in letters} <= {0} and len({letter.id for letter in letters}) == 6
    assert await mq.redrive("orders", "billing", ids=[letters[0].id, letters[3].id]) == 2
    assert await mq.discard_dead_letters("orders", "billing", ids=[letters[1].id]) == 1
    assert await mq.redrive("orders", "billing") == 3
    async with mq.consumer("orders", "billing") as consumer:
        assert len(await take(consumer, 5)) == 5


async def test_reading_without_a_group(mq: Connection) -> None:
    """R27."""
    await send(mq, 0, 20)
    await mq.split("orders", 0)
    await send(mq, 20, 40)
    found = [message async for message in mq.read("orders")]
    assert numbers(found) == list(range(40)) and in_order(found)
    assert numbers([m async for m in mq.read("orders", partition=0)]) == list(range(20))
    async with aclosing(mq.read("orders", follow=True)) as following:
        seen = [await anext(following) for _ in range(40)]
        await mq.split("orders", 1)
        await mq.merge("orders", 4, 2)
        await send(mq, 40, 60)
        seen += [await anext(following) for _ in range(20)]
    assert numbers(seen) == list(range(60)) and in_order(seen)


async def test_what_was_sealed_and_read_is_dropped(mq: Connection, clock: ManualClock) -> None:
    """R44: with its retention; the numbers are not used again, and a new group begins with what is left."""
    await mq.alter_topic("orders", retention="1h")
    await send(mq, 0, 20)
    await mq.split("orders", 0)
    store = broker_of(mq).store
    duty = Retention(store, DEFAULTS)

    async def dropped() -> bool:
        await asyncio.to_thread(duty.run_once)
        return store.catalog.topic("orders").route.sealed == ()

    async with mq.consumer("orders", "billing", mode="ordered") as consumer:
        await take(consumer, 20)
        clock.advance(3_600_001)
        await send(mq, 20, 40)
        await until(dropped)  # the broker's own duty may be halfway through it
        await take(consumer, 20)
    async with mq.consumer("orders", "new", mode="ordered", start="earliest") as consumer:
        assert numbers(await take(consumer, 20)) == list(range(20, 40))
    route = await mq.merge("orders", 1, 2)
    assert [r.partition for r in route.ranges] == [3]
    assert (await mq.topic("orders")).messages == 20


async def test_purge_takes_what_was_sealed_too(mq: Connection) -> None:
    await send(mq, 0, 20)
    await mq.split("orders", 0)
    await send(mq, 20, 30)
    assert (await mq.topic("orders")).messages == 30
    assert await mq.purge("orders") == 30
    assert (await mq.topic("orders")).messages == 0
    assert [message async for message in mq.read("orders")] == []


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (lambda mq: mq.split("orders", 7), UnknownPartition, "no partition 7; it has 1, 2"),
        (lambda mq: mq.split("orders", 0), UnknownPartition, "is sealed, and others have its slots"),
        (lambda mq: mq.split("orders", 1, at=0), InvalidSetting, "choose 1 to 511"),
        (lambda mq: mq.split("orders", 1, at=512), InvalidSetting, "choose 1 to 511"),
        (lambda mq: mq.merge("orders", 1, 1), InvalidSetting, "with itself"),
        (lambda mq: mq.merge("orders", 1, 9), UnknownPartition, "no partition 9"),
        (lambda mq: mq.move("orders", 1), InvalidSetting, "no other shard that takes partitions"),
        (lambda mq: mq.move("orders", 1, shard="first"), InvalidSetting, "on that shard already"),
        (lambda mq: mq.move("orders", 1, shard="b"), InvalidSetting, "there is no shard 'b'"),
        (lambda mq: mq.split("order", 1), postroom.UnknownTopic, "did you mean 'orders'"),
    ],
)
async def test_what_cannot_be_changed(mq: Connection, call: Any, error: type[Exception], says: str) -> None:
    before = await mq.split("orders", 0)
    with pytest.raises(error, match=says):
        await call(mq)
    assert await mq.route("orders") == before


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda mq: mq.split("orders", 0, at="middle"), InvalidSetting),
        (lambda mq: mq.split("orders", "0"), UnknownPartition),
        (lambda mq: mq.merge("orders", 0, 1.5), UnknownPartition),
        (lambda mq: mq.move("orders", 0, shard=3), InvalidSetting),
        (lambda mq: mq.drain_shard(3), InvalidSetting),
    ],
)
async def test_what_is_of_another_kind_than_it_should_be(
    mq: Connection, call: Any, error: type[Exception], endpoint: str
) -> None:
    if endpoint == "served":
        error = InvalidSetting  # before it is asked
    with pytest.raises(error):
        await call(mq)


async def test_the_last_batch_of_a_sealed_partition_says_so(mq: Connection) -> None:
    """In the kind that the protocol's page names, which is none of Kafka's own."""
    await send(mq, 0, 3)
    log = broker_of(mq).store.log
    place = (await mq.route("orders")).ranges[0].partition_id
    await mq.split("orders", 0)
    stored = log.read(place, 0, max_bytes=1 << 20, max_messages=100)
    assert [control_kind(piece.data) for piece in stored][-1] == SEAL == 64


async def test_strangers_are_not_merged(mq: Connection) -> None:
    await mq.split("orders", 0)
    await mq.split("orders", 2)
    with pytest.raises(InvalidSetting, match=r"not neighbours.*neighbours of partition 1 are 3"):
        await mq.merge("orders", 4, 1)


@everywhere
async def test_one_change_at_a_time(mq: Connection, clock: ManualClock) -> None:
    """Whoever comes second is told, and nothing is changed; the first is finished by whoever needs it."""
    await mq.split("orders", 0)
    store = broker_of(mq).store
    draft = routes.split((await mq._endpoint.route("orders")), 1)
    left = await asyncio.to_thread(store.routes.begin, draft)
    with pytest.raises(RouteConflict, match="a split of partition 1 of topic 'orders' is under way"):
        await mq.merge("orders", 1, 2)
    store.log.seal(left.seals[0].partition_id, build_control(SEAL))
    sending = asyncio.create_task(send(mq, 0, 12))
    await asyncio.sleep(0.3)
    assert not sending.done()  # somebody may still be at work on it
    clock.advance(501)
    await sending  # the change that was left is finished by whoever needs it
    assert [r.partition for r in (await mq.route("orders")).ranges] == [3, 4, 2]
