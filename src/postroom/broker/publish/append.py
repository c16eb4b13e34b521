"""How a broker takes a batch: checks, limits, and the way to the writer of its partition.

Decides what has to be looked up or waited for before a batch is queued. Where that is nothing it takes a
shorter way: queued at once (`append_soon`), or stored in the sender's very call (`lone_append`). Must never
let one that goes a shorter way overtake one that waits for what is looked up (I3), nor count a producer of a
client under any identity but its principal's (I23).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import cast

from ...endpoint.endpoint import LoneAppends, Told
from ...errors import PartitionSealed, PostroomError, StoreUnavailable, UsageError
from ...model.access import kafka_producer, producer_of
from ...model.messages.batch import BatchHeader, read_header, verify
from ...model.messages.ids import digests_of
from ...store.contract import Append, Appended, Store, Topic
from ...store.contract.values import Drawn
from ...tasks import SingleFlight
from ..access import InThread
from ..shard_workers import ShardWork, never_stored
from ..topology.catalog_cache import CatalogCache
from ..topology.route_changes import RouteHelp
from .backlog import BacklogGate
from .rates import Quotas, RateGate, Share
from .writer import Writer

__all__ = ["AppendVerbs"]

_NOT_COUNTED: AbstractContextManager[None] = nullcontext()  # of a topic without a limit on its backlog
_AT_ONCE_BYTES = 16 * 1024  # of a batch that is opened here; larger ones are opened in a thread


class AppendVerbs:
    """The part of a broker that takes batches."""

    store: Store
    _in_thread: InThread
    _flights: SingleFlight
    _catalog: CatalogCache
    _work: ShardWork
    _help: RouteHelp
    _backlog: BacklogGate
    _quotas: Quotas
    _identity_key: bytes | None
    _route_changed: Callable[[], None]

    async def append(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        *,
        due_at: int = 0,
        ids: bytes = b"",
        producer: str = "",
        drawn: Drawn | None = None,
        owner: str = "",
        in_line: asyncio.Event | None = None,
    ) -> Appended:
        """`owner`: the principal whose producer this is; "" is somebody in this process (I23). `in_line`: of
        a Kafka client, whose sequences are of their own kind (I28); it is set when the batch is queued."""
        header = verify(batch)
        if header.control:
            raise UsageError("control batches are Postroom's own; send messages")
        producer_id, counted = header.producer_id, _NOT_COUNTED
        try:
            if producer_id >= 0 and (owner or in_line is not None):
                producer_id = producer_of(await self.identity_key(), owner, producer_id)
                producer_id = producer_id if in_line is None else kafka_producer(producer_id)
            known = await self._topic(topic)
            if self._backlog.limits(known.settings) and self._backlog.is_now(due_at):
                counted = await self._backlog.pass_through(known, header.records, header.size)
        except StoreUnavailable as error:
            raise never_stored(error) from None
        append = Append(partition_id, batch, due_at, ids, known.settings.dedup_ms, drawn, producer_id, header)
        with counted:
            return await self._append_within_rates(known, append, producer, in_line)

    async def _append_within_rates(
        self, topic: Topic, append: Append, producer: str, in_line: asyncio.Event | None
    ) -> Appended:
        header, passed = append.header or read_header(append.batch), list[tuple[RateGate, Share]]()
        if not self._quotas.off:
            try:
                passed = await self._quotas.pass_through(topic.name, producer, header.records, header.size)
            except StoreUnavailable as error:
                raise never_stored(error) from None
        if append.dedup_ms or append.due_at or append.ids:
            append = await self._with_ids(append, header)
        try:
            found = self._work.writer_of(append.partition_id)
            writer = found or await self._work.find_writer(append.partition_id)
            storing = writer.append(append, (topic.id, cast(int, append.producer_id)))
            if in_line is not None:
                in_line.set()
            return await storing
        except PostroomError as error:
            self._quotas.put_back(passed)
            if isinstance(error, PartitionSealed):
                self._route_changed()
                await self._help.met_seal(topic.name, append.partition_id, error)
            raise

    async def _with_ids(self, append: Append, header: BatchHeader) -> Append:
        """Return it with the ids of its messages where they are looked at, and without where they are not."""
        ids, wanted = append.ids, append.dedup_ms or append.due_at
        if wanted and not ids:  # the sender does not know that they are
            small = header.compression == "none" and header.size <= _AT_ONCE_BYTES
            ids = digests_of(append.batch) if small else await self._in_thread(digests_of, append.batch)
        if not wanted or not ids.strip(b"\0"):  # or not one has an id
            ids = b""
        return append if ids == append.ids else replace(append, ids=ids)

    def append_soon(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        producer: str,
        told: Told,
        *,
        owner: str | None = None,
        gone: Callable[[], bool] | None = None,
    ) -> bool:
        """The short way of a batch, which must not overtake those who wait for what is looked up (I3).

        `owner`: the principal whose producer has made it, "" is anybody (I23); None: a producer of this
        process, and nothing of it is checked again. `gone`: whether its sender does not wait any more.
        """
        found = self._short_way(topic, partition_id)
        if found is None:
            return False
        topic_id, writer = found
        header = read_header(batch) if owner is None else verify(batch)
        producer_id = header.producer_id
        if owner and producer_id >= 0:
            if self._identity_key is None:
                return False
            producer_id = producer_of(self._identity_key, owner, producer_id)
        append = Append(partition_id, batch, producer_id=producer_id, header=header)
        (writer.queue if owner is None else writer.queue_soon)(append, (topic_id, producer_id), told, gone)
        return True

    def lone_append(self, topic: str, partition_id: int) -> LoneAppends | None:
        found = self._short_way(topic, partition_id)
        return found[1] if found is not None and found[1].alone() else None

    def _short_way(self, topic: str, partition_id: int) -> tuple[int, Writer] | None:
        """Return the id of the topic and who writes there; None: something has to be looked up before."""
        known: Topic | None = self._catalog.known(("topic", topic))
        if known is None or self._flights.busy(topic) or not self._quotas.off:
            return None
        settings, writer = known.settings, self._work.writer_of(partition_id)
        needs = writer is None or settings.dedup_ms or self._backlog.limits(settings)
        return None if needs else (known.id, cast(Writer, writer))

    async def identity_key(self) -> bytes:
        """What ids of principals' producers are told apart by; asked of the store once."""
        if self._identity_key is None:
            self._identity_key = await self._in_thread(self.store.access.key)
        return self._identity_key

    async def _topic(self, name: str) -> Topic:
        known: Topic | None = self._catalog.known(("topic", name))
        return await self._flights.look(name, known, self._catalog.topic, name)
