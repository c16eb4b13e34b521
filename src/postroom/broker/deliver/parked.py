"""Taking messages out of parked lines (I27): the next ones of a key, looked for in the log.

A line says that the messages of its key between two offsets are unsettled; it does not say where they are.
So batches are opened here, a bounded number at a time, which costs only groups that have a failing key.
Blocking code, run in worker threads. Decides nothing about deliveries: the store's verb does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...endpoint.values import Grant, Lease, PollReply, UnparkRequest
from ...errors import CorruptBatch
from ...model.delivery.delivery import NOBODY, Span
from ...model.messages.batch import stored_records
from ...store.contract import Group, Store, StoredBatch
from ..topology.catalog_cache import CatalogCache

__all__ = ["ParkedLines"]

_LOOKED_AT = 20_000  # messages looked through in one go, whatever is found
_READ = 2_000  # of them, read at once
_READ_BYTES = 4 * 2**20
_MOST_BYTES = 16 * 2**20  # of batches in one answer, whatever is asked for


@dataclass(slots=True)
class _Found:
    spans: list[Span]
    batches: list[StoredBatch]
    upto: int  # everything up to here was looked at


Read = Callable[[int, int, int, int], list[StoredBatch]]
"""Batches of a partition from an offset on: so many messages, and bytes, at most."""


class ParkedLines:
    def __init__(self, store: Store, catalog: CatalogCache, read: Read) -> None:
        self._store, self._catalog, self._read = store, catalog, read

    def unpark(self, request: UnparkRequest) -> PollReply:
        """The next messages of the line; the grant's position is where to look on."""
        for topic, group in self._catalog.sources(request.topic, request.group):
            for piece in topic.route.partitions:
                if piece.partition_id == request.partition_id and request.token != NOBODY:
                    return self._unpark(request, topic.name, piece.partition, group)
        return PollReply((), 0, lost=(request.partition_id,))  # it is gone, and all that was held of it

    def _unpark(self, request: UnparkRequest, topic: str, number: int, group: Group) -> PollReply:
        place, lease_ms = request.partition_id, group.settings.lease_ms
        peek = self._store.progress.peek(group, [place]).get(place)
        if peek is None or peek.holder.token != request.token:
            return PollReply((), lease_ms, lost=(place,))  # before anything is read for it
        found = self._find(place, request)
        granted = self._store.progress.unpark(
            group, place, request.token, request.member, request.line, found.spans, found.upto,
            on_delivery=request.on_delivery,
        )  # fmt: skip
        if granted.holder is not None:
            return PollReply((), lease_ms, lost=(place,))
        leases = tuple(Lease(d.first, d.last, d.attempt, d.alone) for d in granted.deliveries)
        batches = tuple(found.batches) if leases else ()
        following = request.first if granted.draining else found.upto + 1
        grant = Grant(topic, number, place, leases, batches, following)
        return PollReply((grant,), lease_ms)

    def leave_order(self, group: Group, partition_id: int) -> None:
        """The group is shared now: some of what is parked waits for anybody from now on."""
        for line in self._store.progress.lines(group, partition_id)[:1]:
            ask = UnparkRequest(
                group.topic, group.name, "", NOBODY, partition_id, line.id, line.key, line.first, line.last,
                max_messages=_READ, max_bytes=_READ_BYTES,
            )  # fmt: skip
            found = self._find(partition_id, ask)
            self._store.progress.unpark(group, partition_id, NOBODY, "", line.id, found.spans, found.upto)

    def _find(self, partition_id: int, request: UnparkRequest) -> _Found:
        found, left = _Found([], [], request.first - 1), request.max_messages
        size = min(request.max_bytes, _MOST_BYTES)
        end = min(request.last, request.first + _LOOKED_AT - 1)
        while found.upto < end and left > 0 and size > 0:
            batches = self._read(partition_id, found.upto + 1, _READ, _READ_BYTES)
            if not batches:
                kept_from = self._store.log.bounds([partition_id])[partition_id].start
                found.upto = max(found.upto, min(request.last, kept_from - 1))  # retention took the rest
                break
            for batch in batches:
                if found.upto >= end or left <= 0 or size <= 0:
                    break
                before = left
                for offset, unpacked in _of_key(batch, request.key, found.upto + 1, end):
                    _add(found.spans, offset)
                    left -= 1
                    size -= unpacked  # as the asker will have it
                    if left <= 0:
                        break
                found.upto = found.spans[-1][1] if left <= 0 else min(end, batch.last_offset)
                if left < before:
                    found.batches.append(batch)
                    size -= len(batch.data)
        return found


def _of_key(batch: StoredBatch, key: bytes | None, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Offsets of the key's messages, and the bytes of each.

    Of a batch that cannot be read, one offset: whoever takes it, gives it up.
    """
    try:
        found = stored_records(batch)
    except CorruptBatch:
        yield max(first, batch.base_offset), 0
        return
    for record in found:
        if first <= record.offset <= last and record.key == key:
            yield record.offset, len(record.value or b"")


def _add(spans: list[Span], offset: int) -> None:
    if spans and spans[-1][1] == offset - 1:
        spans[-1] = (spans[-1][0], offset)
    else:
        spans.append((offset, offset))
