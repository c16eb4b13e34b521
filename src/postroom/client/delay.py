"""When a delayed message is due, from what a caller may say about it (R35).

Decides it once per call, by the shard's clock that the caller passes in, so that messages sent together are
due together. What is due now, or was due before, is no delayed message: it is stored at once.
"""

from __future__ import annotations

import secrets
from base64 import b64encode
from datetime import UTC, datetime

from ..errors import InvalidSetting
from ..units import Duration, Moment, duration_ms, moment_ms

__all__ = ["as_datetime", "due_at", "new_id"]


def due_at(delay: Duration | None, at: Moment | None, now_ms: int) -> int:
    """The moment in milliseconds; 0: now."""
    if delay is not None and at is not None:
        raise InvalidSetting("a message takes delay= or at=, not both")
    if delay is not None:
        due = now_ms + duration_ms(delay, name="delay")
    elif at is not None:
        due = moment_ms(at, name="at")
    else:
        return 0
    return due if due > now_ms else 0


def as_datetime(due: int) -> datetime | None:
    return datetime.fromtimestamp(due / 1000, UTC) if due else None


def new_id() -> str:
    """For a delayed message that was given none, to cancel it by: 15 letters and digits, 86 random bits."""
    return b64encode(secrets.token_bytes(11), altchars=b"xy").decode()[:15]
