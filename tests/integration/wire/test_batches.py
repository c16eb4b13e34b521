"""Batches that come over the wire are looked into before they are stored: a token is not trust (R48)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

import postroom
from postroom.broker.access import new_token
from postroom.clock import wall_ms
from postroom.errors import CorruptBatch, InvalidMessage, MessageTooLarge, UsageError
from postroom.model.access import Principal, hash_of, parse_permissions
from postroom.model.messages.batch import BatchBuilder, build_control
from tests.damage import garbage
from tests.integration.wire.wire_raw import broker_of, served
from tests.tuned import Tune

TOKEN = new_token()


@pytest.fixture
async def stranger() -> AsyncIterator[postroom.Connection]:
    """A principal that may send to one topic."""
    async with served(dev=False) as (mq, server):
        may = parse_permissions(["send:orders", "consume:orders"])
        broker_of(mq).store.access.add(Principal("evil", may), hash_of(TOKEN))
        await mq.create_topic("orders", partitions=1)
        async with postroom.connect(server.url, token=TOKEN) as evil:
            yield evil


def holding(size: int, headers: int = 0, timestamp: int = 1) -> bytes:
    builder = BatchBuilder("lz4", max_bytes=2**31 - 1)
    builder.append(timestamp, None, bytes(size), [("a", b"b")] * headers)
    return builder.build(5, 0, 0)


HOSTILE = [
    (garbage(), CorruptBatch),
    (garbage(compression=3), CorruptBatch),
    (holding(60 << 20), MessageTooLarge),
    (holding(5 << 20), MessageTooLarge),
    (holding(1, 200), MessageTooLarge),
    (build_control(64), UsageError),
    (holding(1, timestamp=wall_ms() * 1000), InvalidMessage),
    (holding(1, timestamp=wall_ms() + 25 * 3_600_000), InvalidMessage),
]


@pytest.mark.parametrize(("batch", "kind"), HOSTILE, ids=range(len(HOSTILE)))
async def test_a_hostile_batch_is_not_stored(
    stranger: postroom.Connection, batch: bytes, kind: type[Exception]
) -> None:
    """Appended, appended with a delay, or staged."""
    place = (await stranger.route("orders")).ranges[0].partition_id
    ask = stranger._endpoint
    with pytest.raises(kind):
        await ask.append("orders", place, batch)
    with pytest.raises(kind):
        await ask.append("orders", place, batch, due_at=ask.now_ms() + 60_000)
    with pytest.raises(kind):
        await ask.stage("orders", "mine", 0, "a", 0, (place,), batch)
    found = await ask.fetch("orders", place, 0, max_messages=1, max_bytes=1, wait_ms=0)
    assert found.end == 0


async def test_large_batches_of_the_sdk_pass(stranger: postroom.Connection) -> None:
    """The rest of the walk goes on in a thread."""
    many = [postroom.Message(b"x" * 900, headers={"a": "b"}) for _ in range(9_000)]
    async with stranger.producer("orders", batch_bytes=8 << 20, batch_messages=10_000) as producer:
        await producer.send_many(many)
        await producer.send(b"x" * (4 << 20))
    assert [len(m.value) async for m in stranger.read("orders")] == [900] * 9_000 + [4 << 20]


def numbered(first: int, count: int) -> bytes:
    """Messages of one producer, from this sequence on."""
    builder = BatchBuilder(max_bytes=2**31 - 1)
    for _ in range(count):
        builder.append(1, None, b"x", [("a", b"b")] * 40)
    return builder.build(5, 0, first)


async def test_a_batch_that_is_read_in_a_thread_is_not_overtaken_by_the_next(tune: Tune) -> None:
    tune(wire={"admit_s": 0.0})
    async with served() as (mq, server), postroom.connect(server.url) as sender:
        await mq.create_topic("orders", partitions=1)
        place = (await sender.route("orders")).ranges[0].partition_id
        batches = [numbered(0, 10_000), numbered(10_000, 1), numbered(10_001, 1)]  # the first takes longest
        stored = await asyncio.gather(*[sender._endpoint.append("orders", place, one) for one in batches])
        assert [one.base_offset for one in stored] == [0, 10_000, 10_001]
