"""Handlers of ordered groups (R22, R23): keys side by side, each in order, whatever handlers do."""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from typing import Any

import pytest

import postroom
from postroom import App, Backoff, Connection, Dead, Message, Received, RetryLater
from postroom.clock import ManualClock
from postroom.testing.fixture import run_until_idle
from tests.contract.stores import Open, everywhere


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("orders", partitions=2)
    return connection


@pytest.fixture
def app(mq: Connection) -> App:
    return App(mq)


async def send(mq: Connection, keys: str, rounds: int = 1) -> None:
    """Values are the key and how many of it came before."""
    counts: dict[str, int] = defaultdict(int)
    messages = []
    for key in keys * rounds:
        messages.append(Message(b"%s%d" % (key.encode(), counts[key]), key=key))
        counts[key] += 1
    await mq.send_many("orders", messages)


async def left(mq: Connection) -> int:
    return (await mq.lag("orders", "billing")).total.messages


class Seen:
    """What handlers began, by key; no key twice at once."""

    def __init__(self) -> None:
        self.began: dict[str, list[int]] = defaultdict(list)
        self.at_work: set[str] = set()
        self.most = 0

    def begin(self, value: bytes) -> str:
        key, number = value[:1].decode(), int(value[1:])
        assert key not in self.at_work, f"{key} is at work already"
        self.at_work.add(key)
        self.began[key].append(number)
        self.most = max(self.most, len(self.at_work))
        return key


async def settled(mq: Connection, app: App, seconds: float = 30) -> None:
    """Run the app until nothing is left."""
    async with asyncio.timeout(seconds), app:
        while True:
            if not await left(mq):
                return
            await asyncio.sleep(0.01)


@everywhere
async def test_keys_run_side_by_side_up_to_the_concurrency(mq: Connection, app: App) -> None:
    seen = Seen()

    @app.subscribe("orders", group="billing", mode="ordered", concurrency=4)
    async def bill(body: bytes) -> None:
        key = seen.begin(body)
        await asyncio.sleep(random.choice([0, 0.001, 0.003]))
        seen.at_work.discard(key)

    await send(mq, "abcdefgh", 30)
    await settled(mq, app)
    assert seen.most == 4
    assert all(numbers == list(range(30)) for numbers in seen.began.values()) and len(seen.began) == 8


async def test_one_hot_key_among_others(mq: Connection, app: App) -> None:
    """Others are not kept waiting by it, nor is it handled twice at once."""
    seen, order = Seen(), []

    @app.subscribe("orders", group="billing", mode="ordered", concurrency=8)
    async def bill(body: bytes) -> None:
        key = seen.begin(body)
        order.append(key)
        await asyncio.sleep(0.002)
        seen.at_work.discard(key)

    await send(mq, "a" * 100 + "bcd")
    await settled(mq, app)
    assert seen.began["a"] == list(range(100))
    assert max(order.index(key) for key in "bcd") < 20


async def test_plain_functions_too(mq: Connection, app: App) -> None:
    seen = Seen()

    @app.subscribe("orders", group="billing", mode="ordered", concurrency=3)
    def bill(body: bytes) -> None:
        seen.at_work.discard(seen.begin(body))

    await send(mq, "abcd", 20)
    await settled(mq, app)
    assert all(numbers == list(range(20)) for numbers in seen.began.values())


@everywhere
async def test_a_failing_message_holds_its_key_until_it_succeeds(
    app: App, mq: Connection, clock: ManualClock
) -> None:
    got: list[tuple[str, int]] = []

    @app.subscribe("orders", group="billing", mode="ordered", retry=Backoff(10, 1, "10m"))
    async def bill(body: bytes, message: Any) -> None:
        got.append((body.decode(), message.attempt))
        if body == b"a0" and message.attempt < 3:
            raise ValueError("not yet")

    await send(mq, "aab")
    await run_until_idle(app)
    assert sorted(got) == [("a0", 1), ("b0", 1)]
    clock.advance(10)
    await run_until_idle(app)
    assert got[2:] == [("a0", 2)]
    clock.advance(10)
    await run_until_idle(app)
    assert got[3:] == [("a0", 3), ("a1", 1)]
    assert await left(mq) == 0


@pytest.mark.parametrize("exhausted", ["dead", "stop"])
async def test_after_the_last_attempt(app: App, mq: Connection, clock: ManualClock, exhausted: Any) -> None:
    got: list[str] = []

    @app.subscribe(
        "orders", group="billing", mode="ordered", max_attempts=2, exhausted=exhausted, retry=Backoff(1, 1, 1)
    )
    async def bill(body: bytes, message: Any) -> None:
        got.append(body.decode())
        if body == b"a0" and message.attempt <= 2:
            raise ValueError("boom")

    await send(mq, "aa")
    await run_until_idle(app)
    clock.advance(1)
    await run_until_idle(app)
    if exhausted == "dead":
        assert got == ["a0", "a0", "a1"]
        assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [b"a0"]
    else:
        assert got == ["a0", "a0"] and (await mq.lag("orders", "billing")).total.stopped == 1
        assert await mq.redrive("orders", "billing") == 1
        await run_until_idle(app)
        assert got == ["a0", "a0", "a0", "a1"]
    assert await left(mq) == 0


