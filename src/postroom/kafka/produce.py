"""Produce: batches of Kafka clients, from the socket into the log, unopened.

A connection's batches for a partition are stored in the order in which they came, also over a move: what
meets a seal waits until all that was sent to the old partition is known to be stored or refused, and then
goes to its successor, before anything newer (I4). Sequences go on there, so an idempotent producer notices
nothing (I28).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..backoff import ROUTE
from ..broker.served import Servable
from ..config import DEFAULTS
from ..errors import (
    CorruptBatch,
    MessageTooLarge,
    PartitionSealed,
    PostroomError,
    UnknownPartition,
    UsageError,
)
from ..model.messages.batch import read_header
from ..model.topology.chain import Link
from ..store.contract import Appended
from .apis import Code, code_of
from .hot import Produce, Produced, Sent
from .topics import KafkaTopic, Topics

__all__ = ["Producing"]

_ZSTD_FROM = 7  # the version of Produce from which on zstd is allowed
_TRANSACTIONAL_BIT, _ATTRIBUTES_AT = 0x10, 22
_LONGEST_MS = 30_000  # for the successor of a sealed partition
_FOREIGN = (
    "topic {!r} was not made for Kafka clients, who may read it and not send to it: only Postroom's own know "
    "where its keys go; make one with kafka_partitions="
)


class _Again(NamedTuple):
    """A batch that met the seal: it waits for its turn, and says when it is in line at the successor."""

    go: asyncio.Future[None]
    in_line: asyncio.Event


@dataclass(slots=True, eq=False)
class _Line:
    """A connection's batches for one partition."""

    link: Link
    flying: int = 0  # at the writer
    refused: list[_Again] = field(default_factory=list)  # in the order in which they were sent
    moving: asyncio.Task[None] | None = None  # takes what was refused to the successor
    moved: asyncio.Event = field(default_factory=asyncio.Event)  # nothing of it is left to be moved

    def __post_init__(self) -> None:
        self.moved.set()


class Producing:
    """The Produce requests of one connection.

    `permit`: operation and topic; PermissionDenied. `told`: whose batches they are, for `append` (I23).
    """

    def __init__(
        self,
        broker: Servable,
        topics: Topics,
        permit: Callable[[str, str], None],
        told: Callable[[], dict[str, Any]],
    ) -> None:
        self._broker, self._topics, self._permit, self._told = broker, topics, permit, told
        self._lines: dict[tuple[int, int], _Line] = {}

    async def begin(self, version: int, request: Produce) -> Coroutine[Any, Any, tuple[Produced, ...]]:
        """Put all of it in line, and return what waits until it is stored."""
        storing = [await self._begun(version, request, sent) for sent in request.sent]
        return _all(storing)

    async def _begun(self, version: int, request: Produce, sent: Sent) -> Awaitable[Produced]:
        try:
            topic, line, batch = await self._admitted(version, request, sent)
            while not line.moved.is_set():
                await line.moved.wait()
            in_line = asyncio.Event()
            task = asyncio.create_task(self._stored(topic, line, sent, batch, in_line, request.timeout_ms))
            await _either(in_line, task)
            return task
        except Exception as error:
            return _known(_failed(sent, error))

    async def _admitted(self, version: int, request: Produce, sent: Sent) -> tuple[KafkaTopic, _Line, bytes]:
        """The topic and the line of a batch that may be stored; raises whatever is against it."""
        self._permit("append", sent.topic)
        view = await self._topics.view(sent.topic)
        chain = view.chain(sent.partition)
        if chain is None or not chain.links:
            raise UnknownPartition(
                f"topic {view.name!r} has no partition {sent.partition}; it has {len(view.chains)}: ask for "
                "the metadata again"
            )
        if not view.writable:
            raise _Refused(Code.TOPIC_AUTHORIZATION_FAILED, _FOREIGN.format(view.name))
        batch = _checked(version, request, sent, view)
        key = (view.topic.id, sent.partition)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = _Line(chain.newest)
        elif not line.flying and not line.refused:
            line.link = chain.newest
        return view, line, batch

    async def _stored(
        self, view: KafkaTopic, line: _Line, sent: Sent, batch: bytes, in_line: asyncio.Event, timeout_ms: int
    ) -> Produced:
        give_up_at = asyncio.get_running_loop().time() + min(max(timeout_ms, 0), _LONGEST_MS) / 1000
        try:
            while True:
                link = line.link
                line.flying += 1
                try:
                    stored = await self._append(view, link, batch, in_line)
                    return _produced(sent, view, link, stored)
                except PartitionSealed:
                    again = _Again(asyncio.get_running_loop().create_future(), asyncio.Event())
                    line.refused.append(again)
                    line.moved.clear()
                finally:
                    in_line.set()
                    line.flying -= 1
                    self._let_go(view, line, sent.partition, give_up_at)
                await again.go
                in_line = again.in_line
        except Exception as error:
            return _failed(sent, error)

    def _append(
        self, view: KafkaTopic, link: Link, batch: bytes, in_line: asyncio.Event
    ) -> Coroutine[Any, Any, Appended]:
        return self._broker.append(view.name, link.partition_id, batch, in_line=in_line, **self._told())

    # ---- over a move ----

    def _let_go(self, view: KafkaTopic, line: _Line, partition: int, give_up_at: float) -> None:
        """Once the last answer of the old partition is there, what it refused goes on."""
        if line.refused and not line.flying and line.moving is None:
            line.moving = asyncio.create_task(self._move_on(view, line, partition, give_up_at))

    async def _move_on(self, view: KafkaTopic, line: _Line, partition: int, give_up_at: float) -> None:
        refused, line.refused = line.refused, []
        try:
            line.link = await self._successor(view, line.link, partition, give_up_at)
            for again in refused:  # each is in line before the next
                if not again.go.done():
                    again.go.set_result(None)
                    await again.in_line.wait()
        except Exception as error:
            for again in refused:
                if not again.go.done():
                    again.go.set_exception(error)
        finally:
            line.moving = None
            self._let_go(view, line, partition, give_up_at)  # it was moved once more meanwhile
            if not line.refused:
                line.moved.set()

    async def _successor(self, view: KafkaTopic, old: Link, partition: int, give_up_at: float) -> Link:
        tries = 0
        while True:
            chain = (await self._topics.view(view.name, fresh=True)).chain(partition)
            if chain is None or not chain.links:
                raise UnknownPartition(f"topic {view.name!r} is gone: ask for the metadata again")
            if chain.newest.partition_id != old.partition_id:
                return chain.newest
            if asyncio.get_running_loop().time() > give_up_at:
                raise PartitionSealed("the partition is being moved, and it takes long: send it again")
            tries += 1
            await asyncio.sleep(ROUTE.after(tries))


