"""Settles and heartbeats of any size, cut into requests that a broker takes.

A request has room for so many deliveries, and its header for so many bytes (`model.bounds`, `wire.messages`).
A consumer may hold more: what it says of it then goes in several requests, each of which stands for itself.
Almost always there is one, and it is passed on as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from ..broker.endpoint import Beat, Settle, Verdict
from ..model.bounds import MOST_PARTS
from ..model.reason import as_reason

__all__ = ["beatings", "settles"]

T = TypeVar("T")

_ROOM = 256 * 1024  # bytes of a header, reckoned high; it may have twice as many
_FEW = 200  # deliveries and verdicts together, or spans: if none has a long reason they fit
_SHORT = 200  # characters of a reason
_PART_BYTES = 320  # a delivery, with the name of its topic
_VERDICT_BYTES = 120
_SPAN_BYTES = 20


def settles(parts: Sequence[Settle]) -> Iterator[Sequence[Settle]]:
    """What is settled together, in the order in which it came."""
    if len(parts) + sum(len(part.verdicts) for part in parts) <= _FEW and not any(
        len(verdict.reason) > _SHORT for part in parts for verdict in part.verdicts
    ):
        yield parts
        return
    pieces = (piece for part in parts for piece in _cut(part))
    yield from _portions(pieces, MOST_PARTS)


def _cut(part: Settle) -> Iterator[tuple[Settle, int]]:
    """The part in pieces, with their sizes; whole if it parks: what a line claims is acked with it (I27)."""
    verdicts = [(_shorter(verdict), _size(verdict)) for verdict in part.verdicts]
    if any(verdict.kind == "park" for verdict in part.verdicts):
        whole = tuple(verdict for verdict, _ in verdicts)
        yield replace(part, verdicts=whole), _PART_BYTES + sum(size for _, size in verdicts)
        return
    for some in _portions(verdicts, _ROOM):
        yield replace(part, verdicts=tuple(some)), _PART_BYTES + sum(map(_size, some))


def _shorter(verdict: Verdict) -> Verdict:
    return replace(verdict, reason=as_reason(verdict.reason)) if len(verdict.reason) > _SHORT else verdict


def _size(verdict: Verdict) -> int:
    key = verdict.line.key if verdict.line is not None else None
    return _VERDICT_BYTES + 4 * len(as_reason(verdict.reason)) + len(key or b"")


def beatings(beats: Sequence[Beat]) -> Iterator[Sequence[Beat]]:
    """Heartbeats that go together. A member is heard of in each that has some of its deliveries."""
    if sum(1 + len(held.spans) for beat in beats for held in beat.held) <= _FEW:
        yield beats
        return
    for beat in beats:
        pieces = (
            (replace(held, spans=tuple(some)), _PART_BYTES + _SPAN_BYTES * len(some))
            for held in beat.held
            for some in _portions(((span, _SPAN_BYTES) for span in held.spans), _ROOM)
        )
        for held in list(_portions(pieces, MOST_PARTS)) or [[]]:
            yield [replace(beat, held=tuple(held))]


def _portions(items: Iterable[tuple[T, int]], most: int) -> Iterator[list[T]]:
    """Items that come with their sizes, as many together as there is room for."""
    some: list[T] = []
    used = 0
    for item, size in items:
        if some and (used + size > _ROOM or len(some) >= most):
            yield some
            some, used = [], 0
        some.append(item)
        used += size
    if some:
        yield some
