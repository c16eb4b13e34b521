"""What the other tests here found, each as a test of its own: fast, and certain to fail if it comes back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

import pytest

import postroom
from postroom import Connection, Message
from postroom.broker.broker import Broker
from postroom.broker.topology.route_changes import FinishChanges
from postroom.clock import ManualClock
from postroom.model.policy.settings import TopicSettings
from postroom.model.topology import route as routes
from postroom.model.topology.names import dead_topic
from postroom.store import SqlStore
from postroom.store.contract import Settled, Visited
from postroom.store.sql.session import Area
from tests.ready import ready
from tests.servers import PostgresServer


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[Connection]:
    async with postroom.connect(f"sqlite:///{tmp_path / 'queue.db'}") as connection:
        await connection.create_topic("orders", partitions=1)
        yield connection


def broker_of(mq: Connection) -> Broker:
    assert isinstance(mq._endpoint, Broker)
    return mq._endpoint


async def test_a_dead_letter_topic_without_its_group_is_finished(mq: Connection) -> None:
    """Whoever made it was killed between the topic and the group that reads it (R20)."""
    await mq.create_group("orders", "billing")
    half = dead_topic("orders", "billing")
    broker_of(mq).store.catalog.create_topic(half, TopicSettings(retention_ms=0), 1)
    assert await mq.dead_letters("orders", "billing") == []
    await mq.send("orders", b"hopeless")
    async with mq.consumer("orders", group="billing") as consumer:
        (message,) = await consumer.poll()
        await message.dead("broken")
    assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [b"hopeless"]
    assert await mq.redrive("orders", "billing") == 1


async def test_what_stands_behind_a_dead_letter_of_its_key_is_not_taken_back(mq: Connection) -> None:
    """It was handled, and would be handled twice; a retry holds the key, a dead letter does not (R23)."""
    await mq.send_many("orders", [Message(b"%d" % number, key="k") for number in range(3)])
    async with mq.consumer("orders", group="ledger", mode="ordered") as consumer:
        first, hopeless, last = await consumer.poll()
        await hopeless.dead("broken")
        await consumer.ack([first, last])
        assert await consumer.poll(wait=0) == []
    assert (await mq.lag("orders", "ledger")).total.messages == 0


async def test_what_others_settled_after_an_outage_is_not_handed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its lease passed, and somebody else handled what it had, before it could ask for more time (I16)."""
    clock = ManualClock()
    url = f"sqlite:///{tmp_path / 'queue.db'}"
    async with postroom.connect(url, clock=clock) as mq:
        await mq.create_topic("orders", partitions=1)
        await mq.send_many("orders", [Message(b"%d" % number) for number in range(4)])
        async with mq.consumer("orders", group="billing", lease=5) as cut_off:
            (first,) = await cut_off.poll(max_messages=1)
            with monkeypatch.context() as away:
                away.setattr(broker_of(mq), "beat", _unavailable)
                clock.advance(6)
                async with postroom.connect(url, clock=clock) as other:
                    await _take(other, "orders", "billing", 4)
            assert await cut_off.poll(wait=0) == []
            with pytest.raises(postroom.LeaseLost):
                await first.extend()


def _unavailable(beats: object) -> NoReturn:
    raise postroom.StoreUnavailable("cut off")


async def _take(mq: Connection, topic: str, group: str, count: int) -> None:
    async with mq.consumer(topic, group=group) as consumer:
        while count:
            messages = await consumer.poll()
            await consumer.ack(messages)
            count -= len(messages)


