"""How long messages waited until they were first read, of late: a histogram small enough for a row (R43).

A wait counts in the bucket of its size, two of them to a power of two milliseconds, so what is read from them
is right to a fifth. There are two sets, of this period and of the one before, so that what is shown is of the
last one to two periods. Must never grow: counts are halved before they take a seventh digit, and there is a
longest wait. A text that is none counts as empty: figures stop nobody.

>>> text = noted("", 250, 9, now_ms=0, period_ms=1000)
>>> text = noted(text, 8000, 1, now_ms=1500, period_ms=1000)
>>> text
'1:25=1|15=9'
>>> percentile(recent(text, now_ms=1500, period_ms=1000), 0.5)
214
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from math import ceil, log2

__all__ = ["noted", "percentile", "recent"]

_PER_OCTAVE = 2
_LAST = 64  # the bucket of the longest waits: 50 days
_MOST = 999_999  # messages in a bucket
_SET = re.compile("(?:[0-9]{1,2}=[0-9]{1,6}(?:,(?!$)|$))*")


def noted(text: str, waited_ms: int, messages: int, *, now_ms: int, period_ms: int) -> str:
    """Return the histogram with so many messages more that have waited so long."""
    period, now, before = _at(text, now_ms // period_ms)
    if _SET.fullmatch(now) is None:
        now = ""
    bucket = min(_LAST, int(_PER_OCTAVE * log2(1 + max(0, waited_ms))))
    # one count is changed where it stands: every hand-out comes here
    head, found, rest = f",{now}".partition(f",{bucket}=")
    known, comma, tail = rest.partition(",")
    count = max(1, messages) + (int(known) if found else 0)
    if count > _MOST:
        return f"{period}:{_halved(now, bucket, count)}|{before}"
    written = f"{head},{bucket}={count}{comma}{tail}"
    return f"{period}:{written.lstrip(',')}|{before}"


def _halved(now: str, bucket: int, count: int) -> str:
    counts = _read(now) | {bucket: count}
    while max(counts.values()) > _MOST:
        counts = {one: ceil(count / 2) for one, count in counts.items()}
    return ",".join([f"{one}={count}" for one, count in counts.items()])


def recent(text: str, *, now_ms: int, period_ms: int) -> Counter[int]:
    """Return how many messages each bucket has, of this period and the one before."""
    _, now, before = _at(text, now_ms // period_ms)
    return Counter(_read(now)) + Counter(_read(before))


def percentile(counts: Mapping[int, int], share: float) -> int | None:
    """Return the wait in milliseconds that this share of the messages had at most; None: there are none."""
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 0:
            return round(2 ** ((bucket + 0.5) / _PER_OCTAVE) - 1) if bucket else 0
    return None


def _at(text: str, period: int) -> tuple[int, str, str]:
    """Return both sets as they are in that period, unread; a clock that was set back is followed."""
    number, _, sets = text.partition(":")
    then = int(number) if number.isdecimal() else period
    now, _, before = sets.partition("|")
    if then == period:
        return period, now, before
    return period, "", now if then == period - 1 else ""


def _read(text: str) -> dict[int, int]:
    try:
        return {
            int(bucket): int(count)
            for bucket, _, count in [one.partition("=") for one in text.split(",") if one]
        }
    except ValueError:
        return {}
