"""What many topics, groups and members cost: counted in statements and rows, never in time.

Each is done with a few topics and with many, and must cost the same. `python -m bench.scale` has the figures.
"""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, patch

import pytest

import postroom
from bench.scale import sizes
from postroom.address import parse
from postroom.broker.access import Gatekeeper, new_token
from postroom.broker.broker import Broker, open_endpoint
from postroom.broker.duties import Duty
from postroom.broker.exposition import Sampler
from postroom.broker.waiters import WatcherThread
from postroom.clock import ManualClock
from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS
from postroom.endpoint.values import PollRequest
from postroom.errors import StoreBusy, UnknownGroup, UnknownTopic
from postroom.http.access import Permitted
from postroom.model.access import Principal, hash_of, parse_permissions
from postroom.model.policy.settings import GroupSettings, GroupWish, TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import News, Process
from postroom.store.sql.catalog import catalog
from postroom.store.sql.session import Area, Transaction
from postroom.wire.server.answers import Answers
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer
from postroom.wire.server.session import Session
from tests.integration.wire import wire_raw

FEW, MANY = 5, 200


_BACKGROUND = ("postroom-schedule", "postroom-watcher")  # threads that look now and then, whoever asks


@dataclass
class Cost:
    """What the store was asked while somebody counted."""

    statements: int = 0
    rows: int = 0
    seen: list[str] = field(default_factory=list)


@contextmanager
def counted() -> Iterator[Cost]:
    """Counts statements, and rows that are listed."""
    cost = Cost()

    def watched(call: Any) -> Any:
        def run(tx: Transaction, sql: str, *args: Any) -> Any:
            if threading.current_thread().name.startswith(_BACKGROUND):
                return call(tx, sql, *args)
            cost.statements += 1
            cost.seen.append(sql)
            answer = call(tx, sql, *args)
            cost.rows += len(answer) if isinstance(answer, list) else 0
            return answer

        return run

    names = ("one", "all", "locked", "run", "do", "many", "insert")
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(patch.object(Transaction, name, watched(getattr(Transaction, name))))
        yield cost


@asynccontextmanager
async def queue(topics: int, *, used: bool = False) -> AsyncIterator[Broker]:
    """`used`: each topic has a group that has settled what was sent."""
    clock = ManualClock()
    broker = await open_endpoint(parse("memory://"), clock=clock)
    mq = postroom.Connection(broker, "test")
    try:
        for number in range(topics):
            name = f"topic-{number:03d}"
            broker.store.catalog.create_topic(name, TopicSettings(), 1)
            if used:
                broker.store.catalog.create_group(name, "billing", GroupSettings())
                await mq.send(name, b"news")
        yield broker
    finally:
        await mq.close()


def duties_of(broker: Broker) -> Sequence[Duty]:
    return broker.duties._duties


async def idle_cost(topics: int, *, used: bool) -> Cost:
    """Every duty once more, after each has run twice."""
    async with queue(topics, used=used) as broker:
        for _ in range(2):
            for duty in duties_of(broker):
                duty.run_once()
        with counted() as cost:
            for duty in duties_of(broker):
                duty.run_once()
    return cost


# ---- idle ----


@pytest.mark.parametrize("used", [False, True])
async def test_duties_of_an_idle_queue_cost_the_same_with_many_topics(used: bool) -> None:
    few, many = await idle_cost(FEW, used=used), await idle_cost(MANY, used=used)
    assert many.statements == few.statements <= 25, many.seen
    most = 3 * MANY if used else 0  # ends, marks: one row for a topic that has messages
    assert many.rows <= few.rows + most


async def test_what_has_moved_is_still_found_by_retention(tmp_path: Path) -> None:
    """One topic of many: its messages come of age, or its group has settled them (R44)."""
    clock = ManualClock()
    broker = await open_endpoint(parse("memory://"), clock=clock)
    mq = postroom.Connection(broker, "test")
    try:
        (retention,) = (duty for duty in duties_of(broker) if duty.name == "retention")
        await mq.create_topic("short", partitions=1, retention="1m")
        await mq.create_topic("dropped", partitions=1, drop_settled=True)
        await mq.create_group("dropped", "billing")
        await mq.send("short", b"1")
        await mq.send("dropped", b"1")
        for _ in range(3):
            retention.run_once()
        assert [topic.messages for topic in await mq.topics()] == [1, 1]
        clock.advance(30)
        await mq.send("short", b"2")
        for _ in range(3):
            retention.run_once()
        clock.advance(31)  # the first is old now, and nothing has happened
        retention.run_once()
        assert (await mq.topic("short")).messages == 1
        async with mq.consumer("dropped", group="billing") as consumer:
            await consumer.ack(await consumer.poll(wait=5))
        retention.run_once()
        assert (await mq.topic("dropped")).messages == 0
        await mq.send("dropped", b"2")
        await mq.delete_group("dropped", "billing", force=True)
        await mq.alter_topic("dropped", retention="1s")
        clock.advance(2)
        retention.run_once()
        assert (await mq.topic("dropped")).messages == 0
    finally:
        await mq.close()


