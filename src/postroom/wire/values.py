"""Batches behind a header: the header has where each begins in its log and how long it is, the body has them.

Offsets, records and times are in the header, since the broker does not open batches, and a reader needs them
before it does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..endpoint.values import DeadLetters, Fetched, Grant, Lease, PollReply, StoppedMessage
from ..errors import ProtocolError
from ..model.delivery.delivery import Line, Span
from ..model.policy.slow_lane import LaneView
from ..model.topology.route import Range, Route
from ..store.contract import StoredBatch

__all__ = [
    "BatchHead",
    "FetchedHead",
    "GrantHead",
    "LettersHead",
    "PollHead",
    "RouteHead",
    "StoppedHead",
    "fetched",
    "letters",
    "pack_fetched",
    "pack_letters",
    "pack_poll",
    "pack_route",
    "pack_routes",
    "pack_stopped",
    "polled",
    "route",
    "routes",
    "stopped",
]


class BatchHead(NamedTuple):
    base_offset: int
    records: int
    appended_at: int
    bytes: int


class FetchedHead(msgspec.Struct, array_like=True, frozen=True):
    batches: tuple[BatchHead, ...]
    start: int
    end: int
    sealed: bool = False


class GrantHead(msgspec.Struct, array_like=True, frozen=True):
    topic: str
    partition: int
    partition_id: int
    leases: tuple[Lease, ...]
    batches: tuple[BatchHead, ...]
    position: int = -1
    lines: tuple[Line, ...] = ()


class PollHead(msgspec.Struct, array_like=True, frozen=True):
    grants: tuple[GrantHead, ...]
    lease_ms: int
    draining: bool = False
    revoked: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    started_ms: int = 0
    lanes: LaneView | None = None


class LettersHead(msgspec.Struct, array_like=True, frozen=True):
    topic: str
    partition: int
    partition_id: int
    open: tuple[Span, ...]
    batches: tuple[BatchHead, ...]


class StoppedHead(msgspec.Struct, array_like=True, frozen=True):
    topic: str
    partition: int
    partition_id: int
    attempts: int
    reason: str
    since: int
    batch: BatchHead  # of the message alone: it begins at its offset
    behind: int | None = None
    more_behind: bool = False


def _heads(batches: Iterable[StoredBatch]) -> tuple[BatchHead, ...]:
    return tuple(BatchHead(b.base_offset, b.records, b.appended_at, len(b.data)) for b in batches)


class _Body:
    """Batches cut from a body, one after the other."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._at = 0

    def take(self, heads: Sequence[BatchHead]) -> tuple[StoredBatch, ...]:
        return tuple(self._cut(heads))

    def _cut(self, heads: Sequence[BatchHead]) -> Iterator[StoredBatch]:
        for head in heads:
            end = self._at + head.bytes
            if head.bytes < 0 or end > len(self._body):
                raise ProtocolError("a frame has fewer bytes of batches than its header says")
            yield StoredBatch(head.base_offset, head.records, head.appended_at, self._body[self._at : end])
            self._at = end


def pack_fetched(reply: Fetched) -> tuple[Any, Sequence[bytes]]:
    head = FetchedHead(_heads(reply.batches), reply.start, reply.end, reply.sealed)
    return head, [batch.data for batch in reply.batches]


def fetched(head: FetchedHead, body: bytes) -> Fetched:
    return Fetched(_Body(body).take(head.batches), head.start, head.end, head.sealed)


def pack_poll(reply: PollReply) -> tuple[Any, Sequence[bytes]]:
    grants = tuple(
        GrantHead(g.topic, g.partition, g.partition_id, g.leases, _heads(g.batches), g.position, g.lines)
        for g in reply.grants
    )
    head = PollHead(
        grants, reply.lease_ms, reply.draining, reply.revoked, reply.lost, reply.started_ms, reply.lanes
    )
    return head, [batch.data for grant in reply.grants for batch in grant.batches]


def polled(head: PollHead, body: bytes) -> PollReply:
    batches = _Body(body)
    grants = tuple(
        Grant(g.topic, g.partition, g.partition_id, g.leases, batches.take(g.batches), g.position, g.lines)
        for g in head.grants
    )
    return PollReply(
        grants, head.lease_ms, head.draining, head.revoked, head.lost, head.started_ms, head.lanes
    )


def pack_letters(reply: Sequence[DeadLetters]) -> tuple[Any, Sequence[bytes]]:
    heads = [LettersHead(d.topic, d.partition, d.partition_id, d.open, _heads(d.batches)) for d in reply]
    return heads, [batch.data for letters in reply for batch in letters.batches]


def letters(heads: Sequence[LettersHead], body: bytes) -> list[DeadLetters]:
    batches = _Body(body)
    return [DeadLetters(h.topic, h.partition, h.partition_id, h.open, batches.take(h.batches)) for h in heads]


def pack_stopped(reply: Sequence[StoppedMessage]) -> tuple[Any, Sequence[bytes]]:
    heads = [
        StoppedHead(
            one.topic, one.partition, one.partition_id, one.attempts, one.reason, one.since,
            _heads([one.batch])[0], one.behind, one.more_behind,
        )
        for one in reply
    ]  # fmt: skip
    return heads, [one.batch.data for one in reply]


def stopped(heads: Sequence[StoppedHead], body: bytes) -> list[StoppedMessage]:
    batches = _Body(body)
    return [
        StoppedMessage(
            h.topic, h.partition, h.partition_id, h.attempts, h.reason, h.since,
            batches.take([h.batch])[0], h.behind, h.more_behind,
        )
        for h in heads
    ]  # fmt: skip


# ---- routes ----
# Routes as they travel: what a reader needs, and nothing of what a `Route` computes for itself.


class RouteHead(msgspec.Struct, frozen=True):
    topic: str
    version: int
    ranges: tuple[Range, ...]
    by_id: bool = False
    sealed: tuple[Range, ...] = ()
    predecessors: Mapping[int, tuple[int, ...]] = {}
    away: tuple[int, ...] = ()  # ids of ranges' partitions whose shard does not answer now


def _head(one: Route) -> RouteHead:
    return RouteHead(one.topic, one.version, one.ranges, one.by_id, one.sealed, one.predecessors, one.away)


def pack_route(reply: Route) -> tuple[Any, Sequence[bytes]]:
    return _head(reply), ()


def pack_routes(reply: Sequence[Route]) -> tuple[Any, Sequence[bytes]]:
    return [_head(one) for one in reply], ()


def route(head: RouteHead, body: bytes = b"") -> Route:
    try:
        return Route(
            head.topic, head.version, head.ranges, head.by_id, head.sealed, dict(head.predecessors), head.away
        )
    except AssertionError as error:
        raise ProtocolError(f"the route of {head.topic!r} is none: {error}") from error


def routes(heads: Sequence[RouteHead], body: bytes = b"") -> list[Route]:
    return [route(head) for head in heads]
