"""Requests across brokers, processes, shards and principals (R38), and what a kill in between leaves."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

import postroom
from bench.requests import app_on, measure
from postroom import App, Connection, NoReply, PermissionDenied
from postroom.broker.access import new_token
from postroom.broker.topology.topics import ForgetReplies
from postroom.client.requests import Answers
from postroom.clock import ManualClock
from postroom.config import DEFAULTS
from postroom.model.access import Principal, hash_of, parse_permissions
from postroom.model.topology.names import is_reply
from tests.contract.brokers import run_duty
from tests.integration.processes.children import child, received
from tests.integration.wire.brokers_threads import ThreadedBroker
from tests.integration.wire.wire_raw import broker_of, served

SECONDS = 40


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


async def reply_topics(mq: Connection) -> list[str]:
    return [topic.name for topic in await mq.topics(internal=True) if is_reply(topic.name)]


class Waiting:
    """An app whose handler waits to be let go."""

    def __init__(self, where: str | Connection, **options: Any) -> None:
        self.app = App(where, **options)
        self.begun, self.go_on, self.calls = asyncio.Event(), asyncio.Event(), 0
        self.app.reply("quote", group="pricing", lease=1)(self.price)

    async def price(self, body: bytes) -> bytes:
        self.calls += 1
        self.begun.set()
        await self.go_on.wait()
        return body.upper()

    async def has_begun(self) -> None:
        async with asyncio.timeout(SECONDS):
            await self.begun.wait()


# ---- brokers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("store", ["sqlite", "postgres_ready"])
async def test_a_broker_dies_under_a_request_and_the_reply_comes(
    stack: ExitStack, url: str, store: str, request: pytest.FixtureRequest
) -> None:
    """The requester came in by one broker and the worker by another; whichever goes, the rest is enough."""
    if store != "sqlite":
        url = request.getfixturevalue(store)
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("quote", partitions=2, exist_ok=True)
    one = stack.enter_context(ThreadedBroker(url))
    other = stack.enter_context(ThreadedBroker(url))
    at_one, at_other = f"postroom://{one.address}", f"postroom://{other.address}"
    worker = Waiting(f"{at_other},{one.address}")
    async with worker.app, postroom.connect(f"{at_one},{other.address}") as mq:
        asked = asyncio.create_task(mq.request("quote", b"a", timeout=SECONDS))
        await worker.has_begun()
        await asyncio.to_thread(one.abort)
        worker.go_on.set()
        assert (await asked).value == b"A"
        assert (await mq.request("quote", b"b", timeout=SECONDS)).value == b"B"


async def test_requester_and_worker_embedded_and_served(stack: ExitStack, url: str) -> None:
    """Two processes, as far as the store can tell: a broker, and a worker that has the store open itself."""
    async with postroom.connect(url) as mq:
        await mq.create_topic("quote", partitions=1, storage="volatile")
    broker = stack.enter_context(ThreadedBroker(url))
    worker = Waiting(url)
    worker.go_on.set()
    async with worker.app, postroom.connect(f"postroom://{broker.address}") as mq:
        replies = await asyncio.gather(*(mq.request("quote", b"a", timeout=SECONDS) for _ in range(50)))
    assert [reply.value for reply in replies] == [b"A"] * 50


# ---- shards ----------------------------------------------------------------------------------------------


async def test_a_reply_topic_that_is_moved_brings_its_replies(tmp_path: Path) -> None:
    url, shards = f"sqlite:///{tmp_path}/a.db", {"b": f"sqlite:///{tmp_path}/b.db"}
    async with postroom.connect(url, shards=shards) as mq:
        await mq.create_topic("quote", partitions=1)
        worker = Waiting(mq)
        async with worker.app:
            asked = asyncio.create_task(mq.request("quote", b"a", timeout=SECONDS))
            await worker.has_begun()
            (name,) = await reply_topics(mq)
            here = (await mq.route(name)).ranges[0].shard
            await mq.move(name, 0, shard="b" if here == "first" else "first")
            worker.go_on.set()
            assert (await asked).value == b"A"
            assert (await mq.request("quote", b"b", timeout=SECONDS)).value == b"B"


# ---- kills -----------------------------------------------------------------------------------------------


def ask_and_wait(url: str, pipe: Any) -> None:
    async def run() -> None:
        async with postroom.connect(url) as mq:
            await mq.request("quote", b"1", timeout=SECONDS)
            pipe.send("answered")
            await mq.request("quote", b"never", timeout=SECONDS)

    asyncio.run(run())


@pytest.mark.slow("breaks connections for seconds")
async def test_a_requester_that_was_killed_leaves_nothing_for_long(url: str) -> None:
    async with postroom.connect(url) as mq:
        await mq.create_topic("quote", partitions=1)
        worker = Waiting(mq)
        worker.go_on.set()
        async with worker.app:
            with child(ask_and_wait, url) as (process, pipe):
                assert await asyncio.to_thread(received, pipe, SECONDS) == "answered"
                process.kill()
                await asyncio.to_thread(process.join, SECONDS)
            assert len(await reply_topics(mq)) == 1
            await run_duty(mq, ForgetReplies)
            assert len(await reply_topics(mq)) == 1  # it may only be slow
    later = ManualClock(time.time_ns() // 1_000_000 + DEFAULTS.reply_idle_ms + 1000)
    async with postroom.connect(url, clock=later) as mq:
        await run_duty(mq, ForgetReplies)
        assert await reply_topics(mq) == []
        assert [topic.name for topic in await mq.topics()] == ["quote"]


def serve_and_die(url: str, point: str, pipe: Any) -> None:
    """A worker that ends without a word: before it replies, or before it acks."""
    send = Answers.send

    async def dying(self: Answers, *args: Any, **named: Any) -> bool:
        await send(self, *args, **named)
        os._exit(9)

    app = App(url)

    @app.reply("quote", group="pricing", lease=1)
    async def price(body: bytes) -> bytes:
        if point == "handling":
            os._exit(9)
        return b"first"

    async def run() -> None:
        async with app:
            pipe.send("ready")
            await asyncio.Event().wait()

    if point == "replied":
        Answers.send = dying  # type: ignore[method-assign]
    asyncio.run(run())


@pytest.mark.slow("breaks connections for seconds")
@pytest.mark.parametrize(("point", "answer"), [("handling", b"A"), ("replied", b"first")])
async def test_a_worker_is_killed_and_another_goes_on(url: str, point: str, answer: bytes) -> None:
    """What was not acked comes again, once the lease is over: a request may be handled twice, and is answered
    once. The second reply is late."""
    async with postroom.connect(url) as mq:
        await mq.create_topic("quote", partitions=1)
        with child(serve_and_die, url, point) as (process, pipe):
            assert await asyncio.to_thread(received, pipe, SECONDS) == "ready"
            asked = asyncio.create_task(mq.request("quote", b"a", timeout=SECONDS))
            await asyncio.to_thread(process.join, SECONDS)
            assert process.exitcode == 9
        other = Waiting(mq)
        other.go_on.set()
        async with other.app:
            assert (await asked).value == answer
            await other.has_begun()
            async with asyncio.timeout(SECONDS):
                while (await mq.lag("quote", "pricing")).total.messages:  # noqa: ASYNC110 - nobody tells
                    await asyncio.sleep(0.01)
        assert (other.calls, mq.late_replies) == (1, int(point == "replied"))


# ---- principals ------------------------------------------------------------------------------------------


async def test_who_may_send_asks_and_who_may_consume_answers_and_nobody_else_reads_it() -> None:
    shop, clerk, spy = new_token(), new_token(), new_token()
    async with served(dev=False) as (host, server):
        access = broker_of(host).store.access
        for name, token, rights in (
            ("shop", shop, ["send:quote"]),
            ("clerk", clerk, ["consume:quote"]),
            ("spy", spy, ["send:other", "consume:other"]),
        ):
            access.add(Principal(name, parse_permissions(rights)), hash_of(token))
        for topic in ("quote", "other"):
            await host.create_topic(topic, partitions=1)
        worker = Waiting(server.url, token=clerk)
        async with (
            worker.app,
            postroom.connect(server.url, token=shop) as mq,
            postroom.connect(server.url, token=spy) as other,
        ):
            asked = asyncio.create_task(mq.request("quote", b"a", timeout=SECONDS))
            await worker.has_begun()
            (name,) = await reply_topics(host)
            place = (await host.route(name)).ranges[0].partition_id
            assert [topic.name for topic in await mq.topics(internal=True)] == [name, "quote"]
            for stranger in (other, worker.app.connection):
                assert await reply_topics(stranger) == []
                with pytest.raises(PermissionDenied, match=r"may not consume topic '_reply\."):
                    await stranger._endpoint.fetch(name, place, 0, max_messages=1, max_bytes=1, wait_ms=0)
                with pytest.raises(PermissionDenied, match="may not manage"):
                    await stranger._endpoint.delete_topic(name)
            client = name.split(".")[1]
            if (await other._endpoint.open_replies(client)).name == name:
                pytest.fail("a stranger was given the requester's own topic")
            await other._endpoint.close_replies(client)
            worker.go_on.set()
            assert (await asked).value == b"A"
            with pytest.raises(PermissionDenied, match="send:quote"):
                await other.request("quote", b"", timeout=SECONDS)
            with pytest.raises(PermissionDenied, match="may not consume"):  # it may send to nothing
                await worker.app.connection.request("quote", b"", timeout=SECONDS)


@pytest.mark.slow("breaks connections for seconds")
async def test_a_store_that_is_away_is_no_reply_and_the_next_request_works(
    stack: ExitStack, url: str
) -> None:
    broker = stack.enter_context(ThreadedBroker(url))
    async with postroom.connect(f"postroom://{broker.address}") as mq:
        await mq.create_topic("quote", partitions=1)
        worker = Waiting(mq)
        worker.go_on.set()
        async with worker.app:
            assert (await mq.request("quote", b"a", timeout=SECONDS)).value == b"A"
            await asyncio.to_thread(broker.abort)
            with pytest.raises(NoReply, match="no reply within"):
                await mq.request("quote", b"b", timeout=0.5)
            await asyncio.to_thread(broker.start)
            assert (await mq.request("quote", b"c", timeout=SECONDS)).value == b"C"


async def test_the_benchmark_measures_round_trips() -> None:
    async with postroom.connect("memory://") as mq:
        await mq.create_topic("volatile", partitions=1, storage="volatile")
        await mq.create_topic("durable", partitions=1)
        async with app_on(mq):
            found = await measure(mq, "memory", "embedded", "volatile", 0.1)
    assert found.per_s > 0 < found.samples
    assert 0 < found.p50_ms <= found.p99_ms <= found.max_ms
