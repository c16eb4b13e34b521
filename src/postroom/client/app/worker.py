"""A worker: runs the handler of one subscription on the messages that come.

As many lanes as the subscription's concurrency each take a message (or a list), run the handler on it and go
on; a feeder keeps a few messages ready for them. No task is made per message. Decides when a handler is run,
cancelled and given up; `handler` decides what its ending means, `consumer.driven` how the
verdict travels.

Must never let a handler end a lane, whatever it raises; never give a verdict while the handler still runs,
except to hand the message back when the app stops and the grace is over; and never run more at once than the
subscription says.

Several tasks may share a worker: each message goes to the task it names, a message that names none to the one
without a name, or to the only one there is. A name that nobody has is a dead letter: never another's message.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeAlias

from ...errors import DecodeError, RequestFailed, UnknownTask
from ...model.topology.names import TASK_HEADER
from ...tasks import end
from ...units import format_duration
from ..consumer.driven import DrivenConsumer
from ..message import Received
from ..tracing import unfit
from .call import Caller, Middleware, being_cancelled
from .figures import HandlerFigures, HandlersFigures
from .handler import ACK, RELEASE, Dead, Failed, Outcome, RetryLater, outcome_of, own_frames
from .subscription import Subscription, window_for

__all__ = ["ErrorHook", "Worker"]

log = logging.getLogger("postroom.app")

ErrorHook: TypeAlias = Callable[[BaseException, list[Received]], Awaitable[None] | None]

_SMOOTHING = 0.1  # how fast the measured cost of a message follows the last one
_MOST_READY = 500


@dataclass(frozen=True, slots=True)
class _Task:
    """A handler of the worker, and how it is called."""

    subscription: Subscription
    caller: Caller
    figures: HandlerFigures


class Worker:
    def __init__(
        self,
        subscription: Subscription,
        consumer: DrivenConsumer,
        *,
        for_thread: Callable[[Received], Any],
        on_error: ErrorHook | None = None,
        fraction: Callable[[], float] = random.random,
        middleware: Sequence[Middleware] = (),
        figures: HandlersFigures | None = None,
    ) -> None:
        self.subscription = subscription
        self.consumer = consumer
        self._tuning = consumer.tuning
        self._turn_s = consumer.tuning.handler_run_s
        self.handled = 0  # messages whose handler ended, one way or the other
        self._on_error, self._fraction = on_error, fraction
        self._ready: deque[Received] = deque()
        self._arrived, self._hungry = asyncio.Event(), asyncio.Event()
        self._gathering = asyncio.Lock()  # one lane at a time waits for a list to fill
        self._at_work: dict[int, list[Received]] = {}  # by lane
        self._idle = 0  # lanes that wait
        self._seconds_each: float | None = None
        self._stopping = False
        self._lanes: list[asyncio.Task[None]] = []
        self._feeder: asyncio.Task[None] | None = None
        figures = figures or HandlersFigures()
        self._tasks = {
            one.task: _Task(one, Caller(one, for_thread, middleware), figures.of(one))
            for one in subscription.tasks or (subscription,)
        }
        self._first = next(iter(self._tasks.values()))
        self._unnamed = self._first if len(self._tasks) == 1 else self._tasks.get(None)  # for what names none
        self._address = f"{subscription.group}/".encode()
        consumer.serves(subscription.concurrency, one_per_key=subscription.batch is None)

    # ---- life ----

    def start(self, *, feed: bool = True) -> None:
        """`feed=False`: messages come only from `look`."""
        self._lanes = [asyncio.create_task(self._lane(n)) for n in range(self.subscription.concurrency)]
        if feed:
            self._feeder = asyncio.create_task(self._feed())

    async def failed(self) -> BaseException | None:
        """Wait until it ends: the error that ended it, or None because of `stop`."""
        gone: asyncio.Future[Exception] = self.consumer.gone
        tasks = [*self._lanes, *([self._feeder] if self._feeder else [])]
        everything: list[asyncio.Future[Any]] = [*tasks, gone]
        done, _ = await asyncio.wait(everything, return_when=asyncio.FIRST_COMPLETED)
        if self._stopping:
            return None
        if gone.done():
            return gone.result()
        return next((error for task in tasks if task in done and (error := _error_of(task))), None)

    async def stop(self, grace_s: float) -> None:
        """Take no more; let what runs end, at most for the grace; hand everything else back."""
        self._stopping = True
        if self._feeder is not None:
            await end((self._feeder,))
        try:
            if self.subscription.ack != "on_delivery":  # those are settled: to be handled now or never
                self._ready.clear()
                await self.consumer.stop([m for unit in self._at_work.values() for m in unit])
            await self._end_lanes(grace_s)
        finally:
            for task in self._tasks.values():
                task.caller.close()
            await self.consumer.finish()

    def hurry(self) -> None:
        """Give up what runs, grace or not."""
        for lane in self._lanes:
            lane.cancel()

    async def _end_lanes(self, grace_s: float) -> None:
        self._arrived.set()
        running = set(self._lanes)
        if running:
            _, running = await asyncio.wait(running, timeout=grace_s)
        if running:
            log.warning("%s: %d handlers were still running and are cancelled", self._name, len(running))
            self.hurry()
            _, running = await asyncio.wait(running, timeout=self._tuning.cancelled_s)
        if running:
            log.error("%s: %d handlers ignore that they were cancelled", self._name, len(running))

    @property
    def _name(self) -> str:
        return self.subscription.name

    @property
    def progress(self) -> tuple[int, int, int]:
        """Changes whenever something happened."""
        return self.handled, self.consumer.stored, self.consumer.passed_over

    async def quiet(self, seconds: float) -> bool:
        """Wait until nothing is ready, at work or without an answer of the store; False: not in time."""
        try:
            async with asyncio.timeout(seconds):
                while self._ready or self._at_work:
                    self._hungry.clear()
                    await self._hungry.wait()
                await self.consumer.settled()
        except TimeoutError:
            return False
        return not self._ready and not self._at_work

    # ---- getting messages ----

    async def _feed(self) -> None:
        while True:
            while not self._wants_more():
                self._hungry.clear()
                await self._hungry.wait()
            self.consumer.resize(
                window_for(self.subscription, self._seconds_each, ordered=self.consumer.ordered)
            )
            self._ready += await self.consumer.next(self._limit())
            self._arrived.set()

    async def look(self) -> int:
        """Take what is there now, without waiting; returns how much it was."""
        found = await self.consumer.look(self._limit())
        self._ready += found
        self._arrived.set()
        return len(found)

    def _wants_more(self) -> bool:
        if self.subscription.ack == "on_delivery":
            return not self._ready and self._idle > 0
        batch = self.subscription.batch
        if batch is not None and self.consumer.ordered:  # its keys are at work with the list that has them
            return not self._ready and self._idle > 0
        return len(self._ready) < (self.subscription.concurrency if batch is None else batch.count)

    def _limit(self) -> int:
        batch = self.subscription.batch
        if self.subscription.ack == "on_delivery":  # no more than can be started at once: R16
            return max(1, self._idle if batch is None else batch.count)
        if batch is not None and self.consumer.ordered:
            return batch.count
        return max(_MOST_READY, self.subscription.concurrency, 0 if batch is None else batch.count)

    async def _next(self) -> list[Received]:
        """The next unit of work; nothing when the worker stops."""
        batch = self.subscription.batch
        if batch is None:
            return [self._ready.popleft()] if self._ready or await self._wait(None) else []
        async with self._gathering:
            unit: list[Received] = []
            size, deadline = 0, None
            while self._ready or await self._wait(deadline):
                size += len(self._ready[0].value)
                if unit and size > batch.size:
                    break
                unit.append(self._ready.popleft())
                deadline = deadline or monotonic() + batch.linger_s
                if len(unit) >= batch.count or (not self._ready and monotonic() >= deadline):
                    break
            if self.consumer.ordered:  # the rest may have keys of this list: no other lane must get it
                self.consumer.put_back(self._ready)
                self._ready.clear()
            # While it stops, what was gathered but not begun has been handed back already.
            return [] if self._stopping and self.subscription.ack != "on_delivery" else unit

    async def _wait(self, deadline: float | None) -> bool:
        """Wait for messages, at most until the deadline; False: there are none, or the worker stops."""
        self._idle += 1
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - monotonic())):
                while not self._ready and not self._stopping:
                    self._hungry.set()
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            pass
        finally:
            self._idle -= 1
        return bool(self._ready)

    # ---- handling ----

    async def _lane(self, number: int) -> None:
        turn = monotonic()
        while unit := await self._next():
            if self._wants_more():
                self._hungry.set()
            self._at_work[number] = unit
            began = monotonic()
            try:
                await self._handle(unit)
            finally:
                del self._at_work[number]
                self.handled += len(unit)
                if self.subscription.ack == "on_delivery":
                    self.consumer.handled(unit)
            ended = monotonic()
            self._measure((ended - began) / len(unit))
            if ended - turn > self._turn_s:
                await asyncio.sleep(0)
                turn = monotonic()

    def _measure(self, seconds: float) -> None:
        known = self._seconds_each
        self._seconds_each = seconds if known is None else known + (seconds - known) * _SMOOTHING

    async def _handle(self, unit: list[Received]) -> None:
        unit = self.consumer.begin(unit)
        task = self._unnamed
        if task is None or any(message.headers for message in unit):  # which may name a task
            task, unit = await self._addressed(unit)
        bodies, unit = await self._decoded(task, unit)
        if not unit:
            return
        figures, count, began = task.figures, len(unit), monotonic()
        figures.began(count)
        try:
            failures = await task.caller.call(bodies, unit)
        except BaseException as gone:  # the lane was cancelled, or the program ends: not an attempt
            figures.in_flight -= count
            self.consumer.settle(unit, RELEASE)
            raise gone
        figures.ended(count, monotonic() - began)
        if self.subscription.ack == "after":
            wrong = {id(message) for failed in failures for message in failed.messages}
            self.consumer.settle([m for m in unit if id(m) not in wrong] if wrong else unit, ACK)
        for failed in failures:
            await self._failed(task, failed)

    async def _addressed(self, unit: list[Received]) -> tuple[_Task, list[Received]]:
        """The task that the messages are for, and those of them that are for one of this worker's.

        Where there are several tasks, a unit is one message.
        """
        task, known = self._first, []
        for message in unit:
            named = message.headers.get(TASK_HEADER, b"") if message.headers else b""
            if named.startswith(self._address):  # else it is for another group, which sees the topic too
                found = self._tasks.get(named[len(self._address) :].decode(errors="replace"))
            else:
                named, found = b"", self._unnamed
            if found is None:
                await self._unfit(self._first, message, self._unknown(named))
            else:
                task = found
                known.append(message)
        return task, known

    def _unknown(self, named: bytes) -> UnknownTask:
        names = ", ".join(repr(name) for name in self._tasks if name is not None) or "none"
        if not named:
            return UnknownTask(
                f"the message names no task, and this app has several for it: {names}; send with "
                f"task.send(…), or with the header {TASK_HEADER}"
            )
        return UnknownTask(
            f"the message is for task {named.decode(errors='replace')!r}, and this app knows {names}: deploy "
            "a worker that has the task, then redrive"
        )

    async def _unfit(self, task: _Task, message: Received, error: Exception) -> None:
        """A message that no handler gets."""
        unfit(task.subscription, message, error)
        task.figures.handled += 1
        for failed in await task.caller.told([message], error):
            await self._failed(task, failed)

    async def _decoded(self, task: _Task, unit: list[Received]) -> tuple[list[Any], list[Received]]:
        """Bodies, and the messages they are of; those that do not fit are failures of their own."""
        decode = task.subscription.handler.decode
        if decode is None:
            return [], unit
        bodies, fitting = [], []
        for message in unit:
            try:
                bodies.append(decode(message.value))
                fitting.append(message)
            except Exception as error:
                await self._unfit(task, message, error)
        return bodies, fitting

    # ---- failures ----

    async def _failed(self, task: _Task, failed: Failed) -> None:
        error, unit = failed.error, failed.messages
        task.figures.failed += len(unit)
        by_attempt: dict[int, list[Received]] = {}
        for message in unit:
            by_attempt.setdefault(message.attempt, []).append(message)
        fraction = self._fraction()
        for attempt, messages in by_attempt.items():
            told = failed.answered  # its requester knows, and decides
            outcome = ACK if told else outcome_of(error, task.subscription.retry, attempt, fraction)
            open = self.consumer.settle(messages, outcome)
            next_step = self._next_step(outcome, attempt, open=open)
            unknown = isinstance(error, UnknownTask)
            self._tell(self._name if unknown else task.subscription.handler.name, error, messages, next_step)
        if self._on_error is not None:
            await self._call_hook(self._on_error, error, unit)

    def _next_step(self, outcome: Outcome, attempt: int, *, open: bool) -> str:
        """What becomes of messages that failed, for people."""
        group = self.consumer.settings
        if outcome is ACK:
            return "its requester was told, and it is not tried again"
        if self.subscription.ack == "on_delivery":
            return "not tried again, since it was acked on delivery"
        if not open:
            return "the handler had settled it already"
        if outcome.kind == "dead":
            return "moved to dead letters"
        if attempt >= group.max_attempts:
            where = f"{self.subscription.topic} {self.subscription.group}"
            stops = f"stopped, and its key waits: see `postroom stopped list {where}`"
            return stops if group.exhausted == "stop" else "moved to dead letters"
        if outcome.at_ms is not None:
            at = datetime.fromtimestamp(outcome.at_ms / 1000, UTC)
            return f"again at {at.isoformat(timespec='seconds')}"
        return f"again in {format_duration(outcome.delay_ms)}"

    def _tell(self, handler: str, error: BaseException, unit: list[Received], next_step: str) -> None:
        first = unit[0]
        key = "" if first.key is None else f", key {first.key.decode(errors='backslashreplace')!r:.100}"
        where = f"{first.topic}/{first.partition} offset {first.offset}"
        tries = f"attempt {first.attempt} of {self.consumer.settings.max_attempts}"
        what = f"message {first.id}{key}, {where}, {tries}"
        if len(unit) > 1:
            what += f", and {len(unit) - 1} more"
        expected = isinstance(error, RetryLater | Dead | RequestFailed)
        level = logging.INFO if expected else logging.WARNING
        trace = None
        if not expected and not isinstance(error, DecodeError):
            trace = (type(error), error, own_frames(error))
        log.log(level, "handler %s: %s: %r; %s", handler, what, error, next_step, exc_info=trace)

    async def _call_hook(self, hook: ErrorHook, error: BaseException, unit: list[Received]) -> None:
        try:
            waiting = hook(error, unit)
            if waiting is not None:
                await waiting
        except (Exception, asyncio.CancelledError):
            if being_cancelled():
                raise
            log.exception("the on_error hook failed itself, on a message of %s", self._name)


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    return None if task.cancelled() else task.exception()
