"""The forwarder: brings messages that wait as rows elsewhere into their topics (I12, I21, R34).

A source keeps the rows: the file of a spool, the table of an outbox. The forwarder stamps rows durably,
appends them under their stamp, and deletes them when they are stored; whoever resumes repeats the stamps that
are there. So each row becomes one message, wherever a process is cut off; rows of one key in the order of
their ids. Each answer is waited for, and rows of a topic are planned only once none of it is stamped (I4).

Decides what an answer means: stored; surely not stored here, so to be stamped again, for the successor or,
without a key, for a partition that is not away; or not known, so to be repeated as it is. A topic that cannot
take its messages is held, and tried again after a while, ever less often; others go on. Must never drop a
row, and never append what is not stamped.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NamedTuple, Protocol, TypeVar

from ...backoff import STEADY, STUCK
from ...config import DEFAULTS, Limits
from ...endpoint.endpoint import Endpoint
from ...errors import (
    MessageTooLarge,
    PartitionSealed,
    PostroomError,
    SequenceGap,
    StoreUnavailable,
    UnknownPartition,
    UnknownProducer,
)
from ...model.messages.sequence import next_sequence
from ...model.moves.forwarding import (
    Batch,
    ForwardRow,
    Line,
    Stamp,
    build,
    ids_of,
    pack_headers,
    plan,
    resumed,
)
from ...model.topology.route import Route
from ...tasks import end
from ..codec import Packed
from ..producer.appending import unstored

__all__ = ["Forwarder", "Source", "Trouble", "as_rows"]

log = logging.getLogger("postroom.forwarder")

T = TypeVar("T")

_MESSAGES, _BYTES = 8_000, 8 * 1024 * 1024  # of one round
_NOT_STORED = (PartitionSealed, UnknownProducer, SequenceGap)
_FORGOTTEN = (UnknownProducer, SequenceGap)
_WORTH_TELLING = 6  # tries


class Trouble(NamedTuple):
    """Why the messages of a topic wait."""

    reason: str
    stuck: bool  # it will not pass by itself: somebody has to do something


class Source(Protocol):
    """Where rows wait. Calls block; they come one at a time, from one thread. Each is one transaction.

    A source that several forwarders may work on checks its lease within `stamp` and `finish`, and raises
    LeaseLost, with nothing changed. What it raises ends `Forwarder.run`.
    """

    def take(self, messages: int, size: int, without: Collection[str]) -> list[ForwardRow]:
        """Rows of all topics but these: if any are stamped, those, all of them; else the oldest, by id.

        Of those not stamped at most so many messages, and bytes (but one at least).
        """

    def stamp(self, batches: Sequence[Batch]) -> None:
        """Write down the stamp of each batch and which rows are in it, durably."""

    def finish(self, stored: Sequence[Batch], refused: Sequence[Batch]) -> None:
        """Delete the rows of these, durably; take the stamps off those: they are planned again."""

    def tell(self, topic: str, trouble: Trouble | None) -> None:
        """Show people why a topic's messages wait; None: they do not any more. It need not be durable."""


def as_rows(topic: str, packed: Packed, slot: int | None, now_ms: int) -> list[ForwardRow]:
    """Messages as a source writes them down: all but their row ids, which are 0."""
    if packed.ids is None and packed.timestamps is None:
        return [
            ForwardRow(0, topic, key, value, pack_headers(headers), None, now_ms, 0, slot)
            for key, value, headers in packed.entries
        ]
    none: list[None] = [None] * len(packed.entries)
    rest = zip(packed.ids or none, packed.timestamps or none, packed.dues or none, strict=True)
    return [
        ForwardRow(
            0, topic, key, value, pack_headers(headers), id, now_ms if at is None else at, due or 0, slot
        )
        for (key, value, headers), (id, at, due) in zip(packed.entries, rest, strict=True)
    ]


