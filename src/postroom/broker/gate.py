"""One rate limit, as this broker sees it: what it has reserved of it, and who waits, first come first served.

A slice of the rate is reserved in the store at a time, or what the first in the queue wants if that is more,
and handed out in memory: so a limit costs some ten transactions a second, not one for each batch. Whoever
waits holds no thread and no connection: it is told by its event when it is its turn. While the store cannot
be asked the rate is kept by this broker alone (R6). For the event loop only.

Must never let anybody overtake (I3), and must never take part in what is decided: `model.flow` does that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ..errors import ClosedError, PostroomError
from ..model.flow import NOTHING, Rate, spend
from ..store.contract import Store
from .endpoint import NEVER_STORED

__all__ = ["Gate", "Place", "Share"]

_log = logging.getLogger("postroom.broker")

_IDLE_S = 1.0  # what was reserved and not used for so long is given back


@dataclass(eq=False, slots=True)
class Place:
    """Somebody who wants to pass: with all of it, or (not `whole`) with as much as there is."""

    messages: int
    bytes: int
    whole: bool = True
    news: asyncio.Event = field(default_factory=asyncio.Event)  # it is its turn, perhaps


@dataclass(frozen=True, slots=True)
class Share:
    """What somebody passed with."""

    rate: Rate | None  # under which it was taken
    messages: int
    bytes: int


class Gate:
    def __init__(self, rate: Rate, store: Store, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self.rate: Rate | None = rate  # None: there is no limit any more
        self._store, self._in_thread = store, in_thread
        self._loop = asyncio.get_running_loop()
        self._messages = self._bytes = 0  # in hand; less than 0: used and not taken
        self._coming: tuple[int, Share] | None = None  # reserved, and from when on it is in hand
        self._alone = NOTHING  # spent while the store could not be asked
        self._queue: deque[Place] = deque()
        self.reserving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._used_at = self._loop.time()
        self._closed = False

    # ---- passing ----

    async def pass_through(self, messages: int, size: int) -> Share:
        """Wait for as long as it takes. One that is cancelled meanwhile was never stored, and says so."""
        place = Place(messages, size)
        try:
            while (share := self.take(place)) is None:
                await place.news.wait()
                place.news.clear()
            return share
        except asyncio.CancelledError as gone:
            gone.args = (NEVER_STORED,)
            raise
        finally:
            self.leave(place)

    def take(self, place: Place) -> Share | None:
        """Pass, if it is its turn; else it has a place in the queue from now on."""
        if self._closed:
            raise ClosedError("this connection is closed; call postroom.connect again")
        self._used_at = self._loop.time()
        first = not self._queue or self._queue[0] is place
        self._arrive()
        if self.rate is not None and not (first and self._lack(place) == (0, 0)):
            if place not in self._queue:
                self._queue.append(place)
            self._advance()
            return None
        share = self._share(place)
        self._add(-share.messages, -share.bytes)
        self.leave(place)
        return share

    def leave(self, place: Place) -> None:
        if place in self._queue:
            self._queue.remove(place)
            self._advance()

    def put_back(self, share: Share, messages: int, size: int) -> None:
        """So much of a share was used: all that was taken, or less, or more."""
        if share.rate is not None and share.rate == self.rate:
            self._add(share.messages - messages, share.bytes - size)
            self._advance()

    def change(self, rate: Rate | None) -> None:
        """The limit is another one now, of which nothing is spent; None: there is none."""
        if rate != self.rate:
            self.rate, self._messages, self._bytes, self._coming = rate, 0, 0, None
            self._advance()

    @property
    def crowded(self) -> bool:
        return bool(self._queue)

    @property
    def idle(self) -> bool:
        busy = self._queue or self.reserving is not None
        return not busy and self._loop.time() - self._used_at > _IDLE_S

    async def close(self) -> None:
        """Let nobody pass any more, and give back what is in hand."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for place in self._queue:
            place.news.set()
        if self.reserving is not None:
            await asyncio.wait((self.reserving,))
        self._arrive(early=True)
        rate, messages, size = self.rate, self._messages, self._bytes
        self._messages = self._bytes = 0
        if rate is None or not (messages or size):
            return
        try:
            await self._in_thread(self._store.rates.give_back, rate, messages, size)
        except PostroomError as error:
            _log.debug("a slice of %s is lost: %s", rate.name, error)

    # ---- what is in hand ----

    def _add(self, messages: int, size: int) -> None:
        """Of what has no limit there is nothing in hand."""
        self._messages += messages if self.rate and self.rate.messages_per_s else 0
        self._bytes += size if self.rate and self.rate.bytes_per_s else 0

    def _share(self, place: Place) -> Share:
        rate, messages, size = self.rate, place.messages, place.bytes
        if rate is not None and not place.whole:
            messages = min(messages, self._messages) if rate.messages_per_s else messages
            size = min(size, self._bytes) if rate.bytes_per_s else size
        return Share(rate, messages, size)

    def _lack(self, place: Place) -> tuple[int, int]:
        """What has to be reserved before this one can pass."""
        rate = self.rate
        if rate is None:
            return 0, 0
        slices = rate.slice
        messages = _lack(place.messages if place.whole else 1, self._messages, slices[0])
        size = _lack(place.bytes if place.whole else 1, self._bytes, slices[1])
        return messages, size

    def _arrive(self, *, early: bool = False) -> None:
        """What was reserved is in hand once its moment has come."""
        if self._coming is not None and (early or self._coming[0] <= self._store.now_ms()):
            share, self._coming = self._coming[1], None
            self._add(share.messages, share.bytes)

    def _advance(self) -> None:
        """Tell the first in the queue, or see to it that it can be told some time."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self.rate is None or self._closed:
            for place in self._queue:
                place.news.set()
            return
        self._arrive()
        if not self._queue:
            return
        lack = self._lack(self._queue[0])
        if lack == (0, 0):
            self._queue[0].news.set()
        elif self._coming is not None:
            wait_s = (self._coming[0] - self._store.now_ms()) / 1000
            self._timer = self._loop.call_later(max(0.001, wait_s), self._advance)
        elif self.reserving is None:
            self.reserving = self._loop.create_task(self._reserve(self.rate, *lack))

    def clock_moved(self) -> None:
        self._advance()

    async def _reserve(self, rate: Rate, messages: int, size: int) -> None:
        owed = max(0, -self._messages), max(0, -self._bytes)
        try:
            usable_at = await self._spend(rate, messages, size, *owed)
        finally:
            self.reserving = None
        if rate == self.rate:
            self._add(*owed)
            self._coming = (usable_at, Share(rate, messages, size))
        self._advance()

    async def _spend(self, rate: Rate, messages: int, size: int, owed_messages: int, owed_bytes: int) -> int:
        ask = partial(
            self._store.rates.spend, rate, messages, size, owed_messages=owed_messages, owed_bytes=owed_bytes
        )
        try:
            found: int = await self._in_thread(ask)
        except PostroomError as error:
            _log.debug("%s is kept by this broker alone: %s", rate.name, error)
            now_us = self._store.now_ms() * 1000
            owing, _ = spend(self._alone, rate, now_us, owed_messages, owed_bytes)
            self._alone, usable_us = spend(owing, rate, now_us, messages, size)
            found = -(-usable_us // 1000)
        return found


def _lack(wanted: int, there: int, slice: int) -> int:
    """0 where there is no limit, and so no slice."""
    missing = wanted - max(0, there) if slice else 0
    return max(missing, slice) if missing > 0 else 0
