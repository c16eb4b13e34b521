"""Replies as they travel: most as they are, and what holds batches or a route in a form of its own.

A reply with batches is a header that has where each begins in its log and how long it is, and a body that has
them. Offsets, records and times are in the header, since the broker does not open batches, and a reader needs
them before it does. `packed` and `unpacked` choose by the type of the reply that the operation's row names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from ..endpoint.operations import OPERATIONS, Operation
from ..endpoint.values import DeadLetters, DelayedBatch, Fetched, Grant, Lease, PollReply, StoppedMessage
from ..errors import ProtocolError
from ..model.delivery.delivery import Line, Span
from ..model.messages.slot import Keys
from ..model.policy.slow_lane import LaneView
from ..model.topology.route import Range, Route
from ..store.contract import StoredBatch
from .frames import Frame
from .messages import decode

__all__ = [
    "BatchHead", "DelayedHead", "FetchedHead", "GrantHead", "LettersHead", "PollHead", "RouteHead",
    "StoppedHead", "head_of", "packed", "unpacked",
]  # fmt: skip

Packed = tuple[Any, Sequence[bytes]]
"""What goes into the header, and what follows it."""


# ---- batches ----


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


class DelayedHead(msgspec.Struct, array_like=True, frozen=True):
    row: int
    partition_id: int
    due_at: int
    records: int
    bytes: int


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
    return tuple([BatchHead(b.base_offset, b.records, b.appended_at, len(b.data)) for b in batches])


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


def _pack_fetched(reply: Fetched) -> Packed:
    head = FetchedHead(_heads(reply.batches), reply.start, reply.end, reply.sealed)
    return head, [batch.data for batch in reply.batches]


def _fetched(head: FetchedHead, body: bytes) -> Fetched:
    return Fetched(_Body(body).take(head.batches), head.start, head.end, head.sealed)


def _pack_poll(reply: PollReply) -> Packed:
    grants = tuple(
        [
            GrantHead(g.topic, g.partition, g.partition_id, g.leases, _heads(g.batches), g.position, g.lines)
            for g in reply.grants
        ]
    )
    head = PollHead(
        grants, reply.lease_ms, reply.draining, reply.revoked, reply.lost, reply.started_ms, reply.lanes
    )
    return head, [batch.data for grant in reply.grants for batch in grant.batches]


def _polled(head: PollHead, body: bytes) -> PollReply:
    batches = _Body(body)
    grants = tuple(
        Grant(g.topic, g.partition, g.partition_id, g.leases, batches.take(g.batches), g.position, g.lines)
        for g in head.grants
    )
    return PollReply(
        grants, head.lease_ms, head.draining, head.revoked, head.lost, head.started_ms, head.lanes
    )


def _pack_letters(reply: Sequence[DeadLetters]) -> Packed:
    heads = [LettersHead(d.topic, d.partition, d.partition_id, d.open, _heads(d.batches)) for d in reply]
    return heads, [batch.data for letters in reply for batch in letters.batches]


def _letters(heads: Sequence[LettersHead], body: bytes) -> list[DeadLetters]:
    batches = _Body(body)
    return [DeadLetters(h.topic, h.partition, h.partition_id, h.open, batches.take(h.batches)) for h in heads]


def _pack_stopped(reply: Sequence[StoppedMessage]) -> Packed:
    heads = [
        StoppedHead(
            one.topic, one.partition, one.partition_id, one.attempts, one.reason, one.since,
            _heads([one.batch])[0], one.behind, one.more_behind,
        )
        for one in reply
    ]  # fmt: skip
    return heads, [one.batch.data for one in reply]


def _stopped(heads: Sequence[StoppedHead], body: bytes) -> list[StoppedMessage]:
    batches = _Body(body)
    return [
        StoppedMessage(
            h.topic, h.partition, h.partition_id, h.attempts, h.reason, h.since,
            batches.take([h.batch])[0], h.behind, h.more_behind,
        )
        for h in heads
    ]  # fmt: skip


def _pack_delayed(reply: Sequence[DelayedBatch]) -> Packed:
    heads = [DelayedHead(d.row, d.partition_id, d.due_at, d.records, len(d.data)) for d in reply]
    return heads, [one.data for one in reply]


def _delayed(heads: Sequence[DelayedHead], body: bytes) -> list[DelayedBatch]:
    cut = _Body(body).take([BatchHead(0, h.records, 0, h.bytes) for h in heads])
    return [
        DelayedBatch(h.row, h.partition_id, h.due_at, h.records, batch.data)
        for h, batch in zip(heads, cut, strict=True)
    ]


# ---- routes: what a reader needs, and nothing of what a `Route` computes for itself ----


class RouteHead(msgspec.Struct, frozen=True):
    topic: str
    version: int
    ranges: tuple[Range, ...]
    by_id: bool = False
    sealed: tuple[Range, ...] = ()
    predecessors: Mapping[int, tuple[int, ...]] = {}
    away: tuple[int, ...] = ()  # ids of ranges' partitions whose shard does not answer now
    keys: Keys = "postroom"


def _head(one: Route) -> RouteHead:
    return RouteHead(
        one.topic, one.version, one.ranges, one.by_id, one.sealed, one.predecessors, one.away, one.keys
    )


def _pack_route(reply: Route) -> Packed:
    return _head(reply), ()


def _pack_routes(reply: Sequence[Route]) -> Packed:
    return [_head(one) for one in reply], ()


def _route(head: RouteHead, body: bytes = b"") -> Route:
    try:
        return Route(
            head.topic, head.version, head.ranges, head.by_id, head.sealed, dict(head.predecessors),
            head.away, head.keys,
        )  # fmt: skip
    except AssertionError as error:
        raise ProtocolError(f"the route of {head.topic!r} is none: {error}") from error


def _routes(heads: Sequence[RouteHead], body: bytes = b"") -> list[Route]:
    return [_route(head) for head in heads]


# ---- by the type of the reply ----


class _Form(NamedTuple):
    """The form in which replies of one type travel."""

    head: Any  # the type of the header
    pack: Callable[[Any], Packed]
    unpack: Callable[[Any, bytes], Any]


_FORMS: dict[Any, _Form] = {
    Fetched: _Form(FetchedHead, _pack_fetched, _fetched),
    PollReply: _Form(PollHead, _pack_poll, _polled),
    list[DeadLetters]: _Form(list[LettersHead], _pack_letters, _letters),
    list[DelayedBatch]: _Form(list[DelayedHead], _pack_delayed, _delayed),
    list[StoppedMessage]: _Form(list[StoppedHead], _pack_stopped, _stopped),
    Route: _Form(RouteHead, _pack_route, _route),
    list[Route]: _Form(list[RouteHead], _pack_routes, _routes),
}
_OF = {operation: _FORMS[operation.reply] for operation in OPERATIONS.values() if operation.reply in _FORMS}


def head_of(operation: Operation) -> Any:
    """The type of the header of its reply."""
    form = _OF.get(operation)
    return operation.reply if form is None else form.head


def packed(operation: Operation, reply: Any) -> Packed:
    form = _OF.get(operation)
    return (reply, ()) if form is None else form.pack(reply)


def unpacked(operation: Operation, frame: Frame) -> Any:
    """The reply in a frame that answers this operation; ProtocolError if it holds another."""
    form = _OF.get(operation)
    if form is None:
        return decode(frame.header, operation.reply)
    return form.unpack(decode(frame.header, form.head), frame.body)