class Forwarder:
    """Moves a source's rows until it is stopped. `client`: whose limits the messages count against (R40).

    `look_ms`: a source that others write to is looked at so often at least; 0: whoever writes calls `wake`.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        source: Source,
        *,
        client: str = "",
        look_ms: int = 0,
        limits: Limits = DEFAULTS,
    ) -> None:
        self._tuning, self._answer_s = limits.tuning.client, limits.send_timeout_ms / 1000
        self._endpoint, self._source, self._client = endpoint, source, client
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, "postroom-forward")
        self._longest_look_s = look_ms / 1000
        self._look_s = self._tuning.first_check_s
        self._looked_at = 0.0  # by the loop's clock
        self._woken = asyncio.Event()
        self._routes: dict[str, tuple[Route, float]] = {}
        self._turns: dict[str, int] = {}
        self._lines: dict[Line, tuple[int, int]] = {}  # producer id, next sequence
        self._fresh: set[Stamp] = set()  # stamped here, and surely not stored so far
        self._held: dict[str, _Hold] = {}
        self._under_way: dict[asyncio.Task[_Outcome], str] = {}  # lines, and their topics
        self._task: asyncio.Task[None] | None = None
        self.forwarded = 0  # messages so far

    @property
    def troubles(self) -> dict[str, Trouble]:
        """By topic, why its messages wait. Any thread may ask."""
        return {topic: hold.trouble for topic, hold in list(self._held.items())}

    def wake(self) -> None:
        """There may be rows. From any thread."""
        with suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._woken.set)

    async def run(self) -> None:
        """Until `stop`, or until the source raises something."""
        self._task = asyncio.current_task()
        try:
            while True:
                self._woken.clear()
                if await self.run_once():
                    self._look_s = self._tuning.first_check_s
                else:
                    await self._idle()
        finally:
            for line in self._under_way:
                line.cancel()

    async def stop(self) -> None:
        """At any step; nothing of the source is in use when this returns."""
        if self._task is not None and self._task is not asyncio.current_task():
            await end([self._task])
        await end(self._under_way)
        await asyncio.to_thread(self.let_go)

    def let_go(self) -> None:
        """Once `run` has ended; blocks until nothing of the source is in use."""
        self._thread.shutdown()

    async def run_once(self) -> int:
        """One round: rows that are stamped, or else new ones. How many were taken, or stored since."""
        late = await self._finish_late()
        rows = await self._ask(self._source.take, _MESSAGES, _BYTES, self._waiting())
        if not rows:
            return late
        batches = resumed(rows) if rows[0].stamp is not None else await self._stamp(rows)
        if batches:
            await self._finish(await self._append(batches))
        return late + len(rows)

    # ---- stamping ----

    async def _stamp(self, rows: Sequence[ForwardRow]) -> list[Batch]:
        routes: dict[str, Route] = {}
        for topic in dict.fromkeys(row.topic for row in rows):
            try:
                routes[topic] = await self._route(topic)
                _check([row for row in rows if row.topic == topic])
            except PostroomError as error:
                routes.pop(topic, None)
                await self._hold(topic, error)
        planned = plan([row for row in rows if row.topic in routes], routes, self._turns)
        batches = [Batch(topic, self._next(line, len(some)), some) for topic, line, some in planned]
        for topic in routes:
            self._turns[topic] = self._turns.get(topic, 0) + 1
        if batches:
            try:
                await self._ask(self._source.stamp, batches)
            except BaseException:
                self._lines.clear()  # nobody knows whether these sequences are used
                raise
            self._fresh.update(batch.stamp for batch in batches)
        return batches

    def _next(self, line: Line, messages: int) -> Stamp:
        producer_id, sequence = self._lines.get(line) or (secrets.randbits(62), 0)
        self._lines[line] = producer_id, next_sequence(sequence, messages)
        return Stamp(producer_id, line[0], sequence)

    async def _route(self, topic: str) -> Route:
        found = self._routes.get(topic)
        if found is None or self._loop.time() - found[1] > self._tuning.route_fresh_s:
            found = self._routes[topic] = await self._endpoint.route(topic), self._loop.time()
        return found[0]

    # ---- appending ----

    async def _append(self, batches: Sequence[Batch]) -> list[_Outcome]:
        lines: dict[tuple[int, int], list[Batch]] = {}
        for batch in batches:
            lines.setdefault(batch.stamp[:2], []).append(batch)
        new = {self._loop.create_task(self._append_line(line)): line[0].topic for line in lines.values()}
        self._under_way.update(new)
        for task in new:
            task.add_done_callback(self._answer_came)
        await asyncio.wait(new, timeout=self._tuning.line_s)
        return self._answered()

    def _answered(self) -> list[_Outcome]:
        """Of lines that are done. A slow one is not waited for: only its own topic is, by `_waiting`."""
        done = [line for line in self._under_way if line.done()]
        for line in done:
            del self._under_way[line]
        return [line.result() for line in done]

    def _answer_came(self, line: asyncio.Task[_Outcome]) -> None:
        self._woken.set()

    async def _finish_late(self) -> int:
        outcomes = self._answered()
        if outcomes:
            await self._finish(outcomes)
        return sum(len(batch.rows) for outcome in outcomes for batch in outcome.stored)

    async def _append_line(self, line: Sequence[Batch]) -> _Outcome:
        """One batch after the other, until one is not stored."""
        topic = line[0].topic
        for at, batch in enumerate(line):
            try:
                async with asyncio.timeout(self._answer_s):
                    await self._append_one(batch)
            except _NOT_STORED as error:
                if isinstance(error, _FORGOTTEN):
                    log.warning("topic %r does not know what it had of this forwarder: %s", topic, error)
                return _Outcome(topic, line[:at], line[at:], error)  # nor can those behind it be stored
            except UnknownPartition as error:
                refused = line[at:] if await self._is_gone(batch) else ()
                return _Outcome(topic, line[:at], refused, error)
            except StoreUnavailable as error:
                refused = line[at:] if unstored(error) and self._all_fresh(line[at:]) else ()
                self._fresh.discard(batch.stamp)
                return _Outcome(topic, line[:at], refused, error)
            except TimeoutError:
                self._fresh.discard(batch.stamp)
                late = StoreUnavailable(f"no answer within {self._answer_s:g} s: it is asked again")
                return _Outcome(topic, line[:at], error=late)
            except Exception as error:
                self._fresh.discard(batch.stamp)
                return _Outcome(topic, line[:at], error=error)
        return _Outcome(topic, line)

    def _all_fresh(self, batches: Sequence[Batch]) -> bool:
        """Whether no try of these can have stored anything; whoever resumes a stamp cannot know (I12)."""
        return all(batch.stamp in self._fresh for batch in batches)

    async def _is_gone(self, batch: Batch) -> bool:
        """Whether its partition is none of the topic's: that was deleted, and made anew."""
        self._routes.pop(batch.topic, None)
        try:
            route = await self._route(batch.topic)
        except PostroomError:
            return False
        return all(piece.partition_id != batch.stamp.partition_id for piece in route.partitions)

    async def _append_one(self, batch: Batch) -> None:
        topic, where = batch.topic, batch.stamp.partition_id
        ids = ids_of(batch, (await self._route(topic)).by_id)
        await self._endpoint.append(
            topic, where, build(batch), due_at=batch.due_at, ids=ids, producer=self._client
        )

    async def _finish(self, outcomes: Sequence[_Outcome]) -> None:
        stored = [batch for outcome in outcomes for batch in outcome.stored]
        refused = [batch for outcome in outcomes for batch in outcome.refused]
        self._fresh.difference_update(batch.stamp for batch in (*stored, *refused))
        for batch in refused:
            self._routes.pop(batch.topic, None)
            self._forget(batch.stamp)
        if stored or refused:
            await self._ask(self._source.finish, stored, refused)
        self.forwarded += sum(len(batch.rows) for batch in stored)
        failures = {outcome.topic: outcome.error for outcome in outcomes if outcome.error is not None}
        for topic in dict.fromkeys(outcome.topic for outcome in outcomes):
            if topic in failures:
                await self._hold(topic, failures[topic])
            else:
                await self._release(topic)

    def _forget(self, stamp: Stamp) -> None:
        """Its sequence has a hole: what comes next has another identity."""
        self._lines = {line: used for line, used in self._lines.items() if used[0] != stamp.producer_id}

    # ---- holding ----

    def _waiting(self) -> set[str]:
        """Topics of which nothing is to be taken now."""
        now = self._looked_at = self._loop.time()
        held = {topic for topic, hold in self._held.items() if hold.until > now}
        return held.union(self._under_way.values())

    async def _hold(self, topic: str, error: Exception) -> None:
        hold = self._held.get(topic)
        if hold is None:
            hold = self._held[topic] = _Hold()
        if hold.failed(error, self._loop.time()):
            log.warning("messages to topic %r wait: %s", topic, hold.trouble.reason)
            await self._ask(self._source.tell, topic, hold.trouble)

    async def _release(self, topic: str) -> None:
        hold = self._held.pop(topic, None)
        if hold is not None and hold.told:
            log.warning("messages to topic %r go on", topic)
            await self._ask(self._source.tell, topic, None)

    async def _idle(self) -> None:
        """Until there may be rows, or a topic is tried again. One that was tried has no time: it is under
        way, and its answer wakes this, or has no rows."""
        until = [hold.until for hold in self._held.values() if hold.until > self._looked_at]
        if self._longest_look_s:
            until.append(self._loop.time() + self._look_s)
            self._look_s = min(2 * self._look_s, self._longest_look_s)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(min(until) if until else None):
                await self._woken.wait()

    async def _ask(self, call: Callable[..., T], *args: Any) -> T:
        return await self._loop.run_in_executor(self._thread, call, *args)


