"""Why a message failed, as text that every database can keep and that people can sort by.

A reason is whatever an exception says: it may be endless, hold bytes that are no text (file names), or a NUL,
which PostgreSQL refuses. None of that may stand in the way of settling the message. Where a handler raised,
its traceback follows behind what was said. Decides which reasons are one error: those that differ in numbers,
ids and moments alone.
"""

from __future__ import annotations

import re

from ...config import DEFAULTS

__all__ = ["NO_REASON", "PLAIN", "PLAIN_CHARS", "as_reason", "plain_reason", "split_reason", "with_traceback"]

NO_REASON = "(no reason given)"
PLAIN_CHARS = 200

# For Java and Python alike. What is left of an error after these is what it is about.
PLAIN = (
    (r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}", "<id>"),
    (r"[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}[0-9:.,]*(Z|[+-][0-9]{2}:?[0-9]{2})?", "<time>"),
    (r"[A-Za-z0-9._+-]+@[A-Za-z0-9-]+[.][A-Za-z0-9.-]*[A-Za-z0-9]", "<email>"),
    (r"\b0x[0-9A-Fa-f]+\b", "<id>"),
    (r"\b(?=[0-9a-fA-F]*[0-9])(?=[0-9a-fA-F]*[a-fA-F])[0-9a-fA-F]{8,}\b", "<id>"),
    (r"\b(?=[A-Za-z0-9]*[0-9])(?=[A-Za-z0-9]*[A-Za-z])[A-Za-z0-9]{16,}\b", "<id>"),
    (r"(?<![A-Za-z0-9])[0-9]+([.,][0-9]+)*", "<n>"),
    (r"\s+", " "),
)
_COMPILED = tuple((re.compile(pattern), word) for pattern, word in PLAIN)


def plain_reason(reason: str) -> str:
    """Return the first line of a reason, without numbers and ids.

    >>> plain_reason("order 17 of 2026-11-17T10:00:00Z is negative")
    'order <n> of <time> is negative'
    """
    found = reason.strip().partition("\n")[0]
    for pattern, word in _COMPILED:
        found = pattern.sub(word, found)
    return found.strip()[:PLAIN_CHARS] or NO_REASON


_TRACEBACK = "\n\nTraceback (most recent call last):\n"  # between what is said and where it was raised


def with_traceback(said: str, frames: str, limit: int = DEFAULTS.max_reason_chars) -> str:
    """Return a reason that also tells where the handler failed; of frames too many the outer ones are cut."""
    if not frames:
        return said
    room = limit - len(said) - len(_TRACEBACK) - 4
    if room < 0:
        return said
    cut = frames if len(frames) <= room else f"  …\n{frames[len(frames) - room :]}"
    return f"{said}{_TRACEBACK}{cut}"


def split_reason(reason: str) -> tuple[str, str]:
    """Return what was said, and the traceback; "" if there is none."""
    said, found, frames = reason.partition(_TRACEBACK)
    return said, f"{_TRACEBACK.lstrip()}{frames}" if found else ""


def as_reason(said: str, limit: int = DEFAULTS.max_reason_chars) -> str:
    """Cut to `limit` characters, and with what cannot be stored replaced."""
    short = said if len(said) <= limit else said[: limit - 1] + "…"
    return short.replace("\0", "\ufffd").encode(errors="replace").decode()
