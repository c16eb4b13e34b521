"""Logs, the schedule and usage over several shards: each verb goes where its partition is (R6).

A verb over many partitions is split by shard, and its answers are put together. Must never be one transaction
over two databases: an append to several shards is one on each, and where one of them fails the batches meant
for it have its error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress

from ..errors import PostroomError, StoreError, StoreUnavailable, UsageError
from ..model.schedule import Waiting
from .contract import Append, Appended, Bounds, Finished, Group, Move, News, StoredBatch
from .shard_database import Shard, Shards

__all__ = ["ShardedLog", "ShardedSchedule", "ShardedUsage"]


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
    ) -> list[Waiting]:
        raise _ask_parts()

    def rows(self, ids: Iterable[int]) -> dict[int, Waiting]:
        raise _ask_parts()

    def stamp(self, holder: str, move: Move, rows: Iterable[Waiting], before: Finished | None = None) -> bool:
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
