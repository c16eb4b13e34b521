"""Records as columns: the bytes of a batch become Arrow arrays, and Arrow arrays the bytes of a batch.

The codec makes an object of every record, which is most of what reading and writing a row takes. Here numpy
looks at all records of a batch at once, and Arrow copies their bytes. It knows the usual form alone, records
without headers: for any other, and for bytes that are not sound, it has no answer, and whoever asks takes
the codec, which says what is wrong. Must never give anything else than the codec does.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from ...config import DEFAULTS
from ...model.messages.batch import HEADER_SIZE, BatchHeader, Buffer, assemble
from ...model.messages.slot import slots_of
from ...model.topology.route import Route

__all__ = ["Packing", "Unpacked", "can_pack", "longest", "unpacked"]

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

    Records follow each other, each behind its length: one would have to be read after the other. But the
    attributes of a record are a zero, and so is what the record before it ends with: where it may begin is
    found by those, and what is not in line with all others is no record.
    """
    try:
        import numpy as np
    except ImportError:
        return None
    import pyarrow as pa

    if any(plain[_LOG_TIME_AT] & _LOG_TIME_BIT for plain, _ in batches):
        return None
    whole = _END.join([b"", *(memoryview(plain)[HEADER_SIZE:] for plain, _ in batches), b""])
    data = np.frombuffer(whole, np.uint8)
    begin, attributes = _candidates(np, data)
    lengths, _ = _numbers(np, data, begin)
    deltas, at = _numbers(np, data, attributes + 1)
    offsets, at = _numbers(np, data, at)
    key_sizes, key_at = _numbers(np, data, at)
    key_end = key_at + np.maximum(key_sizes, 0)
    value_sizes, value_at = _numbers(np, data, key_end)
    value_end = value_at + np.maximum(value_sizes, 0)
    end = value_end + 1
    sound = attributes + lengths == end
    if not sound.all():
        found = (begin, end, deltas, offsets, key_sizes, key_at, key_end, value_sizes, value_at, value_end)
        begin, end, deltas, offsets, key_sizes, key_at, key_end, value_sizes, value_at, value_end = (
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
        and (offsets == np.arange(len(begin)) - np.repeat(firsts, counts)).all()
        and min(key_sizes.min(), value_sizes.min()) >= -1
    )
    if not usual:
        return None
    # Keys and values are every second one of the pieces that these offsets cut the bytes into.
    cuts = np.empty((len(begin), 4), np.int32)
    cuts[:, 0], cuts[:, 1], cuts[:, 2], cuts[:, 3] = key_at, key_end, value_at, value_end
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(whole)]
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
    """The numbers of variable length that begin at these offsets, and where they end; -2: it is too long."""
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


# ---- packing ----

_ARRAY_BYTES = 256 << 20  # Arrow has no more than 2 GiB in an array of this kind
_TRIED_EVERY = 16  # batches: whether compression pays is looked at again
_PAYS = 0.75  # of what they were: lz4 takes longer than to write the rest


def can_pack() -> bool:
    """Whether numpy is here."""
    return find_spec("numpy") is not None


def longest(array: Any) -> int:
    """The size of the longest element of a binary array; 0: there is none."""
    import pyarrow.compute as pc

    return int(pc.max(pc.binary_length(array)).as_py() or 0)


class Packing:
    """Keys and values of one topic on their way into batches, as `client.producer.staging` packs them.

    Messages of one key keep their order. It needs numpy: see `can_pack`.
    """

    def __init__(self, route: Route) -> None:
        import numpy as np

        self._np = np
        self._ids = [piece.partition_id for piece in route.ranges]
        self._of_slot = np.repeat(np.arange(len(self._ids)), [piece.slots for piece in route.ranges])
        self._unkeyed = secrets.randbelow(len(self._ids))  # where messages without a key go now
        self._kept: tuple[Any, Any, Any] | None = None  # keys, values and targets that fill no batch yet
        self._built = 0
        self._pays = True

    def add(self, keys: Any, values: Any, now_ms: int) -> list[tuple[int, bytes]]:
        """Batches that are full, each with the id of its partition. `keys`: a binary array, as `values`."""
        rows = len(values)
        if not rows:
            return []
        if rows > 1 and keys.nbytes + values.nbytes > _ARRAY_BYTES:
            half = rows // 2
            first = self.add(keys[:half], values[:half], now_ms)
            return first + self.add(keys[half:], values[half:], now_ms)
        targets = self._targets(keys)
        if self._kept is not None:
            import pyarrow as pa

            kept_keys, kept_values, kept_targets = self._kept
            keys = pa.concat_arrays([kept_keys, keys])
            values = pa.concat_arrays([kept_values, values])
            targets = self._np.concatenate([kept_targets, targets])
        return self._cut(keys, values, targets, now_ms, everything=False)

    def end(self, now_ms: int) -> list[tuple[int, bytes]]:
        """What is left, in batches that are not full."""
        return [] if self._kept is None else self._cut(*self._kept, now_ms, everything=True)

    def _targets(self, keys: Any) -> Any:
        """For each row, which of the partitions of the route takes it."""
        np = self._np
        encoded = keys.dictionary_encode()  # keys come again and again
        of_key = self._of_slot[slots_of(encoded.dictionary.to_pylist())].astype(np.uint16)
        if not keys.null_count:
            return of_key[encoded.indices.to_numpy()]
        targets = np.empty(len(keys), np.uint16)
        none = keys.is_null().to_numpy(zero_copy_only=False)
        targets[~none] = of_key[encoded.indices.drop_null().to_numpy()]
        chosen = self._unkeyed + 1 + np.arange(keys.null_count) // DEFAULTS.batch_messages
        targets[none] = chosen % len(self._ids)
        self._unkeyed = int(chosen[-1]) % len(self._ids)
        return targets

    def _cut(
        self, keys: Any, values: Any, targets: Any, now_ms: int, *, everything: bool
    ) -> list[tuple[int, bytes]]:
        np = self._np
        order = np.argsort(targets, kind="stable")
        key_sizes, value_sizes = _sizes(keys), _sizes(values)
        ends = np.cumsum((key_sizes + value_sizes + _RECORD_BYTES)[order])
        bounds = np.searchsorted(targets[order], np.arange(len(self._ids) + 1))
        batches: list[tuple[int, int, int]] = []  # target, first row in this order, and behind the last
        kept = []
        for target, (at, stop) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
            while at < stop:
                before = int(ends[at - 1]) if at else 0
                room = int(np.searchsorted(ends, before + DEFAULTS.batch_bytes, side="right"))
                full = max(at + 1, min(at + DEFAULTS.batch_messages, room))
                if full > stop and not everything:
                    kept.append(order[at:stop])
                    break
                batches.append((target, at, min(full, stop)))
                at = min(full, stop)
        self._keep(keys, values, targets, kept)
        if not batches:
            return []
        rows = np.concatenate([order[at:stop] for _, at, stop in batches])
        counts = [stop - at for _, at, stop in batches]
        records = _packed(np, keys, values, key_sizes[rows], value_sizes[rows], rows, counts)
        return [
            (self._ids[target], self._batch(some, count, now_ms))
            for (target, _, _), some, count in zip(batches, records, counts, strict=True)
        ]

    def _keep(self, keys: Any, values: Any, targets: Any, kept: list[Any]) -> None:
        self._kept = None
        if kept:
            import pyarrow as pa

            rows = self._np.sort(self._np.concatenate(kept))  # as they came
            at = pa.array(rows)
            self._kept = keys.take(at), values.take(at), targets[rows]

    def _batch(self, records: Buffer, count: int, now_ms: int) -> bytes:
        """Compressed, if that pays."""
        tried = self._pays or self._built % _TRIED_EVERY == 0
        self._built += 1
        batch = assemble(records, count, now_ms, "lz4" if tried else "none")
        if tried:
            self._pays = len(batch) < _PAYS * (HEADER_SIZE + len(records))
        return batch


