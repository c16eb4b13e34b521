"""Whatever a Kafka client may send: the right error, nothing stored, and no other client disturbed."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kio.index import load_response_schema
from kio.serial import entity_reader

from postroom import Connection
from postroom.config import DEFAULTS
from postroom.kafka.apis import APIS, Code
from postroom.kafka.primitives import Writer
from postroom.model.messages.batch import BatchBuilder, build_control
from tests.kafka.integration.clients import PATIENCE_S


class Wire:
    """A client that says what it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self.writer = reader, writer
        self._id = 0

    def send(self, key: int, version: int, body: bytes) -> None:
        self._id += 1
        flexible = key in APIS and version >= APIS[key].flexible
        header = struct.pack(">hhih", key, version, self._id, -1) + (b"\0" if flexible else b"")
        self.writer.write(struct.pack(">i", len(header) + len(body)) + header + body)

    async def answer(self, key: int, version: int) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            [size] = struct.unpack(">i", await self._reader.readexactly(4))
            data = await self._reader.readexactly(size)
        assert struct.unpack(">i", data[:4])[0] == self._id
        tagged = version >= APIS[key].flexible and key != 18
        found, _ = entity_reader(load_response_schema(key, version))(data[5 if tagged else 4 :], 0)
        return found

    async def closed(self) -> bool:
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read() == b""


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Wire]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()


@pytest.fixture
async def wire(queue: Connection, address: str) -> AsyncIterator[Wire]:
    await queue.create_topic("orders", kafka_partitions=1)
    async with connected(address) as wire:
        yield wire


def produce(batch: bytes | None, *, topic: str = "orders", acks: int = -1, partition: int = 0) -> bytes:
    """The body of a Produce request of version 7."""
    out = Writer(flexible=False)
    out.string(None)
    out.i16(acks)
    out.i32(1000)
    out.count(1)
    out.string(topic)
    out.count(1)
    out.i32(partition)
    out.count(-1 if batch is None else len(batch))
    out.raw([batch or b""])
    return b"".join(out.done())


def a_batch(count: int = 1, **identity: int) -> bytes:
    builder = BatchBuilder(max_bytes=DEFAULTS.max_batch_bytes * 4)
    for number in range(count):
        builder.append(1_000, None, b"%d" % number, [])
    return builder.build(**identity)


async def produced(wire: Wire, body: bytes, version: int = 7) -> Any:
    wire.send(0, version, body)
    found = await wire.answer(0, version)
    return found.responses[0].partition_responses[0]


def transactional() -> bytes:
    from aiokafka.record.util import calc_crc32c

    batch = bytearray(a_batch())
    batch[22] |= 0x10
    batch[17:21] = struct.pack(">I", calc_crc32c(bytes(batch[21:])))
    return bytes(batch)


BAD = {
    "a wrong checksum": (a_batch()[:-1] + b"\xff", Code.INVALID_RECORD),
    "bytes behind the batch": (a_batch() + b"x", Code.INVALID_RECORD),
    "two batches": (a_batch() * 2, Code.INVALID_RECORD),
    "no batch": (None, Code.INVALID_RECORD),
    "a few bytes": (b"abc", Code.INVALID_RECORD),
    "an old format": (a_batch()[:16] + b"\x01" + a_batch()[17:], Code.INVALID_RECORD),
    "a control batch": (build_control(64), Code.INVALID_RECORD),
    "a transaction": (transactional(), Code.INVALID_TXN_STATE),
    "too many messages": (a_batch(DEFAULTS.max_batch_messages + 1), Code.MESSAGE_TOO_LARGE),
}


@pytest.mark.slow("waits for clients of Kafka")
@pytest.mark.parametrize("what", BAD)
async def test_a_batch_that_may_not_be_stored_is_refused_and_the_connection_goes_on(
    queue: Connection, wire: Wire, what: str
) -> None:
    batch, code = BAD[what]
    found = await produced(wire, produce(batch))
    assert (int(found.error_code), found.base_offset) == (code, -1)
    assert found.log_start_offset >= 0, "else Java tries it again and again"
    assert int((await produced(wire, produce(a_batch()))).error_code) == 0
    assert (await queue.topic("orders")).messages == 1


