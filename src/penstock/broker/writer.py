"""The writer: one thread that gathers what waits into one flushed transaction (group commit, R37).

Appends that arrive while a commit is under way go into the next one together, so the cost of a flush is
shared by all that wait for it. If the transaction fails, each append is run again by itself, in order:
one that fails does not take its neighbours with it (I2), and one that was stored after all is recognised
by its sequence (I3). If the store cannot be reached, all fail alike, and their senders repeat them. The
queue is bounded in bytes: a full one slows its callers, it drops nothing (I17).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from ..config import Limits
from ..errors import ClosedError, PenstockError, StoreBusy, StoreError, StoreUnavailable
from ..model.batch import read_header, with_base_offset
from ..store.contract import Append, Appended, Log, StoredBatch
from .tail import TailCache

__all__ = ["Writer"]


@dataclass(slots=True)
class _Waiting:
    append: Append
    done: asyncio.Future[Appended]


class Writer:
    """`appended` is called in the event loop with the new ends of partitions, by id.

    `scheduled` is called in the writer's thread with the due moment of a delayed batch.
    """

    def __init__(
        self, log: Log, tail: TailCache, limits: Limits, appended: Callable[[dict[int, int]], None]
    ) -> None:
        self._log = log
        self._tail = tail
        self._limits = limits
        self._appended = appended
        self.scheduled: Callable[[int], None] = lambda due_at: None
        self._loop = asyncio.get_running_loop()
        self._queue: SimpleQueue[_Waiting | None] = SimpleQueue()
        self._pending_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="penstock-writer", daemon=True)
        self._thread.start()

    async def append(self, append: Append) -> Appended:
        while self._pending_bytes > self._limits.writer_queue_bytes:
            self._room.clear()
            await self._room.wait()
        if self._closed:
            raise ClosedError("this connection is closed; call penstock.connect again")
        waiting = _Waiting(append, self._loop.create_future())
        self._pending_bytes += len(append.batch)
        self._queue.put(waiting)
        return await waiting.done

    async def close(self) -> None:
        """Store what waits, then end."""
        if not self._closed:
            self._closed = True
            self._room.set()
            self._queue.put(None)
        await asyncio.to_thread(self._thread.join)

    # ---- in the writer's thread ----

    def _run(self) -> None:
        ended = False
        while not ended:
            group, ended = self._gather()
            if group:
                results = self._store([w.append for w in group])
                stored = self._remember(group, results)
                self._loop.call_soon_threadsafe(self._answer, group, results, stored)

    def _gather(self) -> tuple[list[_Waiting], bool]:
        """Wait for one, then take what is there already, up to the limits of a commit."""
        group: list[_Waiting] = []
        size = 0
        waiting = self._queue.get()
        while waiting is not None:
            group.append(waiting)
            size += len(waiting.append.batch)
            if (
                self._queue.empty()
                or size >= self._limits.commit_bytes
                or len(group) >= self._limits.commit_batches
            ):
                return group, False
            waiting = self._queue.get()
        return group, True

    def _store(self, appends: Sequence[Append]) -> list[Appended | PenstockError]:
        try:
            return self._log.append(appends)
        except PenstockError as error:
            self._tail.forget({append.partition_id for append in appends})  # who knows what is stored now
            if len(appends) == 1 or isinstance(error, StoreUnavailable):
                return [error] * len(appends)
        except Exception as error:
            return [_unexpected(error)] * len(appends)
        return self._store_each(appends)

    def _store_each(self, appends: Sequence[Append]) -> list[Appended | PenstockError]:
        """One by one. Whoever holds a partition's lock for long is waited for once, not once for each."""
        results: list[Appended | PenstockError] = []
        busy: dict[int, StoreBusy] = {}
        for append in appends:
            result = busy.get(append.partition_id) or self._store([append])[0]
            if isinstance(result, StoreBusy):
                busy[append.partition_id] = result
            results.append(result)
        return results

    def _remember(self, group: list[_Waiting], results: list[Appended | PenstockError]) -> dict[int, int]:
        ends: dict[int, int] = {}
        for waiting, result in zip(group, results, strict=True):
            if isinstance(result, Appended) and waiting.append.due_at:
                self.scheduled(waiting.append.due_at)
            elif isinstance(result, Appended) and not result.duplicate and result.base_offset >= 0:
                batch, partition_id = waiting.append.batch, waiting.append.partition_id
                records = read_header(batch).records - len(result.repeats)
                if not result.repeats:  # else what is stored is another batch
                    data = with_base_offset(batch, result.base_offset)
                    stored = StoredBatch(result.base_offset, records, result.appended_at, data)
                    self._tail.add(partition_id, stored)
                ends[partition_id] = result.base_offset + records
        return ends

    # ---- in the event loop ----

    def _answer(
        self, group: list[_Waiting], results: list[Appended | PenstockError], stored: dict[int, int]
    ) -> None:
        for waiting, result in zip(group, results, strict=True):
            self._pending_bytes -= len(waiting.append.batch)
            if waiting.done.done():
                continue
            if isinstance(result, Appended):
                waiting.done.set_result(result)
            else:
                waiting.done.set_exception(result)
        if self._pending_bytes <= self._limits.writer_queue_bytes:
            self._room.set()
        if stored:
            self._appended(stored)


def _unexpected(error: Exception) -> StoreError:
    failure = StoreError(f"the store failed in an unexpected way ({error!r}); nothing was confirmed")
    failure.__cause__ = error
    return failure
