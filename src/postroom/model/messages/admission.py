"""What a batch of a stranger must be before it is stored: readable, true to its header, within the limits.

Decides by one walk over the records, in the C codec, without the checksum: whoever appends looks at that.
Batches that our own process builds need none of it. Must never take long in one piece, nor unpack more than
a batch may have: `walk` yields between its steps (a small batch is one), so that its caller sees how long it
took and may do the rest elsewhere. The codec makes an object for each header of a record before anybody can
count them, and believes a record's length only in the end. So of a large batch it is given some KB at a time,
and a record that is larger has its headers counted first; of anybody who sent a bad batch before, it is so
with all.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import suppress
from itertools import islice
from typing import NoReturn, TypeAlias

from ...config import DEFAULTS
from ...errors import CorruptBatch, MessageTooLarge, PostroomError, UsageError
from .batch import (
    HEADER_SIZE,
    BatchHeader,
    Record,
    batches_in,
    each,
    each_between,
    plain_form,
    read_header,
)
from .compression import NoRoom
from .timestamps import check_sent

__all__ = ["MAX_HEADERS", "MAX_PACKED_BYTES", "MAX_RECORD_BYTES", "admit", "walk", "walk_all"]

MAX_PACKED_BYTES = DEFAULTS.max_batch_bytes + 64 * 1024
"""Of a batch as it is sent: what cannot be compressed grows a little."""

MAX_RECORD_BYTES = DEFAULTS.max_message_bytes + 64 * 1024
"""Of a message with what Postroom's SDK adds to it, and its framing."""

MAX_HEADERS = DEFAULTS.max_headers + 16
"""Of a message, with those that Postroom's SDK adds."""

_LARGE_BYTES = 256 * 1024  # unpacked; of as many headers as that holds the codec makes objects in 12 ms
_STEP = 512  # messages of smaller batches that are looked at in one step
_STEP_BYTES = 32 * 1024  # of larger batches, given to the codec at once; one record may be larger
_AT_ONCE_BYTES = 64 * 1024  # packed batches of more bytes, and those that unpack to more than the next,
_UNPACK_FIRST = 256 * 1024  # are unpacked in a step of their own

_Part: TypeAlias = tuple[int, int, int]
"""From this byte to that one there are so many records."""


def admit(batch: bytes, now_ms: int) -> None:
    """Walk over the batch in one go. CorruptBatch, MessageTooLarge or UsageError if it may not be stored.

    `now_ms`: the queue's clock, by which timestamps are bounded.
    """
    for _ in walk(batch, now_ms):
        pass


def walk(batch: bytes, now_ms: int, *, careful: bool = False) -> Iterator[None]:
    """Check a batch in small steps; with `careful` those of batches that are not large are small, too."""
    header = _checked_header(batch, now_ms)
    try:
        plain = yield from _plain(batch, header)
        following = header.base_offset
        large = len(plain) - HEADER_SIZE > (_STEP_BYTES if careful else _LARGE_BYTES)
        begun = False
        for found in _in_parts(plain, header.records) if large else _in_slices(plain, header.records):
            if begun:
                yield
            following, begun = _check(found, following, now_ms), True
    except PostroomError:
        raise
    except NoRoom:
        _refuse(
            "the batch unpacks to more than {limit:,} bytes", DEFAULTS.max_batch_bytes, "send smaller ones"
        )
    except Exception as error:  # whatever the codec and the decompressors say
        raise CorruptBatch(f"the records of the batch cannot be read: {str(error)[:200]}") from error


def walk_all(data: bytes, now_ms: int, *, careful: bool = False) -> Iterator[None]:
    """Batches that follow each other, in the same way."""
    for batch in batches_in(data):
        yield from walk(batch, now_ms, careful=careful)
        yield


def _checked_header(batch: bytes, now_ms: int) -> BatchHeader:
    header = read_header(batch)
    if header.control:
        raise UsageError("control batches are Postroom's own; send messages")
    if len(batch) > MAX_PACKED_BYTES or header.records > DEFAULTS.max_batch_messages:
        raise MessageTooLarge(
            f"a batch of {header.records:,} messages and {len(batch):,} bytes is too large: send "
            f"{DEFAULTS.max_batch_messages:,} messages and {DEFAULTS.max_batch_bytes:,} bytes at most",
            max_messages=DEFAULTS.max_batch_messages,
            max_bytes=DEFAULTS.max_batch_bytes,
        )
    check_sent(min(header.first_ts, header.last_ts), max(header.first_ts, header.last_ts), now_ms)
    return header


