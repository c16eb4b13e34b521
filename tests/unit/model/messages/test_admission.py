"""Batches of strangers: what is refused before it is stored, and how little of it is looked at in one go."""

from __future__ import annotations

import gc
import struct
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.config import DEFAULTS
from postroom.errors import CorruptBatch, InvalidMessage, MessageTooLarge, PostroomError, UsageError
from postroom.model.messages import admission
from postroom.model.messages.admission import MAX_HEADERS, admit, walk, walk_all
from postroom.model.messages.batch import BatchBuilder, Headers, build_control, records, stamp
from postroom.model.messages.compression import COMPRESSIONS, compress
from tests.model.examples import examples

NOW = 1_700_000_000_000
AHEAD = DEFAULTS.timestamp_ahead_ms + 1
LIMIT = DEFAULTS.max_batch_bytes


def built(count: int = 3, size: int = 10, compression: str = "none", headers: Headers | None = None) -> bytes:
    builder = BatchBuilder(compression, max_bytes=2**31 - 1)
    for at in range(count):
        builder.append(NOW + at, b"k%d" % at, b"v" * size, headers or [])
    return builder.build(7, 0, 0)


def forged(body: bytes, count: int, compression: str = "none", last_ts: int = NOW) -> bytes:
    """A batch with this behind its header, and a right checksum."""
    packed = compress(COMPRESSIONS[compression], body) if compression != "none" else body
    head = struct.pack(">qiibIhiqqqhii", 0, 49 + len(packed), 0, 2, 0, COMPRESSIONS[compression], count - 1,
                       NOW, last_ts, -1, -1, -1, count)  # fmt: skip
    return stamp(head + packed, 7, 0, 0)


def number(value: int) -> bytes:
    value, out = (value << 1) ^ (value >> 63), bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*out, value))


def record(
    at: int,
    value: bytes = b"",
    key: bytes | None = None,
    headers: bytes = b"\0",
    *,
    delta_ms: int = 0,
    says: int | None = None,
) -> bytes:
    keyed = number(-1) if key is None else number(len(key)) + key
    inside = b"\0" + number(delta_ms) + number(at) + keyed + number(len(value)) + value + headers
    return number(len(inside) if says is None else says) + inside


BOMB = record(0, bytes(20 << 20))
CROWD = number(1_000_000) + b"\0\1" * 1_000_000  # of headers without a name

HOSTILE: dict[str, tuple[Callable[[], bytes], type[PostroomError]]] = {
    "garbage": (lambda: forged(b"\xff" * 80, 3), CorruptBatch),
    "plain bytes that say lz4": (lambda: _says_lz4(built()), CorruptBatch),
    "a count that is too high": (lambda: forged(record(0) + record(1), 1), CorruptBatch),
    "a count that is too low": (lambda: forged(record(0, bytes(99)), 2), CorruptBatch),
    "bytes behind the last": (lambda: forged(record(0) + b"12345678", 1), CorruptBatch),
    "bytes behind the last of many": (lambda: forged(_many(400) + b"12345678", 400), CorruptBatch),
    "offsets in another order": (lambda: forged(record(1) + record(0), 2), CorruptBatch),
    "offsets with a gap": (lambda: forged(record(0) + record(2), 2), CorruptBatch),
    "a gap far behind": (lambda: forged(_many(400) + record(401), 401), CorruptBatch),
    "a name that is no UTF-8": (lambda: forged(record(0, headers=b"\2\2\xff\0"), 1), CorruptBatch),
    "a time before 1970": (lambda: forged(record(0, delta_ms=-NOW - 1), 1), InvalidMessage),
    "a time at the end of the world": (lambda: forged(record(0, delta_ms=2**61), 1), InvalidMessage),
    "a time in microseconds": (lambda: forged(record(0, delta_ms=999 * NOW), 1), InvalidMessage),
    "a time too far ahead": (lambda: forged(_many(400) + record(400, delta_ms=AHEAD), 401), InvalidMessage),
    "a header of the batch with such a time": (lambda: forged(record(0), 1, last_ts=2**62), InvalidMessage),
    "a control batch": (lambda: build_control(64), UsageError),
    "a bomb": (lambda: forged(BOMB, 1, "lz4"), MessageTooLarge),
    "a bomb of zstd": (lambda: forged(BOMB, 1, "zstd"), MessageTooLarge),
    "a bomb of gzip": (lambda: forged(BOMB, 1, "gzip"), MessageTooLarge),
    "a bomb of snappy": (lambda: forged(BOMB, 1, "snappy"), MessageTooLarge),
    "a message of 5 MB": (lambda: built(1, 5 << 20), MessageTooLarge),
    "a message of 5 MB, packed": (lambda: built(1, 5 << 20, "lz4"), MessageTooLarge),
    "a long key": (lambda: forged(record(0, key=bytes(DEFAULTS.max_key_bytes + 1)), 1), MessageTooLarge),
    "many headers": (lambda: built(2, headers=[("a", b"b")] * (MAX_HEADERS + 1)), MessageTooLarge),
    "a million headers": (lambda: forged(record(0, headers=CROWD), 1, "lz4"), MessageTooLarge),
    "a million headers behind a lie": (
        lambda: forged(record(0, headers=CROWD, says=9) + bytes(64_000), 2, "lz4"), CorruptBatch,
    ),
    "many messages": (lambda: built(DEFAULTS.max_batch_messages + 1, 0), MessageTooLarge),
    "many bytes": (lambda: built(3, 4 << 20), MessageTooLarge),
}  # fmt: skip


