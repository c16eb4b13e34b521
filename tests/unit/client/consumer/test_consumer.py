"""The consumer: what it asks for, what it hands out, and that settling tells the truth."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from postroom import (
    ClosedError,
    GroupConflict,
    InvalidSetting,
    LeaseLost,
    Message,
    Received,
    StoreBusy,
    StoreUnavailable,
    UnknownGroup,
    UnknownTopic,
    UsageError,
)
from postroom.client.connection import Connection
from postroom.clock import ManualClock
from postroom.endpoint.values import PollRequest
from postroom.model.messages.batch import build_control, with_base_offset
from postroom.store.contract import StoredBatch
from tests.unit.client.client_endpoint import FakeEndpoint, failing, waiting


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def endpoint(clock: ManualClock) -> FakeEndpoint:
    return FakeEndpoint(clock, partitions=1)


@pytest.fixture
async def mq(endpoint: FakeEndpoint) -> AsyncIterator[Connection]:
    async with Connection(endpoint) as connection:
        yield connection


async def fill(mq: Connection, count: int, **settings: Any) -> None:
    await mq.send_many("orders", [Message(b"%d" % i, **settings) for i in range(count)])


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def polls(endpoint: FakeEndpoint) -> list[PollRequest]:
    return [asked for verb, asked in endpoint.calls if verb == "poll" and isinstance(asked, PollRequest)]


def verdicts(endpoint: FakeEndpoint) -> list[tuple[str, int, int]]:
    return [(v.kind, v.first, v.last) for parts in endpoint.settled for part in parts for v in part.verdicts]


# ---- getting messages ----


async def test_poll_and_ack(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 10)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        assert [m.value for m in messages] == [b"%d" % i for i in range(10)]
        assert {(m.topic, m.partition, m.attempt) for m in messages} == {("orders", 0, 1)}
        assert consumer.in_hand == 10
        await consumer.ack(messages)
        assert consumer.in_hand == 0
    assert verdicts(endpoint) == [("ack", 0, 9)]
    assert endpoint.unsettled(1) == [] and endpoint.members == set()


async def test_poll_waits_for_the_first_message(mq: Connection, endpoint: FakeEndpoint) -> None:
    async with mq.consumer("orders", "billing") as consumer:
        assert await consumer.poll(wait=0) == []
        assert await consumer.poll(wait="5ms") == []
        polling = asyncio.ensure_future(consumer.poll(wait=60))
        await turns()
        assert not polling.done()
        await mq.send("orders", b"a")
        assert [m.value for m in await polling] == [b"a"]


async def test_poll_takes_no_more_than_asked(mq: Connection) -> None:
    await fill(mq, 10)
    async with mq.consumer("orders", "billing") as consumer:
        sizes = [len(await consumer.poll(max_messages=4)) for _ in range(3)]
        assert sizes == [4, 4, 2]
        for wrong in (0, -1, 1.5, True):
            with pytest.raises(InvalidSetting, match="max_messages"):
                await consumer.poll(max_messages=wrong)  # type: ignore[arg-type]


async def test_a_batch_cut_by_leases_is_handed_out_once(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 100)
    seen: list[bytes] = []
    async with mq.consumer("orders", "billing", window=7) as consumer:
        while len(seen) < 100:
            messages = await consumer.poll()
            assert consumer.in_hand <= 7
            seen += [m.value for m in messages]
            await consumer.ack(messages)
    assert seen == [b"%d" % i for i in range(100)]


async def test_several_batches_in_one_lease(mq: Connection) -> None:
    for start in range(0, 9, 3):
        await mq.send_many("orders", [Message(b"%d" % i) for i in range(start, start + 3)])
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        assert [(m.offset, m.value) for m in messages] == [(i, b"%d" % i) for i in range(9)]
        await consumer.ack(messages)


async def test_control_batches_are_stepped_over(mq: Connection, endpoint: FakeEndpoint) -> None:
    await mq.send("orders", b"a")
    control = with_base_offset(build_control(64), 1)
    endpoint.partitions[1].batches.append(StoredBatch(1, 1, 0, control))
    await mq.send("orders", b"b")
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        assert [m.offset for m in messages] == [0, 2]
        await consumer.ack(messages)
        await consumer.ack(messages)  # harmless
    assert endpoint.unsettled(1) == []


async def test_expired_messages_are_acked_and_not_shown(
    mq: Connection, endpoint: FakeEndpoint, clock: ManualClock
) -> None:
    await mq.send_many("orders", [Message(b"a", expires=5), Message(b"b"), Message(b"c", expires=60)])
    clock.advance(10)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        assert [m.value for m in messages] == [b"b", b"c"]
        await consumer.ack(messages)
    assert endpoint.unsettled(1) == []


async def test_messages_that_retention_took_are_acked(mq: Connection, endpoint: FakeEndpoint) -> None:
    await mq.send("orders", b"a")
    await mq.send("orders", b"b")
    consumer = mq.consumer("orders", "billing")
    endpoint.partitions[1].batches.pop(0)
    async with consumer:
        messages = await consumer.poll()
        assert [m.value for m in messages] == [b"b"]
        await turns()
        assert ("ack", 0, 0) in verdicts(endpoint)


async def test_async_for(mq: Connection) -> None:
    await fill(mq, 5)
    seen = []
    async with mq.consumer("orders", "billing") as consumer:
        async for message in consumer:
            seen.append(message.value)
            await message.ack()
            if len(seen) == 5:
                break
    assert seen == [b"0", b"1", b"2", b"3", b"4"]


async def test_closing_ends_the_loop(mq: Connection) -> None:
    async with mq.consumer("orders", "billing") as consumer:

        async def loop() -> list[Received]:
            return [message async for message in consumer]

        looping, polling = asyncio.ensure_future(loop()), asyncio.ensure_future(consumer.poll(wait=60))
        await turns()
        await consumer.close()
        assert await looping == [] and await polling == []


# ---- what is asked for ----


async def test_the_window_bounds_what_is_held(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 100)
    async with mq.consumer("orders", "billing", window=10) as consumer:
        messages = await consumer.poll()
        await turns()
        assert consumer.in_hand == 10 and len(polls(endpoint)) == 1
        await consumer.ack(messages[:4])
        await turns()
        assert len(polls(endpoint)) == 1  # less than half is free
        await consumer.ack(messages[:5])
        await turns()
        assert [(p.messages, p.empty_handed) for p in polls(endpoint)] == [(10, True), (5, False)]
        assert len({p.token for p in polls(endpoint)}) == 2 and all(p.token > 0 for p in polls(endpoint))


async def test_the_window_counts_bytes_but_takes_any_message(mq: Connection, endpoint: FakeEndpoint) -> None:
    for i in range(4):
        await mq.send("orders", b"%d" % i * 5000)
    async with mq.consumer("orders", "billing", window_bytes=1000) as consumer:
        for i in range(4):
            (message,) = await consumer.poll()
            assert message.value[:1] == b"%d" % i
            await turns()
            assert consumer.in_hand == 1
            await message.ack()


async def test_a_failed_poll_is_repeated_with_its_token(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 3)
    endpoint.on["poll"].append(failing(StoreBusy("busy")))
    endpoint.after["poll"].append(failing(StoreUnavailable("the reply is lost")))
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        assert [m.offset for m in messages] == [0, 1, 2]  # what the lost reply had
        assert len({p.token for p in polls(endpoint)[:3]}) == 1 and len(polls(endpoint)) >= 3


async def test_an_error_that_stays_reaches_the_user(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.on["poll"].append(failing(UnknownGroup("deleted")))
    async with mq.consumer("orders", "billing") as consumer:
        with pytest.raises(UnknownGroup):
            await consumer.poll(wait=60)
        with pytest.raises(UnknownGroup):
            await anext(consumer)


async def test_a_suspect_is_settled_before_more_is_asked_for(
    mq: Connection, endpoint: FakeEndpoint, clock: ManualClock
) -> None:
    await fill(mq, 4)
    async with mq.consumer("orders", "billing") as crashed:
        await crashed.poll()
        progress = endpoint.progress[1]
        progress.rows = {f: replace(d, token=5, visible_at=clock.now_ms()) for f, d in progress.rows.items()}
    asked = len(polls(endpoint))
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        assert [(m.offset, m.attempt) for m in messages] == [(0, 2), (1, 2)]
        await turns()
        assert len(polls(endpoint)) == asked + 1
        await consumer.ack(messages)
        await turns()
        assert len(polls(endpoint)) == asked + 2
        await consumer.ack(await consumer.poll())


# ---- settling ----


async def test_acks_that_come_together_go_together(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 10)
    gate = asyncio.Event()
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        endpoint.on["settle"].append(waiting(gate))
        first = asyncio.ensure_future(messages[0].ack())
        await turns()
        rest = asyncio.gather(*(m.ack() for m in reversed(messages[1:])))
        await turns()
        assert endpoint.count("settle") == 1 and not first.done()
        gate.set()
        await first
        await rest
    assert verdicts(endpoint) == [("ack", 0, 0), ("ack", 1, 9)]


async def test_ack_returns_when_it_is_stored(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 2)
    gate = asyncio.Event()
    async with mq.consumer("orders", "billing") as consumer:
        first, second = await consumer.poll()
        endpoint.on["settle"].append(waiting(gate))
        acking = asyncio.ensure_future(first.ack())
        again = asyncio.ensure_future(first.ack())
        await turns()
        assert not acking.done() and not again.done()
        assert consumer.in_hand == 2  # held until the store says otherwise
        acking.cancel()  # whoever waits may go; the ack goes on
        await turns()
        gate.set()
        await again
        assert consumer.in_hand == 1
        await second.ack()
    assert verdicts(endpoint) == [("ack", 0, 0), ("ack", 1, 1)]


async def test_every_verdict(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 5)
    async with mq.consumer("orders", "billing") as consumer:
        a, b, c, d, e = await consumer.poll()
        await a.retry(delay="2s", reason="later")
        await b.retry(at=2_000_000_000)
        await c.release(1)
        await d.dead("hopeless")
        await e.retry()
    found = [v for parts in endpoint.settled for part in parts for v in part.verdicts]
    assert [(v.kind, v.first, v.delay_ms, v.at_ms, v.reason) for v in found[:5]] == [
        ("retry", 0, 2000, None, "later"),
        ("retry", 1, 0, 2_000_000_000_000, ""),
        ("release", 2, 1000, None, ""),
        ("dead", 3, 0, None, "hopeless"),
        ("retry", 4, 0, None, ""),
    ]
    with pytest.raises(InvalidSetting, match="not both"):
        await a.retry(1, at=2_000_000_000)


async def test_twice_is_harmless_for_an_ack_and_refused_otherwise(mq: Connection) -> None:
    await fill(mq, 3)
    async with mq.consumer("orders", "billing") as consumer:
        a, b, c = await consumer.poll()
        await a.ack()
        await a.ack()
        await consumer.ack([a, a, b, b])
        with pytest.raises(UsageError, match="acked already"):
            await a.retry()
        await c.release(3600)
        for again in (c.ack(), c.retry(), c.release(), c.dead("x")):
            with pytest.raises(UsageError, match="handed back"):
                await again
        assert consumer.in_hand == 0


async def test_ack_up_to(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 10)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll(max_messages=6)
        await messages[1].ack()
        await consumer.ack(up_to=messages[4])
        assert endpoint.unsettled(1) == [(5, 9)]
        await consumer.ack(up_to=messages[4])
        assert endpoint.unsettled(1) == [(5, 9)]  # not those that wait in the buffer


async def test_only_ones_own_messages(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 2)
    browsed = [m async for m in mq.read("orders")]
    async with mq.consumer("orders", "billing") as consumer, mq.consumer("orders", "billing") as other:
        messages = await consumer.poll()
        with pytest.raises(UsageError, match="another consumer"):
            await other.ack(messages)
        with pytest.raises(UsageError, match="nothing to settle"):
            await consumer.ack(browsed)
        with pytest.raises(UsageError, match="nothing to ack"):
            await browsed[0].ack()
        with pytest.raises(UsageError, match="only received messages"):
            await consumer.ack([Message(b"")])  # type: ignore[list-item]


async def test_a_failed_settle_is_repeated(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 2)
    endpoint.on["settle"].append(failing(StoreBusy("busy")))
    endpoint.after["settle"].append(failing(StoreUnavailable("the reply is lost")))
    async with mq.consumer("orders", "billing") as consumer:
        await consumer.ack(await consumer.poll())
        assert endpoint.count("settle") == 3 and consumer.in_hand == 0


async def test_what_could_not_be_settled_is_as_open_as_before(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 2)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        endpoint.on["settle"].append(failing(UnknownGroup("gone for a moment")))
        with pytest.raises(UnknownGroup):
            await messages[0].retry()
        assert consumer.in_hand == 2
        await consumer.ack(messages)
        assert consumer.in_hand == 0


async def test_a_lost_lease_is_told_to_those_it_concerns(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 6)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
        await consumer.ack(messages[:2])
        endpoint.steal(1)
        await consumer.ack(messages[:2])  # settled before: no harm
        with pytest.raises(LeaseLost, match="safe to repeat") as caught:
            await consumer.ack(messages[1:4])
        assert caught.value.details["offsets"] == [2, 3]
        with pytest.raises(LeaseLost):
            await messages[2].retry()  # known by now
        assert consumer.in_hand == 2
        outcomes = await asyncio.gather(messages[0].ack(), messages[4].ack(), return_exceptions=True)
        assert outcomes[0] is None and isinstance(outcomes[1], LeaseLost)


async def test_settling_after_closing(mq: Connection) -> None:
    await fill(mq, 2)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll()
    for call in (messages[0].ack(), consumer.ack(messages), messages[0].extend(), consumer.poll()):
        with pytest.raises(ClosedError):
            await call


# ---- leaving ----


async def test_leaving_releases_what_is_not_settled(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 10)
    async with mq.consumer("orders", "billing") as consumer:
        messages = await consumer.poll(max_messages=4)
        await messages[1].ack()
    assert sorted(verdicts(endpoint)[1:]) == [("release", 0, 0), ("release", 2, 9)]
    async with mq.consumer("orders", "billing") as consumer:
        again = await consumer.poll()
        assert [(m.offset, m.attempt) for m in again] == [(i, 1) for i in (0, 2, 3, 4, 5, 6, 7, 8, 9)]


async def test_leaving_by_an_error_or_a_cancel_lets_go(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 3)

    async def body(error: BaseException) -> None:
        async with mq.consumer("orders", "billing", ack="after") as consumer:
            await consumer.poll()
            raise error

    with pytest.raises(KeyError):
        await body(KeyError())
    with pytest.raises(asyncio.CancelledError):
        await body(asyncio.CancelledError())
    assert all(d.token == 0 for d in endpoint.progress[1].sorted())
    assert endpoint.progress[1].sorted()[0].first == 0 and endpoint.members == set()


async def test_closing_the_connection_closes_consumers(endpoint: FakeEndpoint) -> None:
    async with Connection(endpoint) as mq:
        await fill(mq, 3)
        consumer = await mq.consumer("orders", "billing").__aenter__()
        await consumer.poll()
    assert consumer.closed and endpoint.closed and endpoint.members == set()
    assert [d.token for d in endpoint.progress[1].sorted()] == [0]


# ---- ack modes (R16) ----


async def test_after_acks_when_more_is_asked_for(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 10)
    async with mq.consumer("orders", "billing", ack="after") as consumer:
        first = await consumer.poll(max_messages=3)
        await turns()
        assert endpoint.unsettled(1) == [(0, 9)]
        await first[1].retry(delay=3600)  # the user's own verdict stands
        await consumer.poll(max_messages=3)
        await turns()
        assert [(d.first, d.last, d.token != 0) for d in endpoint.progress[1].sorted()] == [
            (1, 1, False),
            (3, 9, True),
        ]
    assert endpoint.unsettled(1) == [(1, 1), (6, 9)]  # left without an error: handled


async def test_after_in_a_loop(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 5)
    async with mq.consumer("orders", "billing", ack="after") as consumer:
        async for message in consumer:
            if message.offset == 2:
                break
    assert endpoint.unsettled(1) == [(3, 4)]


async def test_after_retries_what_raised(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 5)

    async def body() -> None:
        async with mq.consumer("orders", "billing", ack="after") as consumer:
            async for message in consumer:
                if message.offset == 2:
                    raise KeyError

    with pytest.raises(KeyError):
        await body()
    assert endpoint.unsettled(1)[0][0] == 2
    assert ("retry", 2, 2) in verdicts(endpoint)
    assert ("release", 3, 4) in verdicts(endpoint)


async def test_on_delivery_is_settled_before_it_is_handled(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 10)
    async with mq.consumer("orders", "billing", ack="on_delivery") as consumer:
        await turns()
        assert polls(endpoint) == []  # nothing is taken before somebody wants it
        messages = await consumer.poll(max_messages=4)
        assert [m.offset for m in messages] == [0, 1, 2, 3]
        assert endpoint.unsettled(1) == [] and endpoint.progress[1].cursor == 4
        await consumer.ack(messages)
        with pytest.raises(UsageError, match="acked already"):
            await messages[0].retry()
        async for message in consumer:
            assert message.offset == 4
            break
    assert endpoint.count("settle") == 0


# ---- leases (I14, I16) ----


async def test_a_lease_that_passed_in_the_buffer_is_not_handed_out(
    mq: Connection, endpoint: FakeEndpoint, clock: ManualClock
) -> None:
    await fill(mq, 4)
    async with mq.consumer("orders", "billing", lease=10) as consumer:
        handed = await consumer.poll(max_messages=1)
        await turns()  # the next poll waits
        clock.advance(11)  # the machine slept; the heartbeat has not run yet
        endpoint.steal(1)
        assert await consumer.poll(wait=0) == []
        assert consumer.in_hand == 0
        with pytest.raises(LeaseLost):
            await handed[0].ack()


async def test_a_lease_that_passed_is_renewed_if_nobody_else_has_it(
    mq: Connection, endpoint: FakeEndpoint, clock: ManualClock
) -> None:
    await fill(mq, 4)
    async with mq.consumer("orders", "billing", lease=10) as consumer:
        messages = await consumer.poll(max_messages=1)
        clock.advance(11)
        messages += await consumer.poll()
        assert [(m.offset, m.attempt) for m in messages] == [(i, 1) for i in range(4)]
        await consumer.ack(messages)


async def test_what_cannot_be_renewed_is_not_handed_out(
    mq: Connection, endpoint: FakeEndpoint, clock: ManualClock
) -> None:
    def away(_: object) -> Any:
        raise StoreUnavailable("away")

    await fill(mq, 4)
    async with mq.consumer("orders", "billing", lease=10) as consumer:
        await consumer.poll(max_messages=1)
        clock.advance(11)
        endpoint.beat = away  # type: ignore[method-assign]
        assert await consumer.poll(wait=0) == []
        assert consumer.in_hand == 1


async def test_a_poll_waits_no_longer_than_half_a_lease(mq: Connection, endpoint: FakeEndpoint) -> None:
    async with mq.consumer("orders", "billing", lease=10):
        await endpoint.polled.wait()
        assert polls(endpoint)[0].wait_ms == 5_000


async def test_the_heartbeat_keeps_leases(mq: Connection, endpoint: FakeEndpoint, clock: ManualClock) -> None:
    await fill(mq, 4)
    async with mq.consumer("orders", "billing", lease=10) as consumer:
        messages = await consumer.poll(max_messages=2)
        for _ in range(5):
            clock.advance(8)
            await asyncio.to_thread(mq._heartbeat.beat_once)
        messages += await consumer.poll(max_messages=2)
        assert [m.attempt for m in messages] == [1, 1, 1, 1]
        await consumer.ack(messages)
    assert endpoint.beats[0].member == consumer.member
    assert endpoint.beats[0].held[0].spans == ((0, 3),)


async def test_a_hung_handler_is_not_kept_for_ever(
    mq: Connection, endpoint: FakeEndpoint, clock: ManualClock
) -> None:
    await fill(mq, 4)
    async with mq.consumer("orders", "billing", lease=10, max_handling=15) as consumer:
        handed = await consumer.poll(max_messages=2)
        for _ in range(3):
            clock.advance(8)
            await asyncio.to_thread(mq._heartbeat.beat_once)
        assert [b.held[0].spans for b in endpoint.beats] == [((0, 3),), ((2, 3),), ((2, 3),)]
        await handed[1].extend()  # the user says: at work
        await asyncio.to_thread(mq._heartbeat.beat_once)
        assert endpoint.beats[-1].held[0].spans == ((1, 3),)


async def test_the_heartbeat_tells_what_is_lost(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 4)
    async with mq.consumer("orders", "billing") as consumer:
        handed = await consumer.poll(max_messages=2)
        endpoint.steal(1)
        await asyncio.to_thread(mq._heartbeat.beat_once)
        await turns()
        assert consumer.in_hand == 0
        assert await consumer.poll(wait=0) == []  # what was buffered is dropped
        with pytest.raises(LeaseLost):
            await handed[0].ack()
        assert endpoint.count("settle") == 0


async def test_extend(mq: Connection, endpoint: FakeEndpoint) -> None:
    await fill(mq, 2)
    async with mq.consumer("orders", "billing") as consumer:
        first, second = await consumer.poll()
        await first.extend()
        assert endpoint.beats[-1].held[0].spans == ((0, 0),)
        await first.ack()
        with pytest.raises(UsageError, match="settled already"):
            await first.extend()
        endpoint.steal(1)
        with pytest.raises(LeaseLost):
            await second.extend()


async def test_the_heartbeat_thread_beats_by_itself_and_survives_errors(
    mq: Connection, endpoint: FakeEndpoint, caplog: pytest.LogCaptureFixture
) -> None:
    loop, beaten, tries = asyncio.get_running_loop(), asyncio.Event(), 0
    honest = endpoint.beat

    def beat(beats: Any) -> Any:
        nonlocal tries
        tries += 1
        if tries <= 2:
            raise StoreBusy("busy")
        loop.call_soon_threadsafe(beaten.set)
        return honest(beats)

    endpoint.beat = beat  # type: ignore[method-assign]
    async with mq.consumer("orders", "billing", lease="150ms"):
        await asyncio.wait_for(beaten.wait(), 30)
    assert len([r for r in caplog.records if "heartbeat" in r.message]) == 1


async def test_no_heartbeat_comes_after_a_member_left(mq: Connection, endpoint: FakeEndpoint) -> None:
    """It would bring the member back, and its share of the partitions would wait for nobody."""
    loop, begun, done = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
    heard: list[str] = []

    def beat(beats: Any) -> Any:
        loop.call_soon_threadsafe(begun.set)
        done.wait(10)
        heard.append("beat")
        return []

    async def unsubscribe(*_: object) -> None:
        heard.append("left")

    endpoint.beat, endpoint.unsubscribe = beat, unsubscribe  # type: ignore[method-assign]
    async with mq.consumer("orders", "billing", lease="150ms"):
        await asyncio.wait_for(begun.wait(), 10)
        loop.call_later(0.1, done.set)
    assert heard == ["beat", "left"]


# ---- subscribing ----


async def test_settings_left_out_are_whatever_the_group_has(mq: Connection, endpoint: FakeEndpoint) -> None:
    endpoint.group = replace(endpoint.group, lease_ms=7_000)
    async with mq.consumer("orders", "billing") as consumer:
        assert consumer._who.lease_ms == 7_000


async def test_a_conflict_is_raised_on_entering(mq: Connection, endpoint: FakeEndpoint) -> None:
    async def conflict(*_: object, **__: object) -> None:
        raise GroupConflict("other settings")

    endpoint.subscribe = conflict  # type: ignore[method-assign,assignment]
    with pytest.raises(GroupConflict):
        async with mq.consumer("orders", "billing"):
            pass


async def test_entering_is_needed_once(mq: Connection) -> None:
    consumer = mq.consumer("orders", "billing")
    with pytest.raises(UsageError, match="async with"):
        await consumer.poll()
    await consumer.close()  # nothing to leave
    async with consumer:
        with pytest.raises(UsageError, match="entered once"):
            await consumer.__aenter__()


async def test_an_unknown_topic(mq: Connection) -> None:
    with pytest.raises(UnknownTopic, match="did you mean 'orders'"):
        async with mq.consumer("ordesr", "billing"):
            pass


@pytest.mark.parametrize(
    "wrong",
    [
        {"ack": "before"},
        {"window": 0},
        {"window_bytes": 0},
        {"mode": "sorted"},
        {"order": "random"},
        {"start": "yesterday"},
        {"start": {0: -1}},
        {"start": {}},
        {"lease": "1ms"},
        {"max_attempts": 0},
        {"member": ""},
    ],
)
async def test_wrong_settings(mq: Connection, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidSetting):
        mq.consumer("orders", "billing", **wrong)
