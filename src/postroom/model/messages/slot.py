"""Which slot a key belongs to: CRC-32 of its bytes, spread by a multiplication, the top 10 bits.

Decides it for every client in every language, for ever (R24, R29): order per key depends on it, so this
function and its vectors must never change. Routes map slots to partitions elsewhere.

The multiplication (Knuth's, by 2**32 over the golden ratio) is there because partitions are contiguous
ranges of slots, and the plain remainder of a CRC clusters keys that differ only at their end: of 100
sequential 8-byte integers all fell into one half of the slots, so that half of the partitions had nothing.

Kafka clients choose the partition of a key themselves, each family by a rule of its own: Java's, aiokafka,
kafka-python and franz-go take murmur2, librdkafka takes CRC-32. A topic that was made for them names one of
these, and native producers follow it: then a key has one partition, whoever sends it, and its order holds.
Their rules count partitions; a slot of that partition stands for it here, so that routes and moves need not
know of them. They must never change either: order per key depends on them (R29).
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal
from zlib import crc32

from ...config import SLOTS

__all__ = [
    "KEY_RULES",
    "TEST_VECTORS",
    "Keys",
    "deal",
    "deal_slots",
    "murmur2",
    "slot_by",
    "slot_of",
    "slots_of",
]

Keys = Literal["postroom", "java", "librdkafka"]
KEY_RULES: tuple[Keys, ...] = ("postroom", "java", "librdkafka")

_GOLDEN = 2654435769
_SHIFT = 32 - (SLOTS.bit_length() - 1)
_NUMBERS = tuple(range(1024))  # made once: those of a list are its indexes
_SHORT, _MOST = 64, 16_384  # bytes of a key that is remembered, and how many: the hash takes 20 times ours
_SEED, _M, _MASK, _POSITIVE = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF, 0x7FFFFFFF


def slot_of(key: bytes) -> int:
    return (crc32(key) * _GOLDEN & 0xFFFFFFFF) >> _SHIFT


def slots_of(keys: Iterable[bytes]) -> list[int]:
    """The slot of each key, in half the time that `slot_of` takes for one after the other."""
    golden, mask, shift = _GOLDEN, 0xFFFFFFFF, _SHIFT
    return [(crc * golden & mask) >> shift for crc in map(crc32, keys)]


def deal(keys: Iterable[bytes], starts: tuple[int, ...]) -> list[list[int]]:
    """Return the indexes of the keys that each range of slots has. `starts`: its first slot, from 0 upwards.

    Where each range has whole top bytes, as ranges of even size do, one multiplication of a long number
    spreads all keys, 64 bits for each: two thirds of the time. TypeError if a key is None: to check that
    first would take a tenth more.
    """
    _, range_of_byte = _ranges_of(starts)
    if range_of_byte is None:
        return deal_slots(slots_of(keys), starts)
    crcs = [*map(crc32, keys)]
    lanes = struct.pack(f"<{len(crcs)}Q", *crcs)
    spread = (int.from_bytes(lanes, "little") * _GOLDEN).to_bytes(len(lanes), "little")
    dealt: list[list[int]] = [[] for _ in starts]
    add = [one.append for one in dealt]
    numbers = _NUMBERS if len(crcs) <= len(_NUMBERS) else range(len(crcs))
    for at, one in zip(numbers, spread[3::8].translate(range_of_byte), strict=False):
        add[one](at)
    return dealt


def deal_slots(slots: Iterable[int], starts: tuple[int, ...]) -> list[list[int]]:
    """Return the indexes of the slots that each range has; `starts` as for `deal`."""
    range_of, _ = _ranges_of(starts)
    dealt: list[list[int]] = [[] for _ in starts]
    for at, slot in enumerate(slots):
        dealt[range_of[slot]].append(at)
    return dealt


@lru_cache(1000)
def _ranges_of(starts: tuple[int, ...]) -> tuple[list[int], bytes | None]:
    """Return which range each slot is in, and each top byte; None: the slots of one are in several."""
    in_byte = SLOTS // 256
    range_of = [bisect_right(starts, slot) - 1 for slot in range(SLOTS)]
    whole = len(starts) <= 256 and not any(start % in_byte for start in starts)
    return range_of, bytes(range_of[::in_byte]) if whole else None


def slot_by(rule: Keys, key: bytes, starts: Sequence[int]) -> int:
    """Return the slot of a key. `starts`: the first slot of each of Kafka's partitions.

    >>> slot_by("java", b"42", (0, 256, 512, 768))
    0
    """
    if rule == "postroom":
        return slot_of(key)
    return starts[(_java(key) if rule == "java" else crc32(key)) % len(starts)]


def _java(key: bytes) -> int:
    return (_remembered(key) if len(key) <= _SHORT else murmur2(key)) & _POSITIVE


def murmur2(data: bytes) -> int:
    """Return Java's hash of a key, as a number without a sign.

    >>> murmur2(b"21") - 2**32  # as Kafka's own tests have it
    -973932308
    """
    whole = len(data) & ~3
    found = (_SEED ^ len(data)) & _MASK
    for at in range(0, whole, 4):
        part = int.from_bytes(data[at : at + 4], "little") * _M & _MASK
        found = (found * _M & _MASK) ^ ((part ^ part >> 24) * _M & _MASK)
    if whole < len(data):
        found = (found ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    found = (found ^ found >> 13) * _M & _MASK
    return found ^ found >> 15


_remembered = lru_cache(_MOST)(murmur2)


TEST_VECTORS: tuple[tuple[bytes, int], ...] = (
    (b"", 0),
    (b"\x00", 658),
    (b"a", 256),
    (b"42", 452),
    (b"123456789", 566),
    (b"customer-1", 401),
    (b"customer-2", 293),
    (b"order:2024-01-31", 715),
    (b" ", 237),
    (b"\xff", 284),
    (b"\x00\x00\x00\x00", 828),
    (b"\xde\xad\xbe\xef", 746),
    (bytes(range(16)), 863),
    ("Zürich".encode(), 666),
    ("注文".encode(), 9),
    ("🐟".encode(), 610),
    (b"x" * 1000, 253),
)
"""(key, slot) for whoever writes a client; also in docs/howto/slots.md."""
