"""Records as columns: the bytes of a batch become Arrow arrays, and Arrow arrays the bytes of a batch.

The codec makes an object of every record, which is most of what reading and writing a row takes. Here numpy
looks at all records of a batch at once, and Arrow copies their bytes. It knows the usual form alone, records
without headers: for any other, and for bytes that are not sound, it has no answer, and whoever asks takes
the codec, which says what is wrong. Must never give anything else than the codec does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ...model.messages.batch import HEADER_SIZE, BatchHeader, Buffer

__all__ = ["Unpacked", "unpacked"]

_END = b"\0"  # of a record without headers
_LOG_TIME_AT, _LOG_TIME_BIT = 22, 0x08  # set: all records have the time of the batch
_MOST_BITS = 35  # of a number


class Unpacked(NamedTuple):
    """Arrays, one element a record."""

    keys: Any
    values: Any
    stamps: Any


def unpacked(batches: Sequence[tuple[Buffer, BatchHeader]]) -> Unpacked | None:
    """The records of batches that are not compressed; None: not all are of the usual form.

    Records follow each other, each behind its length, so that one would have to be read after the other. But
    the attributes of a record are a zero, and so is what the record before it ends with: where it may begin is
    found by those, and what is not in line with all others is no record.
    """
    try:
        import numpy as np
    except ImportError:
        return None
    import pyarrow as pa

    if any(plain[_LOG_TIME_AT] & _LOG_TIME_BIT for plain, _ in batches):
        return None
    joined = _END.join([b"", *(memoryview(plain)[HEADER_SIZE:] for plain, _ in batches), b""])
    data = np.frombuffer(joined, np.uint8)
    begin, attributes = _candidates(np, data)
    lengths, _ = _numbers(np, data, begin)
    deltas, at = _numbers(np, data, attributes + 1)
    places, at = _numbers(np, data, at)
    key_sizes, key_at = _numbers(np, data, at)
    key_end = key_at + np.maximum(key_sizes, 0)
    value_sizes, value_at = _numbers(np, data, key_end)
    value_end = value_at + np.maximum(value_sizes, 0)
    end = value_end + 1
    sound = attributes + lengths == end
    if not sound.all():
        found = (begin, end, deltas, places, key_sizes, key_at, key_end, value_sizes, value_at, value_end)
        begin, end, deltas, places, key_sizes, key_at, key_end, value_sizes, value_at, value_end = (
            one[sound] for one in found
        )
    counts = np.array([header.records for _, header in batches])
    firsts = np.cumsum(counts) - counts
    if len(begin) != counts.sum():
        return None
    follows = np.empty_like(end)  # where each begins if records are one behind the other
    follows[1:] = end[:-1]
    follows[firsts] = 1 + np.cumsum([0, *(len(plain) - HEADER_SIZE + 1 for plain, _ in batches[:-1])])
    usual = (
        (begin == follows).all()
        and end[-1] == len(data) - 1
        and not data[value_end].any()  # no headers
        and (places == np.arange(len(begin)) - np.repeat(firsts, counts)).all()
        and min(key_sizes.min(), value_sizes.min()) >= -1
    )
    if not usual:
        return None
    # Keys and values are every second one of the pieces that these places cut the bytes into.
    cuts = np.empty((len(begin), 4), np.int32)
    cuts[:, 0], cuts[:, 1], cuts[:, 2], cuts[:, 3] = key_at, key_end, value_at, value_end
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(joined)]
    pieces = pa.Array.from_buffers(pa.binary(), cuts.size - 1, buffers, null_count=0)
    first = np.arange(0, cuts.size, 4)
    keys = pieces.take(pa.array(first, mask=key_sizes < 0))
    values = pieces.take(pa.array(first + 2, mask=value_sizes < 0))
    times = np.repeat(np.array([header.first_ts for _, header in batches]), counts)
    return Unpacked(keys, values, pa.array(deltas + times))


def _candidates(np: Any, data: Any) -> tuple[Any, Any]:
    """Where records may begin, with a length of one to three bytes, and where their attributes are."""
    zeros = 2 + np.flatnonzero(data[2:] == 0)
    begin = zeros - 1
    for _ in range(2):
        begin -= data.take(begin - 1, mode="clip") > 127
    found = (data.take(begin - 1, mode="clip") == 0) & (data.take(zeros - 1) < 128) & (begin > 0)
    return begin[found], zeros[found]


def _numbers(np: Any, data: Any, at: Any) -> tuple[Any, Any]:
    """The numbers of variable length that begin at these places, and where they end; -2: it is too long."""
    byte = data.take(at, mode="clip")
    found, at, more, shift = (byte & 127).astype(np.int64), at + 1, byte > 127, 7
    while more.any():
        if shift >= _MOST_BITS:
            found[more] = 3
            break
        byte = data.take(at, mode="clip") * more
        found |= (byte & 127).astype(np.int64) << shift
        at, more, shift = at + more, byte > 127, shift + 7
    return (found >> 1) ^ -(found & 1), at
