"""Broadcast within a group (R11): every member gets every message, and is a group of its own beside it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

import postroom
from postroom import Connection, GroupInfo, Message
from postroom.broker.duties import ExpireGroups, Retention
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.model.policy.settings import GroupWish
from postroom.model.topology.names import base_of, is_unnamed, member_group
from tests.contract.brokers import run_duty
from tests.contract.stores import Open, everywhere


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=2)
    return connection


async def send(mq: Connection, *values: int) -> None:
    await mq.send_many("orders", [Message(b"%d" % value) for value in values])


async def take(consumer: postroom.Consumer, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        messages = await consumer.poll(wait=10)
        assert messages, f"only {found} of {count} came"
        await consumer.ack(messages)
        found += [int(m.value) for m in messages]
    return sorted(found)


async def names(mq: Connection) -> list[str]:
    return [info.name for info in await mq.groups("orders")]


async def info(mq: Connection, name: str) -> GroupInfo:
    return next(found for found in await mq.groups("orders") if found.name == name)


async def kept(mq: Connection) -> int:
    return (await mq.topic("orders")).messages


# ---- who gets what ---------------------------------------------------------------------------------------


@everywhere
async def test_every_member_gets_every_message(mq: Connection, opened: Open) -> None:
    async with AsyncExitStack() as stack:
        others = [await stack.enter_async_context(opened()) for _ in range(2)]
        consumers = [
            await stack.enter_async_context(at.consumer("orders", "cache", mode="broadcast"))
            for at in (mq, mq, *others)
        ]
        await send(mq, *range(50))
        for found in await asyncio.gather(*(take(consumer, 50) for consumer in consumers)):
            assert found == list(range(50))


async def test_a_member_without_a_name_begins_at_the_end(mq: Connection) -> None:
    await send(mq, 1, 2, 3)
    async with mq.consumer("orders", "cache", mode="broadcast", start="earliest") as consumer:
        assert await consumer.poll(wait=0) == []
        await send(mq, 4)
        assert await take(consumer, 1) == [4]


@everywhere
async def test_a_named_member_goes_on_where_it_stopped(mq: Connection, opened: Open) -> None:
    await send(mq, 1, 2)
    async with mq.consumer("orders", "cache", mode="broadcast", member="ann") as consumer:
        assert await take(consumer, 2) == [1, 2]
    await send(mq, 3)
    async with opened() as other, other.consumer("orders", "cache", member="ann") as consumer:
        assert await take(consumer, 1) == [3]
        assert await consumer.poll(wait=0) == []


async def test_a_named_member_begins_where_the_group_starts(mq: Connection) -> None:
    await mq.create_group("orders", "cache", mode="broadcast", start="latest")
    await send(mq, 1)
    async with mq.consumer("orders", "cache", member="ann") as consumer:
        await send(mq, 2)
        assert await take(consumer, 1) == [2]
    async with mq.consumer("orders", "cache", member="bob") as consumer:
        await send(mq, 3)
        assert await take(consumer, 1) == [3]


async def test_members_of_one_name_share(mq: Connection) -> None:
    settings = {"mode": "broadcast", "member": "ann", "window": 5}
    async with (
        mq.consumer("orders", "cache", **settings) as one,  # type: ignore[arg-type]
        mq.consumer("orders", "cache", **settings) as two,  # type: ignore[arg-type]
    ):
        await send(mq, *range(40))
        seen: list[int] = []

        async def member(consumer: postroom.Consumer) -> None:
            while len(seen) < 40:
                messages = await consumer.poll(max_messages=5, wait="50ms")
                seen.extend(int(m.value) for m in messages)
                await consumer.ack(messages)

        await asyncio.gather(member(one), member(two))
    assert sorted(seen) == list(range(40))


@everywhere
async def test_many_may_come_at_once(mq: Connection, opened: Open) -> None:
    """The first of them makes the group, whoever that is."""
    async with AsyncExitStack() as stack:
        places = [await stack.enter_async_context(opened()) for _ in range(3)]
        members = [None, None, "ann", "bob"]
        made = [
            at.consumer("orders", "cache", mode="broadcast", member=member)
            for at in places
            for member in members
        ]
        consumers = await asyncio.gather(*(stack.enter_async_context(consumer) for consumer in made))
        assert len(consumers) == 12
        listed = await names(mq)
        assert len(listed) == 1 + 6 + 2
        assert len((await info(mq, "cache")).members) == 12 - 4  # those of one name are one member


async def test_other_groups_are_not_affected(mq: Connection) -> None:
    async with (
        mq.consumer("orders", "cache", mode="broadcast") as cache,
        mq.consumer("orders", "billing") as billing,
    ):
        await send(mq, 1)
        assert await take(cache, 1) == await take(billing, 1) == [1]


async def test_a_consumer_shows_the_group_it_was_asked_for(mq: Connection) -> None:
    async with mq.consumer("orders", "cache", mode="broadcast", member="ann") as consumer:
        assert (consumer.group, consumer.member) == ("cache", "ann")


async def test_settings_belong_to_the_broadcast_group(mq: Connection) -> None:
    async with mq.consumer("orders", "cache", mode="broadcast", lease=20, member="ann"):
        with pytest.raises(postroom.GroupConflict):
            async with mq.consumer("orders", "cache", mode="shared"):
                pass
        with pytest.raises(postroom.GroupConflict):
            async with mq.consumer("orders", "cache", lease=10):
                pass
        assert (await info(mq, "cache@ann")).settings.lease_ms == 20_000


# ---- names ---------------------------------------------------------------------------------------------


async def test_users_cannot_take_a_members_name(mq: Connection) -> None:
    with pytest.raises(postroom.InvalidName):
        await mq.create_group("orders", "cache@ann")
    with pytest.raises(postroom.InvalidName):
        mq.consumer("orders", "cache@ann")
    with pytest.raises(postroom.InvalidName):
        await mq.create_topic("orders.cache@ann")


async def test_a_broadcast_groups_name_leaves_room(mq: Connection) -> None:
    with pytest.raises(postroom.InvalidName, match="at most 40"):
        await mq.create_group("orders", "c" * 41, mode="broadcast")
    with pytest.raises(postroom.InvalidName, match="at most 40"):
        async with mq.consumer("orders", "c" * 41, mode="broadcast"):
            pass
    async with mq.consumer("orders", "c" * 40, mode="broadcast", member="host-7.example.org") as consumer:
        await send(mq, 1)
        assert await take(consumer, 1) == [1]


@pytest.mark.parametrize("member", ["ann", "host-7.example.org", "ä" * 120, "_own", "a@b", "x" * 120, "…"])
@pytest.mark.parametrize("group", ["c", "c" * 40])
def test_the_name_of_a_members_group(group: str, member: str) -> None:
    name = member_group(group, member, named=True)
    assert name == member_group(group, member, named=True)
    assert len(name) <= 60 and name.count("@") == 1 and "." not in name and name.isascii()
    assert (base_of(name), is_unnamed(name)) == (group, False)
    assert name != member_group(group, member + "x", named=True)
    assert is_unnamed(member_group(group, member, named=False))
    assert base_of(group) is None


# ---- what is shown ---------------------------------------------------------------------------------------


async def test_members_are_listed(mq: Connection, clock: ManualClock) -> None:
    async with (
        mq.consumer("orders", "cache", mode="broadcast", member="ann"),
        mq.consumer("orders", "cache"),
    ):
        listed = {found.name: found for found in await mq.groups("orders")}
        (unnamed,) = (name for name in listed if is_unnamed(name))
        assert set(listed) == {"cache", "cache@ann", unnamed}
        assert [m.name for m in listed["cache@ann"].members] == ["ann"]
        assert set(listed["cache"].members) == {*listed["cache@ann"].members, *listed[unnamed].members}
        assert [found.idle_ms for found in listed.values()] == [None] * 3
        assert (await mq.topic("orders")).groups == ("cache",)
    assert await names(mq) == ["cache", "cache@ann"]
    clock.advance(90)
    assert [found.idle_ms for found in await mq.groups("orders")] == [90_000, 90_000]


async def test_the_lag_is_that_of_the_slowest_member(mq: Connection) -> None:
    await mq.create_group("orders", "cache", mode="broadcast")
    await send(mq, 1, 2)
    lag = await mq.lag("orders", "cache")
    assert (lag.total.messages, len(lag.partitions)) == (0, 2)  # nobody waits for anything
    async with mq.consumer("orders", "cache", member="ann") as ann, mq.consumer("orders", "cache") as unnamed:
        await send(mq, 3)
        await take(unnamed, 1)
        assert (await mq.lag("orders", "cache")).total.messages == 3
        assert (await mq.lag("orders", "cache")).group == "cache"
        assert await take(ann, 3) == [1, 2, 3]
        assert (await mq.lag("orders", "cache")).total.messages == 0
    await send(mq, 4)
    assert (await mq.lag("orders", "cache@ann")).total.messages == 1
    with pytest.raises(postroom.UnknownGroup):
        await mq.lag("orders", "cache@bob")


# ---- what is done to the group is done to its members ------------------------------------------------------


async def test_pause_and_resume(mq: Connection) -> None:
    async with mq.consumer("orders", "cache", mode="broadcast", member="ann"):
        pass
    await mq.pause("orders", "cache")
    await send(mq, 1)
    async with (
        mq.consumer("orders", "cache", member="ann") as known,
        mq.consumer("orders", "cache", member="bob") as new,
    ):
        assert await known.poll(wait="50ms") == await new.poll(wait="50ms") == []
        assert {found.paused for found in await mq.groups("orders")} == {True}
        await mq.resume("orders", "cache")
        assert await take(known, 1) == await take(new, 1) == [1]


async def test_alter(mq: Connection) -> None:
    async with mq.consumer("orders", "cache", mode="broadcast", member="ann"), mq.consumer("orders", "cache"):
        changed = await mq.alter_group("orders", "cache", lease=7, expires="1d")
        assert changed.settings.expires_ms == 86_400_000
        for found in await mq.groups("orders"):
            assert found.settings.lease_ms == 7_000
            unnamed = is_unnamed(found.name)
            assert found.settings.expires_ms == (DEFAULTS.unnamed_member_ms if unnamed else 86_400_000)


async def test_reset(mq: Connection) -> None:
    await send(mq, 1, 2)
    async with mq.consumer("orders", "cache", mode="broadcast", member="ann") as consumer:
        await take(consumer, 2)
        with pytest.raises(postroom.GroupLive, match="in use by 1"):
            await mq.reset("orders", "cache", to="earliest")
        await mq.reset("orders", "cache", to="earliest", force=True)
        assert await take(consumer, 2) == [1, 2]


async def test_delete(mq: Connection) -> None:
    async with mq.consumer("orders", "cache", mode="broadcast", member="ann", max_attempts=1) as consumer:
        await send(mq, 1)
        (message,) = await consumer.poll()
        await message.dead("broken")
        with pytest.raises(postroom.GroupLive):
            await mq.delete_group("orders", "cache")
    await mq.delete_group("orders", "cache")
    assert await names(mq) == []
    assert [t.name for t in await mq.topics(internal=True)] == ["orders"]


# ---- dead letters -----------------------------------------------------------------------------------------


@everywhere
async def test_dead_letters_are_the_members_own(mq: Connection) -> None:
    async with (
        mq.consumer("orders", "cache", mode="broadcast", member="ann") as ann,
        mq.consumer("orders", "cache", member="bob") as bob,
    ):
        await mq.send("orders", b"1", id="o-1")
        (message,) = await ann.poll()
        await message.dead("broken")
        assert await take(bob, 1) == [1]
        assert [d.id for d in await mq.dead_letters("orders", "cache@ann")] == ["o-1"]
        assert await mq.dead_letters("orders", "cache@bob") == []
        assert [d.reason for d in await mq.dead_letters("orders", "cache")] == ["broken"]
        with pytest.raises(postroom.UsageError, match="name the member"):
            await mq.redrive("orders", "cache", ids=["o-1"])
        assert await mq.redrive("orders", "cache@ann", ids=["o-1"]) == 1
        (again,) = await ann.poll()
        assert (again.id, again.topic) == ("o-1", "orders")
        await again.dead("still")
        assert await bob.poll(wait=0) == []
        assert await mq.redrive("orders", "cache") == 1
        assert await take(ann, 1) == [1]
        assert {t.name for t in await mq.topics(internal=True)} == {
            "orders", "orders.cache@ann.dead", "orders.cache@ann.retry",
        }  # fmt: skip


# ---- forgetting ------------------------------------------------------------------------------------------


async def test_a_member_without_a_name_is_forgotten_when_it_leaves(mq: Connection) -> None:
    async with mq.consumer("orders", "cache", mode="broadcast") as consumer:
        await send(mq, 1)
        (message,) = await consumer.poll()
        await message.dead("broken")
        assert len(await names(mq)) == 2
        assert len(await mq.topics(internal=True)) == 2
    assert await names(mq) == ["cache"]
    assert [t.name for t in await mq.topics(internal=True)] == ["orders"]


async def crash(mq: Connection, member: str, *, named: bool = False) -> str:
    """A member that came and was never heard of again."""
    wish = GroupWish(mode="broadcast")
    return (await mq._endpoint.subscribe("orders", "cache", wish, member, "host", named=named)).name


async def test_a_member_without_a_name_is_forgotten_when_it_is_idle(
    mq: Connection, clock: ManualClock
) -> None:
    name = await crash(mq, "m1")
    await send(mq, 1)
    clock.advance(DEFAULTS.unnamed_member_ms / 1000)
    await run_duty(mq, ExpireGroups)
    assert name in await names(mq)
    clock.advance(61)
    await run_duty(mq, ExpireGroups)
    assert await names(mq) == ["cache"]


async def test_one_that_is_at_work_is_not(mq: Connection, clock: ManualClock) -> None:
    async with mq.consumer("orders", "cache", mode="broadcast") as consumer:
        for _ in range(3):
            clock.advance(DEFAULTS.unnamed_member_ms / 1000)
            await asyncio.to_thread(mq._heartbeat.beat_once)
            await run_duty(mq, ExpireGroups)
        await send(mq, 1)
        assert await take(consumer, 1) == [1]


async def test_named_members_stay(mq: Connection, clock: ManualClock) -> None:
    name = await crash(mq, "ann", named=True)
    clock.advance(30 * 86_400)
    await run_duty(mq, ExpireGroups)
    assert await names(mq) == ["cache", name]


@everywhere
async def test_an_unused_broadcast_group_expires_after_its_members(
    mq: Connection, clock: ManualClock
) -> None:
    await mq.create_group("orders", "cache", mode="broadcast", expires="1h")
    await crash(mq, "ann", named=True)
    await crash(mq, "m1")
    for minutes, left in ((30, ["cache", "cache@ann"]), (32, ["cache"]), (60, ["cache"]), (2, [])):
        clock.advance(60 * minutes)
        await run_duty(mq, ExpireGroups)
        assert await names(mq) == left


async def test_a_broadcast_group_lives_as_long_as_a_member(mq: Connection, clock: ManualClock) -> None:
    async with mq.consumer("orders", "cache", mode="broadcast", expires="1h", member="ann"):
        for _ in range(3):
            clock.advance(3700)
            await asyncio.to_thread(mq._heartbeat.beat_once)
            await run_duty(mq, ExpireGroups)
        assert await names(mq) == ["cache", "cache@ann"]


# ---- retention ------------------------------------------------------------------------------------------


async def test_the_group_itself_holds_nothing_back_and_its_members_do(
    mq: Connection, clock: ManualClock
) -> None:
    await mq.alter_topic("orders", retention=60)
    await mq.create_group("orders", "cache", mode="broadcast")
    await send(mq, 1, 2, 3)
    clock.advance(61)
    await run_duty(mq, Retention)
    assert await kept(mq) == 0
    async with mq.consumer("orders", "cache", member="ann") as consumer:
        await send(mq, 4)
        clock.advance(61)
        await run_duty(mq, Retention)
        assert await kept(mq) == 1
        await take(consumer, 1)
        await run_duty(mq, Retention)
        assert await kept(mq) == 0