async def test_errors_tell_topics_and_partitions_apart_from_other_faults(wire: Wire) -> None:
    for body, code in (
        (produce(a_batch(), topic="nowhere"), Code.UNKNOWN_TOPIC_OR_PARTITION),
        (produce(a_batch(), partition=7), Code.UNKNOWN_TOPIC_OR_PARTITION),
        (produce(a_batch(), partition=-1), Code.UNKNOWN_TOPIC_OR_PARTITION),
        (produce(a_batch(), acks=5), Code.INVALID_REQUIRED_ACKS),
    ):
        assert int((await produced(wire, body)).error_code) == code


async def test_sequences_are_kept_as_kafka_keeps_them(wire: Wire) -> None:
    """A repeat has its first offset; a gap, and an epoch that was replaced, are errors of their own (I3)."""

    async def send(sequence: int, epoch: int = 0) -> tuple[int, int]:
        batch = a_batch(2, producer_id=7, epoch=epoch, base_sequence=sequence)
        found = await produced(wire, produce(batch))
        return int(found.error_code), found.base_offset

    assert await send(0) == (0, 0)
    assert await send(2) == (0, 2)
    assert await send(0) == (0, 0), "a repeat"
    assert await send(6) == (Code.OUT_OF_ORDER_SEQUENCE, -1)
    assert await send(0, epoch=1) == (0, 4)
    assert await send(4, epoch=0) == (Code.INVALID_PRODUCER_EPOCH, -1)


async def test_a_producer_that_nobody_remembers_goes_on_with_any_sequence(wire: Wire) -> None:
    found = await produced(wire, produce(a_batch(1, producer_id=9, epoch=0, base_sequence=100)))
    assert (int(found.error_code), found.base_offset) == (0, 0)


async def test_an_unknown_version_of_api_versions_is_answered_as_the_oldest(wire: Wire) -> None:
    wire.send(18, 77, b"\xff" * 20)
    found = await wire.answer(18, 0)
    assert int(found.error_code) == Code.UNSUPPORTED_VERSION
    assert [(one.api_key, one.min_version, one.max_version) for one in found.api_keys] == [(18, 0, 5)]
    wire.send(18, 0, b"")
    assert int((await wire.answer(18, 0)).error_code) == 0, "and the connection goes on"


@pytest.mark.parametrize(
    ("key", "version", "body"),
    [
        (99, 0, b""),  # no such API
        (11, 5, b""),  # one that is not served
        (0, 2, b""),  # a version that is advertised for librdkafka's sake alone
        (3, 50, b""),
        (3, 9, b"\xff\xff\xff\xff\x0f"),  # four thousand million topics
        (1, 12, b"\x00"),
        (2, 1, b""),
    ],
)
async def test_what_cannot_be_understood_ends_the_connection_and_no_other(
    address: str, wire: Wire, key: int, version: int, body: bytes
) -> None:
    async with connected(address) as stranger:
        stranger.send(key, version, body)
        assert await stranger.closed()
    assert int((await produced(wire, produce(a_batch()))).error_code) == 0


@pytest.mark.parametrize(
    "start", [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff", b"GET / HTTP/1.1\r\n", b"\0\0\0\0"]
)
async def test_a_frame_that_is_too_long_or_none_ends_the_connection(address: str, start: bytes) -> None:
    async with connected(address) as stranger:
        stranger.writer.write(start)
        assert await stranger.closed()


async def test_answers_leave_in_the_order_of_the_requests(wire: Wire) -> None:
    """Batches are stored while later requests are handled; their answers come first all the same."""
    for _ in range(20):
        wire.send(0, 7, produce(a_batch()))
        wire.send(18, 0, b"")
    wire._id = 0
    for _ in range(20):
        wire._id += 1
        assert int((await wire.answer(0, 7)).responses[0].partition_responses[0].error_code) == 0
        wire._id += 1
        await wire.answer(18, 0)


async def test_whoever_wants_no_answer_learns_of_an_error_by_the_end_of_the_connection(wire: Wire) -> None:
    wire.send(0, 7, produce(a_batch(), acks=0, topic="nowhere"))
    assert await wire.closed()
