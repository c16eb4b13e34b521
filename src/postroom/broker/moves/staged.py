"""The publisher: what a job has decided leaves its staging for the logs of its partitions, once (I20).

A move has the three steps of `engine` (I12), under the decision's producer; its rows and its stamp are
removed in one transaction with the next stamp. Whoever goes on with a decision repeats the stamp that is
there. So nothing is lost or stored twice, wherever a process is cut off. No lease is needed: of several who
publish at once one gets its next step written down, and the others look again.

A partition that was sealed refuses its batch: those rows are planned again once the route has successors, and
before all that come after them, so that equal keys keep their order.

A topic that was deleted takes what was staged for it with it, as it takes its delayed messages.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from ...config import DEFAULTS, BrokerTuning, Limits
from ...endpoint.values import Decided, Published, PublishedPlace
from ...errors import (
    InvalidSetting,
    PermissionDenied,
    PostroomError,
    SequenceGap,
    StagingConflict,
    StoreBusy,
    UnknownFate,
    UnknownPartition,
    UnknownProducer,
    UnknownTopic,
    UsageError,
)
from ...model.messages.batch import read_header, verify
from ...model.moves import staging
from ...model.moves.schedule import DelayedRow, Opening, Planned
from ...model.moves.staging import (
    Decision,
    OpenMove,
    Progress,
    PublishedSpan,
    StagedQuery,
    Wish,
    check_name,
    owner_after,
    split_batches,
)
from ...store.contract import Appended, Finished, Staged, Store, Topic
from ..publish.backlog import BacklogGate
from ..publish.rates import Quotas
from ..topology.catalog_cache import CatalogCache
from .engine import Carried, Moved, MoveEngine

__all__ = ["FinishDecisions", "Publisher", "StagingVerbs", "StagingWork"]


_log = logging.getLogger("postroom.broker")

_MESSAGES, _BYTES = 40_000, 8 * 1024 * 1024  # of one move
_FORGOTTEN = (SequenceGap, UnknownProducer)  # a volatile log has lost what it knew of the producer


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What became of a move."""

    finished: Finished
    progress: Progress
    refused: tuple[int, ...]  # topics with a partition that took nothing
    producer_id: int


class Publisher:
    """Blocking; any thread may call it. `help` is told of a topic whose route may need somebody to go on."""

    def __init__(
        self,
        store: Store,
        moved: Moved = lambda stored: None,
        help: Callable[[str], object] = lambda topic: None,
        sleep: Callable[[float], None] = time.sleep,
        move_messages: int = _MESSAGES,
        tuning: BrokerTuning = DEFAULTS.tuning.broker,
    ) -> None:
        self._pauses = tuning.staged_pauses
        self._store = store
        self._moved = moved
        self._help = help
        self._sleep = sleep
        self._move_messages = move_messages

    def decide(
        self,
        query: str,
        batch: int,
        wish: staging.Wish,
        topics: Collection[int] | None = None,
        more: Callable[[], bool] = _always,
        owner: str = "",
    ) -> Decision:
        """What the batch consists of; what was decided before it is published first.

        StoreBusy if there is no `more` time for that.
        """
        while True:
            try:
                return self._store.staging.decide(query, batch, wish, secrets.randbits(62), topics, owner)
            except StagingConflict as error:
                before = error.details.get("unfinished")
                if before is None:
                    raise
            if not self.publish(query, before, more).published_at:
                raise StoreBusy(f"batch {before} of query {query!r} is being published first: try again")

    def publish(self, query: str, batch: int, more: Callable[[], bool] = _always) -> Decision:
        """Publish while there is `more` time; the decision as it is then."""
        tries = 0
        while True:
            decision = self._store.staging.decision(query, batch)
            if decision is None:
                raise StagingConflict(f"batch {batch} of query {query!r} was not decided: commit it first")
            if decision.published_at or not more():
                return decision
            if _Turn(self._store, self._moved, more, self._move_messages).go_on(decision, self._help):
                tries = 0
            else:
                tries += 1
                self._sleep(self._pauses.after(tries))


