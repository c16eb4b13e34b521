from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.config import SLOTS
from postroom.model.messages.slot import TEST_VECTORS, deal, deal_slots, slot_of, slots_of
from postroom.model.topology.route import even_ranges


def bitwise_crc32(data: bytes) -> int:
    """CRC-32 by its definition, so that the vectors do not merely repeat zlib."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def test_vectors_hold_for_ever() -> None:
    assert len(TEST_VECTORS) >= 12
    assert [(key, slot_of(key)) for key, _ in TEST_VECTORS] == list(TEST_VECTORS)
    assert (
        slot_of(b"123456789") == (0xCBF43926 * 2654435769 % 2**32) // 2**22
    )  # the CRC catalogue's check value


def test_there_are_1024_slots_for_ever() -> None:
    assert SLOTS == 1024
    assert {slot_of(b"%d" % number) for number in range(20_000)} == set(range(1024))


@given(st.binary(max_size=100))
def test_slot_is_what_the_docs_say(key: bytes) -> None:
    assert slot_of(key) == (bitwise_crc32(key) * 2654435769 % 2**32) // 2**22


@given(st.lists(st.binary(max_size=100)))
def test_slots_of_many_are_those_of_each(keys: list[bytes]) -> None:
    assert slots_of(keys) == [slot_of(key) for key in keys]


_STARTS = st.one_of(
    st.sampled_from([1, 2, 3, 4, 6, 16, 256, 512]).map(lambda n: tuple(first for first, _ in even_ranges(n))),
    st.sets(st.integers(1, SLOTS - 1), max_size=20).map(lambda cuts: (0, *sorted(cuts))),
    st.sets(st.integers(1, 255), max_size=20).map(lambda cuts: (0, *[cut * 4 for cut in sorted(cuts)])),
)


@given(st.lists(st.binary(max_size=100)), _STARTS)
def test_keys_are_dealt_to_the_ranges_of_their_slots(keys: list[bytes], starts: tuple[int, ...]) -> None:
    ends = (*starts[1:], SLOTS)
    slots = [slot_of(key) for key in keys]
    expected = [
        [at for at, slot in enumerate(slots) if first <= slot < end]
        for first, end in zip(starts, ends, strict=True)
    ]
    assert deal(keys, starts) == expected
    assert deal_slots(slots, starts) == expected


@pytest.mark.parametrize("starts", [(0, 512), (0, 3)], ids=["even", "uneven"])
def test_keys_of_which_one_is_missing_are_not_dealt(starts: tuple[int, ...]) -> None:
    """By this a producer learns of it, without a look through them."""
    keys: list[Any] = [b"a", None, b"b"]
    with pytest.raises(TypeError):
        deal(keys, starts)


def test_the_largest_products_do_not_run_into_the_next_key() -> None:
    highest = [key for key in (b"%d" % i for i in range(200_000)) if crc32(key) >= 0xFFFF_0000]
    keys = [highest[0], b"", *highest, b"", highest[-1]]
    starts = tuple(range(0, SLOTS, 4))
    assert [at for at, one in enumerate(keys) if slot_of(one) // 4 == 7] == deal(keys, starts)[7]
    assert sorted(at for one in deal(keys, starts) for at in one) == [*range(len(keys))]
    assert all(
        slot_of(keys[at]) // 4 == number for number, one in enumerate(deal(keys, starts)) for at in one
    )


@pytest.mark.parametrize("partitions", [2, 3, 4, 8])
@pytest.mark.parametrize("count", [64, 100, 1000])
@pytest.mark.parametrize(
    "key",
    [
        lambda i: b"customer-%d" % i,
        lambda i: b"%d" % i,
        lambda i: struct.pack(">q", i),
        lambda i: struct.pack("<q", i),
        lambda i: b"ord-%06d" % (10 * i),
    ],
)
def test_keys_that_differ_at_their_end_reach_every_partition(
    key: Callable[[int], bytes], count: int, partitions: int
) -> None:
    loads = [0] * partitions
    for i in range(count):
        loads[slot_of(key(i)) * partitions // SLOTS] += 1
    even = count / partitions
    assert min(loads) > 0
    assert sum((load - even) ** 2 / even for load in loads) / (partitions - 1) < 6
