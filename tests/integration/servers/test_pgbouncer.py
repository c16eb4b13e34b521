"""Behind PgBouncer in transaction mode (`?pgbouncer=1`): each transaction may run in another session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any
from unittest import mock

import pytest

import postroom
from postroom.errors import StoreError
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import SqlStore
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import acks, append, ask, batch, in_threads, partitions, read_all
from tests.ready import Ground, opened
from tests.servers import PgBouncer, PostgresServer


@pytest.fixture
def fresh(postgres_server: PostgresServer, pgbouncer: PgBouncer) -> Iterator[Ground]:
    """A database without tables."""
    ground = Ground(postgres_server, postgres_server.create_database())
    ground.url = pgbouncer.url(ground.name)
    yield ground
    ground.close()
    postgres_server.drop_database(ground.name)


@pytest.fixture
def url(fresh: Ground) -> str:
    opened(fresh.url, make_tables=True).close()
    return fresh.url


async def test_everything_users_do(url: str) -> None:
    async with postroom.connect(url) as mq, postroom.connect(url) as other:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing", lease=30)
        await asyncio.gather(*(mq.send("orders", b"%d" % i, key=str(i)) for i in range(50)))
        await other.send("orders", b"50", delay=0.3)
        found: set[int] = set()
        async with mq.consumer("orders", "billing") as one, other.consumer("orders", "billing") as two:

            async def take(consumer: postroom.Consumer) -> None:
                while len(found) < 51:
                    for message in await consumer.poll(wait=0.2):
                        if message.value == b"7" and message.attempt == 1:
                            await message.retry(delay=0)
                        elif message.value == b"8":
                            await message.dead("no")
                            found.add(8)
                        else:
                            await message.ack()
                            found.add(int(message.value))

            await asyncio.gather(take(one), take(two))
        assert found == set(range(51))
        assert [letter.value for letter in await mq.dead_letters("orders", "billing")] == [b"8"]
        assert (await mq.lag("orders", "billing")).total.messages == 0


async def test_a_waiting_consumer_hears_of_others_without_listening(url: str) -> None:
    """It looks: nothing can be listened to in a session that is nobody's."""
    async with postroom.connect(url) as mq, postroom.connect(url) as other:
        await mq.create_topic("orders", partitions=1)
        async with mq.consumer("orders", "billing") as consumer:
            polling = asyncio.ensure_future(consumer.poll(wait=20))
            await asyncio.sleep(0.5)
            await other.send("orders", b"hello")
            (message,) = await asyncio.wait_for(polling, 5)
            assert message.value == b"hello"
            await message.ack()


def test_many_migrate_at_once_and_leave_no_lock_behind(fresh: Ground) -> None:
    in_threads(*[lambda: opened(fresh.url, make_tables=True).close()] * 4)
    assert fresh.rows("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'") == [(0,)]
    opened(fresh.url).close()


def test_durability_is_asked_for_in_each_transaction(url: str) -> None:
    """Sessions are shared: what one area asks for must not be what the next one gets (I8)."""
    with closing(opened(url)) as store:
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        group = store.catalog.create_group("orders", "billing", GroupSettings())
        append(store, place, batch(9))
        store.progress.rewind(group, [place])
        seen: dict[str, set[tuple[str, ...]]] = {}

        def work(name: str, verb: Callable[[], object]) -> None:
            for settings in transactions(store, verb):
                seen.setdefault(name, set()).add(settings)

        for number in range(1, 7):
            work("append", lambda: append(store, place, batch()))
            work("poll", lambda number=number: store.progress.poll(group, place, ask(number, 9, messages=1)))
            work("ack", lambda number=number: store.progress.settle(group, place, number, acks((0, 9))))
        limits = ("5s", "5s", "read committed")
        assert seen == {"append": {("on", *limits)}, "poll": {("off", *limits)}, "ack": {("off", *limits)}}
        assert len(read_all(store, place)) == 7


def transactions(store: SqlStore, verb: Callable[[], object]) -> list[tuple[str, ...]]:
    """What each transaction of the verb that is committed was set to."""
    dialect, found = store.session.dialect, list[tuple[str, ...]]()
    original = dialect.end
    look = """SELECT current_setting('synchronous_commit'), current_setting('lock_timeout'),
                     current_setting('idle_in_transaction_session_timeout'),
                     current_setting('transaction_isolation')"""

    def end(connection: Any, area: Area, *, commit: bool) -> None:
        if commit:
            found.append(dialect.ask(connection, look, ()).fetchone())
        original(connection, area, commit=commit)

    with mock.patch.object(dialect, "end", end):
        verb()
    return found


def test_an_address_that_does_not_tell_of_the_pool(url: str) -> None:
    """Prepared statements are made in one session and used in another: the sentence names the cure."""

    def work(store: SqlStore) -> None:
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        in_threads(*[lambda: [append(store, place, batch()) for _ in range(50)]] * 4)

    with (
        closing(opened(url.removesuffix("?pgbouncer=1"))) as store,
        pytest.raises(StoreError, match=r"add \?pgbouncer=1 to the address"),
    ):
        work(store)