async def test_news_are_read_of_what_somebody_waits_for() -> None:
    """One waits for one of many topics: a commit elsewhere makes nobody read the ends of all."""
    async with queue(MANY) as broker:
        mq = postroom.Connection(broker, "test")
        told: list[News] = []
        look, looked = broker.store.log.news, threading.Event()

        def news(of: Any = None) -> News:
            told.append(look(of))
            looked.set()
            return told[-1]

        with patch.object(broker.store.log, "news", news):
            async with mq.consumer("topic-007", group="billing") as consumer:
                waiting = asyncio.create_task(consumer.poll(wait=20))
                for number in range(4):
                    looked.clear()
                    await mq.send(f"topic-{number:03d}", b"x")
                    assert await asyncio.to_thread(looked.wait, 30)
                await mq.send("topic-007", b"mine")
                (found,) = await waiting
                assert found.value == b"mine"
    assert max(len(one.ends) for one in told) <= 1


async def test_news_of_another_process_reach_a_consumer_of_one_topic_among_many(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'q.db'}"
    async with postroom.connect(url) as here, postroom.connect(url) as there:
        for number in range(20):
            await here.create_topic(f"topic-{number}", partitions=1)
        async with here.consumer("topic-3", group="billing") as consumer:
            for number in range(5):
                waiting = asyncio.create_task(consumer.poll(wait=30))
                await there.send("topic-4", b"not this")
                await there.send("topic-3", str(number).encode())
                found = await waiting
                assert [one.value for one in found] == [str(number).encode()]
                await consumer.ack(found)


def test_a_watcher_asks_after_it_was_told() -> None:
    """Who begins to listen while a watcher looks is either asked for, or looks itself after the commit."""
    order: list[str] = []

    class Log:
        def news(self, of: Any) -> News:
            order.append(f"news {of}")
            return News(1, {})

    class Progress:
        def dues(self, of: Any) -> dict[int, int]:
            order.append(f"dues {of}")
            return {}

    class Store:
        log, progress = Log(), Progress()

    watcher = cast(WatcherThread, object.__new__(WatcherThread))
    watcher._store, watcher._unsure, watcher._failing = cast(Any, Store()), False, False
    watcher.on_due, watcher._report = (lambda due: None), (lambda news, dues: None)
    watcher._loop = cast(Any, type("Loop", (), {"call_soon_threadsafe": lambda *args: None})())
    watcher.awaited = lambda kind: order.append(f"awaited {kind}") or [7]  # type: ignore[func-returns-value]

    def changed() -> tuple[bool, bool]:
        order.append("changed")
        return True, True

    watcher._seen = None
    assert watcher._look(changed) == "news"
    assert order == ["changed", "awaited partition", "news [7]", "awaited group", "dues [7]"]


# ---- listing ----


async def listing_cost(topics: int, allowed: Sequence[str], how: str) -> tuple[list[str], Cost, int]:
    """What is listed for a principal, at the wire or over HTTP, and how many topics were loaded for it."""
    principal = Principal("shop", parse_permissions(allowed))
    async with queue(topics) as broker:
        keeper = Gatekeeper(broker.store, broker.in_thread, ManualClock())
        made, make = [], catalog._make_topic

        def making(row: Any, *rest: Any) -> Any:
            made.append(row[1])
            return make(row, *rest)

        with counted() as cost, patch.object(catalog, "_make_topic", making):
            if how == "http":
                found = await Permitted(broker, keeper, principal).topics()
            else:
                with patch.object(keeper, "current", lambda who: _now(who)):
                    session = Session(
                        broker, keeper, principal, "client", Answers(1, 1, 1).share("shop"), Listening()
                    )
                    found = await session.call(OPERATIONS["topics"], r.Nothing(), b"")
    return [info.name for info in found], cost, len(made)


