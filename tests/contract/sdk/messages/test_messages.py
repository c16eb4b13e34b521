"""The SDK on a real broker: what users send is what groups get, once settled gone, never lost.

Every test runs in memory and on a file, those of what databases may do differently on servers too. Time is
moved, never waited for.
"""

from __future__ import annotations

import asyncio

import pytest

import postroom
from postroom import Connection, LeaseLost, Message, Received
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from tests.contract.stores import Open, everywhere


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=2)
    return connection


async def take(mq: Connection, count: int, group: str = "billing", *, ack: bool = True) -> list[Received]:
    found: list[Received] = []
    async with mq.consumer("orders", group) as consumer:
        while len(found) < count:
            messages = await consumer.poll(wait=10)
            assert messages, f"only {len(found)} of {count} came"
            found += messages
            if ack:
                await consumer.ack(messages)
    return found


@everywhere
async def test_everything_sent_arrives_once(mq: Connection) -> None:
    sent = [Message(b"%d" % i, key=str(i % 17), headers={"n": str(i)}) for i in range(3000)]
    receipts = await mq.send_many("orders", sent)
    got = await take(mq, 3000)
    assert sorted(int(m.value) for m in got) == list(range(3000))
    by_place = {(m.partition, m.offset): m for m in got}
    for message, receipt in zip(sent, receipts, strict=True):
        found = by_place[receipt.partition, receipt.offset]
        assert (found.value, found.id, found.headers["n"]) == (message.value, receipt.id, message.value)
    assert (await mq.lag("orders", "billing")).total.messages == 0


@everywhere
async def test_one_after_the_other_and_then_together(mq: Connection) -> None:
    """Sends that come alone are stored in the call, where the store can do that; not the first, nor many."""
    reading = asyncio.create_task(take(mq, 100))
    for number in range(40):
        receipt = await mq.send("orders", b"%d" % number, key="k")
        assert (receipt.offset, receipt.duplicate) == (number, False)
    together = await asyncio.gather(*(mq.send("orders", b"%d" % i, key="k") for i in range(40, 60)))
    assert [receipt.offset for receipt in together] == list(range(40, 60))
    for number in range(60, 100):
        assert (await mq.send("orders", b"%d" % number, key="k")).offset == number
    assert [int(message.value) for message in await reading] == list(range(100))


async def test_a_timestamp_in_microseconds_is_refused_however_it_is_sent(mq: Connection) -> None:
    odd = Message(b"odd", timestamp=mq._endpoint.now_ms() * 1000)
    with pytest.raises(postroom.InvalidMessage, match="are these microseconds"):
        await mq.send_many("orders", [Message(b"fine"), odd])
    with pytest.raises(postroom.InvalidMessage, match="are these microseconds"):
        await mq.send_many("orders", [odd], delay="1h")
    with pytest.raises(postroom.InvalidMessage, match="are these microseconds"):
        await mq.staging("job").segment().add("orders", [odd])
    assert [m async for m in mq.read("orders")] == []


async def test_groups_do_not_affect_each_other(mq: Connection) -> None:
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(10)])
    assert len(await take(mq, 10, "billing")) == len(await take(mq, 10, "shipping")) == 10


@everywhere
async def test_two_members_share(mq: Connection) -> None:
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(100)])
    seen: list[bytes] = []

    async def member() -> None:
        async with mq.consumer("orders", "billing", window=10) as consumer:
            while len(seen) < 100:
                messages = await consumer.poll(max_messages=5, wait="50ms")
                seen.extend(m.value for m in messages)
                await consumer.ack(messages)

    await asyncio.gather(member(), member())
    assert sorted(map(int, seen)) == list(range(100))


@everywhere
async def test_a_waiting_consumer_hears_of_a_message(mq: Connection, opened: Open) -> None:
    async with mq.consumer("orders", "billing") as consumer, opened() as other:
        polling = asyncio.ensure_future(consumer.poll(wait=30))
        await other.send("orders", b"a")
        assert [m.value for m in await polling] == [b"a"]


@everywhere
async def test_retry_counts_and_release_does_not(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"a", id="o-1")
    async with mq.consumer("orders", "billing") as consumer:
        (message,) = await consumer.poll()
        await message.release()
        (message,) = await consumer.poll()
        assert message.attempt == 1
        await message.retry(delay=60)
        assert await consumer.poll(wait=0) == []
        clock.advance(61)
        (message,) = await consumer.poll()
        assert (message.attempt, message.id) == (2, "o-1")
        await message.ack()
        await message.ack()
    assert (await mq.lag("orders", "billing")).total.messages == 0


