from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import cramjam
import pytest
from aiokafka.record import default_records as independent
from hypothesis import given, settings
from hypothesis import strategies as st

from postroom.errors import CorruptBatch, InvalidSetting
from postroom.model.messages import compression as module
from postroom.model.messages.batch import (
    COMPRESSIONS,
    HEADER_SIZE,
    MAX_UNPACKED_BYTES,
    SEAL,
    BatchBuilder,
    BatchHeader,
    Headers,
    build_control,
    control_kind,
    control_payload,
    read_header,
    records,
    stamp,
    verify,
    with_base_offset,
)
from tests.model.examples import examples

NOW = 1_700_000_000_000
every_compression = pytest.mark.parametrize("compression", list(COMPRESSIONS))
Message = tuple[int, bytes | None, bytes | None, Headers]
Triple = tuple[bytes | None, bytes | None, Headers]

payloads = st.none() | st.binary(max_size=200)
messages = st.tuples(
    st.integers(0, 2**50),
    payloads,
    payloads,
    st.lists(st.tuples(st.text(max_size=10), payloads), max_size=4),
)


def build(items: list[Message], compression: str = "none", *identity: int) -> bytes:
    builder = BatchBuilder(compression)
    for item in items:
        assert builder.append(*item)
    return builder.build(*identity)


def sample(compression: str = "none", count: int = 5) -> bytes:
    headers: Headers = [("source", b"web"), ("none", None)]
    return build(
        [(NOW + i, b"k%d" % i, b"value %d" % i * 5, headers) for i in range(count)], compression, 7, 1, 40
    )


def content(batch: bytes) -> list[tuple[Any, ...]]:
    return [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in records(batch)]


def python_reader(batch: bytes) -> list[tuple[Any, ...]]:
    """aiokafka's reader in pure Python: shares no code with the C codec."""
    reader = independent._DefaultRecordBatchPy(batch)
    assert reader.validate_crc()
    return [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in reader]


def forged(batch: bytes, change: Callable[[bytearray], object]) -> bytes:
    """A batch that is wrong on purpose, under a right length and checksum."""
    damaged = bytearray(batch)
    change(damaged)
    struct.pack_into(">i", damaged, 8, len(damaged) - 12)
    return stamp(damaged, 7, 1, 40)


def with_records(data: bytes, count: int, code: int = 0) -> bytes:
    def change(batch: bytearray) -> None:
        batch[HEADER_SIZE:] = data
        struct.pack_into(">hi", batch, 21, code, count - 1)
        struct.pack_into(">i", batch, 57, count)

    return forged(sample(), change)


# ---------------------------------------------------------------- round trips


@every_compression
@settings(max_examples=50)
@given(items=st.lists(messages, min_size=1, max_size=20), offset=st.integers(0, 2**62))
def test_what_goes_in_comes_out(compression: str, items: list[Message], offset: int) -> None:
    batch = with_base_offset(build(items, compression), offset)
    expected = [(offset + i, *item) for i, item in enumerate(items)]
    assert content(batch) == expected
    assert python_reader(batch) == expected


@every_compression
def test_reads_what_the_pure_python_writer_wrote(compression: str) -> None:
    writer = independent._DefaultRecordBatchBuilderPy(2, COMPRESSIONS[compression], 0, 9, 2, 11, 1 << 20)
    for i in range(100):
        writer.append(i, NOW + i, b"k", b"v" * 1000, [("h", b"x")])
    batch = bytes(writer.build())
    assert content(batch) == [(i, NOW + i, b"k", b"v" * 1000, [("h", b"x")]) for i in range(100)]
    assert verify(batch).base_sequence == 11


def test_unframed_snappy_is_read_too() -> None:
    plain = sample()
    packed = bytes(cramjam.snappy.compress_raw(plain[HEADER_SIZE:]))
    assert content(with_records(packed, 5, COMPRESSIONS["snappy"])) == content(plain)


@every_compression
def test_the_header_tells(compression: str) -> None:
    batch = with_base_offset(sample(compression), 1000)
    header = verify(batch)
    assert header == read_header(batch)
    assert header == BatchHeader(1000, len(batch), 5, NOW, NOW + 4, 7, 1, 40, False, compression)
    assert header.last_offset == 1004


