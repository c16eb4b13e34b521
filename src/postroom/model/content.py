"""What a batch of a job holds, in a few bytes: whether it comes again with the same rows is told by these.

A row has a hash, and a batch the sum of them: so neither the order of the rows counts, nor how they are
spread over tasks, and each task adds up its own. A sum begins with how its rows were hashed; others are not
compared with it, and an empty one with none. It is there for mistakes, not against somebody who looks for
rows with the same sum.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from .batch import Headers
from .names import HEADER_PREFIX

__all__ = ["Content", "differ", "joined", "of_messages", "summed"]

Content: TypeAlias = Annotated[bytes, Meta(max_length=32)]
"""A word about how rows are hashed, and the sum of the hashes; empty: not known."""

_SUM_BYTES, _WORD_BYTES = 16, 8
_MOST = (1 << 8 * _SUM_BYTES) - 1
_MESSAGES = b"blake2b "

_encode = msgspec.msgpack.Encoder().encode


def summed(word: bytes, total: int) -> bytes:
    """The content of rows whose hashes, made as the word of eight bytes says, have this sum."""
    assert len(word) == _WORD_BYTES, "it is cut off again"
    return word + (total & _MOST).to_bytes(_SUM_BYTES, "big")


def of_messages(topic: str, entries: Iterable[tuple[bytes | None, bytes, Headers]]) -> bytes:
    """The content of messages: their topic, keys, values and headers, without Postroom's own."""
    total = 0
    for key, value, headers in entries:
        kept = [pair for pair in headers if not pair[0].startswith(HEADER_PREFIX)]
        row = blake2b(_encode((topic, key, value, kept)), digest_size=_SUM_BYTES)
        total += int.from_bytes(row.digest(), "big")
    return summed(_MESSAGES, total)


def joined(parts: Iterable[bytes]) -> bytes:
    """The content of all of these together; empty if that of one is not known, or if there are none."""
    found = list(parts)
    words = {part[:_WORD_BYTES] for part in found}
    if len(words) != 1 or not all(found):
        return b""
    return summed(words.pop(), sum(int.from_bytes(part[_WORD_BYTES:], "big") for part in found))


def differ(one: bytes, other: bytes) -> bool:
    """Whether these are surely not the same rows."""
    return one != other and bool(one) and one[:_WORD_BYTES] == other[:_WORD_BYTES]
