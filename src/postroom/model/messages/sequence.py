"""Whether a producer's batch is new, a repeat, or out of place (I3).

Decides it from what a store remembers for one (producer id, partition): the epoch and the newest batches.
Only the exact next batch is stored; a repeat is answered with its first offset; whatever can no longer be
told is an error of unknown fate, never success. Must never be asked about one-way sends (they carry no
sequence), and its answer holds only under the partition's lock.

Sequences count messages from 0 and wrap at 2**31: after 2147483647 comes 0.

What is remembered stays as the bytes that the store keeps, since every append reads and writes it: a version,
the epoch, and 16 bytes for each of the newest batches, oldest first and without gaps.
"""

from __future__ import annotations

import struct
from typing import TypeAlias

from ...errors import ProducerFenced, SequenceGap, StoreCorrupt, UnknownFate, UnknownProducer

__all__ = [
    "MODULUS", "SequenceState", "check", "expected", "followed", "next_sequence", "recent", "remember",
    "shifted",
]  # fmt: skip

MODULUS = 2**31

SequenceState: TypeAlias = bytes
"""What is remembered of one producer in one partition."""

_VERSION = 1
_HEAD = struct.Struct(">Bh")  # version, epoch
_ENTRY = struct.Struct(">iiq")
_HEAD_SIZE, _ENTRY_SIZE = _HEAD.size, _ENTRY.size


def recent(state: SequenceState) -> list[tuple[int, int, int]]:
    """Return the remembered batches, oldest first: sequence of the first and of the last message (which is
    below the first where the sequence wrapped), and offset of the first."""
    _epoch_of(state)
    return list(_ENTRY.iter_unpack(state[_HEAD_SIZE:]))


def expected(state: SequenceState) -> int:
    """Return the sequence with which the next batch begins."""
    if len(state) == _HEAD_SIZE:
        return 0
    last: int = _ENTRY.unpack_from(state, len(state) - _ENTRY_SIZE)[1]
    return (last + 1) % MODULUS


def _epoch_of(state: SequenceState) -> int:
    if len(state) < _HEAD_SIZE or state[0] != _VERSION or (len(state) - _HEAD_SIZE) % _ENTRY_SIZE:
        raise StoreCorrupt(f"a producer's stored sequence is damaged ({len(state)} bytes): run doctor")
    epoch: int = _HEAD.unpack_from(state)[1]
    return epoch


def next_sequence(first: int, count: int) -> int:
    """The sequence that follows a batch of `count` messages which starts at `first`."""
    return (first + count) % MODULUS


def check(state: SequenceState | None, epoch: int, first: int, count: int) -> int | None:
    """Return None if the batch is the exact next; a number is the first offset of the one it repeats."""
    if not (0 <= first < MODULUS and 0 < count < MODULUS):
        raise ValueError(f"no batch has {count} messages from sequence {first}")
    if state is None:
        _check_start(first)
        return None
    current = _epoch_of(state)
    if epoch < current:
        raise ProducerFenced(
            f"epoch {epoch} of this producer was replaced by {current}: close it, a newer one is in use",
            epoch=epoch,
            current=current,
        )
    if epoch > current:
        _check_start(first)
        return None
    wanted = expected(state)
    if first == wanted:
        return None
    last = next_sequence(first, count - 1)
    for known_first, known_last, offset in reversed(recent(state)):
        if known_first == first and known_last == last:
            return offset
    _check_next(wanted, first)
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
    batch = _ENTRY.pack(first, (first + count - 1) % MODULUS, offset)
    if state is None or _epoch_of(state) != epoch:
        return _HEAD.pack(_VERSION, epoch) + batch
    oldest = max(_HEAD_SIZE, len(state) - _ENTRY_SIZE * (keep - 1))
    return state[:_HEAD_SIZE] + state[oldest:] + batch


def followed(
    state: SequenceState, epoch: int, first: int, count: int, offset: int, keep: int
) -> SequenceState | None:
    """Return what `remember` does for a batch that `check` lets through, if it follows the newest one in the
    same epoch; None: whether it is let through is up to `check`."""
    if len(state) <= _HEAD_SIZE or _epoch_of(state) != epoch or not 0 < count < MODULUS:
        return None
    last = _ENTRY.unpack_from(state, len(state) - _ENTRY_SIZE)[1]
    if first != (last + 1) % MODULUS:
        return None
    oldest = max(_HEAD_SIZE, len(state) - _ENTRY_SIZE * (keep - 1))
    return state[:_HEAD_SIZE] + state[oldest:] + _ENTRY.pack(first, (first + count - 1) % MODULUS, offset)


def shifted(state: SequenceState, by: int) -> SequenceState:
    """Return the state as a partition that follows another remembers it: its offsets are moved (I28)."""
    entries = (_ENTRY.pack(first, last, offset + by) for first, last, offset in recent(state))
    return state[:_HEAD_SIZE] + b"".join(entries)
