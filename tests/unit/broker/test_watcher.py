"""The watcher: it tells commits of other processes from those of its own, and asks less often for those."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

from postroom.broker.deliver.readable import TailCache
from postroom.broker.waiters import WatcherThread
from postroom.config import DEFAULTS
from postroom.store.contract import News, StoredBatch

_CALM = 60  # looks


class Commits:
    """A store with one partition, in which somebody commits all the time."""

    def __init__(self) -> None:
        self.end, self.most, self.enough = 0, 0, threading.Event()
        self.looks: list[float] = []  # when it was looked
        self.log = self.progress = self
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


def test_what_is_in_memory_was_stored_here() -> None:
    tail = TailCache(1 << 20)
    assert not tail.reaches(7, 0)
    tail.add(7, StoredBatch(4, 3, 0, b"x"))
    assert tail.reaches(7, 7) and not tail.reaches(7, 8) and not tail.reaches(8, 1)
