"""A fetch by offsets: what a log has from there on, as one look into the store finds it.

Decides nothing about who may read, and waits for nothing. Whoever fetches learns where the log begins and
ends as well, so that a gap is seen. Both are looked up by every fetch; batches never change once they are
stored, and so may have been read before they were asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from ...config import Limits
from ...endpoint.values import Fetched
from ...errors import PostroomError
from ...store.contract import Bounds, Store, StoredBatch
from ...store.contract.values import WouldWaitError
from ..waiters import Waiters, wait
from ..workers import Workers
from .shared import Deliveries

__all__ = ["FetchVerbs", "ReadAhead", "Wanted", "fetch_each", "fetch_stored"]

Read = Callable[[int, int, int, int], list[StoredBatch]]
"""Takes a partition's id, an offset, and the most messages and bytes."""


_MOST_MESSAGES = 100_000  # of one partition in one answer: bytes are the limit that counts
_MOST_BYTES = 32 * 1024 * 1024  # that are read ahead
_LEAST_BYTES = 64 * 1024  # that count for one of them
_FEW = 16  # partitions that are looked up in the event loop (I22)


class Wanted(NamedTuple):
    """A partition from an offset on, and how many bytes of it; 0: only where it begins and ends."""

    partition_id: int
    offset: int
    max_bytes: int


def fetch_each(store: Store, wanted: Sequence[Wanted], max_bytes: int, read: Read) -> list[Fetched]:
    """Batches of several partitions, in this order, up to so many bytes; the first batch always comes.

    One look for the edges of all of them: most have nothing new.
    """
    edges = store.log.bounds({one.partition_id for one in wanted})
    found: list[Fetched] = []
    left = max_bytes
    for one in wanted:
        bounds = edges[one.partition_id]
        batches: tuple[StoredBatch, ...] = ()
        if left > 0 and one.max_bytes > 0 and bounds.start <= one.offset < bounds.end:
            most = min(one.max_bytes, left)
            batches = tuple(read(one.partition_id, one.offset, _MOST_MESSAGES, most))
            left -= sum(len(batch.data) for batch in batches)
            if not batches:
                bounds = _skip_lost(store, one.partition_id, bounds)
        found.append(Fetched(batches, bounds.start, bounds.end, bounds.sealed))
    return found


def fetch_stored(
    store: Store, partition_id: int, offset: int, max_messages: int, max_bytes: int, read: Read | None = None
) -> Fetched:
    """Batches from the offset on. `read`: where they are looked for, such as a cache before the log."""
    bounds = store.log.bounds([partition_id])[partition_id]
    start = max(offset, bounds.start)
    found: list[StoredBatch] = []
    if start < bounds.end:
        if read is None:
            found = store.log.read(partition_id, start, max_messages=max_messages, max_bytes=max_bytes)
        else:
            found = read(partition_id, start, max_messages, max_bytes)
        if not (found and found[0].base_offset <= start):
            bounds = _skip_lost(store, partition_id, bounds)
    return Fetched(tuple(found), bounds.start, bounds.end, bounds.sealed)


def _skip_lost(store: Store, partition_id: int, bounds: Bounds) -> Bounds:
    """A crash may empty a volatile log: nobody is to wait for what was in it (R3)."""
    if not store.log.is_volatile(partition_id):
        return bounds
    store.log.skip_lost(partition_id)
    return store.log.bounds([partition_id])[partition_id]


