"""Short work on SQLite is done in the event loop, and never waits there."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import postroom
from postroom.broker.broker import Broker
from postroom.broker.workers import Workers
from postroom.endpoint.values import PollReply, PollRequest, released
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import Granted, Store
from postroom.store.contract.values import WouldWaitError


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(open_sqlite(tmp_path / "queue.db")) as store:
        yield store


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Another process is at work in the file, as far as SQLite can tell."""
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


def test_what_would_wait_says_so_at_once(store: Store, tmp_path: Path) -> None:
    assert store.at_once is not None
    store.catalog.create_topic("orders", TopicSettings(), 1)
    group = store.catalog.create_group("orders", "billing", GroupSettings())
    with store.at_once():
        store.progress.join(group.id, "ann", "test", 1000)
    began = time.monotonic()
    with locked(tmp_path / "queue.db.progress"), pytest.raises(WouldWaitError), store.at_once():
        store.progress.join(group.id, "bob", "test", 1000)
    assert time.monotonic() - began < 5, "the busy time-out is 10 s"
    with pytest.raises(WouldWaitError), store.at_once():  # it is flushed
        store.catalog.create_topic("others", TopicSettings(), 1)
    assert [topic.name for topic in store.catalog.topics()] == ["orders"]
    assert [member.name for member in store.progress.members(group.id)] == ["ann"]
    store.progress.join(group.id, "bob", "test", 1000)  # who may wait is not concerned


async def test_short_work_is_begun_anew_in_a_thread(store: Store) -> None:
    workers, here, seen = Workers(1, "test", store.at_once), threading.current_thread(), []

    def work(would_wait: bool) -> bool:
        seen.append(threading.current_thread() is here)
        if would_wait and seen[-1]:
            raise WouldWaitError("for a lock")
        return seen[-1]

    async def run(would_wait: bool) -> bool:
        here = None
        with suppress(WouldWaitError):
            here = workers.run_here(work, would_wait)
        return await workers.run_for("key", work, would_wait) if here is None else here

    assert await run(False)
    assert not await run(True)
    assert not await workers.run_for("key", work, False)
    assert seen == [True, True, False, False]
    assert {await run(False) for _ in range(200)} == {True}  # however many come
    await workers.close()


@pytest.mark.slow("writes for seconds")
async def test_the_journal_stays_small(tmp_path: Path) -> None:
    """What is done at once leaves checkpoints to a thread, and that comes to it."""
    async with postroom.connect(f"sqlite:///{tmp_path}/queue.db") as mq:
        await mq.create_topic("orders")
        async with mq.consumer("orders", "billing") as consumer:
            for number in range(1500):
                await mq.send("orders", b"%d" % number)
                (message,) = await consumer.poll(1, wait=20)
                await message.ack()
        journal = tmp_path / "queue.db.progress-wal"
        assert journal.stat().st_size < 16 * 1024 * 1024, "4,000 pages of 4 KiB"


async def test_the_loop_goes_on_while_others_hold_the_file(tmp_path: Path) -> None:
    async with postroom.connect(f"sqlite:///{tmp_path}/queue.db") as mq:
        await mq.create_topic("orders")
        await mq.create_group("orders", "billing")
        await mq.send("orders", b"1")
        async with mq.consumer("orders", "billing") as consumer:
            with locked(tmp_path / "queue.db.progress"):
                polling = asyncio.create_task(consumer.poll(1, wait=20))
                await asyncio.wait({polling}, timeout=0.5)
                assert not polling.done()
            assert [m.value for m in await polling] == [b"1"]


async def test_a_repeated_poll_is_answered_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """I6: what its token holds is handed over once more, all of it, though the loop would have to wait."""
    async with postroom.connect(f"sqlite:///{tmp_path}/queue.db") as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing")
        for slot in (0, 1023):
            await mq.send("orders", b"%d" % slot, slot=slot)
        broker = mq._endpoint
        assert isinstance(broker, Broker)
        request = PollRequest("orders", "billing", "ann", 7, 10, 2**20, 5000, True)
        first = await broker.poll(request)
        for slot in (0, 1023):  # in the tail cache, so that nothing else has to wait
            await mq.send("orders", b"more", slot=slot)
        poll, here, calls = broker.store.progress.poll, threading.current_thread(), []

        def waits(*args: Any, **named: Any) -> Granted:
            calls.append(threading.current_thread() is here)
            if calls == [True, True]:
                raise WouldWaitError("for a lock")
            return poll(*args, **named)

        monkeypatch.setattr(broker.store.progress, "poll", waits)
        again = await broker.poll(replace(request, repeated=True))
    assert len(first.grants) == len(again.grants) == 2


@pytest.mark.parametrize("turn", [0, 1])
async def test_what_was_granted_and_has_to_be_read_is_handed_over(tmp_path: Path, turn: int) -> None:
    """What comes again is read after it was granted: a poll that cannot wait for that is begun anew, and all
    that it was granted is in its answer, whichever partition came first (I6)."""
    url = f"sqlite:///{tmp_path}/queue.db"
    async with postroom.connect(url) as mq, postroom.connect(url) as other:
        await mq.create_topic("orders", partitions=2)
        await mq.create_group("orders", "billing")
        await other.send("orders", b"elsewhere", slot=0)  # so it is not in this broker's tail cache
        await mq.send("orders", b"here", slot=1023)
        broker = mq._endpoint
        assert isinstance(broker, Broker)
        request = PollRequest("orders", "billing", "ann", 7, 10, 2**20, 0, True)
        first = await broker.poll(request)
        assert _given(first) == 2
        await broker.settle("orders", "billing", released(request, first.grants))
        for slot in (0, 1023):
            await mq.send("orders", b"new", slot=slot)
        broker._deliveries._turn = turn
        found = [await broker.poll(replace(request, token=token)) for token in (8, 9)]
    assert sum(map(_given, found)) == 4


def _given(reply: PollReply) -> int:
    return sum(lease.last - lease.first + 1 for grant in reply.grants for lease in grant.leases)
