from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postroom.config import SLOTS
from postroom.model.messages.slot import TEST_VECTORS, deal, slot_of, slots_of


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


@given(st.lists(st.binary(max_size=100)))
def test_keys_are_dealt_to_their_slots(keys: list[bytes]) -> None:
    piles: list[list[int]] = [[] for _ in range(SLOTS)]
    deal(keys, piles)
    assert piles == [[at for at, key in enumerate(keys) if slot_of(key) == slot] for slot in range(SLOTS)]


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
