"""Why a message failed, as text that every database can keep.

A reason is whatever an exception says: it may be endless, hold bytes that are no text (file names), or a NUL,
which PostgreSQL refuses. None of that may stand in the way of settling the message.
"""

from __future__ import annotations

from ..config import DEFAULTS

__all__ = ["as_reason"]


def as_reason(said: str, limit: int = DEFAULTS.max_reason_chars) -> str:
    """Cut to `limit` characters, and with what cannot be stored replaced."""
    short = said if len(said) <= limit else said[: limit - 1] + "…"
    return short.replace("\0", "\ufffd").encode(errors="replace").decode()
