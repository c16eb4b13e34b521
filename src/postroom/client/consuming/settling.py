"""Settling: what users decide about messages, gathered into few calls.

While one call is under way, further verdicts gather and then go together, merged into ranges. Whoever settles
waits until it is stored. A lost lease is told to exactly those whose messages it holds.

Must never report a message as settled before the store said so, and never let two verdicts on one message
through: an ack once more is harmless, anything else is the caller's mistake. Repeats are safe (I7), so what
the store could not do now is tried again for as long as a lease lasts. What is on a shard that is away does
not hold up the rest: it goes on by itself, and only who settled it waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from ...broker.endpoint import Beat, Endpoint, Held, Settle, SettleReply, Verdict
from ...errors import ClosedError, LeaseLost, PostroomError, StoreUnavailable, UsageError
from ...model.delivery import Span
from ...model.parking import Line
from ..answering import Answers
from ..guard import Guard
from ..message import Kind, Received
from ..producing.appending import pause
from .hands import ACKED, ACKING, BACK, GIVEN, GIVING, LOST, OPEN, PARKING, Hands, HeldDelivery

__all__ = ["Run", "Settler", "delivery_of", "runs_of"]

log = logging.getLogger("postroom.consumer")

Run: TypeAlias = tuple[HeldDelivery, int, int]
"""Messages of a delivery by index, end excluded."""


class _Round:
    """Verdicts that go to the store in one call."""

    __slots__ = ("acks", "done", "later", "others", "runs", "some_lost")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.acks: dict[tuple[str, int, int], list[Span]] = {}
        self.others: dict[tuple[str, int, int], list[Verdict]] = {}
        self.runs: list[Run] = []
        self.done: asyncio.Future[None] = loop.create_future()
        self.done.add_done_callback(_retrieved)
        self.some_lost = False
        self.later: _Round | None = None  # what of it is on a shard that is away

    def put_off(self, away: Sequence[Settle], loop: asyncio.AbstractEventLoop) -> _Round:
        """Take these parts out: they are a round of their own."""
        keys, later = {_key_of(part) for part in away}, _Round(loop)
        later.acks = {key: self.acks.pop(key) for key in keys & self.acks.keys()}
        later.others = {key: self.others.pop(key) for key in keys & self.others.keys()}
        later.runs = [run for run in self.runs if run[0].key in keys]
        self.runs = [run for run in self.runs if run[0].key not in keys]
        self.later = later
        return later

    def last_with(self, runs: Sequence[Run]) -> _Round | None:
        """What was put off of these, if anything was."""
        later = self.later
        return (
            later
            if later is not None and any(run[0] is mine[0] for run in later.runs for mine in runs)
            else None
        )

    def parts(self) -> list[Settle]:
        keys = dict.fromkeys([*self.acks, *self.others])
        return [Settle(*key, (*_merged(self.acks.get(key, ())), *self.others.get(key, ()))) for key in keys]


class Settler:
    def __init__(self, endpoint: Endpoint, guard: Guard, hands: Hands, beat: Beat, lease_ms: int) -> None:
        self._endpoint = self.endpoint = endpoint
        self._guard, self._hands = guard, hands
        self.who = beat
        self.lease_ms = lease_ms
        self.closed = False
        self.answers = Answers(endpoint, guard)  # to requests (R38)
        self.settled: Callable[[Run, Kind], None] | None = None  # is told of every verdict
        self._gathering: _Round | None = None
        self._newest: _Round | None = None
        self._task: asyncio.Task[None] | None = None
        self._put_off: set[asyncio.Task[None]] = set()

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
        """Settle and wait until it is stored. LeaseLost if some of it is in other hands by now."""
        self.check()
        waiting = self.submit(runs, kind, Verdict(kind, 0, 0, delay_ms, at_ms, reason))
        awaited = waiting
        while awaited is not None:
            await asyncio.shield(awaited.done)
            waiting, awaited = awaited, awaited.last_with(runs)
        self._raise_lost(runs, waiting)

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
            self._hands.held_up(runs)
        return current

    def park(self, runs: Sequence[Run], line: Line) -> asyncio.Future[None]:
        """Messages that nobody has seen go to a line of the store; the result comes when it has them."""
        current = self._current()
        for delivery, start, stop in runs:
            current.runs.append((delivery, start, stop))
            self._hands.mark(delivery, start, stop, PARKING)
            spans = current.acks.setdefault(delivery.key, [])
            spans.append((delivery.first + start, delivery.first + stop - 1))
        verdict = Verdict("park", line.first, line.last, line=line)
        current.others.setdefault(runs[0][0].key, []).append(verdict)
        return current.done

    async def extend(self, delivery: HeldDelivery, index: int) -> None:
        self.check()
        if delivery.state[index] not in (OPEN, LOST, BACK):
            raise UsageError("the message is settled already: there is no lease to extend")
        position, now_ms = delivery.first + index, self._endpoint.now_ms()
        held = Held(*delivery.key, ((position, position),))
        lost: list[tuple[Held, tuple[Span, ...]]] = []
        if delivery.state[index] == OPEN:
            beat = Beat(self.who.topic, self.who.group, self.who.member, self.who.client, (held,))
            lost = await asyncio.to_thread(self._endpoint.beat, [beat])
            if any(not spans for _, spans in lost):
                raise StoreUnavailable(
                    "the lease was not extended: the message's shard is away; it lasts as long as before"
                )
        for gone, spans in lost:
            self._hands.lose((gone.topic, gone.partition_id, gone.token), spans)
        self._raise_lost([(delivery, index, index + 1)], None)
        delivery.extended[index] = now_ms

    def check(self) -> None:
        self._guard.check()
        if self.closed:
            raise ClosedError(
                "this consumer is closed; its messages were handed back and will be delivered again"
            )

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
        current.runs.append(run)
        if self.settled is not None:
            self.settled(run, kind)
        if kind == "ack":
            self._hands.mark(delivery, start, stop, ACKING)
            current.acks.setdefault(delivery.key, []).append((first, last))
        else:
            self._hands.mark(delivery, start, stop, GIVING)
            how = how or Verdict(kind, 0, 0)
            verdict = Verdict(kind, first, last, how.delay_ms, how.at_ms, how.reason)
            current.others.setdefault(delivery.key, []).append(verdict)
        return current

    async def _run(self) -> None:
        while (current := self._gathering) is not None:
            await asyncio.sleep(0)  # whoever settles in this turn of the loop comes along
            self._gathering = None
            await self._settle_round(current)

    async def _settle_round(self, current: _Round) -> None:
        try:
            reply = await self._store(current.parts())
        except BaseException as error:
            self._undo(current, error)
            if not isinstance(error, Exception):
                raise
        else:
            if reply.away:
                again = self._guard.loop.create_task(
                    self._settle_round(current.put_off(reply.away, self._guard.loop))
                )
                self._put_off.add(again)
                again.add_done_callback(self._put_off.discard)
            self._finish(current, reply)

    async def _store(self, parts: list[Settle]) -> SettleReply:
        give_up_at, tries = self._guard.loop.time() + self.lease_ms / 1000, 0
        while True:
            try:
                return await self._endpoint.settle(self.who.topic, self.who.group, parts)
            except PostroomError as error:
                tries += 1
                if not error.retriable or self._guard.loop.time() >= give_up_at:
                    raise
            await asyncio.sleep(pause(tries))

    def _finish(self, current: _Round, reply: SettleReply) -> None:
        self._hands.keep(current.runs, reply.kept)
        gone = [(_key_of(part), span) for part, spans in reply.lost for span in spans]
        current.some_lost = bool(gone)
        for delivery, start, stop in current.runs:
            self._hands.let_go(delivery, start, stop, ACKED if delivery.state[start] == ACKING else GIVEN)
            for key, (first, last) in gone:
                low, high = max(first - delivery.first, start), min(last - delivery.first + 1, stop)
                if key == delivery.key and low < high:
                    self._hands.mark(delivery, low, high, LOST)
        for part, spans in reply.lost:
            self._hands.lose(_key_of(part), spans)
        if not current.done.done():
            current.done.set_result(None)

    def _undo(self, current: _Round, error: BaseException) -> None:
        """Not stored: the messages are as open as before, and may be settled again."""
        for delivery, start, stop in current.runs:
            self._hands.mark(delivery, start, stop, OPEN)
        if not isinstance(error, Exception):
            error = ClosedError("the consumer was closed before this was stored; it will be delivered again")
        if not current.done.done():
            current.done.set_exception(error)

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


def delivery_of(message: Received) -> HeldDelivery:
    if not isinstance(message._delivery, HeldDelivery):
        raise UsageError("this message was read, not delivered: there is nothing to settle")
    return message._delivery
