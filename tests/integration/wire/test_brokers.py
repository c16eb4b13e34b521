"""Several brokers on one store, and what users of them see when one goes away: nothing (R2)."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, Literal

import pytest

import postroom
from postroom.errors import BrokerUnavailable, StoreUnavailable
from postroom.wire.client.remote import RemoteEndpoint
from tests.integration.wire.brokers_threads import ThreadedBroker
from tests.integration.wire.wire_raw import broker_of
from tests.servers.places import free_port
from tests.servers.proxy import Proxy
from tests.tuned import Tune

SECONDS = 30


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


def two(stack: ExitStack, url: str) -> tuple[ThreadedBroker, ThreadedBroker]:
    one = stack.enter_context(ThreadedBroker(url))
    return one, stack.enter_context(ThreadedBroker(url))


def pool_of(mq: postroom.Connection) -> set[str]:
    endpoint = mq._endpoint
    assert isinstance(endpoint, RemoteEndpoint)
    return {link.address for link in endpoint.pool._links.values() if not link.gone}


async def test_one_address_is_enough_to_find_the_others(stack: ExitStack, url: str, tune: Tune) -> None:
    """At once if both are listed; one that the machine held up for seconds is not, until it says again that
    it lives."""
    tune(wire={"brokers_s": 0.2, "enter_s": 0.1})
    one, other = two(stack, url)
    async with postroom.connect(f"postroom://{other.address}") as mq:
        await mq.create_topic("orders", partitions=16)
        async with asyncio.timeout(SECONDS):
            while pool_of(mq) != {one.address, other.address}:
                for i in range(64):
                    await mq.send("orders", b"%d" % i, key=str(i))


async def test_a_busy_client_learns_of_a_broker_that_came_later(
    stack: ExitStack, url: str, tune: Tune
) -> None:
    tune(wire={"brokers_s": 0.2, "enter_s": 0.1})
    one = stack.enter_context(ThreadedBroker(url))
    async with postroom.connect(f"postroom://{one.address}") as mq:
        await mq.create_topic("orders", partitions=16)
        other = await asyncio.to_thread(ThreadedBroker, url)
        stack.enter_context(other)
        async with asyncio.timeout(SECONDS):
            while other.address not in pool_of(mq):
                await asyncio.gather(*(mq.send("orders", b"", key=str(i)) for i in range(16)))


Ending = Callable[[ThreadedBroker], None]


KEYS = 12


class Traffic:
    """Sends numbers and consumes them, without a pause; any error is the test's."""

    def __init__(self, mq: postroom.Connection, mode: Literal["shared", "ordered"] = "shared") -> None:
        self.mq, self.mode, self.sent = mq, mode, 0
        self.got = Counter[int]()  # in the order in which they first came
        self.going = True

    def check(self) -> None:
        assert set(self.got) == set(range(self.sent))
        if self.mode == "ordered":
            for key in range(KEYS):
                mine = [number for number in self.got if number % KEYS == key]
                assert mine == sorted(mine)

    async def consume(self, consumer: postroom.Consumer) -> None:
        async for message in consumer:
            self.got[int(message.value)] += 1
            await message.ack()

    def moved(self, messages: int) -> Callable[[], bool]:
        goal = len(self.got) + messages
        return lambda: len(self.got) >= goal

    async def run(self, change: Callable[[], None]) -> None:
        consumer = self.mq.consumer("orders", group="g", lease=3, mode=self.mode)
        async with asyncio.timeout(SECONDS), consumer:
            consuming = asyncio.create_task(self.consume(consumer))
            sending = [asyncio.create_task(self.send()) for _ in range(4)]
            await self.until(self.moved(100), consuming, *sending)
            await asyncio.to_thread(change)
            await self.until(self.moved(200), consuming, *sending)
            self.going = False
            await asyncio.gather(*sending)
            await self.until(lambda: len(self.got) == self.sent, consuming)
            consuming.cancel()
            await asyncio.wait([consuming])

    async def send(self) -> None:
        while self.going:
            number, self.sent = self.sent, self.sent + 1
            await self.mq.send("orders", b"%d" % number, key=str(number % KEYS))

    async def until(self, holds: Callable[[], bool], *tasks: asyncio.Task[None]) -> None:
        while not holds():
            for task in tasks:
                if task.done():
                    task.result()
            await asyncio.sleep(0.01)


