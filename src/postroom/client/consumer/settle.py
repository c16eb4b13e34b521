"""Settling: what users decide about messages, gathered into few calls.

While one call is under way, further verdicts gather and then go together, merged into ranges. Whoever settles
waits until it is stored. A lost lease is told to exactly those whose messages it holds.

A verdict that was given stays given (I25). Repeats are safe (I7), so what the store could not do now is tried
again in the background until it is known: stored, or in other hands. Whoever waits is told after a lease that
it is not known yet, and may say the same again to go on waiting. What the store refuses for good is open
again, and its lease is no longer renewed. What is on a shard that is away does not hold up the rest: it goes
on by itself, and only who settled it waits.

Where a poll is about to leave, a round of few acks goes with it, in one request. If that fails, or the poll
is given up, the round goes by itself.

Must never report a message as settled before the store said so, and never let two verdicts on one message
through: the same once more is harmless, anything else is the caller's mistake.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias, cast

from ...backoff import pause
from ...endpoint.endpoint import Endpoint
from ...endpoint.values import Held, Settle, SettleReply, Verdict
from ...errors import ClosedError, LeaseLost, PostroomError, StoreUnavailable, UsageError
from ...model.delivery.delivery import Line, Span
from ..message import Kind, Received
from ..owner_check import Guard
from ..requests import Answers
from .in_flight import (
    ACKED,
    ACKING,
    BACK,
    GIVEN,
    GIVING,
    LOST,
    OPEN,
    PARKING,
    Deliveries,
    LeasedDelivery,
    Membership,
    delivery_of,
)

__all__ = ["Run", "Settler", "TakeAlong", "runs_of"]

log = logging.getLogger("postroom.consumer")

Run: TypeAlias = tuple[LeasedDelivery, int, int]
"""Messages of a delivery by index, end excluded."""

_FEW_ACKS = 100  # ranges that go with a poll
_STORED_LATE = 16  # rounds that may be asked for once more

TakeAlong: TypeAlias = Callable[
    [Sequence[Settle], Sequence[Run], bool], "asyncio.Future[SettleReply | None] | None"
]
"""Takes acks along with a poll, and returns what will have their answer, or None if they are to go by
themselves. It is told whether somebody waits for them. None: there is no poll that takes them."""


class _Round:
    """Verdicts that go to the store in one call."""

    __slots__ = (
        "_callers", "_done", "_ended", "_error", "_loop", "acks", "late", "later", "others", "runs", "since",
        "some_lost", "unsure",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.acks: dict[tuple[str, int, int], list[Span]] = {}
        self.others: dict[tuple[str, int, int], list[Verdict]] = {}
        self.runs: list[Run] = []
        self._done: asyncio.Future[None] | None = None
        self._callers: list[asyncio.Future[None]] = []  # of those who wait
        self._ended, self._error = False, cast("Exception | None", None)
        self.since = loop.time()  # those who wait do so since then
        self.unsure = False  # the store has failed to take it: it is tried again
        self.late = False  # somebody was told so, and may ask for it once more
        self.some_lost = False
        self.later: _Round | None = None  # what of it is on a shard that is away

    @property
    def done(self) -> asyncio.Future[None]:
        """What became of it is known."""
        if self._done is None:
            self._done = self._loop.create_future()
            self._done.add_done_callback(_retrieved)
            if self._ended:
                _resolve(self._done, self._error)
        return self._done

    def told(self) -> asyncio.Future[None]:
        """What became of it is known, or a lease has passed. For one caller, who awaits it."""
        mine: asyncio.Future[None] = self._loop.create_future()
        if self._ended:
            _resolve(mine, self._error)
        else:
            self._callers.append(mine)
        return mine

    @property
    def awaited(self) -> bool:
        """Somebody waits for it; who is merely told of it has something else to do meanwhile."""
        return bool(self._callers)

    def end(self, error: Exception | None = None) -> None:
        self._ended, self._error = True, error
        if self._done is not None:
            _resolve(self._done, error)
        self._tell(error)

    def is_late(self, error: PostroomError) -> None:
        """Those who wait have waited long enough; who comes from now on may wait as long again."""
        self.since, self.late = self._loop.time(), True
        self._tell(error)

    def _tell(self, error: Exception | None) -> None:
        callers, self._callers = self._callers, []
        for caller in callers:
            _resolve(caller, error)

    def ack(self, run: Run) -> None:
        """Add acks, which join those of the messages just before them."""
        delivery, start, stop = run
        last = delivery.first + stop - 1
        spans = self.acks.setdefault(delivery.key, [])
        before, begin, end = self.runs[-1] if self.runs else (None, 0, 0)
        acked = before is delivery and delivery.state[begin] == ACKING  # neither parked nor given back
        if acked and end == start:
            self.runs[-1] = (delivery, begin, stop)
            spans[-1] = (spans[-1][0], last)
        else:
            self.runs.append(run)
            spans.append((delivery.first + start, last))

    def has(self, run: Run, kind: Kind) -> bool:
        """Whether this very verdict on these messages is in it."""
        delivery, start, stop = run
        first, last = delivery.first + start, delivery.first + stop - 1
        given = [(v.first, v.last) for v in self.others.get(delivery.key, ()) if v.kind == kind]
        found = sum(max(0, min(z, last) - max(a, first) + 1) for a, z in given)
        return found == stop - start and any(one[0] is delivery for one in self.runs)

    def put_off(self, away: Sequence[Settle], loop: asyncio.AbstractEventLoop) -> _Round:
        """Take these parts out: they are a round of their own."""
        keys, later = {_key_of(part) for part in away}, _Round(loop)
        later.acks = {key: self.acks.pop(key) for key in keys & self.acks.keys()}
        later.others = {key: self.others.pop(key) for key in keys & self.others.keys()}
        later.runs = [run for run in self.runs if run[0].key in keys]
        self.runs = [run for run in self.runs if run[0].key not in keys]
        if not self.runs or any(one.kind == "park" for given in later.others.values() for one in given):
            later._done, self._done = self._done, None  # not known before that one is
        self.later = later
        return later

    def last_with(self, runs: Sequence[Run]) -> _Round | None:
        """Return the round of its own that some of these were put off to, if any was."""
        later = self.later
        if later is None or not any(run[0] is mine[0] for run in later.runs for mine in runs):
            return None
        return later

    def parts(self) -> list[Settle]:
        keys = dict.fromkeys([*self.acks, *self.others])
        return [Settle(*key, (*_merged(self.acks.get(key, ())), *self.others.get(key, ()))) for key in keys]

    @property
    def few_acks(self) -> bool:
        """Whether there is nothing else in it, and not much of that."""
        return not self.others and len(self.runs) <= _FEW_ACKS


class Settler:
    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        in_flight: Deliveries,
        who: Membership,
    ) -> None:
        self._endpoint = self.endpoint = endpoint
        self._guard, self._in_flight = guard, in_flight
        self.who, self.together_ms = who, who.limits.tuning.client.hand_out_ms
        self.closed = False
        self.answers = Answers(endpoint, guard, who.limits.tuning.client)  # to requests (R38)
        self.settled: Callable[[Run, Kind], None] | None = None  # is told of every verdict
        self.refused: Callable[[Run], None] | None = None  # is told of what the store refused for good
        self.take_along: TakeAlong | None = None
        self._gathering: _Round | None = None
        self._newest: _Round | None = None
        self._current_round: _Round | None = None
        self._task: asyncio.Task[None] | None = None
        self._put_off: dict[asyncio.Task[None], _Round] = {}
        self._stored_late: deque[_Round] = deque(maxlen=_STORED_LATE)
        self._failing = False
        self._hurry = asyncio.Event()  # what is tried again is tried now

    # ---- what users ask ----

    async def settle(
        self,
        runs: Sequence[Run],
        kind: Kind,
        *,
        delay_ms: int = 0,
        at_ms: int | None = None,
        reason: str = "",
    ) -> None:
        """Settle and wait until it is stored. LeaseLost if some of it is in other hands by now.

        If the store cannot take it for a whole lease, its error is raised, and it is tried in the background.
        """
        self.check()
        waiting = self._again(runs, kind) if self._put_off or kind != "ack" else None
        waiting = waiting or self.submit(runs, kind, Verdict(kind, 0, 0, delay_ms, at_ms, reason))
        awaited = waiting
        while awaited is not None:
            await awaited.told()
            waiting, awaited = awaited, awaited.last_with(runs) if awaited.later is not None else None
        self._raise_lost(runs, waiting)

    async def ack(self, delivery: LeasedDelivery, index: int) -> None:
        """Ack one message: the short way of `settle`, where nothing stands against it."""
        self.check()
        if self._put_off or delivery.state[index] != OPEN:
            return await self.settle([(delivery, index, index + 1)], "ack")
        run = (delivery, index, index + 1)
        current = self._add(run, "ack", None)
        await current.told()
        if current.later is not None or current.some_lost or delivery.some_lost:
            while (later := current.last_with([run])) is not None:
                current = later
                await current.told()
            self._raise_lost([run], current)
        return None

    def ack_soon(self, message: Received) -> _Round | None:
        """Put the ack of one message on its way; None: it is settled already, or in other hands."""
        delivery = delivery_of(message)
        index = message._position - delivery.first
        return self._add((delivery, index, index + 1), "ack", None) if delivery.state[index] == OPEN else None

    def _again(self, runs: Sequence[Run], kind: Kind) -> _Round | None:
        """The round that has this already and is tried again, or was stored at last: what the caller was told
        to wait for."""
        off = self._put_off.values()
        if kind == "ack":  # of the others, the newest is the last to be stored
            return next((one for one in off if _all_acking(one, runs)), None)
        unsure = [one for one in (*off, self._current_round, self._gathering) if one and one.unsure]
        known = (*unsure, *self._stored_late)
        return next((one for one in known if all(one.has(run, kind) for run in runs)), None)

    def submit(self, runs: Sequence[Run], kind: Kind, how: Verdict | None = None) -> _Round | None:
        """Mark the messages and put them on their way; None: there is nothing to wait for."""
        for delivery, start, stop in runs:
            _refuse_contradiction(delivery.state, start, stop, kind)
        current: _Round | None = None
        for delivery, start, stop in runs:
            if delivery.state.count(OPEN, start, stop) == stop - start:
                current = self._add((delivery, start, stop), kind, how)
                continue
            if delivery.state.count(ACKING, start, stop):
                current = current or self._newest  # rounds are stored in order: the newest is the last
            for found in delivery.open_runs(start, stop):
                current = self._add((delivery, *found), kind, how)
        if kind in ("retry", "release") and current is not None:
            self._in_flight.held_up(runs)
        return current

    def park(self, runs: Sequence[Run], line: Line) -> asyncio.Future[None]:
        """Messages that nobody has seen go to a line of the store; the result comes when it has them."""
        current = self._current()
        for delivery, start, stop in runs:
            current.runs.append((delivery, start, stop))
            self._in_flight.mark(delivery, start, stop, PARKING)
            spans = current.acks.setdefault(delivery.key, [])
            spans.append((delivery.first + start, delivery.first + stop - 1))
        verdict = Verdict("park", line.first, line.last, line=line)
        current.others.setdefault(runs[0][0].key, []).append(verdict)
        return current.done

    async def extend(self, delivery: LeasedDelivery, index: int) -> None:
        self.check()
        if delivery.state[index] not in (OPEN, LOST, BACK):
            raise UsageError("the message is settled already: there is no lease to extend")
        position, now_ms = delivery.first + index, self._endpoint.reached_ms()
        held = Held(*delivery.key, ((position, position),))
        lost: list[tuple[Held, tuple[Span, ...]]] = []
        if delivery.state[index] == OPEN:
            lost = await asyncio.to_thread(self._endpoint.beat, [self.who.beat([held])])
            if any(not spans for _, spans in lost):
                raise StoreUnavailable(
                    "the lease was not extended: the message's shard is away; it lasts as long as before"
                )
        for gone, spans in lost:
            self._in_flight.lose((gone.topic, gone.partition_id, gone.token), spans)
        self._raise_lost([(delivery, index, index + 1)], None)
        delivery.extended[index] = now_ms
        delivery.refused.discard(index)

    def check(self) -> None:
        self._guard.check()
        if self.closed:
            raise ClosedError(
                "this consumer is closed; its messages were handed back and will be delivered again"
            )

    def hurry(self) -> None:
        """Try now what is tried again."""
        self._hurry.set()
        self._hurry.clear()

    def close(self) -> None:
        """What is not stored by now is left: it will be delivered again."""
        self.closed = True
        self.hurry()

    async def drained(self) -> None:
        """Wait until nothing is under way."""
        while tasks := [t for t in (self._task, *self._put_off) if t is not None and not t.done()]:
            await asyncio.wait(tasks)

    # ---- rounds ----

    def _current(self) -> _Round:
        if self._gathering is None:
            self._gathering = self._newest = _Round(self._guard.loop)
        if self._task is None or self._task.done():
            self._task = self._guard.loop.create_task(self._run())
        return self._gathering

    def _add(self, run: Run, kind: Kind, how: Verdict | None) -> _Round:
        current = self._current()
        delivery, start, stop = run
        first, last = delivery.first + start, delivery.first + stop - 1
        if self.settled is not None:
            self.settled(run, kind)
        if kind == "ack":
            current.ack(run)
            self._in_flight.mark(delivery, start, stop, ACKING)
        else:
            current.runs.append(run)
            self._in_flight.mark(delivery, start, stop, GIVING)
            how = how or Verdict(kind, 0, 0)
            verdict = Verdict(kind, first, last, how.delay_ms, how.at_ms, how.reason)
            current.others.setdefault(delivery.key, []).append(verdict)
        if current.unsure:
            self._in_flight.unsure([run])
        return current

    async def _run(self) -> None:
        while (current := self._gathering) is not None:
            await asyncio.sleep(0)  # whoever settles in this turn of the loop comes along
            self._gathering, self._current_round = None, current
            await self._settle_round(current)
            self._current_round = None

    async def _settle_round(self, current: _Round) -> None:
        try:
            reply = await self._store(current)
        except BaseException as error:
            self._undo(current, error)
            if not isinstance(error, Exception):
                raise
        else:
            if reply.away:
                later = current.put_off(reply.away, self._guard.loop)
                again = self._guard.loop.create_task(self._settle_round(later))
                self._put_off[again] = later
                again.add_done_callback(self._put_off.pop)
            self._finish(current, reply)

    async def _store(self, current: _Round) -> SettleReply:
        """Until the store has taken it, or refused it for good, or the consumer is closed."""
        parts, tries, began = current.parts(), 0, self._guard.loop.time()
        while True:
            try:
                reply = await self._along(current, parts) if not tries else None
                if reply is None:
                    reply = await self._endpoint.settle(self.who.topic, self.who.group, parts)
            except PostroomError as error:
                if not error.retriable or self.closed or self._too_long(began):
                    raise
                if "shard" in error.details and current is self._current_round:
                    return SettleReply(away=tuple(parts))  # what comes behind it may be on another
                tries += 1
                self._failed(current, error)
                await self._rest(pause(tries))
                if self.closed:
                    raise
            else:
                if self._failing:
                    self._failing = False
                    log.info("%s: the store takes verdicts again", self.who.member)
                return reply

    async def _along(self, current: _Round, parts: Sequence[Settle]) -> SettleReply | None:
        """Return the answer to acks that went with a poll; None: they have to go by themselves."""
        if self.take_along is None or not current.few_acks:
            return None
        taken = self.take_along(parts, current.runs, current.awaited)
        return None if taken is None else await taken

    def _too_long(self, began: float) -> bool:
        """Others may have it rather than nobody: as for a handler that hangs (I14)."""
        return self._guard.loop.time() - began > self.who.max_handling_ms / 1000

    async def _rest(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._hurry.wait()
        except TimeoutError:
            pass

    def _failed(self, current: _Round, error: PostroomError) -> None:
        """It is tried again, and so is what has gathered behind it."""
        behind = self._gathering if current is self._current_round else None
        for one in (current, behind):
            if one is None:
                continue
            if not one.unsure:
                one.unsure = True
                self._in_flight.unsure(one.runs)
            if self._guard.loop.time() - one.since >= self.who.lease_ms / 1000:
                if not self._failing:
                    log.warning("%s: the store takes no verdicts, trying again: %r", self.who.member, error)
                self._failing = True
                one.is_late(_late(error, self.who.lease_ms))

    def _finish(self, current: _Round, reply: SettleReply) -> None:
        self._in_flight.keep(current.runs, reply.kept)
        gone = [(_key_of(part), span) for part, spans in reply.lost for span in spans]
        current.some_lost = bool(gone)
        for delivery, start, stop in current.runs:
            self._in_flight.let_go(delivery, start, stop, ACKED if delivery.state[start] == ACKING else GIVEN)
            for key, (first, last) in gone:
                low, high = max(first - delivery.first, start), min(last - delivery.first + 1, stop)
                if key == delivery.key and low < high:
                    self._in_flight.mark(delivery, low, high, LOST)
        for part, spans in reply.lost:
            self._in_flight.lose(_key_of(part), spans)
        if gone and current.unsure:
            log.warning("%s: what was tried again is in other hands by now", self.who.member)
        if current.late and current.others:
            self._stored_late.append(current)
        current.end()

    def _undo(self, current: _Round, error: BaseException) -> None:
        """Not stored, and not tried again: the messages are as open as before, but no longer renewed."""
        for delivery, start, stop in current.runs:
            parked = delivery.state[start] == PARKING
            self._in_flight.mark(delivery, start, stop, OPEN)
            if not parked:
                delivery.refused.update(range(start, stop))
                if self.refused is not None and not self.closed:
                    self.refused((delivery, start, stop))
        if not isinstance(error, Exception) or (self.closed and getattr(error, "retriable", False)):
            error = ClosedError("the consumer was closed before this was stored; it will be delivered again")
        current.end(error)

    def _raise_lost(self, runs: Sequence[Run], waited: _Round | None) -> None:
        if waited is not None and not waited.some_lost and not any(d.some_lost for d, _, _ in runs):
            return
        found = [(d.first + i, d.state[i]) for d, a, z in runs for i in range(a, z) if d.state[i] >= LOST]
        if found:
            why = _LOST if any(state == LOST for _, state in found) else _TAKEN_BACK
            raise LeaseLost(why.format(len(found)), offsets=[offset for offset, _ in found])


_LOST = (
    "the lease on {} of these messages ended before they were settled: somebody else may handle them again, "
    "so make handling safe to repeat; a longer lease helps"
)
_TAKEN_BACK = (
    "{} of these messages were taken back before they were settled: an earlier message of their key was "
    "retried or released, or their handling took longer than max_handling; they come again, in order"
)
_LATE = (
    "not stored within {:g} s, and tried again in the background for as long as the consumer lives: do "
    "nothing more, or settle it the same way again to wait for it; if the consumer goes before, the message "
    "comes again, with the same id. The cause: {}"
)


def _late(error: PostroomError, lease_ms: int) -> PostroomError:
    """The error for those who do not wait any longer: of the same kind, and it says what goes on."""
    found = type(error)(_LATE.format(lease_ms / 1000, error), **{**error.details, "pending": True})
    found.__cause__ = error
    return found


def _all_acking(one: _Round, runs: Sequence[Run]) -> bool:
    mine = {run[0] for run in one.runs}
    return all(d in mine and d.state.count(ACKING, a, z) == z - a for d, a, z in runs)


def _key_of(part: Settle) -> tuple[str, int, int]:
    return (part.topic, part.partition_id, part.token)


def _refuse_contradiction(state: bytearray, start: int, stop: int, kind: Kind) -> None:
    states = set(state[start:stop]) - {OPEN, LOST, BACK}
    if states & {GIVING, GIVEN} or (kind != "ack" and states):
        done = "acked" if states & {ACKING, ACKED} else "handed back (retry, release or dead)"
        raise UsageError(f"a message that was {done} already cannot be settled as {kind!r}: settle each once")


def _merged(spans: Iterable[Span]) -> list[Verdict]:
    merged: list[Span] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return [Verdict("ack", first, last) for first, last in merged]


def _resolve(caller: asyncio.Future[None], error: Exception | None) -> None:
    if caller.done():  # it went away
        return
    if error is None:
        caller.set_result(None)
    else:
        caller.set_exception(error)


def _retrieved(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()


def runs_of(messages: Iterable[Received]) -> list[Run]:
    """Received messages as ranges of their deliveries. The hot path of `ack`: no work for neighbours."""
    runs: list[Run] = []
    current: Any = None
    first = following = -1
    for message in messages:
        if message._position == following and message._delivery is current:
            following += 1
            continue
        if current is not None:
            runs.append((current, first - current.first, following - current.first))
        current = delivery_of(message)
        first = message._position
        following = first + 1
    if current is not None:
        runs.append((current, first - current.first, following - current.first))
    return runs
