"""How messages that wait as rows in a spool or an outbox become stamped batches (I12, I21).

Decides which rows go together, to which partition, and in which order (`batch_line`). Rows of one key are on
one line, in the order of their ids, so they are stored in that order. A batch has one due moment.

A stamp says, durably and before anything is sent, which batch a row belongs to: whoever resumes builds the
same batch from the rows of one stamp, and the partition knows by its sequence whether it has it (I3). Must
never put rows of two stamps together, nor leave a row of a stamp out.

No clock, no randomness: the mover draws producer ids, and counts sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from ..messages.batch import BatchBuilder, Headers
from ..messages.ids import NO_ID, digests
from ..topology.route import Range, Route
from .batch_line import BatchLine, strand_of

__all__ = [
    "Batch",
    "ForwardRow",
    "Line",
    "Stamp",
    "build",
    "ids_of",
    "pack_headers",
    "plan",
    "resumed",
]

Line: TypeAlias = tuple[int, int]
"""Partition id, and the strand: 0 for what is stored at once."""

_WHOLE = 2**31 - 1  # a batch is what was stamped together, whatever its size
_OVERHEAD = 32  # bytes of a message beside its content

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[tuple[str, bytes | None]]).decode


class Stamp(NamedTuple):
    """Under which identity a batch is appended, and where."""

    producer_id: int
    partition_id: int
    sequence: int  # of the batch's first message


class ForwardRow(NamedTuple):
    """A message that waits. Its content was checked when it was written (`codec.pack`)."""

    id: int  # in the order of writing
    topic: str
    key: bytes | None
    value: bytes
    headers: bytes  # as `pack_headers` has it, with Postroom's own; empty: none
    message_id: str | None
    timestamp: int
    due_at: int  # 0: now
    slot: int | None  # named by the sender
    stamp: Stamp | None = None

    @property
    def size(self) -> int:
        return len(self.value) + len(self.key or b"") + len(self.headers) + _OVERHEAD


class Batch(NamedTuple):
    """Rows that are appended together, and deleted together."""

    topic: str
    stamp: Stamp
    rows: list[ForwardRow]

    @property
    def due_at(self) -> int:
        return self.rows[0].due_at


def pack_headers(headers: Headers) -> bytes:
    return _encode(headers) if headers else b""


def resumed(rows: Iterable[ForwardRow]) -> list[Batch]:
    """The batches of rows that are stamped, oldest first."""
    found: dict[Stamp, Batch] = {}
    for row in sorted(rows, key=lambda row: row.id):
        assert row.stamp is not None, "these are stamped"
        batch = found.get(row.stamp)
        if batch is None:
            batch = found[row.stamp] = Batch(row.topic, row.stamp, [])
        batch.rows.append(row)
    return list(found.values())


# ---- planning ----


def plan(
    rows: Sequence[ForwardRow], routes: Mapping[str, Route], turns: Mapping[str, int]
) -> list[tuple[str, Line, list[ForwardRow]]]:
    """Which rows are the next batches; topic, line and rows, those of one line in their order.

    `routes` are by topic. Messages without a key or slot go to the partition whose turn it is, of those that
    are not away. Rows that come when the batches of their line are full are left for later.
    """
    planned: list[tuple[str, Line, list[ForwardRow]]] = []
    lines: dict[Line, BatchLine[ForwardRow]] = {}
    for row in rows:
        place = _place(row, routes[row.topic], turns.get(row.topic, 0))
        line = (place.partition_id, strand_of(row.due_at))
        batches = lines.get(line)
        if batches is None:
            batches = lines[line] = BatchLine()
        if not batches.takes(1, row.size, row.due_at):
            batches.closed = True
        elif batches.add(row, 1, row.size, row.due_at):
            planned.append((row.topic, line, batches.batches[-1].items))
    return planned


def _place(row: ForwardRow, route: Route, turn: int) -> Range:
    if row.slot is not None:
        return route.of_slot(row.slot)
    if row.key is not None:
        return route.of_slot(route.slot_of(row.key))
    if row.message_id is not None and route.by_id:
        return route.of_slot(route.slot_of(row.message_id.encode()))
    here = [piece for piece in route.ranges if piece.partition_id not in route.away] or route.ranges
    return here[turn % len(here)]


# ---- building ----


def build(batch: Batch) -> bytes:
    """The batch as it is appended: whoever builds it, from the same rows, has the same messages."""
    builder = BatchBuilder("lz4", max_bytes=_WHOLE)
    for row in batch.rows:
        headers = _decode(row.headers) if row.headers else []
        builder.append(row.timestamp, row.key, row.value, headers)
    return builder.build(batch.stamp.producer_id, 0, batch.stamp.sequence)


def ids_of(batch: Batch, by_id: bool) -> bytes:
    """What the partition is told of the messages' ids: it looks at them if they are delayed, or `by_id`."""
    if not by_id and not batch.due_at:
        return b""
    ids = [row.message_id for row in batch.rows]
    return NO_ID * len(ids) if not any(ids) else digests(ids)
