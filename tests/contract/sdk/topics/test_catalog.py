"""The SDK on a real broker: topics, groups, and where groups stand."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Message
from postroom.clock import ManualClock
from tests.contract.stores import everywhere


async def values(mq: Connection, group: str, **settings: object) -> list[bytes]:
    """All that waits for the group."""
    found: list[bytes] = []
    async with mq.consumer("orders", group, **settings) as consumer:  # type: ignore[arg-type]
        while waiting := (await mq.lag("orders", group)).total.messages:
            messages = await consumer.poll(wait=10)
            assert messages, f"{waiting} messages are not handed out"
            await consumer.ack(messages)
            found += [m.value for m in messages]
        assert await consumer.poll(wait=0) == []
    return sorted(found)


@everywhere
async def test_topics(mq: Connection) -> None:
    info = await mq.create_topic("orders", partitions=3, retention="1d", retention_bytes="1MB")
    assert (info.name, info.partitions, info.settings.retention_ms) == ("orders", 3, 86_400_000)
    with pytest.raises(postroom.TopicExists):
        await mq.create_topic("orders")
    assert (await mq.create_topic("orders", exist_ok=True)).partitions == 3
    changed = await mq.alter_topic("orders", retention=0, keep="limits", drop_settled=True)
    assert changed.settings.retention_bytes == 1 << 20  # unchanged
    assert (changed.settings.retention_ms, changed.settings.keep, changed.settings.drop_settled) == (
        0,
        "limits",
        True,
    )
    assert (await mq.topic("orders")).settings == changed.settings
    assert [t.name for t in await mq.topics()] == ["orders"]
    route = await mq.route("orders")
    assert [(r.first_slot, r.last_slot, r.partition) for r in route.ranges] == [
        (0, 340, 0), (341, 681, 1), (682, 1023, 2),
    ]  # fmt: skip
    await mq.delete_topic("orders")
    assert await mq.topics() == []


@everywhere
async def test_a_topic_deleted_and_made_again(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.send("orders", b"old")
    await mq.delete_topic("orders")
    with pytest.raises(postroom.UnknownTopic):
        await mq.send("orders", b"nowhere")
    await mq.create_topic("orders", partitions=1)
    assert (await mq.send("orders", b"new")).offset == 0
    assert await values(mq, "billing") == [b"new"]


@pytest.mark.parametrize("name", ["", "a b", "_own", "orders.billing.dead", "ä", "x" * 121])
async def test_names_that_are_refused(mq: Connection, name: str) -> None:
    with pytest.raises(postroom.InvalidName):
        await mq.create_topic(name)


async def test_a_typo_makes_nothing(mq: Connection) -> None:
    await mq.create_topic("orders")
    for call in (
        mq.send("ordres", b""),
        mq.lag("ordres", "billing"),
        mq.groups("ordres"),
        mq.purge("ordres"),
    ):
        with pytest.raises(postroom.UnknownTopic, match="did you mean 'orders'"):
            await call
    with pytest.raises(postroom.UnknownTopic, match="did you mean 'orders'"):
        async with mq.consumer("ordres", "billing"):
            pass
    with pytest.raises(postroom.UnknownTopic, match="did you mean 'orders'"):
        await anext(mq.read("ordres"))
    assert [t.name for t in await mq.topics(internal=True)] == ["orders"]


@everywhere
async def test_groups_keep_their_settings(mq: Connection) -> None:
    await mq.create_topic("orders")
    info = await mq.create_group("orders", "billing", lease=7, max_attempts=3)
    assert (info.settings.lease_ms, info.settings.max_attempts) == (7000, 3)
    with pytest.raises(postroom.GroupExists):
        await mq.create_group("orders", "billing")
    with pytest.raises(postroom.GroupConflict, match="lease='7s'"):
        async with mq.consumer("orders", "billing", lease=8):
            pass
    async with mq.consumer("orders", "billing", lease=7, member="me") as consumer:
        assert consumer.member == "me"
        (group,) = await mq.groups("orders")
        assert [m.name for m in group.members] == ["me"]
        with pytest.raises(postroom.GroupLive):
            await mq.delete_group("orders", "billing")
        with pytest.raises(postroom.GroupLive):
            await mq.reset("orders", "billing", to="earliest")
    assert (await mq.alter_group("orders", "billing", lease=9)).settings.lease_ms == 9000
    (group,) = await mq.groups("orders")
    assert group.members == ()
    await mq.delete_group("orders", "billing")
    assert await mq.groups("orders") == []
    with pytest.raises(postroom.UnknownGroup):
        await mq.lag("orders", "billing")


@everywhere
async def test_where_a_group_starts(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.send("orders", b"0")
    clock.advance(60)
    noon = datetime.fromtimestamp(clock.now_ms() / 1000, UTC)
    await mq.send("orders", b"1")
    await mq.create_group("orders", "late", start="latest")
    await mq.send("orders", b"2")
    assert await values(mq, "early", start="earliest") == [b"0", b"1", b"2"]
    assert await values(mq, "late") == [b"2"]
    assert await values(mq, "timed", start=noon) == [b"1", b"2"]
    assert await values(mq, "placed", start={0: 2}) == [b"2"]


@everywhere
async def test_reset(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(4)])
    assert len(await values(mq, "billing")) == 4
    await mq.reset("orders", "billing", to={0: 2})
    assert await values(mq, "billing") == [b"2", b"3"]
    await mq.reset("orders", "billing", to="earliest")
    assert len(await values(mq, "billing")) == 4
    await mq.reset("orders", "billing", to="earliest")
    await mq.reset("orders", "billing", to="latest")
    assert await values(mq, "billing") == []


@everywhere
async def test_a_reset_under_a_live_consumer(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(4)])
    async with mq.consumer("orders", "billing") as consumer:
        held = await consumer.poll()
        await mq.reset("orders", "billing", to="earliest", force=True)
        with pytest.raises(postroom.DeliveryError):
            await consumer.ack(held)
        again = await consumer.poll(wait=10)
        assert [m.offset for m in again] == [0, 1, 2, 3]
        await consumer.ack(again)


@everywhere
async def test_pause_and_resume(mq: Connection) -> None:
    await mq.create_topic("orders")
    await mq.create_group("orders", "billing")
    assert (await mq.pause("orders", "billing")).paused
    await mq.send("orders", b"a")
    async with mq.consumer("orders", "billing") as consumer:
        assert await consumer.poll(wait="50ms") == []
        polling = asyncio.ensure_future(consumer.poll(wait=30))
        assert not (await mq.resume("orders", "billing")).paused
        await consumer.ack(await polling)


@everywhere
async def test_purge(mq: Connection) -> None:
    await mq.create_topic("orders")
    await mq.send_many("orders", [Message(b"%d" % i, key=str(i)) for i in range(10)])
    await mq.create_group("orders", "billing")
    assert await mq.purge("orders") == 10
    assert (await mq.topic("orders")).messages == 0
    await mq.send("orders", b"after")
    assert await values(mq, "billing") == [b"after"]


@everywhere
async def test_a_purge_under_a_live_consumer(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(10)])
    async with mq.consumer("orders", "billing", window=4) as consumer:
        held = await consumer.poll()
        await mq.purge("orders")
        await held[0].release()
        await consumer.ack(held[1:])
        await mq.send("orders", b"after")
        found: list[bytes] = []
        while b"after" not in found:
            messages = await consumer.poll(wait=10)
            assert messages
            found += [m.value for m in messages]
            await consumer.ack(messages)
    assert (await mq.lag("orders", "billing")).total.messages == 0


@everywhere
async def test_lag(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders", partitions=2)
    await mq.create_group("orders", "billing")
    await mq.send_many("orders", [Message(b"%d" % i, key=str(i)) for i in range(20)])
    clock.advance(5)
    lag = await mq.lag("orders", "billing")
    assert (lag.total.messages, lag.total.unsettled) == (20, 0)
    assert lag.total.oldest_age_ms >= 5000 and lag.total.bytes > 0
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        while len(messages) < 20:
            messages += await consumer.poll()
        await consumer.ack(messages[:15])
        lag = await mq.lag("orders", "billing")
        assert (lag.total.messages, lag.total.unsettled) == (5, 5)


@everywhere
async def test_read(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2)
    sent = await mq.send_many("orders", [Message(b"%d" % i, key=str(i % 9), id=f"o-{i}") for i in range(100)])
    found = [m async for m in mq.read("orders")]
    assert {(m.partition, m.offset, m.id) for m in found} == {(r.partition, r.offset, r.id) for r in sent}
    assert [m async for m in mq.read("orders", start="latest")] == []
    reading = mq.read("orders", start="latest", follow=True)
    following = asyncio.ensure_future(anext(reading))
    await asyncio.sleep(0)
    while not following.done():
        await mq.send("orders", b"more")
    assert following.result().value == b"more"
    await reading.aclose()
    assert await mq.groups("orders") == []


async def test_memory_is_shared_by_name_and_else_private(tmp_path: Path) -> None:
    name = f"memory://{tmp_path.name}"
    async with (
        postroom.connect(name) as one,
        postroom.connect(name) as two,
        postroom.connect("memory://") as own,
    ):
        await one.create_topic("orders")
        assert [t.name for t in await two.topics()] == ["orders"]
        assert await own.topics() == []
    async with postroom.connect(name) as again:
        assert await again.topics() == []  # gone with its last user


async def test_a_file_survives(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send_many("orders", [Message(b"%d" % i) for i in range(5)])
        async with mq.consumer("orders", "billing") as consumer:
            messages = await consumer.poll()
            await consumer.ack(messages[:2])
    async with postroom.connect(url) as mq:
        assert await values(mq, "billing") == [b"2", b"3", b"4"]


async def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "q.db").write_bytes(b"this is no database, " * 100)
    with pytest.raises(postroom.StoreError):
        await postroom.connect(f"sqlite:///{tmp_path}/q.db")
    with pytest.raises(postroom.StoreError):
        await postroom.connect(f"sqlite:///{tmp_path}/nowhere/at/all/q.db")
