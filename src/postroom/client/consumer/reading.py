"""Reading without a group: browse what a topic keeps, and settle nothing.

Decides from which offset to which each partition is read: one after another up to an end that is fixed when
reading begins, or, when following, all at once as messages arrive. Batches wait as they are stored, and one
is open at a time; one that cannot be read is skipped, and the log says where it is. Must never change
anything in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from datetime import datetime
from typing import NamedTuple, TypeAlias

from ...backoff import pause
from ...config import DEFAULTS, Limits
from ...endpoint.endpoint import Endpoint
from ...errors import InvalidSetting, PostroomError
from ...model.policy.settings import Start
from ...model.topology.route import Range, Route
from ...store.contract import StoredBatch
from ...tasks import end
from ...units import moment_ms
from ..codec import Expiry, unpack
from ..message import Received
from ..owner_check import Guard
from .opened import Browsed, readable

__all__ = ["Position", "Reading", "as_start"]

Position: TypeAlias = str | datetime | Mapping[int, int]
""""earliest", "latest", a datetime with a time zone, or {partition: offset}."""

_CHUNK_MESSAGES = 1000
_CHUNK_BYTES = 4 * 1024 * 1024
_QUEUED_CHUNKS = 4


def as_start(value: Position | Start, *, name: str = "start") -> Start:
    if isinstance(value, Start):
        return value
    if isinstance(value, datetime):
        return Start("time", time_ms=moment_ms(value, name=name))
    if value == "earliest" or value == "latest":
        return Start("earliest") if value == "earliest" else Start("latest")
    if (
        isinstance(value, Mapping)
        and value
        and all(_is_offset(p) and _is_offset(o) for p, o in value.items())
    ):
        return Start("offsets", offsets=tuple(sorted(value.items())))
    raise InvalidSetting(
        f"{name}={value!r}: choose 'earliest', 'latest', a datetime with a time zone, or "
        "{partition: offset} with whole numbers from 0 up",
        name=name,
    )


def _is_offset(value: object) -> bool:
    return type(value) is int and value >= 0


class _Stored(NamedTuple):
    """A batch of a partition, not opened yet, and which of its offsets are wanted."""

    at: Browsed
    batch: StoredBatch
    first: int
    end: int | None


class Reading:
    """What one `read` call iterates over."""

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        route: Route,
        *,
        start: Start,
        end: Start | None,
        partition: int | None,
        follow: bool,
        expired: bool = False,
        limits: Limits = DEFAULTS,
    ) -> None:
        """`expired`: also what has expired and is not dropped yet."""
        self._limits, self._sealed_s = limits, limits.tuning.client.sealed_s
        self._endpoint, self._guard, self._route = endpoint, guard, route
        self._expired = expired
        self._start, self._end, self._follow = start, end, follow
        self._only = None if partition is None else route.readable(partition)

    async def messages(self) -> AsyncGenerator[Received, None]:
        starts = await self._endpoint.resolve(self._route.topic, self._start)
        for number, offset in self._start.offsets:
            found = starts.get(self._route.readable(number).partition_id, offset)
            if found < offset:
                raise InvalidSetting(
                    f"partition {number} of topic {self._route.topic!r} ends at offset {found}, and {offset} "
                    f"is beyond it: choose {found} (its end) or less"
                )
        chunks = self._following(starts) if self._follow else self._bounded(starts)
        async with aclosing(chunks):
            async for chunk in chunks:
                for message in self._opened(chunk):
                    yield message
                    self._guard.check()

    def _opened(self, found: _Stored) -> list[Received]:
        kept = readable(found.batch, found.at, found.first, found.end)
        return unpack(kept, found.at, None if self._expired else Expiry(self._endpoint.now_ms()))

    async def _bounded(self, starts: dict[int, int]) -> AsyncGenerator[_Stored, None]:
        """One partition after the other, predecessors first: so each key is in order (R27)."""
        ends = await self._ends()
        for piece in (self._only,) if self._only else self._route.partitions:
            chunks = self._partition(piece, starts[piece.partition_id], ends[piece.partition_id])
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield chunk

    async def _ends(self) -> dict[int, int]:
        """The end of each partition; of those that `end` does not name, what is there now."""
        now = await self._endpoint.resolve(self._route.topic, Start("latest"))
        if self._end is None:
            return now
        asked = await self._endpoint.resolve(self._route.topic, self._end)
        if self._end.kind == "offsets":
            named = {self._route.readable(number).partition_id for number, _ in self._end.offsets}
            asked = {pid: end for pid, end in asked.items() if pid in named}
        return {pid: min(end, asked.get(pid, end)) for pid, end in now.items()}

    async def _following(self, starts: dict[int, int]) -> AsyncGenerator[_Stored, None]:
        """All partitions at once, in order of arrival; successors once what they follow is read (R27)."""
        queue: asyncio.Queue[_Stored | Exception | None] = asyncio.Queue(_QUEUED_CHUNKS)
        pumps: dict[int, asyncio.Task[None]] = {}

        async def pump(piece: Range) -> None:
            try:
                async for chunk in self._partition(piece, starts.get(piece.partition_id, 0), None):
                    await queue.put(chunk)
                await queue.put(None)  # it was sealed
            except Exception as error:
                await queue.put(error)

        def begin() -> None:
            for piece in (self._only,) if self._only else self._route.partitions:
                before = [pumps.get(one) for one in self._route.predecessors.get(piece.partition_id, ())]
                ready = self._only or all(task is not None and task.done() for task in before)
                if piece.partition_id not in pumps and ready:
                    pumps[piece.partition_id] = self._guard.loop.create_task(pump(piece))

        begin()
        try:
            while True:
                found = await queue.get()
                if isinstance(found, Exception):
                    raise found
                if found is not None:
                    yield found
                elif self._only:
                    return
                else:
                    await self._go_on(pumps)
                    begin()
        finally:
            await end(pumps.values())

    async def _go_on(self, pumps: Mapping[int, asyncio.Task[None]]) -> None:
        """A partition was read to its seal: look at the route until its successors are there."""
        while True:
            await asyncio.sleep(self._sealed_s)
            self._route = await self._endpoint.route(self._route.topic)
            if not any(pumps[r.partition_id].done() for r in self._route.ranges if r.partition_id in pumps):
                return

    async def _partition(self, piece: Range, offset: int, end: int | None) -> AsyncGenerator[_Stored, None]:
        """Batches of a partition from `offset` up to `end` (excluded); None: for ever, or until its seal."""
        browsed = Browsed(self._route.topic, piece.partition, piece.partition_id)
        tries = 0
        while end is None or offset < end:
            try:
                fetched = await self._endpoint.fetch(
                    self._route.topic,
                    piece.partition_id,
                    offset,
                    max_messages=_CHUNK_MESSAGES,
                    max_bytes=_CHUNK_BYTES,
                    wait_ms=self._limits.poll_wait_ms if end is None else 0,
                )
            except PostroomError as error:
                tries += 1
                if not error.retriable or tries > 20:
                    raise
                await asyncio.sleep(pause(tries))
                continue
            tries = 0
            if not fetched.batches and (end is not None or fetched.sealed):
                return  # dropped by retention meanwhile, or read to its end
            for batch in fetched.batches:
                first, offset = offset, max(offset, batch.last_offset + 1)
                yield _Stored(browsed, batch, first, end)
