"""How a waiting consumer hears of another process: NOTIFY on PostgreSQL, looking on MariaDB (R36, I19)."""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any, cast

import psycopg
import pytest

import postroom
from postroom.config import DEFAULTS
from postroom.errors import StoreError
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore
from postroom.store.dialects.watchers import Notifier
from postroom.store.sql.session import Area
from postroom.testing.store_contract.harness import _failing_commits, append, batch, in_threads, partitions
from tests.integration.processes.children import Connection, child, received
from tests.integration.races.interleaving import until
from tests.ready import Ground, opened, ready
from tests.servers import PostgresServer
from tests.tuned import Tune

SAMPLES = 200


# ---- how soon ---------------------------------------------------------------------------------------------


def send_when_told(url: str, pipe: Connection) -> None:
    """Each message holds the moment before it was sent, by the clock that all processes here share."""

    async def main() -> None:
        async with postroom.connect(url) as mq:
            await mq.send("orders", b"0")
            pipe.send("ready")
            while await asyncio.to_thread(pipe.recv) == "send":
                await mq.send("orders", str(time.monotonic()).encode())

    asyncio.run(main())


async def test_latency_from_process_to_process(
    ground: Ground, record_property: Callable[[str, object], None]
) -> None:
    async with postroom.connect(ground.url) as mq:
        await mq.create_topic("orders", partitions=1)
        with child(send_when_told, ground.url) as (_, pipe):
            assert await asyncio.to_thread(received, pipe) == "ready"
            found = await latencies(mq, pipe)
            pipe.send("end")
    figures = f"p50 {statistics.median(found):.1f} ms, p99 {sorted(found)[-len(found) // 100]:.1f} ms"
    record_property(f"latency on {ground.kind}", figures)
    print(f"{ground.kind}: {figures} of {len(found)}")
    assert statistics.median(found) < 250  # 2 and 8 ms on a machine that has nothing else to do


async def latencies(mq: postroom.Connection, pipe: Connection) -> list[float]:
    found = []
    async with mq.consumer("orders", "billing") as consumer:
        (first,) = await consumer.poll(wait=10)
        await first.ack()
        for _ in range(SAMPLES):
            pipe.send("send")
            (message,) = await consumer.poll(wait=10)
            found.append(1000 * (time.monotonic() - float(message.value)))
            await message.ack()
    return found


def test_a_wake_up_survives_a_restart_of_the_server(own_postgres: PostgresServer) -> None:
    """Listener and notifier both lost their connection; from the second message on all is as before."""
    with ready(own_postgres) as own:
        store, other = own.store(), own.store()
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        append(other, place, batch())
        with closing(store.watch()) as watcher:
            watcher.changed()
            own_postgres.restart()
            until(lambda: appended(other, place))
            until(lambda: watcher.changed()[0])
            settle(watcher)
            for _ in range(3):
                append(other, place, batch())
                assert heard_within(watcher, 1)


def test_a_watcher_that_hears_nothing_sleeps_until_it_is_woken(postgres_ready: str, tune: Tune) -> None:
    """Awake many times a second, an idle process would cost 1 % of a core."""
    tune(store={"listen_s": 3600, "listen_anyway_s": 3600})
    with closing(opened(postgres_ready)) as store, closing(store.watch()) as watcher:
        assert watcher.changed() == (True, True)
        with ThreadPoolExecutor(1) as pool:
            asleep = pool.submit(watcher.changed)
            with pytest.raises(TimeoutError):
                asleep.result(timeout=0.3)  # six times what it waited before
            watcher.wake()
            assert asleep.result(timeout=60) == (False, False)


def appended(store: SqlStore, place: int) -> bool:
    try:
        return bool(append(store, place, batch()))
    except StoreError:
        return False


def settle(watcher: Any) -> None:
    """Nothing more is to come of what was done before."""
    while watcher.changed() != (False, False):
        pass


