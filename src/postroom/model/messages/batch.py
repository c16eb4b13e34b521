"""RecordBatch v2: how messages become the bytes of a batch, and back.

Decides whether bytes are a sound batch. Whatever is wrong with them is `CorruptBatch`, never a foreign
error, a crash or a huge allocation: batches come from the network. Must never read a
clock: timestamps are arguments. The only module that imports aiokafka (its C codec).

Keeps I3 (identity and sequence are in the header; sequences end at 2**31 - 1), I17 (an empty batch takes any
message) and I18 (control batches hold no messages).

    0  base offset     i64   | 16  magic (2)       i8    | 27  first timestamp  i64 | 51  epoch          i16
    8  length - 12     i32   | 17  CRC-32C of 21…  u32   | 35  last timestamp   i64 | 53  base sequence  i32
    12 leader epoch    i32   | 21  attributes      i16   | 43  producer id      i64 | 57  records        i32
                             | 23  records - 1     i32   |                          | 61  the records

The records, all that follows byte 61, are compressed as a whole (`model.compression`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeAlias, cast

from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.util import calc_crc32c

from ...config import DEFAULTS
from ...errors import CorruptBatch, InvalidSetting
from ..frozen import dataclass
from .compression import (
    AUTO,
    COMPRESSIONS,
    MAX_UNPACKED_BYTES,
    PAYS_FROM_BYTES,
    compress,
    decompress,
    what_pays,
)

__all__ = [
    "COMPRESSIONS",
    "HEADER_SIZE",
    "MAX_UNPACKED_BYTES",
    "SEAL",
    "BatchBuilder",
    "BatchHeader",
    "Buffer",
    "Headers",
    "Kept",
    "Record",
    "Stored",
    "TopicBounds",
    "assemble",
    "batches_in",
    "build_control",
    "control_kind",
    "control_payload",
    "each",
    "each_between",
    "is_compressed",
    "mark_of",
    "measured_records",
    "opened",
    "plain_form",
    "read_header",
    "records",
    "stamp",
    "stored_records",
    "verify",
    "verify_stored",
    "with_base_offset",
]


Buffer: TypeAlias = bytes | bytearray | memoryview
Headers: TypeAlias = list[tuple[str, bytes | None]]

_crc32c: Callable[[Buffer], int] = calc_crc32c
with suppress(ImportError):  # of the extra `server`, since brokers check every batch: 15 times as fast
    from crc32c import crc32c

    # 1 MB takes 40 µs: to let another thread have the interpreter meanwhile would take longer
    _crc32c = partial(crc32c, gil_release_mode=0)

HEADER_SIZE = 61
SEAL = 64
"""The kind of the control batch that is the last one of a sealed partition (R26); far from those of Kafka."""

_HEADER = struct.Struct(">qi4xb4xhiqqqhii")
_OFFSET = struct.Struct(">q")
_LENGTH = struct.Struct(">i")
_CRC = struct.Struct(">I")
_ATTRIBUTES = struct.Struct(">h")
_IDENTITY = struct.Struct(">qhi")
_CONTROL_KEY = struct.Struct(">hh")  # version, kind
_COUNT = struct.Struct(">i")
_LENGTH_AT, _EPOCH_AT, _CRC_AT, _ATTRIBUTES_AT, _IDENTITY_AT, _COUNT_AT = 8, 12, 17, 21, 43, 57
_NO_EPOCH = b"\xff" * 4  # of a leader

_CODEC_BITS, _CONTROL_BIT = 0x07, 0x20
_NAMES = tuple(COMPRESSIONS)
_SMALLEST_RECORD = 7  # seven fields of one byte
_PAD = 32  # the codec may read a few bytes past the end of a malformed header


class Record(Protocol):
    """A message as the codec gives it."""

    @property
    def offset(self) -> int: ...
    @property
    def timestamp(self) -> int: ...
    @property
    def key(self) -> bytes | None: ...
    @property
    def value(self) -> bytes | None: ...
    @property
    def headers(self) -> Headers: ...


class Stored(Protocol):
    """A batch as a log has it: where it is, and how many offsets it takes, is known without opening it."""

    @property
    def base_offset(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def data(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class BatchHeader:
    base_offset: int
    size: int  # bytes of the whole batch
    records: int
    first_ts: int
    last_ts: int
    producer_id: int  # -1: one-way, without identity
    epoch: int
    base_sequence: int
    control: bool
    compression: str

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.records - 1


def read_header(batch: Buffer) -> BatchHeader:
    """Reads and checks the header alone; what follows it is not looked at."""
    size = len(batch)
    if size < HEADER_SIZE:
        raise CorruptBatch(f"a batch has a header of {HEADER_SIZE} bytes; these are {size}")
    offset, length, magic, attributes, last_delta, first_ts, last_ts, producer, epoch, sequence, count = (
        _HEADER.unpack_from(batch)
    )
    compression = attributes & _CODEC_BITS
    room = (MAX_UNPACKED_BYTES if compression else size - HEADER_SIZE) // _SMALLEST_RECORD
    sound = magic == 2 and length == size - 12 and count == last_delta + 1 and 0 < count <= room
    if not sound or compression > 4:
        raise CorruptBatch(_complaint(size, length, magic, last_delta, count, compression))
    return BatchHeader(
        offset, size, count, first_ts, last_ts, producer, epoch, sequence,
        attributes & _CONTROL_BIT != 0, _NAMES[compression],
    )  # fmt: skip


def _complaint(size: int, length: int, magic: int, last_delta: int, count: int, compression: int) -> str:
    if magic != 2:
        return f"the batch has format version {magic}; only version 2 is understood"
    if length != size - 12:
        return f"the batch claims {length + 12} bytes but has {size}: it was cut, or something follows it"
    if compression > 4:
        return f"the batch has the unknown compression {compression}"
    if count != last_delta + 1:
        return f"the batch claims {count} records but its last offset says {last_delta + 1}"
    return f"the batch claims {count} records, which {size} bytes cannot hold"


def verify(batch: Buffer) -> BatchHeader:
    """Checks the header and the checksum over all that follows it."""
    header = read_header(batch)
    if _checksum(batch) != _CRC.unpack_from(batch, _CRC_AT)[0]:
        raise CorruptBatch("the checksum of the batch is wrong: it was damaged on its way or at rest")
    return header


def batches_in(data: bytes) -> Iterator[bytes]:
    """Batches that follow each other, as long as they say they are; nothing else of them is looked at."""
    at = 0
    while at < len(data):
        size = 12 + int.from_bytes(data[at + 8 : at + 12], "big")
        if not 12 < size <= len(data) - at:
            raise CorruptBatch(f"of {len(data)} bytes of batches the last {len(data) - at} are none")
        yield data[at : at + size]
        at += size


def is_compressed(batch: Buffer) -> bool:
    """Tell whether a batch, known to be sound, is compressed."""
    return batch[_ATTRIBUTES_AT + 1] & _CODEC_BITS != 0


def with_base_offset(batch: Buffer, offset: int) -> bytes:
    """Return the batch at another offset, which lies outside the checksum."""
    return _OFFSET.pack(offset) + memoryview(batch)[_OFFSET.size :]


def stamp(batch: Buffer, producer_id: int, epoch: int, base_sequence: int) -> bytes:
    """Return the batch under another identity; the checksum is computed again."""
    _check_identity(producer_id, epoch, base_sequence)
    stamped = bytearray(batch)
    _IDENTITY.pack_into(stamped, _IDENTITY_AT, producer_id, epoch, base_sequence)
    return _sealed(stamped)


def records(batch: Buffer) -> list[Record]:
    """The messages of a batch, after every check; none for a control batch (I18)."""
    return measured_records(batch)[0]


def measured_records(batch: Buffer) -> tuple[list[Record], int]:
    """The messages of a batch, as `records`, and how many bytes they take unpacked."""
    header = verify(batch)
    return ([], 0) if header.control else _open(batch, header)


def stored_records(batch: Stored) -> list[Record]:
    """The messages of a stored batch, which must be those of its place: the offset has no checksum."""
    return opened(batch)[0]


def opened(batch: Stored) -> tuple[list[Record], int]:
    """The messages of a stored batch, as `stored_records`, and how many bytes they take unpacked."""
    header = verify_stored(batch)
    return ([], 0) if header.control else _open(batch.data, header)


def verify_stored(batch: Stored) -> BatchHeader:
    """Checks a stored batch as `verify` does, and that it is the one of its place."""
    header = verify(batch.data)
    if header.base_offset != batch.base_offset or header.records != batch.records:
        raise CorruptBatch(
            f"the batch says that it has {header.records} messages from offset {header.base_offset} on; "
            f"it was stored with {batch.records} from {batch.base_offset} on"
        )
    return header


def plain_form(batch: Buffer, header: BatchHeader, limit: int | None = None) -> memoryview:
    """The batch without compression, with some room behind it; NoRoom if its records exceed the limit.

    Of a batch whose records are sound only as far as its header says: other errors are the codec's.
    """
    return _padded(batch) if header.compression == "none" else _unpacked(batch, header.compression, limit)


def each(plain: memoryview) -> Iterator[Record]:
    """The records of a plain batch, one by one. Errors are the codec's, also of the call that ends it."""
    found = cast("Iterable[Record]", DefaultRecordBatch(cast("bytes", plain)))
    return filter(None, found)  # an iterator that may be asked for its iterator; the codec's may not


