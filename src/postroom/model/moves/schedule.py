"""Delayed messages: how rows of the schedule that are due become batches of partitions' logs (I12).

Decides, for a number of due rows, which partition each message goes to and in which batches, and what of the
rows is left once the partitions have answered. A plan is written down before anything of it is stored; the
same plan over the same rows gives the same batches, whoever builds them, so that a partition recognises by
their sequences what it has already. Must never depend on anything but its arguments.

A row goes to the partition it was sent to, as long as that is in the newest route. Otherwise each of its
messages goes where its slot is now: the one it was sent with, else that of its key, else that of its id.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ...config import SLOTS
from ..messages.batch import (
    HEADER_SIZE,
    BatchBuilder,
    Record,
    is_compressed,
    measured_records,
    read_header,
    records,
    stamp,
)
from ..messages.ids import DIGEST_SIZE
from ..messages.sequence import next_sequence
from ..topology.names import HEADER_PREFIX
from ..topology.route import Route
from .batch_line import BatchLine

__all__ = [
    "DUTY",
    "EPOCH",
    "SLOT_HEADER",
    "DelayedPosition",
    "DelayedRow",
    "Home",
    "Opening",
    "Part",
    "Planned",
    "build",
    "decode",
    "encode",
    "ids_of",
    "is_large",
    "leaving",
    "left_of",
    "moved_rows",
    "plan",
    "without",
]

DUTY = "schedule"
"""The lease of whoever moves due messages."""

SLOT_HEADER = f"{HEADER_PREFIX}slot"
"""On a delayed message whose sender named a slot: its partition may be another one when it is due."""

EPOCH = 0
_ID = f"{HEADER_PREFIX}id"
_LARGE_RECORDS, _LARGE_BYTES = 250, 128 * 1024  # a row from here on is a batch of its own, unopened
_OPEN_BYTES = 32 * 1024 * 1024  # unpacked rows of one plan; the row that exceeds it is still taken
_WHOLE = 2**31 - 1  # internal appends are exempt from limits on size (I17)


Home = tuple[int, int]
"""Topic id and partition id."""

DelayedPosition = tuple[int, int, int]
"""Where a row is in a list of a topic's: its moment, a partition of its shard, and its id."""


@dataclass(frozen=True, slots=True)
class DelayedRow:
    """A row of the schedule: messages that were sent together and are due at one moment."""

    id: int
    topic_id: int
    partition_id: int  # it was sent to
    due_at: int
    records: int
    batch: bytes = field(repr=False)
    ids: bytes = field(default=b"", repr=False)  # 16 bytes a message, as far as they are known

    @property
    def home(self) -> Home:
        return self.topic_id, self.partition_id

    @property
    def position(self) -> DelayedPosition:
        return self.due_at, self.partition_id, self.id


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    row: int
    places: tuple[int, ...] = ()  # of messages in the row; none: all of it