def test_the_bytes_are_fixed() -> None:
    batch = build([(NOW, b"k", b"v", [("h", b"x")])], "none", 7, 1, 40)
    assert batch.hex() == (
        "0000000000000000" "0000003e" "ffffffff" "02" + batch[17:21].hex() + "0000" "00000000"
        "0000018bcfe56800" "0000018bcfe56800" "0000000000000007" "0001" "00000028" "00000001"
        "18" "00" "00" "00" "026b" "0276" "02" "0268" "0278"
    )  # fmt: skip


@every_compression
def test_buffers_other_than_bytes_are_read(compression: str) -> None:
    batch = sample(compression)
    for other in (bytearray(batch), memoryview(batch), memoryview(b"x" + batch + b"y")[1:-1]):
        assert verify(other) == verify(batch)
        assert [r.value for r in records(other)] == [r.value for r in records(batch)]
        assert with_base_offset(other, 5) == with_base_offset(batch, 5)
        assert stamp(other, 1, 2, 3) == stamp(batch, 1, 2, 3)


@every_compression
def test_compression_pays_and_grows_beyond_the_first_room(compression: str) -> None:
    items: list[Message] = [
        (NOW, None, bytes(100_000), []) for _ in range(30)
    ]  # 3 MB; zstd: a few hundred bytes
    builder = BatchBuilder(compression, max_bytes=4_000_000)
    assert builder.extend(NOW, [item[1:] for item in items]) == 30
    batch = builder.build()
    assert len(batch) < builder.size / 10 or compression == "none"
    assert [r.value for r in records(batch)] == [bytes(100_000)] * 30


# ---------------------------------------------------------------- offset and identity


@every_compression
def test_the_base_offset_lies_outside_the_checksum(compression: str) -> None:
    batch = sample(compression)
    moved = with_base_offset(batch, 123_456_789_012)
    assert moved[8:] == batch[8:]
    assert verify(moved).base_offset == 123_456_789_012
    assert [r.offset for r in records(moved)] == list(range(123_456_789_012, 123_456_789_017))


@every_compression
def test_a_stamp_is_as_if_built_so(compression: str) -> None:
    batch = sample(compression)
    stamped = stamp(batch, 2**63 - 1, 2**15 - 1, 2**31 - 1)
    header = verify(stamped)
    assert (header.producer_id, header.epoch, header.base_sequence) == (2**63 - 1, 2**15 - 1, 2**31 - 1)
    assert content(stamped) == content(batch)
    assert stamp(stamped, 7, 1, 40) == batch


def test_the_last_sequence_takes_several_messages() -> None:
    builder = BatchBuilder()
    builder.extend(NOW, [(None, b"v", [])] * 5)
    batch = builder.build(1, 0, 2**31 - 1)
    assert verify(batch).base_sequence == 2**31 - 1
    assert len(records(batch)) == 5


@pytest.mark.parametrize("identity", [(1, 0, 2**31), (1, 2**15, 0), (2**63, 0, 0), (-2, 0, 0), (1, 0, -2)])
def test_an_identity_that_does_not_fit_is_refused(identity: tuple[int, int, int]) -> None:
    builder = BatchBuilder()
    builder.append(NOW, None, b"", [])
    with pytest.raises(ValueError, match="sequences wrap"):
        builder.build(*identity)
    with pytest.raises(ValueError, match="sequences wrap"):
        stamp(builder.build(), *identity)


def test_without_identity_a_batch_is_one_way() -> None:
    header = verify(build([(NOW, None, b"v", [])]))
    assert (header.producer_id, header.epoch, header.base_sequence) == (-1, -1, -1)


# ---------------------------------------------------------------- builder


def test_the_first_message_always_fits_and_the_limit_is_kept() -> None:
    builder = BatchBuilder(max_bytes=100)
    assert builder.append(NOW, b"k", bytes(1000), [])
    assert not builder.append(NOW, b"k", b"", [])
    assert builder.count == 1
    assert len(records(builder.build())) == 1


