"""A window is about memory: batches are opened as far as what they unpack to fits into it (R18)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import postroom
from postroom.client.consumer import opened, reading
from postroom.model.messages.batch import BatchBuilder

MB = 1 << 20
VALUE = bytes(2 * MB)  # a few KB once it is compressed
BATCHES = 60


class Opened:
    """Counts what is unpacked."""

    def __init__(self) -> None:
        self.batches = self.bytes = 0


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> Opened:
    found = Opened()

    def counted(function: Any) -> Any:
        def wrapped(batch: Any, *more: Any) -> Any:
            answer = function(batch, *more)
            found.batches += 1
            found.bytes += answer[1] if isinstance(answer, tuple) else len(VALUE)
            return answer

        return wrapped

    monkeypatch.setattr(opened, "open_batch", counted(opened.open_batch))
    monkeypatch.setattr(reading, "readable", counted(reading.readable))
    return found


async def bombs(mq: postroom.Connection, compression: str = "lz4") -> None:
    await mq.create_topic("orders", partitions=1)
    place = (await mq.route("orders")).ranges[0].partition_id
    for number in range(BATCHES):
        builder = BatchBuilder(compression, max_bytes=2**31 - 1)
        builder.append(1, b"%d" % (number % 3), VALUE, [])
        await mq._endpoint.append("orders", place, builder.build())


async def consumed(consumer: postroom.Consumer) -> list[tuple[int, int]]:
    got: list[tuple[int, int]] = []
    async with asyncio.timeout(60):
        while len(got) < BATCHES:
            messages = await consumer.poll(1000)
            got += [(message.offset, message.attempt) for message in messages]
            assert sum(len(message.value) for message in messages) <= 8 * MB + len(VALUE)
            await consumer.ack(messages)
    return got


@pytest.mark.few(1, "sends megabytes")
@pytest.mark.parametrize("compression", ["lz4", "zstd", "gzip", "snappy"])
async def test_a_consumer_opens_no_more_than_its_window(unpacked: Opened, compression: str) -> None:
    async with postroom.connect("memory://") as mq:
        await bombs(mq, compression)
        async with mq.consumer("orders", group="g", window_bytes=8 * MB) as consumer:
            (first,) = await consumer.poll(1)
            await asyncio.sleep(0.2)  # so that it fetches ahead, if it would
            assert unpacked.bytes <= 8 * MB + 2 * len(VALUE)
            assert consumer._in_flight.bytes <= 8 * MB + 2 * len(VALUE)
            await first.release()
            got = await consumed(consumer)
        assert sorted(offset for offset, _ in got) == list(range(BATCHES))
        assert {attempt for _, attempt in got} == {1}
        assert (await mq.lag("orders", "g")).total.messages == 0
        assert unpacked.batches <= 3 * BATCHES  # it soon asks for no more than it has room for


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
@pytest.mark.parametrize("order", ["key", "partition"])
async def test_in_an_ordered_group_what_has_no_room_comes_later_in_order(
    unpacked: Opened, order: Any
) -> None:
    async with postroom.connect("memory://") as mq:
        await bombs(mq)
        async with mq.consumer(
            "orders", group="g", mode="ordered", order=order, window_bytes=8 * MB
        ) as consumer:
            await asyncio.wait_for(consumer._fetcher.arrived.wait(), 20)
            await asyncio.sleep(0.2)
            assert unpacked.bytes <= 8 * MB + 2 * len(VALUE)
            got = await consumed(consumer)
        for key in range(3):
            mine = [offset for offset, _ in got if offset % 3 == key]
            assert mine == list(range(key, BATCHES, 3))
        assert {attempt for _, attempt in got} == {1}


async def test_many_messages_of_one_batch_come_however_small_the_window_is() -> None:
    async with postroom.connect("memory://") as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send_many("orders", [postroom.Message(b"x" * 1000) for _ in range(100)])
        async with mq.consumer("orders", group="g", window_bytes=1) as consumer:
            got: list[int] = []
            async with asyncio.timeout(30):
                while len(got) < 100:
                    messages = await consumer.poll(1000)
                    got += [message.offset for message in messages]
                    await consumer.ack(messages)
        assert got == list(range(100))


@pytest.mark.parametrize("follow", [False, True])
async def test_a_reader_has_one_batch_open_at_a_time(unpacked: Opened, follow: bool) -> None:
    async with postroom.connect("memory://") as mq:
        await bombs(mq)
        count = 0
        async for message in mq.read("orders", start="earliest", follow=follow):
            await asyncio.sleep(0)
            assert message.offset == count
            count += 1
            assert unpacked.batches == count
            if count == 20:
                break
