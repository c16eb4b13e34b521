"""A fetch by offsets: what a log has from there on, as one look into the store finds it.

Decides nothing about who may read, and waits for nothing. Whoever fetches learns where the log begins and
ends as well, so that a gap is seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from ...config import Limits
from ...endpoint.values import Fetched
from ...store.contract import Bounds, Store, StoredBatch
from ..waiters import Waiters, wait
from ..workers import Workers
from .shared import Deliveries

__all__ = ["FetchVerbs", "Wanted", "fetch_each", "fetch_stored"]

Read = Callable[[int, int, int, int], list[StoredBatch]]
"""Takes a partition's id, an offset, and the most messages and bytes."""


_MOST_MESSAGES = 100_000  # of one partition in one answer: bytes are the limit that counts


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


class FetchVerbs:
    """The part of a broker that reads by offsets: for whoever browses, and for Kafka clients."""

    store: Store
    _loop: asyncio.AbstractEventLoop
    _limits: Limits
    _waiters: Waiters
    _workers: Workers
    _deliveries: Deliveries
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
        return await self._workers.run(fetch_each, self.store, wanted, max_bytes, self._deliveries.read)

    def arrivals(self, partition_ids: Iterable[int]) -> AbstractContextManager[asyncio.Event]:
        """An event that is set when something arrives in one of these partitions, or a route may be new."""
        return self._waiters.listening([("partition", one) for one in partition_ids])
