"""Recurring schedules as the queue knows them: when each comes next, when it came last, and who runs it.

A schedule is declared in a program (`@app.every`), and no table has it. Its runs are messages of the topic
`every.<name>`, and each says of which cadence it is; so the newest of them say what is run and when. Who runs
it are the members of the group `every` there. Reads only the end of each topic. Must never trust what it
reads: whoever may send to the topic can write anything there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any

from ...config import DEFAULTS
from ...endpoint.endpoint import Endpoint
from ...endpoint.values import GroupInfo, Lag, TopicInfo
from ...errors import CatalogError, InvalidSetting, PermissionDenied
from ...model.policy.recurrence import CADENCE_HEADER, RUNS_GROUP, RUNS_PREFIX, Cadence, cron, interval
from ...model.policy.settings import Start
from ...model.topology.names import REDRIVE_GROUP, dead_topic
from ...model.topology.route import Route
from ..message import Received
from ..owner_check import Guard
from .reading import Reading

__all__ = ["ScheduleInfo", "Schedules", "cadence_of"]

_NEXT = 3  # runs that are told beforehand
_TAIL = 50  # messages at the end of a topic that are read
_AT_ONCE = 8  # schedules that are looked up at the same time
_LONGEST = 200  # characters of a cadence


@dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """A recurring schedule. Moments are in milliseconds since 1970."""

    name: str
    topic: str  # where its runs are
    rule: str  # such as "0 2 * * *" or "every 10m"; "": it may not be read, or nothing was ever sent
    timezone: str  # "": a duration has none
    next_ms: tuple[int, ...]  # the next runs; none: they cannot be told
    last_ms: int | None  # the tick of the newest run; None: there was none yet, or it is not kept any more
    workers: tuple[str, ...]  # clients that run it now; none: nobody does
    pending: int  # runs that are not done: in hand, waiting, or to be tried again
    dead: int  # runs that failed for good
    missed: bool  # a tick has passed for which nobody has sent a run

    @property
    def next(self) -> datetime | None:
        """Its next run; None: it cannot be told."""
        return datetime.fromtimestamp(self.next_ms[0] / 1000, UTC) if self.next_ms else None

    @property
    def last(self) -> datetime | None:
        """The tick of its newest run."""
        return None if self.last_ms is None else datetime.fromtimestamp(self.last_ms / 1000, UTC)


class Schedules:
    """The part of a connection that is about recurring schedules."""

    _endpoint: Endpoint
    _guard: Guard

    if TYPE_CHECKING:

        async def topics(self, *, internal: bool = False) -> list[TopicInfo]: ...
        async def route(self, topic: str) -> Route: ...
        async def groups(self, topic: str) -> list[GroupInfo]: ...
        async def lag(self, topic: str, group: str) -> Lag: ...

    async def schedules(self) -> list[ScheduleInfo]:
        """All recurring schedules that ran on this queue, by name: their rule, next and last runs, workers.

        One that is no longer in any program stays, with no workers, until its topic is deleted.
        """
        topics = await self.topics(internal=True)
        names = {info.name for info in topics}
        room = asyncio.Semaphore(_AT_ONCE)

        async def one(topic: str) -> ScheduleInfo | None:
            async with room:
                try:
                    return await self._schedule(topic, names)
                except CatalogError:
                    return None  # it was deleted meanwhile

        runs = sorted(name for name in names if is_runs(name))
        found = await asyncio.gather(*map(one, runs))
        return [info for info in found if info is not None]

    async def _schedule(self, topic: str, topics: Iterable[str]) -> ScheduleInfo:
        name, now = topic.removeprefix(RUNS_PREFIX), self._endpoint.now_ms()
        text, last, decided = _read(name, await _allowed(self._tail(topic), []), now)
        cadence = cadence_of(text)
        members = [one.members for one in await self.groups(topic) if one.name == RUNS_GROUP]
        dead = dead_topic(topic, RUNS_GROUP)
        return ScheduleInfo(
            name=name,
            topic=topic,
            rule=text if cadence is None else cadence.rule,
            timezone=text.rpartition(" ")[2] if cadence is not None and cadence.expression else "",
            next_ms=() if cadence is None else tuple(islice(cadence.ticks(now), _NEXT)),
            last_ms=last,
            workers=tuple(sorted({member.client for found in members for member in found})),
            pending=await self._behind(topic, RUNS_GROUP) if members else 0,
            dead=await self._behind(dead, REDRIVE_GROUP) if dead in topics else 0,
            missed=cadence is not None and 0 < decided < now and _missed(cadence, decided, now),
        )

    async def _behind(self, topic: str, group: str) -> int:
        async def count() -> int:
            return (await self.lag(topic, group)).total.messages

        found: int = await _allowed(count(), 0)
        return found

    async def _tail(self, topic: str) -> list[Received]:
        """Return the newest messages, those that have expired too: a mark of the cadence is one."""
        route = await self.route(topic)
        kept = (await self._endpoint.bounds(topic)).partitions
        found: list[Received] = []
        for piece in route.partitions:
            edges = kept.get(piece.partition_id)
            if edges is None or edges.end <= edges.start:
                continue
            first = max(edges.start, edges.end - _TAIL)
            start = Start("offsets", offsets=((piece.partition, first),))
            reading = Reading(
                self._endpoint, self._guard, route, start=start, end=None, partition=piece.partition,
                follow=False, expired=True,
            )  # fmt: skip
            found += [message async for message in reading.messages()]
        return sorted(found, key=lambda message: message.timestamp)


def is_runs(topic: str) -> bool:
    """Tell whether a topic has the runs of a schedule: no other has a name like it, but by chance."""
    return topic.startswith(RUNS_PREFIX) and "." not in topic.removeprefix(RUNS_PREFIX)


async def _allowed(call: Awaitable[Any], otherwise: Any) -> Any:
    """Return what the call finds, or this where it may not look."""
    try:
        return await call
    except PermissionDenied:
        return otherwise


def _read(name: str, messages: Iterable[Received], now: int) -> tuple[str, int | None, int]:
    """Return the newest cadence, the tick of the newest run, and up to when ticks of the cadence are decided.

    What was sent by hand is a run, too, and has no cadence; a mark has one, and is no run.
    """
    text, last, decided = "", None, 0
    for message in messages:
        header, tick = message.headers.get(CADENCE_HEADER), _tick(message)
        if header is not None:
            cadence = header.decode(errors="replace")[:_LONGEST]
            decided = tick if cadence != text else max(decided, tick)
            text = cadence
        if (header is None or message.id.startswith(f"{name}@")) and tick <= now:
            last = tick if last is None else max(last, tick)
    return text, last, decided


def _tick(message: Received) -> int:
    """Return the tick that a run is for: when it was sent, if it does not say."""
    try:
        return round(datetime.fromisoformat(message.value[:_LONGEST].decode()).timestamp() * 1000)
    except (ValueError, OverflowError, OSError):
        return message.timestamp


def cadence_of(text: str) -> Cadence | None:
    """Return the cadence of that text; None: it is none, or its time zone is not known here."""
    from zoneinfo import ZoneInfo  # slow to import, and few ask

    expression, _, zone = text.rpartition(" ")
    try:
        if expression == "every":
            return interval(int(zone.removesuffix("ms")[:15]))
        return cron(expression, ZoneInfo(zone), zone)
    except (InvalidSetting, KeyError, ValueError, OSError, OverflowError):
        return None


def _missed(cadence: Cadence, decided: int, now: int) -> bool:
    return cadence.next(decided) < now - DEFAULTS.every_late_ms