class _Turn:
    """One who goes on with a decision, for as long as nobody else does."""

    def __init__(self, store: Store, moved: Moved, more: Callable[[], bool], messages: int) -> None:
        self._store, self._more, self._messages = store, more, messages
        self._engine = MoveEngine(store, moved)
        self._engine.know_topics()
        self._opening = Opening()
        self._rows: dict[int, DelayedRow] = {}  # of the move that is under way

    def go_on(self, decision: Decision, help: Callable[[str], object]) -> bool:
        """False: a partition takes nothing just now. In any case look at the decision again."""
        at: Decision | None = decision
        if decision.move is None:
            at = self._begin(decision)
        while at is not None and at.move is not None:
            outcome = self._carry_out(at, at.move)
            if outcome is None:
                return True
            if outcome.refused:
                self._finish(at, outcome, None, False)
                for topic_id in outcome.refused:
                    with suppress(KeyError, UnknownTopic):  # it was deleted
                        help(self._engine.topics[topic_id].name)
                return False
            at = self._next(at, outcome)
        return True

    def _begin(self, at: Decision) -> Decision | None:
        """The first stamp of this turn."""
        rows, lost = self._look(at, ())
        if lost or not rows:
            progress = staging.advanced(at.progress, (), sum(row.records for row in lost))
            gone = Finished(None, frozenset(row.id for row in lost))
            self._store.staging.finish(at, gone, progress, done=not rows)
            return None
        return self._store.staging.stamp(at, self._plan(rows, at.progress))

    def _next(self, at: Decision, outcome: _Outcome) -> Decision | None:
        """End a move and begin the next, in one step if that is simple."""
        if outcome.finished.changed or not self._more():
            return self._finish(at, outcome, None, False)
        rows, lost = self._look(at, outcome.finished.gone)
        if lost:
            return self._finish(at, outcome, None, False)
        move = self._plan(rows, outcome.progress) if rows else None
        return self._finish(at, outcome, move, done=not rows)

    def _finish(self, at: Decision, outcome: _Outcome, move: OpenMove | None, done: bool) -> Decision | None:
        return self._store.staging.finish(
            at, outcome.finished, outcome.progress, producer_id=outcome.producer_id, move=move, done=done
        )

    # ---- planning ----

    def _look(self, at: Decision, gone: Collection[int]) -> tuple[list[DelayedRow], list[DelayedRow]]:
        """What comes next; and rows whose topic was deleted."""
        found = self._store.staging.next_rows(at, messages=self._messages, max_bytes=_BYTES, skip=gone)
        self._engine.know_topics(found)
        topics = self._engine.topics
        here = [row for row in found if row.topic_id in topics]
        return here, [row for row in found if row.topic_id not in topics]

    def _plan(self, rows: Sequence[DelayedRow], progress: Progress) -> OpenMove:
        self._opening, self._rows = Opening(), {row.id: row for row in rows}
        return OpenMove(self._engine.plan(rows, progress.sequences, self._opening))

    # ---- moving ----

    def _carry_out(self, at: Decision, move: OpenMove) -> _Outcome | None:
        """The second step; what the third one is to do. None: somebody else has gone on."""
        wanted = {part.row for one in move.planned for part in one.parts}
        if not wanted <= self._rows.keys():
            self._rows = self._store.staging.rows(wanted)
        if not wanted <= self._rows.keys():
            return None
        for row_id in wanted:
            verify(self._rows[row_id].batch)  # a new checksum would hide that it is damaged
        try:
            carried = self._engine.carry_out(None, move.planned, self._rows, at.producer_id, self._opening)
        except UnknownFate:
            if self._is_last(at):
                raise
            return None  # it was stored, and so much after it that it is not remembered
        return self._outcome(at, carried)

    def _is_last(self, at: Decision) -> bool:
        newest = self._store.staging.decision(at.query, at.batch)
        return newest is not None and (newest.revision, newest.step) == (at.revision, at.step)

    def _outcome(self, at: Decision, carried: Carried) -> _Outcome:
        stored = [
            (one, self._topic_of(one), result.base_offset)
            for one, result in carried.batches
            if isinstance(result, Appended)
        ]
        progress, producer_id = staging.advanced(at.progress, stored), at.producer_id
        if any(isinstance(result, _FORGOTTEN) for _, result in carried.batches):
            progress, producer_id = Progress(progress.places, {}, progress.dropped), secrets.randbits(62)
        refused = {self._topic_of(one) for one in carried.refused}
        return _Outcome(carried.finished, progress, tuple(sorted(refused)), producer_id)

    def _topic_of(self, planned: Planned) -> int:
        return self._rows[planned.parts[0].row].topic_id


