"""Slow lanes: which sources of a group are slow, when they return, and how fast the lane is read (R42).

A source is whoever a header of the message names. Of each, what became of its messages is counted in buckets
of time. Too many failures, or handling that takes too long, within the window: its further messages go to the
group's lane before they are tried, and are handled there in a share of the handlers' time. After a clean
period, in which at least one of its messages was handled and none failed, it returns.

Pure: clocks are arguments, in milliseconds. The numbers of sources are bounded: what is beyond the bounds is
not watched, and goes the normal way.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import blake2b

from ...config import DEFAULTS
from ...errors import InvalidSetting
from ...units import Duration, duration_ms
from ..frozen import dataclass
from .bounds import HeaderName, Label, Long, Millis, Whole

__all__ = [
    "MOST_SOURCES",
    "NO_LANE",
    "Changes",
    "LaneInfo",
    "LanePolicy",
    "LaneState",
    "LaneView",
    "Pace",
    "Seen",
    "SlowLane",
    "SlowSource",
    "as_policy",
    "bucket_of",
    "decide",
    "looks_bad",
    "returns",
    "room",
    "source_name",
    "spent",
    "total",
    "view_of",
    "why_slow",
    "window_start",
]

MOST_SOURCES = 1000
"""So many sources of a group are counted in the store, and so many may be slow."""

_BUCKETS = 6  # of a window
_QUIET_MS = 24 * 3_600_000  # a slow source of which nothing was seen for so long is forgotten
_NAME = 100  # characters of a source's name that are kept
_MOST_AHEAD = 8  # for each handler of the lane


# ---- the policy -------------------------------------------------------------------------------------


def _check_part(name: str, value: object, *, none_is_fine: bool) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and (0 < value <= 1 or (none_is_fine and value == 0)):  # type: ignore[operator]
        return
    raise InvalidSetting(f"SlowLane.{name}={value!r}: a part of 1, such as {0.5 if none_is_fine else 0.1}")


@dataclass(frozen=True, slots=True)
class LanePolicy:
    """The group's settings have it so. Without `failures` and `handling_ms` there is no policy."""

    failures: float = 0  # such a part of a source's messages failed; 0: not looked at
    handling_ms: Long = 0  # they took so long, on average; 0: not looked at
    at_least: Long = 20  # of so many messages within the window
    window_ms: Long = 60_000
    clean_ms: Long = 300_000
    share: float = 0.1  # of the handlers' time is for the lane
    header: HeaderName = "source"

    @property
    def on(self) -> bool:
        return self.failures > 0 or self.handling_ms > 0

    def __post_init__(self) -> None:
        _check_part("failures", self.failures, none_is_fine=True)
        _check_part("share", self.share, none_is_fine=False)
        if type(self.at_least) is not int or self.at_least < 1:
            raise InvalidSetting(f"SlowLane.at_least={self.at_least!r}: a whole number from 1 up")
        for name, value in (("window", self.window_ms), ("clean", self.clean_ms)):
            if not 1_000 <= value <= _QUIET_MS:
                raise InvalidSetting(f"SlowLane.{name}: from a second to a day, such as {name}='1m'")
        if not isinstance(self.header, str) or not 0 < len(self.header) <= 120:
            raise InvalidSetting(f"SlowLane.header={self.header!r}: the name of a header, such as 'source'")


NO_LANE = LanePolicy()


@dataclass(frozen=True, slots=True)
class SlowLane:
    """`create_group(…, slow_lane=postroom.SlowLane(failures=0.5, handling="5s"))`.

    A source is slow if within `window`, of `at_least` so many of its messages, the part `failures` failed, or
    they took longer than `handling` on average. None leaves one of the two out. It returns after `clean`.
    """

    failures: float | None = 0.5
    at_least: int = 20
    handling: Duration | None = None
    window: Duration = "1m"
    clean: Duration = "5m"
    share: float = 0.1
    header: str = "source"

    @property
    def policy(self) -> LanePolicy:
        handling_ms = 0 if self.handling is None else duration_ms(self.handling, name="SlowLane.handling")
        found = LanePolicy(
            failures=0 if self.failures is None else self.failures,
            handling_ms=handling_ms,
            at_least=self.at_least,
            window_ms=duration_ms(self.window, name="SlowLane.window"),
            clean_ms=duration_ms(self.clean, name="SlowLane.clean"),
            share=self.share,
            header=self.header,
        )
        if not found.on:
            raise InvalidSetting("SlowLane watches nothing: give failures=0.5, handling='5s', or both")
        return found

    def __post_init__(self) -> None:
        _ = self.policy  # refuses what cannot be


