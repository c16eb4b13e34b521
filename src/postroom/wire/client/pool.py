"""The brokers that a client knows, and which of them it asks (R2).

A client is given some addresses and learns all live brokers from any of them. For each key the brokers have
an order (`model.rendezvous`); the first that can be reached is asked. One that cannot is left alone for a
while. If a broker goes away while it is asked, the next one is, provided that the request had not left or may
be repeated: any broker is as good, and what is repeated is done once (I3, I6, I7).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from ...config import DEFAULTS, WireTuning
from ...endpoint.endpoint import Told
from ...endpoint.operations import Operation
from ...endpoint.requests import Answer, Ask, Request
from ...errors import BrokerUnavailable, NotAuthenticated, PostroomError, ProtocolError
from ..messages import BrokerInfo, Hello
from .link import Link, LinkLost, connect

__all__ = ["Pool", "ranked"]


# ---- rendezvous hashing ----
# Each broker has a weight for a key, and the heaviest is the first choice: the same for everybody, and little
# moves when one comes or goes (R2). Those of the asker's own zone come before all others. Any other choice is
# as correct; this one makes batches and caches good.


def ranked(key: str, brokers: Iterable[tuple[str, str]], zone: str = "") -> list[str]:
    """Ids of brokers, given as (id, zone), in the order in which they are preferred.

    >>> ranked("orders/2", [("a", "east"), ("b", "west")], zone="west")
    ['b', 'a']
    """
    return [id for id, _ in sorted(brokers, key=lambda one: (one[1] != zone, -_weight(key, one[0]), one[0]))]


def _weight(key: str, id: str) -> int:
    return int.from_bytes(blake2b(f"{id}\0{key}".encode(), digest_size=8).digest())


# ---- pool ----

_log = logging.getLogger("postroom.wire")


_TRIES = 2  # of one request with the same broker: a connection may break while the broker lives


class Pool:
    def __init__(
        self,
        seeds: Sequence[str],
        hello: Hello,
        tls: ssl.SSLContext | None,
        zone: str,
        tuning: WireTuning = DEFAULTS.tuning.wire,
    ) -> None:
        self._tuning = tuning
        self._seeds, self._hello, self._tls, self._zone = tuple(seeds), hello, tls, zone
        self._loop = asyncio.get_running_loop()
        self._links: dict[str, Link] = {}  # by broker's id
        self._known: dict[str, BrokerInfo] = {}  # as told by the last broker that said so
        self._opening: dict[str, asyncio.Task[Link]] = {}  # by address
        self._away: dict[str, tuple[float, int]] = {}  # by address: until when, after how many tries
        self._queue = ""  # which one all brokers serve
        self._closed = False
        self.on_ask: Callable[[Ask], Answer] = lambda ask: Answer()
        self.on_late: Callable[[Any, Any], None] = lambda request, reply: None
        self.on_time: Callable[[int, float], None] = lambda now_ms, sent_at: None

    # ---- asking ----

    async def call(
        self, operation: Operation, request: Request, body: Sequence[bytes] = (), *, key: str = "",
        again: Callable[[], Request] | None = None, early: Callable[[Any], None] | None = None,
    ) -> Any:  # fmt: skip
        """Ask the broker that is preferred for the key, or the next. `again`: the request once more. `early`
        is told the first part of an answer that has two; NotOfferedError if the broker is too old for it."""
        failed: dict[str, int] = {}  # by broker's id, how often
        left = False  # it may have reached a broker that did not answer
        while True:
            link = await self._link(key, failed, left)
            broker = link.welcome.broker
            try:
                return await link.call(operation, request, body, early)
            except LinkLost as lost:
                left = left or lost.sent
                failed[broker] = failed.get(broker, 0) + 1
                if link.silent:
                    self._leave_alone(link.address, lost)
                if lost.sent and not operation.repeatable:
                    raise _in_doubt(operation, lost) from None
                if lost.sent and again is not None:
                    request = again()
            except BrokerUnavailable:  # it is stopping, and did nothing
                failed[broker] = _TRIES
            except PostroomError as error:
                if left:
                    error.details.pop("stored", None)  # so says the last of several; the first may have done
                raise

    def call_soon(
        self, operation: Operation, request: Request, body: Sequence[bytes], told: Told, *, key: str
    ) -> bool:
        """Ask the broker that is preferred, if it is connected; `told` hears what came of it.

        False: nothing was done, and nobody will be told. It is asked once: `call` asks the next one."""
        link = self._ready(key)
        return link is not None and link.call_soon(
            operation, request, body, partial(self._answered, link, operation, told)
        )

    def _ready(self, key: str) -> Link | None:
        first = self._ranked(key)
        link = self._links.get(first[0]) if first and not self._closed else None
        return None if link is None or link.gone else link

    def _ranked(self, key: str) -> list[str]:
        known = self._known
        if len(known) == 1:
            return [*known]
        return ranked(key, ((one.id, one.zone) for one in known.values()), self._zone)

    def _answered(self, link: Link, operation: Operation, told: Told, answer: Any) -> None:
        if isinstance(answer, LinkLost):
            if link.silent:
                self._leave_alone(link.address, answer)
            answer = _in_doubt(operation, answer)
        elif isinstance(answer, BrokerUnavailable):  # it is stopping, and did nothing
            answer.details.setdefault("stored", False)
        told(answer)

    async def _link(self, key: str, failed: Mapping[str, int], left: bool = False) -> Link:
        """The link to the broker that comes first; BrokerUnavailable if none can be reached.

        One that has failed comes last, and only if it may be there: its connection broke, but once. `left`:
        the request may have reached one before; else the error says that nothing was stored.
        """
        if self._closed:
            raise BrokerUnavailable("this connection is closed")
        hopeless = {id for id, times in failed.items() if times >= _TRIES}
        try:
            try:
                return await self._first(key, set(failed))
            except BrokerUnavailable:
                if len(hopeless) == len(failed):
                    raise
            return await self._first(key, hopeless)
        except BrokerUnavailable as error:  # others may have got the same one
            known = {} if left else {"stored": False}
            raise BrokerUnavailable(str(error), **{**error.details, **known}) from error

    async def _first(self, key: str, excluded: set[str]) -> Link:
        known = self._known  # what is learned meanwhile is for those who come later
        for id in self._ranked(key):
            if id in excluded:
                continue
            link = self._links.get(id)
            if link is not None and not link.gone:
                return link
            address = known[id].address
            if address in self._away and any(not one.gone for one in self._links.values()):
                self._look_for(address)  # nobody need wait for it
                continue
            found = await self._try(address)
            if found is not None and found.welcome.broker not in excluded:
                return found
        return await self._any(excluded)

    async def _any(self, excluded: set[str]) -> Link:
        """Tries the addresses we were given: those of the list may not be reachable from here."""
        why: PostroomError | None = None
        for address in self._seeds:
            try:
                link = await self._open(address)
            except PostroomError as error:
                if why is None or isinstance(why, BrokerUnavailable):  # what it says matters more
                    why = error
                continue
            if link.welcome.broker not in excluded:
                return link
        raise why or BrokerUnavailable("no other broker is there; trying again may help")

    def _is_left_alone(self, address: str) -> bool:
        return self._away.get(address, (0.0, 0))[0] > self._loop.time()

    def _look_for(self, address: str) -> None:
        if not self._is_left_alone(address):
            self._opened(address).add_done_callback(lambda done: done.cancelled() or done.exception())

    async def _try(self, address: str) -> Link | None:
        if self._is_left_alone(address):
            return None
        try:
            return await self._open(address)
        except (BrokerUnavailable, ProtocolError, NotAuthenticated):
            return None

    async def _open(self, address: str) -> Link:
        """The link to that address, one for all who ask at once."""
        for link in self._links.values():
            if link.address == address and not link.gone:
                return link
        return await asyncio.shield(self._opened(address))

    def _opened(self, address: str) -> asyncio.Task[Link]:
        task = self._opening.get(address)
        if task is None:
            task = self._opening[address] = self._loop.create_task(self._connect(address))
            task.add_done_callback(lambda done: self._opening.pop(address, None))
        return task

    async def _connect(self, address: str) -> Link:
        try:
            ms, tuning = self._tuning.connect_ms, self._tuning
            link = await connect(address, self._hello, self._tls, timeout_ms=ms, tuning=tuning)
        except PostroomError as error:
            self._leave_alone(address, error)
            raise
        if self._closed:
            await link.close()
            raise BrokerUnavailable("this connection is closed")
        await self._check_queue(link)
        link.on_ask, link.on_late, link.on_list = self.on_ask, self.on_late, self._listed
        known = self._links.get(link.welcome.broker)
        if known is not None and not known.gone:  # the same broker under another address
            await link.close()
            return known
        self._links[link.welcome.broker] = link
        self._away.pop(address, None)
        self._learn(link, link.welcome.brokers, link.welcome.now_ms, link.greeted_at)
        return link

    async def _check_queue(self, link: Link) -> None:
        """An address may be another queue's by now: its partitions and offsets would be strangers."""
        queue = self._queue = self._queue or link.welcome.queue
        if link.welcome.queue == queue:
            return
        await link.close()
        error = ProtocolError(
            f"the broker at {link.address} serves another queue than the one this connection began with: "
            "name brokers of one queue, and connect anew if it was replaced"
        )
        self._leave_alone(link.address, error)
        raise error

    def _leave_alone(self, address: str, error: Exception) -> None:
        if self._is_left_alone(address):
            return  # another has said so
        _, tries = self._away.get(address, (0.0, 0))
        pauses_s = self._tuning.unreachable_s
        pause_s = pauses_s[min(tries, len(pauses_s) - 1)]
        self._away[address] = (self._loop.time() + pause_s, tries + 1)
        log = _log.debug if tries else _log.warning
        log("skipping a broker for %g s: %s", pause_s, error)

    # ---- what brokers tell ----

    def _listed(self, link: Link, answer: Any, sent_at: float) -> None:
        self._learn(link, answer.brokers, answer.now_ms, sent_at)

    def _learn(self, link: Link, brokers: Sequence[BrokerInfo], now_ms: int, sent_at: float) -> None:
        """Who is there. The one that said so is, whatever the list says, and where we reached it."""
        self._known = {one.id: one for one in brokers}
        zone = self._known[link.welcome.broker].zone if link.welcome.broker in self._known else ""
        self._known[link.welcome.broker] = BrokerInfo(link.welcome.broker, link.address, zone)
        self._links = {id: one for id, one in self._links.items() if not one.gone}
        self.on_time(now_ms, sent_at)

    @property
    def addresses(self) -> list[str]:
        """Where brokers may be found, those that answered first."""
        links, known = list(self._links.values()), list(self._known.values())  # any thread may ask
        live = [link.address for link in links if not link.gone]
        return list(dict.fromkeys([*live, *(one.address for one in known), *self._seeds]))

    async def open(self) -> None:
        """Connect to one of the brokers at least."""
        await self._link("", {})

    async def no_more_late(self) -> None:
        """Wait a little for answers to what was cancelled."""
        await asyncio.gather(*(link.no_more_late(self._tuning.closing_s) for link in self._links.values()))

    async def close(self) -> None:
        self._closed = True
        for task in list(self._opening.values()):
            task.cancel()
        await asyncio.gather(*self._opening.values(), return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links.values()))


def _in_doubt(operation: Operation, lost: LinkLost) -> BrokerUnavailable:
    return BrokerUnavailable(
        f"{lost} before it answered: it is not known whether {operation.name} was done; look, then try again"
    )
