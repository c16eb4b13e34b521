"""Verbs over several shards: each goes where its partition is (R6).

A class here is the routing table of one part of the store: a row says by which way a verb goes. To the shard
of its partition, to those of its partitions, to all that are there, or to the first one. Only what fits no
such way is written out. Moments are counted by the first shard's clock: what a row sends to a shard, or has
as an answer, is moved by how far the two clocks are apart (`Skew`). Types are those of the contract: a verb
that has no row is an error of the type checker.

Must never be one transaction over two databases: an append to several shards is one on each, and where one of
them fails the batches meant for it have its error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from inspect import signature
from typing import Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

from ...errors import PostroomError, StoreError, StoreUnavailable, UsageError
from ...model.moves.schedule import DelayedPosition, DelayedRow
from ...model.policy.bounds import make_room
from ..contract import (
    Append,
    Appended,
    Backlog,
    Group,
    Log,
    Member,
    News,
    Progress,
    Schedule,
    SentAppend,
    Usage,
    Visit,
    Visited,
)
from ..sql.progress.user_transaction import Joins
from .shard import Shard, Shards, Skew, shown

__all__ = ["ShardedLog", "ShardedProgress", "ShardedSchedule", "ShardedUsage"]

_log = logging.getLogger("postroom.store")

P = ParamSpec("P")
R = TypeVar("R")
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

_MOST = 10_000  # groups whose members are remembered
_FAR = 2**53  # of members that cannot be asked


class _Sharded:
    """One part of a store, whose verbs are routed to the same part of its shards."""

    part: ClassVar[str]

    def __init__(self, shards: Shards, here: Shard | None = None) -> None:
        """`here`: the shard whose news and dues are told; None: those of all."""
        self._shards = shards
        self._here = here

    def _ask(self, shard: Shard, verb: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(getattr(shard, self.part), verb)(*args, **kwargs)


# ---- ways a verb may go ----

_Verb = Callable[Concatenate[Any, P], R]
_Routed = Callable[Concatenate[_Sharded, P], R]


def by_partition(
    verb: _Verb[P, R],
    *,
    sent: Mapping[str, Callable[[Skew, Any], Any]] | None = None,
    answer: Callable[[Skew, R], R] | None = None,
) -> _Routed[P, R]:
    """Route a verb to the shard of its `partition_id`.

    `sent`: arguments with moments in them, and how they are moved; `answer`: how the shard's answer is.
    """
    names = _names(verb)
    moments = sent or {}
    assert {"partition_id", *moments} <= {*names}, f"{verb.__qualname__} has other arguments"

    def run(self: _Sharded, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False), **kwargs)
        shard = self._shards.of(named["partition_id"])
        skew = self._shards.skew(shard)
        for name, there in moments.items():
            if named.get(name) is not None:
                named[name] = there(skew, named[name])
        found = self._ask(shard, verb.__name__, **named)
        return found if answer is None else answer(skew, found)

    return cast("_Routed[P, R]", wraps(verb)(run))


def by_partitions(
    verb: _Verb[P, R], merge: Callable[[Iterable[R]], R], *, answer: Callable[[Skew, R], R] | None = None
) -> _Routed[P, R]:
    """Route a verb to the shards of its `partition_ids`, to each with its own, and merge their answers."""
    names = _names(verb)
    assert "partition_ids" in names, f"{verb.__qualname__} has other arguments"

    def run(self: _Sharded, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(names, args, strict=False), **kwargs)
        found = []
        for shard, ids in self._shards.split(named["partition_ids"]).items():
            one = self._ask(shard, verb.__name__, **named | {"partition_ids": ids})
            found.append(one if answer is None else answer(self._shards.skew(shard), one))
        return merge(found)

    return cast("_Routed[P, R]", wraps(verb)(run))


def by_present(
    verb: _Verb[P, R], merge: Callable[[Iterable[R]], R], *, lenient: bool = False
) -> _Routed[P, R]:
    """Route a verb to all shards that are not away, and merge their answers.

    `lenient`: also without the answer of one that goes away just then.
    """

    def run(self: _Sharded, *args: Any, **kwargs: Any) -> Any:
        found = []
        for shard in self._shards.present():
            with suppress(*(StoreUnavailable,) if lenient else ()):
                found.append(self._ask(shard, verb.__name__, *args, **kwargs))
        return merge(found)

    return cast("_Routed[P, R]", wraps(verb)(run))


def on_first(verb: _Verb[P, R]) -> _Routed[P, R]:
    """Route a verb to the first shard, where the catalog is."""

    def run(self: _Sharded, *args: Any, **kwargs: Any) -> Any:
        return self._ask(self._shards.first, verb.__name__, *args, **kwargs)

    return cast("_Routed[P, R]", wraps(verb)(run))


def by_parts_only(verb: _Verb[P, R]) -> _Routed[P, R]:
    """Refuse a verb: each shard is worked on by itself, through its part of the store (`Store.parts`)."""

    def run(self: _Sharded, *args: Any, **kwargs: Any) -> Any:
        raise UsageError("delayed messages are moved shard by shard: ask one of the store's parts()")

    return cast("_Routed[P, R]", wraps(verb)(run))


def _names(verb: Callable[..., Any]) -> tuple[str, ...]:
    """Return the arguments of a verb of the contract, without `self`."""
    return tuple(signature(verb).parameters)[1:]


def _union(found: Iterable[dict[K, V]]) -> dict[K, V]:
    return {key: value for one in found for key, value in one.items()}


def _counts(found: Iterable[dict[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for one in found:
        total.update(one)
    return dict(total)


def _all_of(found: Iterable[set[K]]) -> set[K]:
    return {one for some in found for one in some}


def _done(found: Iterable[None]) -> None:
    return None


# ---- the tables ----


class ShardedLog(_Sharded):
    part = "log"

    read = by_partition(Log.read)
    bounds = by_partitions(Log.bounds, _union)
    removed = by_partitions(Log.removed, _union)
    hand_down = by_partition(Log.hand_down)
    stamped = by_partition(Log.stamped)
    inherit = by_partition(Log.inherit)
    offset_at = by_partition(Log.offset_at, sent={"time_ms": Skew.there})
    trim = by_partition(Log.trim)
    is_volatile = by_partition(Log.is_volatile)
    skip_lost = by_partition(Log.skip_lost)
    sweep = by_partition(Log.sweep, sent={"appended_before": Skew.there})
    expire_by_limits = by_partition(Log.expire_by_limits, sent={"before_ms": Skew.there})
    edges = by_present(Log.edges, _union, lenient=True)

    def append(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        mine_at: dict[Shard, list[int]] = {}
        for at, append in enumerate(appends):
            mine_at.setdefault(self._shards.of(append.partition_id), []).append(at)
        found: dict[int, Appended | PostroomError] = {}
        for shard, mine in mine_at.items():
            try:
                results = shard.log.append(self._shards.skew(shard).appends([appends[at] for at in mine]))
            except StoreError as error:
                if len(mine_at) == 1:
                    raise
                results = [error] * len(mine)
            found.update(zip(mine, results, strict=True))
        return [found[at] for at in range(len(appends))]

    def append_at_once(self, appends: Sequence[Append]) -> list[Appended | PostroomError] | None:
        return None  # a thread waits for each shard

    def send(self, append: Append) -> SentAppend | None:
        return None

    def seal(self, partition_id: int, batch: bytes) -> int:
        shard = self._shards.of(partition_id)
        end = shard.log.seal(partition_id, batch)
        if shard.name:
            shard.places.note_sealed(partition_id)
        return end

    def marks(self, at: Mapping[int, int]) -> dict[int, str]:
        found: dict[int, str] = {}
        for shard, ids in self._shards.split(at).items():
            found |= shard.log.marks({partition_id: at[partition_id] for partition_id in ids})
        return found

    def forget_producers(self, idle_since_ms: int, *, moving: Iterable[int] = ()) -> int:
        """All of them or none: a shard that is away may have moves under way into the others (I12)."""
        open_moves = {*moving, *(one.producer_id for one in self._shards.first.staging.unfinished())}
        for shard in self._shards.values():
            open_moves |= {move.producer_id for move in shard.schedule.moves()}
        return sum(
            shard.log.forget_producers(self._shards.skew(shard).there(idle_since_ms), moving=open_moves)
            for shard in self._shards.values()
        )

    def news(self, of: Collection[int] | None = None) -> News:
        if self._here is not None:
            return self._here.log.news(of)
        first = self._shards.first.log.news(of)
        ends, due = dict(first.ends), [] if first.next_due is None else [first.next_due]
        for shard in self._shards.others():
            if not shard.is_away:
                news = shard.log.news(of)
                ends |= news.ends
                due += [] if news.next_due is None else [news.next_due]
        return News(first.catalog_version, ends, min(due, default=None))


class ShardedSchedule(_Sharded):
    """Delayed messages wait on the shard of the partition they were sent to.

    Each shard has its own mover, which works on its part of the store.
    """

    part = "schedule"

    next_due = by_parts_only(Schedule.next_due)
    due = by_parts_only(Schedule.due)
    rows = by_parts_only(Schedule.rows)
    stamp = by_parts_only(Schedule.stamp)
    moves = by_parts_only(Schedule.moves)
    finish = by_parts_only(Schedule.finish)
    purge = by_present(Schedule.purge, sum)
    delayed = by_present(Schedule.delayed, _counts)

    def listed(
        self, topic_id: int, *, since: DelayedPosition | None = None, messages: int, max_bytes: int
    ) -> list[DelayedRow]:
        """Merged; where a shard's clock is moved meanwhile, a row may be left out or come again."""
        found: list[tuple[tuple[int, int, int], DelayedRow]] = []
        at = None if since is None else self._shards.name_of(since[1])
        passed = since is not None
        for number, shard in enumerate(self._shards.values()):
            passed = passed and shard.name != at
            if shard.is_away:
                continue
            skew = self._shards.skew(shard)
            begin = None if since is None else _begin(since, skew, passed=passed, here=shard.name == at)
            with suppress(StoreUnavailable):
                rows = shard.schedule.listed(topic_id, since=begin, messages=messages, max_bytes=max_bytes)
                for row in rows:
                    moved = replace(row, due_at=skew.here(row.due_at)) if skew else row
                    found.append(((moved.due_at, number, row.id), moved))
        return _first_of([row for _, row in sorted(found, key=lambda one: one[0])], messages, max_bytes)

    def cancel(self, topic_id: int, digest: bytes) -> bool:
        """On every shard: a message stays where it was sent to when its partition moves."""
        found = sum([shard.schedule.cancel(topic_id, digest) for shard in self._shards.present()])
        away = [shard for shard in self._shards.values() if shard.is_away]
        if not found and away:
            return away[0].schedule.cancel(topic_id, digest)  # says that it is away
        return found > 0


