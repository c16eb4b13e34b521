"""Ticking: one run per tick, however many workers there are.

Each worker waits for the next tick, by the shard's clock, and sends its run with the id "<name>@<tick>". The
topic remembers ids, so the first is stored and the others are told that it is there (R32, I13): nobody leads,
and a worker that dies at any step leaves a tick that another sends, or that was sent.

Which ticks were missed while nobody ran is read from the topic: its newest run says up to when ticks were
decided. Each run names its cadence. If the newest has another one, the schedule is new or was changed: then a
mark is left, a message that has expired already, so that ticks count from now on and nobody handles it.

Must never send a tick that is older than ids are remembered without having looked into the topic right
before, and must never send one before its time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import UTC, datetime

from ...config import DEFAULTS
from ...errors import PostroomError, UnknownTopic
from ...model.settings import Start
from ...model.ticks import due
from ..connection import Connection
from ..consuming.reading import Reading
from ..ending import end
from ..message import Received
from ..producing.appending import pause
from .every import GROUP, Recurring, prepare
from .health import HandlerHealth, Standing, is_final

__all__ = ["Ticker"]

log = logging.getLogger("postroom.app")

_CADENCE = "cadence"  # the header of a run that says of which cadence it is
_LONGEST_WAIT_S = 60.0  # then the clock is looked at again: it may have been moved
_PAST = datetime.fromtimestamp(1, UTC)


class Ticker:
    """Sends the runs of one recurring schedule."""

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
        headers = {_CADENCE: self._recurring.cadence.text}
        await self._mq.send(self._recurring.topic, text.encode(), headers=headers, id=f"{name}@{text}")

    async def _begin(self, now: int) -> int:
        """Where to go on: after the newest run; from now on, if that has another cadence or there is none."""
        last, ours = await self._recorded(now)
        if ours:
            return last
        headers = {_CADENCE: self._recurring.cadence.text}
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
            cadence, tick = message.headers.get(_CADENCE), _tick_of(message)
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
                    wait_s = 10 * pause(tries)
                    await self._not_sent(error)
                await _at_most(min(wait_s, _LONGEST_WAIT_S), moved)
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
