"""The polls of a shared group wait in a queue, so that a thousand idle members cost as much as one.

What a poll finds in a shared group does not depend on who asks: if one found nothing, none of the others
would, until there is news or something is due. So a poll asks the store only with a permit. News gives a
permit to the first in the queue; what that one was given may not have been all, and then the next has one; if
it found nothing, or took all that there was, the others wait on. A poll that comes while that is known waits
at once. Where nothing was left, and since then only partitions had news, a poll is told which: it need not
look at the others.

No news is lost: a queue listens before anybody has a permit, and what came after a poll was begun was not
seen by it. What is known is worth nothing after nobody was here (then nobody watches other processes), and
after `fresh_s`: what other processes hand out is not announced, and comes back when its lease ends.

Used in the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from ...config import DEFAULTS, BrokerTuning
from ...errors import StoreError
from ..topology.catalog_cache import Source
from ..waiters import Key, Waiters
from .handed import PartitionNews

__all__ = ["Permit", "PollQueue", "PollQueues"]


_Seen = tuple[int, int]

_MOST_NAMED = 1000  # partitions with news that are told apart


class PollQueue:
    """`most`: permits at once, while each poll brings as much as was asked for; else one after the other."""

    def __init__(self, waiters: Waiters, most: int, tuning: BrokerTuning = DEFAULTS.tuning.broker) -> None:
        self._waiters, self._most = waiters, most
        self._failure_s = tuning.poll_failure_s
        self._loop = asyncio.get_running_loop()
        self._line: dict[asyncio.Future[bool], None] = {}  # those who wait, the first one first
        self._timer: asyncio.TimerHandle | None = None
        self._rings_at = 0.0  # a timer of uvloop that is due at once does not know
        self._news = 0
        self._known: _Seen = (-1, -1)  # of the last poll after which nothing was left
        self._until = 0.0  # what is known is good until then
        self._named: dict[int, int] = {}  # partitions with news, and the number of the last
        self._unnamed = 0  # the number of the last news that was not about one partition
        self._permits = 0  # that are given, and not used yet
        self._rich = False  # the last poll brought all that it asked for
        self._attendance = _Attendance(self)
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
        """There is news, of whatever kind."""
        self._news += 1
        self._unnamed = self._news
        if self._line:
            self._advance()

    def told(self, key: Key) -> None:
        """There is news of a partition, or of a group."""
        if key[0] != "partition" or len(self._named) >= _MOST_NAMED:
            return self.set()
        self._news += 1
        self._named[key[1]] = self._news
        if self._line:
            self._advance()

    def due(self, seconds: float) -> None:
        """Something will be there then."""
        self._until = min(self._until, self._loop.time() + max(0.0, seconds))
        if self._line:
            self._advance()

    def dismiss(self) -> None:
        """Nobody is to wait any longer."""
        for place in self._line:
            _dismiss(place)
        self._line.clear()

    # ---- permits ----

    def attended(self) -> AbstractContextManager[None]:
        """For as long as a poll lasts."""
        return self._attendance

    def enter(self) -> None:
        self.present += 1
        self._waiters.enter()

    def leave(self) -> None:
        self._waiters.leave()
        self.present -= 1
        self.left_at = self._loop.time()

    @property
    def _empty(self) -> bool:
        """Whether a poll would find nothing, as far as is known."""
        return self._known == (self._news, self._waiters.lulls) and self._loop.time() < self._until

    def named(self) -> frozenset[int] | None:
        """The partitions that had news since nothing was left; None: others may have something as well."""
        known, lulls = self._known
        if lulls != self._waiters.lulls or self._unnamed > known or self._loop.time() >= self._until:
            return None
        return frozenset([one for one, number in self._named.items() if number > known])

    @property
    def lets_in(self) -> bool:
        """Whether a poll that comes now need not wait."""
        return not self._line and self._permits < self._most and not self._empty

    async def permit(self, deadline: float) -> Permit | None:
        """Wait until it makes sense to ask the store. None: nothing came until the deadline."""
        if self.lets_in:
            return self.at_once()
        place: asyncio.Future[bool] = self._loop.create_future()
        self._line[place] = None
        self._advance()
        timer = self._loop.call_at(deadline, _dismiss, place)
        try:
            if await place:
                return Permit(self, waited=True)
        except BaseException:
            if place.done() and not place.cancelled() and place.result():
                self.pass_on()
            raise
        finally:
            timer.cancel()
            self._line.pop(place, None)
        return None if self._empty else self.at_once()

    def at_once(self) -> Permit:
        """A permit, whatever is known."""
        self._permits += 1
        return Permit(self)

    def _advance(self) -> None:
        """Give permits to those for whom there may be something."""
        while self._line and self._permits < (self._most if self._rich else 1):
            if self._empty:
                return self._set_timer(self._until)
            place = next(iter(self._line))
            del self._line[place]
            if not place.done():
                self._permits += 1
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

    # ---- what came of a permit ----

    def pass_on(self) -> None:
        """A permit is free again."""
        self._permits -= 1
        if self._line:
            self._advance()

    def found_nothing(self, seen: _Seen, seconds: float, partly: bool = False) -> None:
        """A poll found nothing, and as far as it knows nothing will be there before so many seconds.

        `partly`: it looked at `named` partitions alone; of the others is known what was known before."""
        self._rich = False
        self._learn(seen, max(0.001, seconds), partly)
        self.pass_on()

    def found(self, seen: _Seen, rich: bool, nothing_for_s: float = 0.0, partly: bool = False) -> None:
        """A poll was given something. There may be more, and what was handed out is due when its lease ends.

        `nothing_for_s`: it has taken all that there was, and knows when the next is due: if nothing came
        since it began, the next poll need not ask for that.
        """
        self._rich = rich
        untouched = nothing_for_s > 0 and seen == (self._news, self._waiters.lulls)
        self._news += 1  # whoever asked beside it does not know of its lease
        if untouched:
            self._learn((self._news, seen[1]), nothing_for_s, partly)
        else:
            self._unnamed = self._news
        self.pass_on()

    def _learn(self, seen: _Seen, seconds: float, partly: bool) -> None:
        until = self._loop.time() + min(self.fresh_s, seconds)
        self._known, self._until = seen, min(until, self._until) if partly else until
        self._named = {one: number for one, number in self._named.items() if number > seen[0]}

    def failed(self, seen: _Seen, error: BaseException) -> None:
        self._rich = False
        if isinstance(error, StoreError):
            self._known, self._until = seen, self._loop.time() + self._failure_s
            self._unnamed = self._news + 1  # what it did not see is nobody's news any more
        self.pass_on()


def _dismiss(place: asyncio.Future[bool]) -> None:
    if not place.done():
        place.set_result(False)


class _Attendance:
    """Holds nothing itself: all polls of a queue share it."""

    def __init__(self, queue: PollQueue) -> None:
        self._queue = queue

    def __enter__(self) -> None:
        self._queue.enter()

    def __exit__(self, *raised: object) -> None:
        self._queue.leave()


class Permit:
    """A poll's right to ask the store; passed on at its end if it was not used."""

    __slots__ = ("_queue", "_seen", "named", "used", "waited")

    def __init__(self, queue: PollQueue, *, waited: bool = False) -> None:
        self._queue = queue
        self._seen: _Seen = (-1, -1)
        self.named: frozenset[int] | None = None  # of `PollQueue.named`, as the poll begins
        self.used = False
        self.waited = waited  # in the queue, and so for at least one turn of the event loop

    def begin(self) -> None:
        """To be called before the store is asked, and one of the next three after it."""
        self.used, self._seen = True, (self._queue._news, self._queue._waiters.lulls)
        self.named = self._queue.named()

    @property
    def news(self) -> PartitionNews | None:
        """All that there can be, as far as is known; None: anything."""
        return None if self.named is None else PartitionNews(self.named, self.waited)

    def found_nothing(self, seconds: float) -> None:
        self._queue.found_nothing(self._seen, seconds, self.named is not None)

    def found(self, rich: bool, nothing_for_s: float = 0.0) -> None:
        self._queue.found(self._seen, rich, nothing_for_s, self.named is not None)

    def failed(self, error: BaseException) -> None:
        self._queue.failed(self._seen, error)

    def end(self) -> None:
        if not self.used:
            self._queue.pass_on()