async def test_acks_that_a_crash_forgot_come_again_to_a_living_holder(
    mq: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an ordered group no lease of theirs runs out: they would wait until their holder leaves (I5, I8)."""
    store = broker_of(mq).store
    assert isinstance(store, SqlStore)
    await mq.send_many("orders", [Message(b"%d" % number, key="k") for number in range(3)])
    async with mq.consumer("orders", group="ledger", mode="ordered") as consumer:
        messages = await consumer.poll()
        with monkeypatch.context() as unflushed:
            unflushed.setattr(store.progress, "visit", lambda *visiting: [Visited((Settled(),))])
            await consumer.ack(messages)
        monkeypatch.setattr(store.session.dialect, "started_ms", lambda connection: 60_000)
        assert [m.value for m in await consumer.poll(wait=20)] == [b"0", b"1", b"2"]


async def test_a_producer_goes_on_when_the_store_forgot_its_batches(mq: Connection) -> None:
    """As a crash does to volatile topics: the gap before the next batch never closes (I3)."""
    store = broker_of(mq).store
    assert isinstance(store, SqlStore)
    await mq.send("orders", b"first")
    with store.session.read(Area.LOG) as tx:
        (remembered,) = tx.all("SELECT state FROM postroom_sequences")
    await mq.send("orders", b"second")
    with store.session.write(Area.LOG) as tx:
        tx.run("UPDATE postroom_sequences SET state = ?", *remembered)
    assert (await mq.send("orders", b"third", timeout=5)).offset == 2
    assert [m.value async for m in mq.read("orders")] == [b"first", b"second", b"third"]


@pytest.mark.slow("makes trouble for seconds, in many processes")
async def test_no_offset_of_a_volatile_topic_is_given_twice(own_postgres: PostgresServer) -> None:
    """A crash forgot the last ones, caches did not: what was sent later was taken for older messages."""
    with ready(own_postgres) as ground:
        with closing(own_postgres.connect("postgres", admin=True)) as admin:
            admin.autocommit = True
            admin.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")  # so that the last ones are forgotten
            admin.execute("SELECT pg_reload_conf()")
        async with postroom.connect(ground.url) as mq:
            await mq.create_topic("ticks", storage="volatile", partitions=1)
            async with mq.consumer("ticks", group="charts", lease=2) as consumer:
                before = [await mq.send("ticks", b"old") for _ in range(5)]
                await consumer.ack(await consumer.poll())
                own_postgres.kill()
                own_postgres.start()
                after = [await mq.send("ticks", b"%d" % number, timeout=20) for number in range(5)]
                assert after[0].offset > before[-1].offset
                found: list[bytes] = []
                while len(found) < 5:
                    messages = await consumer.poll(wait=20)
                    assert messages, f"only {found} came"
                    with suppress(postroom.LeaseLost):  # the server was away for longer than a lease
                        await consumer.ack(messages)
                        found += [m.value for m in messages if m.value != b"old"]
                assert sorted(found) == [b"0", b"1", b"2", b"3", b"4"]


async def test_a_partition_that_was_lost_during_a_poll_begins_anew(mq: Connection) -> None:
    """The answer goes on from where the poll stood: alone it would overtake what was not handled (I5, I6)."""
    await mq.send_many("orders", [Message(b"%d" % number, key="k") for number in range(2)])
    async with mq.consumer("orders", group="ledger", mode="ordered") as consumer:
        (message, _) = await consumer.poll()
        await asyncio.sleep(0.2)  # the next poll is under way, and says what it has
        consumer._in_flight.lose(message._delivery.key, [(0, 1)])
        await mq.send_many("orders", [Message(b"%d" % number, key="k") for number in range(2, 4)])
        found: list[bytes] = []
        while len(found) < 4:
            messages = await consumer.poll(wait=20)
            await consumer.ack(messages)
            found += [m.value for m in messages]
        assert found == [b"0", b"1", b"2", b"3"]


async def test_whoever_wants_a_change_finishes_the_one_that_was_left(
    mq: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it was killed before the seal: no producer notices, and the duty comes seconds later."""
    monkeypatch.setattr(FinishChanges, "run_once", lambda self: None)
    broker_of(mq).store.routes.begin(routes.split(await mq._endpoint.route("orders"), 0))
    async with asyncio.timeout(20):
        with suppress(postroom.UnknownPartition):  # it is sealed by then: the split that was left is made
            while True:
                with suppress(postroom.RouteConflict):
                    await mq.split("orders", 0)
                await asyncio.sleep(0.05)
    assert [piece.partition for piece in (await mq.route("orders")).ranges] == [1, 2]
