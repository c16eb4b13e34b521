"""What expires: messages (R39: nobody is shown one whose moment has passed) and groups (R44).

Time is the shard's, and is moved, never waited for.
"""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime
from typing import Any

import pytest

import postroom
from postroom import Connection, Message
from postroom.broker.duties import ExpireGroups
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.endpoint.values import Beat
from postroom.model.policy.settings import GroupWish
from postroom.testing.fixture import run_until_idle
from tests.contract.brokers import broker_of, run_duty
from tests.contract.stores import Open, everywhere


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=1)
    return connection


async def lag(mq: Connection, group: str = "billing") -> int:
    return (await mq.lag("orders", group)).total.messages


async def settled(mq: Connection, group: str = "billing") -> None:
    """What was dropped is acked in the background."""
    async with asyncio.timeout(10):
        while await lag(mq, group):  # noqa: ASYNC110 - nobody tells of an ack that nobody asked for
            await asyncio.sleep(0.005)


# ---- messages --------------------------------------------------------------------------------------------

MODES = pytest.mark.parametrize("mode", ["shared", "ordered", "broadcast"])


@MODES
async def test_an_expired_message_is_settled_and_not_shown(
    mq: Connection, clock: ManualClock, mode: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "postroom.consumer")
    await mq.create_group("orders", "billing", mode=mode)
    async with mq.consumer("orders", "billing", member="ann"):
        pass  # a broadcast member that is known
    await mq.send("orders", b"gone", key="k", expires=60)
    await mq.send("orders", b"kept", key="k", expires=120)
    await mq.send("orders", b"plain", key="k")
    clock.advance(61)
    async with mq.consumer("orders", "billing", member="ann") as consumer:
        found = await consumer.poll(wait=10)
        assert [m.value for m in found] == [b"kept", b"plain"]
        assert found[0].expires == datetime.fromtimestamp(clock.now_ms() / 1000 + 59, UTC)
        await consumer.ack(found)
        assert consumer.expired == 1
        await settled(mq)
    assert "expired" in caplog.text


@MODES
async def test_one_that_expires_while_it_waits_here_is_not_handed_out(
    mq: Connection, clock: ManualClock, mode: Any
) -> None:
    """The window is filled ahead: it may wait long for a slow handler."""
    async with mq.consumer("orders", "billing", mode=mode, member="ann", lease=300) as consumer:
        await mq.send_many("orders", [Message(b"%d" % n, key="k", expires=60 + n) for n in range(10)])
        first = await anext(consumer)
        assert (first.value, consumer.expired) == (b"0", 0)
        clock.advance(65)
        await first.ack()
        second = await anext(consumer)
        assert (second.value, consumer.expired) == (b"6", 5)
        await second.ack()
        clock.advance(65)
        assert await consumer.poll(wait=0) == []
        assert consumer.expired == 8
        await settled(mq)


@MODES
async def test_a_retry_that_comes_too_late_is_settled(mq: Connection, clock: ManualClock, mode: Any) -> None:
    await mq.send("orders", b"once", key="k", expires=60)
    await mq.send("orders", b"next", key="other")
    async with mq.consumer("orders", "billing", mode=mode, member="ann") as consumer:
        message, other = await consumer.poll(wait=10)
        await other.ack()
        await message.retry(delay=90)
        clock.advance(91)
        assert await consumer.poll(wait="100ms") == []
        await settled(mq)
        assert consumer.expired == 1
    assert await mq.dead_letters("orders", "billing") == []


async def test_a_moment_can_be_named_and_is_exact(mq: Connection, clock: ManualClock) -> None:
    moment = datetime.fromtimestamp(clock.now_ms() / 1000 + 1.234, UTC)
    await mq.send("orders", b"a", expires=moment)
    clock.advance(1.233)
    async with mq.consumer("orders", "early") as consumer:
        (message,) = await consumer.poll(wait=10)
        assert message.expires == moment
    clock.advance(0.001)
    async with mq.consumer("orders", "late") as consumer:
        assert await consumer.poll(wait="50ms") == []
        await settled(mq, "late")