def _begin(since: DelayedPosition, skew: Skew, *, passed: bool, here: bool) -> DelayedPosition:
    """Return where a shard goes on: at the row itself, or with that moment, or (`passed`) behind it."""
    due_at, partition_id, row_id = since
    if here:
        return skew.there(due_at), partition_id, row_id
    return skew.there(due_at) + passed, 0, 0


def _first_of(rows: Sequence[DelayedRow], messages: int, max_bytes: int) -> list[DelayedRow]:
    """Return as many as fit, but one if there is any."""
    found: list[DelayedRow] = []
    for row in rows:
        messages -= row.records
        max_bytes -= len(row.batch)
        if found and (messages < 0 or max_bytes < 0):
            break
        found.append(row)
    return found


class ShardedUsage(_Sharded):
    """Who uses groups is known on the first shard, how far they are on the partition's own."""

    part = "usage"

    touch = on_first(Usage.touch)
    seen = on_first(Usage.seen)
    retire = on_first(Usage.retire)
    marks = by_present(Usage.marks, _union, lenient=True)

    def committed(self, groups: Sequence[Group], partition_ids: Sequence[int]) -> dict[int, dict[int, int]]:
        found: dict[int, dict[int, int]] = {group.id: {} for group in groups}
        for shard, ids in self._shards.split(partition_ids).items():
            for group_id, offsets in shard.usage.committed(groups, ids).items():
                found[group_id] |= offsets
        return found

    def bytes_from(self, positions: Sequence[Mapping[int, int]]) -> list[int]:
        total = [0] * len(positions)
        wanted = dict.fromkeys(partition_id for position in positions for partition_id in position)
        for shard, ids in self._shards.split(wanted).items():
            mine = [{place: position[place] for place in ids if place in position} for position in positions]
            total = [a + b for a, b in zip(total, shard.usage.bytes_from(mine), strict=True)]
        return total


