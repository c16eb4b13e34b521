"""What works on each shard by itself: a writer, a watcher and a mover of delayed messages (R6).

Each has a thread of its own, so that a shard that is away holds up nobody but those who wait for it. Decides
nothing: sends appends to the writer of their partition's shard.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

from ..config import Limits
from ..errors import StoreUnavailable
from ..store.contract import Append, Appended, News, Store, StoredBatch
from .deliver.readable import TailCache
from .metrics import Figures
from .moves.schedule import ScheduleMover, ScheduleThread
from .publish.writer import Writer
from .waiters import Awaited, WatcherThread

__all__ = ["ShardWork", "never_stored"]

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
        heeds_own: Callable[[], bool],
    ) -> None:
        self._store = store
        self._in_thread = in_thread
        self._limits, self._holder, self._tail = limits, holder, tail
        self._appended, self._due_moved, self._told, self._awaited = appended, due_moved, told, awaited
        self._heeds_own = heeds_own
        self._writers: dict[str, Writer] = {}
        self._watchers: list[WatcherThread] = []
        self._schedules: list[ScheduleThread] = []
        self._waited_for = False  # somebody waits for news
        self._figures: Figures | None = None
        for name, part in store.parts().items():
            self._begin(name, part)

    def _begin(self, name: str, part: Store) -> None:
        writer = self._writers[name] = Writer(
            part.log, self._tail, self._limits, self._appended, at_once=part.at_once is not None
        )
        watcher = WatcherThread(part, self._limits, partial(self._told, name))
        watcher.awaited, watcher.stored_here = self._awaited, self._tail.reaches
        watcher.heeds_own = self._heeds_own
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

    async def append(self, appends: Sequence[Append]) -> list[Appended | BaseException]:
        """Appends of the broker's own, in this order; those of producers go to `writer_of` at once.

        Returns what became of each.
        """
        writers: dict[int, Writer] = {}
        for one in {append.partition_id for append in appends}:
            writers[one] = self.writer_of(one) or await self.find_writer(one)
        stored = [writers[append.partition_id].append(append) for append in appends]
        return await asyncio.gather(*stored, return_exceptions=True)

    def writer_of(self, partition_id: int) -> Writer | None:
        """The writer of the partition's shard; None: the store has to be asked which that is."""
        name = self._store.known_shard(partition_id)
        return None if name is None else self._writers.get(name)

    async def find_writer(self, partition_id: int) -> Writer:
        try:
            name = await self._in_thread(self._store.shard_of, partition_id)
        except StoreUnavailable as error:
            raise never_stored(error) from None
        return self._writers.get(name) or self._writers[""]  # which says what is wrong

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


def never_stored(error: StoreUnavailable) -> StoreUnavailable:
    """The error of what comes before a batch is given to the store: it says that the batch is not stored."""
    error.details["stored"] = False
    return error


def _watch_schedule(watcher: WatcherThread, wanted: bool) -> None:
    (watcher.resume if wanted else watcher.pause)("schedule")
