"""A consumer's way past a batch that nobody can read: the group gives it up, and what is behind it follows.

The consumer says "dead" of its offsets, under its lease as always, and takes the rest of what it was granted
once that is stored: in an ordered group the keys of such a batch are not known, so its partition waits for
that step. The broker reads the batch itself and keeps its bytes as one dead letter; what it can read all the
same becomes dead letters as usual. If that cannot be stored, nothing of the batch is held: it comes again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...broker.endpoint import Beat, Endpoint, Grant, Lease, Settle, Verdict
from ...errors import CorruptBatch, PostroomError
from ...model.batch import Record, stored_records
from ...model.delivery import Span
from ...store.contract import StoredBatch
from ..producing.appending import pause

__all__ = ["GIVEN_UP", "give_up", "readable", "told_of", "without"]

log = logging.getLogger("postroom.consumer")

Unread = tuple[StoredBatch, CorruptBatch]

GIVEN_UP = "the group gives it up, and the broker keeps its bytes as a dead letter"
_SETTLED = "it was settled on delivery, so that it is skipped"


def without(grant: Grant) -> tuple[Grant, list[Unread]]:
    """The grant without batches that cannot be read and their offsets; and those batches."""
    unread = list(_unread(grant.batches))
    spans = [(batch.base_offset, batch.last_offset) for batch, _ in unread]
    leases = tuple(part for lease in grant.leases for part in _around(lease, spans))
    bad = {batch.base_offset for batch, _ in unread}
    batches = tuple(batch for batch in grant.batches if batch.base_offset not in bad)
    return replace(grant, leases=leases, batches=batches), unread


async def give_up(
    endpoint: Endpoint, who: Beat, grant: Grant, token: int, unread: Sequence[Unread], lease_ms: int
) -> bool:
    """Whether the store has it that the group is done with these; tried for as long as a lease lasts."""
    told_of(grant, unread, GIVEN_UP)
    verdicts = tuple(
        Verdict("dead", max(batch.base_offset, lease.first), min(batch.last_offset, lease.last), reason=said)
        for batch, error in unread
        for said in (f"a consumer could not read the batch: {str(error)[:300]}",)
        for lease in grant.leases
        if batch.base_offset <= lease.last and batch.last_offset >= lease.first
    )
    part = Settle(grant.topic, grant.partition_id, token, verdicts)
    loop = asyncio.get_running_loop()
    until, tries = loop.time() + lease_ms / 1000, 0
    while True:
        try:
            reply = await endpoint.settle(who.topic, who.group, [part])
            return not (reply.lost or reply.away)
        except PostroomError as error:
            tries += 1
            if not error.retriable or loop.time() >= until:
                log.warning("an unreadable batch of topic %r comes again: %s", grant.topic, error)
                return False
        await asyncio.sleep(pause(tries))


def readable(batch: StoredBatch, topic: str, partition: int) -> list[Record]:
    """For whoever reads without a group: the messages of a batch, or none and a line in the log."""
    try:
        return stored_records(batch)
    except CorruptBatch as error:
        log.warning(
            "%s:%d:%d, a batch of %d messages, cannot be read (%s) and is skipped: run `postroom doctor`",
            topic,
            partition,
            batch.base_offset,
            batch.records,
            error,
        )
        return []


def told_of(grant: Grant, unread: Iterable[Unread], then: str = _SETTLED) -> None:
    for batch, error in unread:
        place = f"{grant.topic}:{grant.partition}:{batch.base_offset}"
        log.error("%s, a batch of %d messages, cannot be read (%s): %s", place, batch.records, error, then)


def _unread(batches: Iterable[StoredBatch]) -> Iterator[Unread]:
    for batch in batches:
        try:
            stored_records(batch)
        except CorruptBatch as error:
            yield batch, error


def _around(lease: Lease, spans: Iterable[Span]) -> Iterator[Lease]:
    """What is left of a lease without these offsets, which are in order."""
    first = lease.first
    for low, high in spans:
        if high < first or low > lease.last:
            continue
        if first < low:
            yield replace(lease, first=first, last=low - 1)
        first = high + 1
    if first <= lease.last:
        yield replace(lease, first=first)