async def test_retry_later_and_dead(app: App, mq: Connection, clock: ManualClock) -> None:
    got: list[tuple[str, int]] = []

    @app.subscribe("orders", group="billing", mode="ordered")
    async def bill(body: bytes, message: Any) -> None:
        got.append((body.decode(), message.attempt))
        if body == b"a0":
            raise Dead("hopeless")
        if body == b"a1" and message.attempt == 1:
            raise RetryLater(delay=5)

    await send(mq, "aaa")
    await run_until_idle(app)
    clock.advance(5)
    await run_until_idle(app)
    assert got == [("a0", 1), ("a1", 1), ("a1", 2), ("a2", 1)]


async def test_order_partition(app: App, mq: Connection) -> None:
    at_work: set[int] = set()
    got: dict[int, list[int]] = defaultdict(list)

    @app.subscribe("orders", group="billing", mode="ordered", order="partition", concurrency=8)
    async def bill(message: Received) -> None:
        assert message.partition not in at_work
        at_work.add(message.partition)
        got[message.partition].append(message.offset)
        await asyncio.sleep(0)
        at_work.discard(message.partition)

    await send(mq, "abcdefgh", 5)
    await settled(mq, app)
    assert sum(map(len, got.values())) == 40
    assert all(offsets == sorted(offsets) for offsets in got.values())


async def test_manual_waits_for_the_handlers_own_verdict(app: App, mq: Connection) -> None:
    begun: list[Received] = []
    enough = asyncio.Event()

    @app.subscribe("orders", group="billing", mode="ordered", ack="manual")
    async def bill(message: Received) -> None:
        begun.append(message)
        enough.set()

    await send(mq, "aa")
    async with app:
        await enough.wait()
        await asyncio.sleep(0.05)
        assert [m.value for m in begun] == [b"a0"]  # it is not settled yet
        enough.clear()
        await begun[0].ack()
        await enough.wait()
        assert [m.value for m in begun] == [b"a0", b"a1"]


async def test_on_delivery_keeps_keys_apart(app: App, mq: Connection) -> None:
    seen = Seen()

    @app.subscribe("orders", group="billing", mode="ordered", ack="on_delivery", concurrency=4)
    async def bill(body: bytes) -> None:
        key = seen.begin(body)
        await asyncio.sleep(0.001)
        seen.at_work.discard(key)
        if body == b"a3":
            raise ValueError("only told")

    await send(mq, "aabc", 10)
    async with asyncio.timeout(20), app:
        while True:
            if sum(map(len, seen.began.values())) == 40:
                break
            await asyncio.sleep(0.01)
    assert seen.began["a"] == list(range(20)) and seen.most > 1


# ---- lists ----


async def test_lists_have_the_messages_of_a_key_in_order(app: App, mq: Connection) -> None:
    at_work: set[bytes] = set()
    got: dict[str, list[int]] = defaultdict(list)
    sizes: list[int] = []

    @app.subscribe("orders", group="billing", mode="ordered", batch=10, concurrency=3)
    async def bill(messages: list[Received]) -> None:
        keys = {m.key or b"" for m in messages}
        assert not keys & at_work, "a key is in one list at a time"
        at_work.update(keys)
        sizes.append(len(messages))
        for m in messages:
            got[m.value[:1].decode()].append(int(m.value[1:]))
        await asyncio.sleep(0.001)
        at_work.difference_update(keys)

    await send(mq, "aaab", 30)
    await settled(mq, app)
    assert got == {"a": list(range(90)), "b": list(range(30))} and max(sizes) == 10


async def test_a_list_cut_by_bytes_leaves_the_rest_in_order(app: App, mq: Connection) -> None:
    got: list[bytes] = []

    @app.subscribe(
        "orders", group="billing", mode="ordered", batch=postroom.Batch(100, bytes=250), concurrency=4
    )
    async def bill(messages: list[Received]) -> None:
        assert sum(len(m.value) for m in messages) <= 250
        got.extend(m.value for m in messages)
        await asyncio.sleep(0)

    await mq.send_many("orders", [Message(b"%03d" % n + b"x" * 97, key="a") for n in range(20)])
    await settled(mq, app)
    assert [int(value[:3]) for value in got] == list(range(20))


async def test_a_list_that_fails_comes_again_in_order(app: App, mq: Connection, clock: ManualClock) -> None:
    lists: list[list[tuple[str, int]]] = []

    @app.subscribe("orders", group="billing", mode="ordered", batch=10, retry=Backoff(5, 1, 5))
    async def bill(messages: list[Received]) -> None:
        lists.append([(m.value.decode(), m.attempt) for m in messages])
        if messages[0].attempt == 1:
            await messages[0].ack()
            raise ValueError("boom")

    await send(mq, "aaa")
    await run_until_idle(app)
    clock.advance(5)
    await run_until_idle(app)
    assert lists == [[("a0", 1), ("a1", 1), ("a2", 1)], [("a1", 2), ("a2", 2)]]
    assert await left(mq) == 0


# ---- stopping ----


async def test_stopping_lets_the_next_go_on_where_it_stopped(mq: Connection, opened: Open) -> None:
    """The clock stands still: nothing waits for a lease."""
    begun, release = asyncio.Event(), asyncio.Event()
    got: list[str] = []

    def make(connection: Connection) -> App:
        app = App(connection)

        @app.subscribe("orders", group="billing", mode="ordered", concurrency=1)
        async def bill(body: bytes) -> None:
            got.append(body.decode())
            begun.set()
            await release.wait()

        return app

    await send(mq, "aaaa")
    async with make(mq) as first:
        await begun.wait()
        stopping = asyncio.create_task(first.stop())
        await asyncio.sleep(0.02)
        release.set()
        await stopping
    assert got == ["a0"]
    async with opened() as other:
        await settled(mq, make(other))
    assert got == ["a0", "a1", "a2", "a3"]