def as_policy(given: SlowLane | bool | None) -> LanePolicy | None:
    """Return the policy that a user asks for: True is `SlowLane()`, False none, None what the group has."""
    if given is None or isinstance(given, SlowLane):
        return None if given is None else given.policy
    if isinstance(given, bool):
        return SlowLane().policy if given else NO_LANE
    raise InvalidSetting(f"slow_lane={given!r}: postroom.SlowLane(failures=0.5), True, or False for none")


# ---- what is counted --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seen:
    """Messages of one source came to this."""

    source: Label
    handled: Whole  # their handling ended, one way or the other
    failed: Whole = 0  # of these: retried, or dead
    spent_ms: Millis = 0  # time of handlers

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            self.source,
            self.handled + other.handled,
            self.failed + other.failed,
            self.spent_ms + other.spent_ms,
        )


@dataclass(frozen=True, slots=True)
class SlowSource:
    source: str
    since: int  # moment, in milliseconds since 1970
    reason: str
    failed_at: int  # when it was last seen to be bad
    handled_at: int = 0  # when the last of its messages was handled well; 0: none since

    @property
    def since_ms(self) -> int:
        """Since when it is slow, in milliseconds since 1970."""
        return self.since


@dataclass(frozen=True, slots=True)
class LaneState:
    """A group has these slow sources, and these are counted in the store."""

    slow: tuple[SlowSource, ...] = ()
    watched: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class LaneView:
    """The members of a group are told this."""

    version: int  # of what is told here; 0: there is no policy (any more)
    sources: tuple[str, ...] = ()  # slow ones: their messages are set aside before they are tried
    header: str = ""
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """A group's slow lane, as people see it."""

    topic: str
    group: str
    waiting: int  # messages that are in the lane and not settled
    sources: tuple[SlowSource, ...]  # slow ones, the first one first


@dataclass(frozen=True, slots=True)
class Changes:
    put: tuple[SlowSource, ...] = ()
    drop: tuple[str, ...] = ()  # they return, and their counts begin anew


def source_name(value: bytes | str) -> str:
    """The name under which a source is counted: printable, and not too long."""
    text = value if isinstance(value, str) else value.decode(errors="replace")
    shown = text if text.isprintable() else "".join(c if c.isprintable() else "?" for c in text)
    if len(shown) <= _NAME and shown == text:
        return shown
    raw = value if isinstance(value, bytes) else value.encode(errors="replace")
    return f"{shown[: _NAME - 17]}~{blake2b(raw, digest_size=8).hexdigest()}"