@everywhere
async def test_leaving_hands_back(mq: Connection) -> None:
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(20)])
    first = await take(mq, 20, ack=False)
    again = await take(mq, 20)
    assert {m.id for m in first} == {m.id for m in again}
    assert {m.attempt for m in again} == {1}


@everywhere
async def test_dead_letters_and_redrive(mq: Connection) -> None:
    receipts = await mq.send_many(
        "orders", [Message(b"%d" % i, key="k", headers={"h": "v"}) for i in range(3)]
    )
    async with mq.consumer("orders", "billing") as consumer:
        for message in await consumer.poll():
            await message.dead(f"bad {message.value.decode()}")
    letters = await mq.dead_letters("orders", "billing")
    assert [(x.value, x.key, dict(x.headers), x.reason) for x in letters] == [
        (b"%d" % i, b"k", {"h": b"v"}, f"bad {i}") for i in range(3)
    ]
    assert [(x.topic, x.partition, x.offset, x.id) for x in letters] == [
        (r.topic, r.partition, r.offset, r.id) for r in receipts
    ]
    with pytest.raises(postroom.CatalogError, match="no dead letter with the id 'nobody'"):
        await mq.redrive("orders", "billing", ids=["nobody", letters[0].id])
    assert await mq.redrive("orders", "billing", ids=[letters[1].id]) == 1
    assert await mq.discard_dead_letters("orders", "billing", ids=[letters[0].id]) == 1
    assert [x.id for x in await mq.dead_letters("orders", "billing")] == [letters[2].id]
    (back,) = await take(mq, 1)
    assert (back.topic, back.partition, back.offset, back.id, back.value) == (
        "orders", receipts[1].partition, receipts[1].offset, receipts[1].id, b"1",
    )  # fmt: skip
    assert back.headers == {"h": b"v"}
    assert await mq.redrive("orders", "billing") == 1
    assert await mq.dead_letters("orders", "billing") == []
    assert "orders.billing.dead" in [t.name for t in await mq.topics(internal=True)]
    assert [t.name for t in await mq.topics()] == ["orders"]


@everywhere
async def test_attempts_run_out(mq: Connection) -> None:
    await mq.send("orders", b"a", id="o-1")
    async with mq.consumer("orders", "billing", max_attempts=3) as consumer:
        for attempt in (1, 2, 3):
            (message,) = await consumer.poll()
            assert message.attempt == attempt
            await message.retry(reason="again")
        assert await consumer.poll(wait=0) == []
    (letter,) = await mq.dead_letters("orders", "billing")
    assert (letter.id, letter.attempts) == ("o-1", 3)


@everywhere
async def test_a_lost_lease(mq: Connection, opened: Open, clock: ManualClock) -> None:
    await mq.send("orders", b"a")
    async with opened() as sleeper, sleeper.consumer("orders", "billing", lease=10) as slow:
        (held,) = await slow.poll()
        sleeper._heartbeat.remove(slow._heart)  # as if its machine slept
        clock.advance(11)
        async with mq.consumer("orders", "billing") as consumer:
            (taken,) = await consumer.poll()
            assert (taken.id, taken.attempt) == (held.id, 2)
            with pytest.raises(LeaseLost):
                await held.ack()
            with pytest.raises(LeaseLost):
                await held.extend()
            await taken.ack()


@everywhere
async def test_leases_are_kept_while_time_passes(mq: Connection, clock: ManualClock) -> None:
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(4)])
    async with mq.consumer("orders", "billing", lease=10) as consumer:
        messages = await consumer.poll(max_messages=2)
        for _ in range(5):
            clock.advance(6)
            await asyncio.to_thread(mq._heartbeat.beat_once)
        async with mq.consumer("orders", "billing") as other:
            assert await other.poll(wait=0) == []
        messages += await consumer.poll(max_messages=2)
        assert len(messages) == 4 and {m.attempt for m in messages} == {1}
        await consumer.ack(messages)


