"""The relay sends what was committed: once, in order per key, whatever else goes on (R30, I12, I21)."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import postroom
from postroom.client.databases import opening
from postroom.client.forward.outbox_source import OutboxSource
from postroom.errors import SchemaMismatch, UsageError
from tests.integration.outbox.outbox_world import KINDS, Database, database_of, eventually, received

NEVER = 3600  # how often a relay looks that is to be woken


@pytest.fixture(params=KINDS)
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    return _with_tables(database_of(request.param, request, tmp_path))


@pytest.fixture
def shop(tmp_path: Path) -> Database:
    return _with_tables(Database("sqlite", f"sqlite:///{tmp_path}/shop.db"))


@pytest.fixture
async def mq(tmp_path: Path) -> AsyncIterator[postroom.Connection]:
    """A queue in a database of its own."""
    async with postroom.connect(f"sqlite:///{tmp_path}/queue.db") as connection:
        await connection.create_topic("orders", partitions=2)
        yield connection


def _with_tables(database: Database) -> Database:
    connection = database.connect()
    postroom.Outbox().create_table(connection)
    connection.close()
    return database


def _write(outbox: postroom.Outbox, database: Database, numbers: range, topic: str = "orders") -> None:
    connection = database.connect()
    with outbox.transaction(connection):
        for number in numbers:
            outbox.send(connection, topic, b"%d" % number, key=f"k{number % 3}")
    connection.close()


def _in_order(messages: list[postroom.Received], count: int) -> None:
    """Each once, and those of a key in their order."""
    numbers = [int(message.value) for message in messages]
    assert sorted(numbers) == list(range(count))
    for key in {message.key for message in messages}:
        mine = [int(message.value) for message in messages if message.key == key]
        assert mine == sorted(mine)


# ---- what arrives ----


async def test_what_is_committed_arrives_once_and_in_order(
    database: Database, mq: postroom.Connection
) -> None:
    outbox = postroom.Outbox()
    _write(outbox, database, range(40))  # before there is a relay
    async with outbox.relay(mq, database.url) as relay:
        _write(outbox, database, range(40, 60))
        connection = database.connect()
        with suppress(ZeroDivisionError), outbox.transaction(connection):
            outbox.send(connection, "orders", b"-1")
            raise ZeroDivisionError
        connection.close()
        _in_order(await received(mq, "orders", 60), 60)
        await eventually(lambda: relay.forwarded == 60)
    assert database.values() == []
    assert not await _more(mq)


async def test_what_is_on_its_way_when_the_relay_stops_is_finished(
    shop: Database, mq: postroom.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, append = postroom.Outbox(), mq._endpoint.append
    begun, go = asyncio.Event(), asyncio.Event()

    async def slow(*args: Any, **options: Any) -> Any:
        begun.set()
        await go.wait()
        return await append(*args, **options)

    monkeypatch.setattr(mq._endpoint, "append", slow)
    relay = outbox.relay(mq, shop.url)
    await relay.start()
    _write(outbox, shop, range(1))
    await asyncio.wait_for(begun.wait(), 60)
    stopping = asyncio.create_task(relay.stop())
    await asyncio.sleep(0)  # it has begun
    go.set()
    await stopping
    assert relay.forwarded == 1 and shop.values() == []


async def test_a_message_is_as_if_it_had_been_sent(shop: Database, mq: postroom.Connection) -> None:
    arguments: dict[str, Any] = {
        "key": b"\xff42", "headers": {"source": "web", "x": b"\x00"}, "id": "o-42", "source": "shop",
        "expires": datetime(2099, 1, 1, tzinfo=UTC), "slot": 7,
    }  # fmt: skip
    outbox, connection = postroom.Outbox(), shop.connect()
    async with outbox.relay(mq, shop.url):
        with outbox.transaction(connection):
            outbox.send(connection, "orders", b"\x00\xff", **arguments)
        await mq.send("orders", b"\x00\xff", **arguments)
        one, other = await received(mq, "orders", 2)
    for name in ("value", "key", "headers", "id", "source", "expires", "partition"):
        assert getattr(one, name) == getattr(other, name)
    connection.close()


async def test_delayed_messages_wait_in_the_queue(shop: Database, mq: postroom.Connection) -> None:
    outbox, connection = postroom.Outbox(), shop.connect()
    async with outbox.relay(mq, shop.url):
        with outbox.transaction(connection):
            outbox.send(connection, "orders", b"soon", delay=0.05, slot=3)
            outbox.send(connection, "orders", b"far", delay="10d", id="far")
        assert [message.value for message in await received(mq, "orders", 1)] == [b"soon"]
        await eventually(lambda: not shop.values())
        assert await mq.cancel("orders", "far")
    connection.close()


@pytest.mark.parametrize("database", ["postgres", "mysql"], indirect=True)  # SQLite has one writer at a time
async def test_a_transaction_that_commits_late_is_not_passed_over(
    database: Database, mq: postroom.Connection
) -> None:
    """The offset pitfall: its ids are lower than those of one that was sent already (I21)."""
    outbox, early, late = postroom.Outbox(), database.connect(), database.connect()
    async with outbox.relay(mq, database.url, poll=0.05):
        outbox.send(early, "orders", b"first written")
        outbox.send(late, "orders", b"first committed")
        late.commit()
        await eventually(lambda: not database.values())
        early.commit()
        values = [message.value for message in await received(mq, "orders", 2)]
    assert sorted(values) == [b"first committed", b"first written"]
    early.close()
    late.close()


@pytest.mark.parametrize("database", ["postgres", "mysql"], indirect=True)
async def test_transactions_that_wait_for_each_other_keep_the_order_of_their_key(
    database: Database, mq: postroom.Connection
) -> None:
    """Each locks the row that the key stands for before it sends, as the page says."""
    outbox, threads, each = postroom.Outbox(), 3, 10
    setup = database.connect(autocommit=True)
    setup.cursor().execute("CREATE TABLE accounts (id INTEGER PRIMARY KEY, changes INTEGER)")
    setup.cursor().execute("INSERT INTO accounts VALUES (1, 0)")
    setup.close()

    def work() -> None:
        connection = database.connect()
        cursor = connection.cursor()
        for _ in range(each):
            with outbox.transaction(connection):
                cursor.execute("SELECT changes FROM accounts WHERE id = 1 FOR UPDATE")
                (changes,) = cursor.fetchone()
                cursor.execute("UPDATE accounts SET changes = changes + 1 WHERE id = 1")
                outbox.send(connection, "orders", b"%d" % changes, key="1")
        connection.close()

    async with outbox.relay(mq, database.url, poll=0.01):
        await asyncio.gather(*(asyncio.to_thread(work) for _ in range(threads)))
        found = await received(mq, "orders", threads * each)
    assert [int(message.value) for message in found] == list(range(threads * each))


# ---- when ----


async def test_a_commit_wakes_the_relay(shop: Database, mq: postroom.Connection) -> None:
    outbox, engine = postroom.Outbox(), shop.engine()
    async with outbox.relay(mq, engine, poll=NEVER) as relay:
        await eventually(lambda: relay.leading)
        await _idle(relay)
        with Session(engine) as session, session.begin():
            outbox.send(session, "orders", b"by a session")
        assert await received(mq, "orders", 1)
        await _idle(relay)
        _write(outbox, shop, range(1))
        assert await received(mq, "orders", 1)
    engine.dispose()


async def test_what_another_process_commits_is_seen(shop: Database, mq: postroom.Connection) -> None:
    async with postroom.Outbox().relay(mq, shop.url) as relay:
        await eventually(lambda: relay.leading)
        _write(postroom.Outbox(), shop, range(3))  # wakes nobody
        assert len(await received(mq, "orders", 3)) == 3


async def test_an_async_engine_is_reached_by_its_plain_driver(
    shop: Database, mq: postroom.Connection
) -> None:
    engine = create_async_engine(shop.url.replace("sqlite", "sqlite+aiosqlite", 1))
    outbox = postroom.Outbox()
    async with outbox.relay(mq, engine):
        async with engine.begin() as connection:
            await outbox.send(connection, "orders", b"one")
        assert await received(mq, "orders", 1)
    await engine.dispose()


# ---- trouble ----


async def test_a_topic_that_is_missing_is_shown_and_holds_up_no_other(
    database: Database, mq: postroom.Connection
) -> None:
    outbox, connection = postroom.Outbox(), database.connect(autocommit=True)
    async with outbox.relay(mq, database.url):
        _write(outbox, database, range(2), "later")
        _write(outbox, database, range(5))
        await received(mq, "orders", 5)
        await eventually(lambda: bool(outbox.status(connection).stuck))
        await eventually(lambda: outbox.status(connection).messages == 2)  # those that were received are gone
        status = outbox.status(connection)
        assert (status.messages, status.relay, [one.topic for one in status.stuck]) == (2, True, ["later"])
        assert "unknown_topic" in status.stuck[0].reason
        await mq.create_topic("later")
        _in_order(await received(mq, "later", 2), 2)
        await eventually(lambda: outbox.status(connection).waiting == ())
        await eventually(lambda: outbox.status(connection).messages == 0)
    assert not outbox.status(connection).relay, "the lease was given back"
    connection.close()


async def test_a_relay_says_at_once_what_is_wrong(shop: Database, mq: postroom.Connection) -> None:
    with pytest.raises(SchemaMismatch, match=r"no outbox elsewhere .*create_table"):
        await postroom.Outbox("elsewhere").relay(mq, shop.url).start()
    connection = shop.connect()
    connection.execute("UPDATE postroom_outbox_relay SET version = 0")
    connection.commit()
    with pytest.raises(SchemaMismatch, match="version 0"):
        await postroom.Outbox().relay(mq, shop.url).start()
    connection.execute("UPDATE postroom_outbox_relay SET version = 1")
    connection.commit()
    connection.close()
    async with postroom.Outbox().relay(mq, shop.url) as relay:
        with pytest.raises(UsageError, match="already"):
            await relay.start()


class _Losable(sqlite3.Connection):
    """Closing one that another thread uses at the moment crashes Python."""

    lost = False

    def cursor(self, *arguments: Any) -> Any:
        self._check()
        return super().cursor(*arguments)

    def execute(self, *arguments: Any) -> Any:
        self._check()
        return super().execute(*arguments)

    def _check(self) -> None:
        if self.lost:
            raise sqlite3.ProgrammingError("Cannot operate on a closed database.")


async def test_a_relay_goes_on_after_its_connection_was_lost(
    database: Database, mq: postroom.Connection
) -> None:
    opened: list[Any] = []

    def connect() -> Any:
        if database.kind == "sqlite":
            path = database.url.removeprefix("sqlite:///")
            opened.append(sqlite3.connect(path, check_same_thread=False, timeout=20, factory=_Losable))
        else:
            opened.append(database.connect())
        return opened[-1]

    outbox = postroom.Outbox()
    async with outbox.relay(mq, connect, lease=0.5) as relay:
        _write(outbox, database, range(5))
        await eventually(lambda: relay.forwarded == 5)
        await _idle(relay)
        if isinstance(opened[-1], _Losable):
            opened[-1].lost = True
        else:
            opened[-1].close()
        _write(outbox, database, range(5, 10))
        _in_order(await received(mq, "orders", 10), 10)
    assert len(opened) > 2  # the first one looked whether the table is there


# ---- several ----


async def test_of_two_relays_one_leads_until_it_stops(database: Database, mq: postroom.Connection) -> None:
    outbox = postroom.Outbox()
    relays = [outbox.relay(mq, database.url, poll=0.05) for _ in range(2)]
    for relay in relays:
        await relay.start()
    await eventually(lambda: any(relay.leading for relay in relays))
    _write(outbox, database, range(20))
    await eventually(lambda: sum(relay.forwarded for relay in relays) == 20)
    assert sorted(relay.forwarded for relay in relays) == [0, 20]
    leader = max(relays, key=lambda relay: relay.forwarded)
    other = min(relays, key=lambda relay: relay.forwarded)
    await leader.stop()
    _write(outbox, database, range(20, 40))
    await eventually(lambda: other.forwarded == 20)
    await other.stop()
    _in_order(await received(mq, "orders", 40), 40)


async def test_a_clock_that_was_set_back_holds_up_no_relay(shop: Database, mq: postroom.Connection) -> None:
    """I26: the leader is gone, and its lease ends an hour from now. Seed 4403 of the simulator."""
    outbox, connection = postroom.Outbox(), shop.connect()
    outbox.send(connection, "orders", b"one")
    hour = "UPDATE postroom_outbox_relay SET holder = 'gone', until_ms = ?"
    connection.execute(hour, (int((time.time() + 3600) * 1000),))
    connection.commit()
    async with outbox.relay(mq, shop.url, lease=0.1, poll=0.1):
        assert [message.value for message in await received(mq, "orders", 1)] == [b"one"]
    connection.close()


@pytest.mark.parametrize("way", ["address", "function", "engine"])
def test_the_lease_is_locked_before_it_is_looked_at(shop: Database, way: str) -> None:
    """Of SQLite: some libraries begin a transaction with the first write only (I12)."""
    engine = shop.engine()
    connect = {"address": shop.url, "function": shop.connect, "engine": engine}[way]
    source = OutboxSource(postroom.Outbox().table, opening(connect), 10_000, "me")
    other = sqlite3.connect(shop.url.removeprefix("sqlite:///"), timeout=0, isolation_level=None)
    assert source._leads()
    with source._leading(), pytest.raises(sqlite3.OperationalError, match="locked"):
        other.execute("BEGIN IMMEDIATE")
    source.close()
    other.close()
    engine.dispose()


# ---- with an app, and without asyncio ----


async def test_an_app_relays_while_it_runs(shop: Database, tmp_path: Path) -> None:
    outbox, handled = postroom.Outbox(), asyncio.Event()
    app = postroom.App(f"sqlite:///{tmp_path}/queue.db")
    app.outbox(outbox, shop.url, poll=0.05)

    @app.subscribe("orders", group="billing")
    async def bill(body: bytes) -> None:
        handled.set()

    async with postroom.connect(f"sqlite:///{tmp_path}/queue.db") as mq:
        await mq.create_topic("orders")
    async with app:
        _write(outbox, shop, range(1))
        await asyncio.wait_for(handled.wait(), 60)
        with pytest.raises(UsageError, match="before it starts"):
            app.outbox(outbox, shop.url)
    connection = shop.connect()
    assert not outbox.status(connection).relay
    connection.close()


async def test_an_app_with_an_outbox_that_is_not_there_does_not_start(tmp_path: Path) -> None:
    app = postroom.App(f"sqlite:///{tmp_path}/queue.db")
    app.outbox(postroom.Outbox(), f"sqlite:///{tmp_path}/empty.db")
    with pytest.raises(SchemaMismatch, match="create_table"):
        await app.start()
    assert not app.running


def test_without_asyncio(shop: Database, tmp_path: Path) -> None:
    outbox = postroom.Outbox()
    with postroom.sync.connect(f"sqlite:///{tmp_path}/queue.db") as mq:
        mq.create_topic("orders")
        with outbox.relay(mq, shop.connect) as relay:
            _write(outbox, shop, range(1))
            with mq.consumer("orders", group="all") as consumer:
                assert next(consumer).value == b"0"
            assert relay.leading
    assert shop.values() == []


# ---- the queue's own database ----


@pytest.fixture(params=KINDS)
async def one_database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """The queue's, and the outbox's."""
    return _with_tables(database_of(request.param, request, tmp_path))


def _stamps_of(relay: Any) -> list[int]:
    """Grows by each batch that is stamped in the table."""
    found: list[int] = []
    write: Callable[..., None] = relay._source._write

    def noted(theirs: Any, column: str, value: bytes | None) -> None:
        found.extend([1] if column == "stamped" and value else [])
        write(theirs, column, value)

    relay._source._write = noted
    return found


async def test_in_the_queues_own_database_rows_leave_with_the_append(one_database: Database) -> None:
    outbox = postroom.Outbox()
    async with postroom.connect(one_database.url, migrate=True) as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_topic("fleeting", storage="volatile")
        async with outbox.relay(mq, one_database.url) as relay:
            await eventually(lambda: relay.leading)
            stamps = _stamps_of(relay)
            _write(outbox, one_database, range(40))
            _in_order(await received(mq, "orders", 40), 40)
            connection = one_database.connect()
            with outbox.transaction(connection):
                outbox.send(connection, "orders", b"soon", delay=0.05)
            connection.close()
            assert len(await received(mq, "orders", 1)) == 1
            assert not stamps
            _write(outbox, one_database, range(3), "fleeting")
            _in_order(await received(mq, "fleeting", 3), 3)
            assert stamps, "what is not flushed cannot share the transaction"
            await eventually(lambda: relay.forwarded == 44)
    assert one_database.values() == []


async def test_a_split_while_rows_leave(tmp_path: Path) -> None:
    shop, outbox = _with_tables(Database("sqlite", f"sqlite:///{tmp_path}/shop.db")), postroom.Outbox()
    async with postroom.connect(shop.url) as mq:
        await mq.create_topic("orders", partitions=1)
        async with outbox.relay(mq, shop.url) as relay:
            for first in range(0, 200, 20):
                await asyncio.to_thread(_write, outbox, shop, range(first, first + 20))
                if first == 100:
                    await mq.split("orders", 0)
            await eventually(lambda: relay.forwarded == 200)
        numbers: dict[bytes | None, list[int]] = {}
        async with mq.consumer("orders", group="ordered", mode="ordered") as consumer:
            while sum(map(len, numbers.values())) < 200:
                messages = await consumer.poll(wait=1)
                for message in messages:
                    numbers.setdefault(message.key, []).append(int(message.value))
                await consumer.ack(messages)
    assert all(found == sorted(found) for found in numbers.values())
    assert sorted(number for found in numbers.values() for number in found) == list(range(200))


# ----


async def _idle(relay: Any) -> None:
    """Until it waits to be woken."""
    await eventually(lambda: relay._forwarder is not None and relay._forwarder._look_s > 0.005)


async def _more(mq: postroom.Connection) -> list[postroom.Received]:
    async with mq.consumer("orders", group="all") as consumer:
        return await consumer.poll(wait=0)
