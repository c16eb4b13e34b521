"""The engine of moves: rows that were stamped become batches of partitions' logs (I12).

What is due leaves the schedule, and what was decided leaves the staging, by the same three steps: a stamp
says, durably, which rows go where under which identity and sequences; then they are appended, here; then rows
and stamp are removed. Whoever resumes a move repeats its stamp: the same rows give the same batches, and a
partition knows by their sequences what it has already, so nothing is lost or stored twice.

Must never decide when a move is begun, or what becomes of a partition that takes nothing: its source does.
Blocking; used by one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...errors import (
    PartitionSealed,
    PostroomError,
    SequenceGap,
    StoreUnavailable,
    UnknownPartition,
    UnknownProducer,
)
from ...model.messages.batch import read_header, with_base_offset
from ...model.moves import schedule
from ...model.moves.schedule import DelayedRow, Opening, Planned
from ...store.contract import Append, Appended, Finished, Store, StoredBatch, Topic

__all__ = ["Carried", "MoveEngine", "Moved"]

Moved = Callable[[Sequence[tuple[int, StoredBatch]]], None]
"""Is told what was stored: partition id and batch."""

_NOT_STORED = (PartitionSealed, UnknownPartition, SequenceGap, UnknownProducer)


@dataclass(frozen=True, slots=True)
class Carried:
    """What became of a move."""

    batches: tuple[tuple[Planned, Appended | PostroomError], ...]
    finished: Finished  # what the third step is to do

    @property
    def refused(self) -> list[Planned]:
        return [planned for planned, result in self.batches if not isinstance(result, Appended)]


class MoveEngine:
    def __init__(self, store: Store, moved: Moved) -> None:
        self._store, self._moved = store, moved
        self.topics: Mapping[int, Topic] = {}
        self.routes_are_old = True

    def know_topics(self, rows: Iterable[DelayedRow] = ()) -> None:
        """Read the topics if one of these rows is of another, or if routes may have changed since."""
        missing = any(row.topic_id not in self.topics for row in rows)
        if not missing and not self.routes_are_old:
            return
        try:
            self.topics = {topic.id: topic for topic in self._store.catalog.topics()}
            self.routes_are_old = False
        except StoreUnavailable:
            if missing:
                raise  # and else the last route is good enough

    def plan(
        self, rows: Sequence[DelayedRow], sequences: Mapping[int, int], opening: Opening
    ) -> tuple[Planned, ...]:
        """Batches for as many of these rows as fit; all are of topics that are known."""
        routes = {row.topic_id: self.topics[row.topic_id].route for row in rows}
        return tuple(schedule.plan(rows, routes, sequences, opening))

    def carry_out(
        self,
        move_id: int | None,
        planned: Sequence[Planned],
        rows: Mapping[int, DelayedRow],
        producer_id: int,
        opening: Opening,
        *,
        with_ids: bool = False,
    ) -> Carried:
        """Append what was planned. Raises what does not say whether a batch is stored."""
        appends = [
            Append(
                one.partition_id,
                schedule.build(one, rows, producer_id, opening),
                ids=self._ids(one, rows) if with_ids else b"",
            )
            for one in planned
        ]
        results = self._store.log.append(appends) if appends else []
        for result in results:
            if isinstance(result, PostroomError) and not isinstance(result, _NOT_STORED):
                raise result
        stored = [isinstance(result, Appended) for result in results]
        self._moved([_stored(a, r) for a, r in zip(appends, results, strict=True) if isinstance(r, Appended)])
        whole, partly = schedule.moved_rows(planned, stored)
        left = tuple(schedule.left_of(rows[row_id], places) for row_id, places in partly.items())
        messages = schedule.leaving(rows, whole, partly)
        finished = Finished(move_id, frozenset(whole), left, messages)
        return Carried(tuple(zip(planned, results, strict=True)), finished)

    def _ids(self, planned: Planned, rows: Mapping[int, DelayedRow]) -> bytes:
        """For topics that look at ids. The due append itself does not look at them again (I13)."""
        topic = self.topics.get(rows[planned.parts[0].row].topic_id)
        return schedule.ids_of(planned, rows) if topic is not None and topic.settings.dedup_ms else b""


def _stored(append: Append, appended: Appended) -> tuple[int, StoredBatch]:
    data = with_base_offset(append.batch, appended.base_offset)
    count = read_header(append.batch).records
    return append.partition_id, StoredBatch(appended.base_offset, count, appended.appended_at, data)
