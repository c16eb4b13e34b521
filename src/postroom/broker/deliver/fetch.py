"""A fetch by offsets: what a log has from there on, as one look into the store finds it.

Decides nothing about who may read, and waits for nothing. Whoever fetches learns where the log begins and
ends as well, so that a gap is seen.
"""

from __future__ import annotations

from collections.abc import Callable

from ...endpoint.values import Fetched
from ...store.contract import Bounds, Store, StoredBatch

__all__ = ["fetch_stored"]

Read = Callable[[int, int, int, int], list[StoredBatch]]
"""Takes a partition's id, an offset, and the most messages and bytes."""


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
