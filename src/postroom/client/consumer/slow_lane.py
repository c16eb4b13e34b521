"""Slow lanes, as a member sees them: it counts what becomes of each source's messages, and sets aside (R42).

The broker does not open batches, so the member reads the source, from the header that the policy names.
It reports what it counted a few times a second, and is told which sources are slow. Their messages are set
aside before they are tried, unless they came from the lane; those that were handed to the user stay with the
user. Of the lane it asks for as much as its share of the handlers' time allows.

A member has none of this until the broker names slow sources, or something comes from the lane: a group
without a policy pays nothing. A report that fails is dropped: the counts are an estimate. Handling time is
measured from `began` where handlers tell (the app); else from when the messages were taken, or from the
verdict before, whichever is later: one after the other, that is exact.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from ...endpoint.endpoint import Endpoint
from ...endpoint.values import PollReply, PollRequest, released
from ...errors import PostroomError
from ...model.policy.slow_lane import MOST_SOURCES, LaneView, Pace, Seen, room, source_name, spent
from ...model.topology.names import is_lane
from ..message import Kind, Received
from .in_flight import Deliveries, LeasedDelivery, delivery_of

if TYPE_CHECKING:
    from .settle import Run, Settler

__all__ = ["SlowSources", "first_room"]

log = logging.getLogger("postroom.consumer")

_NONE = LaneView(0)
_COUNTED = ("ack", "retry", "dead")
_MOST_BEGUN = 20_000


class SlowSources:
    """What one consumer knows of slow sources. For the event loop.

    `handlers`: so many messages are handled at once. `changed` is told when further sources are slow.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        in_flight: Deliveries,
        settler: Settler,
        handlers: int,
        changed: Callable[[], None],
    ) -> None:
        self._endpoint, self._in_flight, self._settler, self._changed = endpoint, in_flight, settler, changed
        tuning = settler.who.limits.tuning.client
        self._report_s = tuning.slow_report_s
        self.view = _NONE
        self._slow: frozenset[str] = frozenset()
        self._pace = Pace(handlers=handlers, ahead_ms=tuning.slow_ahead_ms, saved_ms=tuning.slow_saved_ms)
        self._known = False  # there is a lane: something came from it
        self._counts: dict[str, Seen] = {}
        self._began: dict[
            tuple[LeasedDelivery, int], tuple[float, int]
        ] = {}  # when, and with how many others
        self._since = monotonic()  # when messages were taken, or settled, last
        self._timer: asyncio.TimerHandle | None = None
        self._reporting: asyncio.Task[None] | None = None
        settler.settled = self.settled

    # ---- asking ----

    @property
    def room(self) -> int:
        """How many messages of the lane may be asked for now."""
        in_hand = sum(d.open for d in self._in_flight if is_lane(d.topic)) if self._known else 0
        return room(self._pace, monotonic() * 1000, in_hand)

    async def poll(self, request: PollRequest) -> PollReply | None:
        """None: the lane may be asked now, and this request does not; make another one.

        A request that may have been answered before is never given up: its token may hold something (I6).
        """
        if not self._known or request.lane_messages or request.repeated or request.on_delivery:
            return await self._endpoint.poll(request)
        polling = asyncio.ensure_future(self._endpoint.poll(request))
        waiting = asyncio.ensure_future(self._has_room())
        try:
            await asyncio.wait((polling, waiting), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            await self._give_up(request, polling)
            raise
        finally:
            waiting.cancel()
        if not polling.done():
            polling.cancel()  # gives back what it was given meanwhile
            await asyncio.wait((polling,))
        return None if polling.cancelled() else polling.result()

    async def _give_up(self, request: PollRequest, polling: asyncio.Future[PollReply]) -> None:
        """Nobody wants the answer any more; if it came all the same, what it brings is given back."""
        polling.cancel()
        await asyncio.wait((polling,))
        if not polling.cancelled() and polling.exception() is None and polling.result().grants:
            back = released(request, polling.result().grants)
            with contextlib.suppress(PostroomError):
                await self._endpoint.settle(request.topic, request.group, back)

    async def _has_room(self) -> None:
        while not self.room:
            self._in_flight.changed.clear()
            left_s = self._pace.free_at / 1000 - monotonic()
            try:
                async with asyncio.timeout(left_s if left_s > 0 else None):
                    await self._in_flight.changed.wait()
            except TimeoutError:
                pass

    # ---- what is slow ----

    def told(self, view: LaneView) -> bool:
        """Follow what the broker says of slow sources; True if there are others than before."""
        if view.version == self.view.version:
            return False
        before, self.view, self._slow = self._slow, view, frozenset(view.sources)
        self._pace = replace(self._pace, share=min(1.0, max(0.001, view.share)))
        return not self._slow <= before

    def received(self, delivery: LeasedDelivery, messages: list[Received]) -> list[Received]:
        """Notes their sources; returns those that are to be tried."""
        lane = is_lane(delivery.topic)
        self._known = self._known or lane
        if not self.view.version:
            return messages
        header, first, sources = self.view.header, delivery.first, delivery.sources
        for message in messages:
            source = _source(message, header)
            if source is not None:
                sources[message._position - first] = source
        return messages if lane else self.without_slow(messages)

    def without_slow(self, messages: list[Received]) -> list[Received]:
        """Those that are to be tried; the others are set aside."""
        if not self._slow:
            return messages
        aside = [message for message in messages if self._is_slow(message)]
        if not aside:
            return messages
        self.set_aside(aside)
        kept = {message._position for message in aside}
        return [message for message in messages if message._position not in kept]

    def _is_slow(self, message: Received) -> bool:
        delivery = delivery_of(message)
        source = delivery.sources.get(message._position - delivery.first)
        return source is not None and source in self._slow and not is_lane(delivery.topic)

    def set_aside(self, messages: Sequence[Received]) -> None:
        runs: list[Run] = []
        for message in messages:
            delivery = delivery_of(message)
            at = message._position - delivery.first
            runs += [(delivery, *run) for run in delivery.open_runs(at, at + 1)]
        self._settler.submit(_merged(runs), "lane")

    # ---- what became of messages ----

    def taken(self) -> None:
        """The user has messages."""
        self._since = monotonic()

    def began(self, messages: Sequence[Received]) -> None:
        """Their handling begins now."""
        if len(self._began) > _MOST_BEGUN:  # of those whose lease was lost nobody hears again
            self._began.clear()
        now = monotonic()
        for message in messages:
            delivery = delivery_of(message)
            self._began[delivery, message._position - delivery.first] = (now, len(messages))

    def ignore(self, messages: Iterable[Received]) -> None:
        """They were not handled, though they are acked."""
        for message in messages:
            delivery = delivery_of(message)
            delivery.sources.pop(message._position - delivery.first, None)

    def settled(self, run: Run, kind: Kind) -> None:
        """A verdict was given on these."""
        delivery, start, stop = run
        times = self._spent_ms(run)
        if kind not in _COUNTED:
            return
        if is_lane(delivery.topic):
            self._pace = spent(self._pace, monotonic() * 1000, stop - start, sum(times))
        for index, ms in zip(range(start, stop), times, strict=True):
            source = delivery.sources.pop(index, None)
            if source is not None and self.view.version:
                self._count(Seen(source, 1, int(kind != "ack"), round(ms)))

    def _spent_ms(self, run: Run) -> list[float]:
        """Time of handlers on each of these."""
        delivery, start, stop = run
        now, since, self._since = monotonic(), self._since, monotonic()
        if not self._began:
            return [(now - since) * 1000 / (stop - start)] * (stop - start)
        begun = (self._began.pop((delivery, index), (now, 1)) for index in range(start, stop))
        return [(now - began) * 1000 / others for began, others in begun]

    def _count(self, seen: Seen) -> None:
        known = self._counts.get(seen.source)
        if known is not None:
            self._counts[seen.source] = known + seen
        elif len(self._counts) < MOST_SOURCES:
            self._counts[seen.source] = seen
        if self._timer is None and self._reporting is None:
            self._timer = asyncio.get_running_loop().call_later(self._report_s, self._report)

    # ---- reports ----

    def _report(self) -> None:
        self._timer = None
        self._reporting = asyncio.get_running_loop().create_task(self._reported())

    async def _reported(self) -> None:
        who = self._settler.who
        seen, self._counts = tuple(self._counts.values()), {}
        try:
            view = await self._endpoint.report_sources(who.topic, who.group, seen, self.view.version)
        except PostroomError as error:
            log.debug("what became of messages of %s was not reported: %r", who.member, error)
        else:
            if view is not None and self.told(view):
                self._changed()
        finally:
            self._reporting = None
        if self._counts and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._report_s, self._report)

    async def close(self) -> None:
        """Report what is left."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._reporting is not None:
            await asyncio.wait((self._reporting,))
        if self._timer is not None:
            self._timer.cancel()
        if self._counts:
            await self._reported()
        self._counts = {}


def first_room(handlers: int) -> int:
    """Return how many messages of a lane may be asked for while nothing is known of one."""
    return Pace(handlers=handlers).slots


def _source(message: Received, header: str) -> str | None:
    if header == "source" and message.source is not None:
        return source_name(message.source)
    value = message.headers.get(header)
    return None if value is None else source_name(value)


def _merged(runs: Sequence[Run]) -> list[Run]:
    """Neighbours as one."""
    found: list[Run] = []
    for delivery, start, stop in runs:
        if found and found[-1][0] is delivery and found[-1][2] == start:
            found[-1] = (delivery, found[-1][1], stop)
        else:
            found.append((delivery, start, stop))
    return found
