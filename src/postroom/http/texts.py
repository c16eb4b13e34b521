"""Bytes in JSON: as text where they are text, else as base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from .failures import BadRequest

__all__ = ["ANSWER_BYTES", "from_base64", "json_bytes", "text_or_base64", "texts"]

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
    """How much a message takes in JSON, about: text with control characters takes six times its size.

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
