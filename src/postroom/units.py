"""Friendly durations, moments and sizes, turned into the integers used inside, and back into text.

Decides what a user may write for a time or a size. Must never guess: whatever is unclear is refused with the
name of the setting and an example. Inside, everything is integer milliseconds and bytes; this is the edge.
"""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta
from typing import TypeAlias

from .errors import InvalidSetting

__all__ = ["Duration", "Moment", "duration_ms", "format_bytes", "format_duration", "moment_ms", "size_bytes"]

Duration: TypeAlias = float | int | timedelta | str
"""Seconds, a timedelta, or text such as "250ms", "10m", "1h30m"."""

Moment: TypeAlias = datetime | float | int | str
"""A datetime with a time zone, seconds since 1970 (as of `time.time()`), or ISO 8601 text with a zone."""

_UNIT_MS = {"w": 604_800_000, "d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_UNIT_BYTES = {"": 1, "b": 1, "kb": 1 << 10, "kib": 1 << 10, "mb": 1 << 20, "mib": 1 << 20, "gb": 1 << 30,
               "gib": 1 << 30, "tb": 1 << 40, "tib": 1 << 40}  # fmt: skip
_LONGEST_MS = 1_000 * 366 * 86_400_000  # a thousand years: sums of a few of them still fit into 64 bits
_LARGEST_BYTES = 1 << 60

_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")
_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ms|[smhdw]) ?")
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([a-zA-Z]*)")


def duration_ms(value: Duration, *, name: str = "duration") -> int:
    """Milliseconds. Numbers, also as text, are seconds. What is longer than nothing is at least 1 ms."""
    if isinstance(value, str):
        exact = _parsed_ms(value.strip())
    elif isinstance(value, timedelta):
        exact = value / timedelta(milliseconds=1)
    elif _is_number(value):
        exact = _as_float(value) * 1000
    else:
        exact = math.nan
    if not 0 <= exact <= _LONGEST_MS:
        raise InvalidSetting(
            f"{name} must be a duration of 0 or more: seconds (30), a timedelta, or text such as "
            f'"250ms", "10m" or "1h30m"; not {value!r}',
            name=name,
        )
    return max(1, round(exact)) if exact > 0 else 0


def moment_ms(value: Moment, *, name: str = "moment") -> int:
    """Milliseconds since 1970 of a moment that is clear in every time zone."""
    seconds = math.nan
    if isinstance(value, str):
        value = _parsed_datetime(value, name)
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise InvalidSetting(
                f"{name} has no time zone: use timezone.utc, as in datetime.now(timezone.utc); not {value!r}",
                name=name,
            )
        seconds = value.timestamp()
    elif _is_number(value):
        seconds = _as_float(value)
    if not 0 <= seconds <= _LONGEST_MS / 1000:
        raise InvalidSetting(
            f"{name} must be a datetime with a time zone, such as datetime.now(timezone.utc), or "
            f"seconds since 1970, such as time.time() + 60; not {value!r}",
            name=name,
        )
    return round(seconds * 1000)


def size_bytes(value: int | str, *, name: str = "size") -> int:
    """Bytes. 1 MB is 1024 KB, as everywhere in Postroom; "MiB" means the same."""
    exact: float = math.nan
    if isinstance(value, int) and not isinstance(value, bool):
        exact = value
    elif isinstance(value, str) and (match := _SIZE.fullmatch(value.strip())):
        exact = float(match[1]) * _UNIT_BYTES.get(match[2].lower(), math.nan)
    if not 0 <= exact <= _LARGEST_BYTES or exact != int(exact):
        raise InvalidSetting(
            f'{name} must be a whole number of bytes, such as 65536, or text such as "64KB"; not {value!r}',
            name=name,
        )
    return int(exact)


def format_duration(ms: int) -> str:
    """The two leading units, cut rather than rounded: "250ms", "1.2s", "3m 10s", "2d 4h"."""
    if ms < 0:
        return "-" + format_duration(-ms)
    if ms < 1_000:
        return f"{ms}ms"
    if ms < 60_000:
        return f"{_tenths(ms, 1_000)}s"
    large, small = "dh" if ms >= _UNIT_MS["d"] else "hm" if ms >= _UNIT_MS["h"] else "ms"
    whole, rest = divmod(ms, _UNIT_MS[large])
    part = rest // _UNIT_MS[small]
    return f"{whole}{large} {part}{small}" if part else f"{whole}{large}"


def format_bytes(size: int) -> str:
    """One decimal, cut rather than rounded: "512 B", "1.5 MB"."""
    if size < 0:
        return "-" + format_bytes(-size)
    for unit in ("TB", "GB", "MB", "KB"):
        if size >= _UNIT_BYTES[unit.lower()]:
            return f"{_tenths(size, _UNIT_BYTES[unit.lower()])} {unit}"
    return f"{size} B"


def _parsed_ms(text: str) -> float:
    if _NUMBER.fullmatch(text):
        return float(text) * 1000
    total, at = 0.0, 0
    while match := _PART.match(text, at):
        total += float(match[1]) * _UNIT_MS[match[2]]
        at = match.end()
    return total if at == len(text) > 0 else math.nan


def _parsed_datetime(text: str, name: str) -> datetime:
    try:
        return datetime.fromisoformat(text.strip())
    except ValueError:
        raise InvalidSetting(
            f'{name} must be a moment such as "2030-01-31T08:00:00Z"; not {text!r}', name=name
        ) from None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf


def _tenths(amount: int, unit: int) -> str:
    whole, tenth = divmod(amount * 10 // unit, 10)
    return f"{whole}.{tenth}" if tenth else f"{whole}"
