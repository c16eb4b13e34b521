"""The ordered machine through the store: the same rules, on SQLite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import settings

from penstock.clock import ManualClock
from penstock.model.batch import BatchBuilder
from penstock.model.delivery import Delivery, Holder, OrderedAsk, Settlement, Span, Stamp
from penstock.model.settings import GroupSettings, Start, TopicSettings
from penstock.store import SqlStore, open_sqlite
from penstock.store.contract import Append, Appended, Granted, Group, Settled
from penstock.store.session import Lane
from tests.model.ordered_machine import Backend, OrderedMachine
from tests.model.ordered_rules import FAR, LEASE_MS, MAX_HOLD_MS, Picture

TOPIC, GROUP = "orders", "billing"
ROWS = """SELECT first_offset, last_offset, visible_at, token, holder, spent, failures, suspect, alone,
          stamp_producer, stamp_partition, reason, failing_since
          FROM penstock_deliveries ORDER BY first_offset"""
PROGRESS = """SELECT next_new, lowest, next_due, deliveries, settled, holder_token, holder, holder_until
              FROM penstock_progress"""


class SqliteBackend:
    """A group of a topic with one partition, in a database in memory."""

    def __init__(self, max_attempts: int, stop: bool) -> None:
        self._clock = ManualClock()
        store = open_sqlite(None, self._clock)
        assert isinstance(store, SqlStore)
        self._store = store
        self._started = 0
        store.session.dialect.started_ms = lambda connection: self._started  # type: ignore[method-assign]
        self._partition = store.catalog.create_topic(TOPIC, TopicSettings(), 1).route.ranges[0].partition_id
        settings = GroupSettings(
            mode="ordered",
            lease_ms=LEASE_MS,
            max_attempts=max_attempts,
            exhausted="stop" if stop else "dead",
            max_hold_ms=MAX_HOLD_MS,
        )
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

    def restart_server(self) -> None:
        self._started = self.now()

    def poll(self, generation: int, ask: OrderedAsk) -> Granted:
        return self._store.progress.poll_ordered(self._groups[generation], self._partition, ask)

    def settle(self, generation: int, token: int, settlements: Sequence[Settlement]) -> Settled:
        return self._store.progress.settle(self._groups[generation], self._partition, token, settlements)

    def extend(self, generation: int, token: int, spans: Sequence[Span]) -> Sequence[Span]:
        return self._store.progress.extend(self._groups[generation], self._partition, token, spans)

    def hand_over(self, generation: int, token: int) -> None:
        self._store.progress.hand_over(self._groups[generation], self._partition, token)

    def restart_stopped(self, generation: int) -> int:
        return self._store.progress.restart_stopped(self._groups[generation], self._partition)

    def picture(self) -> Picture:
        """From the rows themselves; and what the store says of them must agree."""
        (backlog,) = self._store.progress.backlog(self._group, [self._partition], open_spans=1000)
        with self._store.session.read(Lane.PROGRESS) as tx:
            rows = [_delivery(row) for row in tx.all(ROWS)]
            (progress,) = tx.all(PROGRESS)
        cursor, lowest, due, deliveries, settled, *holder = progress
        assert deliveries == len(rows)
        assert list(backlog.open) == [(row.first, row.last) for row in rows]
        assert backlog.unsettled == sum(row.size for row in rows)
        assert backlog.stopped == sum(row.size for row in rows if row.visible_at == FAR)
        committed = self._store.progress.committed(self._group.id, self._partition)
        assert lowest == committed == backlog.committed == min((row.first for row in rows), default=cursor)
        stamped = [row.visible_at for row in rows if row.stamp is not None]
        assert not stamped or due <= min(stamped), "a stamped delivery would not be found"
        hint = self._store.progress.peek(self._group, [self._partition])[self._partition]
        assert (hint.cursor, hint.next_due, hint.holder) == (cursor, due, Holder(*holder))
        return Picture(cursor, backlog.end, backlog.committed, settled, hint.holder, tuple(rows))

    def close(self) -> None:
        self._store.close()


def _delivery(row: tuple[Any, ...]) -> Delivery:
    first, last, at, token, holder, spent, failures, suspect, alone, producer, partition, *rest = row
    stamp = None if producer is None else Stamp(producer, partition)
    return Delivery(first, last, at, token, holder, spent, failures, bool(suspect), bool(alone), stamp, *rest)


class SqliteMachine(OrderedMachine):
    backend_class: ClassVar[Callable[[int, bool], Backend]] = SqliteBackend


TestSqliteMachine = pytest.mark.timeout(120)(SqliteMachine.TestCase)
TestSqliteMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