def test_exactly_the_limit_fits() -> None:
    two = build([(NOW, b"k", b"v", []), (NOW, b"k", b"v", [])])
    for limit, fits in ((len(two), True), (len(two) - 1, False)):
        builder = BatchBuilder(max_bytes=limit)
        assert builder.append(NOW, b"k", b"v", [])
        assert builder.append(NOW, b"k", b"v", []) is fits
        assert builder.size == len(builder.build()) <= limit


def test_extend_takes_what_fits_and_continues_where_it_stopped() -> None:
    items: list[Triple] = [(b"k%d" % i, bytes(50), []) for i in range(10)]
    builder = BatchBuilder(max_bytes=HEADER_SIZE + 5 * 59 - 1)
    assert builder.extend(NOW, items) == 4 == builder.count
    assert builder.extend(NOW, items[4:]) == 0
    assert [r.key for r in records(builder.build())] == [b"k0", b"k1", b"k2", b"k3"]


def test_extend_equals_append() -> None:
    items: list[Triple] = [(b"k%d" % i, b"v%d" % i, [("h", b"x")]) for i in range(10)]
    one, many = BatchBuilder("zstd"), BatchBuilder("zstd")
    for item in items:
        one.append(NOW, *item)
    assert many.extend(NOW, items[:3]) + many.extend(NOW, iter(items[3:])) == 10
    assert one.build(1, 2, 3) == many.build(1, 2, 3)


@pytest.mark.parametrize(
    "bad", [("k", b"v", []), (b"k", "v", []), (b"k", b"v", None), (b"k", b"v", [(b"h", b"x")])]
)
def test_a_message_of_wrong_type_is_refused_and_leaves_the_builder_sound(bad: Any) -> None:
    builder = BatchBuilder()
    with pytest.raises(TypeError):
        builder.extend(NOW, [(b"a", b"1", []), bad])
    with pytest.raises(TypeError):
        builder.append(NOW, *bad)
    builder.append(NOW, b"b", b"2", [])
    assert [r.key for r in records(builder.build())] == [b"a", b"b"]


@every_compression
def test_build_can_be_repeated_and_continued(compression: str) -> None:
    builder = BatchBuilder(compression)
    builder.append(NOW, b"a", b"1", [])
    first = builder.build(1, 0, 0)
    assert builder.build(1, 0, 0) == first
    builder.append(NOW, b"b", b"2", [])
    assert [r.key for r in records(first)] == [b"a"]
    assert [r.key for r in records(builder.build(1, 0, 1))] == [b"a", b"b"]


def test_an_empty_batch_is_not_built() -> None:
    with pytest.raises(ValueError, match="at least one message"):
        BatchBuilder().build()


def test_the_clock_is_never_read_instead_of_a_timestamp() -> None:
    timestamp: Any = None
    with pytest.raises(TypeError):
        BatchBuilder().append(timestamp, None, b"", [])
    with pytest.raises(TypeError):
        BatchBuilder().extend(timestamp, [(None, b"", [])])
    with pytest.raises(ValueError, match="1970"):
        BatchBuilder().append(-1, None, b"", [])
    with pytest.raises(ValueError, match="1970"):
        BatchBuilder().extend(-1, [])


def test_an_unknown_compression_is_refused() -> None:
    with pytest.raises(InvalidSetting, match="none, gzip, snappy, lz4, zstd, auto; not 'brotli'"):
        BatchBuilder("brotli")


# ---------------------------------------------------------------- control batches (I18)


def test_control_batches_tell_and_hold_no_messages() -> None:
    batch = build_control(SEAL, b"successors", timestamp=NOW)
    header = verify(batch)
    assert header.control and header.records == 1 and header.first_ts == NOW
    assert control_kind(batch) == SEAL
    assert control_payload(batch) == b"successors"
    assert records(batch) == []
    assert independent._DefaultRecordBatchPy(batch).is_control_batch
    assert python_reader(batch)[0][2] == struct.pack(">hh", 0, SEAL)
    moved = stamp(with_base_offset(batch, 9), 1, 2, 3)
    assert control_kind(moved) == SEAL and verify(moved).last_offset == 9


