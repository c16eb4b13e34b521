"""Answers that clients do not read: one budget for all connections, a fair share for each (R41)."""

from __future__ import annotations

import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

import postroom
from postroom.endpoint.values import PollRequest, Settle, Verdict
from postroom.model.policy.settings import GroupWish
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer
from tests.integration.wire.wire_raw import ERROR, REPLY, Raw, eventually, healthy, served
from tests.tuned import tuned

FETCH, POLL, TOPICS, LETTERS = 11, 22, 31, 60
MB = 1 << 20
BATCH = 512 * 1024
# some megabytes of an answer are in the kernel's buffers, and not in the broker's memory
SMALL = Listening(port=0, all_answer_bytes=32 * MB, answer_bytes=12 * MB, one_answer_bytes=10 * MB)


def unread(server: WireServer) -> int:
    """What the sockets' buffers hold."""
    transports = [one._transport for one in server.connections]
    return sum(one.get_write_buffer_size() for one in transports if one is not None)


async def filled(mq: postroom.Connection, megabytes: int, topic: str = "orders") -> int:
    """A partition with so much in it that cannot be compressed; its id."""
    await mq.create_topic(topic, partitions=1)
    for _ in range(megabytes * MB // BATCH):
        await mq.send(topic, os.urandom(BATCH))
    return (await mq.route(topic)).ranges[0].partition_id


async def most_unread(server: WireServer, seconds: float = 1.5) -> int:
    most, deadline = 0, asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < deadline:
        most = max(most, unread(server))
        await asyncio.sleep(0.01)
    return most


async def test_connections_that_do_not_read_hold_one_budget_together() -> None:
    async with served(SMALL) as (mq, server), AsyncExitStack() as stack:
        partition_id = await filled(mq, 24)
        for _ in range(12):
            raw = await stack.enter_async_context(Raw.open(server.port))
            for id in range(10, 30):
                raw.send(FETCH, ["orders", partition_id, 0, 100_000, 1 << 30, 0], id=id)
        most = await most_unread(server)
        assert 4 * MB < most <= 32 * MB
        assert server.answers.held <= 32 * MB


async def test_others_are_served_while_one_principal_holds_what_it_may() -> None:
    """A principal may take half of the budget, so that there is room for the next one."""
    async with served(SMALL) as (mq, server), AsyncExitStack() as stack:
        partition_id = await filled(mq, 12)
        for _ in range(12):
            raw = await stack.enter_async_context(Raw.open(server.port))
            raw.send(FETCH, ["orders", partition_id, 0, 100_000, 1 << 30, 0])
        await eventually(lambda: server.answers.waiting > 0)
        assert server.answers.held <= 16 * MB
        share = server.answers.share("another principal")
        async with asyncio.timeout(1):
            await share.room(2 * MB)
        share.hold(-2 * MB)


async def test_one_answer_has_a_limit_and_at_least_one_batch() -> None:
    async with served(replace(SMALL, one_answer_bytes=MB)) as (mq, server):
        partition_id = await filled(mq, 4)
        async with Raw.open(server.port) as raw:
            came = await raw.ask(FETCH, ["orders", partition_id, 0, 2**31 - 1, 1 << 40, 0])
            assert BATCH < len(came.body) <= MB + BATCH
    async with served(replace(SMALL, one_answer_bytes=1000)) as (mq, server):
        partition_id = await filled(mq, 2)
        async with Raw.open(server.port) as raw:
            came = await raw.ask(FETCH, ["orders", partition_id, 0, 2**31 - 1, 1 << 40, 0])
            assert len(came.header[0]) == 1


async def test_dead_letters_come_in_pages_and_the_sdk_pages_on() -> None:
    async with served(SMALL) as (mq, server):
        await filled(mq, 12)
        async with mq.consumer("orders", group="g") as consumer:
            for _ in range(24):
                (message,) = await consumer.poll(1)
                await message.dead("no")
        async with Raw.open(server.port) as raw:
            for id in range(10, 16):
                raw.send(LETTERS, ["orders", "g", 10**9], id=id)
            assert await most_unread(server) <= 12 * MB
        async with Raw.open(server.port) as raw:
            came = await raw.ask(LETTERS, ["orders", "g", 10**9])
            assert 2 * MB < len(came.body) < 5 * MB
        async with postroom.connect(server.url) as remote:
            letters = await remote.dead_letters("orders", "g", limit=10**9)
            assert [letter.offset for letter in letters] == list(range(24))
            assert len(await remote.dead_letters("orders", "g", limit=20)) == 20
            some = [letters[3].id, letters[20].id]
            assert await remote.redrive("orders", "g", ids=some) == 2
            left = await remote.dead_letters("orders", "g", limit=10**9)
            assert [letter.offset for letter in left] == [n for n in range(24) if n not in (3, 20)]


async def test_what_comes_again_counts_towards_the_bytes_of_a_poll() -> None:
    """Many messages are released at once, each in a batch of its own: they come poll by poll, untried."""
    async with served() as (mq, server):
        partition_id = await filled(mq, 12)
        await mq._endpoint.subscribe("orders", "g", GroupWish(lease_ms=60_000), "m", "test")
        async with Raw.open(server.port) as raw:

            async def poll(token: int, size: int) -> tuple[list[tuple[int, int]], int]:
                wish = PollRequest("orders", "g", "m", token, 1000, size, 0, empty_handed=True)
                came = await raw.ask(POLL, [wish])
                leases = [lease for grant in came.header[0] for lease in grant[3]]
                return [(one["first"], one["attempt"]) for one in leases for _ in (0,)], len(came.body)

            await poll(1, 100 * MB)
            back = Settle("orders", partition_id, 1, (Verdict("release", 0, 23),))
            await mq._endpoint.settle("orders", "g", [back])
            seen: list[int] = []
            for token in range(2, 60):
                found, size = await poll(token, MB)
                assert size <= MB + BATCH
                assert all(attempt == 1 for _, attempt in found)
                seen += [first for first, _ in found]
                if (await mq.lag("orders", "g")).total.unsettled == 24 and not found:
                    break
            assert seen == sorted(seen)
            lag = (await mq.lag("orders", "g")).total
            assert lag.unsettled == 24


async def test_a_holder_of_partitions_is_sent_again_no_more_than_it_asks_for() -> None:
    """Ordered groups: what an answer that was lost had comes again, bounded and in order (I6)."""
    async with served() as (mq, _):
        place = await filled(mq, 12)
        endpoint = mq._endpoint
        await endpoint.subscribe("orders", "g", GroupWish(mode="ordered", lease_ms=60_000), "m", "test")
        wish = PollRequest("orders", "g", "m", 5, 1000, 100 * MB, 0, empty_handed=True)
        first = await endpoint.poll(wish)
        assert [(lease.first, lease.last) for grant in first.grants for lease in grant.leases] == [(0, 23)]
        position, seen = 0, []
        while position < 24:
            again = replace(
                wish, bytes=MB, positions=((place, position),), started_ms=first.started_ms, repeated=True
            )
            (grant,) = (await endpoint.poll(again)).grants
            assert sum(len(batch.data) for batch in grant.batches) <= MB + BATCH
            seen += [n for lease in grant.leases for n in range(lease.first, lease.last + 1)]
            position = grant.position
        assert seen == list(range(24))


async def test_slow_readers_are_cut_off_when_others_need_room() -> None:
    often = tuned(wire={"tick_s": 0.05}).tuning.wire
    listening = replace(
        SMALL, tuning=often, all_answer_bytes=24 * MB, slow_reader_ms=200, answer_wait_ms=20_000
    )
    async with served(listening) as (mq, server), AsyncExitStack() as stack:
        partition_id = await filled(mq, 12)
        slow = [await stack.enter_async_context(Raw.open(server.port)) for _ in range(4)]
        for raw in slow:
            raw.send(FETCH, ["orders", partition_id, 0, 100_000, 1 << 30, 0])
        await eventually(lambda: server.answers.waiting > 0)
        first = set(server.connections)
        async with Raw.open(server.port) as other:
            came = await other.ask(FETCH, ["orders", partition_id, 0, 100_000, 1 << 30, 0])
            assert came.flags == REPLY and len(came.body) > 8 * MB
        await healthy(server)
        assert first - server.connections


async def test_nobody_waits_for_ever_for_room() -> None:
    listening = replace(SMALL, all_answer_bytes=4 * MB, answer_wait_ms=100)
    async with served(listening) as (mq, server), AsyncExitStack() as stack:
        partition_id = await filled(mq, 4)
        share = server.answers.share("")
        share.hold(4 * MB)
        raw = await stack.enter_async_context(Raw.open(server.port))
        came = await raw.ask(FETCH, ["orders", partition_id, 0, 100_000, 1 << 30, 0])
        assert came.flags == REPLY | ERROR and came.code == "broker_unavailable"
        assert "again in a moment" in came.header[1] and came.header[2] is True
        share.hold(-4 * MB)
        assert (await raw.ask(TOPICS, [])).flags == REPLY


async def test_a_poll_whose_answer_has_no_room_gives_back_what_it_was_given() -> None:
    listening = replace(SMALL, all_answer_bytes=4 * MB, answer_wait_ms=100)
    async with served(listening) as (mq, server):
        await mq.create_topic("orders", partitions=1)
        await mq._endpoint.subscribe("orders", "g", GroupWish(lease_ms=60_000), "m", "test")
        async with Raw.open(server.port) as raw:
            wish = PollRequest("orders", "g", "m", 7, 100, 8 * MB, 20_000, empty_handed=True)
            raw.send(POLL, [wish])
            assert (await raw.ask(3, [], id=3)).id == 3  # so the poll waits
            share = server.answers.share("somebody else")
            share.hold(4 * MB)
            await mq.send("orders", b"x" * 100)
            came = await raw.receive()
            assert came.code == "broker_unavailable"
            share.hold(-4 * MB)
            again = PollRequest("orders", "g", "other", 8, 100, 8 * MB, 20_000, empty_handed=True)
            (grant,) = (await raw.ask(POLL, [again])).header[0]
            assert [(lease["first"], lease["attempt"]) for lease in grant[3]] == [(0, 1)]


async def test_nothing_is_held_once_it_is_read() -> None:
    async with served(SMALL) as (mq, server):
        partition_id = await filled(mq, 8)
        async with postroom.connect(server.url) as remote:
            got = [message async for message in remote.read("orders")]
            assert len(got) == 16
            async with remote.consumer("orders", group="g") as consumer:
                left = 16
                while left:
                    messages = await consumer.poll(100)
                    await consumer.ack(messages)
                    left -= len(messages)
        async with Raw.open(server.port) as raw:
            await raw.ask(FETCH, ["orders", partition_id, 0, 1000, 1 << 30, 0])
            await eventually(lambda: server.answers.held == 0)


async def test_a_wait_has_the_limit_that_is_documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is asked for: a fetch that waits for hours would hold its place for hours."""
    from postroom.config import DEFAULTS

    async with served() as (mq, server):
        await mq.create_topic("orders", partitions=1)
        broker: Any = mq._endpoint
        broker._limits = replace(DEFAULTS, poll_wait_ms=100)
        async with Raw.open(server.port) as raw:
            came = await raw.ask(FETCH, ["orders", 1, 0, 10, 1000, 3_600_000])
            assert came.header[0] == []
