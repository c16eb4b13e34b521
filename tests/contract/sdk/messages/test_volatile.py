"""Volatile topics (R3): not flushed, shared by all processes on the store, lost with a crash of the machine.

Otherwise they are topics like any other: groups, retries, dead letters and redrive are the same.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Message
from postroom.broker.duties import Retention
from postroom.clock import ManualClock
from postroom.store import SqlStore
from postroom.store.sql.schema import log_table
from postroom.store.sql.session import Area
from tests.contract.brokers import broker_of, run_duty
from tests.contract.stores import Open, embedded, everywhere, only_file


@pytest.fixture
async def mq(connection: Connection) -> Connection:
    await connection.create_topic("ticks", partitions=2, storage="volatile")
    return connection


async def send(mq: Connection, *values: int) -> None:
    await mq.send_many("ticks", [Message(b"%d" % value, key=str(value)) for value in values])


async def take(mq: Connection, count: int, group: str = "charts") -> list[int]:
    found: list[int] = []
    async with mq.consumer("ticks", group) as consumer:
        while len(found) < count:
            messages = await consumer.poll(wait=20)
            assert messages, f"only {found} of {count} came"
            await consumer.ack(messages)
            found += [int(m.value) for m in messages]
        assert await consumer.poll(wait=0) == []
    return sorted(found)


async def behind(mq: Connection, group: str = "charts") -> int:
    return (await mq.lag("ticks", group)).total.messages


# ---- a topic like any other --------------------------------------------------------------------------------


@everywhere
async def test_send_and_consume(mq: Connection, opened: Open) -> None:
    info = await mq.topic("ticks")
    assert info.settings.storage == "volatile"
    async with opened() as other:
        await send(mq, *range(50))
        await send(other, *range(50, 100))
        assert await take(other, 100) == list(range(100))
        assert await take(mq, 100, "audit") == list(range(100))
        assert [int(m.value) async for m in mq.read("ticks", partition=0)]
    lag = await mq.lag("ticks", "charts")
    assert (lag.total.messages, lag.total.bytes) == (0, 0)
    assert (await mq.topic("ticks")).messages == 100


async def test_a_waiting_consumer_hears_of_a_message(mq: Connection, opened: Open) -> None:
    async with mq.consumer("ticks", "charts") as consumer, opened() as other:
        polling = asyncio.ensure_future(consumer.poll(wait=30))
        await send(other, 1)
        assert [m.value for m in await polling] == [b"1"]


@everywhere
async def test_the_backlog_is_measured(mq: Connection, clock: ManualClock) -> None:
    await mq.create_group("ticks", "charts")
    await send(mq, *range(10))
    clock.advance(5)
    total = (await mq.lag("ticks", "charts")).total
    assert (total.messages, total.oldest_age_ms, total.unsettled) == (10, 5000, 0)
    assert total.bytes > 0 and total.arrival_per_s > 0


async def test_a_group_starts_where_it_says(mq: Connection) -> None:
    await send(mq, 1)
    await mq.create_group("ticks", "late", start="latest")
    await send(mq, 2)
    assert await take(mq, 1, "late") == [2]
    await mq.reset("ticks", "late", to="earliest")
    assert await take(mq, 2, "late") == [1, 2]


@everywhere
async def test_retry_dead_letters_and_redrive(mq: Connection, clock: ManualClock) -> None:
    await send(mq, 7)
    async with mq.consumer("ticks", "charts", max_attempts=2) as consumer:
        (message,) = await consumer.poll()
        await message.retry(delay=10)
        assert await consumer.poll(wait=0) == []
        clock.advance(11)
        (message,) = await consumer.poll()
        assert message.attempt == 2
        await message.retry(reason="broken")  # that was the last attempt
        (letter,) = await mq.dead_letters("ticks", "charts")
        assert (letter.value, letter.reason) == (b"7", "broken")
        assert await mq.redrive("ticks", "charts") == 1
        (again,) = await consumer.poll()
        await again.ack()
    storages = {info.name: info.settings.storage for info in await mq.topics(internal=True)}
    assert storages == {
        "ticks": "volatile", "ticks.charts.dead": "durable", "ticks.charts.retry": "durable",
    }  # fmt: skip


async def test_retention_and_purge(mq: Connection, clock: ManualClock) -> None:
    await mq.alter_topic("ticks", retention=60)
    await send(mq, 1, 2)
    clock.advance(61)
    await run_duty(mq, Retention)
    assert (await mq.topic("ticks")).messages == 0
    await send(mq, 3, 4)
    assert await mq.purge("ticks") == 2


async def test_a_volatile_topic_can_be_deleted_and_made_durable(mq: Connection) -> None:
    await send(mq, 1)
    await mq.delete_topic("ticks")
    await mq.create_topic("ticks")
    await send(mq, 2)
    assert await take(mq, 1) == [2]


async def test_the_kinds_of_storage_are_named(mq: Connection) -> None:
    with pytest.raises(postroom.InvalidSetting, match=r"'durable'.*'volatile'"):
        await mq.create_topic("other", storage="somewhere")  # type: ignore[arg-type]


# ---- what a crash takes ------------------------------------------------------------------------------------


CACHED = "a broker that goes on has the batches in its cache: only another broker misses them"


def lose_batches(mq: Connection) -> None:
    """What a crash of the server does to an unlogged table: its rows are gone, nothing else is."""
    broker = broker_of(mq)
    assert isinstance(broker.store, SqlStore)
    places = [r.partition_id for r in broker.store.catalog.topic("ticks").route.ranges]
    with broker.store.session.write(Area.VOLATILE) as tx:
        for place in places:
            tx.run(f"DELETE FROM {log_table(place)}")


@everywhere
@embedded(CACHED)
async def test_groups_go_on_behind_batches_that_were_lost(mq: Connection, opened: Open) -> None:
    await mq.create_group("ticks", "charts")
    await send(mq, *range(20))
    lose_batches(mq)
    async with opened() as other:  # the first has them in its cache
        await run_duty(other, Retention)
        assert await behind(other) == 0
        assert (await other.topic("ticks")).messages == 0
        await send(other, 100, 101)
        assert await behind(other) == 2
        assert await take(other, 2) == [100, 101]
        assert await behind(other) == 0


@embedded(CACHED)
async def test_what_was_unsettled_when_it_was_lost_holds_nobody_up(mq: Connection, opened: Open) -> None:
    await send(mq, *range(20))
    async with mq.consumer("ticks", "charts") as consumer:
        assert len(await consumer.poll(max_messages=10)) == 10
    lose_batches(mq)
    async with opened() as other:
        await run_duty(other, Retention)
        await send(other, 100)
        assert await take(other, 1) == [100]
        assert await behind(other) == 0


SENDER = """
import asyncio, sys
import postroom

