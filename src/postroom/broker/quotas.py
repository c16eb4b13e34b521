"""Rate limits (R40, I17): appends and polls pass here, and wait until the limits that concern them let them.

Producers are slowed, never refused: an append waits its turn at the gate of its producer, then at that of its
topic. A group's limit gates what is handed out, new and due alike, and never acks, extensions or settling: a
poll takes no more than there is, and waits like any other for its turn. Each member of a broadcast group has
the limit for itself. Internal appends do not come here.

A cache, never the truth: what the limits are is looked up as often as the rest of the catalog, and once a
second for those who wait. A queue without limits pays for one look into a dictionary.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from ..errors import PostroomError
from ..model.flow import Rate
from ..model.names import base_of
from ..store.contract import Store
from .catalog import CatalogCache
from .deliveries import Handed
from .endpoint import PollRequest, RateInfo
from .gate import Gate, Place, Share
from .waiters import wait

__all__ = ["Passed", "Quotas"]

_KEY = ("rates",)
_LOOK_S = 1.0  # who waits sees a change of its limit after so long, if nobody tells it before

Passed = list[tuple[Gate, Share]]
"""The gates that an append has passed."""


class Quotas:
    """Used in the event loop only."""

    def __init__(self, store: Store, catalog: CatalogCache, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._store, self._catalog, self._in_thread = store, catalog, in_thread
        self._gates: dict[str, Gate] = {}  # of limits in use
        self._places: dict[int, tuple[Gate, Place]] = {}  # of polls, by request
        self._keeping: asyncio.Task[None] | None = None
        self._news = asyncio.Event()
        self._looking: asyncio.Future[Mapping[str, Rate]] | None = None

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

    async def _rates(self) -> Mapping[str, Rate]:
        found: Mapping[str, Rate] | None = self._catalog.known(_KEY)
        if found is not None and self._looking is None:
            return found
        if self._looking is None:  # one looks for all who come meanwhile, and nobody overtakes
            self._looking = asyncio.ensure_future(self._in_thread(self._catalog.kept, _KEY, self._read))
            self._looking.add_done_callback(self._looked)
        return await asyncio.shield(self._looking)

    def _looked(self, done: asyncio.Future[Mapping[str, Rate]]) -> None:
        self._looking = None
        if not done.cancelled():
            done.exception()  # those who wait are told

    def _read(self) -> dict[str, Rate]:
        return {rate.name: rate for rate in self._store.rates.all()}

    def _gate(self, name: str, rates: Mapping[str, Rate]) -> Gate | None:
        rate = _rate_of(name, rates)
        gate = self._gates.get(name)
        if gate is not None:
            gate.change(rate)
        elif rate is not None:
            gate = self._gates[name] = Gate(rate, self._store, self._in_thread)
            if self._keeping is None or self._keeping.done():
                self._keeping = asyncio.get_running_loop().create_task(self._keep())
        return gate

    async def _keep(self) -> None:
        """While there are gates: those who wait learn of changes, and what is not used is given back."""
        while self._gates:
            await wait(self._news, _LOOK_S)
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
        if not rates:
            return passed
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

    @contextmanager
    def polling(self, request: PollRequest) -> Iterator[None]:
        """For as long as a poll lasts: it keeps its place in the queue between its looks."""
        try:
            yield
        finally:
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

    async def _taken(self, gate: Gate, request: PollRequest, news: asyncio.Event) -> Share | None:
        known, place = self._places.get(id(request), (None, None))
        if place is None or known is not gate:
            place = Place(request.messages, request.bytes, whole=False)
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