def each_between(plain: memoryview, start: int, stop: int, count: int) -> Iterator[Record]:
    """The records in these bytes of a plain batch, one by one, if they are so many; errors as of `each`."""
    part = bytearray(plain[:HEADER_SIZE])
    _COUNT.pack_into(part, _COUNT_AT, count)
    part += plain[start:stop]
    part += bytes(_PAD)
    end = len(part) - _PAD
    return each(memoryview(part)[:end])


def assemble(records: Buffer, count: int, timestamp: int, compression: str) -> bytes:
    """A batch of so many records that were encoded elsewhere, all of one moment."""
    kind = COMPRESSIONS[compression]
    packed = compress(kind, bytes(records)) if kind else records
    batch = bytearray(HEADER_SIZE + len(packed))
    _HEADER.pack_into(
        batch, 0, 0, len(batch) - 12, 2, kind, count - 1, timestamp, timestamp, -1, -1, -1, count
    )
    batch[_EPOCH_AT : _EPOCH_AT + 4] = _NO_EPOCH
    batch[HEADER_SIZE:] = packed
    return _sealed(batch)


def build_control(kind: int, payload: bytes = b"", *, timestamp: int = 0) -> bytes:
    """A batch of one record which tells readers something and is no message; it takes one offset."""
    builder = BatchBuilder()
    builder.append(timestamp, _CONTROL_KEY.pack(0, kind), payload, [])
    control = bytearray(builder.build())
    _ATTRIBUTES.pack_into(control, _ATTRIBUTES_AT, _CONTROL_BIT)
    return _sealed(control)