async def main(url, count):
    async with postroom.connect(url) as mq:
        for number in range(int(count)):
            await mq.send("ticks", b"%d" % number, key=str(number))
            print(number, flush=True)
        if len(sys.argv) > 3:
            await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:3]))
"""


@pytest.mark.slow("works for seconds")
@only_file
@pytest.mark.parametrize("killed", [False, True])
async def test_another_process_shares_them_and_its_kill_loses_nothing(any_url: str, killed: bool) -> None:
    """What was written is the system's to keep, as long as the machine lives."""
    async with postroom.connect(any_url) as mq:
        await mq.create_topic("ticks", storage="volatile")
        await mq.create_group("ticks", "charts")
        more = ["for ever"] if killed else []
        sender = await asyncio.create_subprocess_exec(
            sys.executable, "-c", SENDER, any_url, "200", *more, stdout=asyncio.subprocess.PIPE
        )
        assert sender.stdout is not None
        confirmed = [int(await sender.stdout.readline()) for _ in range(200)]
        if killed:
            sender.send_signal(signal.SIGKILL)
        assert await sender.wait() == (-signal.SIGKILL if killed else 0)
        assert await take(mq, 200) == confirmed == list(range(200))


def remove_volatile(folder: Path) -> None:
    doomed = [file for file in folder.iterdir() if ".volatile" in file.name]
    assert doomed
    for file in doomed:
        file.unlink()


@only_file
@embedded("the broker that serves is not the one that is closed, and has the file open")
async def test_without_its_file_everything_goes_on(opened: Open, tmp_path: Path) -> None:
    async with opened() as mq:
        await mq.create_topic("ticks", partitions=2, storage="volatile", retention=None)
        await mq.create_topic("orders")
        await mq.send("orders", b"kept")
        await send(mq, *range(30))
        assert len(await take(mq, 30, "done")) == 30
        async with mq.consumer("ticks", "charts") as consumer:
            (message,) = await consumer.poll(max_messages=1)
            await message.dead("broken")
            assert len(await consumer.poll(max_messages=10)) == 10
    for again in range(2):
        remove_volatile(tmp_path)
        async with opened() as mq:
            for group in ("done", "charts", "fresh"):
                async with mq.consumer("ticks", group) as consumer:
                    assert await consumer.poll(wait=0) == []
                assert await behind(mq, group) == 0
            assert (await mq.topic("ticks")).messages == 0
            assert [m async for m in mq.read("ticks")] == []
            await send(mq, *range(5))
            for group in ("done", "charts", "fresh"):
                assert await behind(mq, group) == 5
                assert await take(mq, 5, group) == list(range(5))
                assert await behind(mq, group) == 0
            assert [m.value async for m in mq.read("orders")] == [b"kept"]
            assert len(await mq.dead_letters("ticks", "charts")) == 1, again  # that topic is durable
            await run_duty(mq, Retention)
            assert len([m async for m in mq.read("ticks")]) == 5