class Planned(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A batch that is to be stored."""

    partition_id: int
    sequence: int
    records: int
    parts: tuple[Part, ...]


def encode(planned: Sequence[Planned]) -> bytes:
    return msgspec.msgpack.encode(planned)


_decode = msgspec.msgpack.Decoder(list[Planned]).decode


def decode(stored: bytes) -> list[Planned]:
    return _decode(stored)


# ---- planning ---------------------------------------------------------------------------------------


class Opening:
    """Opens each row once, for whoever plans and then builds, and says whether there is room for another.

    A row of a few bytes may unpack to megabytes: rows are counted by what they are once they are open.
    """

    def __init__(self, max_bytes: float = _OPEN_BYTES) -> None:
        self._known: dict[int, list[Record]] = {}
        self._room = max_bytes

    def __call__(self, row: DelayedRow) -> list[Record]:
        found = self._known.get(row.id)
        if found is None:
            found, size = measured_records(row.batch)
            self._known[row.id] = found
            self._room -= size
        return found

    def takes(self, row: DelayedRow) -> bool:
        return self._room > 0 or row.id in self._known


def is_large(row: DelayedRow) -> bool:
    """Whether a row is a batch of its own, as it is."""
    return row.records >= _LARGE_RECORDS or len(row.batch) >= _LARGE_BYTES


def plan(
    rows: Sequence[DelayedRow],
    routes: Mapping[int, Route],
    sequences: Mapping[int, int],
    open_row: Opening | None = None,
) -> list[Planned]:
    """Batches for as many of these rows as fit, each row whole, in the order of the rows.

    `routes` are by topic id, `sequences` what the mover uses next for a partition (0 where it is missing).
    Of two rows for one partition the first is never left for later while the second is taken.
    """
    open_row = open_row or Opening()
    draft = _Draft(sequences, open_row)
    homes = {
        topic_id: {piece.partition_id for piece in routes[topic_id].ranges}
        for topic_id in {row.topic_id for row in rows}
    }
    for row in itertools.takewhile(open_row.takes, rows):
        if row.partition_id in homes[row.topic_id]:
            draft.take(row, {row.partition_id: ()})
        else:
            draft.take(row, _targets(row, routes[row.topic_id], open_row))
    return draft.planned()


def _targets(row: DelayedRow, route: Route, open_row: Opening) -> dict[int, tuple[int, ...]]:
    """Which messages go to which partition, where it is no longer the one they were sent to."""
    places: dict[int, list[int]] = {}
    for place, record in enumerate(open_row(row)):
        target = route.of_slot(_slot(record, row.id, route)).partition_id
        places.setdefault(target, []).append(place)
    if len(places) == 1:
        return dict.fromkeys(places, ())
    return {target: tuple(found) for target, found in places.items()}


def _slot(record: Record, row_id: int, route: Route) -> int:
    """One without a key goes where its id would go as a key: whoever sends it again meets it there."""
    headers = dict(record.headers)
    named = headers.get(SLOT_HEADER)
    if named and named.isdigit():
        return int(named[:9]) % SLOTS
    key = record.key if record.key is not None else headers.get(_ID)
    return row_id % SLOTS if key is None else route.slot_of(key)


class _Piece(NamedTuple):
    """What a row brings to one partition."""

    part: Part
    records: int
    bytes: int  # unpacked
    kind: int | None  # None: not to be put together with others


class _Draft:
    def __init__(self, sequences: Mapping[int, int], open_row: Opening) -> None:
        self._sequences = sequences
        self._open_row = open_row
        self._lines: dict[int, BatchLine[Part]] = {}  # by partition

    def take(self, row: DelayedRow, targets: Mapping[int, tuple[int, ...]]) -> None:
        """Add a row to the batches of its partitions: to all of them, or to none."""
        found = []
        for target, places in targets.items():
            line = self._lines.get(target)
            if line is None:
                line = self._lines[target] = BatchLine()
            found.append((line, self._piece(row, places)))
        taken = all(line.takes(*piece[1:]) for line, piece in found)
        for line, piece in found:
            if taken:
                line.add(*piece)
            else:
                line.closed = True

    def _piece(self, row: DelayedRow, places: tuple[int, ...]) -> _Piece:
        part = Part(row.id, places)
        if not places and is_large(row):
            return _Piece(part, row.records, len(row.batch), None)
        if not places and not is_compressed(row.batch):
            return _Piece(part, row.records, len(row.batch) - HEADER_SIZE, 0)
        found = self._open_row(row)
        chosen = [found[place] for place in places] if places else found
        return _Piece(part, len(chosen), sum(map(_size, chosen)), 0)

    def planned(self) -> list[Planned]:
        found = []
        for partition_id, line in self._lines.items():
            sequence = self._sequences.get(partition_id, 0)
            for batch in line.batches:
                found.append(Planned(partition_id, sequence, batch.messages, tuple(batch.items)))
                sequence = next_sequence(sequence, batch.messages)
        return found


def _size(record: Record) -> int:
    size = len(record.value or b"") + len(record.key or b"")
    for name, value in record.headers:
        size += len(name) + len(value or b"")
    return size


# ---- building ---------------------------------------------------------------------------------------


def build(
    planned: Planned, rows: Mapping[int, DelayedRow], producer_id: int, open_row: Opening | None = None
) -> bytes:
    """The batch as it is stored. Its rows are sound: a new checksum would hide that they are not."""
    first = rows[planned.parts[0].row]
    if len(planned.parts) == 1 and not planned.parts[0].places:
        return stamp(first.batch, producer_id, EPOCH, planned.sequence)
    open_row = open_row or Opening()
    builder = BatchBuilder(read_header(first.batch).compression, max_bytes=_WHOLE)
    for part in planned.parts:
        found = open_row(rows[part.row])
        _add(builder, [found[place] for place in part.places] if part.places else found)
    return builder.build(producer_id, EPOCH, planned.sequence)


def ids_of(planned: Planned, rows: Mapping[int, DelayedRow]) -> bytes:
    """The ids of the batch's messages, as the log keeps them; zeros where one has none."""
    found = []
    for part in planned.parts:
        row = rows[part.row]
        known = row.ids or bytes(DIGEST_SIZE * row.records)
        found += [
            known[DIGEST_SIZE * at : DIGEST_SIZE * (at + 1)] for at in part.places or range(row.records)
        ]
    return b"".join(found)


def without(batch: bytes, places: Iterable[int]) -> bytes:
    """The batch without the messages at these places; at least one is left."""
    gone = set(places)
    builder = BatchBuilder(read_header(batch).compression, max_bytes=_WHOLE)
    _add(builder, [record for place, record in enumerate(records(batch)) if place not in gone])
    return builder.build()


def _add(builder: BatchBuilder, found: Iterable[Record]) -> None:
    for record in found:
        builder.append(record.timestamp, record.key, record.value, record.headers)


# ---- the outcome ------------------------------------------------------------------------------------


def moved_rows(planned: Sequence[Planned], stored: Sequence[bool]) -> tuple[set[int], dict[int, set[int]]]:
    """Rows that are wholly in their logs now, and of rows that are in part the places that are."""
    moved: dict[int, set[int]] = {}
    waiting: set[int] = set()
    for one, is_stored in zip(planned, stored, strict=True):
        for part in one.parts:
            if not is_stored:
                waiting.add(part.row)
            else:
                moved.setdefault(part.row, set()).update(part.places)
    whole = moved.keys() - waiting
    return set(whole), {row: moved[row] for row in moved.keys() & waiting}


def leaving(
    rows: Mapping[int, DelayedRow], whole: Iterable[int], partly: Mapping[int, Collection[int]]
) -> dict[Home, int]:
    """How many messages are no longer in the schedule once these rows are moved, wholly or in part."""
    found: dict[Home, int] = {}
    for row_id in whole:
        home = rows[row_id].home
        found[home] = found.get(home, 0) + rows[row_id].records
    for row_id, places in partly.items():
        home = rows[row_id].home
        found[home] = found.get(home, 0) + len(places)
    return found


def left_of(row: DelayedRow, moved: Iterable[int]) -> DelayedRow:
    """The row without the messages at these places."""
    gone = set(moved)
    kept = (place for place in range(row.records) if place not in gone)
    ids = b"".join(row.ids[DIGEST_SIZE * place : DIGEST_SIZE * (place + 1)] for place in kept)
    return DelayedRow(
        row.id,
        row.topic_id,
        row.partition_id,
        row.due_at,
        row.records - len(gone),
        without(row.batch, gone),
        ids,
    )
