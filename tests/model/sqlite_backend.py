"""A group of a topic with one partition, in a database in memory: what machines drive on SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from postroom.clock import ManualClock
from postroom.model.delivery.delivery import Delivery, Settlement, Span, Stamp
from postroom.model.messages.batch import BatchBuilder
from postroom.model.policy.settings import GroupSettings, Start, TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Appended, Backlog, Group, Settled
from postroom.store.sql.session import Area

__all__ = ["GroupOnSqlite"]

TOPIC, GROUP = "orders", "billing"
ROWS = """SELECT first_offset, last_offset, visible_at, token, holder, spent, failures, suspect, alone,
          stamp_producer, stamp_partition, reason, failing_since
          FROM postroom_deliveries ORDER BY first_offset"""


class GroupOnSqlite:
    def __init__(self, settings: GroupSettings) -> None:
        self._clock = ManualClock()
        store = open_sqlite(None, self._clock)
        assert isinstance(store, SqlStore)
        self._store = store
        self._partition = store.catalog.create_topic(TOPIC, TopicSettings(), 1).route.ranges[0].partition_id
        self._groups: dict[int, Group] = {}  # by how often it was reset, from 1 on
        self._know(store.catalog.create_group(TOPIC, GROUP, settings), 1)
        store.progress.rewind(self._group, [self._partition])

    def _know(self, group: Group, more: int = 0) -> None:
        self._group = self._groups[max(self._groups, default=0) + more] = group

    def now(self) -> int:
        return self._store.now_ms()

    def advance(self, ms: int) -> None:
        self._clock.advance(ms / 1000)

    def append(self, messages: int) -> None:
        builder = BatchBuilder()
        builder.extend(self.now(), [(None, b"x", [])] * messages)
        (appended,) = self._store.log.append([Append(self._partition, builder.build())])
        assert isinstance(appended, Appended)

    def limit(self, max_attempts: int) -> None:
        changed = replace(self._group.settings, max_attempts=max_attempts)
        self._know(self._store.catalog.alter_group(TOPIC, GROUP, changed, paused=False))

    def reset(self, offset: int) -> None:
        to = Start("offsets", offsets=((0, offset),))
        self._know(self._store.catalog.reset_group(TOPIC, GROUP, to), 1)
        self._store.progress.rewind(self._group, [self._partition])

    def settle(self, generation: int, token: int, settlements: Sequence[Settlement]) -> Settled:
        return self._store.progress.settle(self._groups[generation], self._partition, token, settlements)

    def extend(self, generation: int, token: int, spans: Sequence[Span]) -> Sequence[Span]:
        return self._store.progress.extend(self._groups[generation], self._partition, token, spans)

    def _rows(self) -> tuple[list[Delivery], Backlog]:
        """The rows themselves; and what the store says of them, which must agree."""
        (backlog,) = self._store.progress.backlog(self._group, [self._partition], open_spans=1000)
        with self._store.session.read(Area.PROGRESS) as tx:
            rows = [_delivery(row) for row in tx.all(ROWS)]
        assert list(backlog.open) == [(row.first, row.last) for row in rows]
        assert backlog.unsettled == sum(row.size for row in rows) + backlog.parked
        assert backlog.committed == self._store.progress.committed(self._group.id, self._partition)
        return rows, backlog

    def close(self) -> None:
        self._store.close()


def _delivery(row: tuple[Any, ...]) -> Delivery:
    first, last, at, token, holder, spent, failures, suspect, alone, producer, partition, *rest = row
    stamp = None if producer is None else Stamp(producer, partition)
    return Delivery(first, last, at, token, holder, spent, failures, bool(suspect), bool(alone), stamp, *rest)
