"""The delivery machine on the pure decisions, over a list of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import settings

from postroom.errors import GenerationChanged
from postroom.model.delivery.delivery import (
    Ask,
    Change,
    Delivery,
    Kind,
    Settlement,
    Span,
    Terms,
    poll,
    renewed,
)
from postroom.model.delivery.settlement import covered, extend, seize, settle
from postroom.store.contract import Granted, Settled
from tests.model.delivery_machine import Backend, DeliveryMachine, Picture
from tests.model.examples import examples
from tests.model.naive_progress import LEASE_MS, MOVER_MS


class PureBackend:
    """What a store does around the decisions, and no more."""

    def __init__(self, max_attempts: int) -> None:
        self.limit(max_attempts)
        self._now, self._end, self._cursor, self._generation = 0, 0, 0, 1
        self._rows: list[Delivery] = []

    def now(self) -> int:
        return self._now

    def advance(self, ms: int) -> None:
        self._now += ms

    def append(self, messages: int) -> None:
        self._end += messages

    def limit(self, max_attempts: int) -> None:
        self._terms = Terms(LEASE_MS, max_attempts, MOVER_MS)

    def reset(self, offset: int) -> None:
        self._cursor, self._rows, self._generation = min(offset, self._end), [], self._generation + 1

    def poll(self, generation: int, ask: Ask) -> Granted:
        self._check(generation)
        if held := self._held(ask.token):
            spans = [(row.first, row.last) for row in held]
            until = renewed(self._now + LEASE_MS, max(row.visible_at for row in held))
            self._apply(extend(held, spans, until, self._cursor))
            return Granted(tuple(self._held(ask.token)))
        due = [row for row in self._rows if row.visible_at <= self._now]
        change = self._apply(poll(self._cursor, due, self._now, ask, self._terms))
        return Granted(change.granted, change.leaving, change.unplaced, draining=change.draining)

    def seize(self, generation: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        self._check(generation)
        low, high = min(s[0] for s in spans), max(s[1] for s in spans)
        rows = [row for row in self._rows if row.first <= high and row.last >= low]
        change = self._apply(seize(self._cursor, rows, spans, self._now, ask, self._terms))
        return Granted(change.granted, change.leaving)

    def settle(self, generation: int, token: int, settlements: Sequence[Settlement]) -> Settled:
        self._check(generation)
        change = settle(self._held(token), settlements, self._now, self._terms, self._cursor)
        lost = covered(change.missing, [row for row in self._rows if row.token != token])
        settled = Settled(tuple(lost), change.leaving, change.unplaced)
        self._apply(change)
        return settled

    def extend(self, generation: int, token: int, spans: Sequence[Span]) -> Sequence[Span]:
        self._check(generation)
        return self._apply(extend(self._held(token), spans, self._now + LEASE_MS, self._cursor)).missing

    def finish_move(self, generation: int, moving: Delivery) -> None:
        self.settle(generation, moving.token, [Settlement(Kind.ACK, moving.first, moving.last)])

    def picture(self) -> Picture:
        committed = min((row.first for row in self._rows), default=self._cursor)
        return Picture(self._cursor, self._end, committed, self._rows)

    def close(self) -> None:
        pass

    def _check(self, generation: int) -> None:
        if generation != self._generation:
            raise GenerationChanged("the group was reset")

    def _held(self, token: int) -> list[Delivery]:
        return [row for row in self._rows if row.token == token]

    def _apply(self, change: Change) -> Change:
        assert set(change.drop) <= {row.first for row in self._rows}
        kept = [row for row in self._rows if row.first not in change.drop]
        self._rows = sorted([*kept, *change.put], key=lambda row: row.first)
        self._cursor = change.cursor
        return change


class PureMachine(DeliveryMachine):
    backend_class: ClassVar[Callable[[int], Backend]] = PureBackend


TestPureMachine = pytest.mark.timeout(120)(PureMachine.TestCase)
TestPureMachine.settings = settings(max_examples=examples(250), stateful_step_count=50, deadline=None)