def test_a_batch_of_messages_is_no_control_batch() -> None:
    assert not verify(sample()).control
    assert control_kind(sample()) is None
    with pytest.raises(ValueError, match="no control payload"):
        control_payload(sample())


@pytest.mark.parametrize("key", [None, b"", b"\0", b"\0\0\0\0\0"])
def test_a_control_batch_with_a_wrong_key_is_corrupt(key: bytes | None) -> None:
    batch = build([(NOW, key, b"", [])])
    with pytest.raises(CorruptBatch, match="control"):
        control_kind(forged(batch, lambda b: struct.pack_into(">h", b, 21, 0x20)))


# ---------------------------------------------------------------- damage


@every_compression
@pytest.mark.parametrize("make", [sample, lambda _: build_control(SEAL, b"x")])
def test_no_flipped_bit_goes_unnoticed(compression: str, make: Callable[[str], bytes]) -> None:
    batch = make(compression)
    for at in range(8, len(batch)):
        if 12 <= at < 16:  # the leader epoch lies outside the checksum, and nobody reads it
            continue
        for bit in range(8):
            damaged = bytearray(batch)
            damaged[at] ^= 1 << bit
            for read in (verify, records, control_kind):
                with pytest.raises(CorruptBatch):
                    read(damaged)


@every_compression
def test_no_cut_or_trailing_byte_goes_unnoticed(compression: str) -> None:
    batch = sample(compression)
    for damaged in (*(batch[:size] for size in range(len(batch))), batch + b"\0", batch + batch):
        for read in (read_header, verify, records, control_kind):
            with pytest.raises(CorruptBatch):
                read(damaged)


@every_compression
@settings(max_examples=examples(300))
@given(data=st.data())
def test_forged_records_are_corrupt_or_readable_never_worse(compression: str, data: st.DataObject) -> None:
    """The checksum is right, what it covers is not: only an enemy or a broken producer does so."""
    body = bytearray(sample(compression)[HEADER_SIZE:])
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        cut = data.draw(st.integers(0, 3))
        body[at : at + cut] = data.draw(st.binary(max_size=12))
        body = body or bytearray(1)
    batch = with_records(bytes(body), data.draw(st.integers(1, 6)), COMPRESSIONS[compression])
    try:
        found = records(batch)
    except CorruptBatch:
        return
    assert [r.offset for r in found] == list(range(len(found)))


@every_compression
@given(body=st.binary(max_size=300), count=st.integers(1, 40))
def test_garbage_behind_a_header_is_corrupt(compression: str, body: bytes, count: int) -> None:
    batch = with_records(b"\xff" + body, count, COMPRESSIONS[compression])
    with pytest.raises(CorruptBatch):
        records(batch)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_corrupt(garbage: bytes) -> None:
    for read in (read_header, verify, records, control_kind):
        with pytest.raises(CorruptBatch):
            read(garbage)


@pytest.mark.parametrize(
    ("place", "pattern", "value", "sentence"),
    [
        (16, ">b", 1, "format version 1"),
        (8, ">i", 10**6, "claims 1000012 bytes but has"),
        (8, ">i", -5, "claims 7 bytes but has"),
        (57, ">i", 6, "claims 6 records but its last offset says 5"),
        (23, ">i", 5, "claims 5 records but its last offset says 6"),
        (21, ">h", 5, "unknown compression 5"),
        (21, ">h", 7, "unknown compression 7"),
    ],
)
def test_the_error_says_what_is_wrong(place: int, pattern: str, value: int, sentence: str) -> None:
    damaged = bytearray(sample())
    struct.pack_into(pattern, damaged, place, value)
    with pytest.raises(CorruptBatch, match=sentence):
        read_header(damaged)


