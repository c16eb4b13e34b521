"""The polls of a shared group take turns at looking, so that a thousand idle members cost as much as one.

What a look finds in a shared group does not depend on who looks: if one found nothing, none of the others
would, until there is news or something is due. So polls wait in line. News lets one look; what it was given
may not have been all, and then the next one looks; if it found nothing, all the others rest. A poll that
comes while that is known does not look at all. Messages that come one by one, close to each other, are taken
two or three at a time: a look that emptied the group is not followed by the next one at once, after a few
such. Used in the event loop only.

No news is lost: a crowd listens before anybody looks, and what came after a look began was not seen by it.
What is known is worth nothing after nobody was here (then nobody watches other processes), and after
`fresh_s`: what other processes hand out is not announced, and comes back when its lease ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ...errors import StoreError
from ..topology.catalog_cache import Source
from ..waiters import Key, Waiters

__all__ = ["Crowds", "Permit", "PollQueue"]

_AFTER_FAILURE_S = 1.0  # the store failed somebody: the next in line tries after so long
_PACE_S = 0.003  # looks that bring what there is come no closer to each other than this on average,
_BURST_S = 0.015  # and may be ahead of that by so much: whoever sends now and then does not wait
_KEPT_S = 60.0  # a crowd that nobody has been in for so long is forgotten

_Seen = tuple[int, int]


class PollQueue:
    """`most`: looks at once, while each brings as much as was asked for; else one after the other."""

    def __init__(self, waiters: Waiters, most: int) -> None:
        self._waiters, self._most = waiters, most
        self._loop = asyncio.get_running_loop()
        self._line: dict[asyncio.Future[bool], None] = {}  # those who wait, the first one first
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0  # a timer of uvloop that is due at once does not know
        self._news = 0
        self._known: _Seen = (-1, -1)  # of the last look that found nothing
        self._until = 0.0  # what is known is good until then
        self._looking = 0
        self._rich = False  # the last look brought all that it asked for
        self._paced_until = (
            0.0  # as if each had lasted `_PACE_S`; never so far ahead that one rests for longer
        )
        self._keys: Sequence[Key] = ()
        self.sources: Sequence[Source] = ()
        self.fresh_s = 0.0
        self.present = 0
        self.left_at = 0.0

    # ---- what it listens to ----

    def reads(self, sources: Sequence[Source], keys: Sequence[Key], fresh_s: float) -> None:
        """What the group reads now."""
        self.fresh_s = fresh_s
        if self.sources is sources or self.sources == sources:
            self.sources = sources
            return
        self._waiters.ignore(self, self._keys)
        self._waiters.listen(self, keys)
        self.sources, self._keys = sources, keys
        self.set()

    def forget(self) -> None:
        self._waiters.ignore(self, self._keys)
        if self._timer is not None:
            self._timer.cancel()

    def set(self) -> None:
        """There is news."""
        self._news += 1
        self._advance()

    def due(self, seconds: float) -> None:
        """Something will be there then."""
        self._until = min(self._until, self._loop.time() + max(0.0, seconds))
        self._advance()

    def dismiss(self) -> None:
        """Nobody is to wait any longer."""
        for place in self._line:
            if not place.done():
                place.set_result(False)
        self._line.clear()

    # ---- taking turns ----

    @contextmanager
    def attended(self) -> Iterator[None]:
        """For as long as a poll lasts."""
        self.present += 1
        try:
            with self._waiters.somebody():
                yield
        finally:
            self.present -= 1
            self.left_at = self._loop.time()

    @property
    def _barren(self) -> bool:
        return self._known == self._seen and self._loop.time() < self._until

    @property
    def _rests_until(self) -> float:
        return 0.0 if self._rich else self._paced_until - _BURST_S

    @property
    def _seen(self) -> _Seen:
        return self._news, self._waiters.lulls

    async def turn(self, deadline: float) -> Permit | None:
        """Wait until it makes sense to look. None: nothing came until the deadline."""
        resting = self._loop.time() < self._rests_until
        if self._barren or resting or self._line or self._looking >= self._most:
            place: asyncio.Future[bool] = self._loop.create_future()
            self._line[place] = None
            self._advance()
            if not await self._called(place, deadline):
                return None if self._barren else self.begin()
        else:
            self._looking += 1
        return Permit(self)

    def begin(self) -> Permit:
        """Look in any case."""
        self._looking += 1
        return Permit(self)

    async def _called(self, place: asyncio.Future[bool], deadline: float) -> bool:
        try:
            async with asyncio.timeout_at(deadline):
                return await place
        except BaseException as error:
            called = place.done() and not place.cancelled() and place.result()
            if isinstance(error, TimeoutError):
                return called
            if called:
                self.pass_on()
            raise
        finally:
            self._line.pop(place, None)

    def _advance(self) -> None:
        """Let those look for whom there may be something."""
        while self._line and self._looking < (self._most if self._rich else 1):
            if self._barren:
                return self._set_timer(self._until)
            if self._loop.time() < self._rests_until:
                return self._set_timer(self._rests_until)
            place = next(iter(self._line))
            del self._line[place]
            if not place.done():
                self._looking += 1
                place.set_result(True)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            if self._rings_at <= at:
                return
            self._timer.cancel()
        self._timer, self._rings_at = self._loop.call_at(at, self._rung), at

    def _rung(self) -> None:
        self._timer = None
        self._advance()

    # ---- what came of a turn ----

    def pass_on(self) -> None:
        """Somebody did not look after all."""
        self._looking -= 1
        self._advance()

    def found_nothing(self, seen: _Seen, seconds: float) -> None:
        """And there will be nothing before then, as far as is known."""
        self._rich = False
        self._known, self._until = seen, self._loop.time() + min(self.fresh_s, max(0.001, seconds))
        self.pass_on()

    def found(self, rich: bool) -> None:
        """There may be more, and what was handed out is due when its lease ends."""
        self._rich = rich
        self._news += 1
        if not rich:
            now = self._loop.time()
            self._paced_until = min(max(self._paced_until, now), now + _BURST_S) + _PACE_S
        self.pass_on()

    def failed(self, seen: _Seen, error: BaseException) -> None:
        self._rich = False
        if isinstance(error, StoreError):
            self._known, self._until = seen, self._loop.time() + _AFTER_FAILURE_S
        self.pass_on()


class Permit:
    """A poll's turn; passed on at its end if it did not look."""

    __slots__ = ("_crowd", "_seen", "looked")

    def __init__(self, crowd: PollQueue) -> None:
        self._crowd = crowd
        self._seen: _Seen = (-1, -1)
        self.looked = False

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.looked:
            self._crowd.pass_on()

    def begin(self) -> None:
        """To be called before the look, and one of the others after it."""
        self.looked, self._seen = True, self._crowd._seen

    def found_nothing(self, seconds: float) -> None:
        self._crowd.found_nothing(self._seen, seconds)

    def found(self, rich: bool) -> None:
        self._crowd.found(rich)

    def failed(self, error: BaseException) -> None:
        self._crowd.failed(self._seen, error)


