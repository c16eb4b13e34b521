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

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal
from zlib import crc32

from ...config import SLOTS

__all__ = ["KEY_RULES", "TEST_VECTORS", "Keys", "deal", "murmur2", "slot_by", "slot_of", "slots_of"]

Keys = Literal["postroom", "java", "librdkafka"]
KEY_RULES: tuple[Keys, ...] = ("postroom", "java", "librdkafka")

_GOLDEN = 2654435769
_SHIFT = 32 - (SLOTS.bit_length() - 1)
_SHORT, _MOST = 64, 16_384  # bytes of a key that is remembered, and how many: the hash takes 20 times ours
_SEED, _M, _MASK, _POSITIVE = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF, 0x7FFFFFFF


def slot_of(key: bytes) -> int:
    return (crc32(key) * _GOLDEN & 0xFFFFFFFF) >> _SHIFT


def slots_of(keys: Iterable[bytes]) -> list[int]:
    """The slot of each key, in half the time that `slot_of` takes for one after the other."""
    golden, mask, shift = _GOLDEN, 0xFFFFFFFF, _SHIFT
    return [(crc * golden & mask) >> shift for crc in map(crc32, keys)]


def deal(keys: Iterable[bytes], piles: Sequence[list[int]]) -> None:
    """Put the index of each key on the pile of its slot."""
    golden, mask, shift = _GOLDEN, 0xFFFFFFFF, _SHIFT
    for at, key in enumerate(keys):
        piles[(crc32(key) * golden & mask) >> shift].append(at)


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
