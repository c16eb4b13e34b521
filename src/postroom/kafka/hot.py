"""The messages that every send, every read and every new connection needs, written by hand.

A batch in a Produce request is a view of the frame, and a batch in a Fetch answer is passed on as it was
stored: neither is copied or opened here. Whatever these say must be what `kio` says, which a test holds
against them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from .primitives import NO_UUID, Piece, Reader, Writer

__all__ = [
    "NO_OPERATIONS",
    "Fetch",
    "FetchPartition",
    "FetchTopic",
    "FetchedPartition",
    "FetchedTopic",
    "Metadata",
    "MetadataTopic",
    "Node",
    "Produce",
    "Produced",
    "Sent",
    "api_versions",
    "fetch_answer",
    "metadata_answer",
    "produce_answer",
    "read_fetch",
    "read_produce",
]

NO_OPERATIONS = -(2**31)
"""Which operations a client may do is not told."""


class Sent(NamedTuple):
    """What a Produce request has for a partition."""

    topic: str
    partition: int
    batch: memoryview | None


@dataclass(frozen=True, slots=True)
class Produce:
    transactional_id: str | None
    acks: int
    timeout_ms: int
    sent: tuple[Sent, ...]


@dataclass(frozen=True, slots=True)
class Produced:
    """What became of it."""

    topic: str
    partition: int
    error: int = 0
    base_offset: int = -1
    log_start: int = 0
    message: str | None = None


def read_produce(version: int, view: memoryview) -> Produce:
    """A Produce request of version 3 to 12."""
    reader, flexible = Reader(view), version >= 9
    transactional_id = reader.string(flexible)
    acks, timeout_ms = reader.i16(), reader.i32()
    sent: list[Sent] = []
    for _ in range(reader.count(flexible)):
        topic = reader.name(flexible)
        for _ in range(reader.count(flexible)):
            sent.append(Sent(topic, reader.i32(), reader.data(flexible)))
            if flexible:
                reader.tags()
        if flexible:
            reader.tags()
    if flexible:
        reader.tags()
    return Produce(transactional_id, acks, timeout_ms, tuple(sent))


def produce_answer(version: int, produced: Sequence[Produced]) -> list[Piece]:
    out = Writer(version >= 9)
    topics: dict[str, list[Produced]] = {}
    for one in produced:
        topics.setdefault(one.topic, []).append(one)
    out.count(len(topics))
    for topic, partitions in topics.items():
        out.string(topic)
        out.count(len(partitions))
        for one in partitions:
            out.i32(one.partition)
            out.i16(one.error)
            out.i64(one.base_offset)
            out.i64(-1)  # its messages have the times of their producer
            if version >= 5:
                out.i64(one.log_start)
            if version >= 8:
                out.count(0)
                out.string(one.message)
            out.tags()
        out.tags()
    out.i32(0)
    out.tags()
    return out.done()


# ---- Fetch ----


class FetchPartition(NamedTuple):
    """From where on a Fetch request wants a partition, and how many bytes of it."""

    partition: int
    offset: int
    max_bytes: int


class FetchTopic(NamedTuple):
    """Known by its name, or in newer versions by its id."""

    name: str
    id: UUID | None
    partitions: list[FetchPartition]


class Fetch(NamedTuple):
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    session_id: int
    topics: list[FetchTopic]


def read_fetch(version: int, view: memoryview) -> Fetch:
    """A Fetch request of version 4 to 17; what it wants of a session, and its rack, is not read."""
    reader, flexible = Reader(view), version >= 12
    if version < 15:
        reader.i32()  # the replica that asks
    max_wait_ms, min_bytes, max_bytes = reader.i32(), reader.i32(), reader.i32()
    reader.i8()  # isolation: there are no transactions
    session_id = 0
    if version >= 7:
        session_id = reader.i32()
        reader.i32()
    topics: list[FetchTopic] = []
    for _ in range(reader.count(flexible)):
        name, id = (reader.name(flexible), None) if version < 13 else ("", reader.uuid())
        partitions = [_fetch_partition(reader, version) for _ in range(reader.count(flexible))]
        topics.append(FetchTopic(name, id, partitions))
        if flexible:
            reader.tags()
    return Fetch(max_wait_ms, min_bytes, max_bytes, session_id, topics)


def _fetch_partition(reader: Reader, version: int) -> FetchPartition:
    partition = reader.i32()
    if version >= 9:
        reader.i32()  # the epoch of its leader
    offset = reader.i64()
    if version >= 12:
        reader.i32()  # the epoch of what it read last
    if version >= 5:
        reader.i64()  # where the log of a replica begins
    max_bytes = reader.i32()
    if version >= 12:
        reader.tags()
    return FetchPartition(partition, offset, max_bytes)


@dataclass(slots=True)
class FetchedPartition:
    index: int
    error: int = 0
    end: int = -1
    log_start: int = -1
    pieces: list[Piece] = field(default_factory=list)


@dataclass(slots=True)
class FetchedTopic:
    name: str
    id: UUID | None
    partitions: list[FetchedPartition]


def fetch_answer(version: int, topics: Sequence[FetchedTopic], error: int = 0) -> list[Piece]:
    """A Fetch answer of version 4 to 17, which begins no session."""
    out = Writer(version >= 12)
    out.i32(0)
    if version >= 7:
        out.i16(error)
        out.i32(0)
    out.count(len(topics))
    for topic in topics:
        if version >= 13:
            out.uuid(topic.id or NO_UUID)
        else:
            out.string(topic.name)
        out.count(len(topic.partitions))
        for one in topic.partitions:
            _fetched(out, version, one)
        out.tags()
    out.tags()
    return out.done()


def _fetched(out: Writer, version: int, one: FetchedPartition) -> None:
    out.i32(one.index)
    out.i16(one.error)
    out.i64(one.end)
    out.i64(one.end)  # all that is stored is stable: there are no transactions
    if version >= 5:
        out.i64(one.log_start)
    out.count(-1)  # no aborted transactions
    if version >= 11:
        out.i32(-1)  # no other replica is preferred: garbage here stops librdkafka
    out.count(sum(map(len, one.pieces)))
    out.raw(one.pieces)
    out.tags()


# ---- Metadata ----


class Node(NamedTuple):
    """A broker, as clients know it."""

    id: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class MetadataTopic:
    error: int
    name: str | None
    id: UUID | None = None
    internal: bool = False
    leaders: tuple[int, ...] = ()  # of each partition


@dataclass(frozen=True, slots=True)
class Metadata:
    nodes: tuple[Node, ...]
    cluster_id: str
    controller: int
    topics: tuple[MetadataTopic, ...]


def metadata_answer(version: int, found: Metadata) -> list[Piece]:
    """A Metadata answer of version 0 to 13."""
    out = Writer(version >= 9)
    if version >= 3:
        out.i32(0)
    out.count(len(found.nodes))
    for node in found.nodes:
        out.i32(node.id)
        out.string(node.host)
        out.i32(node.port)
        if version >= 1:
            out.string(None)
        out.tags()
    if version >= 2:
        out.string(found.cluster_id)
    if version >= 1:
        out.i32(found.controller)
    out.count(len(found.topics))
    for topic in found.topics:
        _described(out, version, topic)
    if 8 <= version <= 10:
        out.i32(NO_OPERATIONS)
    if version >= 13:
        out.i16(0)
    out.tags()
    return out.done()


def _described(out: Writer, version: int, topic: MetadataTopic) -> None:
    out.i16(topic.error)
    out.string(topic.name if version >= 12 else topic.name or "")
    if version >= 10:
        out.uuid(topic.id or NO_UUID)
    if version >= 1:
        out.i8(int(topic.internal))
    out.count(len(topic.leaders))
    for index, leader in enumerate(topic.leaders):
        out.i16(0)
        out.i32(index)
        out.i32(leader)
        if version >= 7:
            out.i32(0)  # there is one epoch of leaders, for ever
        out.numbers((leader,))
        out.numbers((leader,))
        if version >= 5:
            out.numbers(())
        out.tags()
    if version >= 8:
        out.i32(NO_OPERATIONS)
    out.tags()


# ---- ApiVersions ----


def api_versions(version: int, ranges: Sequence[tuple[int, int, int]], error: int = 0) -> list[Piece]:
    """An ApiVersions answer of version 0 to 5: (key, lowest, highest) of what is served. No features."""
    out = Writer(version >= 3)
    out.i16(error)
    out.count(len(ranges))
    for key, lowest, highest in ranges:
        out.i16(key)
        out.i16(lowest)
        out.i16(highest)
        out.tags()
    if version >= 1:
        out.i32(0)
    out.tags()
    return out.done()
