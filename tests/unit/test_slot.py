from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.config import SLOTS
from penstock.model.slot import TEST_VECTORS, slot_of


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
    assert slot_of(b"123456789") == 0xCBF43926 % 1024 == 294  # the check value of the CRC catalogue


def test_there_are_1024_slots_for_ever() -> None:
    assert SLOTS == 1024
    assert {slot_of(b"%d" % number) for number in range(20_000)} == set(range(1024))


@given(st.binary(max_size=100))
def test_slot_is_crc32_modulo_slots(key: bytes) -> None:
    assert slot_of(key) == bitwise_crc32(key) % 1024