class ReadAhead:
    """Batches that somebody who is behind will ask for next, read while the last answer is digested.

    A Kafka client asks for the next megabyte when it has read the last one: without this it waits for the
    store each time. Bounded in bytes: without room nothing is read ahead. Used in the event loop only.
    """

    def __init__(
        self, run: Callable[..., Coroutine[Any, Any, list[StoredBatch]]], read: Read, limits: Limits
    ) -> None:
        """`run`: calls a function in a thread."""
        self._run, self._read = run, read
        self._kept_s = limits.tuning.broker.read_ahead_s
        self._loop = asyncio.get_running_loop()
        self._entries: dict[tuple[int, int], _Ahead] = {}  # by partition and offset, oldest first
        self._bytes = 0

    async def take(self, wanted: Iterable[Wanted]) -> dict[tuple[int, int], list[StoredBatch]]:
        """What was read ahead of these, by partition and offset; it is not kept."""
        found: dict[tuple[int, int], list[StoredBatch]] = {}
        for one in wanted if self._entries else ():
            key = one.partition_id, one.offset
            if one.max_bytes > 0 and (entry := self._forget(key)) is not None:
                found[key] = await entry.reading
        return found

    def begin(self, partition_id: int, offset: int, max_bytes: int) -> None:
        """Read from there on, if there is room for so much."""
        key, now = (partition_id, offset), self._loop.time()
        while self._entries and next(iter(self._entries.values())).began < now - self._kept_s:
            self._forget(next(iter(self._entries)))
        size = max(max_bytes, _LEAST_BYTES)
        if key not in self._entries and self._bytes + size <= _MOST_BYTES:
            entry = self._entries[key] = _Ahead(size, now)
            self._bytes += size
            entry.reading = self._loop.create_task(self._batches(key, entry, max_bytes))

    async def _batches(self, key: tuple[int, int], entry: _Ahead, max_bytes: int) -> list[StoredBatch]:
        try:
            found = await self._run(self._read, *key, _MOST_MESSAGES, max_bytes)
        except PostroomError:  # whoever asks for it is told
            return []
        if self._entries.get(key) is entry:  # a batch may be larger than what was asked for
            size = sum(len(batch.data) for batch in found)
            self._bytes += size - entry.bytes
            entry.bytes = size
        return found

    def _forget(self, key: tuple[int, int]) -> _Ahead | None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._bytes -= entry.bytes
        return entry


@dataclass(slots=True, eq=False)
class _Ahead:
    bytes: int
    began: float  # by the loop's clock
    reading: asyncio.Task[list[StoredBatch]] = field(init=False)


class FetchVerbs:
    """The part of a broker that reads by offsets: for whoever browses, and for Kafka clients."""

    store: Store
    _loop: asyncio.AbstractEventLoop
    _limits: Limits
    _waiters: Waiters
    _workers: Workers
    _deliveries: Deliveries
    _ahead: ReadAhead
    _closed: bool

    async def fetch(
        self, topic: str, partition_id: int, offset: int, *, max_messages: int, max_bytes: int, wait_ms: int
    ) -> Fetched:
        deadline = self._loop.time() + min(wait_ms, self._limits.poll_wait_ms) / 1000
        while True:
            with self._waiters.listening([("partition", partition_id)]) as news:
                fetched = await self._workers.run_for(
                    partition_id, self._fetch, partition_id, offset, max_messages, max_bytes
                )
                if fetched.batches or fetched.sealed or self._loop.time() >= deadline or self._closed:
                    return fetched
                await wait(news, deadline - self._loop.time())

    def _fetch(self, partition_id: int, offset: int, max_messages: int, max_bytes: int) -> Fetched:
        return fetch_stored(self.store, partition_id, offset, max_messages, max_bytes, self._deliveries.read)

    async def fetch_each(self, wanted: Sequence[Wanted], max_bytes: int) -> list[Fetched]:
        """What there is of several partitions at this moment; `max_bytes` of all together, but one batch."""
        read = partial(_read_known, await self._ahead.take(wanted), self._deliveries.read)
        found: list[Fetched] | None = None
        if len(wanted) <= _FEW:
            with suppress(WouldWaitError):  # what is not in memory is read by a thread
                found = self._workers.run_here(fetch_each, self.store, wanted, max_bytes, read)
        if found is None:
            found = await self._workers.run(fetch_each, self.store, wanted, max_bytes, read)
        for one, fetched in zip(wanted, found, strict=True):
            if fetched.batches:
                self._read_on(one, fetched, max_bytes)
        return found

    def _read_on(self, one: Wanted, fetched: Fetched, max_bytes: int) -> None:
        """Read ahead for whoever is behind what is in memory."""
        after = fetched.batches[-1].last_offset + 1
        if after < fetched.end and not self._deliveries.remembers(one.partition_id, after):
            self._ahead.begin(one.partition_id, after, min(one.max_bytes, max_bytes))

    def arrivals(self, partition_ids: Iterable[int]) -> AbstractContextManager[asyncio.Event]:
        """An event that is set when something arrives in one of these partitions, or a route may be new."""
        return self._waiters.listening([("partition", one) for one in partition_ids])


def _read_known(
    known: Mapping[tuple[int, int], Sequence[StoredBatch]],
    read: Read,
    partition_id: int,
    offset: int,
    max_messages: int,
    max_bytes: int,
) -> list[StoredBatch]:
    """What is known already, as far as it fits; else what is read. The first batch always fits."""
    found: list[StoredBatch] = []
    for batch in known.get((partition_id, offset), ()):
        max_bytes -= len(batch.data)
        if found and max_bytes < 0:
            break
        found.append(batch)
    return found or read(partition_id, offset, max_messages, max_bytes)
