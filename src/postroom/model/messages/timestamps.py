"""The time that a message carries: which values may be sent, and which a calendar can show.

Timestamps are milliseconds since 1970. What is sent lies between 1970 and a day ahead of the queue's clock
(`Limits.timestamp_ahead_ms`): a producer's clock may be wrong by hours, but microseconds taken for
milliseconds are 55,000 years away, and would be in the way of whoever reads by time for as long as the
message is kept. Earlier versions stored such messages, so that readers must expect any number. Must never
read a clock.
"""

from __future__ import annotations

from datetime import UTC, datetime

from ...config import DEFAULTS
from ...errors import InvalidMessage

__all__ = ["FIRST_SHOWN_MS", "LAST_SHOWN_MS", "check_sent", "latest_sent"]

_DAY_MS = 24 * 3_600_000
FIRST_SHOWN_MS = -62_135_596_800_000 + _DAY_MS
"""What calendars hold begins with the year 1, and so a day later in every time zone."""

LAST_SHOWN_MS = 253_402_300_799_999 - _DAY_MS
"""And ends with the year 9999, less a day."""

_LIKELY_MS = 315_532_800_000  # 1980: what is counted in another unit is a time since then
_TOO_FINE = ((1_000, "microseconds"), (1_000_000, "nanoseconds"))


def latest_sent(now_ms: int) -> int:
    """The last timestamp that may be sent now."""
    return now_ms + DEFAULTS.timestamp_ahead_ms


def check_sent(earliest: int, latest: int, now_ms: int) -> None:
    """InvalidMessage if one of these may not be sent: its value, the bound, and what is probably wrong."""
    if earliest >= 0 and latest <= now_ms + DEFAULTS.timestamp_ahead_ms:
        return
    value, bound = (earliest, 0) if earliest < 0 else (latest, latest_sent(now_ms))
    raise InvalidMessage(_complaint(value, bound), timestamp=value, bound=bound)


def _complaint(value: int, bound: int) -> str:
    what = f"timestamp={value}: timestamps are milliseconds since 1970"
    if value < 0:
        return f"{what}, and none is before that (0): leave it out, and it is when the message is sent"
    ahead = f"{what}, and at most {DEFAULTS.timestamp_ahead_ms // 3_600_000} hours ahead of the queue's clock"
    for times, name in _TOO_FINE:
        if _LIKELY_MS <= value // times <= bound:
            return f"{ahead} ({bound}, {_shown(bound)}): are these {name}? Divide them by {times:,}"
    return f"{ahead} ({bound}, {_shown(bound)}): correct the value, or the clock that it comes from"


def _shown(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