def _plain(batch: bytes, header: BatchHeader) -> Generator[None, None, memoryview]:
    if header.compression != "none":
        if len(batch) <= _AT_ONCE_BYTES:
            with suppress(NoRoom):
                return plain_form(batch, header, _UNPACK_FIRST)
        yield
    return plain_form(batch, header, DEFAULTS.max_batch_bytes)


# ---- the records ----


def _check(found: Iterator[Record], following: int, now_ms: int) -> int:
    """Look at some records, which begin at that offset; the offset behind them.

    None of them is kept: the codec takes a third less time when it can use the memory of the one before.
    """
    seen, most_headers, longest_key = now_ms, MAX_HEADERS, DEFAULTS.max_key_bytes
    for record in found:
        if record.offset != following:
            raise CorruptBatch("the offsets of the batch's records are not dense")
        following += 1
        moment = record.timestamp
        if moment != seen:  # most have that of the one before
            check_sent(moment, moment, now_ms)
            seen = moment
        if (headers := record.headers) and len(headers) > most_headers:
            _refuse_headers()
        if (key := record.key) and len(key) > longest_key:
            _refuse("a key has more than {limit:,} bytes", longest_key, "use a hash of it")
    return following


def _refuse_headers() -> NoReturn:
    _refuse("a message has more than {limit} headers", DEFAULTS.max_headers, "use the value")


def _refuse(what: str, limit: int, advice: str) -> NoReturn:
    raise MessageTooLarge(f"{what.format(limit=limit)}, which is the limit: {advice}", limit=limit)


# ---- what the codec is given ----


def _in_slices(plain: memoryview, records: int) -> Iterator[Iterator[Record]]:
    found = each(plain)
    for at in range(0, records, _STEP):
        yield islice(found, min(_STEP, records - at))
    if next(found, None) is not None:
        raise CorruptBatch("the batch has more records than it says")


def _in_parts(plain: memoryview, records: int) -> Iterator[Iterator[Record]]:
    for start, stop, count in _parts(plain, records):
        yield each_between(plain, start, stop, count)


def _parts(plain: memoryview, records: int) -> Iterator[_Part]:
    """Parts of the batch that are small, or one record without too many headers."""
    data, end = plain.obj, len(plain)
    start, at, first = HEADER_SIZE, HEADER_SIZE, 0
    limit = start + _STEP_BYTES
    assert isinstance(data, bytes | bytearray), "made by plain_form"
    for index in range(records):
        here, size = at, data[at]
        if size < 0x80:  # written out for small ones: this is done for each message
            at += 1 + (size >> 1)
        elif (more := data[at + 1]) < 0x80:
            at += 2 + ((size + (more << 7) - 0x80) >> 1)
        else:
            at = _end_of(data, at, end)
        if at > limit:
            if index > first:
                yield start, here, index - first
            start, first, limit = here, index, here + _STEP_BYTES
    if at != end:
        raise CorruptBatch(f"the {records} records of the batch do not end where it ends")
    yield start, end, records - first


def _end_of(data: bytes | bytearray, at: int, end: int) -> int:
    """Return where a large record ends; one that is too large, or has too many headers, is refused."""
    size, at = _number(data, at)
    if size > MAX_RECORD_BYTES:
        advice = "split it, or store it elsewhere and send where it is"
        _refuse("a message has more than {limit:,} bytes", DEFAULTS.max_message_bytes, advice)
    if not 0 < size <= end - at:
        raise CorruptBatch("a record of the batch is longer than the batch")
    inside = at + 1  # attributes
    for _ in range(2):  # the timestamp and the offset
        _, inside = _number(data, inside)
    for _ in range(2):  # the key and the value
        length, inside = _number(data, inside)
        inside += max(0, length)
    if _number(data, inside)[0] > MAX_HEADERS:
        _refuse_headers()
    return at + size


def _number(data: bytes | bytearray, at: int) -> tuple[int, int]:
    """A number of up to ten bytes, as the codec writes them, and where it ends."""
    found = shift = 0
    for place in range(at, at + 10):
        byte = data[place]
        found |= (byte & 0x7F) << shift
        if byte < 0x80:
            return found >> 1 ^ -(found & 1), place + 1
        shift += 7
    raise CorruptBatch("a number in the batch does not end")
