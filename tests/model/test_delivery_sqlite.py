"""The delivery machine through the store: the same rules, on SQLite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from penstock.clock import ManualClock
from penstock.model.batch import BatchBuilder
from penstock.model.delivery import Ask, Delivery, Kind, Settlement, Span, Stamp
from penstock.model.settings import GroupSettings, Start, TopicSettings
from penstock.store import SqlStore, open_sqlite
from penstock.store.contract import Append, Appended, Granted, Group, Settled
from penstock.store.session import Lane
from tests.model.delivery_machine import Backend, DeliveryMachine, Picture
from tests.model.naive_progress import LEASE_MS

TOPIC, GROUP = "orders", "billing"
ROWS = """SELECT first_offset, last_offset, visible_at, token, holder, spent, failures, suspect, alone,
          stamp_producer, stamp_partition, reason FROM penstock_deliveries ORDER BY first_offset"""


class SqliteBackend:
    """A group of a topic with one partition, in a database in memory."""

    def __init__(self, max_attempts: int) -> None:
        self._clock = ManualClock()
        store = open_sqlite(None, self._clock)
        assert isinstance(store, SqlStore)
        self._store = store
        self._partition = store.catalog.create_topic(TOPIC, TopicSettings(), 1).route.ranges[0].partition_id
        settings = GroupSettings(lease_ms=LEASE_MS, max_attempts=max_attempts)
        self._groups: dict[int, Group] = {}
        self._know(store.catalog.create_group(TOPIC, GROUP, settings))
        store.progress.rewind(self._group, [self._partition])

    def _know(self, group: Group) -> None:
        self._group = self._groups[group.generation] = group

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
        self._know(self._store.catalog.reset_group(TOPIC, GROUP, Start("offsets", offsets=((0, offset),))))
        self._store.progress.rewind(self._group, [self._partition])

    def poll(self, generation: int, ask: Ask) -> Granted:
        return self._store.progress.poll(self._groups[generation], self._partition, ask)

    def seize(self, generation: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        return self._store.progress.seize(self._groups[generation], self._partition, ask, spans)

    def settle(self, generation: int, token: int, settlements: Sequence[Settlement]) -> Settled:
        return self._store.progress.settle(self._groups[generation], self._partition, token, settlements)

    def extend(self, generation: int, token: int, spans: Sequence[Span]) -> Sequence[Span]:
        return self._store.progress.extend(self._groups[generation], self._partition, token, spans)

    def finish_move(self, generation: int, moving: Delivery) -> None:
        self.settle(generation, moving.token, [Settlement(Kind.ACK, moving.first, moving.last)])

    def picture(self) -> Picture:
        """From the rows themselves; and what the store says of them must agree."""
        (backlog,) = self._store.progress.backlog(self._group, [self._partition], open_spans=1000)
        with self._store.session.read(Lane.PROGRESS) as tx:
            rows = [_delivery(row) for row in tx.all(ROWS)]
        assert list(backlog.open) == [(row.first, row.last) for row in rows]
        assert backlog.unsettled == sum(row.size for row in rows)
        assert backlog.committed == self._store.progress.committed(self._group.id, self._partition)
        hint = self._store.progress.peek(self._group, [self._partition])[self._partition]
        assert hint.cursor == backlog.cursor
        assert hint.next_due == min((row.visible_at for row in rows), default=None)
        return Picture(backlog.cursor, backlog.end, backlog.committed, rows)

    def close(self) -> None:
        self._store.close()


def _delivery(row: tuple[Any, ...]) -> Delivery:
    first, last, at, token, holder, spent, failures, suspect, alone, producer, partition, reason = row
    stamp = None if producer is None else Stamp(producer, partition)
    flags = bool(suspect), bool(alone)
    return Delivery(first, last, at, token, holder, spent, failures, *flags, stamp, reason)


class SqliteMachine(DeliveryMachine):
    backend_class: ClassVar[Callable[[int], Backend]] = SqliteBackend


TestSqliteMachine = pytest.mark.timeout(120)(SqliteMachine.TestCase)
TestSqliteMachine.settings = settings(max_examples=250, stateful_step_count=50, deadline=None)