@pytest.mark.slow("works for seconds")
@everywhere
async def test_a_poisonous_message_ends_alone(mq: Connection, opened: Open, clock: ManualClock) -> None:
    """I14: whoever touches message 5 dies; only it reaches the dead letters."""
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(8)])
    await mq.create_group("orders", "billing", lease=10, max_attempts=2)
    handled: set[bytes] = set()
    for _ in range(40):
        victim = await opened().__aenter__()
        consumer = await victim.consumer("orders", "billing").__aenter__()
        while (await mq.lag("orders", "billing")).total.messages:
            messages = await consumer.poll(max_messages=100, wait=1)
            if not messages or any(m.value == b"5" for m in messages):
                break
            handled |= {m.value for m in messages}
            await consumer.ack(messages)
        victim._heartbeat.remove(consumer._heart)
        consumer._fetching and consumer._fetching.cancel()
        consumer._fetching = None  # nothing is handed back
        await victim.close()
        clock.advance(11)
        if not (await mq.lag("orders", "billing")).total.messages:
            break
    assert handled == {b"%d" % i for i in range(8) if i != 5}
    assert [x.value for x in await mq.dead_letters("orders", "billing")] == [b"5"]


@everywhere
async def test_at_most_once(mq: Connection) -> None:
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(6)])
    async with mq.consumer("orders", "billing", ack="on_delivery") as consumer:
        assert len(await consumer.poll(max_messages=4)) == 4
    assert (await mq.lag("orders", "billing")).total.messages == 2


async def test_after(mq: Connection) -> None:
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(50)])
    count = 0
    async with mq.consumer("orders", "billing", ack="after") as consumer:
        async for _ in consumer:
            count += 1
            if count == 50:
                break
    assert (await mq.lag("orders", "billing")).total.messages == 0


async def test_expired_messages_are_not_shown(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"old", expires=5)
    await mq.send("orders", b"new", expires=500)
    clock.advance(10)
    assert [m.value for m in await take(mq, 1)] == [b"new"]
    assert (await mq.lag("orders", "billing")).total.messages == 0


@everywhere
async def test_many_senders_at_once(mq: Connection) -> None:
    receipts = await asyncio.gather(*(mq.send("orders", b"%d" % i, key=str(i)) for i in range(500)))
    assert len({(r.partition, r.offset) for r in receipts}) == 500
    async with mq.producer("orders", linger="2ms") as producer:
        futures = [await producer.post(b"%d" % i, key="k") for i in range(500, 1000)]
    offsets = [f.result().offset for f in futures]
    assert offsets == sorted(offsets)
    got = await take(mq, 1000)
    assert sorted(int(m.value) for m in got) == list(range(1000))


@everywhere
async def test_one_way(mq: Connection) -> None:
    async with mq.producer("orders", confirm=False) as producer:
        for i in range(100):
            await producer.post(b"%d" % i)
    assert producer.failed == 0
    assert len(await take(mq, 100)) == 100


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd", "auto"])
async def test_compression(mq: Connection, compression: str) -> None:
    async with mq.producer("orders", compression=compression) as producer:
        await producer.send_many(Message(b"%d" % i) for i in range(100))
    assert sorted(int(m.value) for m in await take(mq, 100)) == list(range(100))


@everywhere
async def test_a_list_of_large_values(mq: Connection) -> None:
    """It is compressed on its way, with keys and without."""
    values = [f"order {n}, ".encode() * 300 for n in range(200)]
    receipts = await mq.send_many("orders", values[:100])
    receipts += await mq.send_many("orders", [Message(value, key=value[:8]) for value in values[100:]])
    stored = {(m.partition, m.offset): m.value async for m in mq.read("orders")}
    assert [stored[r.partition, r.offset] for r in receipts] == values
    assert sorted(m.value for m in await take(mq, 200)) == sorted(values)


@everywhere
async def test_a_large_message(mq: Connection) -> None:
    value = bytes(DEFAULTS.max_message_bytes - 10)
    await mq.send("orders", value)
    async with mq.consumer("orders", "billing", window_bytes=1000) as consumer:
        (message,) = await consumer.poll()
        assert message.value == value
        await message.ack()


async def test_a_long_list_without_keys_is_spread_evenly(mq: Connection) -> None:
    """R22: a batch to each partition in turn, and the receipts in the order of the list."""
    await mq.create_topic("wide", partitions=4)
    receipts = await mq.send_many("wide", [Message(b"%d" % i) for i in range(8000)])
    assert [receipts[i].partition for i in range(0, 8000, 1000)] in [
        [(first + i) % 4 for i in range(8)] for first in range(4)
    ]
    stored = {(m.partition, m.offset): m.value async for m in mq.read("wide")}
    assert [stored[r.partition, r.offset] for r in receipts] == [b"%d" % i for i in range(8000)]
