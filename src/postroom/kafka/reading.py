"""Fetch and ListOffsets: stored batches as they are, and where the log begins, ends, or was at a time.

Only the first eight bytes of a batch are made anew, which hold its offset and lie outside the checksum:
Kafka's offset is the origin of the partition and the offset in it (I28). The whole batch that holds the
offset is sent, clients leave out what comes before; the seal of a partition is not. A fetch that waits holds
no database connection, and is woken by what arrives.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..broker.deliver.fetch import Wanted
from ..broker.served import Servable
from ..endpoint.values import Fetched
from ..errors import CorruptBatch, PostroomError, UnknownPartition
from ..model.messages.batch import stored_records
from ..model.topology.chain import Chain, Link
from ..store.contract import Bounds, StoredBatch
from .apis import Code, code_of
from .hot import Fetch, FetchedPartition, FetchedTopic, FetchTopic
from .primitives import Piece
from .topics import KafkaTopic, Topics

__all__ = ["Reading", "at_origin", "log_end", "log_start"]

_OFFSET = struct.Struct(">q")
_BY_ID_FROM = 13  # versions of Fetch that name topics by their ids
_END, _START, _NEWEST, _LOCAL_START, _TIERED_END = -1, -2, -3, -4, -5  # times that mean something else
_NOWHERE = (-1, -1)  # time and offset, where there is none
_LONGEST_WAIT_MS = 60_000


@dataclass(slots=True)
class _Asked:
    """A partition of a Fetch request."""

    answer: FetchedPartition
    offset: int
    max_bytes: int
    view: KafkaTopic | None = None

    @property
    def chain(self) -> Chain | None:
        chain = None if self.view is None else self.view.chain(self.answer.index)
        return chain if chain is not None and chain.links else None


class Reading:
    """The requests of one connection. `permit`: operation and topic; PermissionDenied."""

    def __init__(self, broker: Servable, topics: Topics, permit: Callable[[str, str], None]) -> None:
        self._broker, self._topics, self._permit = broker, topics, permit

    # ---- Fetch ----

    async def fetch(self, version: int, request: Fetch, most_bytes: int) -> list[FetchedTopic]:
        """What there is of the partitions; waits for it if the request wants that.

        Where nothing arrives while it waits the log is not read again: what was found before is the answer.
        """
        loop = asyncio.get_running_loop()
        wait_ms = min(max(request.max_wait_ms, 0), _LONGEST_WAIT_MS)
        deadline = loop.time() + wait_ms / 1000
        max_bytes = max(1, min(request.max_bytes, most_bytes))
        while True:
            topics, asked = await self._asked(version, request)
            ids = {link.partition_id for one in asked if one.chain for link in one.chain.links}
            with self._broker.arrivals(ids) as news:
                size = await self._read(asked, max_bytes)
                failed = any(one.answer.error for one in asked)
                if failed or size >= request.min_bytes or not asked or not await _arrived(news, deadline):
                    return topics

    async def _asked(self, version: int, request: Fetch) -> tuple[list[FetchedTopic], list[_Asked]]:
        topics, asked = [], []
        for wanted in request.topics:
            view, error = await self._view(version, wanted)
            partitions = [FetchedPartition(one.partition, error) for one in wanted.partitions]
            for one, answer in zip(wanted.partitions, partitions, strict=True):
                if not error and (view is None or view.chain(one.partition) is None):
                    answer.error = Code.UNKNOWN_TOPIC_OR_PARTITION
                asked.append(_Asked(answer, one.offset, one.max_bytes, view))
            name, id = (view.name, view.id) if view else (wanted.name, wanted.id)
            topics.append(FetchedTopic(name, id, partitions))
        return topics, asked

    async def _view(self, version: int, wanted: FetchTopic) -> tuple[KafkaTopic | None, int]:
        by_id = version >= _BY_ID_FROM
        try:
            if not by_id:
                self._permit("fetch", wanted.name)
            view = await (self._topics.by_id(wanted.id) if by_id else self._topics.view(wanted.name))
            self._permit("fetch", view.name)
            return view, 0
        except PostroomError as error:
            code = code_of(error)
            return None, Code.UNKNOWN_TOPIC_ID if by_id and code == Code.UNKNOWN_TOPIC_OR_PARTITION else code

    async def _read(self, asked: Sequence[_Asked], max_bytes: int) -> int:
        """Fill the answers; returns how many bytes of batches there are."""
        wanted: list[Wanted] = []
        for one in asked:
            chain = one.chain
            if chain is not None and not one.answer.error:
                at = chain.at(one.offset)
                for number, link in enumerate(chain.links):  # of the others only where they begin and end
                    most = max(1, one.max_bytes) if number == at else 0
                    wanted.append(Wanted(link.partition_id, one.offset - link.origin, most))
        try:
            found = iter(await self._broker.fetch_each(wanted, max_bytes) if wanted else ())
        except PostroomError as error:
            for one in asked:
                one.answer.error = one.answer.error or code_of(error)
            return 0
        size = 0
        for one in asked:
            if one.chain is not None and not one.answer.error:
                size += _fill(one, one.chain, [next(found) for _ in one.chain.links])
            elif not one.answer.error:  # all of the partition is gone
                one.answer.end = one.answer.log_start = 0
        return size

    # ---- ListOffsets ----

    async def list_offsets(self, request: Any) -> dict[str, Any]:
        topics = []
        for wanted in request.topics or ():
            found = [await self._offset(wanted.name, one) for one in wanted.partitions or ()]
            topics.append({"name": wanted.name, "partitions": found})
        return {"throttle_time": 0, "topics": topics}

    async def _offset(self, topic: str, wanted: Any) -> dict[str, Any]:
        answer = {"partition_index": wanted.partition_index, "error_code": 0, "leader_epoch": 0}
        try:
            self._permit("bounds", topic)
            view = await self._topics.view(topic, fresh=wanted.timestamp == _END)
            chain = view.chain(wanted.partition_index)
            if chain is None:
                raise UnknownPartition(f"topic {topic!r} has {len(view.chains)} partitions")
            at, offset = await self._broker.in_thread(self._located, chain, wanted.timestamp)
            return answer | {"timestamp": at, "offset": offset}
        except PostroomError as error:
            return answer | {"error_code": code_of(error), "timestamp": -1, "offset": -1, "leader_epoch": -1}

    def _located(self, chain: Chain, time: int) -> tuple[int, int]:
        """The time and the offset that a time means; blocking."""
        if not chain.links:
            return (-1, 0) if time in (_END, _START, _LOCAL_START) else _NOWHERE
        edges = self._broker.store.log.bounds([link.partition_id for link in chain.links])
        bounds = [edges[link.partition_id] for link in chain.links]
        if time == _END:
            return -1, log_end(chain.newest, bounds[-1])
        if time in (_START, _LOCAL_START):
            return -1, log_start(chain, bounds)
        if time == _TIERED_END:
            return _NOWHERE
        links = list(zip(chain.links, bounds, strict=True))
        if time == _NEWEST:
            stamped = [self._stamped(link, edge, None) for link, edge in links]
            return max(stamped, key=lambda found: found[0])
        for link, edge in links:
            found = self._stamped(link, edge, max(time, 0))
            if found != _NOWHERE:
                return found
        return _NOWHERE

    def _stamped(self, link: Link, edge: Bounds, at_least: int | None) -> tuple[int, int]:
        """Of a partition the first message of that time or later, or (None) the first of the newest time."""
        start, end = edge.start, edge.end - int(edge.sealed)
        while start < end:
            batch = self._broker.store.log.stamped(link.partition_id, at_least, start)
            if batch is None or batch.base_offset >= end:
                break
            found = _in_batch(batch, at_least, edge.start)
            if found is not None:
                return found[0], link.origin + found[1]
            start = batch.last_offset + 1
        return _NOWHERE


def _in_batch(batch: StoredBatch, at_least: int | None, start: int) -> tuple[int, int] | None:
    """Time and offset of the message that is looked for; None: it lies before what is kept."""
    try:
        kept = [record for record in stored_records(batch) if record.offset >= start]
    except CorruptBatch:
        return None
    if at_least is None:
        newest = max(kept, key=lambda record: record.timestamp, default=None)
        return None if newest is None else (newest.timestamp, newest.offset)
    return next(((one.timestamp, one.offset) for one in kept if one.timestamp >= at_least), None)


# ---- offsets ----


def log_end(link: Link, edge: Bounds | Fetched) -> int:
    """Where a partition ends for Kafka clients: the seal has no offset."""
    return link.origin + edge.end - int(edge.sealed)


def log_start(chain: Chain, edges: Sequence[Bounds | Fetched]) -> int:
    """The lowest offset that is kept, in the first partition that has something, or where the newest ends."""
    for link, edge in zip(chain.links, edges, strict=True):
        if edge.start < edge.end - int(edge.sealed):
            return link.origin + edge.start
    return log_end(chain.newest, edges[-1])


def _fill(one: _Asked, chain: Chain, edges: Sequence[Fetched]) -> int:
    answer, at = one.answer, chain.at(one.offset)
    answer.end, answer.log_start = log_end(chain.newest, edges[-1]), log_start(chain, edges)
    if not answer.log_start <= one.offset <= answer.end:
        answer.error = Code.OFFSET_OUT_OF_RANGE
        return 0
    link, found = chain.links[at], edges[at]
    below = found.end - int(found.sealed)
    for batch in found.batches:
        if batch.base_offset < below:
            answer.pieces += at_origin(link.origin, batch)
    return sum(map(len, answer.pieces))


def at_origin(origin: int, batch: StoredBatch) -> list[Piece]:
    """A stored batch at the offset that Kafka clients know it by."""
    if not origin:
        return [batch.data]
    return [_OFFSET.pack(origin + batch.base_offset), memoryview(batch.data)[_OFFSET.size :]]


async def _arrived(news: asyncio.Event, deadline: float) -> bool:
    """Wait for news; returns False once it is time to answer without."""
    loop = asyncio.get_running_loop()
    if loop.time() >= deadline:
        return False
    over: list[bool] = []

    def end() -> None:
        over.append(True)
        news.set()

    timer = loop.call_at(deadline, end)
    try:
        await news.wait()
    finally:
        timer.cancel()
    return not over
