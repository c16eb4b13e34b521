"""The watcher: it tells commits of other processes from those of its own, and asks less often for those."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from postroom.broker.deliver.readable import TailCache
from postroom.broker.waiters import OthersWatch, WatcherThread
from postroom.config import DEFAULTS
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import open_memory, open_sqlite
from postroom.store.contract import Append, News, StoredBatch
from postroom.testing.store_contract.harness import batch
from tests.tuned import tuned

_CALM = 60  # looks


class Commits:
    """A store with one partition, in which somebody commits all the time."""

    def __init__(self) -> None:
        self.end, self.most, self.enough = 0, 0, threading.Event()
        self.looks: list[float] = []  # when it was looked
        self.log = self.progress = self
        self.at_once = None
        self.commit: Callable[[], None] = lambda: None

    def watch(self) -> Commits:
        return self

    def changed(self) -> tuple[bool, bool]:
        self.commit()
        self.looks.append(time.monotonic())
        if len(self.looks) >= self.most:
            self.enough.set()
        return True, True

    def news(self, of: Any = None) -> News:
        return News(1, {7: self.end})

    def dues(self, of: Any = None) -> dict[int, int]:
        return {}

    def wake(self) -> None: ...
    def close(self) -> None: ...


async def seconds_for(store: Commits, tail: TailCache, looks: int) -> float:
    """Return how long a watcher takes to look so often, once it has calmed down."""
    watcher = WatcherThread(cast(Any, store), DEFAULTS, lambda news, dues: None)
    watcher.stored_here = tail.reaches
    store.most = _CALM + looks
    try:
        watcher.resume()
        assert await asyncio.to_thread(store.enough.wait, 60)
        return store.looks[_CALM + looks - 1] - store.looks[_CALM - 1]
    finally:
        await watcher.close()


async def test_commits_of_this_process_are_looked_at_less_often() -> None:
    store, tail = Commits(), TailCache(1 << 20)

    def commit() -> None:
        tail.add(7, StoredBatch(store.end, 1, 0, b"x"))
        store.end += 1

    store.commit = commit
    assert await seconds_for(store, tail, 10) >= 9 * DEFAULTS.tuning.broker.watcher_own_s


async def test_commits_of_others_are_looked_at_as_often_as_ever() -> None:
    """It does not pause for them: the least of three tries, for the machine may be busy."""
    took = []
    for _ in range(3):
        store = Commits()
        store.commit = partial(_commit, store)
        took.append(await seconds_for(store, TailCache(1 << 20), 10))
    assert min(took) < 9 * DEFAULTS.tuning.broker.watcher_own_s


def _commit(store: Commits) -> None:
    store.end += 1


# ---- on a file, while nobody else commits: the event loop notices who does ----


class Watched:
    """A queue in a file, this process, whose commits are those of the event loop, and another one."""

    def __init__(self, path: Path) -> None:
        self.store, self.other = open_sqlite(path), open_sqlite(path)
        self.store.catalog.create_topic("orders", TopicSettings(), 1)
        (self.piece,) = self.store.catalog.topic("orders").route.partitions
        self.group = self.store.catalog.create_group("orders", "billing", GroupSettings())
        self.looks, self.asleep, self.told = 0, threading.Event(), asyncio.Event()
        limits = tuned(broker={"watcher_asleep_s": 3600.0})
        self.watcher = WatcherThread(self.store, limits, self._report)
        self.watcher.stored_here = lambda partition_id, end: False
        self.others = self.watcher._others

    def _report(self, news: News | None, dues: dict[int, int] | None) -> None:
        self.looks += 1
        if news is not None and news.ends.get(self.piece.partition_id):
            self.told.set()

    def commit_here(self) -> None:
        assert self.store.at_once is not None
        with self.store.at_once():
            self.store.progress.join(self.group.id, "ann", "test", 1000)

    def commit_elsewhere(self) -> None:
        self.other.log.append([Append(self.piece.partition_id, batch())])

    async def until_asleep(self) -> None:
        """Until the thread leaves it to the loop to look, which a few commits of its own bring about."""
        self.watcher.resume()
        while not self.asleep.is_set():
            self.commit_here()
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        await asyncio.wait_for(self.watcher.close(), 60)
        self.store.close()
        self.other.close()


@pytest.fixture
async def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Watched]:
    watched = Watched(tmp_path / "queue.db")
    wait = watched.others.wait

    def waiting(seconds: float) -> None:
        watched.asleep.set()
        wait(seconds)
        watched.asleep.clear()

    monkeypatch.setattr(watched.others, "wait", waiting)
    yield watched
    await watched.close()


async def test_while_only_the_loop_commits_the_thread_sleeps(watched: Watched) -> None:
    await watched.until_asleep()
    looks = watched.looks
    for _ in range(20):
        watched.commit_here()
        await asyncio.sleep(DEFAULTS.tuning.broker.watcher_own_s / 2)
    assert watched.asleep.is_set() and watched.looks == looks and not watched.told.is_set()
    await asyncio.to_thread(watched.commit_elsewhere)
    await asyncio.wait_for(watched.told.wait(), 60)


async def test_whoever_waits_for_commits_of_this_process_is_told_of_them(watched: Watched) -> None:
    """Members of ordered groups, to whom a partition may be handed over."""
    await watched.until_asleep()
    looks, watched.watcher.heeds_own = watched.looks, lambda: True
    deadline = time.monotonic() + 60
    while watched.looks < looks + 5:
        assert time.monotonic() < deadline
        watched.commit_here()
        await asyncio.sleep(0.005)
    assert not watched.asleep.is_set()


async def test_where_nothing_happens_the_loop_is_left_alone(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread is told by the file then; an idle consumer costs next to nothing."""
    looks, looked = iter(["ours"] * 100), asyncio.Event()

    def look(changed: object) -> str:
        if watched.others._wanted:
            watched.watcher._loop.call_soon_threadsafe(looked.set)
            return "nothing"
        return next(looks)

    monkeypatch.setattr(watched.watcher, "_look", look)
    watched.watcher.resume()
    await asyncio.wait_for(looked.wait(), 60)
    deadline = time.monotonic() + 60
    while watched.others._wanted or watched.others._asking is not None:
        assert time.monotonic() < deadline, "the loop asks on"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("moment", ["before the loop asks", "before the look", "before the sleep"])
