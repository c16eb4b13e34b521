"""Where the key of a message goes, by a rule that the topic has for ever: ours, or one of Kafka clients'.

Kafka clients choose the partition of a key themselves, each family by a rule of its own: Java's, aiokafka,
kafka-python and franz-go take murmur2, librdkafka takes CRC-32. A topic that was made for them names one of
these, and native producers follow it: then a key has one partition, whoever sends it, and its order holds.

Kafka's rules count partitions; a slot of that partition stands for it here, so that routes and moves need not
know of them. The rules must never change: order per key depends on them (R29).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal
from zlib import crc32

from ..messages.slot import slot_of

__all__ = ["KEY_RULES", "Keys", "murmur2", "slot_by"]

Keys = Literal["postroom", "java", "librdkafka"]
KEY_RULES: tuple[Keys, ...] = ("postroom", "java", "librdkafka")

_SHORT, _MOST = 64, 16_384  # bytes of a key that is remembered, and how many: the hash takes 20 times ours
_SEED, _M, _MASK, _POSITIVE = 0x9747B28C, 0x5BD1E995, 0xFFFFFFFF, 0x7FFFFFFF


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