class PollQueues:
    """The queues by topic and group: those in use, and those that were of late."""

    def __init__(self, waiters: Waiters, most: int, tuning: BrokerTuning) -> None:
        self._waiters, self._most, self._tuning = waiters, most, tuning
        self._loop = asyncio.get_running_loop()
        self._known: dict[tuple[str, ...], PollQueue] = {}
        self._by_group: dict[int, set[PollQueue]] = {}  # two: those who take of the slow lane, and the others
        self._sweep_at = 0.0

    def of(
        self, name: tuple[str, ...], sources: Sequence[Source], keys: Callable[[], list[Key]], fresh_s: float
    ) -> PollQueue:
        queue = self._known.get(name)
        if queue is None:
            self._sweep()
            queue = self._known[name] = PollQueue(self._waiters, self._most, self._tuning)
        if queue.sources is not sources:
            queue.reads(sources, keys(), fresh_s)
            for _, group in sources:
                self._by_group.setdefault(group.id, set()).add(queue)
        return queue

    def due(self, group_id: int, seconds: float) -> None:
        """The group has something due then."""
        for queue in self._by_group.get(group_id, ()):
            queue.due(seconds)

    def dismiss(self) -> None:
        for queue in self._known.values():
            queue.dismiss()
            queue.forget()

    def _sweep(self) -> None:
        now = self._loop.time()
        if now < self._sweep_at:
            return
        self._sweep_at = now + self._tuning.poll_queue_kept_s
        for name, queue in list(self._known.items()):
            if not queue.present and queue.left_at < now - self._tuning.poll_queue_kept_s:
                queue.forget()
                del self._known[name]
        kept = {*self._known.values()}
        left = {group: queues & kept for group, queues in self._by_group.items()}
        self._by_group = {group: queues for group, queues in left.items() if queues}