def bucket_of(policy: LanePolicy, now: int) -> int:
    """The beginning of the bucket that the moment is in."""
    return now - now % max(1, policy.window_ms // _BUCKETS)


def window_start(policy: LanePolicy, now: int) -> int:
    """Buckets that begin before then do not count any more."""
    return bucket_of(policy, now) - policy.window_ms


def total(counts: Iterable[Seen]) -> dict[str, Seen]:
    """Summed up by source."""
    found: dict[str, Seen] = {}
    for seen in counts:
        known = found.get(seen.source)
        found[seen.source] = seen if known is None else known + seen
    return found


# ---- deciding ---------------------------------------------------------------------------------------


def why_slow(policy: LanePolicy, seen: Seen) -> str | None:
    """The reason, if that is too much within one window."""
    if seen.handled < policy.at_least:
        return None
    if policy.failures and seen.failed >= policy.failures * seen.handled:
        return f"{seen.failed} of {seen.handled} messages failed"
    if policy.handling_ms and seen.spent_ms > policy.handling_ms * seen.handled:
        return f"{seen.handled} messages took {seen.spent_ms / seen.handled / 1000:.3g} s each"
    return None


def looks_bad(policy: LanePolicy, seen: Seen) -> bool:
    """Tell whether there is anything to count against the source."""
    too_long = bool(policy.handling_ms) and seen.spent_ms > policy.handling_ms * seen.handled
    return seen.failed > 0 or too_long


def decide(
    policy: LanePolicy,
    now: int,
    slow: Mapping[str, SlowSource],
    counted: Mapping[str, Seen],
    fresh: Mapping[str, Seen],
) -> Changes:
    """`counted`: within the window, the `fresh` ones included, which came since the last decision."""
    put: dict[str, SlowSource] = {}
    drop: list[str] = []
    for source, known in slow.items():
        seen = _told(policy, now, known, fresh.get(source))
        if not policy.on or returns(policy, now, seen):
            drop.append(source)
        elif seen is not known:
            put[source] = seen
    room_left = MOST_SOURCES - len(slow) + len(drop)
    for source, all_of_it in counted.items() if policy.on else ():
        reason = why_slow(policy, all_of_it) if source not in slow and room_left > 0 else None
        if reason is not None:
            put[source] = SlowSource(source, now, reason, now)
            room_left -= 1
    return Changes(tuple(put.values()), tuple(drop))


def _told(policy: LanePolicy, now: int, known: SlowSource, fresh: Seen | None) -> SlowSource:
    if fresh is None or not fresh.handled:
        return known
    return replace(known, failed_at=now) if looks_bad(policy, fresh) else replace(known, handled_at=now)


def returns(policy: LanePolicy, now: int, one: SlowSource) -> bool:
    """Tell whether a source was clean for long enough, or was not seen for too long to matter."""
    if one.handled_at > one.failed_at and now - one.failed_at >= policy.clean_ms:
        return True
    return now - max(one.failed_at, one.handled_at) >= _QUIET_MS + policy.clean_ms


def view_of(policy: LanePolicy, slow: Iterable[SlowSource]) -> LaneView:
    """Return what members are told; the same state has the same version, whichever broker tells it."""
    names = tuple(sorted(one.source for one in slow))
    said = "\0".join((policy.header, str(policy.share), *names))
    version = int.from_bytes(blake2b(said.encode(), digest_size=6).digest()) + 1
    return LaneView(version, names, policy.header, policy.share)


# ---- how fast the lane is read ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Pace:
    """A member's slow lane may take a share of its handlers' time, whether the others are idle or not."""

    share: float = NO_LANE.share
    handlers: int = 1
    each_ms: float | None = None  # what a message of the lane takes; None: not known yet
    free_at: float = 0  # the time of handlers is used up until then
    ahead_ms: int = DEFAULTS.tuning.client.slow_ahead_ms  # so much as is done in that time may be in flight
    saved_ms: int = DEFAULTS.tuning.client.slow_saved_ms  # what was not used is not saved up for longer

    @property
    def slots(self) -> int:
        """Handlers that messages of the lane may have at once."""
        return max(1, int(self.share * self.handlers))


def room(pace: Pace, now_ms: float, in_hand: int) -> int:
    """Return how many more messages of the lane may be asked for; with none in flight one, in time (I17)."""
    if now_ms < pace.free_at:
        return 0
    most = pace.slots
    if pace.each_ms is not None:
        most = max(most, int(pace.slots * min(pace.ahead_ms / max(pace.each_ms, 0.001), _MOST_AHEAD)))
    return max(0, most - in_hand)


def spent(pace: Pace, now_ms: float, messages: int, ms: float) -> Pace:
    """Note that messages of the lane were handled, and how much of the handlers' time they took together."""
    each = ms / max(1, messages)
    began = now_ms - each
    free_at = max(pace.free_at, began - pace.saved_ms) + ms / (pace.share * pace.handlers)
    known = each if pace.each_ms is None else pace.each_ms + (each - pace.each_ms) * 0.2
    return replace(pace, each_ms=max(each, known), free_at=free_at)
