"""The ordered machine through the store: the same rules, on SQLite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import settings

from postroom.model.delivery.delivery import Holder, OrderedAsk, Span
from postroom.model.policy.settings import GroupSettings
from postroom.store.contract import Granted
from postroom.store.sql.session import Area
from tests.model.examples import examples
from tests.model.ordered_machine import Backend, OrderedMachine
from tests.model.ordered_rules import FAR, LEASE_MS, MAX_HOLD_MS, Picture
from tests.model.parking_machine import ParkingMachine
from tests.model.sqlite_backend import GroupOnSqlite

PROGRESS = """SELECT next_new, lowest, next_due, deliveries, settled, holder_token, holder, holder_until
              FROM postroom_progress"""


class SqliteBackend(GroupOnSqlite):
    def __init__(self, max_attempts: int, stop: bool) -> None:
        super().__init__(
            GroupSettings(
                mode="ordered",
                lease_ms=LEASE_MS,
                max_attempts=max_attempts,
                exhausted="stop" if stop else "dead",
                max_hold_ms=MAX_HOLD_MS,
            )
        )
        self._started = 0
        dialect = self._store.session.dialect
        dialect.started_ms = lambda connection: self._started  # type: ignore[method-assign]

    def restart_server(self) -> None:
        self._started = self.now()

    def poll(self, generation: int, ask: OrderedAsk) -> Granted:
        return self._store.progress.poll_ordered(self._groups[generation], self._partition, ask)

    def hand_over(self, generation: int, token: int) -> None:
        self._store.progress.hand_over(self._groups[generation], self._partition, token)

    def restart_stopped(self, generation: int) -> int:
        return self._store.progress.restart_stopped(self._groups[generation], self._partition)

    def picture(self) -> Picture:
        rows, backlog = self._rows()
        with self._store.session.read(Area.PROGRESS) as tx:
            (progress,) = tx.all(PROGRESS)
        cursor, lowest, due, deliveries, settled, *holder = progress
        assert deliveries == len(rows)
        assert backlog.stopped == sum(row.size for row in rows if row.visible_at == FAR)
        lines = self._store.progress.lines(self._group, self._partition)
        assert backlog.parked == sum(line.messages for line in lines)
        assert lowest == backlog.committed == min((one.first for one in (*rows, *lines)), default=cursor)
        stamped = [row.visible_at for row in rows if row.stamp is not None]
        assert not stamped or due <= min(stamped), "a stamped delivery would not be found"
        hint = self._store.progress.peek(self._group, [self._partition])[self._partition]
        assert (hint.cursor, hint.next_due, hint.holder) == (cursor, due, Holder(*holder))
        return Picture(
            cursor,
            backlog.end,
            backlog.committed,
            settled,
            hint.holder,
            tuple(rows),
            hint.recalled,
            tuple(lines),
        )

    def unpark(
        self, generation: int, token: int, member: str, line_id: int, spans: Sequence[Span], upto: int
    ) -> Granted:
        group = self._groups[generation]
        return self._store.progress.unpark(group, self._partition, token, member, line_id, spans, upto)


class SqliteMachine(OrderedMachine):
    backend_class: ClassVar[Callable[[int, bool], Backend]] = SqliteBackend


TestSqliteMachine = pytest.mark.timeout(120)(SqliteMachine.TestCase)
TestSqliteMachine.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)


class SqliteParkingMachine(ParkingMachine):
    backend_class: ClassVar[Callable[[int, bool], Backend]] = SqliteBackend


TestSqliteParkingMachine = pytest.mark.timeout(120)(SqliteParkingMachine.TestCase)
TestSqliteParkingMachine.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