class _Outcome(NamedTuple):
    """What became of a line's batches; those that are in neither list stay stamped."""

    topic: str
    stored: Sequence[Batch]
    refused: Sequence[Batch] = ()
    error: Exception | None = None


class _Hold:
    """A topic that takes nothing now."""

    __slots__ = ("_told", "_tries", "trouble", "until")

    def __init__(self) -> None:
        self._tries = 0
        self._told: Trouble | None = None  # what people know
        self.until = 0.0  # by the loop's clock
        self.trouble = Trouble("", False)

    @property
    def told(self) -> bool:
        return self._told is not None

    def failed(self, error: Exception, now: float) -> bool:
        """Try again later; whether people should be told."""
        stuck = not isinstance(error, PostroomError) or not (
            error.retriable or isinstance(error, PartitionSealed | UnknownPartition | UnknownProducer)
        )
        self.trouble = Trouble(_reason(error), stuck)
        self._tries += 1
        self.until = now + (STUCK if stuck else STEADY).after(self._tries)
        if self.trouble == self._told or not (stuck or self._tries >= _WORTH_TELLING):
            return False
        self._told = self.trouble
        return True


def _reason(error: Exception) -> str:
    return f"{error.code}: {error}" if isinstance(error, PostroomError) else repr(error)


def _check(rows: Iterable[ForwardRow]) -> None:
    """Rows are checked when they are written; these may have been written by somebody else."""
    for row in rows:
        size = len(row.value) + len(row.key or b"")
        if size > DEFAULTS.max_message_bytes:
            raise MessageTooLarge(
                f"the message in row {row.id} has {size:,} bytes, the limit is "
                f"{DEFAULTS.max_message_bytes:,}: take the row away, and those behind it go on",
                row=row.id,
            )
