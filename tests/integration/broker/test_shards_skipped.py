"""Messages without a key skip a shard that is away, from the first failure until it answers again (R6, R22).

And those that cannot go elsewhere are told what was wrong. Embedded and served; the second shard is behind a
proxy that refuses, or takes our bytes and never answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Message, SendTimeout, StoreUnavailable
from postroom.model.messages.slot import slot_of
from tests.contract.brokers import serving
from tests.contract.cli_runner import Cli
from tests.ready import opened
from tests.servers import MariaServer, Proxy

LIMIT = 40  # seconds; for whatever must come


class Away:
    """A queue on a file, and on a database `b` that can go away."""

    def __init__(self, folder: Path, there: str, proxy: Proxy) -> None:
        self.url, self.there, self.proxy = f"sqlite:///{folder}/here.db", there, proxy

    def connect(self) -> postroom.Connecting:
        return postroom.connect(self.url, shards={"b": self.there})

    def stop(self) -> None:
        """As a server that is stopped: connections end, and new ones are refused."""
        self.proxy.refuse()
        self.proxy.cut()


@pytest.fixture
def away(spare_mariadb: MariaServer, tmp_path: Path, proxy_to: Callable[[int], Proxy]) -> Away:
    name, proxy = spare_mariadb.create_database(), proxy_to(spare_mariadb.port)
    opened(spare_mariadb.url(name), make_tables=True).close()
    return Away(tmp_path, spare_mariadb.url(name, port=proxy.port), proxy)


@asynccontextmanager
async def warm(mq: Connection) -> AsyncIterator[tuple[set[int], int]]:
    """A topic with two partitions on each shard, used before: the partitions on `b`, and a slot of one."""
    await mq.create_topic("t", partitions=4)
    await mq.create_group("t", "seen")
    await mq.send_many("t", [Message(b"warm", key=f"k{number}") for number in range(40)])
    for _ in range(4):
        await mq.send("t", b"warm")
    ranges = [piece for piece in (await mq.route("t")).ranges if piece.shard == "b"]
    yield {piece.partition for piece in ranges}, ranges[0].first_slot


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT):
        while not await reached():  # noqa: ASYNC110 - a state of the store, which sets no event
            await asyncio.sleep(0.05)


@pytest.fixture(params=["embedded", "served"])
async def mq(request: pytest.FixtureRequest, away: Away) -> AsyncIterator[Connection]:
    async with away.connect() as host:
        if request.param == "embedded":
            yield host
        else:
            async with serving(host) as url, postroom.connect(url) as client:
                yield client


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_one_send_after_the_other(mq: Connection, away: Away) -> None:
    async with warm(mq) as (there, _):
        away.stop()
        began = time.monotonic()
        receipts = [await mq.send("t", b"x", timeout=4) for _ in range(40)]
        assert time.monotonic() - began < 10  # each second one took its whole four seconds
        assert not there & {receipt.partition for receipt in receipts}
        away.proxy.heal()
        await until(lambda: _goes_there(mq, there))


async def _goes_there(mq: Connection, there: set[int]) -> bool:
    return (await mq.send("t", b"back", timeout=4)).partition in there


async def test_many_at_once(mq: Connection, away: Away) -> None:
    async with warm(mq) as (there, _):
        away.stop()
        receipts = await asyncio.gather(*(mq.send("t", b"x", timeout=8) for _ in range(200)))
        assert not there & {receipt.partition for receipt in receipts}
        async with mq.producer("t", batch_messages=10) as producer:
            posted = [await producer.post(b"x", timeout=8) for _ in range(200)]
            assert not there & {(await one).partition for one in posted}


async def test_a_list_with_and_without_keys(mq: Connection, away: Away) -> None:
    """Those with a key wait for their partition; what has none goes elsewhere, and is stored once."""
    async with warm(mq) as (there, _):
        away.stop()
        mixed = [Message(b"%d" % n, key=f"k{n}" if n % 2 else None) for n in range(40)]
        sending = asyncio.create_task(mq.send_many("t", mixed, timeout=LIMIT))
        free = [await mq.send_many("t", [Message(b"free")] * 3, timeout=8) for _ in range(10)]
        assert not there & {receipt.partition for one in free for receipt in one}
        await come(mq, {message.value for message in mixed[::2]})
        assert not sending.done()
        away.proxy.heal()
        receipts = await sending
        assert {r.partition for r in receipts[1::2]} & there
        values = [m.value async for m in mq.read("t", end="latest")]
        assert all(values.count(message.value) == 1 for message in mixed)


async def come(mq: Connection, values: set[bytes]) -> None:
    """Until a group has got all of these, while the shard is away."""
    found: set[bytes] = set()
    async with asyncio.timeout(LIMIT), mq.consumer("t", "seen") as consumer:
        while not values <= found:
            messages = await consumer.poll(wait=1)
            found |= {message.value for message in messages}
            await consumer.ack(messages)


async def test_one_way_and_delayed(mq: Connection, away: Away) -> None:
    async with warm(mq) as (there, _):
        away.stop()
        async with mq.producer("t", confirm=False, batch_messages=1) as producer:
            for number in range(8):
                await producer.post(b"one-way %d" % number)
            await producer.flush()
            assert producer.failed == 0
        receipts = [await mq.send("t", b"later", delay=600, timeout=4) for _ in range(8)]
        assert not there & {receipt.partition for receipt in receipts}


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_one_that_hangs_costs_the_first_who_meets_it(mq: Connection, away: Away) -> None:
    """It takes a while until that is known; then it is passed over, and nobody pays again."""
    async with warm(mq) as (there, _):
        away.proxy.deaf()
        failed: list[str] = []
        receipts, began = [], time.monotonic()
        for _ in range(20):
            try:
                receipts.append(await mq.send("t", b"x", timeout=2))
            except SendTimeout as error:
                failed.append(str(error))
        [first] = failed
        assert "not known" in first
        assert "no answer from shard 'b'" in first
        assert time.monotonic() - began < 15
        assert not there & {receipt.partition for receipt in receipts}
        away.proxy.heal()
        await until(lambda: _goes_there(mq, there))


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_with_time_enough_one_that_hangs_costs_nobody_anything(mq: Connection, away: Away) -> None:
    """What surely was not stored there goes elsewhere, once that is known."""
    async with warm(mq) as (there, _):
        away.proxy.deaf()
        async with mq.producer("t", batch_messages=2) as producer:
            posted = [await producer.post(b"x", timeout=LIMIT) for _ in range(20)]
            assert not there & {(await one).partition for one in posted}
        away.proxy.heal()


async def test_a_spool_skips_it_too(mq: Connection, away: Away, tmp_path: Path) -> None:
    async with warm(mq):
        async with mq.producer("t", spool=str(tmp_path / "t.spool")) as producer:
            away.stop()
            for number in range(12):
                await producer.send(b"spooled %d" % number)
            assert await producer.forwarded(timeout=LIMIT)
        await come(mq, {b"spooled %d" % number for number in range(12)})


# --- what those are told that cannot go elsewhere ---------------------------------------------------------


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_a_refused_connection_is_named(mq: Connection, away: Away) -> None:
    async with warm(mq) as (_, slot):
        away.stop()
        with pytest.raises(SendTimeout) as caught:
            await mq.send("t", b"x", slot=slot, timeout=1)
        assert (
            "nothing was stored, sending again is safe; last error: connection refused by shard 'b'"
            in str(caught.value)
        )
        assert isinstance(caught.value.__cause__, StoreUnavailable)
        assert caught.value.details["stored"] is False and caught.value.details["shard"] == "b"


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_silence_is_named(mq: Connection, away: Away) -> None:
    async with warm(mq) as (_, slot):
        away.proxy.deaf()
        with pytest.raises(SendTimeout) as caught:
            await mq.send("t", b"x", slot=slot, timeout=1)
        assert "not known whether anything was stored" in str(caught.value)
        assert str(caught.value).endswith("last error: no answer from shard 'b'")
        assert isinstance(caught.value.__cause__, StoreUnavailable)
        away.proxy.heal()


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_a_read_only_server_is_named(mq: Connection, away: Away, spare_mariadb: MariaServer) -> None:
    async with warm(mq) as (_, slot):
        with spare_mariadb.connect("", admin=True) as admin, admin.cursor() as cursor:
            cursor.execute("SET GLOBAL read_only = 1")
            try:
                with pytest.raises(SendTimeout) as caught:
                    await mq.send("t", b"x", slot=slot, timeout=1)
            finally:
                cursor.execute("SET GLOBAL read_only = 0")
        assert "nothing was stored" in str(caught.value)
        assert str(caught.value).endswith("last error: shard 'b' takes no writes: it is read-only")


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_the_command_line_says_it_too(away: Away, tmp_path: Path) -> None:
    async with away.connect() as mq, warm(mq):
        route = await mq.route("t")
    key = next(key for key in map(str, range(1000)) if route.of_slot(slot_of(key.encode())).shard == "b")
    away.stop()
    words = ("send", "t", "x", "--key", key, "--timeout", "1s", "--shard", f"b={away.there}")
    answer = await asyncio.to_thread(Cli(tmp_path, away.url), *words)
    assert answer.code != 0
    assert "nothing was stored" in answer.err and "connection refused by shard 'b'" in answer.err