@pytest.mark.few(1, "breaks connections for seconds")
@pytest.mark.parametrize("mode", ["shared", "ordered"])
@pytest.mark.parametrize("ending", [ThreadedBroker.stop, ThreadedBroker.abort])
async def test_a_broker_goes_away_and_nobody_notices(
    stack: ExitStack, url: str, ending: Ending, mode: Literal["shared", "ordered"]
) -> None:
    one, other = two(stack, url)
    async with postroom.connect(f"postroom://{one.address},{other.address}", client_id="user") as mq:
        await mq.create_topic("orders", partitions=8)
        traffic = Traffic(mq, mode)
        await traffic.run(lambda: ending(one))
        assert pool_of(mq) == {other.address}
    traffic.check()
    async with postroom.connect(url) as mq:
        stored = [int(message.value) async for message in mq.read("orders")]
    assert sorted(stored) == list(range(traffic.sent))  # nothing lost, and nothing stored twice
    again = sum(traffic.got.values()) - len(traffic.got)
    assert again <= 1000  # what was handed out when the broker went


@pytest.mark.few(1, "breaks connections for seconds")
@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_connections_that_break_all_the_time_lose_nothing(
    stack: ExitStack, url: str, mode: Literal["shared", "ordered"]
) -> None:
    broker = stack.enter_context(ThreadedBroker(url))
    proxy = stack.enter_context(Proxy(broker.port))
    broker.stop()
    broker._advertise = f"127.0.0.1:{proxy.port}"
    broker.start()
    random = Random(7)

    def cut_often() -> None:
        for _ in range(12):
            time.sleep(random.uniform(0.01, 0.1))
            proxy.cut()

    async with postroom.connect(f"postroom://127.0.0.1:{proxy.port}") as mq:
        await mq.create_topic("orders", partitions=4)
        traffic = Traffic(mq, mode)
        await traffic.run(cut_often)
    traffic.check()
    async with postroom.connect(url) as mq:
        stored = [int(message.value) async for message in mq.read("orders")]
    assert sorted(stored) == list(range(traffic.sent))


async def test_the_only_broker_comes_back_on_the_same_port(stack: ExitStack, url: str) -> None:
    broker = stack.enter_context(ThreadedBroker(url))
    async with postroom.connect(f"postroom://{broker.address}") as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.send("orders", b"0")
        await asyncio.to_thread(broker.abort)
        sending = [asyncio.create_task(mq.send("orders", b"%d" % i)) for i in range(1, 20)]
        await asyncio.sleep(0.3)
        assert not any(task.done() for task in sending)
        await asyncio.to_thread(broker.start)
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*sending)
        stored = [int(message.value) async for message in mq.read("orders")]
        assert sorted(stored) == list(range(20))