def control_kind(batch: Buffer) -> int | None:
    """Return what a control batch says; None for one with messages."""
    header = verify(batch)
    if not header.control:
        return None
    key = _open(batch, header)[0][0].key or b""
    if len(key) != _CONTROL_KEY.size:
        raise CorruptBatch(f"the key of a control batch has {_CONTROL_KEY.size} bytes, not {len(key)}")
    return int(_CONTROL_KEY.unpack(key)[1])


def control_payload(batch: Buffer) -> bytes:
    """Return the bytes that come with a control batch."""
    header = verify(batch)
    if not header.control:
        raise ValueError("a batch with messages has no control payload")
    return _open(batch, header)[0][0].value or b""


class BatchBuilder:
    """Gathers messages; `build` may be called again, for another identity or after more messages.

    Keys and values are bytes or None, headers a list; the codec refuses others with a TypeError.
    """

    __slots__ = ("_append", "_codec", "_compression", "count")

    def __init__(self, compression: str = "none", max_bytes: int = DEFAULTS.batch_bytes) -> None:
        if compression != AUTO and compression not in COMPRESSIONS:
            raise InvalidSetting(
                f"compression must be one of {', '.join(_NAMES)}, {AUTO}; not {compression!r}"
            )
        self._compression = COMPRESSIONS.get(compression)  # None: where it pays
        below = max_bytes + 1  # the codec's limit is exclusive
        self._codec = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, -1, below)
        self._append = self._codec.append
        self.count = 0

    @property
    def size(self) -> int:
        """Bytes of the batch before compression."""
        return int(self._codec.size())

    def append(self, timestamp: int, key: bytes | None, value: bytes | None, headers: Headers) -> bool:
        """False: it does not fit any more. The first message always does (I17)."""
        if timestamp < 0:
            raise ValueError(f"timestamps are milliseconds since 1970, not {timestamp}")
        if self._append(self.count, timestamp, key, value, headers) is None:
            return False
        self.count += 1
        return True

    def extend(self, timestamp: int, messages: Iterable[tuple[bytes | None, bytes | None, Headers]]) -> int:
        """Appends (key, value, headers) until one does not fit; how many were taken."""
        if timestamp < 0:
            raise ValueError(f"timestamps are milliseconds since 1970, not {timestamp}")
        append, first = self._append, self.count
        count = first
        try:
            for key, value, headers in messages:
                if append(count, timestamp, key, value, headers) is None:
                    break
                count += 1
        finally:
            self.count = count
        return count - first

    def build(self, producer_id: int = -1, epoch: int = -1, base_sequence: int = -1) -> bytes:
        if not self.count:
            raise ValueError("a batch has at least one message")
        _check_identity(producer_id, epoch, base_sequence)
        self._codec.set_producer_state(producer_id, epoch, base_sequence)
        plain = bytes(self._codec.build())
        kind = self._compression
        if kind is None and len(plain) >= PAYS_FROM_BYTES:
            kind = what_pays(plain, self.count)
        if not kind:
            return plain
        batch = bytearray(plain[:HEADER_SIZE] + compress(kind, plain[HEADER_SIZE:]))
        _LENGTH.pack_into(batch, _LENGTH_AT, len(batch) - 12)
        _ATTRIBUTES.pack_into(batch, _ATTRIBUTES_AT, kind)
        return _sealed(batch)