async def _now(who: Principal) -> Principal:
    return who


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
@pytest.mark.parametrize("how", ["wire", "http"])
async def test_a_listing_loads_what_its_reader_may_see(how: str) -> None:
    none, cost, loaded = await listing_cost(MANY, [], how)
    assert (none, loaded) == ([], 0)
    assert cost.rows == 0, cost.seen
    one, cost, loaded = await listing_cost(MANY, ["consume:topic-007"], how)
    assert (one, loaded) == (["topic-007"], 1)
    assert cost.rows < 10, cost.seen
    some, _, loaded = await listing_cost(MANY, ["send:topic-01*", "consume:*-009", "consume:topic-01*"], how)
    assert some == ["topic-009", *(f"topic-01{digit}" for digit in range(10))]
    assert loaded == len(some)


@pytest.mark.parametrize("allowed", ["manage:*", "consume:topic-*"])
async def test_a_listing_of_all_is_a_few_statements(allowed: str) -> None:
    _, few, _ = await listing_cost(FEW, [allowed], "wire")
    names, many, _ = await listing_cost(MANY, [allowed], "wire")
    assert len(names) == MANY
    assert many.statements == few.statements <= 10, many.seen


async def test_a_listing_says_what_each_topic_holds() -> None:
    """As `topic` does: messages, groups, and whether they are somebody's own."""
    async with queue(FEW, used=True) as broker:
        mq = postroom.Connection(broker, "test")
        await mq.send_many("topic-001", [postroom.Message(b"x")] * 4)
        await mq.send("topic-002", b"later", delay=60)
        await mq.create_group("topic-003", "audit", mode="broadcast")
        async with mq.consumer("topic-003", group="audit", mode="broadcast", member="ann"):
            listed = {info.name: info for info in await mq.topics(internal=True)}
            assert listed == {name: await mq.topic(name) for name in listed}
        assert [info.messages for info in listed.values()] == [1, 5, 1, 1, 1]
        assert listed["topic-002"].delayed == 1
        assert listed["topic-003"].groups == ("audit", "billing")


async def test_groups_of_a_topic_are_listed_in_a_few_statements() -> None:
    found = []
    for groups in (FEW, MANY):
        async with queue(1) as broker:
            for number in range(groups):
                broker.store.catalog.create_group("topic-000", f"group-{number}", GroupSettings())
            with counted() as cost:
                assert len(await broker.groups("topic-000")) == groups
            found.append(cost.statements)
    assert found[0] == found[1] <= 8


async def test_a_name_that_is_not_there_is_compared_with_a_few() -> None:
    """Also the names of groups' own topics, which every first poll asks for in vain."""
    compared: list[int] = []
    match = catalog.difflib.get_close_matches

    def matching(name: str, names: Sequence[str], **more: Any) -> list[str]:
        compared.append(len(names))
        return match(name, names, **more)

    async with queue(MANY) as broker:
        for number in range(MANY):
            broker.store.catalog.create_group("topic-000", f"group-{number}", GroupSettings())
        with patch.object(catalog.difflib, "get_close_matches", matching), counted() as cost:
            with pytest.raises(UnknownTopic, match="did you mean 'topic-1"):
                broker.store.catalog.topic("topic-1O0")
            with pytest.raises(UnknownGroup, match="did you mean 'group-1"):
                broker.store.catalog.group("topic-000", "grup-1")
            with pytest.raises(UnknownTopic):
                broker.store.catalog.topic("topic-000.billing.retry")
            assert broker.store.catalog.group("topic-000", "group-7").name == "group-7"
    assert len(compared) == 2 and max(compared) <= 50
    assert cost.rows <= 110


@pytest.mark.parametrize("how", ["wire", "http"])
async def test_a_near_name_is_told_to_whom_it_is_shown(how: str) -> None:
    """Nobody learns of a topic by a name that is nearly right; and the SDK lists nothing to find a hint."""
    async with wire_raw.served(dev=False) as (mq, server):
        broker = wire_raw.broker_of(mq)
        for name in ("orders-secret", "orders-public"):
            await mq.create_topic(name, partitions=1)
        token, allowed = new_token(), parse_permissions(["send:orders-public", "send:orders-publik*"])
        broker.store.access.add(Principal("shop", allowed), hash_of(token))
        listed = AsyncMock(side_effect=AssertionError("nothing is to be listed"))
        with patch.object(broker, "topics", listed):
            if how == "wire":
                async with postroom.connect(server.url, token=token) as shop:
                    with pytest.raises(UnknownTopic) as caught:
                        await shop.send("orders-publik-secret", b"x")
            else:
                keeper = Gatekeeper(broker.store, broker.in_thread, ManualClock())
                permitted = Permitted(broker, keeper, Principal("shop", allowed))
                with pytest.raises(UnknownTopic) as caught:
                    await postroom.Connection(permitted, "shop").send("orders-publik-secret", b"x")
        assert "orders-secret" not in str(caught.value)
        assert caught.value.details["close"] == ["orders-public"]
        assert "did you mean 'orders-public'" in str(caught.value)


