"""Checks of what is stored: can every batch be read, checksum and records?

Looks at the newest messages of each partition and at some others, for a few seconds; or, if asked, at all.
Through a connection of its own, so that it works on a served queue as well. Must change nothing.
"""

from __future__ import annotations

import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...errors import CorruptBatch, PermissionDenied, UnknownPartition, UnknownTopic
from ...model.batch import stored_records
from ...model.route import Range
from .finding import Finding

if TYPE_CHECKING:
    from postroom import Connection

    from ...store.contract import StoredBatch

__all__ = ["check_batches"]

_SECONDS = 5.0  # for the quick look
_NEWEST = 1000  # messages of each partition
_SAMPLES = 3  # further places in each
_BYTES = 1024 * 1024  # read at once
_SHOWN = 5
_ADVICE = (
    "check the disk and its cables, and restore from a backup if the messages matter; groups go past such a "
    "batch and keep its bytes as a dead letter"
)

_Place = tuple[str, Range]
Begin = Callable[[str, int], None]
"""Told which topic begins, and how many there are in all."""


@dataclass(slots=True)
class _Looked:
    places: int = 0
    batches: int = 0
    unreadable: int = 0
    said: list[str] = field(default_factory=list)  # of some of these: where, and why
    forbidden: set[str] = field(default_factory=set)
    left_out: int = 0  # topics: there was no time


async def check_batches(mq: Connection, begin: Begin, *, deep: bool = False) -> list[Finding]:
    topics = [topic.name for topic in await mq.topics(internal=True)]
    random.shuffle(topics)
    looked, until = _Looked(), time.monotonic() + _SECONDS
    for number, topic in enumerate(topics):
        if not deep and time.monotonic() >= until:
            looked.left_out = len(topics) - number
            break
        begin(f"batches of {topic}", len(topics))
        try:
            for piece in (await mq.route(topic)).partitions:
                await _look(mq, (topic, piece), looked, deep)
                looked.places += 1
        except PermissionDenied:
            looked.forbidden.add(topic)
        except (UnknownTopic, UnknownPartition):
            pass  # it was deleted meanwhile
    return _found(looked, deep)


async def _look(mq: Connection, place: _Place, looked: _Looked, deep: bool) -> None:
    start, end = await _bounds(mq, place)
    newest = start if deep else max(start, end - _NEWEST)
    samples = [random.randrange(start, newest) for _ in range(_SAMPLES)] if newest > start else []
    seen: set[int] = set()
    for first in (newest, *samples):
        async for batch in _batches(mq, place, first, end, all_of_it=first == newest):
            if deep or batch.base_offset not in seen:
                _open(place, batch, looked)
            if not deep:
                seen.add(batch.base_offset)


def _open(place: _Place, batch: StoredBatch, looked: _Looked) -> None:
    looked.batches += 1
    try:
        stored_records(batch)
    except CorruptBatch as error:
        where = f"{place[0]}:{place[1].partition}:{batch.base_offset}"
        looked.unreadable += 1
        if looked.unreadable <= _SHOWN:
            looked.said.append(f"{where} ({batch.records} messages): {error}")


async def _bounds(mq: Connection, place: _Place) -> tuple[int, int]:
    fetched = await mq._endpoint.fetch(
        place[0], place[1].partition_id, 0, max_messages=1, max_bytes=1, wait_ms=0
    )
    return fetched.start, fetched.end


async def _batches(
    mq: Connection, place: _Place, offset: int, end: int, *, all_of_it: bool
) -> AsyncIterator[StoredBatch]:
    topic, piece = place
    while offset < end:
        fetched = await mq._endpoint.fetch(
            topic, piece.partition_id, offset, max_messages=_NEWEST, max_bytes=_BYTES, wait_ms=0
        )
        for batch in fetched.batches:
            yield batch
        if not fetched.batches or not all_of_it:
            return
        offset = fetched.batches[-1].last_offset + 1


def _found(looked: _Looked, deep: bool) -> list[Finding]:
    found = []
    if looked.forbidden:
        said = f"{len(looked.forbidden)} topics may not be read by this token"
        found.append(Finding("batches", "skip", said, "use one with `consume` or `admin` on them"))
    if looked.unreadable:
        more = f"; and {looked.unreadable - _SHOWN:,} more" if looked.unreadable > _SHOWN else ""
        said = f"{looked.unreadable:,} cannot be read: {'; '.join(looked.said)}{more}"
        return [*found, Finding("batches", "fail", said, _ADVICE)]
    what = "all" if deep else "the newest and a sample; --deep reads all"
    said = f"{looked.batches:,} in {looked.places:,} partitions can be read ({what})"
    if looked.left_out:
        said += f"; there was no time for {looked.left_out:,} topics"
    return [*found, Finding("batches", "ok", said)]
