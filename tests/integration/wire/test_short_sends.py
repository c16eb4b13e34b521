"""A send over the wire is queued without a task where nothing has to be looked up; it is checked as ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import NamedTuple

import pytest

import postroom
from postroom.broker.access import new_token
from postroom.broker.publish.writer import Writer
from postroom.client.producer.accumulator import Accumulator
from postroom.clock import wall_ms
from postroom.errors import (
    CorruptBatch,
    InvalidMessage,
    MessageTooLarge,
    PartitionSealed,
    PermissionDenied,
    PostroomError,
    SequenceGap,
    UnknownPartition,
    UsageError,
)
from postroom.model.access import Principal, hash_of, parse_permissions
from postroom.model.messages.batch import BatchBuilder, build_control
from postroom.wire.server.server import WireServer
from postroom.wire.server.session import Session
from tests.damage import garbage
from tests.integration.wire.wire_raw import CANCEL, Raw, broker_of, eventually, served
from tests.tuned import Tune

APPEND = 10
SHOP, EVIL = new_token(), new_token()


def batch(first: int, count: int = 1, *, producer: int = 5, timestamp: int = 1, headers: int = 0) -> bytes:
    builder = BatchBuilder(max_bytes=2**31 - 1)
    for _ in range(count):
        builder.append(timestamp, None, b"x", [("a", b"b")] * headers)
    return builder.build(producer, 0, first)


class Place(NamedTuple):
    mq: postroom.Connection
    server: WireServer
    partition_id: int


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        yield Place(mq, server, (await mq.route("orders")).ranges[0].partition_id)


@pytest.fixture
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that were asked by way of a task."""
    asked: list[str] = []
    call = Session.call

    async def noted(self: Session, operation: object, *args: object, **more: object) -> object:
        asked.append(operation.name)  # type: ignore[attr-defined]
        return await call(self, operation, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Session, "call", noted)
    return asked


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What is queued is not stored until these are called; they are there once it is queued."""
    waiting: list[Callable[[], None]] = []
    store = Writer._store_arrived
    monkeypatch.setattr(Writer, "_store_arrived", lambda self: waiting.append(lambda: store(self)))
    return waiting


async def test_only_the_first_send_to_a_partition_asks_by_way_of_a_task(
    place: Place, long_ways: list[str]
) -> None:
    async with postroom.connect(place.server.url) as mq:
        receipts = [await mq.send("orders", b"%d" % number) for number in range(10)]
        assert [receipt.offset for receipt in receipts] == [*range(10)]
    assert long_ways.count("append") == 1
    assert [message.value async for message in place.mq.read("orders")] == [b"%d" % n for n in range(10)]


async def test_a_client_waits_for_its_sends_without_a_task(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[object] = []
    monkeypatch.setattr(Accumulator, "_begin", lambda *args: tasks.append(args))
    async with postroom.connect(place.server.url) as mq:
        receipts = [await mq.send("orders", b"%d" % number) for number in range(10)]
        assert [receipt.offset for receipt in receipts] == [*range(10)]
    assert not tasks


async def test_what_has_an_id_a_moment_or_many_bytes_goes_the_long_way(
    place: Place, long_ways: list[str]
) -> None:
    async with postroom.connect(place.server.url) as mq:
        await mq.send("orders", b"first")
        await mq.send("orders", bytes(20_000))
        receipt = await mq.send("orders", b"later", delay="1h")
        assert await mq.cancel("orders", receipt.id or "")
        assert long_ways.count("append") == 3
        await mq.alter_topic("orders", dedup_window="1h")
        assert not (await mq.send("orders", b"once", id="a")).duplicate
        assert (await mq.send("orders", b"once", id="a")).duplicate
        await mq.send("orders", b"no id")  # the topic looks for ids
    assert long_ways.count("append") == 6


HOSTILE = [
    (b"", CorruptBatch),
    (b"nothing", CorruptBatch),
    (garbage(), CorruptBatch),
    (batch(1)[:-1] + b"?", CorruptBatch),
    (build_control(64), UsageError),
    (batch(1, headers=200), MessageTooLarge),
    (batch(1, timestamp=wall_ms() * 1000), InvalidMessage),
    (batch(7), SequenceGap),
]


@pytest.mark.parametrize(("hostile", "kind"), HOSTILE, ids=range(len(HOSTILE)))
async def test_a_hostile_batch_is_refused_there_as_well(
    place: Place, hostile: bytes, kind: type[PostroomError], long_ways: list[str]
) -> None:
    async with postroom.connect(place.server.url) as mq:
        append = mq._endpoint.append
        await append("orders", place.partition_id, batch(0))
        with pytest.raises(kind):
            await append("orders", place.partition_id, hostile)
        with pytest.raises(UnknownPartition):
            await append("orders", place.partition_id + 1, batch(1))
        assert (await append("orders", place.partition_id, batch(1))).base_offset == 1
        assert (await append("orders", place.partition_id, batch(1))).duplicate
    assert (await place.mq.topic("orders")).messages == 2


async def test_no_send_overtakes_one_that_is_read_in_a_thread(
    place: Place, tune: Tune, long_ways: list[str]
) -> None:
    tune(wire={"admit_s": 0.0})
    async with served() as (mq, server), postroom.connect(server.url) as sender:
        await mq.create_topic("orders", partitions=1)
        at = (await sender.route("orders")).ranges[0].partition_id
        append = sender._endpoint.append
        for first in (0, 1):
            await append("orders", at, batch(first))
        assert long_ways == ["route", "append"]
        batches = [batch(2, 10_000, headers=40), batch(10_002), batch(10_003)]  # the first takes longest
        stored = await asyncio.gather(*[append("orders", at, one) for one in batches])
        assert [one.base_offset for one in stored] == [2, 10_002, 10_003]
        await append("orders", at, batch(10_004))
        assert long_ways.count("append") == 4  # and the last one went the short way again


async def test_a_cancelled_send_is_answered_once(place: Place, held_up: list[Callable[[], None]]) -> None:
    writer = broker_of(place.mq)._work.writer_of(place.partition_id)
    assert writer is not None
    async with Raw.open(place.server.port) as raw:
        for id in (7, 8):  # the first goes the long way
            raw.send(APPEND, ["orders", place.partition_id], id=id, body=batch(id - 7))
            await eventually(lambda: bool(held_up))
            raw.send(CANCEL, [id], id=0)
            came = await raw.receive()
            assert (came.id, came.code) == (id, "broker_unavailable")
            held_up.pop()()
            await eventually(lambda: not writer.queued_bytes)
        assert await raw.alive()
    assert (await place.mq.topic("orders")).messages == 2


async def test_a_client_that_goes_leaves_nothing_behind(
    place: Place, held_up: list[Callable[[], None]]
) -> None:
    async with Raw.open(place.server.port) as raw:
        raw.send(APPEND, ["orders", place.partition_id], id=7, body=batch(0))
        await eventually(lambda: bool(held_up))
        held_up.pop()()
        assert (await raw.receive()).flags == 1
        raw.send(APPEND, ["orders", place.partition_id], id=7, body=batch(1))
        await eventually(lambda: bool(held_up))
    await eventually(lambda: not place.server.connections)
    assert place.server.held_bytes == 0
    held_up.pop()()


async def test_a_broker_that_stops_answers_what_is_queued(
    place: Place, held_up: list[Callable[[], None]]
) -> None:
    async with Raw.open(place.server.port) as raw:
        for id in (7, 8):
            raw.send(APPEND, ["orders", place.partition_id], id=id, body=batch(id - 7))
            await eventually(lambda: bool(held_up))
            if id == 8:
                stopping = asyncio.create_task(place.server.stop(grace_ms=20_000))
                await eventually(lambda: all(one._stopping for one in place.server.connections))
            held_up.pop()()
            came = await raw.receive()
            assert (came.id, came.flags) == (id, 1)
        await stopping


async def test_an_id_is_in_use_until_the_send_is_answered(
    place: Place, held_up: list[Callable[[], None]]
) -> None:
    async with Raw.open(place.server.port) as raw:
        raw.send(APPEND, ["orders", place.partition_id], id=7, body=batch(0))
        await eventually(lambda: bool(held_up))
        held_up.pop()()
        await raw.receive()
        for first in (1, 2):
            raw.send(APPEND, ["orders", place.partition_id], id=7, body=batch(first))
        assert (await raw.refused()).code == "protocol"
    held_up.pop()()


async def test_a_sealed_partition_says_so(place: Place) -> None:
    async with postroom.connect(place.server.url) as mq:
        append = mq._endpoint.append
        await append("orders", place.partition_id, batch(0))
        await place.mq.split("orders", 0)
        with pytest.raises(PartitionSealed):
            await append("orders", place.partition_id, batch(1))
        assert (await mq.send("orders", b"x", key="k")).partition in (1, 2)


async def stored(mq: postroom.Connection, partition_id: int, first: int) -> bool:
    try:
        await mq._endpoint.append("orders", partition_id, batch(first))
    except PermissionDenied:
        return False
    return True


async def test_what_was_permitted_before_is_asked_again() -> None:
    async with served(dev=False) as (mq, server):
        access = broker_of(mq).store.access
        access.add(Principal("shop", parse_permissions(["send:orders"])), hash_of(SHOP))
        access.add(Principal("evil", parse_permissions(["send:orders"])), hash_of(EVIL))
        for topic in ("orders", "secrets"):
            await mq.create_topic(topic, partitions=1)
        orders, secret = [(await mq.route(topic)).ranges[0].partition_id for topic in ("orders", "secrets")]
        async with (
            postroom.connect(server.url, token=SHOP) as shop,
            postroom.connect(server.url, token=EVIL) as evil,
        ):
            for first in (0, 1, 2):  # each has a producer of this id
                for sender in (shop, evil):
                    assert not (await sender._endpoint.append("orders", orders, batch(first))).duplicate
            with pytest.raises(PermissionDenied):
                await evil._endpoint.append("secrets", secret, batch(0, producer=6))
            with pytest.raises(UnknownPartition):
                await evil._endpoint.append("orders", secret, batch(0, producer=6))
            access.put(Principal("evil", parse_permissions(["consume:orders"])), hash_of(EVIL))
            first = 3
            async with asyncio.timeout(20):
                while await stored(evil, orders, first):  # until its permissions are read again
                    first += 1
            assert not await stored(evil, orders, first)  # they are known now
        assert (await mq.topic("secrets")).messages == 0
