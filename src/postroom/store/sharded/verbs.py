"""Logs, the schedule and usage over several shards: each verb goes where its partition is (R6).

A verb over many partitions is split by shard, and its answers are put together. Must never be one transaction
over two databases: an append to several shards is one on each, and where one of them fails the batches meant
for it have its error.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import cast

from ...errors import PostroomError, StoreError, StoreUnavailable, UsageError
from ...model.delivery.delivery import Ask, Delivery, Line, OrderedAsk, Settlement, Span, Stamp
from ...model.moves.schedule import DelayedRow
from ...model.policy.bounds import make_room
from ..contract import (
    Append,
    Appended,
    Backlog,
    Bounds,
    Finished,
    Granted,
    Group,
    Member,
    Move,
    News,
    Peek,
    Progress,
    Settled,
    StoredBatch,
)
from ..sql.progress.user_transaction import Guest, Joins
from .shard import Shard, Shards, shown

__all__ = ["ShardedLog", "ShardedProgress", "ShardedSchedule", "ShardedUsage"]


class ShardedLog:
    """`here`: the shard whose news are told; None: those of all."""

    def __init__(self, shards: Shards, here: Shard | None = None) -> None:
        self._shards = shards
        self._here = here

    def append(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        places: dict[Shard, list[int]] = {}
        for at, append in enumerate(appends):
            places.setdefault(self._shards.of(append.partition_id), []).append(at)
        found: dict[int, Appended | PostroomError] = {}
        for shard, mine in places.items():
            try:
                results = shard.log.append(self._shards.skew(shard).appends([appends[at] for at in mine]))
            except StoreError as error:
                if len(places) == 1:
                    raise
                results = [error] * len(mine)
            found.update(zip(mine, results, strict=True))
        return [found[at] for at in range(len(appends))]

    def seal(self, partition_id: int, batch: bytes) -> int:
        shard = self._shards.of(partition_id)
        end = shard.log.seal(partition_id, batch)
        if shard.name:
            shard.places.note_sealed(partition_id)
        return end

    def read(self, partition_id: int, offset: int, *, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        log = self._shards.of(partition_id).log
        return log.read(partition_id, offset, max_messages=max_messages, max_bytes=max_bytes)

    def bounds(self, partition_ids: Iterable[int]) -> dict[int, Bounds]:
        found: dict[int, Bounds] = {}
        for shard, ids in self._shards.split(partition_ids).items():
            found |= shard.log.bounds(ids)
        return found

    def marks(self, at: Mapping[int, int]) -> dict[int, str]:
        found: dict[int, str] = {}
        for shard, ids in self._shards.split(at).items():
            found |= shard.log.marks({partition_id: at[partition_id] for partition_id in ids})
        return found

    def removed(self, partition_ids: Collection[int]) -> dict[int, int]:
        found: dict[int, int] = {}
        for shard, ids in self._shards.split(partition_ids).items():
            found |= shard.log.removed(ids)
        return found

    def offset_at(self, partition_id: int, time_ms: int) -> int:
        shard = self._shards.of(partition_id)
        return shard.log.offset_at(partition_id, self._shards.skew(shard).there(time_ms))

    def trim(self, partition_id: int, below: int) -> int:
        return self._shards.of(partition_id).log.trim(partition_id, below)

    def is_volatile(self, partition_id: int) -> bool:
        return self._shards.of(partition_id).log.is_volatile(partition_id)

    def skip_lost(self, partition_id: int) -> int:
        return self._shards.of(partition_id).log.skip_lost(partition_id)

    def sweep(self, partition_id: int, *, rows: int, appended_before: int | None = None) -> int:
        shard = self._shards.of(partition_id)
        before = None if appended_before is None else self._shards.skew(shard).there(appended_before)
        return shard.log.sweep(partition_id, rows=rows, appended_before=before)

    def expire_by_limits(self, partition_id: int, *, before_ms: int, keep_bytes: int) -> int:
        shard = self._shards.of(partition_id)
        before_ms = self._shards.skew(shard).there(before_ms)
        return shard.log.expire_by_limits(partition_id, before_ms=before_ms, keep_bytes=keep_bytes)

    def forget_producers(self, idle_since_ms: int, *, moving: Iterable[int] = ()) -> int:
        """All of them or none: a shard that is away may have moves under way into the others (I12)."""
        open_moves = {*moving, *(one.producer_id for one in self._shards.first.staging.unfinished())}
        for shard in self._shards.values():
            open_moves |= {move.producer_id for move in shard.schedule.moves()}
        return sum(
            shard.log.forget_producers(self._shards.skew(shard).there(idle_since_ms), moving=open_moves)
            for shard in self._shards.values()
        )

    def edges(
        self, partition_ids: Collection[int] | None = None, *, sealed: bool = False
    ) -> dict[int, Bounds]:
        found: dict[int, Bounds] = {}
        for shard in self._shards.present():
            with suppress(StoreUnavailable):  # it has just gone away
                found |= shard.log.edges(partition_ids, sealed=sealed)
        return found

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


class ShardedSchedule:
    """Delayed messages wait on the shard of the partition they were sent to.

    Each shard has its own mover, which works on its part of the store (`Store.parts`).
    """

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def next_due(self, *, since: int = 0, without: Collection[int] = ()) -> int | None:
        raise _ask_parts()

    def due(
        self,
        *,
        messages: int,
        max_bytes: int,
        since: int = 0,
        without: Collection[int] = (),
        skip: Collection[int] = (),
    ) -> list[DelayedRow]:
        raise _ask_parts()

    def rows(self, ids: Iterable[int]) -> dict[int, DelayedRow]:
        raise _ask_parts()

    def stamp(
        self, holder: str, move: Move, rows: Iterable[DelayedRow], before: Finished | None = None
    ) -> bool:
        raise _ask_parts()

    def moves(self) -> list[Move]:
        raise _ask_parts()

    def finish(self, holder: str, finished: Finished) -> None:
        raise _ask_parts()

    def cancel(self, topic_id: int, digest: bytes) -> bool:
        """On every shard: a message stays where it was sent to when its partition moves."""
        found = sum([shard.schedule.cancel(topic_id, digest) for shard in self._shards.present()])
        away = [shard for shard in self._shards.values() if shard.is_away]
        if not found and away:
            return away[0].schedule.cancel(topic_id, digest)  # says that it is away
        return found > 0

    def purge(self, topic_id: int) -> int:
        return sum(shard.schedule.purge(topic_id) for shard in self._shards.present())

    def delayed(self) -> dict[int, int]:
        """What waits on a shard that is away is not counted."""
        found: Counter[int] = Counter()
        for shard in self._shards.present():
            found.update(shard.schedule.delayed())
        return dict(found)


def _ask_parts() -> UsageError:
    return UsageError("delayed messages are moved shard by shard: ask one of the store's parts()")


class ShardedUsage:
    """Who uses groups is known on the first shard, how far they are on the partition's own."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def touch(self, group_id: int) -> bool:
        return self._shards.first.usage.touch(group_id)

    def seen(self, of: Collection[int] | None = None) -> dict[int, int]:
        return self._shards.first.usage.seen(of)

    def retire(self, group_id: int, idle_ms: int) -> bool:
        return self._shards.first.usage.retire(group_id, idle_ms)

    def marks(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for shard in self._shards.present():
            with suppress(StoreUnavailable):  # likewise
                found |= shard.usage.marks()
        return found

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


# ---- shard progress ----
# Progress over several shards: it is on the shard of its partition, and members are on the first (R6).
#
# An ordered group passes the gate into a partition when it has drained those that it follows, wherever
# they are (I10): one that is away keeps the gate closed. While the first shard is away its members are
# taken for live, as they were known last: they cannot say so themselves, and nobody is to take what they
# hold for that.

_log = logging.getLogger("postroom.store")

_MOST = 10_000  # groups whose members are remembered
_FAR = 2**53  # of members that cannot be asked


class ShardedProgress:
    """`here`: the shard whose dues are told; None: those of all."""

    def __init__(self, shards: Shards, here: Shard | None = None) -> None:
        self._shards = shards
        self._here = here
        self._started: dict[str, int] = {}
        self._members: dict[int, list[Member]] = {}

    def _of(self, partition_id: int) -> Progress:
        return self._shards.of(partition_id).progress

    # ---- over many ----

    def peek(self, group: Group, partition_ids: Sequence[int]) -> dict[int, Peek]:
        found: dict[int, Peek] = {}
        for shard, ids in self._shards.split(partition_ids).items():
            skew = self._shards.skew(shard)
            found |= {one: skew.peek(peek) for one, peek in shard.progress.peek(group, ids).items()}
        return found

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

    def held_by(self, group_id: int, token: int) -> set[int]:
        return set().union(*(s.progress.held_by(group_id, token) for s in self._shards.present()))

    def backlog(
        self, group: Group, partition_ids: Sequence[int], *, open_spans: int = 0, open_from: int = 0
    ) -> list[Backlog]:
        found: dict[int, Backlog] = {}
        for shard, ids in self._shards.split(partition_ids).items():
            measured = shard.progress.backlog(group, ids, open_spans=open_spans, open_from=open_from)
            found |= {one.partition_id: one for one in measured}
        return [found[partition_id] for partition_id in partition_ids]

    def fence(self, group: Group, partition_ids: Sequence[int]) -> None:
        for shard, ids in self._shards.split(partition_ids).items():
            shard.progress.fence(group, ids)

    def rewind(self, group: Group, partition_ids: Sequence[int]) -> None:
        for shard, ids in self._shards.split(partition_ids).items():
            shard.progress.rewind(group, ids)

    def cut_leases(self, group: Group, partition_ids: Sequence[int]) -> int:
        """Also on the first shard, where members are."""
        self._shards.first.progress.cut_leases(group, ())
        return sum(
            shard.progress.cut_leases(group, ids) for shard, ids in self._shards.split(partition_ids).items()
        )

    def forget(self, group_id: int) -> None:
        """What a shard that is away keeps of it harms nobody: no group gets that id again."""
        for shard in self._shards.values():
            try:
                shard.progress.forget(group_id)
            except StoreUnavailable as error:
                if not shard.name:
                    raise
                _log.warning("shard %r keeps the progress of a deleted group: %s", shown(shard.name), error)

    # ---- in one partition ----

    def poll(
        self, group: Group, partition_id: int, ask: Ask, *, log_start: int = 0, waited_ms: int | None = None
    ) -> Granted:
        shard = self._shards.of(partition_id)
        found = shard.progress.poll(group, partition_id, ask, log_start=log_start, waited_ms=waited_ms)
        return self._shards.skew(shard).granted(found)

    def poll_ordered(
        self,
        group: Group,
        partition_id: int,
        ask: OrderedAsk,
        *,
        log_start: int = 0,
        waited_ms: int | None = None,
    ) -> Granted:
        shard = self._shards.of(partition_id)
        found = shard.progress.poll_ordered(
            group, partition_id, ask, log_start=log_start, waited_ms=waited_ms
        )
        return self._shards.skew(shard).granted(found)

    def settle(
        self, group: Group, partition_id: int, token: int, settlements: Sequence[Settlement]
    ) -> Settled:
        return self.settle_each(group, partition_id, [(token, settlements)])[0]

    def settle_each(
        self, group: Group, partition_id: int, each: Sequence[tuple[int, Sequence[Settlement]]]
    ) -> list[Settled]:
        shard = self._shards.of(partition_id)
        skew = self._shards.skew(shard)
        by_token = [(token, skew.settlements(settlements)) for token, settlements in each]
        return [skew.settled(done) for done in shard.progress.settle_each(group, partition_id, by_token)]

    def ack_within(self, guest: Guest, group: Group, partition_id: int, token: int, offset: int) -> bool:
        found = cast(Joins, self._of(partition_id))  # shards are SQL databases
        return found.ack_within(guest, group, partition_id, token, offset)

    def extend(self, group: Group, partition_id: int, token: int, spans: Sequence[Span]) -> tuple[Span, ...]:
        return self._of(partition_id).extend(group, partition_id, token, spans)

    def give_back(self, group: Group, partition_id: int, token: int, until: int) -> int:
        return self._of(partition_id).give_back(group, partition_id, token, until)

    def hand_over(self, group: Group, partition_id: int, token: int) -> None:
        self._of(partition_id).hand_over(group, partition_id, token)

    def lines(self, group: Group, partition_id: int) -> list[Line]:
        return self._of(partition_id).lines(group, partition_id)

    def unpark(
        self,
        group: Group,
        partition_id: int,
        token: int,
        member: str,
        line_id: int,
        spans: Sequence[Span],
        upto: int,
        *,
        on_delivery: bool = False,
    ) -> Granted:
        shard = self._shards.of(partition_id)
        found = shard.progress.unpark(
            group, partition_id, token, member, line_id, spans, upto, on_delivery=on_delivery
        )
        return self._shards.skew(shard).granted(found)

    def stopped(self, group: Group, partition_id: int, *, limit: int, after: int = -1) -> list[Delivery]:
        shard = self._shards.of(partition_id)
        skew = self._shards.skew(shard)
        found = shard.progress.stopped(group, partition_id, limit=limit, after=after)
        return [replace(one, failing_since=skew.here(one.failing_since)) for one in found]

    def restart_stopped(self, group: Group, partition_id: int, spans: Sequence[Span] | None = None) -> int:
        return self._of(partition_id).restart_stopped(group, partition_id, spans)

    def skip_stopped(
        self, group: Group, partition_id: int, stamp: Stamp, spans: Sequence[Span] | None = None
    ) -> tuple[Delivery, ...]:
        shard = self._shards.of(partition_id)
        skew = self._shards.skew(shard)
        return tuple(map(skew.delivery, shard.progress.skip_stopped(group, partition_id, stamp, spans)))

    def drop_stopped(self, group: Group, partition_id: int, spans: Sequence[Span] | None = None) -> int:
        return self._of(partition_id).drop_stopped(group, partition_id, spans)

    def drain(self, group: Group, partition_id: int) -> bool:
        return self._of(partition_id).drain(group, partition_id)

    def is_drained(self, group: Group, partition_id: int) -> bool:
        """For the gate: what is away is not drained as far as anybody knows."""
        try:
            return self.drain(group, partition_id)
        except StoreUnavailable:
            return False

    def restamp(self, group: Group, partition_id: int, leaving: Delivery, stamp: Stamp) -> Delivery | None:
        shard = self._shards.of(partition_id)
        skew = self._shards.skew(shard)
        found = shard.progress.restamp(group, partition_id, skew.delivery_there(leaving), stamp)
        return None if found is None else skew.delivery(found)

    def leaving(self, group: Group, partition_id: int, token: int) -> list[Delivery]:
        shard = self._shards.of(partition_id)
        skew = self._shards.skew(shard)
        return [skew.delivery(found) for found in shard.progress.leaving(group, partition_id, token)]

    def seize(self, group: Group, partition_id: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        return self._of(partition_id).seize(group, partition_id, ask, spans)

    def committed(self, group_id: int, partition_id: int) -> int | None:
        return self._of(partition_id).committed(group_id, partition_id)

    # ---- members ----

    def join(self, group_id: int, member: str, client: str, ttl_ms: int) -> None:
        self._shards.first.progress.join(group_id, member, client, ttl_ms)

    def renew_each(self, members: Sequence[tuple[int, str, int]]) -> list[tuple[int, str]]:
        return self._shards.first.progress.renew_each(members)

    def leave(self, group_id: int, member: str) -> None:
        self._shards.first.progress.leave(group_id, member)

    def members_of(self, group_ids: Collection[int]) -> dict[int, list[Member]]:
        return self._shards.first.progress.members_of(group_ids)

    def forget_dead(self, since_ms: int) -> int:
        return self._shards.first.progress.forget_dead(since_ms)

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
