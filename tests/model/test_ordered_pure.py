"""The ordered machine on the pure decisions, over a list of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import pytest
from hypothesis import settings

from postroom.errors import GenerationChanged
from postroom.model.delivery import ordered
from postroom.model.delivery.delivery import (
    Change,
    Delivery,
    Holder,
    Kind,
    OrderedAsk,
    Settlement,
    Span,
    Terms,
)
from postroom.model.delivery.ordered import FAR, Claim
from postroom.model.delivery.settlement import covered
from postroom.store.contract import Granted, Settled
from tests.model.examples import examples
from tests.model.ordered_machine import Backend, OrderedMachine
from tests.model.ordered_rules import LEASE_MS, MAX_HOLD_MS, MOVER_MS, Picture


class PureBackend:
    """What a store does around the decisions, and no more."""

    def __init__(self, max_attempts: int, stop: bool) -> None:
        self._stop = stop
        self.limit(max_attempts)
        self._now, self._end, self._generation, self._safe_from = 0, 0, 1, 0
        self._start_at(0)

    def _start_at(self, offset: int) -> None:
        self._cursor, self._settled, self._holder = min(offset, self._end), 0, Holder()
        self._rows: list[Delivery] = []

    def now(self) -> int:
        return self._now

    def advance(self, ms: int) -> None:
        self._now += ms

    def append(self, messages: int) -> None:
        self._end += messages

    def limit(self, max_attempts: int) -> None:
        self._terms = Terms(LEASE_MS, max_attempts, MOVER_MS, self._stop, MAX_HOLD_MS)

    def reset(self, offset: int) -> None:
        self._start_at(offset)
        self._generation += 1

    def restart_server(self) -> None:
        self._safe_from = self._now + LEASE_MS

    def poll(self, generation: int, ask: OrderedAsk) -> Granted:
        self._check(generation)
        claim = ordered.claim(self._holder, ask, self._now, self._cursor, self._safe_from)
        if claim is Claim.REFUSED:
            return Granted((), holder=self._holder)
        if claim is Claim.TAKES_OVER:
            received = self._held(self._holder.token)
            self._apply(ordered.lapse(received, self._holder.until, self._now, self._cursor))
        self._holder = Holder(ask.token, ask.member, self._now + LEASE_MS)
        change = self._apply(ordered.poll(self._cursor, self._rows, self._now, ask, self._terms))
        return Granted(
            change.granted,
            change.leaving,
            change.unplaced,
            draining=change.draining,
            recall=change.recall,
        )

    def settle(self, generation: int, token: int, settlements: Sequence[Settlement]) -> Settled:
        self._check(generation)
        change = ordered.settle(self._held(token), settlements, self._now, self._terms, self._cursor)
        others = [row for row in self._rows if row.token != token]
        beyond = [(max(first, self._cursor), last) for first, last in change.missing if last >= self._cursor]
        lost = (*covered(change.missing, others), *beyond)
        self._apply(change)
        return Settled(lost, change.leaving, change.unplaced, change.kept)

    def extend(self, generation: int, token: int, spans: Sequence[Span]) -> Sequence[Span]:
        self._check(generation)
        if self._holder.token != token:
            return spans
        self._holder = Holder(token, self._holder.member, self._now + LEASE_MS)
        return ()

    def hand_over(self, generation: int, token: int) -> None:
        self._check(generation)
        if self._holder.token == token:
            self._apply(ordered.hand_over(self._held(token), self._cursor))
            self._holder = Holder(until=self._now)

    def restart_stopped(self, generation: int) -> int:
        self._check(generation)
        stopped = [row for row in self._rows if row.visible_at >= FAR]
        self._apply(ordered.restart(stopped, self._now, self._cursor))
        return sum(row.size for row in stopped)

    def picture(self) -> Picture:
        committed = min((row.first for row in self._rows), default=self._cursor)
        return Picture(self._cursor, self._end, committed, self._settled, self._holder, tuple(self._rows))

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
        self._cursor, self._settled = change.cursor, self._settled + change.settled
        return change


class PureMachine(OrderedMachine):
    backend_class: ClassVar[Callable[[int, bool], Backend]] = PureBackend


@pytest.mark.parametrize("stop", [True, False])
def test_a_suspect_behind_a_released_message_is_not_counted_if_its_lease_passes(stop: bool) -> None:
    """It was handed out alone, and its member could not begin it (I14)."""
    state = PureMachine()
    state.begin_run(attempts=1, stop=stop, keys=[0, 0, 0, 0], members=2, poison=set())
    state.poll(dies=False, messages=4, who=1)
    state.time_passes(ms=LEASE_MS)
    state.poll_on_delivery(messages=1, who=0)
    state.poll_in_trouble(cut=0, known=False, lost=False, messages=0, who=0)
    state.extend(who=1)
    state.handle(delay=0, kinds=[Kind.ACK], who=0)
    state.hand_over(who=0)
    state.poll(dies=True, messages=0, who=1)
    state.finish(again=False, delay=1, kind=Kind.RELEASE, stamped=False, who=0)
    state.teardown()


TestPureMachine = pytest.mark.timeout(120)(PureMachine.TestCase)
TestPureMachine.settings = settings(max_examples=examples(200), stateful_step_count=50, deadline=None)
