"""Records as columns: the same as the codec's, byte for byte, and no answer where that is not sure."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.config import DEFAULTS
from postroom.model.messages.batch import BatchBuilder, assemble, is_compressed, read_header, records
from postroom.model.messages.slot import slot_of
from postroom.model.topology.route import Range, Route, even_ranges
from postroom.spark.formats.records import Packing, longest, unpacked

MS = 1_700_000_000_123
Row = tuple[bytes | None, bytes | None]

# Many zeros, and bytes that look like the beginning of a number: what may be taken for a record.
some_bytes = st.one_of(
    st.binary(max_size=200), st.lists(st.sampled_from([0, 2, 20, 128, 255]), max_size=90).map(bytes)
)
rows = st.lists(st.tuples(st.none() | some_bytes, st.none() | some_bytes), min_size=1, max_size=150)


def built(messages: list[Row], step: int = 0, headers: bool = False) -> bytes:
    builder = BatchBuilder()
    for at, (key, value) in enumerate(messages):
        assert builder.append(MS + step * at, key, value, [("h", b"x")] if headers else [])
    return builder.build()


def look(*batches: bytes) -> list[tuple[bytes | None, bytes | None, int]] | None:
    found = unpacked([(batch, read_header(batch)) for batch in batches])
    return None if found is None else list(zip(*(array.to_pylist() for array in found), strict=True))


def decoded(*batches: bytes) -> list[tuple[bytes | None, bytes | None, int]]:
    return [(one.key, one.value, one.timestamp) for batch in batches for one in records(batch)]


@given(st.lists(rows, min_size=1, max_size=3), st.sampled_from([0, 1, 70, 9000]))
def test_what_is_unpacked_is_what_the_codec_reads(parts: list[list[Row]], step: int) -> None:
    batches = [built(part, step) for part in parts]
    found = look(*batches)
    assert found is None or found == decoded(*batches)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 100, 8191, 8192, 20_000])
def test_text_is_unpacked(size: int) -> None:
    batches = [built([(b"k%d" % n, b"v" * size) for n in range(count)], 3) for count in (1, 20, 2)]
    assert look(*batches) == decoded(*batches)


@given(rows, st.data())
def test_bytes_that_are_not_sound_are_never_taken_for_others(part: list[Row], data: st.DataObject) -> None:
    """Either there is no answer, or the codec has the same."""
    batch = bytearray(built(part))
    at = data.draw(st.integers(61, len(batch) - 1))
    batch[at] = data.draw(st.integers(0, 255))
    found = look(bytes(batch))
    if found is not None:
        assert found == decoded(assemble(batch[61:], len(part), MS, "none"))


def test_records_with_headers_are_left_to_the_codec() -> None:
    assert look(built([(b"k", b"v")], headers=True)) is None


# ---- packing ----


def route_of(partitions: int) -> Route:
    ranges = (Range(a, b, number, 100 + number) for number, (a, b) in enumerate(even_ranges(partitions)))
    return Route("orders", 1, tuple(ranges))


def packed(route: Route, *parts: list[tuple[bytes | None, bytes]]) -> list[tuple[int, bytes]]:
    packing, found = Packing(route), []
    for part in parts:
        keys, values = (pa.array([row[at] for row in part], pa.binary()) for at in (0, 1))
        found += packing.add(keys, values, MS)
    return found + packing.end(MS)


keyed = st.lists(st.tuples(st.none() | st.binary(max_size=3), some_bytes), max_size=400)


@given(st.lists(keyed, max_size=5), st.integers(1, 3))
def test_every_row_is_packed_once_where_its_key_belongs(
    parts: list[list[tuple[bytes | None, bytes]]], partitions: int
) -> None:
    route = route_of(partitions)
    batches = packed(route, *parts)
    rows = [row for part in parts for row in part]
    found: dict[bytes | None, list[bytes | None]] = {}
    for place, batch in batches:
        for record in records(batch):
            assert record.key is None or route.of_slot(slot_of(record.key)).partition_id == place
            found.setdefault(record.key, []).append(record.value)
    sent = {key: [value for own, value in rows if own == key] for key, _ in rows}
    unkeyed = sorted(sent.pop(None, []))
    assert sorted(v for v in found.pop(None, []) if v is not None) == unkeyed
    assert found == sent, "in order"


def test_a_batch_has_the_bytes_that_the_codec_gives_it() -> None:
    rows = [(b"k" if n % 3 else None, b"%d" % n * (n % 70)) for n in range(900)]
    ((_, batch),) = packed(route_of(1), rows)
    builder = BatchBuilder("lz4")
    assert builder.extend(MS, [(*row, []) for row in rows]) == len(rows)
    assert batch == builder.build()


def test_batches_are_as_long_as_they_may_be() -> None:
    many = packed(route_of(1), [(b"k", b"v")] * 2500)
    assert [read_header(batch).records for _, batch in many] == [1000, 1000, 500]
    large = packed(route_of(1), [(b"k", os.urandom(200_000)) for _ in range(6)])
    assert all(len(batch) <= DEFAULTS.batch_bytes for _, batch in large)
    assert [read_header(batch).records for _, batch in large] == [2, 2, 2]
    huge = packed(route_of(1), [(b"k", os.urandom(DEFAULTS.batch_bytes + n)) for n in range(2)])
    assert [read_header(batch).records for _, batch in huge] == [1, 1]


def test_what_does_not_become_smaller_is_not_compressed() -> None:
    noise = packed(route_of(1), [(b"k", os.urandom(100)) for _ in range(20_000)])
    assert 1 <= sum(is_compressed(batch) for _, batch in noise) <= 2
    text = packed(route_of(1), [(b"k", b"the same again and again")] * 20_000)
    assert all(is_compressed(batch) for _, batch in text)


def test_messages_without_keys_take_turns() -> None:
    batches = packed(route_of(3), [(None, b"v")] * 3000)
    assert sorted(place for place, _ in batches) == [100, 101, 102]


def test_the_longest() -> None:
    assert longest(pa.array([b"a", None, b"abc"], pa.binary())) == 3
    assert longest(pa.array([None], pa.binary())) == longest(pa.array([], pa.binary())) == 0