@pytest.mark.parametrize("code", list(COMPRESSIONS.values()))
@pytest.mark.parametrize("count", [0, -1, 2**31 - 1, MAX_UNPACKED_BYTES // 7 + 1])
def test_a_count_that_cannot_be_is_refused_by_the_header_alone(code: int, count: int) -> None:
    damaged = bytearray(sample())
    struct.pack_into(">hi", damaged, 21, code, count - 1)
    struct.pack_into(">i", damaged, 57, count)
    with pytest.raises(CorruptBatch, match="cannot hold"):
        read_header(damaged)


def test_a_count_above_the_records_is_corrupt() -> None:
    plain = sample()[HEADER_SIZE:]
    for count in (1, 4, 6, 20):
        with pytest.raises(CorruptBatch):
            records(with_records(plain, count))
        with pytest.raises(CorruptBatch):
            records(with_records(bytes(cramjam.zstd.compress(plain)), count, COMPRESSIONS["zstd"]))


def test_offsets_that_are_not_dense_are_corrupt() -> None:
    def record(delta: int) -> bytes:
        body = bytes([0, 0, 2 * delta, 1, 1, 0])
        return bytes([2 * len(body)]) + body

    assert len(records(with_records(record(0) + record(1), 2))) == 2
    for deltas in ((0, 0), (1, 0), (0, 2), (1, 2)):
        with pytest.raises(CorruptBatch, match="not dense"):
            records(with_records(b"".join(map(record, deltas)), 2))


def test_huge_lengths_inside_a_record_are_corrupt() -> None:
    huge = b"\xfe\xff\xff\xff\xff\xff\xff\xff\xff\x01"  # 2**63 - 1
    null = b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"  # -2**63: the codec reads on behind the end
    for number in (huge, null):
        for before in (b"", b"\x00", b"\x00\x00\x00", b"\x00\x00\x00\x01", b"\x00\x00\x00\x01\x01"):
            for after in (b"", b"\x00" * 20, b"\x01" * 20):
                with pytest.raises(CorruptBatch):
                    records(with_records(b"\x10" + before + number + after, 1))
    for count in (b"\x02", huge):  # headers that end in the middle
        with pytest.raises(CorruptBatch):
            records(with_records(b"\x20\x00\x00\x00\x01\x01" + count + b"\x00" + b"\xff", 1))


@pytest.mark.parametrize("name", ["gzip", "lz4", "zstd"])
def test_a_bomb_does_not_unpack(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_UNPACKED_BYTES", 1 << 20)
    rooms: list[int] = []
    decompress_into = module._DECOMPRESS_INTO[COMPRESSIONS[name]]

    def watched(packed: Any, room: memoryview) -> int:
        rooms.append(len(room))
        return decompress_into(packed, room)

    monkeypatch.setitem(module._DECOMPRESS_INTO, COMPRESSIONS[name], watched)
    bomb = bytes(getattr(cramjam, name).compress(bytes(64 << 20)))
    with pytest.raises(CorruptBatch, match="more than 1048576 bytes"):
        records(with_records(bomb, 5, COMPRESSIONS[name]))
    assert max(rooms) == 1 << 20


def test_a_snappy_bomb_does_not_unpack() -> None:
    claim = b"\xff\xff\xff\xff\x0f"  # 4 GiB
    framed = module._XERIAL + struct.pack(">i", len(claim)) + claim
    for bomb in (claim, framed, module._XERIAL, module._XERIAL + b"\xff\xff\xff\xff", module._XERIAL + b"\0"):
        with pytest.raises(CorruptBatch):
            records(with_records(bomb, 1, COMPRESSIONS["snappy"]))


@pytest.mark.parametrize("missing", ["", "crc32c"], ids=["fast", "portable"])
def test_checksums_are_the_same_with_and_without_the_fast_package(missing: str) -> None:
    """The base install has no `crc32c`: what a broker with it stores, a client without it reads."""
    batch = sample("lz4")
    program = (
        "import sys\n"
        f"if {missing!r}: sys.modules[{missing!r}] = None\n"
        "from postroom.model.messages import batch as tried\n"
        f"assert hasattr(tried._crc32c, 'func') is not bool({missing!r}), tried._crc32c\n"
        f"given = bytes.fromhex({batch.hex()!r})\n"
        "tried.verify(given)\n"
        "print(tried.stamp(given, 8, 2, 50).hex())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert bytes.fromhex(done.stdout) == stamp(batch, 8, 2, 50)
