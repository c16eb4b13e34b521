"""Producers and reply topics are their principal's: nobody else goes on with them (I3, I23)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

import postroom
from postroom.broker.access import Gatekeeper, new_token
from postroom.clock import SystemClock
from postroom.config import DEFAULTS
from postroom.errors import LimitReached, PermissionDenied, UnknownProducer
from postroom.model.access import Principal, hash_of, parse_permissions
from postroom.model.messages.batch import BatchBuilder, BatchHeader, read_header
from postroom.model.policy.settings import GroupWish
from postroom.store.contract import Appended
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer
from tests.integration.wire.wire_raw import broker_of, eventually, served

SHOP, EVIL = new_token(), new_token()


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[tuple[postroom.Connection, WireServer]]:
    async with served(dev=False, url=f"sqlite:///{tmp_path}/q.db") as (mq, server):
        access = broker_of(mq).store.access
        access.add(Principal("shop", parse_permissions(["send:orders"])), hash_of(SHOP))
        both = parse_permissions(["send:orders", "consume:orders"])
        access.add(Principal("evil", both), hash_of(EVIL))
        await mq.create_topic("orders", partitions=1)
        yield mq, server


def batch(value: bytes, producer_id: int, epoch: int, sequence: int) -> bytes:
    builder = BatchBuilder()
    builder.append(1, None, value, [])
    return builder.build(producer_id, epoch, sequence)


async def last_header(mq: postroom.Connection) -> BatchHeader:
    """What whoever may consume the topic is told of the producer that sent last."""
    partition_id = (await mq.route("orders")).ranges[0].partition_id
    fetched = await mq._endpoint.fetch(
        "orders", partition_id, 0, max_messages=100, max_bytes=1 << 20, wait_ms=0
    )
    return read_header(fetched.batches[-1].data)


async def append(mq: postroom.Connection, data: bytes, *, due_at: int = 0) -> Appended:
    partition_id = (await mq.route("orders")).ranges[0].partition_id
    return await mq._endpoint.append("orders", partition_id, data, due_at=due_at)


async def values(mq: postroom.Connection) -> list[bytes]:
    return [message.value async for message in mq.read("orders", start="earliest", follow=False)]


async def test_whoever_reads_a_producers_id_cannot_take_its_next_place(
    place: tuple[postroom.Connection, WireServer],
) -> None:
    mq, server = place
    async with (
        postroom.connect(server.url, token=SHOP) as shop,
        postroom.connect(server.url, token=EVIL) as evil,
    ):
        await shop.send("orders", b"victim 0")
        seen = await last_header(evil)
        with pytest.raises(UnknownProducer):
            await append(evil, batch(b"evil", seen.producer_id, seen.epoch, seen.base_sequence + 1))
        first = await append(evil, batch(b"evil 0", seen.producer_id, seen.epoch, 0))
        assert not first.duplicate, "evil's first is evil's own message, and not an answer about the victim's"
        await append(evil, batch(b"evil 1", seen.producer_id, seen.epoch, 1))
        receipt = await shop.send("orders", b"victim 1")
        assert not receipt.duplicate
        await append(evil, batch(b"evil 2", seen.producer_id, 1000, 0))
        assert not (await shop.send("orders", b"victim 2")).duplicate, "nor is it fenced"
        assert [v for v in await values(mq) if v.startswith(b"victim")] == [
            b"victim 0",
            b"victim 1",
            b"victim 2",
        ]


async def test_no_client_takes_the_place_of_an_embedded_producer(
    place: tuple[postroom.Connection, WireServer],
) -> None:
    mq, server = place
    await mq.send("orders", b"victim 0")
    async with postroom.connect(server.url, token=EVIL) as evil:
        seen = await last_header(evil)
        with pytest.raises(UnknownProducer):
            await append(evil, batch(b"evil", seen.producer_id, seen.epoch, seen.base_sequence + 1))
        await append(evil, batch(b"evil", seen.producer_id, 1000, 0))
        await append(
            evil, batch(b"later", seen.producer_id, 1001, 0), due_at=mq._endpoint.now_ms() + 3_600_000
        )
        assert not (await mq.send("orders", b"victim 1")).duplicate
    assert await values(mq) == [b"victim 0", b"evil", b"victim 1"]


async def test_no_client_takes_the_place_of_the_mover_of_delayed_messages(
    place: tuple[postroom.Connection, WireServer],
) -> None:
    """I12: it stores what is due under an id and sequences of its own, which consumers read."""
    mq, server = place

    async def arrived(count: int) -> None:
        async with asyncio.timeout(30):
            while len(await values(mq)) < count:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.01)

    async with (
        postroom.connect(server.url, token=SHOP) as shop,
        postroom.connect(server.url, token=EVIL) as evil,
    ):
        await shop.send("orders", b"due 0", delay="20ms")
        await arrived(1)
        seen = await last_header(evil)
        assert seen.producer_id >= 0
        with pytest.raises(UnknownProducer):
            await append(evil, batch(b"evil", seen.producer_id, seen.epoch, seen.base_sequence + 1))
        await append(evil, batch(b"evil", seen.producer_id, seen.epoch + 1, 0))
        await shop.send("orders", b"due 1", delay="20ms")
        await arrived(3)
    assert await values(mq) == [b"due 0", b"evil", b"due 1"]


async def test_a_repeat_is_known_to_every_broker_and_with_a_new_token(
    place: tuple[postroom.Connection, WireServer], tmp_path: Path
) -> None:
    """The same principal, another broker on the same queue; then its token is another (I3)."""
    mq, server = place
    data, rotated = batch(b"once", 12345, 0, 0), new_token()
    async with postroom.connect(server.url, token=SHOP) as shop:
        first = await append(shop, data)
    assert not first.duplicate
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as beside:
        broker = broker_of(beside)
        gatekeeper = Gatekeeper(broker.store, broker.in_thread, SystemClock())
        other = WireServer(broker, Listening(port=0), gatekeeper)
        await other.start()
        try:
            for token in (SHOP, rotated):
                permissions = parse_permissions(["send:orders"])
                broker_of(mq).store.access.put(Principal("shop", permissions), hash_of(token))
                async with postroom.connect(other.url, token=token) as shop:
                    again = await append(shop, data)
                    assert (again.duplicate, again.base_offset) == (True, first.base_offset)
                    await append(shop, batch(b"next", 12345, 0, 1 if token is SHOP else 2))
        finally:
            await other.stop(grace_ms=1000)
    embedded = [await append(mq, batch(b"embedded", 999, 0, 0)) for _ in range(2)]
    assert [one.duplicate for one in embedded] == [False, True]
    assert await values(mq) == [b"once", b"next", b"next", b"embedded"]


async def test_what_a_principal_stages_counts_towards_its_rate(
    place: tuple[postroom.Connection, WireServer],
) -> None:
    """Whatever name its client gives (R40)."""
    mq, server = place
    await mq.limit_rate(producer="evil", messages_per_s=0.001)
    async with postroom.connect(server.url, token=EVIL) as evil:
        await evil.send("orders", b"1")  # all there is for a long time
        ask, where = evil._endpoint, (await evil.route("orders")).ranges[0].partition_id
        data = batch(b"2", -1, -1, -1)
        staging = asyncio.ensure_future(ask.stage("orders", "job", 0, "a", 0, (where,), data, "another"))
        gates = broker_of(mq)._quotas._gates
        await eventually(
            lambda: staging.done() or ("producer:evil" in gates and gates["producer:evil"].crowded)
        )
        assert not staging.done()
        await mq.limit_rate(producer="evil")
        await asyncio.wait_for(staging, 20)


# ---- reply topics (R38) ----


def limited(mq: postroom.Connection, reply_topics: int) -> None:
    broker_of(mq)._replies._limits = replace(DEFAULTS, reply_topics=reply_topics)


async def test_a_principal_has_so_many_reply_topics_at_once(
    place: tuple[postroom.Connection, WireServer],
) -> None:
    mq, server = place
    limited(mq, 3)
    async with (
        postroom.connect(server.url, token=SHOP) as shop,
        postroom.connect(server.url, token=EVIL) as evil,
    ):
        for number in range(3):
            await evil._endpoint.open_replies(f"client-{number}")
        with pytest.raises(LimitReached, match="3 reply topics") as raised:
            await evil._endpoint.open_replies("client-3")
        assert raised.value.retriable
        first = await evil._endpoint.open_replies("client-0")  # it lives: that is always heard
        assert (await evil._endpoint.open_replies("client-0")) == first
        await shop._endpoint.open_replies("client-3")  # another's are another's
        for number in range(9):
            await mq._endpoint.open_replies(f"client-{number}")  # and nobody counts those of this process
        await evil._endpoint.close_replies("client-1")
        await evil._endpoint.open_replies("client-3")


async def test_a_principal_makes_so_many_reply_topics_a_minute(
    place: tuple[postroom.Connection, WireServer],
) -> None:
    """Each is a table that is made and dropped."""
    mq, server = place
    limited(mq, 2)
    async with postroom.connect(server.url, token=EVIL) as evil:
        for number in range(4):
            await evil._endpoint.open_replies(f"client-{number}")
            await evil._endpoint.close_replies(f"client-{number}")
        with pytest.raises(LimitReached, match="within a minute"):
            await evil._endpoint.open_replies("client-4")
    async with postroom.connect(server.url, token=SHOP) as shop:
        await shop._endpoint.open_replies("client-4")


async def test_a_reply_topic_is_read_kept_and_closed_by_its_owner_alone(
    place: tuple[postroom.Connection, WireServer],
) -> None:
    mq, server = place
    async with (
        postroom.connect(server.url, token=SHOP) as shop,
        postroom.connect(server.url, token=EVIL) as evil,
    ):
        mine = await shop._endpoint.open_replies("client")
        other = await evil._endpoint.open_replies("client")  # the same name is another topic
        assert other.name != mine.name
        await evil._endpoint.close_replies("client")
        assert (await shop._endpoint.open_replies("client")) == mine
        ask = evil._endpoint
        with pytest.raises(PermissionDenied):
            await ask.fetch(mine.name, mine.partition_id, 0, max_messages=1, max_bytes=99, wait_ms=0)
        with pytest.raises(PermissionDenied):
            await ask.delete_topic(mine.name)
        with pytest.raises(PermissionDenied):
            await ask.subscribe(mine.name, "g", GroupWish(), "m", "c")
        assert [topic.name for topic in await evil.topics()] == ["orders"]
    assert mine.name in [topic.name for topic in await mq._endpoint.topics()]