async def test_deleting_one_topic_loads_no_others() -> None:
    async with queue(MANY, used=True) as broker:
        made, make = [], catalog._make_topic

        def making(row: Any, *rest: Any) -> Any:
            made.append(row[1])
            return make(row, *rest)

        broker.store.catalog.create_topic("topic-007.billing.dead", TopicSettings(), 1)
        broker.store.catalog.create_topic("topic-0077", TopicSettings(), 1)
        with patch.object(catalog, "_make_topic", making):
            await broker.delete_topic("topic-007")
        assert set(made) == {"topic-007", "topic-007.billing.dead"}
        left = broker.store.catalog.names()
        assert len(left) == MANY and not {"topic-007", "topic-007.billing.dead"} & {*left}


async def test_a_scrape_costs_nothing_for_topics_without_groups() -> None:
    found = []
    for topics in (FEW, MANY):
        async with queue(topics) as broker:
            broker.store.catalog.create_group("topic-001", "billing", GroupSettings())
            with counted() as cost:
                sample = await Sampler(broker).sample()
            assert list(sample.lags) == [("topic-001", "billing")] and sample.left_out == 0
            found.append(cost.statements)
    assert found[0] == found[1]


# ---- members ----


async def test_members_that_came_and_went_leave_nothing() -> None:
    """A thousand joined, polled, and left or died: neither the store nor the broker remembers them."""
    clock = ManualClock()
    broker = await open_endpoint(parse("memory://"), clock=clock)
    try:
        await broker.create_topic("jobs", TopicSettings(), 1, False)
        await _come(broker, range(10), leave=False)
        before = sizes(broker)
        for hundred in range(10):
            await _come(broker, range(1000 * hundred, 1000 * hundred + 60), leave=True)
            await _come(broker, range(1000 * hundred + 60, 1000 * hundred + 100), leave=False)
            clock.advance(120)  # those that did not leave are dead
        (expire,) = (duty for duty in duties_of(broker) if duty.name == "expire-groups")
        expire.run_once()
        assert _rows(broker, "members") == 0
        after = sizes(broker)
        grown = {name: size for name, size in after.items() if size > before.get(name, 0) + 20}
        assert set(grown) <= {"_groups.members._known"}  # of which the silent go when there are a thousand
    finally:
        await broker.close()


@pytest.mark.slow("waits for a shard or a broker that fails or hangs")
async def test_members_that_die_where_nobody_beats_are_forgotten() -> None:
    """Each opens a consumer through this broker and is gone; no heart beats here that would look around."""
    clock = ManualClock()
    broker = await open_endpoint(parse("memory://"), clock=clock)
    try:
        await broker.create_topic("jobs", TopicSettings(), 1, False)
        for hundred in range(30):
            await _come(broker, range(100 * hundred, 100 * hundred + 100), leave=False)
            clock.advance(120)
        assert len(broker._groups.members._known) <= 1000
        assert _rows(broker, "members") <= 100  # each that joins forgets the dead ones of its group
    finally:
        await broker.close()


async def test_the_cost_of_a_join_does_not_grow_with_groups() -> None:
    found = []
    for groups in (FEW, MANY):
        async with queue(1) as broker:
            for number in range(groups):
                group = broker.store.catalog.create_group("topic-000", f"g{number}", GroupSettings())
                broker.store.usage.touch(group.id)
            with counted() as cost:
                await broker.subscribe("topic-000", "g3", GroupWish(), "ann", "test")
            found.append((cost.statements, cost.rows))
    assert found[0] == found[1]


async def _come(broker: Broker, numbers: Sequence[int], *, leave: bool) -> None:
    for number in numbers:
        member = f"member-{number}"
        await broker.subscribe("jobs", "work", GroupWish(lease_ms=1000), member, member)
        await broker.poll(PollRequest("jobs", "work", member, secrets.randbits(62) + 1, 10, 1 << 20, 0, True))
        if leave:
            await broker.unsubscribe("jobs", "work", member)