class FinishDecisions:
    """A duty: publish what was decided and left by its job; drop what nobody decided; forget what is old."""

    name: str = staging.DUTY
    every_s: float = 30

    def __init__(self, store: Store, publisher: Publisher, limits: Limits) -> None:
        self._store = store
        self._publisher = publisher
        self._limits = limits

    def run_once(self) -> None:
        for left in self._store.staging.unfinished():
            if self._store.now_ms() - left.decided_at >= self._limits.tuning.broker.left_decision_ms:
                self._finish(left)
        limits = self._limits
        dropped, _ = self._store.staging.age(limits.staged_ms, limits.decision_ms, limits.query_ms)
        if dropped:
            _log.info("%d staged messages were dropped: nobody has decided about them", dropped)

    def _finish(self, left: Decision) -> None:
        until = time.monotonic() + limited_s(self._limits)
        try:
            self._publisher.publish(left.query, left.batch, lambda: time.monotonic() < until)
        except PostroomError as error:
            _log.warning("batch %d of query %r waits to be published: %s", left.batch, left.query, error)


def limited_s(limits: Limits) -> float:
    """How long a duty may be at it before others have their turn."""
    return limits.duty_lease_ms / 1000 / 6


T = TypeVar("T")

_THREADS = 2


class StagingWork:
    """Staging as the event loop sees it, for jobs that publish exactly once (I20).

    Blocking work has threads of its own, since a publishing may take long and polls must not wait for it.
    Each call publishes for a while and says how far it is: whoever wants all of it asks again.
    """

    def __init__(
        self,
        store: Store,
        catalog: CatalogCache,
        publisher: Publisher,
        backlog: BacklogGate,
        quotas: Quotas,
        tuning: BrokerTuning = DEFAULTS.tuning.broker,
    ) -> None:
        self._slice_s = tuning.staged_slice_s
        self._store = store
        self._catalog = catalog
        self._publisher = publisher
        self._backlog = backlog
        self._quotas = quotas
        self._threads = ThreadPoolExecutor(_THREADS, "postroom-publish")
        self._closed = False

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    async def close(self) -> None:
        """What is being published goes no further than its next step."""
        self._closed = True
        await asyncio.to_thread(self._threads.shutdown)

    async def stage(
        self, topic: str, rows: Sequence[Staged], place: tuple[str, int, str, int], producer: str, owner: str
    ) -> None:
        """As an append: limits on the backlog and the rates are kept here, and not when it is published."""
        headers = [read_header(row.batch) for row in rows]
        if any(header.control for header in headers):
            raise UsageError("control batches are Postroom's own; stage messages")
        messages, size = sum(h.records for h in headers), sum(h.size for h in headers)
        known = await self.run(self._catalog.topic, topic)
        limited = self._backlog.limits(known.settings)
        counted = self._backlog.pass_through(known, messages, size) if limited else None
        with nullcontext() if counted is None else await counted:
            passed = await self._quotas.pass_through(topic, producer, messages, size)
            try:
                await self.run(self._store.staging.put, *place, rows, owner)
            except PostroomError:
                self._quotas.put_back(passed)
                raise

    # ---- in a thread ----

    def rows(self, topic: str, partition_ids: Sequence[int], data: bytes) -> list[Staged]:
        batches = split_batches(data)
        if not batches or len(batches) != len(partition_ids):
            raise UsageError(f"{len(batches)} batches were staged for {len(partition_ids)} partitions")
        known = self._of_topic(topic, set(partition_ids))
        return [Staged(known.id, place, one) for place, one in zip(partition_ids, batches, strict=True)]

    def _of_topic(self, topic: str, partition_ids: Collection[int]) -> Topic:
        for known in (self._catalog.topic(topic), self._catalog.topic(topic, fresh=True)):
            if {piece.partition_id for piece in known.route.partitions}.issuperset(partition_ids):
                return known
        raise UnknownPartition(
            f"that is not a partition of topic {topic!r}: fetch the route again", topic=topic
        )

    def known(self, query: str, owner: str) -> StagedQuery:
        """How far the query is; PermissionDenied if it is another's."""
        known = self._store.staging.known(query)
        owner_after(query, known.owner, owner)
        return known

    def decide(self, topics: Sequence[str], query: str, batch: int, wish: Wish, owner: str) -> Decided:
        ids = {self._catalog.topic(name).id for name in topics}
        decision = self._publisher.decide(query, batch, wish, ids, self._for_a_while(), owner)
        self._check(decision, topics)
        return Decided(decision.revision, decision.segments, decision.published_at > 0)

    def publish(self, topics: Sequence[str], query: str, batch: int, owner: str) -> Published:
        self.known(query, owner)
        recorded = self._store.staging.decision(query, batch)
        if recorded is not None:
            self._check(recorded, topics)
        done = self._publisher.publish(query, batch, self._for_a_while())
        places = self._shown(done.progress.places.values())
        messages = sum(place.messages for place in places)
        return Published(done.published_at > 0, messages, done.progress.dropped, places)

    def drop(
        self, topics: Sequence[str], query: str, batch: int, segments: Sequence[str] | None, owner: str
    ) -> int:
        """Rows of these topics alone; without any, of all."""
        named = set()
        for name in topics:
            with suppress(UnknownTopic):  # it was deleted: what was staged for it ages out
                named.add(self._catalog.topic(name).id)
        return self._store.staging.drop(query, batch, segments, named if topics else None, owner)

    def _for_a_while(self) -> Callable[[], bool]:
        until = time.monotonic() + self._slice_s
        return lambda: not self._closed and time.monotonic() < until

    def _check(self, decision: Decision, topics: Sequence[str]) -> None:
        """Permissions are about topics: whoever names a query must name the topics it writes to."""
        names = {topic.id: topic.name for topic in self._store.catalog.topics()}
        missing = sorted({names[one] for one in decision.topics if one in names}.difference(topics))
        if missing:
            raise PermissionDenied(f"the batch has messages for topic {missing[0]!r} too: name it as well")

    def _shown(self, places: Iterable[PublishedSpan]) -> tuple[PublishedPlace, ...]:
        topics = {topic.id: topic for topic in self._store.catalog.topics()}
        found = []
        for place in places:
            topic = topics.get(place.topic_id)
            pieces = topic.route.partitions if topic is not None else ()
            number = next((p.partition for p in pieces if p.partition_id == place.partition_id), -1)
            name = "" if topic is None else topic.name
            found.append(
                PublishedPlace(name, number, place.partition_id, place.first, place.last, place.messages)
            )
        return tuple(sorted(found, key=lambda place: (place.topic, place.partition)))


