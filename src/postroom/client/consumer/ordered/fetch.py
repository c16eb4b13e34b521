"""Fetching for ordered groups: partitions are held, and given up when it is somebody else's turn (R14, R23).

Decides when to ask and what for. One poll is under way at a time; it names the partitions held and the offset
expected next of each, so that what a lost reply had comes again (I6). While there is no room it still asks
once a second whether partitions are to be given up. One that is revoked is handed over as soon as nothing of
it is at work, and no later than a lease after that was said; what waits here is simply forgotten: unsettled
stays unsettled. `outlet` decides what is handed out.

What waits behind a message that is not due (a retry, a stopped message) does not count towards the window,
or one failing key would starve all others. Behind a stopped message it is parked in the store at once, and
behind any other once more than a window of it waits (I27): memory does not grow with it. It comes back when
its key goes on. Only failing messages themselves are bounded here (`_MOST_WAITING`): while so many keys fail
nothing more is fetched. What of a suspect cannot begin, because an earlier message of its key waits,
is released: it is like any other then (I14).

Must never give up a partition while a poll that names it is under way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from ....backoff import pause
from ....endpoint.endpoint import Endpoint
from ....endpoint.values import Grant, PollReply, PollRequest, Settle, UnparkRequest, Verdict
from ....errors import CorruptBatch, PostroomError
from ....model.delivery.delivery import Line
from ....model.delivery.ordered import FAR
from ....tasks import end
from ...message import Received
from ..fetch import Fetcher
from ..in_flight import LOST, OPEN, LeasedDelivery, Membership, Window, delivery_of
from ..opened import ALL, Opened
from ..settle import Run, Settler, runs_of
from .dispatch import Outlet
from .key_queue import StoredLine
from .partitions import AssignedPartition, AssignedPartitions

__all__ = ["OrderedFetcher"]

log = logging.getLogger("postroom.consumer")

_MOST_WAITING = 20_000  # messages that failed and are not due, or cannot be parked
_WAITING_WINDOWS = 4  # and so many times the window's bytes
_FEW_WAITING = 100  # are never worth parking
_HUNG = "its handling took longer than max_handling"


class OrderedFetcher(Fetcher):
    def __init__(
        self,
        endpoint: Endpoint,
        who: Membership,
        in_flight: AssignedPartitions,
        settler: Settler,
        window: Window,
        *,
        on_delivery: bool,
        handling_ms: Callable[[], int],
    ) -> None:
        super().__init__(endpoint, who, in_flight, settler, window, on_delivery=on_delivery)
        self._partitions = in_flight
        settler.refused = self._refused
        self._handling_ms, self._tuning = handling_ms, who.limits.tuning.client
        self.arrived = in_flight.arrived
        self.outlet = Outlet(in_flight, endpoint.reached_ms, on_delivery=on_delivery)
        self._asked_at = 0.0  # by the loop's clock
        self._asked: dict[int, AssignedPartition] = {}  # what the poll under way names
        self._started_ms = 0  # of the database, before we received what we hold
        self._strangers: set[int] = set()  # partitions to give up that are not known here
        self._crowded = False
        self._ended = False
        self._unparked: list[Received] | None = None  # collects what comes out of a line of the store

    @property
    def _holdings(self) -> list[AssignedPartition]:
        return list(self._partitions.holdings.values())

    # ---- asking ----

    async def _may_ask(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._hand_over()
            await self._release_stuck()
            self._park()
            left = self._asked_at + self._tuning.give_up_check_s - loop.time()
            if self._has_room() or left <= 0:
                return
            self._in_flight.changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self._in_flight.changed.wait()
            except TimeoutError:
                pass

    def _has_room(self) -> bool:
        outlet, waiting = self.outlet, self.outlet.waiting
        if self._is_crowded(waiting):
            return False
        if self._on_delivery:
            return self._wanted > 0 and not outlet.has_more and outlet.parked <= self._wanted
        if outlet.idle:
            return True
        if self._in_flight.alone or asyncio.get_running_loop().time() < self._drain_until:
            return False
        messages, size = self._counted(waiting)
        return 2 * messages <= self._window.messages and 2 * size <= self._window.bytes

    def _counted(self, waiting: int) -> tuple[int, float]:
        """What counts towards the window: everything but what waits for a message that is not due."""
        held = self._in_flight.messages
        return held - waiting, self._in_flight.bytes * (held - waiting) / max(1, held)

    def _is_crowded(self, waiting: int) -> bool:
        most = (1 + _WAITING_WINDOWS) * self._window.bytes
        crowded = waiting > 0 and (waiting >= _MOST_WAITING or self._in_flight.bytes >= most)
        if crowded and not self._crowded:
            log.warning(
                "%d failed messages of %s/%s wait for their next attempt: nothing more is fetched until some "
                "are due; look at what stopped, or lower max_hold",
                waiting,
                self.who.topic,
                self.who.group,
            )
        self._crowded = crowded
        return crowded

    def _request(self) -> PollRequest:
        messages, size = self._counted(self.outlet.waiting)
        wanted = self._wanted if self._on_delivery else max(1, self._window.messages - messages)
        room = self._has_room()
        wait_ms = min(self.who.limits.poll_wait_ms, self.who.lease_ms // 2)  # the lease counts from now (I16)
        # also those of a hand-over that failed: or each poll is answered at once that they are revoked
        going = (h.partition_id for h in self._holdings if h.give_up_at is not None)
        giving_up = (*going, *sorted(self._strangers))
        self._asked_at = asyncio.get_running_loop().time()
        self._asked = dict(self._partitions.holdings)
        return PollRequest(
            topic=self.who.topic,
            group=self.who.group,
            member=self.who.member,
            token=self._partitions.token,
            messages=wanted if room else 0,
            bytes=self._asked_bytes(size),
            wait_ms=0 if not room else self._tuning.give_up_poll_ms if giving_up else wait_ms,
            empty_handed=self.outlet.idle,
            on_delivery=self._on_delivery,
            positions=tuple((holding.partition_id, holding.position) for holding in self._holdings),
            giving_up=giving_up,
            started_ms=self._started_ms,
        )

    def want(self, messages: int) -> None:
        super().want(messages)
        self._partitions.freed.set()

    async def look(self, messages: int) -> None:
        self.want(messages)
        await self._hand_over()
        await self._release_stuck()
        request = replace(self._request(), wait_ms=0)
        sent_ms = self._endpoint.reached_ms()
        await self._accept(await self._endpoint.poll(request), request.token, sent_ms)
        for found in list(self._hungry()):
            await self._unpark_line(*found)

    # ---- accepting ----

    async def _accept(self, reply: PollReply, token: int, sent_ms: int) -> None:
        if not self._holdings:
            self._started_ms = reply.started_ms
        for partition_id in reply.lost:
            holding = self._partitions.holdings.get(partition_id)
            if holding is not None:
                log.warning("%s lost partition %d of %s", self.who.member, holding.partition, holding.topic)
                self._partitions.drop(holding)
        for partition_id in reply.revoked:
            self._revoke(partition_id, reply.lease_ms)
        await super()._accept(reply, token, sent_ms)
        self._park()
        await self._hand_over()

    def _receive(self, grant: Grant, token: int, until: float) -> list[Run]:
        asked = self._asked.get(grant.partition_id)
        if asked is not None and self._partitions.holdings.get(grant.partition_id) is not asked:
            return []  # lost meanwhile; this goes on from its middle, the next poll asks for all (I5, I6)
        opened = self._opener.open(grant, partial(self._deliver, grant, token, until))
        holding = self._partitions.hold(grant)
        holding.until, holding.give_up_at = until, None
        self._strangers.discard(grant.partition_id)
        if grant.lines:
            holding.queue.has_stored(grant.lines)
            self._partitions.freed.set()
        for at, lease in enumerate(grant.leases):
            if opened[at].cut <= lease.last:  # the next poll says that it expects this, and has it again (I6)
                self._advance(holding, opened[at].cut)
                return self._keep_all(opened[: at + 1])
        self._advance(holding, grant.position)
        return self._keep_all(opened)

    def _advance(self, holding: AssignedPartition, position: int) -> None:
        """A line of the store may be next once everything before it has come."""
        if position > holding.position:
            holding.position = position
            if holding.queue.stored:
                self._partitions.freed.set()

    def _not_given_up(self, rest: Grant) -> Grant | None:
        """Whoever holds the partition next is sent everything again."""
        self._revoke(rest.partition_id, self.who.lease_ms)
        return None

    def _room_left(self) -> float:
        _, size = self._counted(self.outlet.waiting)
        return ALL if self._on_delivery else max(1.0, self._window.bytes - size)

    def _keep(self, delivery: LeasedDelivery, messages: list[Received], missing: list[Run]) -> None:
        holding = self._partitions.holdings[delivery.partition_id]
        not_before = delivery.not_before if delivery.not_before > self._endpoint.reached_ms() else 0
        if delivery.alone and not_before < FAR:
            not_before = 0  # a suspect's is when its last holder was gone, by a clock that may be ahead (I14)
        if self._on_delivery and not_before < FAR:
            delivery.settled_already()
            self._wanted = 0
        else:
            self._partitions.receive(holding, delivery, messages)
            if len(messages) < len(delivery.state):
                self._ack_empty(delivery, messages, missing)
        if self._unparked is None:
            holding.queue.add(messages, not_before)
        else:
            self._unparked += messages

    async def _account_for(self, missing: list[Run]) -> None:
        await super()._account_for(missing)
        await asyncio.sleep(self._tuning.handed_back_s)  # for those that were handed back

    def _hand_back(self, delivery: LeasedDelivery, start: int, stop: int) -> None:
        """Whoever holds the partition next is sent everything again."""
        self._revoke(delivery.partition_id, self.who.lease_ms)

    # ---- lines of the store (I27) ----

    def _park(self) -> None:
        """What waits behind failing messages goes to the store: always behind those that are stopped."""
        holdings = [h for h in self._partitions.holdings.values() if h.queue.waiting or h.queue.claimed]
        if not holdings:
            return
        many = max(self._window.messages, _FEW_WAITING)
        crowded = sum(holding.queue.behind for holding in holdings) > many
        crowded = crowded or self._in_flight.bytes > 2 * self._window.bytes
        for holding in holdings:
            if crowded:
                holding.queue.park_waiting()
            holding.queue.park_stopped()
            if holding.queue.claimed:
                self._claim(holding)

    def _claim(self, holding: AssignedPartition) -> None:
        for stored, messages in holding.queue.take_claimed():
            first, last = messages[0]._position, messages[-1]._position
            line = Line(stored.id, stored.key, first, last, len(messages))
            stored.telling += 1
            told = self._settler.park(runs_of(messages), line)
            told.add_done_callback(partial(self._told, stored))

    def _told(self, stored: StoredLine, done: asyncio.Future[None]) -> None:
        stored.telling -= 1
        self._partitions.freed.set()

    async def run(self) -> None:
        unparking = asyncio.get_running_loop().create_task(self._unpark())
        try:
            await super().run()
        finally:
            await end((unparking,))

    async def _unpark(self) -> None:
        try:
            await self._unpark_hungry()
        except Exception as error:
            self.failure = error
            self.arrived.set()

    async def _unpark_hungry(self) -> None:
        """Keys whose line here is used up go on with what is stored of them."""
        tries = 0
        while True:
            found = next(self._hungry(), None)
            if found is None:
                self._partitions.freed.clear()
                await self._partitions.freed.wait()
                continue
            try:
                tries = 0 if await self._unpark_line(*found) else tries + 1
            except PostroomError as error:
                if not error.retriable:
                    log.warning("%s cannot go on with parked messages: %s", self.who.member, error)
                    self._partitions.drop(found[0])  # whoever holds it next is told of the line
                tries += 1
            if tries:
                await asyncio.sleep(pause(tries))

    def _hungry(self) -> Iterator[tuple[AssignedPartition, StoredLine]]:
        if self._in_flight.alone or self._ended or (self._on_delivery and self._wanted <= 0):
            return
        now_ms = self._endpoint.reached_ms()
        for holding in self._holdings:
            usable = holding.give_up_at is None and holding.until > now_ms
            if usable and (stored := holding.queue.hungry(holding.position)) is not None:
                yield holding, stored

    async def _unpark_line(self, holding: AssignedPartition, stored: StoredLine) -> bool:
        """Ask for the next of a line; False: something else has to come first."""
        request = UnparkRequest(
            topic=self.who.topic,
            group=self.who.group,
            member=self.who.member,
            token=self._partitions.token,
            partition_id=holding.partition_id,
            line=stored.id,
            key=stored.key,
            first=stored.first,
            last=min(stored.last, holding.position - 1),  # what is behind that, a poll would send again (I6)
            max_messages=self._wanted if self._on_delivery else max(1, self._window.messages // 2),
            max_bytes=max(1, self._window.bytes // 2),
            on_delivery=self._on_delivery,
        )
        reply = await self._endpoint.unpark(request)
        if holding.dropped:
            return True
        if reply.lost:
            self._partitions.drop(holding)
            return True
        try:
            opened = self._open_unparked(reply.grants[0], holding)
        except CorruptBatch:
            rest = await self._readable(reply.grants[0], request.token)
            if rest is None or holding.dropped:
                return True
            opened = self._open_unparked(rest, holding)
        grant, self._unparked = reply.grants[0], []
        missing = self._keep_all(opened)
        messages, self._unparked = self._unparked, None
        holding.queue.unparked(stored, messages, grant.position)
        self._look_again()
        if missing:
            await self._account_for(missing)
        return grant.position > request.first

    def _open_unparked(self, grant: Grant, holding: AssignedPartition) -> list[Opened[LeasedDelivery]]:
        self._opener.room = ALL  # the broker has counted what they unpack to
        return self._opener.open(grant, partial(self._deliver, grant, self._partitions.token, holding.until))

    # ---- giving up ----

    def _revoke(self, partition_id: int, lease_ms: int) -> None:
        holding = self._partitions.holdings.get(partition_id)
        if holding is None:  # a reply was lost, or a partition that is given up already is named once more
            self._strangers.add(partition_id)
        elif holding.give_up_at is None:
            holding.give_up_at = asyncio.get_running_loop().time() + lease_ms / 1000

    def _refused(self, run: Run) -> None:
        """What the store would not settle is not kept for long: others get it after a lease (I25)."""
        lease_s = self.who.lease_ms / 1000
        asyncio.get_running_loop().call_later(lease_s, self._let_refused_go, *run)

    def _let_refused_go(self, delivery: LeasedDelivery, start: int, stop: int) -> None:
        if not self._ended and any(
            i in delivery.refused and delivery.state[i] == OPEN for i in range(start, stop)
        ):
            self._revoke(delivery.partition_id, 0)
            self._in_flight.changed.set()

    async def _hand_over(self) -> None:
        now = asyncio.get_running_loop().time()
        done = [h for h in self._holdings if h.give_up_at is not None and self._may_go(h, h.give_up_at, now)]
        ids = [*self._strangers, *(holding.partition_id for holding in done)]
        self._strangers = set()
        for holding in done:
            log.info("%s hands over partition %d of %s", self.who.member, holding.partition, holding.topic)
            self._partitions.drop(holding)
        if ids:
            try:
                await self._endpoint.hand_over(self.who.topic, self.who.group, self._partitions.token, ids)
            except PostroomError as error:
                if not error.retriable:
                    raise
                self._strangers.update(ids)

    def _may_go(self, holding: AssignedPartition, give_up_at: float, now: float) -> bool:
        buffered = self._on_delivery and (holding.queue.fresh or holding.queue.parked)
        return now >= give_up_at or not (holding.at_work or buffered)

    def to_release(self, at_work: Sequence[Received] = ()) -> list[Run]:
        """Nothing: whoever holds the partition next is sent everything again."""
        return []

    async def leave(self) -> None:
        """Hand over everything."""
        for holding in self._holdings:
            holding.give_up_at = 0.0
        await self._hand_over()
        await super().leave()

    # ---- handing out ----

    @property
    def stale(self) -> bool:
        return self.outlet.stale

    def take(self, limit: int) -> list[Received]:
        found = self.outlet.take(limit)
        self._park()
        return found

    def _look_again(self) -> None:
        self.outlet.look_again()

    async def _release_stuck(self) -> None:
        found = self.outlet.stuck()
        if found is None:
            return
        holding, suspect = found
        runs = [(suspect.first + start, suspect.first + stop - 1) for start, stop in suspect.open_runs()]
        verdicts = tuple(Verdict("release", *run) for run in runs)
        part = Settle(holding.topic, holding.partition_id, self._partitions.token, verdicts)
        try:
            reply = await self._endpoint.settle(self.who.topic, self.who.group, [part])
        except PostroomError as error:
            if error.retriable:
                return  # it is tried again
            raise
        if reply.lost:
            self._partitions.drop(holding)
        self._partitions.is_like_any(suspect)
        self._look_again()

    def nudge(self) -> None:
        """A heartbeat was made, or time was moved: something may be due, renewed, or hang."""
        if self._ended:
            return
        before_ms = self._handling_ms() - self.who.max_handling_ms
        for holding in self._holdings:
            for delivery, indexes in holding.hung(before_ms):
                log.warning("%d messages of %s: %s", len(indexes), holding.topic, _HUNG)
                messages = [m for i in indexes for m in holding.messages(delivery, i, i + 1)]
                again = self._partitions.renew(holding, messages)
                how = Verdict("retry", 0, 0, delay_ms=self.who.limits.retry_first_ms, reason=_HUNG)
                self._settler.submit(runs_of(again), "retry", how)
        self._look_again()
        self._partitions.freed.set()

    def _done_with(self, gone: Sequence[Received]) -> None:
        super()._done_with(gone)
        if self._on_delivery and self.outlet.told_of_handling:
            self.outlet.handled(gone)

    def clear(self) -> int:
        self._ended = True
        return self.outlet.close()

    # ---- for whoever runs handlers ----

    ordered = True

    def begin(self, messages: list[Received]) -> list[Received]:
        """Return those that were neither lost nor taken back before they were begun."""
        return [m for m in messages if delivery_of(m).state[m._position - delivery_of(m).first] < LOST]

    def in_order(self, *, one_per_key: bool) -> None:
        self.outlet.one_per_key, self.outlet.told_of_handling = one_per_key, True

    def put_back(self, messages: Sequence[Received]) -> None:
        if messages:
            self.outlet.put_back(messages)

    def handled(self, messages: Sequence[Received]) -> None:
        self.outlet.handled(messages)
