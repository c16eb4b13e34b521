"""Slow lanes: sources that fail, or take long, are read apart, and return when they are clean (R42)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import postroom
from postroom import Connection, Consumer, Message, Received, SlowLane, StoreUnavailable
from postroom.clock import ManualClock
from postroom.endpoint.values import PollRequest
from postroom.errors import GroupConflict, InvalidSetting
from postroom.store.contract import Append, Appended
from tests.contract.brokers import broker_of
from tests.contract.stores import Open, embedded, everywhere

LANE = "orders.billing.slow"
POLICY = SlowLane(failures=0.5, at_least=3, window="1m", clean="5m")
WITHIN = 30.0  # seconds, for whatever comes by itself
in_memory = pytest.mark.stores("memory")  # stores and endpoints have no part in it


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    await connection.create_group("orders", "billing", max_attempts=4, slow_lane=POLICY)
    return connection


async def eventually(found: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WITHIN):
        while not await found():  # noqa: ASYNC110 — what the store says is asked for
            await asyncio.sleep(0.02)


async def slow_sources(mq: Connection) -> list[str]:
    return [one.source for one in (await mq.lanes("orders", "billing")).sources]


async def lane_lag(mq: Connection) -> int:
    lag = await mq.lag("orders", "billing")
    return sum(part.messages for part in lag.partitions if part.topic == LANE)


def where(message: Received) -> str:
    return message._delivery.topic


async def take(consumer: Consumer, count: int) -> list[Received]:
    found: list[Received] = []
    async with asyncio.timeout(WITHIN):
        while len(found) < count:
            found += await consumer.poll(count - len(found), wait=10)
    return found


async def make_slow(mq: Connection, source: str = "bad", header: str | None = None) -> None:
    """Three of its messages are dead, and the group knows."""
    for number in range(3):
        headers = None if header is None else {header: source}
        await mq.send("orders", b"first-%d" % number, source=None if header else source, headers=headers)
    async with mq.consumer("orders", group="billing") as consumer:
        for message in await take(consumer, 3):
            await message.dead("no good")
    await eventually(lambda: _has(mq, source))
    await mq.discard_dead_letters("orders", "billing")


async def _has(mq: Connection, source: str) -> bool:
    return source in await slow_sources(mq)


# ---- into the lane ----


@everywhere
async def test_messages_of_a_slow_source_are_set_aside_untried_and_read_from_the_lane(mq: Connection) -> None:
    await make_slow(mq)
    receipts = [await mq.send("orders", b"%d" % n, source="bad", key="k", headers={"h": "1"}) for n in (1, 2)]
    await mq.send("orders", b"good", source="good")
    await mq.send("orders", b"none")
    async with mq.consumer("orders", group="billing") as consumer:
        found = {message.value: message for message in await take(consumer, 3)}
        assert {where(found[name]) for name in (b"good", b"none")} == {"orders"}
        first = found[b"1"]
        assert (where(first), first.attempt, first.source) == (LANE, 1, "bad")
        assert (first.topic, first.partition, first.offset) == ("orders", 0, receipts[0].offset)
        assert (first.id, first.key, dict(first.headers)) == (receipts[0].id, b"k", {"h": b"1"})
        await consumer.ack(found.values())
        (second,) = await take(consumer, 1)
        assert (second.value, where(second)) == (b"2", LANE)
        await second.ack()
    lag = await mq.lag("orders", "billing")
    assert [part.messages for part in lag.partitions] == [0, 0]
    assert {part.topic for part in lag.partitions} == {"orders", LANE}


async def test_what_waits_is_shown(mq: Connection, clock: ManualClock) -> None:
    await make_slow(mq)
    info = await mq.lanes("orders", "billing")
    assert (info.topic, info.group, info.waiting) == ("orders", "billing", 0)
    (one,) = info.sources
    assert (one.source, one.since) == ("bad", clock.now_ms())
    assert "3 of 3" in one.reason
    await mq.send_many("orders", [Message(b"%d" % n, source="bad") for n in range(5)])
    async with mq.consumer("orders", group="billing") as consumer:
        (message,) = await take(consumer, 1)
        await eventually(lambda: _waits(mq, 5))
        assert await lane_lag(mq) == 5
        await message.release()


async def _waits(mq: Connection, count: int) -> bool:
    return (await mq.lanes("orders", "billing")).waiting == count


@in_memory
async def test_what_waited_in_a_member_is_set_aside_too(mq: Connection) -> None:
    """The member has fetched all of them before anybody knew."""
    await mq.send_many("orders", [Message(b"%d" % n, source="bad") for n in range(50)])
    tried = 0
    async with mq.consumer("orders", group="billing", window=100) as consumer:
        async for message in consumer:
            if where(message) == LANE:
                break
            tried += 1
            await message.dead("no good")
            await asyncio.sleep(0.05)
        assert 3 <= tried < 50
        await eventually(lambda: _waits(mq, 50 - tried))


@in_memory
async def test_the_header_is_as_the_policy_says(mq: Connection) -> None:
    await mq.alter_group("orders", "billing", slow_lane=SlowLane(at_least=3, header="tenant"))
    await make_slow(mq, "acme", header="tenant")
    await mq.send("orders", b"x", headers={"tenant": "acme"}, source="web")
    await mq.send("orders", b"y", source="acme")
    async with mq.consumer("orders", group="billing") as consumer:
        assert {m.value: where(m) for m in await take(consumer, 2)} == {b"x": LANE, b"y": "orders"}


@in_memory
async def test_a_flood_costs_few_transactions(mq: Connection) -> None:
    """Every second message of 400 is of the slow source: they leave in a few appends, not in 200."""
    await make_slow(mq)
    flood = [Message(b"%d" % n, source="bad" if n % 2 else "good") for n in range(400)]
    await mq.send_many("orders", flood)
    broker, appends = broker_of(mq), 0
    append = broker._mover._append

    async def counted(some: list[Append]) -> list[Appended | BaseException]:
        nonlocal appends
        appends += len(some)
        return await append(some)

    with mock.patch.object(broker._mover, "_append", counted):
        async with mq.consumer("orders", group="billing") as consumer:
            await consumer.ack([m for m in await take(consumer, 200) if where(m) == "orders"])
            await eventually(lambda: _waits(mq, 200))
    assert 1 <= appends <= 10


# ---- in the lane ----


async def test_a_member_has_its_share_of_the_lane_in_hand(mq: Connection) -> None:
    await make_slow(mq)
    await mq.send_many("orders", [Message(b"%d" % n, source="bad") for n in range(30)])
    async with mq.consumer("orders", group="billing") as consumer:
        (first,) = await take(consumer, 1)
        await eventually(lambda: _waits(mq, 30))
        assert await consumer.poll(wait=0.2) == []  # that one occupies the share
        await mq.send_many("orders", [Message(b"good", source="good")] * 20)
        assert {where(message) for message in await take(consumer, 20)} == {"orders"}
        await first.ack()
        (second,) = await take(consumer, 1)  # and now there is room, without any news
        assert (where(first), where(second)) == (LANE, LANE)


@in_memory
async def test_an_app_gives_the_lane_its_share_of_handlers(mq: Connection) -> None:
    await mq.alter_group("orders", "billing", slow_lane=SlowLane(at_least=3, share=0.25))
    await make_slow(mq)
    app = postroom.App(mq)
    at_work, most, good, bad, done = 0, 0, 0, 0, asyncio.Event()

    @app.subscribe("orders", group="billing", concurrency=8)
    async def handle(message: Received) -> None:
        nonlocal at_work, most, good, bad
        if message.source == "good":
            good += 1
        else:
            assert where(message) == LANE
            at_work += 1
            most = max(most, at_work)
            await asyncio.sleep(0.1)
            at_work -= 1
            bad += 1
        if good == 200 and bad >= 8:
            done.set()

    await mq.send_many("orders", [Message(b"x", source="good" if n % 2 else "bad") for n in range(400)])
    async with app, asyncio.timeout(WITHIN):
        await done.wait()
    assert 1 <= most <= 2


@pytest.mark.slow("works for seconds")
async def test_a_retry_in_the_lane_comes_back_there_and_counts(mq: Connection, clock: ManualClock) -> None:
    await make_slow(mq)
    await mq.send("orders", b"x", source="bad")
    for attempt in (1, 2, 3, 4):
        async with mq.consumer("orders", group="billing") as consumer:
            (message,) = await take(consumer, 1)
            assert (where(message), message.attempt) == (LANE, attempt)
            await message.retry(3600 if attempt == 2 else 1, reason="still bad")  # the second is a far one
        clock.advance(3601 if attempt == 2 else 2)
    (letter,) = await mq.dead_letters("orders", "billing")
    assert (letter.topic, letter.value, letter.attempts, letter.reason) == ("orders", b"x", 4, "still bad")
    assert await lane_lag(mq) == 0


@pytest.mark.slow("works for seconds")
@in_memory
async def test_attempts_before_it_was_set_aside_count(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"x", source="bad")
    async with mq.consumer("orders", group="billing") as consumer:
        (message,) = await take(consumer, 1)
        await message.retry(60, reason="once")
    await make_slow(mq)
    clock.advance(61)
    for attempt in (2, 3, 4):
        async with mq.consumer("orders", group="billing") as consumer:
            (message,) = await take(consumer, 1)
            assert (where(message), message.attempt) == (LANE, attempt)
            await message.retry(0)
    (letter,) = await mq.dead_letters("orders", "billing")
    assert letter.attempts == 4


@in_memory
async def test_redriven_letters_of_a_slow_source_go_to_the_lane(mq: Connection) -> None:
    await make_slow(mq)
    await mq.send("orders", b"x", source="bad")
    async with mq.consumer("orders", group="billing") as consumer:
        (message,) = await take(consumer, 1)
        await message.dead("no")
        assert await mq.redrive("orders", "billing") == 1
        (again,) = await take(consumer, 1)
        assert (again.value, again.attempt, where(again)) == (b"x", 1, LANE)
        await again.ack()


async def test_a_suspect_in_the_lane_waits_for_empty_hands(mq: Connection, clock: ManualClock) -> None:
    """I14: who holds something is given nothing more, not of the topic itself either, until then."""
    await make_slow(mq)
    await mq.send("orders", b"x", source="bad")
    async with mq.consumer("orders", group="billing") as consumer:
        await (await take(consumer, 1))[0].release()
        await eventually(lambda: _waits(mq, 1))
    broker = broker_of(mq)
    asked = PollRequest("orders", "billing", "ann", 1, 10, 1 << 20, 0, True, lane_messages=1)
    first = await broker.poll(replace(asked, wait_ms=20_000))  # a poll that was ended gives back in a moment
    assert [grant.topic for grant in first.grants] == [LANE]
    clock.advance(31)  # whoever had it is gone
    await mq.send("orders", b"good", source="good")
    waits = await broker.poll(replace(asked, token=2, empty_handed=False))
    assert (waits.grants, waits.draining) == ((), True)
    alone = await broker.poll(replace(asked, token=3))
    assert [(grant.topic, grant.leases[0].alone) for grant in alone.grants] == [(LANE, True)]
    rest = await broker.poll(replace(asked, token=4, empty_handed=False, lane_messages=0))
    assert [grant.topic for grant in rest.grants] == ["orders"]


# ---- out of it ----


@pytest.mark.slow("works for seconds")
@everywhere
async def test_a_source_returns_after_a_clean_period(mq: Connection, clock: ManualClock) -> None:
    await make_slow(mq)
    await mq.send("orders", b"1", source="bad")
    clock.advance(301)
    assert await slow_sources(mq) == ["bad"]  # nothing was handled
    async with mq.consumer("orders", group="billing") as consumer:
        (message,) = await take(consumer, 1)
        assert where(message) == LANE
        await message.ack()
        await eventually(lambda: _none(mq))
        await asyncio.sleep(0.5)  # what brokers remember for so long
        await mq.send("orders", b"2", source="bad")
        (message,) = await take(consumer, 1)
        assert where(message) == "orders"
        await message.ack()


async def _none(mq: Connection) -> bool:
    return not await slow_sources(mq)


@in_memory
async def test_a_lane_is_read_to_its_end_when_the_policy_is_gone(mq: Connection) -> None:
    await make_slow(mq)
    await mq.send_many("orders", [Message(b"%d" % n, source="bad") for n in range(6)])
    async with mq.consumer("orders", group="billing") as consumer:
        await (await take(consumer, 1))[0].release()
        await eventually(lambda: _waits(mq, 6))
    await mq.alter_group("orders", "billing", slow_lane=False)
    await mq.send("orders", b"new", source="bad")
    async with mq.consumer("orders", group="billing", ack="after") as consumer:
        found = [(message.value, where(message)) for message in await _each(consumer, 7)]
    assert (b"new", "orders") in found
    assert sum(topic == LANE for _, topic in found) == 6


async def _each(consumer: Consumer, count: int) -> list[Received]:
    found: list[Received] = []
    async with asyncio.timeout(WITHIN):
        async for message in consumer:
            found.append(message)
            if len(found) == count:
                return found
    raise AssertionError("never")


# ---- who is slow ----


@in_memory
async def test_a_source_that_takes_long_is_slow(mq: Connection) -> None:
    await mq.alter_group("orders", "billing", slow_lane=SlowLane(failures=None, handling=0.1, at_least=3))
    for number in range(12):
        await mq.send("orders", b"%d" % number, source="bad" if number % 4 == 0 else "good")
    async with mq.consumer("orders", group="billing") as consumer:
        for message in await _handled(consumer, 12):
            assert message.value
    await eventually(lambda: _has(mq, "bad"))
    assert await slow_sources(mq) == ["bad"]
    assert "s each" in (await mq.lanes("orders", "billing")).sources[0].reason


async def _handled(consumer: Consumer, count: int) -> list[Received]:
    found = []
    async with asyncio.timeout(WITHIN):
        async for message in consumer:
            if message.source == "bad":
                await asyncio.sleep(0.2)
            await message.ack()
            found.append(message)
            if len(found) == count:
                break
    return found


@in_memory
async def test_few_failures_are_none_and_lost_or_released_messages_are_not_counted(mq: Connection) -> None:
    await mq.send_many("orders", [Message(b"%d" % n, source="ok") for n in range(10)])
    async with mq.consumer("orders", group="billing") as consumer:
        for number, message in enumerate(await take(consumer, 10)):
            await (message.dead("no") if number < 4 else message.ack())
    await mq.send_many("orders", [Message(b"%d" % n, source="free") for n in range(5)])
    async with mq.consumer("orders", group="billing") as consumer:
        for message in await take(consumer, 5):
            await message.release()
    await asyncio.sleep(0.3)
    assert await slow_sources(mq) == []


async def test_members_of_other_connections_are_told(mq: Connection, opened: Open) -> None:
    async with opened() as other, other.consumer("orders", group="billing") as watching:
        await mq.send("orders", b"before", source="good")
        (message,) = await take(watching, 1)
        await message.ack()
        await mq.send_many("orders", [Message(b"x", source="bad")] * 3)
        for message in await take(watching, 3):
            await message.dead("no")
        await eventually(lambda: _has(mq, "bad"))
    async with mq.consumer("orders", group="billing") as consumer:
        await mq.send("orders", b"y", source="bad")
        (message,) = await take(consumer, 1)
        assert where(message) == LANE


# ---- settings ----


async def test_a_lane_is_a_setting_of_the_group(mq: Connection) -> None:
    (info,) = await mq.groups("orders")
    assert info.settings.slow_lane == POLICY.policy
    async with mq.consumer("orders", group="billing", slow_lane=POLICY):
        pass
    with pytest.raises(GroupConflict, match="slow_lane"):
        async with mq.consumer("orders", group="billing", slow_lane=SlowLane(share=0.5)):
            pass
    with pytest.raises(InvalidSetting, match="shared"):
        await mq.create_group("orders", "ordered", mode="ordered", slow_lane=True)
    with pytest.raises(InvalidSetting, match="SlowLane"):
        await mq.alter_group("orders", "billing", slow_lane="yes")  # type: ignore[arg-type]


@in_memory
async def test_a_lane_goes_with_its_group(mq: Connection) -> None:
    await make_slow(mq)
    await mq.send("orders", b"x", source="bad")
    async with mq.consumer("orders", group="billing") as consumer:
        await (await take(consumer, 1))[0].release()
    assert LANE in {info.name for info in await mq.topics(internal=True)}
    await mq.delete_group("orders", "billing", force=True)
    assert LANE not in {info.name for info in await mq.topics(internal=True)}
    await mq.create_group("orders", "billing", slow_lane=POLICY)
    assert await slow_sources(mq) == []


# ---- cut off (I12) ----


@pytest.mark.slow("works for seconds")
@everywhere
@embedded("its mover is cut off")
@pytest.mark.parametrize("step", ["stamped", "appended"])
async def test_a_move_that_was_cut_off_is_finished_once(
    mq: Connection, clock: ManualClock, step: str
) -> None:
    """Before it is appended, and after that but before it is settled: the next poll takes all of it over."""
    await make_slow(mq)
    values = [b"%d" % number for number in range(9)]
    await mq.send_many(
        "orders", [Message(v, source="good" if n % 3 == 0 else "bad") for n, v in enumerate(values)]
    )
    await _cut_off(mq, 3, stored=step == "appended")
    clock.advance(11)  # another may take it over now
    async with mq.consumer("orders", group="billing", ack="after") as consumer:
        found = [message.value for message in await _each(consumer, 6)]
        assert await consumer.poll(wait=0.2) == []
    assert sorted(found) == [v for n, v in enumerate(values) if n % 3]
    assert [part.messages for part in (await mq.lag("orders", "billing")).partitions] == [0, 0]
    lane = [message.value async for message in mq.read(LANE)]
    assert len(lane) <= 6  # nothing was stored twice


async def _cut_off(mq: Connection, good: int, *, stored: bool) -> None:
    """A member acks the good ones; the mover of what it sets aside ends before the append, or after it."""
    broker = broker_of(mq)
    append, cuts = broker._mover._append, asyncio.Event()

    async def cut(some: list[Append]) -> list[Appended | BaseException]:
        if stored:
            await append(some)
        cuts.set()
        raise StoreUnavailable("cut off")

    with mock.patch.object(broker._mover, "_append", cut):
        async with mq.consumer("orders", group="billing") as consumer, asyncio.timeout(WITHIN):
            acked = 0
            while acked < good:
                found = [m for m in await consumer.poll(wait=1) if where(m) == "orders"]
                await consumer.ack(found)
                acked += len(found)
            await cuts.wait()


@in_memory
async def test_retention_may_take_some_of_a_move_that_was_cut_off(mq: Connection, clock: ManualClock) -> None:
    """What was stored together is settled together, though it cannot be read together any more."""
    await make_slow(mq)
    await mq.send_many("orders", [Message(b"%d" % n, source="bad") for n in (1, 2, 3)])
    await _cut_off(mq, 0, stored=True)
    (place,) = (await mq.route("orders")).ranges
    assert broker_of(mq).store.log.trim(place.partition_id, 4) == 4  # the first of the three
    clock.advance(11)
    async with mq.consumer("orders", group="billing", ack="after") as consumer:
        found = [message.value for message in await _each(consumer, 3)]
        assert await consumer.poll(wait=0.2) == []
    assert found == [b"1", b"2", b"3"]
    assert (await mq.lag("orders", "billing")).total.messages == 0


@pytest.mark.slow("works for seconds")
@pytest.mark.parametrize("stored", [False, True])
async def test_a_lane_that_was_moved_to_another_shard_meanwhile(tmp_path: Path, stored: bool) -> None:
    """The stamp names a partition that is sealed now: what it does not have goes to the successor, once."""
    clock = ManualClock()
    url, shards = f"sqlite:///{tmp_path}/q.db", {"b": f"sqlite:///{tmp_path}/b.db"}
    async with postroom.connect(url, shards=shards, clock=clock) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.create_group("orders", "billing", slow_lane=POLICY)
        await make_slow(mq)
        await mq.send("orders", b"first", source="bad")
        async with mq.consumer("orders", group="billing") as consumer:
            await (await take(consumer, 1))[0].ack()  # the lane is there
        sources = ["good" if number % 3 == 0 else "bad" for number in range(9)]
        await mq.send_many("orders", [Message(b"%d" % n, source=s) for n, s in enumerate(sources)])
        await _cut_off(mq, 3, stored=stored)
        (place,) = (await mq.route(LANE)).ranges
        await mq.move(LANE, place.partition, shard="first" if place.shard == "b" else "b")
        clock.advance(11)
        async with mq.consumer("orders", group="billing", ack="after") as consumer:
            found = [message.value for message in await _each(consumer, 6)]
            assert await consumer.poll(wait=0.2) == []
        assert sorted(found) == [b"%d" % n for n, source in enumerate(sources) if source == "bad"]
        assert (await mq.lag("orders", "billing")).total.messages == 0