async def test_clients_that_came_and_went_leave_nothing_at_a_server() -> None:
    """Each connects, opens a consumer, polls, and closes or is cut off (its member is dead a lease later)."""
    async with wire_raw.served(dev=True) as (mq, server):
        broker = wire_raw.broker_of(mq)
        await mq.create_topic("jobs", partitions=1)
        await _clients(server, 5)
        before = sizes(server) | sizes(broker)
        await _clients(server, 60)
        async with asyncio.timeout(30):
            while server.connections:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        after = sizes(server) | sizes(broker)
        grown = {name: size for name, size in after.items() if size > before.get(name, 0) + 20}
        assert set(grown) <= {"_groups.members._known", "_broker._groups.members._known"}
        assert _rows(broker, "members") <= 35  # of those that were cut off, until they are dead
        assert _rows(broker, "processes") == 1


async def _clients(server: WireServer, count: int) -> None:
    for number in range(count):
        client = await postroom.connect(server.url, client_id=f"client-{number}-{secrets.token_hex(4)}")
        consumer = client.consumer("jobs", group="work")
        await consumer.__aenter__()
        await consumer.poll(wait=0)
        if number % 2:
            for connection in list(server.connections):
                cast(Any, connection)._transport.abort()
        await client.close()


async def test_processes_that_died_are_forgotten(tmp_path: Path) -> None:
    clock = ManualClock()
    store = open_sqlite(tmp_path / "q.db", clock)
    try:
        for number in range(300):
            store.brokers.announce(Process(str(number), f"job-{number}", frozenset()), 20_000)
            clock.advance(5)
        with cast(Any, store).session.read(Area.PROGRESS) as tx:
            assert tx.one("SELECT COUNT(*) FROM postroom_processes")[0] <= 17  # those of the last 80 seconds
    finally:
        store.close()


def _rows(broker: Broker, table: str) -> int:
    with cast(Any, broker.store).session.read(Area.PROGRESS) as tx:
        return int(tx.one(f"SELECT COUNT(*) FROM postroom_{table}")[0])


async def test_names_that_clients_make_up_do_not_fill_a_broker() -> None:
    """Groups asked for in vain, topics that come and go: what is remembered of them has an end."""
    async with queue(1) as broker:
        with (
            patch("postroom.broker.topology.catalog_cache._MOST", 100),
            patch("postroom.broker.access._MOST", 100),
        ):
            for number in range(500):
                assert broker._catalog.dead_letters("topic-000", f"made-up-{number}") is None
            assert len(broker._catalog._known) <= 100
            keeper = Gatekeeper(broker.store, broker.in_thread, ManualClock())
            for number in range(150):
                made = broker.store.catalog.create_topic(f"_reply.{number}", TopicSettings(), 1)
                await keeper.check_partition(made.name, made.route.ranges[0].partition_id)
            assert len(keeper._topics) <= 100


async def test_a_connection_keeps_producers_of_so_many_topics() -> None:
    """Those of a principal's sends over HTTP are in the broker: topics it makes up must not stay there."""
    async with queue(3) as broker:
        mq = postroom.Connection(broker, "test")
        with patch("postroom.client.connection._MOST_SENDERS", 50):
            for number in range(200):
                with pytest.raises(UnknownTopic):
                    await mq.send(f"made-up-{number}", b"x")
            assert len(mq._shared) <= 50
            await mq.send("topic-001", b"1")
            for number in range(200):
                with pytest.raises(UnknownTopic):
                    await mq.send(f"made-up-{number}", b"x")
            await mq.send("topic-001", b"2")
        assert (await mq.topic("topic-001")).messages == 2


# ---- tables that are made all the time ----


def test_a_statement_that_met_new_tables_too_often_is_run_again(tmp_path: Path) -> None:
    """SQLite gives up a statement if tables are made faster than it reads them; nobody is to see that."""
    store = open_sqlite(tmp_path / "q.db")
    try:
        failures = [_schema_changed(), _schema_changed()]
        one = Transaction.one

        def failing(tx: Transaction, sql: str, *args: Any) -> Any:
            if failures and "catalog_version" in sql:
                raise failures.pop()
            return one(tx, sql, *args)

        with patch.object(Transaction, "one", failing):
            assert store.catalog.version() >= 0
        assert not failures
        failures[:] = [_schema_changed() for _ in range(100)]
        with patch.object(Transaction, "one", failing), pytest.raises(StoreBusy, match="try again"):
            store.catalog.version()
    finally:
        store.close()


def _schema_changed() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database schema has changed")
    error.sqlite_errorcode = sqlite3.SQLITE_SCHEMA  # type: ignore[misc]
    return error
