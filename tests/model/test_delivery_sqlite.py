"""The delivery machine through the store: the same rules, on SQLite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import settings

from postroom.model.delivery.delivery import Ask, Delivery, Kind, Settlement, Span
from postroom.model.policy.settings import GroupSettings
from postroom.store.contract import Granted
from tests.model.delivery_machine import Backend, DeliveryMachine, Picture
from tests.model.examples import examples
from tests.model.naive_progress import LEASE_MS
from tests.model.sqlite_backend import GroupOnSqlite


class SqliteBackend(GroupOnSqlite):
    def __init__(self, max_attempts: int) -> None:
        super().__init__(GroupSettings(lease_ms=LEASE_MS, max_attempts=max_attempts))

    def poll(self, generation: int, ask: Ask) -> Granted:
        return self._store.progress.poll(self._groups[generation], self._partition, ask)

    def seize(self, generation: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        return self._store.progress.seize(self._groups[generation], self._partition, ask, spans)

    def finish_move(self, generation: int, moving: Delivery) -> None:
        self.settle(generation, moving.token, [Settlement(Kind.ACK, moving.first, moving.last)])

    def picture(self) -> Picture:
        rows, backlog = self._rows()
        hint = self._store.progress.peek(self._group, [self._partition])[self._partition]
        assert hint.cursor == backlog.cursor
        assert hint.next_due == min((row.visible_at for row in rows), default=None)
        return Picture(backlog.cursor, backlog.end, backlog.committed, rows)


class SqliteMachine(DeliveryMachine):
    backend_class: ClassVar[Callable[[int], Backend]] = SqliteBackend


TestSqliteMachine = pytest.mark.timeout(120)(SqliteMachine.TestCase)
TestSqliteMachine.settings = settings(max_examples=examples(110), stateful_step_count=50, deadline=None)
