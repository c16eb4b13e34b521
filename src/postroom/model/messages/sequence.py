"""Whether a producer's batch is new, a repeat, or out of place (I3).

Decides it from what a store remembers for one (producer id, partition): the epoch and the newest batches.
Only the exact next batch is stored; a repeat is answered with its first offset; whatever can no longer be
told is an error of unknown fate, never success. Must never be asked about one-way sends (they carry no
sequence), and its answer holds only under the partition's lock.

Sequences count messages from 0 and wrap at 2**31: after 2147483647 comes 0.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ...errors import ProducerFenced, SequenceGap, StoreCorrupt, UnknownFate, UnknownProducer

__all__ = ["MODULUS", "Remembered", "SequenceState", "check", "next_sequence", "pack", "remember", "unpack"]

MODULUS = 2**31

_VERSION = 1
_HEAD = struct.Struct(">Bh")  # version, epoch
_ENTRY = struct.Struct(">iiq")  # first, last, offset


@dataclass(frozen=True, slots=True)
class Remembered:
    first: int  # sequence of its first message
    last: int  # sequence of its last message; below `first` where the sequence wrapped
    offset: int  # offset of its first message


@dataclass(frozen=True, slots=True)
class SequenceState:
    epoch: int
    recent: tuple[Remembered, ...]  # oldest first, without gaps; at least as many as may be in flight

    @property
    def expected(self) -> int:
        return (self.recent[-1].last + 1) % MODULUS if self.recent else 0


def next_sequence(first: int, count: int) -> int:
    """The sequence that follows a batch of `count` messages which starts at `first`."""
    return (first + count) % MODULUS


def check(state: SequenceState | None, epoch: int, first: int, count: int) -> int | None:
    """Return None if the batch is the exact next; a number is the first offset of the one it repeats."""
    if not (0 <= first < MODULUS and 0 < count < MODULUS):
        raise ValueError(f"no batch has {count} messages from sequence {first}")
    if state is not None and epoch < state.epoch:
        raise ProducerFenced(
            f"epoch {epoch} of this producer was replaced by {state.epoch}: close it, a newer one is in use",
            epoch=epoch,
            current=state.epoch,
        )
    if state is None or epoch > state.epoch:
        _check_start(first)
        return None
    last = next_sequence(first, count - 1)
    for batch in reversed(state.recent):
        if batch.first == first and batch.last == last:
            return batch.offset
    _check_next(state.expected, first)
    return None


def _check_start(first: int) -> None:
    if first != 0:
        raise UnknownProducer(
            f"a producer or epoch not known here starts at sequence 0, not {first}: begin a new epoch",
            first=first,
        )


def _check_next(expected: int, first: int) -> None:
    ahead = (first - expected) % MODULUS
    if ahead == 0:
        return
    if ahead < MODULUS // 2:
        raise SequenceGap(
            f"sequence {first} came before {expected}: send the missing batches, then this one again",
            expected=expected,
            first=first,
        )
    raise UnknownFate(
        f"sequence {first} lies before {expected} and matches no remembered batch: whether it was stored "
        "cannot be told; look into the partition before sending it again",
        expected=expected,
        first=first,
    )


def remember(
    state: SequenceState | None, epoch: int, first: int, count: int, offset: int, keep: int
) -> SequenceState:
    """The state once a batch that `check` let through is stored at `offset`; a new epoch forgets the old."""
    if keep < 1:
        raise ValueError("at least one batch must be remembered")
    earlier = state.recent if state is not None and state.epoch == epoch else ()
    batch = Remembered(first, next_sequence(first, count - 1), offset)
    return SequenceState(epoch, (*earlier, batch)[-keep:])


def pack(state: SequenceState) -> bytes:
    """Return the state for a column of the store: 3 bytes, and 16 for each remembered batch."""
    entries = (_ENTRY.pack(batch.first, batch.last, batch.offset) for batch in state.recent)
    return _HEAD.pack(_VERSION, state.epoch) + b"".join(entries)


def unpack(packed: bytes) -> SequenceState:
    if len(packed) < _HEAD.size or packed[0] != _VERSION or (len(packed) - _HEAD.size) % _ENTRY.size:
        raise StoreCorrupt(f"a producer's stored sequence is damaged ({len(packed)} bytes): run doctor")
    _, epoch = _HEAD.unpack_from(packed)
    entries = _ENTRY.iter_unpack(packed[_HEAD.size :])
    return SequenceState(epoch, tuple(Remembered(*entry) for entry in entries))
