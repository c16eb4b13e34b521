"""Handing out and settling: the use cases between an endpoint's request and the store's verbs.

Blocking code, run in worker threads. It reads batches (from the tail cache, else from the store), asks
the store for a delivery within what was read, and puts both together. It decides nothing about
deliveries: `model.delivery` does.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Protocol, TypeVar

from ...config import DEFAULTS
from ...endpoint.values import Grant, Lease, PollRequest, Settle, Verdict
from ...errors import (
    GateClosed,
    GenerationChanged,
    StoreError,
    StoreUnavailable,
    UnknownPartition,
    UsageError,
)
from ...model.delivery.delivery import Ask, Delivery, Kind, OrderedAsk, Settlement, Span
from ...model.delivery.reason import as_reason
from ...model.topology.names import slow_topic
from ...model.topology.route import Range
from ...store.contract import (
    Bounds,
    Granted,
    Group,
    Peek,
    Settled,
    Store,
    StoredBatch,
    Topic,
    Visit,
    Visited,
)
from ..moves.departures import FarRetries, SettingAside
from ..topology.catalog_cache import CatalogCache, Source
from .handed import (
    Departure,
    Fresh,
    Handed,
    Outcome,
    PartialPoll,
    PartitionNews,
    PollAcks,
    PollBudget,
    ReadRelease,
    earlier,
    lease_of,
    new_stamp,
)  # fmt: skip
from .parked import ParkedLines
from .readable import CaughtUp, TailCache, Unread, fitted, has_due, has_new, took_all

__all__ = ["Deliveries", "is_of_a_shard", "rotated"]

T = TypeVar("T")
A = TypeVar("A", bound=Ask | OrderedAsk, contravariant=True)

_log = logging.getLogger("postroom.broker")

_WALK_BYTES = 4 * 1024 * 1024
_TOGETHER = 64  # partitions that one transaction locks
_FRESH_LOOKS = 5  # a group reset that often within one poll is its caller's to know

_KINDS = {
    "ack": Kind.ACK, "retry": Kind.RETRY, "release": Kind.RELEASE, "dead": Kind.MOVE, "park": Kind.PARK,
}  # fmt: skip


class PartitionPoll(Protocol[A]):
    """The store's verb that hands out of a partition: `Progress.poll`, or `poll_ordered`."""

    def __call__(
        self, group: Group, partition_id: int, ask: A, *, log_start: int = 0, waited_ms: int | None = None
    ) -> Granted: ...


