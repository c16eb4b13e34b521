"""Servers that stop, crash, hang up or are full while producers and consumers run: all goes on by itself.

What was confirmed is there (R1, R34), what was sent once is stored once (I3), and the log says so once, not a
thousand times.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

import postroom
from postroom.address import parse
from postroom.broker.broker import open_endpoint
from postroom.config import DEFAULTS
from tests.integration.processes.children import Connection, child, received
from tests.integration.races.interleaving import kill
from tests.ready import Ground, both, ready
from tests.servers import Proxy
from tests.servers.server import Server

IMPATIENT = replace(DEFAULTS, lock_timeout_ms=1_000, idle_timeout_ms=2_000, connect_timeout_ms=2_000)


@pytest.fixture
def own(kind: str, request: pytest.FixtureRequest) -> Iterator[Ground]:
    """On a server that may be stopped."""
    server: Server = request.getfixturevalue(f"spare_{kind}")
    with ready(server) as ground:
        yield ground


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[postroom.Connection]:
    """With time-outs of seconds, so that a test does not take minutes."""
    async with postroom.Connection(await open_endpoint(parse(url), limits=IMPATIENT)) as mq:
        yield mq


async def drain(
    mq: postroom.Connection, group: str, count: int, ready: asyncio.Event | None = None
) -> list[bytes]:
    """So many different messages of topic `orders`, each acked."""
    found: dict[bytes, None] = {}
    async with mq.consumer("orders", group) as consumer:
        if ready is not None:
            ready.set()
        while len(found) < count:
            messages = await consumer.poll(wait=20)
            found |= dict.fromkeys(m.value for m in messages)
            with contextlib.suppress(postroom.LeaseLost):
                await consumer.ack(messages)
    return list(found)


# ---- the server stops under load --------------------------------------------------------------------------


def produce(url: str, name: str, pipe: Connection) -> None:
    async def main() -> None:
        async with postroom.connect(url) as mq:
            pipe.send("ready")
            number = 0
            while not pipe.poll():
                values = [b"%s:%d" % (name.encode(), number + i) for i in range(5)]
                await mq.send_many("orders", [postroom.Message(v, key=v) for v in values])
                number += len(values)
                await asyncio.sleep(0.002)
        pipe.send(number)

    asyncio.run(main())


def consume(url: str, pipe: Connection) -> None:
    async def main() -> None:
        async with postroom.connect(url) as mq, mq.consumer("orders", "billing") as consumer:
            pipe.send("ready")
            while not pipe.poll():
                messages = await consumer.poll(wait=0.2)
                pipe.send([m.value for m in messages])
                with contextlib.suppress(postroom.LeaseLost):
                    await consumer.ack(messages)

    asyncio.run(main())


@pytest.mark.slow("waits for a server that fails or hangs")
@both
@pytest.mark.timeout(180)
async def test_a_server_that_is_stopped_and_crashes_under_load(own: Ground) -> None:
    """In order, at once, and by kill -9; two processes send and two receive, and none is told anything."""
    async with postroom.connect(own.url) as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing", lease=15)  # acks wait so long for a server
    with ExitStack() as stack:
        producers = [stack.enter_context(child(produce, own.url, f"p{n}"))[1] for n in range(2)]
        consumers = [stack.enter_context(child(consume, own.url))[1] for _ in range(2)]
        assert {received(pipe) for pipe in (*producers, *consumers)} == {"ready"}
        handled: set[bytes] = set()
        for stop in (own.server.stop, lambda: own.server.stop("immediate"), own.server.kill):
            before = len(handled)
            await asyncio.to_thread(until_more, consumers, handled, before + 40)
            await asyncio.to_thread(stop)
            await asyncio.to_thread(own.server.start)
        await asyncio.to_thread(until_more, consumers, handled, len(handled) + 40)
        confirmed = await asyncio.to_thread(ended, producers)
        sent = {b"p%d:%d" % (n, i) for n, count in enumerate(confirmed) for i in range(count)}
        await asyncio.to_thread(until_more, consumers, handled, len(sent))
    assert handled == sent
    async with postroom.connect(own.url) as mq:
        stored = [m.value async for m in mq.read("orders")]
        assert len(stored) == len(set(stored)) == len(sent)
        assert await mq.dead_letters("orders", "billing") == []


def until_more(consumers: list[Connection], handled: set[bytes], wanted: int) -> None:
    deadline = time.monotonic() + 60
    while len(handled) < wanted:
        assert time.monotonic() < deadline, f"{len(handled)} of {wanted} messages in a minute"
        for pipe in consumers:
            while pipe.poll(0.02):
                handled.update(pipe.recv())


def ended(producers: list[Connection]) -> list[int]:
    for pipe in producers:
        pipe.send("enough")
    return [received(pipe, 60) for pipe in producers]


@both
async def test_a_server_that_is_away_for_three_seconds(own: Ground, caplog: pytest.LogCaptureFixture) -> None:
    """Sends wait, a consumer goes on, and each part says once that it has to wait."""
    async with postroom.connect(own.url) as mq:
        await mq.create_topic("orders", partitions=2)
        ready = asyncio.Event()
        draining = asyncio.create_task(drain(mq, "billing", 40, ready))
        await ready.wait()
        await asyncio.gather(*(mq.send("orders", b"%d" % i) for i in range(20)))
        await asyncio.to_thread(own.server.stop)
        caplog.clear()
        with caplog.at_level(logging.INFO):
            sending = [asyncio.create_task(mq.send("orders", b"%d" % i, timeout=90)) for i in range(20, 40)]
            await asyncio.sleep(3)
            for _ in range(500):
                if lines(caplog):
                    break
                await asyncio.sleep(0.05)  # a busy machine has not come so far
            assert not any(task.done() for task in sending)
            said = lines(caplog)
            await asyncio.to_thread(own.server.start)
            receipts = await asyncio.gather(*sending)
        assert len({(r.partition, r.offset) for r in receipts}) == 20
        assert sorted(map(int, await draining)) == list(range(40))
    assert 0 < len(said) <= 6, "\n".join(said)
    assert all(Server.password not in line for line in said)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.startswith("postroom")]


@pytest.mark.slow("waits for a server that fails or hangs")
@both
async def test_a_send_that_runs_out_of_time_says_so(own: Ground) -> None:
    async with postroom.connect(own.url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send("orders", b"1")
        await asyncio.to_thread(own.server.stop)
        for _ in range(20):
            begin = time.monotonic()
            with pytest.raises(postroom.SendTimeout) as told:
                await mq.send("orders", b"2", timeout=1)
            assert time.monotonic() - begin < 10  # not the half minute of the default
            if told.value.details.get("stored") is False:
                break
            told.match("it is not known whether anything was stored")  # its second ended within a try: again
        told.match("nothing was stored, sending again is safe")
        with pytest.raises(postroom.StoreUnavailable, match="cannot be reached"):
            await mq.topics()


@pytest.mark.slow("waits for a server that fails or hangs")
@both
async def test_closing_while_the_server_is_away_does_not_take_long(own: Ground) -> None:
    mq = await postroom.connect(own.url)
    await mq.create_topic("orders", partitions=1)
    await mq.send("orders", b"1")
    async with mq.consumer("orders", "billing") as consumer:
        await consumer.poll(wait=10)
        await asyncio.to_thread(own.server.stop)
        begin = time.monotonic()
        await mq.close()
    assert time.monotonic() - begin < 10  # it tries for five seconds to give back what it holds


# ---- connections that end ---------------------------------------------------------------------------------


@pytest.mark.slow("waits for a server that fails or hangs")
async def test_connections_that_are_cut_again_and_again(
    ground: Ground, proxy_to: Callable[[int], Proxy]
) -> None:
    """In whatever moment: everything is stored once, in order, with the right receipt, and handled."""
    proxy = proxy_to(ground.server.port)
    url = ground.server.url(ground.name, port=proxy.port)
    async with postroom.connect(ground.url) as sound, connected(url) as mq:
        await sound.create_topic("orders", partitions=1)
        ready = asyncio.Event()
        draining = asyncio.create_task(drain(mq, "billing", 400, ready))
        await ready.wait()
        cutting = asyncio.create_task(cut_for_ever(proxy.cut))
        receipts = []
        async with mq.producer("orders", batch_messages=5) as producer:
            for i in range(400):
                receipts.append(await producer.post(b"%d" % i, key="k"))
                await asyncio.sleep(0.005)
        offsets = [(await receipt).offset for receipt in receipts]
        handled = await draining
        cutting.cancel()
        stored = [(m.offset, m.value) async for m in sound.read("orders")]
    assert stored == [(i, b"%d" % i) for i in range(400)] and offsets == list(range(400))
    assert sorted(map(int, handled)) == list(range(400))


async def cut_for_ever(cut: Callable[[], object]) -> None:
    for number in range(1000):
        await asyncio.sleep(0.2 + 0.03 * (number % 7))
        await asyncio.to_thread(cut)


@pytest.mark.slow("waits for a server that fails or hangs")
async def test_connections_that_an_operator_ends(ground: Ground) -> None:
    """pg_terminate_backend, KILL: of all connections, five times in a row."""
    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("orders", partitions=1)
        async with mq.consumer("orders", "billing") as consumer:
            for number in range(5):
                assert await asyncio.to_thread(kill, ground) > 0
                await mq.send("orders", b"%d" % number)
                (message,) = await consumer.poll(wait=20)
                assert message.value == b"%d" % number
                await message.ack()
        assert (await mq.lag("orders", "billing")).total.messages == 0


@pytest.mark.slow("waits for a server that fails or hangs")
async def test_a_network_that_goes_deaf_and_comes_back(
    ground: Ground, proxy_to: Callable[[int], Proxy]
) -> None:
    proxy = proxy_to(ground.server.port)
    async with (
        postroom.connect(ground.url) as sound,
        connected(ground.server.url(ground.name, port=proxy.port)) as mq,
    ):
        await sound.create_topic("orders", partitions=1)
        await mq.send("orders", b"0")
        proxy.deaf()
        sending = asyncio.create_task(mq.send("orders", b"1", timeout=30))
        await asyncio.sleep(1)
        assert (await sound.send("orders", b"2")).offset in (1, 2)  # nobody else is held up for long
        await asyncio.sleep(3)
        assert not sending.done()
        proxy.cut()
        proxy.heal()
        await sending
        assert sorted([m.value async for m in sound.read("orders")]) == [b"0", b"1", b"2"]


# ---- a server that is full --------------------------------------------------------------------------------


@pytest.mark.slow("waits for a server that fails or hangs")
@pytest.mark.undisturbed  # it limits the connections of a user that others share
async def test_no_connections_left_while_it_runs(ground: Ground) -> None:
    """What needs one waits; what has one goes on; when there are some again all is well."""
    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send("orders", b"1")
        limit = "ALTER DATABASE {0} CONNECTION LIMIT {1}"
        if ground.kind == "mariadb":
            limit = "ALTER USER postroom@'%%' WITH MAX_USER_CONNECTIONS {1}"
        ground.rows(limit.format(ground.name, 1), admin=True)
        try:
            await asyncio.to_thread(kill, ground)
            hog = await asyncio.to_thread(take_the_last_connection, ground)
            with pytest.raises(postroom.StoreUnavailable, match="takes no more connections"):
                await mq.topics()
            sending = asyncio.create_task(mq.send("orders", b"2", timeout=30))
            await asyncio.sleep(0.3)
            assert not sending.done()
        finally:
            ground.rows(limit.format(ground.name, -1 if ground.kind == "postgres" else 0), admin=True)
        await sending
        hog.close()
        assert sorted(await drain(mq, "billing", 2)) == [b"1", b"2"]


def take_the_last_connection(ground: Ground) -> Any:
    """Before anybody comes back for the one that was ended."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return ground.server.connect(ground.name)
        except Exception:
            assert time.monotonic() < deadline
            kill(ground)
