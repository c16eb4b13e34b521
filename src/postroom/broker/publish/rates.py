"""Rate limits (R40, I17): appends and polls pass here, and wait until the limits that concern them let them.

Producers are slowed, never refused: an append waits its turn at the gate of its producer, then at that of its
topic. A group's limit gates what is handed out, new and due alike, and never acks, extensions or settling: a
poll takes no more than there is, and waits like any other for its turn. Each member of a broadcast group has
the limit for itself. Internal appends do not come here.

A cache, never the truth: what the limits are is looked up as often as the rest of the catalog, and once a
second for those who wait. A queue without limits pays for one look into a dictionary (`Quotas.off`).

A gate is one limit, as this broker sees it: what it has reserved of it, and who waits, first come first
served. A slice of the rate is reserved in the store at a time, or what the first in the queue wants if that
is more, and handed out in memory: so a limit costs some ten transactions a second, not one for each batch.
Whoever waits holds no thread and no connection: it is told by its event when it is its turn. While the store
cannot be asked the rate is kept by this broker alone (R6).

Must never let anybody overtake (I3), and must never take part in what is decided: `model.policy.rate` does
that. For the event loop only.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ...config import DEFAULTS, BrokerTuning
from ...endpoint.values import NEVER_STORED, PollRequest, RateInfo
from ...errors import ClosedError, PostroomError
from ...model.policy.rate import NOTHING, Rate, spend
from ...model.topology.names import base_of
from ...store.contract import Store
from ...tasks import SingleFlight
from ..deliver.handed import Handed
from ..topology.catalog_cache import CatalogCache
from ..waiters import wait

__all__ = ["Claim", "Passed", "Quotas", "RateGate", "Share"]

_log = logging.getLogger("postroom.broker")


@dataclass(eq=False, slots=True)
class Claim:
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


class RateGate:
    def __init__(
        self, rate: Rate, store: Store, in_thread: Callable[..., Awaitable[Any]], idle_s: float
    ) -> None:
        """`idle_s`: what was reserved and not used for so long is given back."""
        self._idle_s = idle_s
        self.rate: Rate | None = rate  # None: there is no limit any more
        self._store, self._in_thread = store, in_thread
        self._loop = asyncio.get_running_loop()
        self._messages = self._bytes = 0  # in hand; less than 0: used and not taken
        self._coming: tuple[int, Share] | None = None  # reserved, and from when on it is in hand
        self._alone = NOTHING  # spent while the store could not be asked
        self._queue: deque[Claim] = deque()
        self.reserving: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._used_at = self._loop.time()
        self._closed = False

    # ---- passing ----

    async def pass_through(self, messages: int, size: int) -> Share:
        """Wait for as long as it takes. One that is cancelled meanwhile was never stored, and says so."""
        place = Claim(messages, size)
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

    def take(self, place: Claim) -> Share | None:
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

    def leave(self, place: Claim) -> None:
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
        return not busy and self._loop.time() - self._used_at > self._idle_s

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

    def _share(self, place: Claim) -> Share:
        rate, messages, size = self.rate, place.messages, place.bytes
        if rate is not None and not place.whole:
            messages = min(messages, self._messages) if rate.messages_per_s else messages
            size = min(size, self._bytes) if rate.bytes_per_s else size
        return Share(rate, messages, size)

    def _lack(self, place: Claim) -> tuple[int, int]:
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


_KEY = ("rates",)

Passed = list[tuple[RateGate, Share]]
"""The gates that an append has passed."""


class Quotas:
    """Used in the event loop only."""

    def __init__(
        self,
        store: Store,
        catalog: CatalogCache,
        in_thread: Callable[..., Awaitable[Any]],
        tuning: BrokerTuning = DEFAULTS.tuning.broker,
    ) -> None:
        self._idle_s, self._check_s = tuning.rate_idle_s, tuning.rate_check_s
        self._store, self._catalog, self._in_thread = store, catalog, in_thread
        self._gates: dict[str, RateGate] = {}  # of limits in use
        self._places: dict[int, tuple[RateGate, Claim]] = {}  # of polls, by request
        self._keeping: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._looks = SingleFlight(in_thread)

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait((self._keeping,))
        for gate in list(self._gates.values()):
            await gate.close()

    # ---- what the limits are ----

    async def set(self, rate: Rate) -> None:
        await self._in_thread(self._store.rates.set, rate)
        self._catalog.forget()
        self.look_again()

    async def listed(self) -> list[RateInfo]:
        rates: list[Rate] = await self._in_thread(self._store.rates.all)
        debts = await self._in_thread(self._store.rates.debts)
        return [
            RateInfo(rate.kind, *rate.subject, rate.messages_per_s, rate.bytes_per_s, debts.get(rate.name, 0))
            for rate in rates
        ]

    def look_again(self) -> None:
        """The limits may be others now."""
        self._news.set()

    def clock_moved(self) -> None:
        for gate in self._gates.values():
            gate.clock_moved()

    @property
    def off(self) -> bool:
        """Whether the queue is known to have no limit: then nobody has to pass here."""
        return self._catalog.known(_KEY) == {} and not self._gates and not self._looks.busy(_KEY)

    async def _rates(self) -> Mapping[str, Rate]:
        known: Mapping[str, Rate] | None = self._catalog.known(_KEY)
        return await self._looks.look(_KEY, known, self._catalog.get, _KEY, self._read)

    def _read(self) -> dict[str, Rate]:
        return {rate.name: rate for rate in self._store.rates.all()}

    def _gate(self, name: str, rates: Mapping[str, Rate]) -> RateGate | None:
        rate = _rate_of(name, rates)
        gate = self._gates.get(name)
        if gate is not None:
            gate.change(rate)
        elif rate is not None:
            gate = self._gates[name] = RateGate(rate, self._store, self._in_thread, self._idle_s)
            if self._keeping is None or self._keeping.done():
                self._keeping = asyncio.get_running_loop().create_task(self._keep())
        return gate

    async def _keep(self) -> None:
        """While there are gates: those who wait learn of changes, and what is not used is given back."""
        while self._gates:
            await wait(self._news, self._check_s)
            self._news.clear()
            if any(gate.crowded for gate in self._gates.values()):
                await self._refresh()
            for name, gate in list(self._gates.items()):
                if gate.idle:
                    del self._gates[name]
                    await gate.close()
        self._keeping = None

    async def _refresh(self) -> None:
        try:
            self._catalog.saw_version(await self._in_thread(self._store.catalog.version))
            rates = await self._rates()
        except PostroomError:
            return  # what is known is good enough
        for name in list(self._gates):
            self._gate(name, rates)

    # ---- appends ----

    async def pass_through(self, topic: str, producer: str, messages: int, size: int) -> Passed:
        """Wait until a batch may be stored. Those of one producer stay in order."""
        passed: Passed = []
        rates = await self._rates()
        for name in (f"producer:{producer}", f"topic:{topic}"):
            gate = self._gate(name, rates) if name in rates else None
            if gate is not None:
                passed.append((gate, await gate.pass_through(messages, size)))
        return passed

    def put_back(self, passed: Passed) -> None:
        """The batch was not stored after all."""
        for gate, share in passed:
            gate.put_back(share, 0, 0)

    # ---- polls ----

    def poll_ended(self, request: PollRequest) -> None:
        """A poll keeps its place in the queue until it ends."""
        if self._places:
            gate, place = self._places.pop(id(request), (None, None))
            if gate is not None and place is not None:
                gate.leave(place)

    async def within(
        self,
        request: PollRequest,
        news: asyncio.Event,
        hand_out: Callable[[PollRequest], Awaitable[Handed]],
        *,
        ordered: bool,
    ) -> Handed:
        """Hand out what the group's limit allows now. If that is nothing, `news` tells when to look again."""
        rates = await self._rates()
        name = f"group:{request.topic}/{request.group}"
        gate = self._gate(name, rates) if rates or name in self._gates else None
        if gate is None or not request.messages:
            return await hand_out(request)
        if request.repeated:  # what its lost answer had is handed over whole (I6)
            share: Share | None = Share(gate.rate, 0, 0)
        else:
            share = await self._taken(gate, request, news)
        if share is None:  # the holder of a partition is told what concerns it all the same
            return await hand_out(replace(request, messages=0)) if ordered else Handed()
        asked = request if request.repeated else replace(request, messages=share.messages, bytes=share.bytes)
        used = (0, 0)  # of a poll that is cancelled: it gives back what it was given
        try:
            handed = await hand_out(asked)
            used = _amounts(handed)
        finally:
            gate.put_back(share, *used)
        return handed

    async def _taken(self, gate: RateGate, request: PollRequest, news: asyncio.Event) -> Share | None:
        known, place = self._places.get(id(request), (None, None))
        if place is None or known is not gate:
            place = Claim(request.messages, request.bytes, whole=False)
            self._places[id(request)] = (gate, place)
        place.news = news
        share = gate.take(place)
        if share is None and gate.reserving is not None:  # a moment: also a poll that does not wait gets some
            await asyncio.wait((gate.reserving,))
            share = gate.take(place)
        return share


def _rate_of(name: str, rates: Mapping[str, Rate]) -> Rate | None:
    """Members of a broadcast group have the limit of the group, each for itself."""
    if name in rates or not name.startswith("group:"):
        return rates.get(name)
    base = base_of(name)
    found = rates.get(base) if base is not None else None
    return None if found is None else replace(found, name=name)


def _amounts(handed: Handed) -> tuple[int, int]:
    """Messages and bytes that were handed out; of a batch that was handed out in part, its part."""
    messages, size = 0, 0.0
    for grant in handed.grants:
        messages += sum(lease.last - lease.first + 1 for lease in grant.leases)
        for batch in grant.batches:
            shared = (
                min(lease.last, batch.last_offset) - max(lease.first, batch.base_offset) + 1
                for lease in grant.leases
            )
            size += len(batch.data) * sum(max(0, count) for count in shared) / max(1, batch.records)
    return messages, round(size)
