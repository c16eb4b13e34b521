"""Which topics the members of a Kafka consumer group want: that alone is read of what they send each other.

Groups of other kinds (Kafka Connect's workers) say something else there, which nobody but they can read.
"""

from __future__ import annotations

import struct

from .kafka_group import Generation, Protocols

__all__ = ["CONSUMER", "topics_of", "topics_wanted"]

CONSUMER = "consumer"
"""The type of protocol of groups whose members consume."""

_HEAD = struct.Struct(">hi")  # a version, and how many topics
_LENGTH = struct.Struct(">h")


def topics_wanted(protocol_type: str, protocols: Protocols) -> frozenset[str] | None:
    """The topics that a member subscribes to; None: it does not say so in a way that can be read.

    >>> topics_wanted("consumer", (("range", b"\\0\\1\\0\\0\\0\\1\\0\\3abc\\xff\\xff\\xff\\xff"),))
    frozenset({'abc'})
    >>> topics_wanted("consumer", (("range", b"\\0\\1\\x7f\\0\\0\\1"),)) is None
    True
    """
    if protocol_type != CONSUMER:
        return None
    try:
        return frozenset(topic for _, metadata in protocols for topic in _topics(metadata))
    except (struct.error, UnicodeDecodeError, ValueError):
        return None


def _topics(metadata: bytes) -> list[str]:
    _, count = _HEAD.unpack_from(metadata)
    at, found = _HEAD.size, []
    if not 0 <= count <= len(metadata):  # each takes a byte at least (I22)
        raise ValueError("it is cut off")
    for _ in range(count):
        (size,) = _LENGTH.unpack_from(metadata, at)
        at += _LENGTH.size + size
        if size < 0 or at > len(metadata):
            raise ValueError("it is cut off")
        found.append(metadata[at - size : at].decode())
    return found


def topics_of(generation: Generation) -> frozenset[str] | None:
    """The topics that the members of a group subscribe to; None: one of them does not say."""
    found: frozenset[str] = frozenset()
    for member in generation.members:
        wanted = topics_wanted(generation.protocol_type, member.protocols)
        if wanted is None:
            return None
        found |= wanted
    return found
