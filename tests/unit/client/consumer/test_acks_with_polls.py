"""Acks that go with the next poll: which do, and what becomes of them if it fails."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from postroom import Message, PostroomError, StoreBusy, UsageError
from postroom.client.connection import Connection
from postroom.clock import ManualClock
from postroom.endpoint.values import PollRequest
from tests.unit.client.client_endpoint import FakeEndpoint, failing, waiting


@pytest.fixture
async def endpoint() -> FakeEndpoint:
    return FakeEndpoint(ManualClock(), partitions=1)


@pytest.fixture
async def mq(endpoint: FakeEndpoint) -> AsyncIterator[Connection]:
    async with Connection(endpoint) as connection:
        yield connection


async def fill(mq: Connection, count: int) -> None:
    await mq.send_many("orders", [Message(b"%d" % i) for i in range(count)])


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def acked(endpoint: FakeEndpoint) -> list[tuple[int, int]]:
    """What was acked together with a poll."""
    return [(v.first, v.last) for parts, _ in endpoint.together for part in parts for v in part.verdicts]


def polls(endpoint: FakeEndpoint) -> list[PollRequest]:
    return [asked for verb, asked in endpoint.calls if verb == "poll" and isinstance(asked, PollRequest)]


async def test_the_ack_of_a_handler_that_is_done_at_once_goes_with_the_next_poll(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    async with mq.consumer("orders", "billing") as consumer:
        for number in range(3):
            await mq.send("orders", b"x")
            (message,) = await consumer.poll()
            await message.ack()
            assert acked(endpoint) == [(one, one) for one in range(number + 1)]
            assert len(endpoint.settled) == number + 1
    assert [asked.empty_handed for _, asked in endpoint.together] == [True] * 3


async def test_an_ack_that_makes_room_in_the_window_goes_with_the_poll_for_it(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    await fill(mq, 6)
    async with mq.consumer("orders", "billing", window=2) as consumer:
        for count in range(3):
            messages = await consumer.poll(max_messages=2)
            await turns()  # nothing is asked for meanwhile
            assert len(polls(endpoint)) == count + 1
            await consumer.ack(messages)
    assert acked(endpoint) == [(0, 1), (2, 3), (4, 5)]
    assert [(asked.messages, asked.empty_handed) for _, asked in endpoint.together] == [(2, True)] * 3


async def test_a_poll_does_not_wait_for_a_handler_that_takes_its_time(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    await fill(mq, 1)
    async with mq.consumer("orders", "billing") as consumer:
        (message,) = await consumer.poll()
        await turns()
        assert len(polls(endpoint)) == 2 and not endpoint.together
        await message.ack()
        assert len(endpoint.settled) == 1 and not endpoint.together


async def test_what_leaves_no_room_goes_by_itself(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 10)
    async with mq.consumer("orders", "billing", window=10) as consumer:
        messages = await consumer.poll(max_messages=10)
        await turns()
        await consumer.ack(messages[:4])
        assert len(endpoint.settled) == 1 and not endpoint.together
        await consumer.ack(messages[4:6])
        assert acked(endpoint) == [(4, 5)]


@pytest.mark.parametrize("verdict", ["retry", "release"])
async def test_what_is_no_ack_goes_by_itself(mq: Connection, endpoint: FakeEndpoint, verdict: str) -> None:
    await fill(mq, 1)
    async with mq.consumer("orders", "billing", window=1) as consumer:
        (message,) = await consumer.poll()
        await getattr(message, verdict)(delay=60)
        assert len(endpoint.settled) == 1 and not endpoint.together


async def test_acks_that_failed_go_by_themselves_and_the_poll_is_repeated(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    """I6, I25: under the same token, and without a claim about what is held."""
    await fill(mq, 2)
    endpoint.on["settle"].append(failing(StoreBusy("busy")))
    async with mq.consumer("orders", "billing", window=1) as consumer:
        (message,) = await consumer.poll()
        await message.ack()
        (message,) = await consumer.poll()
        await message.ack()
    asked = endpoint.together[0][1]
    again = polls(endpoint)[1]
    assert (again.token, again.repeated, again.empty_handed) == (asked.token, True, False)
    assert endpoint.unsettled(1) == []


async def test_a_refused_ack_is_told_to_its_caller_and_the_consumer_goes_on(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    await fill(mq, 2)
    endpoint.on["settle"] += [failing(UsageError("no"))] * 2  # with the poll, then by itself
    async with mq.consumer("orders", "billing", window=1) as consumer:
        (message,) = await consumer.poll()
        with pytest.raises(UsageError):
            await message.ack()
        (other,) = await consumer.poll()
        assert (message.offset, other.offset) == (0, 1)


async def test_a_poll_that_fails_takes_no_ack_back(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 2)
    async with mq.consumer("orders", "billing", window=1) as consumer:
        (message,) = await consumer.poll()
        endpoint.on["poll"].append(failing(StoreBusy("busy")))
        await message.ack()
        (other,) = await consumer.poll()
        assert other.offset == 1
        await other.ack()
    assert [request.repeated for request in polls(endpoint)][:3] == [False, False, True]
    assert len(endpoint.settled) == 2 and endpoint.unsettled(1) == []


async def test_a_consumer_that_is_closed_stores_what_was_on_its_way(
    mq: Connection, endpoint: FakeEndpoint
) -> None:
    await fill(mq, 1)
    never = asyncio.Event()
    async with mq.consumer("orders", "billing", window=1) as consumer:
        (message,) = await consumer.poll()
        endpoint.on["settle"].append(waiting(never))
        acking = asyncio.ensure_future(message.ack())
        await turns()
        assert acked(endpoint) == [(0, 0)] and not acking.done()
    await acking
    assert len(endpoint.settled) == 1 and endpoint.unsettled(1) == []


async def test_a_consumer_whose_group_is_gone_can_still_ack(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 1)
    async with mq.consumer("orders", "billing") as consumer:
        endpoint.after["poll"].append(_nothing)
        (message,) = await consumer.poll()
        endpoint.on["poll"].append(failing(UsageError("gone")))
        await message.ack()
        with pytest.raises(PostroomError, match="gone"):
            await consumer.poll(wait=60)
    assert endpoint.unsettled(1) == []


async def _nothing(*_: Any) -> None:
    """No fault."""