class Crowds:
    """By topic and group; those in use, and those that were of late."""

    def __init__(self, waiters: Waiters, most: int) -> None:
        self._waiters, self._most = waiters, most
        self._loop = asyncio.get_running_loop()
        self._known: dict[tuple[str, ...], PollQueue] = {}
        self._by_group: dict[int, set[PollQueue]] = {}  # two: those who take of the slow lane, and the others
        self._sweep_at = 0.0

    def of(
        self, name: tuple[str, ...], sources: Sequence[Source], keys: Callable[[], list[Key]], fresh_s: float
    ) -> PollQueue:
        crowd = self._known.get(name)
        if crowd is None:
            self._sweep()
            crowd = self._known[name] = PollQueue(self._waiters, self._most)
        if crowd.sources is not sources:
            crowd.reads(sources, keys(), fresh_s)
            for _, group in sources:
                self._by_group.setdefault(group.id, set()).add(crowd)
        return crowd

    def due(self, group_id: int, seconds: float) -> None:
        """The group has something due then."""
        for crowd in self._by_group.get(group_id, ()):
            crowd.due(seconds)

    def dismiss(self) -> None:
        for crowd in self._known.values():
            crowd.dismiss()
            crowd.forget()

    def _sweep(self) -> None:
        now = self._loop.time()
        if now < self._sweep_at:
            return
        self._sweep_at = now + _KEPT_S
        for name, crowd in list(self._known.items()):
            if not crowd.present and crowd.left_at < now - _KEPT_S:
                crowd.forget()
                del self._known[name]
        kept = {*self._known.values()}
        left = {group: crowds & kept for group, crowds in self._by_group.items()}
        self._by_group = {group: crowds for group, crowds in left.items() if crowds}