def _check_identity(producer_id: int, epoch: int, base_sequence: int) -> None:
    """The codec fails, or truncates, beyond these (I3)."""
    if not (-1 <= producer_id < 2**63 and -1 <= epoch < 2**15 and -1 <= base_sequence < 2**31):
        raise ValueError(
            f"no producer {producer_id}, epoch {epoch}, sequence {base_sequence}: epochs end at 32767 (then "
            "take a new producer id), sequences wrap at 2**31 (use next_sequence)"
        )


def _checksum(batch: Buffer) -> int:
    with memoryview(batch) as view, view[_ATTRIBUTES_AT:] as covered:
        return _crc32c(covered)


def _sealed(batch: bytearray) -> bytes:
    _CRC.pack_into(batch, _CRC_AT, _checksum(batch))
    return bytes(batch)


def _open(batch: Buffer, header: BatchHeader) -> tuple[list[Record], int]:
    """Read all records at once, so that every error comes from here; return them with their bytes."""
    try:
        plain = plain_form(batch, header)
        found = cast("list[Record]", list(DefaultRecordBatch(cast("bytes", plain))))
    except Exception as error:
        raise CorruptBatch(f"the records of the batch cannot be read: {error}") from error
    if [record.offset for record in found] != list(range(header.base_offset, header.last_offset + 1)):
        raise CorruptBatch("the offsets of the batch's records are not dense")
    return found, len(plain) - HEADER_SIZE


def _padded(batch: Buffer) -> memoryview:
    return memoryview(bytes(batch) + bytes(_PAD))[: len(batch)]


def _unpacked(batch: Buffer, compression: str, limit: int | None) -> memoryview:
    """The batch without compression, with room behind it as in `_padded`."""
    whole, kind = memoryview(batch), COMPRESSIONS[compression]
    plain, end = decompress(kind, whole[HEADER_SIZE:], before=HEADER_SIZE, behind=_PAD, limit=limit)
    plain[:HEADER_SIZE] = whole[:HEADER_SIZE]
    (attributes,) = _ATTRIBUTES.unpack_from(batch, _ATTRIBUTES_AT)
    _ATTRIBUTES.pack_into(plain, _ATTRIBUTES_AT, attributes & ~_CODEC_BITS)
    return memoryview(plain)[:end]


# ---- marks: how somebody who keeps offsets elsewhere sees that the log is not the one that was read ----
# A queue that is restored from an older backup gives offsets a second time, to other messages, and cannot
# say so. So whoever keeps an offset keeps the mark of the batch before it as well: where that batch
# begins, and its checksum, which covers its messages, their times and who sent them. Another batch in its
# place has another mark. Where the batch is not kept any more there is no mark, and the incarnation of
# the queue has to do: it is another one in every queue, and a new one once somebody says that the queue
# was restored.


def mark_of(base_offset: int, crc: bytes) -> str:
    """The mark of a stored batch: a short text, to be compared and nothing else."""
    return f"{base_offset}-{crc.hex()}"


@dataclass(frozen=True, slots=True)
class Kept:
    """The log keeps this much of a partition."""

    start: int  # the lowest offset that is kept
    end: int  # the next offset to be given
    mark: str = ""  # of the batch before the offset that was asked about; "": not kept, or nobody asked
    removed: bool = False  # it was sealed, and retention has dropped all of it: `end` is where it ended


@dataclass(frozen=True, slots=True)
class TopicBounds:
    incarnation: str  # of the queue
    partitions: dict[int, Kept]  # by partition id
