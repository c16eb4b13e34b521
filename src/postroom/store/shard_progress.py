"""Progress over several shards: it is on the shard of its partition, and members are on the first (R6).

An ordered group passes the gate into a partition when it has drained those that it follows, wherever they are
(I10): one that is away keeps the gate closed. While the first shard is away its members are taken for live,
as they were known last: they cannot say so themselves, and nobody is to take what they hold for that.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import cast

from ..errors import StoreUnavailable
from ..model.cache import make_room
from ..model.delivery import Ask, Delivery, OrderedAsk, Settlement, Span, Stamp
from ..model.parking import Line
from .contract import Backlog, Granted, Group, Member, Peek, Progress, Settled
from .joining import Guest, Joins
from .shard_database import Shard, Shards, shown

__all__ = ["ShardedProgress"]

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

    def backlog(self, group: Group, partition_ids: Sequence[int], *, open_spans: int = 0) -> list[Backlog]:
        found: dict[int, Backlog] = {}
        for shard, ids in self._shards.split(partition_ids).items():
            measured = shard.progress.backlog(group, ids, open_spans=open_spans)
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
