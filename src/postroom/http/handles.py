"""Handles: what a polled message is settled with, so that the broker need not remember who polled what.

A handle is base64 of topic, partition, token and offset. It is not signed: the token is 63 random bits that
nobody else was told (I7), and whoever settles needs permission on the topic anyway. Clients must not look
into it; its first byte is a version.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable

import msgspec

from ..broker.endpoint import Verdict
from ..model.bounds import Offset, PartitionId, Token, TopicName
from ..model.delivery import Span
from .failures import BadRequest

__all__ = ["Handle", "merged", "spans_of"]

_VERSION = 1
_LONGEST = 400


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    topic: TopicName  # where it is stored: the topic, or the group's retry topic
    partition_id: PartitionId
    token: Token
    offset: Offset

    def encode(self) -> str:
        packed = bytes((_VERSION,)) + msgspec.msgpack.encode(self)
        return base64.urlsafe_b64encode(packed).rstrip(b"=").decode()

    @staticmethod
    def decode(text: str) -> Handle:
        try:
            if len(text) > _LONGEST:
                raise ValueError("too long")
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            if packed[:1] != bytes((_VERSION,)):
                raise ValueError("another version")
            found = msgspec.msgpack.decode(packed[1:], type=Handle)
        except (ValueError, binascii.Error, msgspec.MsgspecError):
            raise BadRequest(
                f"{text[:80]!r} is no handle: pass on those of a poll's messages as they came"
            ) from None
        return found

    @property
    def place(self) -> tuple[str, int, int]:
        return (self.topic, self.partition_id, self.token)


def merged(verdicts: Iterable[Verdict]) -> tuple[Verdict, ...]:
    """Neighbours that are settled alike become one range."""
    out: list[Verdict] = []
    for one in sorted(verdicts, key=lambda v: v.first):
        last = out[-1] if out else None
        if last is not None and one.first == last.last + 1 and _how(one) == _how(last):
            out[-1] = Verdict(one.kind, last.first, one.last, one.delay_ms, one.at_ms, one.reason)
        else:
            out.append(one)
    return tuple(out)


def _how(verdict: Verdict) -> tuple[object, ...]:
    return (verdict.kind, verdict.delay_ms, verdict.at_ms, verdict.reason)


def spans_of(offsets: Iterable[int]) -> tuple[Span, ...]:
    return tuple((v.first, v.last) for v in merged(Verdict("ack", one, one) for one in sorted(offsets)))
