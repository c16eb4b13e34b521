"""Recurring schedules: what `@app.every` may be given, and the topic that has the runs of one.

A run is a message in the topic `every.<name>`, for the group `every`: so retries, time-outs, dead letters and
lag are those of any message. Decides what the function gets: its tick, the message, or nothing. Must never
open anything before the app starts; `ticking` decides when a run is sent.

The topic is made by the app. It remembers ids for a day, so that all workers together send each tick once,
and keeps the newest runs however old they are: the last says which ticks were missed since (`ticking`).
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Any, get_args, get_type_hints
from zoneinfo import ZoneInfo

from ...backoff import SLOW
from ...config import DEFAULTS
from ...errors import InvalidName, InvalidSetting, PostroomError, UnknownTopic, UsageError
from ...model.delivery.retry import Backoff
from ...model.policy.recurrence import (
    CADENCE_HEADER,
    RUNS_GROUP,
    RUNS_PREFIX,
    Cadence,
    Missed,
    cron,
    due,
    interval,
)
from ...model.policy.settings import Start
from ...model.topology.names import check_group
from ...tasks import end
from ...units import Duration, duration_ms
from ..connection import Connection
from ..consumer.reading import Reading
from ..message import Received
from .handler import Handler
from .subscription import Subscription, make_subscription
from .supervisor import HandlerHealth, Standing, is_final

__all__ = ["GROUP", "Recurring", "Ticker", "make_recurring", "prepare"]


GROUP = RUNS_GROUP
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
        return RUNS_PREFIX + self.name

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


log = logging.getLogger("postroom.app")

_PAST = datetime.fromtimestamp(1, UTC)


class Ticker:
    """Sends the runs of one recurring schedule: one per tick, however many workers there are.

    Each worker waits for the next tick, by the shard's clock, and sends its run with the id "<name>@<tick>".
    The topic remembers ids, so the first is stored and the others are told that it is there (R32, I13):
    nobody leads, and a worker that dies at any step leaves a tick that another sends, or that was sent.

    Which ticks were missed while nobody ran is read from the topic: its newest run says up to when ticks were
    decided. Each run names its cadence. If the newest has another one, the schedule is new or was changed:
    then a mark is left, a message that has expired already, so that ticks count from now on and nobody
    handles it.

    Must never send a tick that is older than ids are remembered without having looked into the topic right
    before, and must never send one before its time.
    """

    def __init__(self, connection: Connection, recurring: Recurring) -> None:
        self._mq, self._recurring = connection, recurring
        self._last: int | None = None  # up to here ticks are decided; None: the topic was not looked at yet
        self._standing = Standing(f"{recurring.topic} (ticks)", recurring.topic, GROUP)

    @property
    def health(self) -> HandlerHealth:
        return self._standing.health

    def _now_ms(self) -> int:
        """The store's time. If its clock was just set on, that is followed slowly: no tick was missed."""
        return self._mq._heartbeat.handling_ms()

    # ---- one step ----

    async def step(self, *, late_ms: int | None = DEFAULTS.every_late_ms) -> int:
        """Send what is due; returns the next tick. `late_ms=None`: no tick is too late."""
        now = self._now_ms()
        if self._last is None:
            self._last = await self._begin(now)
        recurring, late = self._recurring, 2**62 if late_ms is None else late_ms
        found = due(
            recurring.cadence, self._last, now, recurring.missed, late_ms=late, most=DEFAULTS.every_missed
        )
        if found.late:  # somebody may have run it long ago
            self._last = max(self._last, (await self._recorded(now))[0])
            found = due(
                recurring.cadence, self._last, now, recurring.missed, late_ms=late, most=DEFAULTS.every_missed
            )
        for tick in found.run:
            await self._send(tick)
            self._last = tick
        if found.skipped is not None:
            log.warning("%s: nobody ran the tick of %s; it is skipped", recurring.topic, _iso(found.skipped))
        self._last = max(self._last, found.last)
        return recurring.cadence.next(now)

    async def _send(self, tick: int) -> None:
        name, text = self._recurring.name, _iso(tick)
        headers = {CADENCE_HEADER: self._recurring.cadence.text}
        await self._mq.send(self._recurring.topic, text.encode(), headers=headers, id=f"{name}@{text}")

    async def _begin(self, now: int) -> int:
        """Where to go on: after the newest run; from now on, if that has another cadence or there is none."""
        last, ours = await self._recorded(now)
        if ours:
            return last
        headers = {CADENCE_HEADER: self._recurring.cadence.text}
        await self._mq.send(self._recurring.topic, _iso(now).encode(), headers=headers, expires=_PAST)
        return now

    async def _recorded(self, now: int) -> tuple[int, bool]:
        """The newest tick of our cadence in the topic, and whether the newest of all runs has our cadence.

        One that is still to come was sent while the store's clock was wrong: it decides nothing.
        """
        topic, ours = self._recurring.topic, self._recurring.cadence.text.encode()
        newest: tuple[int, bytes] = (-1, b"")
        last = 0
        reading = Reading(
            self._mq._endpoint, self._mq._guard, await self._mq.route(topic), start=Start("earliest"),
            end=None, partition=None, follow=False, expired=True,
        )  # fmt: skip
        async for message in reading.messages():
            cadence, tick = message.headers.get(CADENCE_HEADER), _tick_of(message)
            if cadence is None or tick is None:
                continue  # sent by hand
            if message.timestamp >= newest[0]:
                newest = (message.timestamp, cadence)
            if cadence == ours and tick <= now:
                last = max(last, tick)
        return last, newest[1] == ours

    # ---- life ----

    async def run(self, stopping: asyncio.Event) -> None:
        """Until the app stops, also in the midst of a send: the id makes it safe to send again."""
        ticking, ending = asyncio.create_task(self._tick()), asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait((ticking, ending), return_when=asyncio.FIRST_COMPLETED)
            if ticking.done():
                ticking.result()
        finally:
            await end((ticking, ending))

    async def _tick(self) -> None:
        """For ever; raises only if there is no connection any more."""
        moved = asyncio.Event()
        unsubscribe = self._mq._heartbeat._clock.subscribe(_waking(moved))
        tries = 0
        try:
            while True:
                moved.clear()
                try:
                    next_ms = await self.step()
                    wait_s, tries = (next_ms - self._now_ms()) / 1000, 0
                    self._standing.runs()
                except PostroomError as error:  # also of unknown fate
                    tries += 1
                    wait_s = SLOW.after(tries)
                    await self._not_sent(error)
                await _at_most(min(wait_s, self._mq._limits.tuning.client.tick_wait_s), moved)
        finally:
            unsubscribe()

    async def _not_sent(self, error: PostroomError) -> None:
        if not isinstance(error, UnknownTopic):
            self._standing.stopped_by(error)
        if is_final(error):
            raise error
        if isinstance(error, UnknownTopic):
            log.warning("topic %s was deleted; it is made again for its schedule", self._recurring.topic)
            self._last = None
            try:
                await prepare(self._mq, [self._recurring])
            except PostroomError as failure:
                self._standing.stopped_by(failure)


def _waking(event: asyncio.Event) -> Callable[[], None]:
    """Sets the event, from whatever thread."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        loop.call_soon_threadsafe(event.set)

    return wake


async def _at_most(seconds: float, event: asyncio.Event) -> None:
    """Wait for the event, but no longer than this."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await event.wait()
    except TimeoutError:
        pass


def _iso(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat()


def _tick_of(message: Received) -> int | None:
    try:
        return round(datetime.fromisoformat(message.value.decode()).timestamp() * 1000)
    except ValueError:
        return None