async def test_on_delivery(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"gone", expires=60)
    await mq.send("orders", b"kept")
    clock.advance(60)
    async with mq.consumer("orders", "billing", ack="on_delivery") as consumer:
        assert [m.value for m in await consumer.poll(wait=10)] == [b"kept"]
        assert (consumer.expired, await lag(mq)) == (1, 0)


async def test_read_does_not_show_them(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"gone", expires=60)
    await mq.send("orders", b"kept", expires=61)
    assert [m.value async for m in mq.read("orders")] == [b"gone", b"kept"]
    clock.advance(60)
    assert [m.value async for m in mq.read("orders")] == [b"kept"]


async def test_dead_letters_and_what_is_redriven(mq: Connection, clock: ManualClock) -> None:
    await mq.send("orders", b"gone", id="gone", expires=60)
    await mq.send("orders", b"kept", id="kept", expires=600)
    async with mq.consumer("orders", "billing") as consumer:
        for message in await consumer.poll(wait=10):
            await message.dead("broken")
        assert [d.id for d in await mq.dead_letters("orders", "billing")] == ["gone", "kept"]
        clock.advance(60)
        assert [d.id for d in await mq.dead_letters("orders", "billing")] == ["kept"]
        assert await mq.redrive("orders", "billing") == 2
        (again,) = await consumer.poll(wait=10)
        assert again.id == "kept"
        await again.ack()
        await settled(mq)
        assert consumer.expired == 1


@everywhere
async def test_of_a_delayed_message_a_duration_counts_from_when_it_is_due(
    mq: Connection, clock: ManualClock
) -> None:
    now = clock.now_ms() / 1000
    await mq.send("orders", b"late", delay=600, expires=60)
    await mq.send("orders", b"never", delay=600, expires=datetime.fromtimestamp(now + 599, UTC))
    async with mq.consumer("orders", "billing") as consumer:
        assert await consumer.poll(wait=0) == []
        clock.advance(601)
        (message,) = await consumer.poll(wait=10)
        assert (message.value, message.expires) == (b"late", datetime.fromtimestamp(now + 660, UTC))
        await message.ack()
        await settled(mq)
        assert consumer.expired == 1


async def test_handlers_of_an_app_are_not_given_them(mq: Connection, clock: ManualClock) -> None:
    app, seen = postroom.App(mq), []

    @app.subscribe("orders", group="billing", mode="ordered")
    async def handle(value: bytes) -> None:
        seen.append(value)

    await mq.send("orders", b"gone", key="k", expires=60)
    await mq.send("orders", b"kept", key="k")
    clock.advance(60)
    await run_until_idle(app, mq)
    assert seen == [b"kept"]
    assert await lag(mq) == 0


# ---- groups ---------------------------------------------------------------------------------------------


async def expire(mq: Connection) -> None:
    await run_duty(mq, ExpireGroups)


async def names(mq: Connection) -> list[str]:
    return [info.name for info in await mq.groups("orders")]


async def test_a_group_never_expires_unless_it_says_so(mq: Connection, clock: ManualClock) -> None:
    assert (await mq.create_group("orders", "billing")).settings.expires_ms == 0
    clock.advance(365 * 86_400)
    await expire(mq)
    await expire(mq)
    assert await names(mq) == ["billing"]


@everywhere
async def test_a_group_that_nobody_uses_expires(mq: Connection, clock: ManualClock) -> None:
    """A mistyped name does not hold messages for ever."""
    async with mq.consumer("orders", "biling", expires="1h") as consumer:
        await mq.send("orders", b"a")
        await consumer.poll(wait=10)
    clock.advance(3600)
    await expire(mq)
    assert await names(mq) == ["biling"]
    clock.advance(DEFAULTS.tuning.broker.group_used_ms / 1000)  # activity is written down that often
    await expire(mq)
    assert await names(mq) == []
    async with mq.consumer("orders", "biling") as consumer:
        assert [m.value for m in await consumer.poll(wait=10)] == [b"a"]  # a new group of that name