def _many(count: int) -> bytes:
    return b"".join(record(at, bytes(200)) for at in range(count))


def _says_lz4(batch: bytes) -> bytes:
    changed = bytearray(batch)
    changed[22] = 3
    return stamp(changed, 7, 0, 0)


def longest_step(batch: bytes, *, careful: bool = False) -> float:
    """CPU seconds: the best of five walks, since others use the machine, and without the collector."""
    walks = []
    gc.disable()
    try:
        for _ in range(5):
            took, steps, going = [0.0], walk(batch, NOW, careful=careful), True
            while going:
                before = time.thread_time()
                try:
                    going = next(steps, "end") != "end"
                except PostroomError:
                    going = False
                took.append(time.thread_time() - before)
            walks.append(max(took))
    finally:
        gc.enable()
    return min(walks)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_batch_is_refused_in_short_steps(name: str) -> None:
    make, kind = HOSTILE[name]
    batch = make()
    for careful in (True, False):
        with pytest.raises(kind) as told:
            list(walk(batch, NOW, careful=careful))
    assert len(str(told.value)) < 300
    assert longest_step(batch) < 0.05  # gzip unpacks 8 MB meanwhile; a million headers would take 0.3 s


@pytest.mark.parametrize("compression", COMPRESSIONS)
@pytest.mark.parametrize(("count", "size"), [(1, 0), (1, 4 << 20), (10_000, 0), (1000, 100), (2, 40_000)])
def test_what_the_sdk_may_build_is_admitted(count: int, size: int, compression: str) -> None:
    batch = built(count, size, compression, [("source", b"web"), ("none", None)])
    admit(batch, NOW)
    steps = len(list(walk(batch, NOW, careful=True)))
    assert steps > 1 if count == 10_000 else steps <= 4
    assert count > 1 or compression != "none" or steps == 0  # there is nothing to wait between


def test_a_batch_as_large_as_may_be_is_admitted_and_one_larger_is_not() -> None:
    builder = BatchBuilder("lz4", max_bytes=LIMIT)
    while builder.append(NOW, None, bytes(1000), []):
        pass
    admit(builder.build(), NOW)
    over = BatchBuilder("lz4", max_bytes=2 * LIMIT)
    for _ in range(LIMIT // 1000):
        over.append(NOW, None, bytes(1000), [])
    with pytest.raises(MessageTooLarge, match="unpacks to more"):
        admit(over.build(), NOW)


def test_every_batch_of_several_is_looked_at() -> None:
    for _ in walk_all(built() + built(2000, 100), NOW):
        pass
    with pytest.raises(CorruptBatch):
        list(walk_all(built() + forged(b"\xff" * 80, 3), NOW))
    with pytest.raises(CorruptBatch):
        list(walk_all(built() + b"more", NOW))


@settings(deadline=None, max_examples=examples(200))
@given(data=st.data(), compression=st.sampled_from(list(COMPRESSIONS)))
def test_whatever_is_admitted_can_be_read(data: st.DataObject, compression: str) -> None:
    """A byte that was turned over is refused, or what is there can be read as it says."""
    body = bytearray(b"".join(record(at, b"value" * 9, b"key", b"\2\2a\2b") for at in range(5)))
    body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    batch = forged(bytes(body), data.draw(st.integers(1, 6)), compression)
    try:
        admit(batch, NOW)
    except PostroomError:
        return
    assert [r.offset for r in records(batch)] == list(range(len(records(batch))))


@settings(deadline=None, max_examples=examples(300))
@given(data=st.data())
def test_large_and_small_batches_are_judged_alike(data: st.DataObject) -> None:
    """What is given to the codec part by part is refused, or not, as what it is given as a whole."""
    body = bytearray(b"".join(record(at, bytes(40 * at), b"key", b"\2\2a\2b") for at in range(5)))
    for _ in range(data.draw(st.integers(0, 2))):
        body[data.draw(st.integers(0, len(body) - 1))] ^= data.draw(st.integers(1, 255))
    batch = forged(bytes(body), data.draw(st.sampled_from([4, 5, 5, 5, 6])))
    whole = is_admitted(batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "_STEP_BYTES", data.draw(st.integers(1, 400)))
        assert is_admitted(batch, careful=True) == whole


def is_admitted(batch: bytes, *, careful: bool = False) -> bool:
    try:
        list(walk(batch, NOW, careful=careful))
    except PostroomError:
        return False
    return True


def test_a_batch_full_of_headers_is_walked_in_short_steps() -> None:
    """What is within the limits, and as much of it as there may be: half a second of work in all."""
    headers = number(MAX_HEADERS) + b"\0\1" * MAX_HEADERS
    batch = forged(b"".join(record(at, headers=headers) for at in range(9_000)), 9_000, "lz4")
    assert len(batch) < 50_000
    assert longest_step(batch) < 0.02


def test_who_was_refused_once_is_looked_at_more_closely() -> None:
    """A record full of headers: as many as a batch has that is not large, 1,100 bytes when packed."""
    crowd = number(130_000) + b"\0\1" * 130_000
    batch = forged(record(0, headers=crowd), 1, "lz4")
    with pytest.raises(MessageTooLarge):
        admit(batch, NOW)
    assert len(batch) < 2000
    assert longest_step(batch) < 0.05
    assert longest_step(batch, careful=True) < 0.005
