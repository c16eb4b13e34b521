"""Bytes in JSON: as text where they are text, else as base64."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

from .failures import BadRequest

__all__ = ["from_base64", "text_or_base64", "texts"]


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


def from_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise BadRequest(f"{where} is not base64") from None


def texts(headers: Mapping[str, bytes]) -> dict[str, str]:
    """Header values as text; what is none is shown as far as it is."""
    return {name: value.decode(errors="replace") for name, value in headers.items()}