async def test_one_that_was_never_used_expires_too(mq: Connection, clock: ManualClock) -> None:
    await mq.create_group("orders", "billing", expires="1h")
    clock.advance(4000)
    await expire(mq)  # seen for the first time: its activity may have been lost
    assert await names(mq) == ["billing"]
    clock.advance(4000)
    await expire(mq)
    assert await names(mq) == []


async def test_a_live_member_keeps_it(mq: Connection, clock: ManualClock, opened: Open) -> None:
    async with mq.consumer("orders", "billing", expires="1h") as consumer, opened() as other:
        for _ in range(4):
            clock.advance(3000)
            await asyncio.to_thread(mq._heartbeat.beat_once)
            await expire(other)
        clock.advance(20_000)  # the machine slept, and wakes up again
        await asyncio.to_thread(mq._heartbeat.beat_once)
        await expire(other)
        await mq.send("orders", b"a")
        assert len(await consumer.poll(wait=10)) == 1


async def test_dead_letters_keep_it_and_that_is_said_once(
    mq: Connection, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    async with mq.consumer("orders", "billing", expires="1h") as consumer:
        await mq.send("orders", b"a")
        (message,) = await consumer.poll(wait=10)
        await message.dead("broken")
    clock.advance(4000)
    await expire(mq)
    await expire(mq)
    assert await names(mq) == ["billing"]
    assert caplog.text.count("redrive or discard its 1 dead letters") == 1
    await mq.discard_dead_letters("orders", "billing")
    await expire(mq)
    assert await names(mq) == []
    assert [t.name for t in await mq.topics(internal=True)] == ["orders"]


async def test_who_joins_while_it_is_being_forgotten_begins_anew(mq: Connection, clock: ManualClock) -> None:
    """Whoever retired it may have died: the next one who comes finishes that."""
    before = (await mq.create_group("orders", "billing", expires="1h", start="latest")).created_at
    broker = broker_of(mq)
    group = broker.store.catalog.group("orders", "billing")
    broker.store.usage.touch(group.id)
    clock.advance(4000)
    assert broker.store.usage.retire(group.id, 1000)
    await mq.send("orders", b"a")
    async with mq.consumer("orders", "billing", start="earliest") as consumer:
        assert [m.value for m in await consumer.poll(wait=10)] == [b"a"]
        (info,) = await mq.groups("orders")
        assert info.created_at > before
        await expire(mq)
    assert await names(mq) == ["billing"]


async def test_expiry_can_be_altered_and_is_a_setting_like_others(mq: Connection) -> None:
    await mq.create_group("orders", "billing", expires="7d")
    assert (await mq.alter_group("orders", "billing", expires="1d")).settings.expires_ms == 86_400_000
    with pytest.raises(postroom.GroupConflict):
        async with mq.consumer("orders", "billing", expires="2d"):
            pass
    assert (await mq.alter_group("orders", "billing", expires=0)).settings.expires_ms == 0
    with pytest.raises(postroom.InvalidSetting):
        await mq.create_group("orders", "other", expires=-1)


async def test_how_long_groups_have_been_idle_is_shown(mq: Connection, clock: ManualClock) -> None:
    assert (await mq.create_group("orders", "new")).idle_ms == 0
    async with mq.consumer("orders", "billing"):
        clock.advance(100)
        await asyncio.to_thread(mq._heartbeat.beat_once)
        assert {i.name: i.idle_ms for i in await mq.groups("orders")} == {"billing": None, "new": 100_000}
    clock.advance(7)
    assert {i.name: i.idle_ms for i in await mq.groups("orders")} == {"billing": 7_000, "new": 107_000}


async def test_activity_is_written_once_a_minute(mq: Connection, clock: ManualClock) -> None:
    await mq._endpoint.subscribe("orders", "billing", GroupWish(), "ann", "host")
    broker = broker_of(mq)
    group = broker.store.catalog.group("orders", "billing")
    written = []
    for _ in range(13):
        clock.advance(10)
        await asyncio.to_thread(mq._endpoint.beat, [Beat("orders", "billing", "ann", "host", ())])
        written.append(broker.store.usage.seen()[group.id])
    assert len(set(written)) == 3  # on joining, after a minute, after two
