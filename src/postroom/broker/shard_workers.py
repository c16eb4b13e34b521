"""What works on each shard by itself: a writer, a watcher and a mover of delayed messages (R6).

Each has a thread of its own, so that a shard that is away holds up nobody but those who wait for it. Decides
nothing: sends appends to the writer of their partition's shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..config import Limits
from ..errors import StoreUnavailable
from ..store.contract import Append, Appended, News, Store, StoredBatch
from .deliver.readable import TailCache
from .metrics import Figures
from .moves.schedule import ScheduleMover, ScheduleThread
from .publish.writer import LineKey, Writer
from .waiters import Awaited, WatcherThread

__all__ = ["ShardWork", "nothing_stored"]

Told = Callable[[str, News | None, dict[int, int] | None], None]
"""Is told news in the event loop: by which shard, of its log, and when groups have something due there."""


class ShardWork:
    """Made in the event loop it belongs to; begins at once."""

    def __init__(
        self,
        store: Store,
        limits: Limits,
        holder: str,
        tail: TailCache,
        in_thread: Callable[..., Awaitable[Any]],
        *,
        appended: Callable[[dict[int, int]], None],
        due_moved: Callable[[Sequence[tuple[int, StoredBatch]]], None],
        told: Told,
        awaited: Awaited,
    ) -> None:
        self._store = store
        self._in_thread = in_thread
        self._limits, self._holder, self._tail = limits, holder, tail
        self._appended, self._due_moved, self._told, self._awaited = appended, due_moved, told, awaited
        self._writers: dict[str, Writer] = {}
        self._watchers: list[WatcherThread] = []
        self._schedules: list[ScheduleThread] = []
        self._waited_for = False  # somebody waits for news
        self._figures: Figures | None = None
        for name, part in store.parts().items():
            self._begin(name, part)

    def _begin(self, name: str, part: Store) -> None:
        writer = self._writers[name] = Writer(part.log, self._tail, self._limits, self._appended)
        watcher = WatcherThread(part, self._limits, partial(self._told, name))
        watcher.awaited = self._awaited
        watching = partial(_watch_schedule, watcher)
        mover = ScheduleMover(part, self._limits, self._holder, self._due_moved, watching, name)
        schedule = ScheduleThread(mover, part.now_ms)
        writer.scheduled = watcher.on_due = schedule.scheduled
        self._watchers.append(watcher)
        self._schedules.append(schedule)

    def add(self, name: str) -> None:
        """The store has one more shard."""
        self._begin(name, self._store.parts()[name])
        if self._figures is not None:
            self.watch(self._figures)
        if self._waited_for:
            self._watchers[-1].resume()

    async def append(self, append: Append, line: LineKey | None = None) -> Appended:
        name = self._store.known_shard(append.partition_id)
        if name is None:
            with nothing_stored():
                name = await self._in_thread(self._store.shard_of, append.partition_id)
        writer = self._writers.get(name) or self._writers[""]  # which says what is wrong
        return await writer.append(append, line)

    def watch(self, figures: Figures) -> None:
        self._figures = figures
        for name, writer in self._writers.items():
            writer.committed = partial(figures.committed, name)
            figures.queued[name or "first"] = partial(getattr, writer, "queued_bytes")

    # ---- waiting ----

    def resume(self) -> None:
        """Somebody waits for news."""
        self._waited_for = True
        for watcher in self._watchers:
            watcher.resume()

    def pause(self) -> None:
        self._waited_for = False
        for watcher in self._watchers:
            watcher.pause()

    def clock_moved(self) -> None:
        for schedule in self._schedules:
            schedule.clock_moved()

    def wake(self) -> None:
        """A shard has come back; from any thread."""
        for schedule in self._schedules:
            schedule.scheduled(0)

    # ---- the end ----

    async def close_writers(self) -> None:
        """Store what waits."""
        await asyncio.gather(*(writer.close() for writer in self._writers.values()))

    def stop(self) -> None:
        """The movers; blocking."""
        for schedule in self._schedules:
            schedule.stop()

    async def close_watchers(self) -> None:
        await asyncio.gather(*(watcher.close() for watcher in self._watchers))


@contextmanager
def nothing_stored() -> Iterator[None]:
    """Around what comes before a batch is given to the store: an error there says that it is not stored."""
    try:
        yield
    except StoreUnavailable as error:
        error.details["stored"] = False
        raise


def _watch_schedule(watcher: WatcherThread, wanted: bool) -> None:
    (watcher.resume if wanted else watcher.pause)("schedule")
