"""One batch alone, appended by what is known of its partition: the short way of a single send.

Whoever appended to a partition last knows where it ends and what is remembered of its producers, as long as
nobody else appends there. So a batch that is alone in its commit is decided by that, before the database is
asked, and written on the condition that all of it still holds: fewer statements, and on a server one round
trip with the commit in it. Where it does not hold nothing is written, and the batch goes the long way,
under the partition's lock (I1). On SQLite a few batches for different partitions, such as those of a list
with keys, go the short way together, all or none.

Known is only what a commit of this process has confirmed (I2). The condition covers everything the decision
was made by: the end of the log, whether it is open, and the producer's sequence (I3); on a server also the
time, which is known from earlier answers (I16). Where it failed once, the short way is not tried again until
nobody else has come between two appends of ours.

The three statements are here; what makes one depend on the other is up to the dialect.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ....errors import PostroomError
from ....model.messages import sequence
from ....model.messages.batch import BatchHeader
from ....model.policy.bounds import make_room

__all__ = [
    "ADVANCE",
    "INSERT",
    "INSERTED",
    "REMEMBER",
    "KnownEnds",
    "Line",
    "LoneAppend",
    "OtherwiseError",
    "SentLone",
]

_MOST = 10_000  # partitions, and sequences in them; the older half is forgotten, and goes the long way once

ADVANCE = """UPDATE postroom_partitions SET next_offset = ?, next_bytes = ?, appended_at = ?
             WHERE id = ? AND next_offset = ? AND next_bytes = ? AND state IN ('new', 'open')"""
REMEMBER = """UPDATE postroom_sequences SET state = ?, seen_at = ?
              WHERE producer_id = ? AND partition_id = ? AND state = ?"""
INSERT = """INSERT INTO {log}
            (base_offset, records, bytes, bytes_before, appended_at, first_ts, last_ts, batch)"""
INSERTED = "?, ?, ?, ?, ?, ?, ?, ?"

Line = tuple[int, int]
"""The producer whose sequence it is, and the partition."""


class OtherwiseError(Exception):
    """Something is not as it was known to be: nothing is written, and the long way finds out what."""


@dataclass(slots=True)
class _End:
    """How an open partition ended after the last append of this process."""

    next_offset: int
    next_bytes: int
    appended_at: int
    ours: bool  # nobody else is known to append there


@dataclass(slots=True)
class LoneAppend:
    """A batch, where it goes, and what has to hold for that."""

    partition_id: int
    offset: int  # the end of the partition as it is known, which the batch gets
    bytes_before: int
    appended_at: int  # of the batch before it: times do not go back
    next_offset: int  # the end with it
    next_bytes: int
    header: BatchHeader
    batch: bytes  # with its offset
    line: Line
    known: sequence.SequenceState
    remembered: sequence.SequenceState

    def arguments(self, at: int) -> tuple[tuple[int, ...], tuple[Any, ...], tuple[Any, ...]]:
        """Return what `ADVANCE`, `REMEMBER` and `INSERT` take if it is stored at that time."""
        header, offset, before = self.header, self.offset, self.bytes_before
        return (
            (self.next_offset, self.next_bytes, at, self.partition_id, offset, before),
            (self.remembered, at, *self.line, self.known),
            (offset, header.records, header.size, before, at, header.first_ts, header.last_ts, self.batch),
        )


class SentLone(Protocol):
    """A lone append that a dialect has sent and that is not answered yet."""

    at: int  # the time it is stored at
    unsent: bool
    patience_s: float

    def fileno(self) -> int: ...

    def answered(self) -> bool:
        """Read what has come, without waiting; return whether that is all."""

    def stored(self) -> bool:
        """Return what the answer says; False: something is otherwise, and nothing is written."""


class KnownEnds:
    """Any thread may use it: what another has changed in between fails the condition, and no more."""

    def __init__(self, remembered: int) -> None:
        """`remembered`: how many batches of a producer are, in a partition."""
        self._remembered = remembered
        self._ends: dict[int, _End] = {}
        self._sequences: dict[Line, sequence.SequenceState] = {}

    def plan(
        self, header: BatchHeader, line: Line, stored: Callable[[int], bytes], seen: int
    ) -> LoneAppend | None:
        """Return where the batch goes if all is as it was; None: that is not known, or it is not the next.

        `stored`: the batch, by its offset. `seen`: the highest end of the partition that anybody saw here.
        """
        end, known = self._ends.get(line[1]), self._sequences.get(line)
        if end is None or known is None or not end.ours or end.next_offset != seen:
            return None
        offset, count = end.next_offset, header.records
        try:
            remembered = sequence.followed(
                known, header.epoch, header.base_sequence, count, offset, self._remembered
            )
        except PostroomError:
            return None
        if remembered is None:
            return None
        return LoneAppend(
            line[1], offset, end.next_bytes, end.appended_at, offset + count, end.next_bytes + header.size,
            header, stored(offset), line, known, remembered,
        )  # fmt: skip

    def stored(self, lone: LoneAppend, appended_at: int) -> None:
        """It is committed."""
        self._ends[lone.partition_id] = _End(lone.next_offset, lone.next_bytes, appended_at, ours=True)
        self._sequences[lone.line] = lone.remembered

    def saw(
        self,
        ends: Iterable[tuple[int, int, tuple[int, int, int]]],
        sequences: Mapping[Line, sequence.SequenceState | None],
    ) -> None:
        """Remember what a commit on the long way left: of each open partition its offset before and its end
        (offset, bytes, time), and the sequences."""
        for partition_id, before, after in ends:
            last = self._ends.get(partition_id)
            if last is None:
                make_room(self._ends, _MOST)
            self._ends[partition_id] = _End(*after, ours=last is None or last.next_offset == before)
        for line, state in sequences.items():
            if state is not None:
                if line not in self._sequences:
                    make_room(self._sequences, _MOST)
                self._sequences[line] = state

    def doubt(self, partition_id: int) -> None:
        """Something was not as it is known, or it is not known whether the last append is stored."""
        end = self._ends.get(partition_id)
        if end is not None:
            end.ours = False