class _Refused(UsageError):
    """Refused with a code of its own."""

    def __init__(self, kafka_code: int, message: str) -> None:
        super().__init__(message)
        self.kafka_code = kafka_code


def _checked(version: int, request: Produce, sent: Sent, view: KafkaTopic) -> bytes:
    """The batch, if it may be stored as far as its header says. The broker looks at its checksum, once."""
    if request.acks not in (-1, 0, 1):
        raise _Refused(Code.INVALID_REQUIRED_ACKS, f"acks={request.acks}: choose 0, 1 or all")
    if request.transactional_id is not None:
        raise _Refused(
            Code.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, "Postroom has no transactions of Kafka's kind"
        )
    if not sent.batch:
        raise CorruptBatch("there is no batch for the partition")
    if len(sent.batch) > view.max_batch_bytes:
        raise MessageTooLarge(
            f"a batch for topic {view.name!r} has {view.max_batch_bytes:,} bytes at most: send smaller ones"
        )
    header = read_header(sent.batch)
    if header.records > DEFAULTS.max_batch_messages:
        raise MessageTooLarge(f"a batch has {DEFAULTS.max_batch_messages:,} messages at most: send fewer")
    if header.control:
        raise CorruptBatch("control batches are the broker's own; send messages")
    if sent.batch[_ATTRIBUTES_AT] & _TRANSACTIONAL_BIT:
        raise _Refused(Code.INVALID_TXN_STATE, "Postroom has no transactions of Kafka's kind")
    if header.compression == "zstd" and version < _ZSTD_FROM:
        raise _Refused(Code.UNSUPPORTED_COMPRESSION, "zstd needs a newer client, one that speaks Produce 7")
    return bytes(sent.batch)


def _produced(sent: Sent, view: KafkaTopic, link: Link, stored: Appended) -> Produced:
    chain = view.chains[sent.partition]
    oldest = chain.links[0].origin if chain.links else 0
    return Produced(sent.topic, sent.partition, 0, link.origin + stored.base_offset, oldest)


def _failed(sent: Sent, error: Exception) -> Produced:
    code = error.kafka_code if isinstance(error, _Refused) else code_of(error)
    message = str(error) if isinstance(error, PostroomError) else None
    return Produced(sent.topic, sent.partition, code, message=message)


async def _either(event: asyncio.Event, task: asyncio.Task[Produced]) -> None:
    """Until the event is set or the task is done."""
    task.add_done_callback(lambda _: event.set())
    await event.wait()


async def _all(storing: list[Awaitable[Produced]]) -> tuple[Produced, ...]:
    return tuple([await one for one in storing])


def _known(produced: Produced) -> Awaitable[Produced]:
    found: asyncio.Future[Produced] = asyncio.get_running_loop().create_future()
    found.set_result(produced)
    return found