async def test_nobody_is_let_in_before_the_broker_knows_its_queue(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that comes back at that moment would be told of a queue without a name, and end."""
    port, let_in = free_port(), list[bool]()
    async with postroom.connect(url) as mq:
        brokers = broker_of(mq).store.brokers
        queue = brokers.queue

        def seen() -> str:
            with socket.socket() as client:
                let_in.append(client.connect_ex(("127.0.0.1", port)) == 0)
            return queue()

        monkeypatch.setattr(brokers, "queue", seen)
        await mq.serve(port=port)
    assert let_in == [False]


async def test_a_broker_that_could_not_start_leaves_its_port(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store went away meanwhile: whoever tries again must not find the port taken by nobody."""
    port = free_port()
    async with postroom.connect(url) as mq:
        brokers = broker_of(mq).store.brokers

        def away(*_: object) -> None:
            raise StoreUnavailable("the store is away")

        with monkeypatch.context() as patch:
            patch.setattr(brokers, "enter", away)
            with pytest.raises(StoreUnavailable):
                await mq.serve(port=port)
        served = await mq.serve(port=port)
        async with postroom.connect(served.url) as client:
            await client.create_topic("orders")


# ---- the way there ----


async def test_another_queue_on_a_known_address_is_refused(
    stack: ExitStack, url: str, tmp_path: Path
) -> None:
    broker = stack.enter_context(ThreadedBroker(url))
    async with postroom.connect(f"postroom://{broker.address}") as mq:
        await mq.create_topic("orders", partitions=1)
        await asyncio.to_thread(broker.stop)
        another = f"sqlite:///{tmp_path / 'another.db'}"
        stack.enter_context(await asyncio.to_thread(ThreadedBroker, another, port=broker.port))
        with pytest.raises(postroom.ProtocolError, match="serves another queue"):
            await mq.topics()


async def test_a_broken_connection_to_the_only_broker_is_made_again(stack: ExitStack, url: str) -> None:
    broker = stack.enter_context(ThreadedBroker(url))
    proxy = stack.enter_context(Proxy(broker.port))
    await asyncio.to_thread(broker.stop)
    broker._advertise = f"127.0.0.1:{proxy.port}"
    await asyncio.to_thread(broker.start)
    async with postroom.connect(f"postroom://127.0.0.1:{proxy.port}") as mq:
        await mq.create_topic("orders", partitions=1)
        for _ in range(3):
            await asyncio.to_thread(proxy.cut)
            assert [topic.name for topic in await mq.topics()] == ["orders"]
        await asyncio.to_thread(proxy.deaf, "answers")
        asking = asyncio.create_task(mq.purge("orders"))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(proxy.cut)
        await asyncio.to_thread(proxy.heal)
        with pytest.raises(BrokerUnavailable, match="it is not known whether purge was done"):
            await asking


@pytest.mark.parametrize("verdict", ["ack", "retry", "release", "dead"])
async def test_a_verdict_whose_answer_is_lost_counts(stack: ExitStack, url: str, verdict: str) -> None:
    """It is asked again, and nobody is told that the message is in other hands."""
    broker = stack.enter_context(ThreadedBroker(url))
    proxy = stack.enter_context(Proxy(broker.port))
    await asyncio.to_thread(broker.stop)
    broker._advertise = f"127.0.0.1:{proxy.port}"
    await asyncio.to_thread(broker.start)
    done = _told_when_settled(broker)
    async with postroom.connect(f"postroom://127.0.0.1:{proxy.port}") as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send("orders", b"1")
        async with mq.consumer("orders", group="g") as consumer:
            (message,) = await consumer.poll(max_messages=1, wait=20)
            await asyncio.to_thread(proxy.deaf, "answers")
            said = {"ack": (), "retry": (0,), "release": (0,), "dead": ("why",)}[verdict]
            settling = asyncio.create_task(getattr(message, verdict)(*said))
            assert await asyncio.to_thread(done.wait, SECONDS)
            await asyncio.to_thread(proxy.cut)
            await asyncio.to_thread(proxy.heal)
            async with asyncio.timeout(SECONDS):
                await settling
            if verdict in ("retry", "release"):
                (again,) = await consumer.poll(max_messages=1, wait=20)
                assert again.attempt == (2 if verdict == "retry" else 1)
                await again.ack()
            lag = await mq.lag("orders", "g")
            assert (lag.total.messages, lag.total.unsettled) == (0, 0)


def _told_when_settled(broker: ThreadedBroker) -> threading.Event:
    assert broker.mq is not None
    endpoint, done = broker_of(broker.mq), threading.Event()
    settle = endpoint.settle

    async def told(*args: Any, **named: Any) -> Any:
        reply = await settle(*args, **named)
        done.set()
        return reply

    endpoint.settle = told  # type: ignore[method-assign]
    return done


@pytest.mark.slow("breaks connections for seconds")
async def test_a_deaf_broker_is_noticed_and_the_other_is_used(stack: ExitStack, url: str, tune: Tune) -> None:
    tune(wire={"silence_s": 1.0})
    one = stack.enter_context(ThreadedBroker(url))
    proxy = stack.enter_context(Proxy(one.port))
    one.stop()
    one._advertise = f"127.0.0.1:{proxy.port}"
    one.start()
    other = stack.enter_context(ThreadedBroker(url))
    async with postroom.connect(f"postroom://{other.address},127.0.0.1:{proxy.port}") as mq:
        await mq.create_topic("orders", partitions=16)
        await asyncio.gather(*(mq.send("orders", b"", key=str(i)) for i in range(64)))
        assert pool_of(mq) == {f"127.0.0.1:{proxy.port}", other.address}
        await asyncio.to_thread(proxy.deaf)
        began = time.monotonic()
        async with asyncio.timeout(SECONDS):
            await asyncio.gather(*(mq.send("orders", b"1", key=str(i)) for i in range(64)))
        assert time.monotonic() - began < 15  # up to 2 s until it is asked for a sign of life, and 1 for that
        assert f"127.0.0.1:{proxy.port}" not in pool_of(mq)


# ---- a blocked loop ----


@pytest.mark.slow("breaks connections for seconds")
async def test_a_handler_that_blocks_the_loop_keeps_its_leases(stack: ExitStack, url: str) -> None:
    broker = stack.enter_context(ThreadedBroker(url))
    async with postroom.connect(f"postroom://{broker.address}") as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send("orders", b"1")

        async def look() -> int:
            assert broker.mq is not None
            async with broker.mq.consumer("orders", group="g", lease=1.5) as rival:
                return len(await rival.poll(max_messages=10, wait=2.6))

        async with mq.consumer("orders", group="g", lease=1.5) as consumer:
            (message,) = await consumer.poll(max_messages=2, wait=20)
            looking = asyncio.run_coroutine_threadsafe(look(), broker._loop)
            time.sleep(2.4)  # noqa: ASYNC251 - that is what it is about
            await message.ack()
            assert looking.result(timeout=20) == 0
