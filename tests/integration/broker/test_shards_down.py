"""One database of a queue goes away and comes back: only its own partitions wait for it (R6, I11, I12)."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

import postroom
from postroom import Connection, Received, StoreUnavailable
from tests.ready import opened
from tests.servers import MariaServer, PostgresServer, Proxy
from tests.servers.server import Server

LIMIT = 40  # seconds; for whatever must come

Values = dict[str, list[int]]


class Queue:
    """A queue on a file and on a server, either of which is the first."""

    def __init__(self, server: Server, folder: Path, *, server_first: bool) -> None:
        self.server = server
        there = server.url(server.create_database())
        opened(there, make_tables=True).close()
        here = f"sqlite:///{folder}/here.db"
        self.url, self.other = (there, here) if server_first else (here, there)
        self.down = "" if server_first else "b"  # the shard on the server

    def connect(self) -> postroom.Connecting:
        return postroom.connect(self.url, shards={"b": self.other})


@pytest.fixture(params=["mariadb", "postgres"])
def server(request: pytest.FixtureRequest) -> MariaServer | PostgresServer:
    found: MariaServer | PostgresServer = request.getfixturevalue(f"spare_{request.param}")
    return found


@pytest.fixture
def queue(server: Server, tmp_path: Path) -> Queue:
    """The second shard is on the server."""
    return Queue(server, tmp_path, server_first=False)


@asynccontextmanager
async def orders(queue: Queue) -> AsyncIterator[tuple[Connection, dict[str, int]]]:
    """A topic with partitions on both, and a slot on each shard, by its name."""
    async with queue.connect() as mq:
        await mq.create_topic("orders", partitions=4)
        yield mq, {piece.shard: piece.first_slot for piece in (await mq.route("orders")).ranges}


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT):
        while not await reached():  # noqa: ASYNC110 - a state of the store, which sets no event
            await asyncio.sleep(0.05)


async def state(mq: Connection, name: str) -> str:
    return next(shard.state for shard in await mq.shards() if shard.name == name)


async def take(mq: Connection, count: int, group: str = "billing") -> list[Received]:
    found: list[Received] = []
    async with asyncio.timeout(LIMIT), mq.consumer("orders", group) as consumer:
        while len(found) < count:
            messages = await consumer.poll(wait=5)
            await consumer.ack(messages)
            found += messages
    return found


# --- the second shard ------------------------------------------------------------------------------------


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_the_rest_goes_on_and_what_waited_is_delivered(queue: Queue, server: Server) -> None:
    async with orders(queue) as (mq, slots):
        await mq.send("orders", b"before", slot=slots["b"])
        await mq.create_group("orders", "billing")
        server.stop()
        waiting = asyncio.create_task(mq.send("orders", b"there", slot=slots["b"], timeout=LIMIT))
        for number in range(20):
            await mq.send("orders", b"%d" % number, slot=slots["first"], timeout=5)
        assert {int(m.value) for m in await take(mq, 20)} == set(range(20))
        assert not waiting.done()
        assert await state(mq, "b") == "away"
        assert (await mq.topic("orders")).messages == 20
        assert {row.partition for row in (await mq.lag("orders", "billing")).partitions} == {0, 2}
        server.start()
        assert (await waiting).partition in (1, 3)
        assert {m.value for m in await take(mq, 2)} == {b"before", b"there"}
        await until(lambda: _is(mq, "b", "open"))


async def _is(mq: Connection, name: str, wanted: str) -> bool:
    return await state(mq, name) == wanted


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
@pytest.mark.parametrize("mode", ["shared", "ordered"])
async def test_an_ack_that_waits_for_it_holds_up_no_others(
    queue: Queue, server: Server, mode: Literal["shared", "ordered"]
) -> None:
    async with orders(queue) as (mq, slots):
        await mq.create_group("orders", "billing", mode=mode, lease=120)
        for name in ("b", "first", "first"):
            await mq.send("orders", name.encode(), slot=slots[name])
        async with mq.consumer("orders", "billing") as consumer:
            found: list[Received] = []
            async with asyncio.timeout(LIMIT):
                while len(found) < 3:
                    found += await consumer.poll(wait=5)
            (there,) = [message for message in found if message.value == b"b"]
            server.stop()
            waiting = asyncio.create_task(there.ack())
            await until(lambda: _is(mq, "b", "away"))
            async with asyncio.timeout(LIMIT):  # a lease is longer
                for message in found:
                    if message is not there:
                        await message.ack()
            assert not waiting.done()
            server.start()
            async with asyncio.timeout(LIMIT):
                await waiting
        assert (await mq.lag("orders", "billing")).total.messages == 0


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_messages_without_a_key_skip_it(queue: Queue, server: Server) -> None:
    """From the first failure on, one send after the other: none waits for it, and none fails."""
    async with orders(queue) as (mq, _):
        await mq.create_group("orders", "billing")
        for _ in range(8):
            await mq.send("orders", b"warm")
        await take(mq, 8)
        server.stop()
        receipts = [await mq.send("orders", b"%d" % number, timeout=4) for number in range(40)]
        there = {r.partition for r in (await mq.route("orders")).ranges if r.shard == "b"}
        assert not there & {receipt.partition for receipt in receipts}
        assert sorted(int(m.value) for m in await take(mq, 40)) == list(range(40))
        server.start()

        async def used_again() -> bool:
            return (await mq.send("orders", b"back")).partition in there

        await until(used_again)


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_ordered_members_keep_what_they_hold_elsewhere(queue: Queue, server: Server) -> None:
    """Nothing of the healthy shard is handed over or lost, and order holds over the outage."""
    async with orders(queue) as (mq, _):
        await mq.create_group("orders", "billing", mode="ordered", lease=2)
        keys = [f"k{number}" for number in range(24)]
        expected: Values = defaultdict(list)
        handled: Values = defaultdict(list)
        done = asyncio.Event()

        async def handle() -> None:
            async with mq.consumer("orders", "billing", mode="ordered") as consumer:
                async for message in consumer:
                    seen = handled[(message.key or b"").decode()]
                    if int(message.value) not in seen:
                        seen.append(int(message.value))
                    try:
                        await message.ack()
                    except (StoreUnavailable, postroom.LeaseLost):
                        pass  # it comes again
                    if sum(map(len, handled.values())) == 72:
                        done.set()

        def send(number: int) -> list[Awaitable[object]]:
            for key in keys:
                expected[key].append(number)
            return [mq.send("orders", b"%d" % number, key=key, timeout=LIMIT) for key in keys]

        handling = asyncio.create_task(handle())
        try:
            await asyncio.gather(*send(1))
            server.stop()
            second = asyncio.gather(*send(2))
            route = await mq.route("orders")
            from postroom.model.messages.slot import slot_of

            here = [key for key in keys if route.of_slot(slot_of(key.encode())).shard == "first"]
            assert here
            await until(lambda: _told(lambda: all(2 in handled[key] for key in here)))
            await asyncio.sleep(2.5)  # longer than a lease: heartbeats renew those of the healthy shard
            server.start()
            await second
            await asyncio.gather(*send(3))
            async with asyncio.timeout(LIMIT):
                await done.wait()
        finally:
            handling.cancel()
            await asyncio.gather(handling, return_exceptions=True)
        assert handled == expected


async def _told(reached: Callable[[], bool]) -> bool:
    return reached()


async def test_settling_is_not_held_up_by_what_is_on_a_dead_shard(queue: Queue, server: Server) -> None:
    async with orders(queue) as (mq, slots):
        for slot in slots.values():
            await mq.send("orders", b"x", slot=slot)
        async with asyncio.timeout(LIMIT), mq.consumer("orders", "billing", lease=20) as consumer:
            held: list[Received] = []
            while len(held) < 2:
                held += await consumer.poll(wait=5)
            server.stop()
            here = {r.partition for r in (await mq.route("orders")).ranges if r.shard == "first"}
            mine, other = sorted(held, key=lambda m: m.partition not in here)
            began = time.monotonic()
            acking = asyncio.create_task(other.ack())
            await asyncio.sleep(0)
            await mine.ack()
            assert time.monotonic() - began < 8
            assert (await mq.lag("orders", "billing")).total.messages == 0  # as far as it answers
            server.start()
            await acking
        assert (await mq.lag("orders", "billing")).total.messages == 0
        await until(lambda: _is(mq, "b", "open"))
        assert (await mq.lag("orders", "billing")).total.messages == 0


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_delayed_messages_of_others_are_on_time(queue: Queue, server: Server) -> None:
    async with orders(queue) as (mq, slots):
        await mq.create_group("orders", "billing")
        await mq.send("orders", b"there", slot=slots["b"], delay=1)
        await mq.send("orders", b"here", slot=slots["first"], delay=1)
        server.stop()
        assert [m.value for m in await take(mq, 1)] == [b"here"]
        server.start()
        assert [m.value for m in await take(mq, 1)] == [b"there"]


async def test_it_may_be_down_when_the_queue_is_opened(queue: Queue, server: Server) -> None:
    async with orders(queue) as (mq, slots):
        await mq.send("orders", b"there", slot=slots["b"])
        await mq.create_group("orders", "billing")
    server.stop()
    async with queue.connect() as mq:
        assert await state(mq, "b") == "away"
        await mq.send("orders", b"here", slot=slots["first"])
        assert [m.value for m in await take(mq, 1)] == [b"here"]
        await mq.create_topic("more", partitions=2)  # goes where there is somebody
        assert {r.shard for r in (await mq.route("more")).ranges} == {"first"}
        with pytest.raises(StoreUnavailable, match="a drain needs it"):
            await mq.drain_shard("b")
        with pytest.raises(StoreUnavailable, match="where the group starts"):
            await mq.create_group("orders", "late", start="latest")
        await mq.create_group("orders", "all")
        server.start()
        assert [m.value for m in await take(mq, 1)] == [b"there"]
        assert {m.value for m in await take(mq, 2, "all")} == {b"here", b"there"}


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_a_move_to_or_from_it_is_turned_back(queue: Queue, server: Server) -> None:
    async with orders(queue) as (mq, slots):
        route = await mq.route("orders")
        here = next(r for r in route.ranges if r.shard == "first")
        there = next(r for r in route.ranges if r.shard == "b")
        server.stop()
        with pytest.raises(StoreUnavailable, match=r"shard 'b'|cannot be reached"):
            await mq.move("orders", here.partition, shard="b")
        with pytest.raises(StoreUnavailable, match=r"shard 'b'|cannot be reached"):
            await mq.move("orders", there.partition, shard="first")
        with pytest.raises(StoreUnavailable, match=r"shard 'b' is away, and no other .* move it once"):
            await mq.move("orders", here.partition)  # nowhere to go as yet
        await mq.send("orders", b"here", slot=slots["first"], timeout=5)
        server.start()
        await until(lambda: _is(mq, "b", "open"))
        await mq.send("orders", b"there", slot=slots["b"], timeout=LIMIT)
        assert len(await take(mq, 2)) == 2
        await mq.move("orders", (await mq.route("orders")).of_slot(slots["b"]).partition, shard="first")


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_one_that_hangs_is_found_out_and_not_waited_for_again(
    server: Server, tmp_path: Path, proxy_to: Callable[[int], Proxy]
) -> None:
    """It takes our bytes and never answers: time-outs of drivers are longer than anybody wants to wait."""
    name, proxy = server.create_database(), proxy_to(server.port)
    opened(server.url(name), make_tables=True).close()
    there = server.url(name, port=proxy.port)
    async with postroom.connect(f"sqlite:///{tmp_path}/here.db", shards={"b": there}) as mq:
        await mq.create_topic("orders", partitions=4)
        slots = {piece.shard: piece.first_slot for piece in (await mq.route("orders")).ranges}
        async with asyncio.timeout(LIMIT), mq.consumer("orders", "billing", mode="ordered") as consumer:
            for slot in slots.values():
                await mq.send("orders", b"warm", slot=slot)
            found: list[Received] = []
            while len(found) < 2:
                found += await consumer.poll(wait=5)
            await consumer.ack(found)
            proxy.deaf()
            parked = asyncio.create_task(mq.send("orders", b"there", slot=slots["b"], timeout=LIMIT))
            began = time.monotonic()
            for number in range(3):
                await mq.send("orders", b"%d" % number, slot=slots["first"])
                [message] = await consumer.poll(wait=15)
                await message.ack()
            assert time.monotonic() - began < 12  # once five seconds, and then none
            assert await state(mq, "b") == "away"
            proxy.heal()
            await parked
            assert [m.value for m in await consumer.poll(wait=15)] == [b"there"]


# --- the first shard -------------------------------------------------------------------------------------


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_without_the_first_shard_others_go_on_with_the_last_route(
    server: Server, tmp_path: Path
) -> None:
    queue = Queue(server, tmp_path, server_first=True)
    async with orders(queue) as (mq, slots):
        for slot in slots.values():
            await mq.send("orders", b"warm", slot=slot)
        await mq.create_group("orders", "billing", lease=3)
        async with asyncio.timeout(LIMIT), mq.consumer("orders", "billing") as consumer:
            found: list[bytes] = []
            while len(found) < 2:
                messages = await consumer.poll(wait=5)
                await consumer.ack(messages)
                found += [m.value for m in messages]
            server.stop()
            await asyncio.sleep(1.5)  # what is known of topics and groups is not fresh any more
            for number in range(20):
                await mq.send("orders", b"%d" % number, slot=slots["b"], timeout=20)
            got: set[int] = set()
            while len(got) < 20:
                messages = await consumer.poll(wait=5)
                await asyncio.sleep(0.1)
                await consumer.ack(messages)
                got |= {int(m.value) for m in messages}
            assert [shard.state for shard in await mq.shards()] == ["away", "open"]
            with pytest.raises(StoreUnavailable):
                await mq.create_topic("more")
            with pytest.raises(StoreUnavailable):
                await mq.split("orders", 1)
            server.start()
            await mq.send("orders", b"99", slot=slots["first"], timeout=LIMIT)
            while 99 not in got:
                messages = await consumer.poll(wait=5)
                await consumer.ack(messages)
                got |= {int(m.value) for m in messages}
        await mq.create_topic("more")