class StagingVerbs:
    """The part of the broker that is about staging. `owner`: the principal that asks; "": somebody inside."""

    _staging: StagingWork
    store: Store

    async def stage(
        self,
        topic: str,
        query: str,
        batch: int,
        segment: str,
        number: int,
        partition_ids: Sequence[int],
        data: bytes,
        producer: str = "",
        owner: str = "",
    ) -> None:
        place = (*_batch_of(query, batch), check_name(segment, "segment"), number)
        if not 0 <= number < 2**31 - len(partition_ids):
            raise InvalidSetting(f"number={number}: batches of a segment are counted from 0")
        rows = await self._staging.run(self._staging.rows, topic, partition_ids, data)
        await self._staging.stage(topic, rows, place, producer, owner)

    async def staged_marks(self, topics: Sequence[str], query: str, owner: str = "") -> dict[str, int]:
        known = await self._staging.run(self._staging.known, check_name(query, "query"), owner)
        return dict(known.marks)

    async def decide_staged(
        self, topics: Sequence[str], query: str, batch: int, wish: Wish, owner: str = ""
    ) -> Decided:
        return await self._staging.run(self._staging.decide, topics, *_batch_of(query, batch), wish, owner)

    async def publish_staged(
        self, topics: Sequence[str], query: str, batch: int, owner: str = ""
    ) -> Published:
        return await self._staging.run(self._staging.publish, topics, *_batch_of(query, batch), owner)

    async def drop_staged(
        self, topics: Sequence[str], query: str, batch: int, segments: Sequence[str] | None, owner: str = ""
    ) -> int:
        return await self._staging.run(self._staging.drop, topics, *_batch_of(query, batch), segments, owner)


def _batch_of(query: str, batch: int) -> tuple[str, int]:
    if not 0 <= batch < 2**62:
        raise InvalidSetting(f"batch={batch}: batches of a query are counted from 0")
    return check_name(query, "query"), batch
