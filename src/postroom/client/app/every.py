"""Recurring schedules: what `@app.every` may be given, and the topic that has the runs of one.

A run is a message in the topic `every.<name>`, for the group `every`: so retries, time-outs, dead letters and
lag are those of any message. Decides what the function gets: its tick, the message, or nothing. Must never
open anything before the app starts; `ticking` decides when a run is sent.

The topic is made by the app. It remembers ids for a day, so that all workers together send each tick once,
and keeps the newest runs however old they are: the last says which ticks were missed since (`ticking`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, get_args, get_type_hints
from zoneinfo import ZoneInfo

from ...errors import InvalidName, InvalidSetting, UnknownTopic, UsageError
from ...model.names import check_group
from ...model.retry import Backoff
from ...model.ticks import Cadence, Missed, cron, interval
from ...units import Duration, duration_ms
from ..connection import Connection
from .handler import Handler
from .subscription import Subscription, make_subscription

__all__ = ["GROUP", "Recurring", "make_recurring", "prepare"]

GROUP = "every"
_PREFIX = "every."
_REMEMBERED = "1d"  # ids of ticks; who is later than this looks into the topic first
_KEPT = "256KB"  # about a thousand runs
_ZONE = "UTC"
_OWN = ("topic", "group", "batch", "ack", "start")  # of a subscription: not to be chosen here


@dataclass(frozen=True, slots=True)
class Recurring:
    """A recurring schedule of an app."""

    name: str
    cadence: Cadence
    missed: Missed

    @property
    def topic(self) -> str:
        """Where its runs are."""
        return _PREFIX + self.name

    def next(self, after: datetime | None = None) -> datetime:
        """Its first tick after a moment, or after now."""
        moment = datetime.now(UTC) if after is None else after
        tick = self.cadence.next(round(moment.timestamp() * 1000))
        return datetime.fromtimestamp(tick / 1000, self.cadence.zone)


def make_recurring(
    function: Callable[..., Any],
    scope: Mapping[str, Any],
    when: Duration,
    timezone: str | tzinfo | None,
    missed: Missed,
    name: str | None,
    options: Mapping[str, Any],
) -> tuple[Recurring, Subscription]:
    if missed not in get_args(Missed):
        raise InvalidSetting(f"missed={missed!r}: choose 'skip', 'once' or 'all'", name="missed")
    cadence = _cadence(when, timezone)
    recurring = Recurring(_checked_name(function, name), cadence, missed)
    for own in _OWN:
        if own in options:
            raise UsageError(f"every() takes no {own}=: runs are in the topic {recurring.topic!r}")
    settings: dict[str, Any] = {"concurrency": 1, "timeout": None, "retry": Backoff(1, 2, "10m")}
    settings |= {"window": None, "mode": None, "order": None, "lease": None, "max_attempts": None}
    settings |= {"exhausted": None, "max_hold": None, "max_handling": None}
    if unknown := options.keys() - settings.keys():
        raise UsageError(f"every() takes no {', '.join(sorted(unknown))}=; it takes {', '.join(settings)}")
    subscription = make_subscription(
        _as_run, {}, topic=recurring.topic, group=GROUP, batch=None, ack="after", start=None,
        **(settings | dict(options)),
    )  # fmt: skip
    return recurring, replace(subscription, handler=_handler(function, scope, cadence.zone))


def _as_run(message: Any) -> None:
    """Stands in for the function while the other settings are looked at."""


async def prepare(connection: Connection, recurring: Iterable[Recurring]) -> None:
    """Make the topics that are not there."""
    for one in recurring:
        try:
            info = await connection.topic(one.topic)
        except UnknownTopic:
            info = await connection.create_topic(
                one.topic,
                partitions=1,
                retention=None,
                retention_bytes=_KEPT,
                dedup_window=_REMEMBERED,
                exist_ok=True,
            )
        if not info.settings.dedup_ms or info.settings.volatile:
            raise UsageError(
                f"the topic {one.topic!r} remembers no ids, so each worker would run every tick: "
                f"alter_topic({one.topic!r}, dedup_window={_REMEMBERED!r}), or delete it if it is volatile"
            )


# ---- what is given ----


def _checked_name(function: Callable[..., Any], name: str | None) -> str:
    found = name if name is not None else getattr(function, "__name__", "")
    try:
        return check_group(found)
    except InvalidName:
        raise InvalidName(
            f"{found!r} is no name for a recurring schedule: 1 to 60 letters, digits, '_' or '-', not "
            "beginning with '_'; give name='nightly-report'"
        ) from None


def _cadence(when: object, timezone: str | tzinfo | None) -> Cadence:
    if isinstance(when, str) and (len(when.split()) >= 5 or "*" in when):
        return cron(when, *_zone(_ZONE if timezone is None else timezone))
    if timezone is not None:
        raise InvalidSetting("a duration has no time zone: leave out timezone=", name="timezone")
    if not isinstance(when, str | int | float | timedelta):
        if callable(when):
            raise UsageError("call it: @app.every('0 2 * * *')")
        raise InvalidSetting(f"{when!r}: a cron expression such as '0 2 * * *', or '10m'", name="when")
    return interval(duration_ms(when, name="when"))


def _zone(timezone: str | tzinfo) -> tuple[tzinfo, str]:
    if isinstance(timezone, tzinfo):
        return timezone, str(timezone)
    try:
        return ZoneInfo(timezone), timezone
    except (KeyError, ValueError, TypeError, OSError):  # ZoneInfoNotFoundError is a KeyError
        raise InvalidSetting(
            f"timezone={timezone!r}: such as 'Europe/Berlin'; where the system has no time zones, "
            "`pip install tzdata`",
            name="timezone",
        ) from None


# ---- what the function gets ----


def _handler(function: Callable[..., Any], scope: Mapping[str, Any], zone: tzinfo) -> Handler:
    """It may take its tick (a datetime), `message`, both or neither."""
    if not _takes_anything(function):
        plain = Handler.of(lambda message: None, many=False, scope={})
        is_async = inspect.iscoroutinefunction(function)
        name = getattr(function, "__qualname__", "").rpartition("<locals>.")[2]
        return replace(plain, function=function, name=name, is_async=is_async, message=None)
    handler = Handler.of(function, many=False, scope=scope)
    if handler.body is None:
        return handler
    hint = get_type_hints(function, localns=dict(scope)).get(handler.body, datetime)
    if hint is not datetime and hint is not Any:
        raise UsageError(
            f"handler {handler.name}: {handler.body!r} is the tick, a datetime; not {hint!r}. A recurring "
            "schedule has no body"
        )
    return replace(handler, decode=lambda value: _tick(value, zone))


def _takes_anything(function: Callable[..., Any]) -> bool:
    if not callable(function):
        return True  # Handler.of says what is wrong with it
    return any(
        parameter.default is parameter.empty or parameter.name == "message"
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    )


def _tick(value: bytes, zone: tzinfo) -> datetime:
    """A run that somebody sent by hand has no tick: it is for now."""
    try:
        return datetime.fromisoformat(bytes(value).decode()).astimezone(zone)
    except ValueError:
        return datetime.now(zone)
