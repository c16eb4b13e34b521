"""The connection: who may use it, until when, and that leaving lets go of everything."""

from __future__ import annotations

import asyncio
import os
import threading

import pytest

import postroom
from postroom import ClosedError, ForkError, InvalidSetting, Message, UnknownPartition, UsageError
from postroom.client.connection import Connection
from postroom.clock import ManualClock
from tests.unit.client.client_endpoint import FakeEndpoint


async def test_connect_works_both_ways() -> None:
    async with postroom.connect("memory://") as mq:
        assert await mq.topics() == []
    mq = await postroom.connect("memory://", client_id="me")
    assert mq.client_id == "me"
    await mq.close()
    await mq.close()  # once more is harmless
    async with await postroom.connect("memory://") as mq:
        assert await mq.topics() == []


async def test_connecting_is_used_once() -> None:
    connecting = postroom.connect("memory://")
    async with connecting:
        with pytest.raises(UsageError, match="once"):
            await connecting
    with pytest.raises(InvalidSetting, match="client_id"):
        postroom.connect("memory://", client_id="")


async def test_every_call_after_close_is_refused() -> None:
    async with Connection(FakeEndpoint()) as mq:
        await mq.send("orders", b"a")
    for call in (
        mq.send("orders", b""),
        mq.send_many("orders", [Message(b"")]),
        mq.topics(),
        mq.topic("orders"),
        mq.route("orders"),
        mq.groups("orders"),
        mq.lag("orders", "billing"),
        mq.dead_letters("orders", "billing"),
        mq.create_topic("other"),
        anext(mq.read("orders")),
        mq.__aenter__(),
    ):
        with pytest.raises(ClosedError):
            await call
    for make in (lambda: mq.producer("orders"), lambda: mq.consumer("orders", "billing")):
        with pytest.raises(ClosedError):
            make()


async def test_use_after_fork_is_noticed() -> None:
    async with Connection(FakeEndpoint()) as mq:
        await mq.send("orders", b"a")
        child = os.fork()
        if child == 0:  # nothing but plain calls here: the loop belongs to the parent
            try:
                mq.producer("orders")
            except ForkError:
                os._exit(42)
            finally:
                os._exit(1)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 42


async def test_use_in_another_process_is_refused_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async with Connection(FakeEndpoint()) as mq:
        await mq.send("orders", b"a")
        producer = mq.producer("orders")
        async with mq.consumer("orders", "billing") as consumer:
            (message,) = await consumer.poll()
            with monkeypatch.context() as forked:
                forked.setattr(os, "getpid", lambda: -1)
                for call in (
                    mq.send("orders", b""),
                    producer.post(b""),
                    producer.flush(),
                    consumer.poll(),
                    consumer.ack([message]),
                    message.ack(),
                    message.extend(),
                    mq.topics(),
                ):
                    with pytest.raises(ForkError, match="connect again"):
                        await call


async def test_use_from_another_loop_is_refused() -> None:
    async with Connection(FakeEndpoint()) as mq:
        caught: list[BaseException] = []

        def elsewhere() -> None:
            try:
                asyncio.run(mq.send("orders", b""))
            except UsageError as error:
                caught.append(error)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
        assert "another event loop" in str(caught[0])


async def test_leaving_by_an_error_closes_everything() -> None:
    endpoint = FakeEndpoint()
    before = set(threading.enumerate())  # other tests may have left some that are ending
    hearts: list[threading.Thread] = []

    async def body() -> None:
        async with Connection(endpoint) as mq, mq.consumer("orders", "billing"):
            hearts.extend(t for t in threading.enumerate() if t not in before and "heartbeat" in t.name)
            raise KeyError

    with pytest.raises(KeyError):
        await body()
    assert endpoint.closed and [heart.is_alive() for heart in hearts] == [False]


async def test_a_cancel_while_closing_does_not_leave_it_half_closed() -> None:
    endpoint = FakeEndpoint()
    gate, entered = asyncio.Event(), asyncio.Event()

    async def slow(*_: object) -> None:
        entered.set()
        await gate.wait()

    endpoint.unsubscribe = slow  # type: ignore[method-assign]
    mq = Connection(endpoint)
    await mq.consumer("orders", "billing").__aenter__()
    closing = asyncio.ensure_future(mq.close())
    await entered.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    gate.set()
    await mq.close()
    assert endpoint.closed


async def test_a_moved_clock_makes_the_heart_beat() -> None:
    clock = ManualClock()
    endpoint = FakeEndpoint(clock)
    loop, beaten, honest = asyncio.get_running_loop(), asyncio.Event(), endpoint.beat

    def beat(beats: object) -> object:
        loop.call_soon_threadsafe(beaten.set)
        return honest(beats)  # type: ignore[arg-type]

    endpoint.beat = beat  # type: ignore[method-assign,assignment]
    async with Connection(endpoint, clock=clock) as mq, mq.consumer("orders", "billing", lease="1h"):
        clock.advance(20)
        await asyncio.wait_for(beaten.wait(), 30)
    assert clock._listeners == []


# ---- reading ----


async def test_read_reads_what_is_there() -> None:
    async with Connection(FakeEndpoint(partitions=2)) as mq:
        await mq.send_many("orders", [Message(b"%d" % i, key=f"customer-{i % 7}") for i in range(30)])
        found = [m async for m in mq.read("orders")]
        assert sorted(int(m.value) for m in found) == list(range(30))
        for partition in (0, 1):
            of_it = [m.offset async for m in mq.read("orders", partition=partition)]
            assert of_it == list(range(len(of_it)))
        assert [m async for m in mq.read("orders", start="latest")] == []
        some = [m async for m in mq.read("orders", start={0: 2}, end={0: 5, 1: 0})]
        assert [(m.partition, m.offset) for m in some] == [(0, 2), (0, 3), (0, 4)]


async def test_read_stops_where_the_end_was() -> None:
    async with Connection(FakeEndpoint(partitions=1)) as mq:
        await mq.send_many("orders", [Message(b"")] * 3)
        count = 0
        async for _ in mq.read("orders"):
            count += 1
            await mq.send("orders", b"more")
        assert count == 3


async def test_follow_goes_on() -> None:
    async with Connection(FakeEndpoint(partitions=2)) as mq:
        await mq.send("orders", b"a", slot=0)
        reading = mq.read("orders", follow=True)
        assert (await anext(reading)).value == b"a"
        following = asyncio.ensure_future(anext(reading))
        await mq.send("orders", b"b", slot=1023)
        assert (await following).value == b"b"
        await reading.aclose()
        assert len([t for t in asyncio.all_tasks() if "pump" in repr(t)]) == 0


async def test_wrong_readings() -> None:
    async with Connection(FakeEndpoint(partitions=2)) as mq:
        with pytest.raises(UnknownPartition):
            await anext(mq.read("orders", partition=9))
        with pytest.raises(InvalidSetting, match="start"):
            await anext(mq.read("orders", start="now"))
        with pytest.raises(InvalidSetting, match="end"):
            await anext(mq.read("orders", end="now"))
        with pytest.raises(InvalidSetting, match="follow"):
            await anext(mq.read("orders", follow=True, end="latest"))


def test_a_connection_that_was_not_awaited_says_so() -> None:
    connecting = postroom.connect("memory://")
    with pytest.raises(UsageError, match="not connected yet, so it has no send: write `mq = await"):
        connecting.send  # type: ignore[attr-defined]  # noqa: B018
    assert not hasattr(connecting, "no_such_name")
