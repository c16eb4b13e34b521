"""Staging as the event loop sees it: the verbs of `Endpoint` for jobs that publish exactly once (I20).

Blocking work has threads of its own, since a publishing may take long and polls must not wait for it. Each
call publishes for a while and says how far it is: whoever wants all of it asks again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import (
    InvalidSetting,
    PermissionDenied,
    PostroomError,
    UnknownPartition,
    UnknownTopic,
    UsageError,
)
from ..model.batch import read_header
from ..model.staging import Decision, Known, Place, Wish, check_name, owner_after, split_batches
from ..store.contract import Staged, Store, Topic
from .backlog import BacklogGate
from .catalog import CatalogCache
from .endpoint import Decided, Published, PublishedPlace
from .publishing import Publisher
from .quotas import Quotas

__all__ = ["StagingVerbs", "StagingWork"]

T = TypeVar("T")

_THREADS = 2
_SLICE_S = 2.0  # a call publishes no longer


class StagingWork:
    def __init__(
        self, store: Store, catalog: CatalogCache, publisher: Publisher, backlog: BacklogGate, quotas: Quotas
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._publisher = publisher
        self._backlog = backlog
        self._quotas = quotas
        self._threads = ThreadPoolExecutor(_THREADS, "postroom-publish")
        self._closed = False

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def close(self) -> None:
        """What is being published goes no further than its next step."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)

    async def stage(
        self, topic: str, rows: Sequence[Staged], place: tuple[str, int, str, int], producer: str, owner: str
    ) -> None:
        """As an append: limits on the backlog and the rates are kept here, and not when it is published."""
        headers = [read_header(row.batch) for row in rows]
        if any(header.control for header in headers):
            raise UsageError("control batches are Postroom's own; stage messages")
        messages, size = sum(h.records for h in headers), sum(h.size for h in headers)
        known = await self.run(self._catalog.topic, topic)
        limited = self._backlog.limits(known.settings)
        counted = await self._backlog.pass_through(known, messages, size) if limited else None
        passed = await self._quotas.pass_through(topic, producer, messages, size)
        try:
            await self.run(self._store.staging.put, *place, rows, owner)
        except PostroomError:
            self._quotas.put_back(passed)
            if counted is not None:
                counted.put_back(messages, size)
            raise

    # ---- in a thread ----

    def rows(self, topic: str, partition_ids: Sequence[int], data: bytes) -> list[Staged]:
        batches = split_batches(data)
        if not batches or len(batches) != len(partition_ids):
            raise UsageError(f"{len(batches)} batches were staged for {len(partition_ids)} partitions")
        known = self._of_topic(topic, set(partition_ids))
        return [Staged(known.id, place, one) for place, one in zip(partition_ids, batches, strict=True)]

    def _of_topic(self, topic: str, partition_ids: Collection[int]) -> Topic:
        for known in (self._catalog.topic(topic), self._catalog.fresh_topic(topic)):
            if {piece.partition_id for piece in known.route.partitions}.issuperset(partition_ids):
                return known
        raise UnknownPartition(
            f"that is not a partition of topic {topic!r}: fetch the route again", topic=topic
        )

    def known(self, query: str, owner: str) -> Known:
        """How far the query is; PermissionDenied if it is another's."""
        known = self._store.staging.known(query)
        owner_after(query, known.owner, owner)
        return known

    def decide(self, topics: Sequence[str], query: str, batch: int, wish: Wish, owner: str) -> Decided:
        ids = {self._catalog.topic(name).id for name in topics}
        decision = self._publisher.decide(query, batch, wish, ids, self._for_a_while(), owner)
        self._check(decision, topics)
        return Decided(decision.revision, decision.segments, decision.published_at > 0)

    def publish(self, topics: Sequence[str], query: str, batch: int, owner: str) -> Published:
        self.known(query, owner)
        recorded = self._store.staging.decision(query, batch)
        if recorded is not None:
            self._check(recorded, topics)
        done = self._publisher.publish(query, batch, self._for_a_while())
        places = self._shown(done.progress.places.values())
        messages = sum(place.messages for place in places)
        return Published(done.published_at > 0, messages, done.progress.dropped, places)

    def drop(
        self, topics: Sequence[str], query: str, batch: int, segments: Sequence[str] | None, owner: str
    ) -> int:
        """Rows of these topics alone; without any, of all."""
        named = set()
        for name in topics:
            with suppress(UnknownTopic):  # it was deleted: what was staged for it ages out
                named.add(self._catalog.topic(name).id)
        return self._store.staging.drop(query, batch, segments, named if topics else None, owner)

    def _for_a_while(self) -> Callable[[], bool]:
        until = time.monotonic() + _SLICE_S
        return lambda: not self._closed and time.monotonic() < until

    def _check(self, decision: Decision, topics: Sequence[str]) -> None:
        """Permissions are about topics: whoever names a query must name the topics it writes to."""
        names = {topic.id: topic.name for topic in self._store.catalog.topics()}
        missing = sorted({names[one] for one in decision.topics if one in names}.difference(topics))
        if missing:
            raise PermissionDenied(f"the batch has messages for topic {missing[0]!r} too: name it as well")

    def _shown(self, places: Iterable[Place]) -> tuple[PublishedPlace, ...]:
        topics = {topic.id: topic for topic in self._store.catalog.topics()}
        found = []
        for place in places:
            topic = topics.get(place.topic_id)
            pieces = topic.route.partitions if topic is not None else ()
            number = next((p.partition for p in pieces if p.partition_id == place.partition_id), -1)
            name = "" if topic is None else topic.name
            found.append(
                PublishedPlace(name, number, place.partition_id, place.first, place.last, place.messages)
            )
        return tuple(sorted(found, key=lambda place: (place.topic, place.partition)))


class StagingVerbs:
    """The part of the broker that is about staging. `owner`: the principal that asks; "": somebody inside."""

    _staging: StagingWork
    store: Store

    async def stage(
        self,
        topic: str,
        query: str,
        batch: int,
        segment: str,
        number: int,
        partition_ids: Sequence[int],
        data: bytes,
        producer: str = "",
        owner: str = "",
    ) -> None:
        place = (*_batch_of(query, batch), check_name(segment, "segment"), number)
        if not 0 <= number < 2**31 - len(partition_ids):
            raise InvalidSetting(f"number={number}: batches of a segment are counted from 0")
        rows = await self._staging.run(self._staging.rows, topic, partition_ids, data)
        await self._staging.stage(topic, rows, place, producer, owner)

    async def staged_marks(self, topics: Sequence[str], query: str, owner: str = "") -> dict[str, int]:
        known = await self._staging.run(self._staging.known, check_name(query, "query"), owner)
        return dict(known.marks)

    async def decide_staged(
        self, topics: Sequence[str], query: str, batch: int, wish: Wish, owner: str = ""
    ) -> Decided:
        return await self._staging.run(self._staging.decide, topics, *_batch_of(query, batch), wish, owner)

    async def publish_staged(
        self, topics: Sequence[str], query: str, batch: int, owner: str = ""
    ) -> Published:
        return await self._staging.run(self._staging.publish, topics, *_batch_of(query, batch), owner)

    async def drop_staged(
        self, topics: Sequence[str], query: str, batch: int, segments: Sequence[str] | None, owner: str = ""
    ) -> int:
        return await self._staging.run(self._staging.drop, topics, *_batch_of(query, batch), segments, owner)


def _batch_of(query: str, batch: int) -> tuple[str, int]:
    if not 0 <= batch < 2**62:
        raise InvalidSetting(f"batch={batch}: batches of a query are counted from 0")
    return check_name(query, "query"), batch