async def test_nothing_of_others_is_missed_as_it_falls_asleep(
    watched: Watched, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    begin, wait = watched.others.begin, watched.others.wait
    done = []

    def commit(now: str) -> None:
        if now == moment and not done:
            done.append(now)
            watched.commit_elsewhere()

    def beginning(patience_s: float) -> bool:
        commit("before the loop asks")
        begun = begin(patience_s)
        commit("before the look")
        return begun

    def waiting(seconds: float) -> None:
        commit("before the sleep")
        wait(seconds)

    monkeypatch.setattr(watched.others, "begin", beginning)
    monkeypatch.setattr(watched.others, "wait", waiting)
    watched.watcher.resume()
    deadline = time.monotonic() + 60
    while not watched.told.is_set():
        assert time.monotonic() < deadline, f"{done} was not noticed"
        if not done:
            watched.commit_here()
        await asyncio.sleep(0.005)
    assert done == [moment]


async def test_in_memory_there_are_no_others() -> None:
    store = open_memory()
    others = OthersWatch(store, 0.02)
    assert not await asyncio.to_thread(others.begin, 60.0)
    assert not others._able
    store.close()


def test_what_is_in_memory_was_stored_here() -> None:
    tail = TailCache(1 << 20)
    assert not tail.reaches(7, 0)
    tail.add(7, StoredBatch(4, 3, 0, b"x"))
    assert tail.reaches(7, 7) and not tail.reaches(7, 8) and not tail.reaches(8, 1)