_RECORD_BYTES = 16  # a record has about so many beside key and value


def _sizes(array: Any) -> Any:
    """How long the elements are; -1 for null."""
    import pyarrow.compute as pc

    sizes = pc.binary_length(array)
    return (pc.fill_null(sizes, -1) if sizes.null_count else sizes).to_numpy().astype("int64")


def _packed(
    np: Any, keys: Any, values: Any, key_sizes: Any, value_sizes: Any, rows: Any, counts: Sequence[int]
) -> list[Buffer]:
    """The records of batches that have so many of these rows, one batch after the other."""
    import pyarrow as pa

    total = len(rows)
    firsts = np.cumsum(counts) - counts
    offsets = _encoded(np, np.arange(total) - np.repeat(firsts, counts))
    key_size, value_size = _encoded(np, key_sizes), _encoded(np, value_sizes)
    lengths = 3 + np.maximum(key_sizes, 0) + np.maximum(value_sizes, 0)  # attributes, time, no headers
    lengths += offsets.sizes + key_size.sizes + value_size.sizes
    zero = _encoded(np, np.zeros(total, np.int64))
    # What is before a key begins with the end of the record before it: the number of its headers.
    before = _bytes_of(np, [zero, _encoded(np, lengths), zero, zero, offsets, key_size])
    between = _bytes_of(np, [value_size])
    pieces = pa.concat_arrays([before, between, keys, values])
    picked = np.empty((total, 4), np.int64)
    picked[:, 0], picked[:, 2] = np.arange(total), np.arange(total, 2 * total)
    picked[:, 1], picked[:, 3] = rows + 2 * total, rows + (2 * total + len(keys))
    found = pieces.take(pa.array(picked.reshape(-1)))
    _, cuts, data = found.buffers()
    begin = np.frombuffer(cuts, np.int32)[: 4 * total + 1][::4]
    whole = memoryview(data)
    ends = [*begin[firsts[1:]].tolist(), int(begin[-1])]
    starts = [0, *ends[:-1]]
    return [b"".join((whole[start + 1 : end], _END)) for start, end in zip(starts, ends, strict=True)]


class _Numbers(NamedTuple):
    """Numbers as bytes: the first one of each, the second, and so on, as far as the longest goes."""

    columns: list[Any]
    used: list[Any]  # which numbers have that byte
    sizes: Any


def _encoded(np: Any, numbers: Any) -> _Numbers:
    left, more = (numbers << 1) ^ (numbers >> 63), np.ones(len(numbers), bool)
    found, sizes = _Numbers([], [], None), np.zeros(len(numbers), np.int32)
    while more.any():
        rest = left >> 7
        found.columns.append((left & 127 | (rest > 0) << 7).astype(np.uint8))
        found.used.append(more)
        sizes += more
        left, more = rest, rest > 0
    return found._replace(sizes=sizes)


def _bytes_of(np: Any, parts: Sequence[_Numbers]) -> Any:
    """A binary array: in each element these numbers, one behind the other."""
    import pyarrow as pa

    used = np.stack([some for part in parts for some in part.used], axis=1)
    data = np.stack([some for part in parts for some in part.columns], axis=1)[used]
    cuts = np.zeros(len(used) + 1, np.int32)
    np.cumsum(sum(part.sizes for part in parts), out=cuts[1:])
    buffers = [None, pa.py_buffer(cuts), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(), len(used), buffers, null_count=0)
