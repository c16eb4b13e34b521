"""Ticks: the moments of a recurring schedule, and which of them are to be run now.

A cadence is a cron expression in a time zone ("0 2 * * *" in Europe/Berlin), or a duration ("10m": its ticks
are the multiples of it since 1970, so that all who compute them agree). Decides, given the last tick that was
decided and the time, which ticks are to be run: what `missed` says. Must never read a clock, and must never
depend on when it was asked before: two who ask with the same arguments get the same ticks.

Where clocks are changed, as Debian's cron does it: a tick at a time of day that is skipped comes at the first
moment after the gap, one at a time of day that comes twice comes the first time; ticks of every minute or
every hour (a field that begins with `*`) follow real time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Literal, get_args

from cronsim import CronSim, CronSimError

from ...config import DEFAULTS
from ...errors import InvalidSetting
from ...units import format_duration

__all__ = [
    "CADENCE_HEADER", "RUNS_GROUP", "RUNS_PREFIX", "Cadence", "Due", "Missed", "cron", "due", "interval",
]  # fmt: skip

RUNS_PREFIX, RUNS_GROUP = "every.", "every"
"""The runs of a schedule are in the topic of its name, for this group."""

CADENCE_HEADER = "cadence"
"""The header of a run that says of which cadence it is."""

Missed = Literal["skip", "once", "all"]

_BACK = timedelta(hours=26)  # clocks are moved by less, also where a whole day is left out
_HOUR_MS, _DAY_MS = 3_600_000, 86_400_000
_LOOKS_MS = (_HOUR_MS, _DAY_MS, 32 * _DAY_MS, 400 * _DAY_MS)  # how far back ticks are looked for at first


@dataclass(frozen=True, slots=True)
class Cadence:
    """When something recurs. `text` says it in full: two of the same text have the same ticks."""

    text: str
    zone: tzinfo
    expression: str = ""  # of cron
    every_ms: int = 0  # or a duration

    @property
    def rule(self) -> str:
        """When it comes, for people; without the time zone."""
        return self.expression or f"every {format_duration(self.every_ms)}"

    def ticks(self, after_ms: int) -> Iterator[int]:
        """Yield all ticks later than that, in order, without end."""
        if self.every_ms:
            tick = after_ms - after_ms % self.every_ms
            while True:
                tick += self.every_ms
                yield tick
        last = after_ms
        for found in CronSim(self.expression, self._begin(after_ms)):
            tick = round(found.timestamp() * 1000)
            if tick > last:
                yield tick
                last = tick

    def _begin(self, after_ms: int) -> datetime:
        """Return where a search begins: well before, since times of day are searched without the zone."""
        moment = datetime.fromtimestamp(after_ms / 1000, UTC)
        minute, hour = self.expression.split()[:2]
        real_time = minute.startswith("*") or hour.startswith("*") or len(self.expression.split()) == 6
        return (moment if real_time else moment - _BACK).astimezone(self.zone)

    def next(self, after_ms: int) -> int:
        """The first tick later than that."""
        return next(self.ticks(after_ms))

    def newest(self, after_ms: int, until_ms: int, most: int) -> list[int]:
        """The newest ticks, at most so many, later than the one moment and not later than the other."""
        for look_ms in (*_LOOKS_MS, until_ms - after_ms):
            start = max(after_ms, until_ms - look_ms)
            found = deque(self._between(start, until_ms), maxlen=most)
            if len(found) == most or start == after_ms:
                break
        return list(found)

    def _between(self, after_ms: int, until_ms: int) -> Iterator[int]:
        for tick in self.ticks(after_ms):
            if tick > until_ms:
                return
            yield tick


def cron(expression: str, zone: tzinfo, zone_name: str) -> Cadence:
    """Five fields, or six with seconds first."""
    tidy = " ".join(expression.split())
    try:
        next(CronSim(tidy, datetime(2001, 1, 1, tzinfo=UTC)))
    except CronSimError as error:
        raise InvalidSetting(
            f"{expression!r} is no cron expression ({error}): minute, hour, day, month and weekday, such as "
            "'0 2 * * *' for 2 o'clock every day",
            name="when",
        ) from None
    except StopIteration:
        raise InvalidSetting(f"{expression!r} never comes: there is no such day", name="when") from None
    return Cadence(f"{tidy} {zone_name}", zone, expression=tidy)


def interval(every_ms: int) -> Cadence:
    if every_ms < DEFAULTS.shortest_every_ms:
        raise InvalidSetting("a recurring schedule needs at least a second between its ticks", name="when")
    return Cadence(f"every {every_ms}ms", UTC, every_ms=every_ms)


# ---- what is to be run ----


@dataclass(frozen=True, slots=True)
class Due:
    run: tuple[int, ...]  # ticks, in order
    last: int  # up to here everything is decided
    late: bool  # the first of them is so late that somebody else may have run it long ago
    skipped: int | None = None  # the newest of the ticks that are left out, if it is later than all that run


def due(cadence: Cadence, last_ms: int, now_ms: int, missed: Missed, *, late_ms: int, most: int) -> Due:
    """Decide what to run of the ticks later than `last_ms`, up to now.

    A tick is missed if nobody ran it before the next one came, or for longer than `late_ms`. Of those that
    were missed none is run ("skip"), the newest ("once"), or as many as `most` ("all").
    """
    if missed not in get_args(Missed):
        raise InvalidSetting(f"missed={missed!r}: choose 'skip', 'once' or 'all'", name="missed")
    found = cadence.newest(last_ms, now_ms, most if missed == "all" else 1)
    if not found:
        return Due((), last_ms, False)
    late = now_ms - found[0] > late_ms
    if missed == "skip" and late:
        return Due((), found[-1], True, skipped=found[-1])
    return Due(tuple(found), found[-1], late)