class Deliveries:
    def __init__(
        self, store: Store, catalog: CatalogCache, tail: TailCache, far_retry_ms: int = DEFAULTS.far_retry_ms
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._tail = tail
        self.unread = Unread(store.progress)
        self.parked = ParkedLines(store, catalog, self.read)
        self._retries = FarRetries(catalog, self.read_span, far_retry_ms)
        self._turn = 0  # partitions take turns at being first
        self._caught_up = CaughtUp(tail, store)

    # ---- poll ----

    def poll(
        self, request: PollRequest, acks: PollAcks | None = None, news: PartitionNews | None = None
    ) -> Handed:
        """What there is for this poll; `acks` that came with it are stored then, or it raises. `news`: only
        these partitions can have something, as far as is known."""
        return self.by_fresh_catalog(partial(self._poll, acks=acks, news=news), request)

    def by_fresh_catalog(self, poll: Callable[[PollRequest], Handed], request: PollRequest) -> Handed:
        for _ in range(_FRESH_LOOKS):
            try:
                return poll(request)
            except (GenerationChanged, UnknownPartition):  # reset, or deleted: what is cached is old
                self._catalog.forget()
            except StoreUnavailable as error:
                if not is_of_a_shard(error):
                    raise  # and else the next look leaves that shard out (R6)
        return poll(request)

    def _poll(
        self, request: PollRequest, acks: PollAcks | None = None, news: PartitionNews | None = None
    ) -> Handed:
        sources, handed = self._sources(request), Handed()
        dead = self._catalog.dead_letters(request.topic, request.group)
        look = PollBudget(
            request, dead, request.messages, request.bytes, request.empty_handed, acks=acks, news=news
        )
        self._turn += not request.repeated  # begun anew in a thread, it begins where it was
        own_topics = len(sources) > 1 and request.lane_messages
        lane = slow_topic(request.topic, request.group) if own_topics else None
        for source in reversed(sources):  # what was redriven first: it has waited longest; the lane before it
            try:
                if source[0].name == lane:
                    with look.limited(request.lane_messages):
                        self._poll_source(source, look, handed)
                else:
                    self._poll_source(source, look, handed)
            except (StoreError, GenerationChanged):
                if not handed.grants or look.unread:
                    raise
                look.full = True  # what was granted before is handed over
            if look.full:
                break
        handed.took_all = not look.full and not look.left
        self._ack(look)
        return handed

    def paused(self, request: PollRequest) -> bool:
        """Whether the group is paused; asked when the ends are known: what was sent after a pause stays."""
        return self._sources(request)[0][1].paused

    def _sources(self, request: PollRequest) -> list[Source]:
        return self._catalog.sources(request.topic, request.group, lane=request.lane_messages > 0)

    def _ack(self, budget: PollBudget) -> None:
        """Store acks that were not stored with anything that was handed out."""
        acks = budget.acks
        if acks is not None and acks.outcome is None:
            try:
                acks.outcome = self.settle(acks.topic, acks.group, acks.parts)
            except StoreUnavailable as error:  # of whatever shard: another poll would not help
                raise StoreUnavailable(str(error)) from error
            budget.empty_handed = budget.empty_handed and not acks.outcome.away

    def _poll_source(self, source: Source, look: PollBudget, handed: Handed) -> None:
        topic, group = source
        pieces = self.unread.partitions(topic.route, group)
        if isinstance(look.request, PartialPoll) and topic.name == look.request.topic:
            pieces = tuple(piece for piece in pieces if piece.partition_id in look.request.only)
        if self._poll_news(source, pieces, look, handed):
            return
        ids = self._store.present([piece.partition_id for piece in pieces])
        version = None if isinstance(look.request, PartialPoll) else self._caught_up.version(topic)
        bounds = self._store.log.bounds(ids)
        self._caught_up.bounds_read(group, bounds, version)
        if self.paused(look.request):
            look.full = True
            return
        peeks = self._store.progress.peek(group, ids)
        now = self._store.now_ms()
        request = look.request
        held = self._store.progress.held_by(group.id, request.token) if request.repeated else set()
        look.left = look.left or bool(held)
        wanted = self.unread.look(topic.route, group, bounds, peeks)
        readable = [piece for piece in pieces if piece.partition_id in wanted]
        fresh: list[tuple[Range, int]] = []  # partitions with new messages and nothing else, and from where
        for piece in self._in_turn(readable, peeks, held, now):
            partition_id = piece.partition_id
            peek = peeks.get(partition_id) or self.first_peek(group, partition_id, bounds)
            if peek is None:
                continue
            if peek.parked:
                self.parked.leave_order(group, partition_id)
            edges, due = bounds[partition_id], has_due(peek, now)
            if held or peek.parked or due:
                self._ack(look)
                self._poll_partition(source, piece, edges, peek, look, handed, now)
            elif has_new(peek, edges):
                fresh.append((piece, max(peek.cursor, edges.start)))
            else:
                handed.next_due = earlier(handed.next_due, peek.next_due)
            if look.full:
                return
        if fresh:
            self._poll_fresh(source, fresh, bounds, look, handed, now)

    def _poll_news(self, source: Source, pieces: Sequence[Range], budget: PollBudget, handed: Handed) -> bool:
        """Ask for new messages alone, which are in memory, by where the group was left. False: more than that
        may be there, or less.

        The cursor under the lock is what counts: where another process has moved it, the partitions are
        looked at as ever. If the poll stood waiting when the messages came, nobody was told since that they
        are purged; if it did not, nobody may have changed anything since the bounds were read."""
        told = budget.news
        version = None if told is None or told.waited else self._caught_up.version(source[0])
        if told is None or (version is None and not told.waited):
            return False
        news = [piece for piece in pieces if piece.partition_id in told.partitions]
        known = self._caught_up.since(source[1], rotated(news, self._turn), version)
        if known is None or len(self._store.present([*known[1]])) < len(news):
            return False
        if self.paused(budget.request):
            budget.full = True
        elif news:
            self._poll_fresh(source, *known, budget, handed, self._store.now_ms())
        return bool(handed.grants) or not budget.left

    def _poll_partition(
        self,
        source: Source,
        piece: Range,
        edges: Bounds,
        peek: Peek,
        look: PollBudget,
        handed: Handed,
        now: int,
    ) -> None:
        (topic, group), partition_id, due = source, piece.partition_id, has_due(peek, now)
        cursor = max(peek.cursor, edges.start)
        ask = partial(look.ask, cursor, again=due)
        # also if nothing is new: what takes time is to say so before anything is granted
        look.batches = self.read(partition_id, cursor, look.messages, look.bytes)
        granted = self.poll_partition(self._store.progress.poll, group, partition_id, edges, look, ask, now)
        look.left = look.left or due or not took_all(granted, cursor, edges)
        look.unread = True
        self._hand(handed, look, topic, group, piece, granted)
        look.unread = False

    def _poll_fresh(
        self,
        source: Source,
        fresh: Sequence[tuple[Range, int]],
        bounds: dict[int, Bounds],
        look: PollBudget,
        handed: Handed,
        now: int,
    ) -> None:
        """Ask all partitions that have nothing but new messages in one transaction, with the acks that came
        along. Each is asked for what is left if those before it give all that was read of them."""
        topic, group = source
        acks = look.acks if look.acks is not None and look.acks.topic == topic.name else None
        if acks is None or acks.outcome is not None:
            self._ack(look)
            acks = None
        settles = {} if acks is None else _by_partition(acks.parts)
        visits = {one: self._settling(parts, group, None, now) for one, parts in settles.items()}
        asked, messages, size = [], look.messages, look.bytes
        for piece, cursor in fresh[:_TOGETHER]:
            partition_id, start = piece.partition_id, bounds[piece.partition_id].start
            batches = self.read(partition_id, cursor, messages, size)
            asked.append((piece, cursor, batches))
            ask = look.ask_fresh(batches, cursor, messages)
            acked = visits[partition_id].settles if partition_id in visits else ()
            visits[partition_id] = Visit(partition_id, acked, ask, start, _waited_ms(batches, now))
            messages -= min(ask.messages, ask.end - cursor)
            size -= sum([len(batch.data) for batch in batches])
            if messages <= 0 or size <= 0:
                break
        answers = self._visit(group, visits.values())
        if acks is not None:
            acks.outcome = Outcome()
            self._note(settles, group, answers, acks.outcome)
        look.left = look.left or len(asked) < len(fresh)
        for piece, cursor, batches in asked:
            look.batches, answer = batches, answers[piece.partition_id]
            if isinstance(answer, StoreUnavailable) or answer.granted is None:
                look.left = True  # the next poll leaves its shard out (R6)
                continue
            took = took_all(answer.granted, cursor, bounds[piece.partition_id])
            if took:
                self._caught_up.note(group, piece.partition_id, answer.granted.deliveries[0].last + 1)
            look.left = look.left or not took
            look.unread = True
            self._hand(handed, look, topic, group, piece, answer.granted)
            look.unread = False

    def _visit(self, group: Group, visits: Iterable[Visit]) -> dict[int, Visited | StoreUnavailable]:
        """What became of visits, by partition. It raises if none could be made."""
        made = [*visits]
        answers = self._store.progress.visit(group, made)
        away = [one for one in answers if isinstance(one, StoreUnavailable)]
        if len(away) == len(made):
            raise away[0]
        return {visit.partition_id: answer for visit, answer in zip(made, answers, strict=True)}

    def _in_turn(
        self, pieces: Sequence[Range], peeks: dict[int, Peek], held: set[int], now: int
    ) -> list[Range]:
        """Partitions as they are asked: those never polled first, since they take time, which is to be said
        before anything is granted; then those with something due, and the others in turn.

        If a repeated request's token holds something, its answer was lost: only that is handed over (I6).
        """
        ranges = rotated(pieces, self._turn) if len(pieces) > 1 else [*pieces]
        if held:
            return [r for r in ranges if r.partition_id in held]
        due = {partition_id for partition_id, peek in peeks.items() if has_due(peek, now)}
        if due or len(peeks) < len(ranges):
            ranges.sort(key=lambda r: 2 * (r.partition_id in peeks) + (r.partition_id not in due))
        return ranges

    def first_peek(self, group: Group, partition_id: int, bounds: dict[int, Bounds]) -> Peek | None:
        """Progress of a partition that was never polled is made from the group's start."""
        if bounds[partition_id].end == 0:
            return None
        try:
            self._store.progress.rewind(group, [partition_id])
        except StoreUnavailable as error:
            if not is_of_a_shard(error):
                raise
            return None  # where the group starts is not known while the first shard is away
        return self._store.progress.peek(group, [partition_id]).get(partition_id)

    def poll_partition(
        self,
        verb: PartitionPoll[A],
        group: Group,
        partition_id: int,
        bounds: Bounds,
        look: PollBudget,
        ask: Callable[[], A],
        now: int,
    ) -> Granted:
        """Ask the store for a delivery within what was read of a partition."""
        waited = _waited_ms(look.batches, now)
        while True:
            granted = verb(group, partition_id, ask(), log_start=bounds.start, waited_ms=waited)
            if not granted.unplaced or look.dead is not None:
                return granted
            look.dead = self._catalog.make_dead_letters(look.request.topic, look.request.group)
            if granted.deliveries:
                return granted  # the exhausted ones leave with the next poll

    def _hand(
        self, handed: Handed, look: PollBudget, topic: Topic, group: Group, piece: Range, granted: Granted
    ) -> None:
        handed.next_due = earlier(handed.next_due, granted.next_due)
        if granted.draining:
            handed.draining = look.full = look.alone = True  # nothing more is looked at then
        if granted.leaving:
            handed.departures.append(Departure(group, piece.partition, piece.partition_id, granted.leaving))
        if not granted.deliveries:
            return
        fits = fitted(self.read, piece.partition_id, granted.deliveries, look.batches, look.most_bytes)
        leases = tuple([Lease(d.first, d.last, d.attempt, d.alone) for d in fits.deliveries])
        grant = Grant(topic.name, piece.partition, piece.partition_id, leases, fits.batches)
        handed.grants.append(grant)
        if not granted.again:
            handed.fresh.append(Fresh(group, piece.partition_id, granted.until))
        look.spend(leases, fits.batches)
        if fits.left:
            look.full = True
            self._release(group, piece.partition_id, look.request.token, fits.left)

    def _release(self, group: Group, partition_id: int, token: int, left: Sequence[Delivery]) -> None:
        """There was no room in the answer: anybody's next poll has them, and it was no attempt."""
        now = self._store.now_ms()
        released = [Settlement(Kind.RELEASE, d.first, d.last, visible_at=now) for d in left]
        try:
            self._store.progress.settle(group, partition_id, token, released)
        except (GenerationChanged, GateClosed):
            pass  # the group was reset: nobody holds them
        except StoreError as error:
            _log.warning("messages that did not fit into an answer wait for their lease to end: %s", error)

    def read(self, partition_id: int, offset: int, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        cached = self._tail.read(partition_id, offset, max_messages=max_messages, max_bytes=max_bytes)
        if cached:
            return cached
        return self._store.log.read(partition_id, offset, max_messages=max_messages, max_bytes=max_bytes)

    def remembers(self, partition_id: int, offset: int) -> bool:
        """Return whether the message is in memory: it is read without the store."""
        return bool(self._tail.read(partition_id, offset, max_messages=1, max_bytes=1))

    def read_span(self, partition_id: int, first: int, last: int) -> list[StoredBatch]:
        """Every batch with an offset in the span."""
        return list(self.walk_span(partition_id, first, last))

    def walk_span(self, partition_id: int, first: int, last: int) -> Iterator[StoredBatch]:
        """The same, a few megabytes at a time."""
        position = first
        while position <= last:
            batches = self.read(partition_id, position, last - position + 1, _WALK_BYTES)
            if not batches:
                break
            yield from (b for b in batches if b.base_offset <= last)
            position = batches[-1].last_offset + 1

    # ---- settle ----

    def by_fresh_group(self, group: Group, verb: Callable[[Group], T]) -> tuple[Group, T]:
        """The verb's answer, and the group as it is now: what a reset left where it was is still held."""
        for _ in range(_FRESH_LOOKS):
            try:
                return group, verb(group)
            except GenerationChanged:
                self._catalog.forget()
                group = self._catalog.group(group.topic, group.name)
        return group, verb(group)

    def settle(self, topic: str, group: str, parts: Sequence[Settle]) -> Outcome:
        outcome = Outcome()
        target = self._catalog.dead_letters(topic, group)
        if target is None and "dead" in [verdict.kind for part in parts for verdict in part.verdicts]:
            target = self._catalog.make_dead_letters(topic, group)
        away: StoreUnavailable | None = None
        for some in _together(parts):
            try:
                left = self._settle(some, self._catalog.group(some[0].topic, group), target, outcome)
                if left:  # their last attempt, and there was no dead-letter topic yet
                    some = left
                    target = self._catalog.make_dead_letters(topic, group)
                    self._settle(left, self._catalog.group(some[0].topic, group), target, outcome)
            except StoreUnavailable as error:
                away = error
                outcome.away += some
                if not is_of_a_shard(error):
                    raise
        if away is not None and len(outcome.away) == len(parts):
            raise away
        return outcome

    def _settle(
        self, parts: Sequence[Settle], group: Group, target: Topic | None, outcome: Outcome
    ) -> list[Settle]:
        """Settle parts in one transaction; returns what must be settled again once there is a target."""
        settles, now = _by_partition(parts), self._store.now_ms()
        visits = [self._settling(some, group, target, now) for some in settles.values()]
        try:
            group, found = self.by_fresh_group(group, lambda known: self._visit(known, visits))
        except (GenerationChanged, GateClosed):  # the group was reset: what was held is nobody's any more
            if len(settles) > 1:  # or of some of them it is
                one_by_one = [self._settle(some, group, target, outcome) for some in settles.values()]
                return [part for left in one_by_one for part in left]
            outcome.lost += [(part, tuple((v.first, v.last) for v in part.verdicts)) for part in parts]
            return []
        return self._note(settles, group, found, outcome)

    def _settling(self, parts: Sequence[Settle], group: Group, target: Topic | None, now: int) -> Visit:
        """A visit that settles parts of one partition."""
        each = [(part.token, self._settlements(part, group, target, now)) for part in parts]
        return Visit(parts[0].partition_id, each)

    def _note(
        self,
        settles: Mapping[int, Sequence[Settle]],
        group: Group,
        answers: Mapping[int, Visited | StoreUnavailable],
        outcome: Outcome,
    ) -> list[Settle]:
        """Note what became of parts, by partition; returns what of them must be settled again."""
        left = []
        for partition_id, parts in settles.items():
            answer = answers[partition_id]
            if isinstance(answer, StoreUnavailable):
                outcome.away += parts
                continue
            for part, done in zip(parts, answer.settled, strict=True):
                again = self._settled(part, group, done, outcome)
                if again is not None:
                    left.append(again)
        return left

    def _settlements(self, part: Settle, group: Group, target: Topic | None, now: int) -> list[Settlement]:
        settlements, aside = [], None
        in_flight: Callable[[], Sequence[Delivery]] | None = None
        for verdict in part.verdicts:
            if verdict.kind == "ack" and verdict.line is None:
                settlements.append(Settlement(Kind.ACK, verdict.first, verdict.last))
                continue
            if verdict.kind == "lane":
                aside = aside or SettingAside(self._catalog, group)
                settlements.append(aside.settlement(verdict))
                continue
            _check_park(verdict, group)
            one = _settlement(verdict, now, target)
            if one.kind is not Kind.RETRY:
                settlements.append(one)
                continue
            if in_flight is None:
                in_flight = cache(partial(self._store.progress.leaving, group, part.partition_id, part.token))
            settlements += self._retries.of(one, group, part.partition_id, in_flight, now)
        return settlements

    def _settled(self, part: Settle, group: Group, done: Settled, outcome: Outcome) -> Settle | None:
        """What became of a part; returns what of it must be settled again."""
        if done.lost:
            outcome.lost.append((part, done.lost))
        if done.kept:
            outcome.kept.append((part, tuple(lease_of(d) for d in done.kept)))
        if done.leaving:
            number = self._number(part.topic, part.partition_id)
            outcome.departures.append(Departure(group, number, part.partition_id, done.leaving))
        if {v.kind for v in part.verdicts} - {"ack"} or self._is_sealed(part):
            outcome.waiting.add(group.id)
        left = _within(part.verdicts, done.unplaced) if done.unplaced else ()
        return replace(part, verdicts=left) if left else None

    def _is_sealed(self, part: Settle) -> bool:
        """Settled to its end, a sealed partition lets its successors begin (I10)."""
        sealed = self._catalog.topic(part.topic).route.sealed
        return bool(sealed) and any(piece.partition_id == part.partition_id for piece in sealed)

    def _number(self, topic: str, partition_id: int) -> int:
        ranges = self._catalog.topic(topic).route.partitions
        return next((r.partition for r in ranges if r.partition_id == partition_id), -1)


def is_of_a_shard(error: StoreUnavailable) -> bool:
    """Whether the queue has several shards, and one of them is away: the others go on (R6)."""
    return "shard" in error.details


def _together(parts: Sequence[Settle]) -> Iterator[list[Settle]]:
    """What is settled in one transaction: parts of one topic, and of no more than so many partitions."""
    by_topic: dict[str, list[Settle]] = {}
    for part in parts:
        by_topic.setdefault(part.topic, []).append(part)
    for some in by_topic.values():
        by_partition = [*_by_partition(some).values()]
        for at in range(0, len(by_partition), _TOGETHER):
            yield [part for one in by_partition[at : at + _TOGETHER] for part in one]


def _by_partition(parts: Sequence[Settle]) -> dict[int, list[Settle]]:
    """The parts of each partition, whatever polls they came from."""
    found: dict[int, list[Settle]] = {}
    for part in parts:
        found.setdefault(part.partition_id, []).append(part)
    return found


def _waited_ms(batches: Sequence[StoredBatch], now: int) -> int | None:
    """How long the first of them has waited; None: there is none."""
    return max(0, now - batches[0].appended_at) if batches else None


def _check_park(verdict: Verdict, group: Group) -> None:
    """Whoever parks names a line, and holds a partition: only in ordered groups."""
    line = verdict.line
    if verdict.kind != "park" and line is None:
        return
    if line is None or verdict.kind != "park" or group.settings.mode != "ordered" or line.first > line.last:
        raise UsageError("only the holder of a partition of an ordered group parks, and it names a line")


def _settlement(verdict: Verdict, now: int, target: Topic | None) -> Settlement:
    return Settlement(
        kind=_KINDS[verdict.kind],
        first=verdict.first,
        last=verdict.last,
        visible_at=now + verdict.delay_ms if verdict.at_ms is None else verdict.at_ms,
        reason=as_reason(verdict.reason),
        stamp=new_stamp(target),
        line=verdict.line,
        shown=isinstance(verdict, ReadRelease),
    )


def _within(verdicts: Sequence[Verdict], spans: Sequence[Span]) -> tuple[Verdict, ...]:
    """The parts of these verdicts that lie in the spans (disjoint, as settled: in none twice)."""
    if not spans:
        return ()
    asked = sorted((v for v in verdicts if v.kind != "park" and v.first <= v.last), key=lambda v: v.first)
    found: list[Verdict] = []
    at = 0
    for first, last in sorted(spans):
        while at < len(asked) and asked[at].last < first:
            at += 1
        for verdict in asked[at : bisect_right(asked, last, key=lambda v: v.first)]:
            found.append(replace(verdict, first=max(verdict.first, first), last=min(verdict.last, last)))
    return tuple(found)


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items, beginning with another one each turn."""
    at = turn % max(1, len(items))
    return [*items[at:], *items[:at]]