class ShardedProgress(_Sharded):
    """Progress is on the shard of its partition, and members are on the first (R6).

    An ordered group passes the gate into a partition when it has drained those that it follows, wherever they
    are (I10): one that is away keeps the gate closed. While the first shard is away its members are taken for
    live, as they were known last: they cannot say so themselves, and nobody is to take what they hold for
    that.
    """

    part = "progress"

    def __init__(self, shards: Shards, here: Shard | None = None) -> None:
        super().__init__(shards, here)
        self._started: dict[str, int] = {}
        self._members: dict[int, list[Member]] = {}

    # in one partition
    poll = by_partition(Progress.poll, answer=Skew.granted)
    poll_ordered = by_partition(Progress.poll_ordered, answer=Skew.granted)
    settle = by_partition(Progress.settle, sent={"settlements": Skew.settlements}, answer=Skew.settled)
    ack_within = by_partition(Joins.ack_within)
    extend = by_partition(Progress.extend)
    give_back = by_partition(Progress.give_back)
    hand_over = by_partition(Progress.hand_over)
    lines = by_partition(Progress.lines)
    unpark = by_partition(Progress.unpark, answer=Skew.granted)
    stopped = by_partition(Progress.stopped, answer=Skew.stopped)
    restart_stopped = by_partition(Progress.restart_stopped)
    skip_stopped = by_partition(Progress.skip_stopped, answer=Skew.deliveries)
    drop_stopped = by_partition(Progress.drop_stopped)
    drain = by_partition(Progress.drain)
    restamp = by_partition(
        Progress.restamp, sent={"leaving": Skew.delivery_there}, answer=Skew.delivery_or_none
    )
    leaving = by_partition(Progress.leaving, answer=Skew.delivery_list)
    seize = by_partition(Progress.seize)
    committed = by_partition(Progress.committed)

    # in many
    peek = by_partitions(Progress.peek, _union, answer=Skew.peeks)
    fence = by_partitions(Progress.fence, _done)
    rewind = by_partitions(Progress.rewind, _done)
    held_by = by_present(Progress.held_by, _all_of)

    # members
    join = on_first(Progress.join)
    renew_each = on_first(Progress.renew_each)
    leave = on_first(Progress.leave)
    members_of = on_first(Progress.members_of)
    forget_dead = on_first(Progress.forget_dead)

    def visit(self, group: Group, visits: Sequence[Visit]) -> list[Visited | StoreUnavailable]:
        found: dict[int, Visited | StoreUnavailable] = {}
        split = self._shards.split([visit.partition_id for visit in visits])
        for shard, ids in split.items():
            skew, here = self._shards.skew(shard), {*ids}
            some = [skew.visit(visit) for visit in visits if visit.partition_id in here]
            try:
                answers = list(map(skew.visited, shard.progress.visit(group, some)))
            except StoreUnavailable as error:
                if len(split) == 1:
                    raise
                answers = [error] * len(some)
            found.update(zip(ids, answers, strict=True))
        return [found[visit.partition_id] for visit in visits]

    def is_drained(self, group: Group, partition_id: int) -> bool:
        """For the gate: what is away is not drained as far as anybody knows."""
        try:
            return self.drain(group, partition_id)
        except StoreUnavailable:
            return False

    def dues(self, of: Collection[int] | None = None) -> dict[int, int]:
        found: dict[int, int] = {}
        for shard in self._shards.present() if self._here is None else [self._here]:
            skew = self._shards.skew(shard)
            for group_id, due in shard.progress.dues(of).items():
                found[group_id] = min(skew.here(due), found.get(group_id, skew.here(due)))
        return found

    def started_ms(self) -> int:
        """Another number whenever one of them was started again; of one that is away, as it was known."""
        for shard in self._shards.present():
            try:
                self._started[shard.name] = shard.progress.started_ms()
            except StoreUnavailable:
                pass  # it has just gone away
        return sum(self._started.values())

    def backlog(
        self, group: Group, partition_ids: Sequence[int], *, open_spans: int = 0, open_from: int = 0
    ) -> list[Backlog]:
        found: dict[int, Backlog] = {}
        for shard, ids in self._shards.split(partition_ids).items():
            measured = shard.progress.backlog(group, ids, open_spans=open_spans, open_from=open_from)
            found |= {one.partition_id: one for one in measured}
        return [found[partition_id] for partition_id in partition_ids]

    def cut_leases(self, group: Group, partition_ids: Sequence[int]) -> int:
        """Also on the first shard, where members are."""
        self._shards.first.progress.cut_leases(group, ())
        return sum(
            shard.progress.cut_leases(group, ids) for shard, ids in self._shards.split(partition_ids).items()
        )

    def forget(self, group_id: int) -> None:
        """Forget a group. What a shard that is away keeps of it harms nobody: no group gets that id again."""
        for shard in self._shards.values():
            try:
                shard.progress.forget(group_id)
            except StoreUnavailable as error:
                if not shard.name:
                    raise
                _log.warning("shard %r keeps the progress of a deleted group: %s", shown(shard.name), error)

    def members(self, group_id: int) -> list[Member]:
        try:
            found = self._shards.first.progress.members(group_id)
            make_room(self._members, _MOST)
            self._members[group_id] = found
        except StoreUnavailable:
            if group_id not in self._members:
                raise
            return [replace(member, until=_FAR) for member in self._members[group_id]]
        return found
