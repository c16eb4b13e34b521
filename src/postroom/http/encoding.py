"""Bytes in JSON: as text where they are text, else as base64. And handles, by which messages are settled."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping

import msgspec

from ..endpoint.values import Verdict
from ..model.delivery.delivery import Span
from ..model.policy.bounds import Offset, PartitionId, Token, TopicName
from .failures import BadRequest

__all__ = [
    "ANSWER_BYTES",
    "Handle",
    "from_base64",
    "json_bytes",
    "merged",
    "spans_of",
    "text_or_base64",
    "texts",
]


ANSWER_BYTES = 4 << 20
"""What an answer with messages may have as JSON; one message is in it however large it is (I17)."""

_CONTROLS, _QUOTED, _HIGH = bytes(range(32)), b'"\\', bytes(range(128, 256))
_FRAME_BYTES = 400  # names, numbers and marks of a message


def text_or_base64(value: bytes, *, always_base64: bool = False) -> tuple[str | None, str | None]:
    """One of the two.

    >>> text_or_base64(b"paid"), text_or_base64(b"\\xff")
    (('paid', None), (None, '/w=='))
    """
    if not always_base64:
        try:
            return value.decode(), None
        except UnicodeDecodeError:
            pass
    return None, base64.b64encode(value).decode()


def json_bytes(
    value: bytes, key: bytes | None, headers: Mapping[str, bytes], *, always_base64: bool = False
) -> int:
    """Returns about how much a message takes in JSON: control characters take six times their size.

    >>> json_bytes(b"\\0" * 1000, None, {}) - json_bytes(b"", None, {})
    6000
    """
    size = _FRAME_BYTES + (len(value) * 4 // 3 if always_base64 else _escaped(value))
    if key is not None:
        size += _escaped(key) + len(key)
    for name, content in headers.items():
        size += len(name.encode()) + _escaped(content) + 2 * _count(content, _HIGH) + 8
    return size


def _escaped(text: bytes) -> int:
    return len(text) + 5 * _count(text, _CONTROLS) + _count(text, _QUOTED)


def _count(text: bytes, which: bytes) -> int:
    return len(text) - len(text.translate(None, which))


def from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{where} is not base64") from None


def texts(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Header values as text; what is none is shown as far as it is."""
    return {name: value.decode(errors="replace") for name, value in headers.items()}


# ---- handles ----

_VERSION = 1
_LONGEST = 400


class Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A polled message is settled with it, so that the broker need not remember who polled what.

    It travels as base64 of its fields; the first byte is a version, and clients must not look into it. It is
    not signed: the token is 63 random bits that nobody else was told (I7), and whoever settles needs
    permission on the topic anyway.
    """

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
