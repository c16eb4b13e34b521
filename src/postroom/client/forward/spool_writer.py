"""A spool as the event loop sees it: messages land in its file, and are forwarded from there (R31).

Decides who waits: for room in the file, first come first served; for the commit that makes a message durable,
which is shared by all who came while the one before was under way. Forwarding runs beside it, for as long as
there is a queue to forward to, and never slows writing but by the disk they share. Must never tell that a
message is durable before its commit has returned, and must never lose what is durable: what is there when the
spool is closed stays for whoever opens it next.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ...config import DEFAULTS, Limits
from ...endpoint.endpoint import Endpoint
from ...errors import ClosedError, ForkError, PostroomError, StoreFull
from ...model.moves.forwarding import ForwardRow
from ...tasks import SharedTask, end
from ...units import format_bytes
from ..producer.parcel import Room
from .forwarder import Forwarder, Trouble
from .spool_file import Spooled, SpoolFile

__all__ = ["SpoolWriter"]


log = logging.getLogger("postroom.spool")

_Unwritten: TypeAlias = tuple[Sequence[ForwardRow], Callable[[Exception | None], None]]

_COMMIT_ROWS = 10_000


class SpoolWriter:
    def __init__(self, path: Path, limit_bytes: int, limits: Limits = DEFAULTS) -> None:
        self.path, self._limits, self._tuning = path, limits, limits.tuning.client
        self._limit = limit_bytes
        self._loop, self._pid = asyncio.get_running_loop(), os.getpid()
        self._opening = SharedTask(self._open)
        self._file: SpoolFile | None = None
        self._room = Room(limit_bytes)
        self._thread = ThreadPoolExecutor(1, "postroom-spool")
        self._pending: list[_Unwritten] = []
        self._writing = SharedTask(self._write)
        self._queue: tuple[Endpoint, str] | None = None
        self._forwarder: Forwarder | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._moved = asyncio.Event()
        self._closed = False

    # ---- opening ----

    async def open(self) -> SpoolFile:
        """Once for all who need it; whatever is wrong with the file is raised here, and tried again."""
        if os.getpid() != self._pid:
            raise ForkError(f"the spool {self.path} belongs to the parent process: open another in the child")
        if self._file is not None:
            return self._file
        if self._closed:
            raise ClosedError(f"the spool {self.path} is closed: open it again")
        return await self._opening.result()

    async def _open(self) -> SpoolFile:
        file = await asyncio.to_thread(SpoolFile, self.path, self._tuning)
        file.freed = self._freed
        self._room.taken = file.bytes
        self._file = file
        if file.messages:
            log.info("the spool %s has %d messages from before", self.path, file.messages)
        self._tasks.append(self._loop.create_task(self._tell_depth()))
        self._start()
        return file

    # ---- writing ----

    def try_room(self, size: int) -> bool:
        """Taken for these bytes, if it is open and has room and nobody waits for some."""
        return self._file is not None and not self._closed and self._room.try_take(size)

    async def make_room(self, size: int, deadline: float) -> None:
        """Taken for these bytes; StoreFull if there is none in time."""
        await self.open()
        try:
            async with asyncio.timeout_at(deadline):
                await self._room.take(size)
        except TimeoutError:
            raise self._full() from None

    def _full(self) -> StoreFull:
        depth = self.depth()
        why = "; ".join(trouble.reason for trouble in depth.troubles.values()) or "they are being forwarded"
        return StoreFull(
            f"the spool {self.path} is full: {depth.messages:,} messages have {format_bytes(depth.bytes)} of "
            f"the {format_bytes(self._limit)} allowed ({why}). This message was not stored: send it again "
            "when the queue has taken some, or allow more with spool_bytes=",
            messages=depth.messages,
            bytes=depth.bytes,
        )

    def add(self, rows: Sequence[ForwardRow], told: Callable[[Exception | None], None]) -> None:
        """Room was made for them. `told` is called when they are durable, or with what went wrong."""
        self._pending.append((rows, told))
        self._writing.start()

    async def _write(self) -> None:
        try:
            while self._pending:
                await self._commit(self._some())
        finally:
            self._moved.set()

    def _some(self) -> list[_Unwritten]:
        """What shares the next commit."""
        count, at = 0, 0
        while at < len(self._pending) and count < _COMMIT_ROWS:
            count += len(self._pending[at][0])
            at += 1
        some, self._pending = self._pending[:at], self._pending[at:]
        return some

    async def _commit(self, some: Sequence[_Unwritten]) -> None:
        rows = [row for part, _ in some for row in part]
        assert self._file is not None, "it was opened before room was made"
        failure: Exception | None = None
        try:
            await self._loop.run_in_executor(self._thread, self._file.add, rows)
        except Exception as error:
            failure = error
            self._room.give_back(sum(row.size for row in rows))
        for _, told in some:
            told(failure)
        if self._forwarder is not None:
            self._forwarder.wake()

    # ---- forwarding ----

    def forward(self, endpoint: Endpoint, client: str) -> None:
        """From now on, to this queue."""
        self._queue = endpoint, client
        self._start()

    def _start(self) -> None:
        if self._file is not None and self._queue is not None and not self._closed:
            self._tasks.append(self._loop.create_task(self._forward(self._file, *self._queue)))

    async def _forward(self, file: SpoolFile, endpoint: Endpoint, client: str) -> None:
        while True:
            forwarder = self._forwarder = Forwarder(endpoint, file, client=client, limits=self._limits)
            try:
                await forwarder.run()
            except PostroomError as error:
                log.error("the spool %s cannot be emptied now: %s", self.path, error)
            except Exception:
                log.exception("the spool %s cannot be emptied now", self.path)
            await asyncio.to_thread(forwarder.let_go)
            await asyncio.sleep(self._tuning.spool_again_s)

    def _freed(self, size: int) -> None:
        """Called by the forwarder's thread."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._gave_back, size)

    def _gave_back(self, size: int) -> None:
        self._room.give_back(size)
        self._moved.set()

    async def forwarded(self, timeout_s: float | None = None, *, unless_in_trouble: bool = False) -> bool:
        """Wait until nothing is left here; False: the time was over."""
        file = await self.open()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._pending or self._writing.under_way or file.messages:
                    if unless_in_trouble and (self._forwarder is None or self._forwarder.troubles):
                        return False
                    self._moved.clear()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(self._tuning.spool_check_s if unless_in_trouble else None):
                            await self._moved.wait()
                return True
        return False

    # ---- people ----

    def depth(self) -> Spooled:
        if self._file is None:
            return Spooled(0, 0, 0, {})
        depth = self._file.depth()
        if self._forwarder is None:
            return depth
        return depth._replace(troubles={**depth.troubles, **self._forwarder.troubles})

    async def tell(self, trouble: Trouble | None) -> None:
        """Why nothing can be forwarded at all."""
        file = await self.open()
        await self._loop.run_in_executor(self._thread, file.tell, "", trouble)

    async def _tell_depth(self) -> None:
        while True:
            await asyncio.sleep(self._tuning.spool_told_s)
            depth = self.depth()
            if depth.oldest_age_ms >= self._tuning.spool_told_s * 1000:
                reasons = "; ".join(trouble.reason for trouble in depth.troubles.values())
                log.warning(
                    "%d messages (%s) wait in the spool %s, the oldest for %d s: %s",
                    depth.messages,
                    format_bytes(depth.bytes),
                    self.path,
                    depth.oldest_age_ms // 1000,
                    reasons or "they are being forwarded",
                )

    # ---- the end ----

    async def close(self) -> None:
        """What was added is durable; what can be forwarded quickly is. The rest stays in the file."""
        if self._closed:
            return
        await self._opening.settle()
        if self._file is not None:
            await self.forwarded(self._tuning.spool_stop_s, unless_in_trouble=True)
        self._closed = True
        await self._writing.settle()
        await end(self._tasks)
        if self._forwarder is not None:
            await self._forwarder.stop()
        await asyncio.to_thread(self._thread.shutdown)
        if self._file is not None:
            if self._file.messages:
                log.warning(
                    "%d messages stay in the spool %s: they are forwarded when it is opened again",
                    self._file.messages,
                    self.path,
                )
            await asyncio.to_thread(self._file.close)
            self._file = None