def heard_within(watcher: Any, seconds: float) -> bool:
    """Less than the time after which it looks anyway."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if watcher.changed()[0]:
            return True
    return False


def test_a_notifier_that_lost_its_connection_sends_on_a_new_one(postgres_ready: str) -> None:
    with (
        closing(opened(postgres_ready)) as store,
        closing(store.watch()) as watcher,
        listening(postgres_ready) as ours,
    ):
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        watcher.changed()
        append(store, place, batch())
        sender = next(ours.notifies(timeout=10)).pid
        ours.execute("SELECT pg_terminate_backend(%s)", (sender,))
        settle(watcher)
        append(store, place, batch())
        assert heard_within(watcher, 1)


# ---- how many ---------------------------------------------------------------------------------------------


def listening(url: str) -> psycopg.Connection[Any]:
    connection = psycopg.connect(url, autocommit=True)
    connection.execute("LISTEN postroom")
    return connection


def test_notifications_are_not_part_of_the_commit(postgres_ready: str) -> None:
    """They come from a connection of their own, and only when there was a commit."""
    with closing(opened(postgres_ready)) as store, listening(postgres_ready) as ours:
        (place,) = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))
        append(store, place, batch())
        with store.session.read(Area.LOG) as tx:
            writer = tx.one("SELECT pg_backend_pid()")
        heard = list(ours.notifies(timeout=0.5))
        assert heard and {note.payload for note in heard} == {"log"}
        assert writer not in {(note.pid,) for note in heard}
        with _failing_commits(store, bool), pytest.raises(StoreError):
            append(store, place, batch())
        assert list(ours.notifies(timeout=0.3)) == []


def test_notifications_become_fewer_under_load(
    postgres_ready: str, record_property: Callable[[str, object], None]
) -> None:
    with closing(opened(postgres_ready)) as store, listening(postgres_ready) as ours:
        places = partitions(store.catalog.create_topic("orders", TopicSettings(), 4))
        list(ours.notifies(timeout=0.3))

        def write(place: int) -> None:
            for _ in range(100):
                append(store, place, batch())

        in_threads(*(lambda place=place: write(place) for place in places))
        heard = len(list(ours.notifies(timeout=0.5)))
        record_property("notifications", f"{heard} for 400 commits")
        print(f"{heard} notifications for 400 commits")
        assert 0 < heard <= 400


def test_what_is_to_be_told_while_one_is_on_its_way_is_told_once() -> None:
    class Slow:
        def __init__(self) -> None:
            self.sent: list[str] = []
            self.busy, self.go_on = threading.Event(), threading.Event()

        def ask(self, sql: str) -> None:
            self.sent.append(sql)
            self.busy.set()
            assert self.go_on.wait(30)

        def close(self) -> None: ...

    slow = Slow()
    notifier = Notifier(lambda: cast(Any, slow), (psycopg.Error,), DEFAULTS.tuning.store)
    notifier.notify(Area.LOG)
    assert slow.busy.wait(30)
    for _ in range(100):
        notifier.notify(Area.LOG)
        notifier.notify(Area.PROGRESS)
    slow.go_on.set()
    notifier.close()
    assert sorted(slow.sent[1:]) == ["NOTIFY postroom, 'log'", "NOTIFY postroom, 'progress'"]


# ---- who listens ------------------------------------------------------------------------------------------


async def test_whoever_does_not_wait_does_not_listen(postgres_ready: str, tune: Tune) -> None:
    """Notifications nobody reads fill the connection, and then the server's own queue."""
    tune(broker={"watcher_kept_s": 0.3})
    async with postroom.connect(postgres_ready) as mq:
        await mq.create_topic("orders", partitions=1)
        async with mq.consumer("orders", "billing") as consumer:
            assert await consumer.poll(wait=0.2) == []
            assert listeners(postgres_ready) == 1
        await asyncio.to_thread(until, lambda: listeners(postgres_ready) == 0)
        async with postroom.connect(postgres_ready) as other, mq.consumer("orders", "billing") as consumer:
            polling = asyncio.ensure_future(consumer.poll(wait=20))
            await asyncio.sleep(0.3)
            await other.send("orders", b"hello")
            (message,) = await asyncio.wait_for(polling, 5)
            await message.ack()


def listeners(url: str) -> int:
    """Connections whose last statement was LISTEN."""
    with psycopg.connect(url) as connection:
        look = "SELECT query FROM pg_stat_activity WHERE datname = current_database()"
        return sum(query.startswith("LISTEN") for (query,) in connection.execute(look))
