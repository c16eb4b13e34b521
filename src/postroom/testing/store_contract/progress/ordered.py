"""`Progress.poll_ordered`, `hand_over` and `extend`: who holds a partition, and what its holder is handed.

I5, I6, I8, I10, I14, R22.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import count
from typing import Any
from unittest import mock

import pytest

from ....errors import GenerationChanged
from ....model.delivery.delivery import Delivery, Holder, Kind, OrderedAsk, Settlement, Stamp
from ....model.policy.settings import GroupSettings, Start
from ....store import SqlStore
from ....store.contract import Granted, Group, Settled, Store, Topic
from ....store.sql.session import Area
from ..harness import LEASE, MovableClock, StoreHarness, acks, append, ask, batch, in_threads, spans

__all__ = ["ANN", "BOB", "CAT", "DEAD", "HOLD", "OrderedContract", "OrderedHarness", "retry", "shown", "want"]

DEAD = Stamp(producer_id=77, partition_id=9)
HOLD = 60_000
ANN, BOB, CAT = 11, 22, 33
NAMES = {ANN: "ann", BOB: "bob", CAT: "cat"}


def want(token: int, end: int, expects: int | None = None, **more: Any) -> OrderedAsk:
    messages = more.pop("messages", 1000)
    return OrderedAsk(NAMES.get(token, f"m{token}"), token, messages, end, expects, **more)


def retry(first: int, last: int, at: int, stamp: Stamp | None = None) -> list[Settlement]:
    return [Settlement(Kind.RETRY, first, last, visible_at=at, reason="no", stamp=stamp)]


def shown(deliveries: Granted | tuple[Delivery, ...]) -> list[tuple[int, int, int, bool]]:
    found = deliveries.deliveries if isinstance(deliveries, Granted) else deliveries
    return [(d.first, d.last, d.attempt, d.alone) for d in found]


class OrderedHarness(StoreHarness):
    """Ordered groups, and what a store tells of its commits."""

    def restarted(self, store: Store, at_ms: int) -> AbstractContextManager[object]:
        """The database was started at that moment, and what was not flushed before may be lost."""
        assert isinstance(store, SqlStore), "override `restarted` for a store of another kind"
        return mock.patch.object(store.session.dialect, "started_ms", return_value=at_ms)

    def flushed(self, store: Store, verb: Callable[[], object]) -> bool:
        """Whether what this verb committed at last is durable."""
        assert isinstance(store, SqlStore), "override `flushed` for a store of another kind"
        dialect, seen = store.session.dialect, list[bool]()
        original = dialect.begin

        def begin(connection: Any, area: Area, *, flush: bool, at_once: bool = False) -> None:
            seen.append(flush)
            original(connection, area, flush=flush, at_once=at_once)

        with mock.patch.object(dialect, "begin", begin):
            verb()
        return seen[-1]

    def durably_announced(self, store: Store, verb: Callable[[], object]) -> bool:
        """Whether what this verb committed is durable, and those who wait in other processes were told."""
        assert isinstance(store, SqlStore), "override `durably_announced` for a store of another kind"
        with mock.patch.object(store.session.dialect, "announce") as announce:
            return self.flushed(store, verb) and bool(announce.called)

    @pytest.fixture
    def settings(self) -> GroupSettings:
        return GroupSettings(mode="ordered", lease_ms=LEASE, max_attempts=3, max_hold_ms=HOLD)

    @pytest.fixture
    def line(self, store: Store, topic: Topic, settings: GroupSettings) -> Group:
        """An ordered group."""
        return store.catalog.create_group(topic.name, "line", settings)

    @pytest.fixture
    def stopping(self, store: Store, topic: Topic) -> Group:
        """An ordered group in which an exhausted message stops its key."""
        settings = GroupSettings(mode="ordered", lease_ms=LEASE, max_attempts=2, exhausted="stop")
        return store.catalog.create_group(topic.name, "stopping", settings)


class OrderedContract(OrderedHarness):
    # ---- one holder (I5) ----

    def test_a_partition_has_one_holder(
        self, store: Store, place: int, line: Group, clock: MovableClock, other: Store
    ) -> None:
        append(store, place, batch(4))
        mine = store.progress.poll_ordered(line, place, want(ANN, 4, messages=2))
        assert (spans(mine), mine.holder) == ([(0, 1)], None)
        holder = Holder(ANN, "ann", clock.ms + LEASE)
        refused = other.progress.poll_ordered(line, place, want(BOB, 4))
        assert (refused.deliveries, refused.holder) == ((), holder)
        assert other.progress.peek(line, [place])[place].holder == holder
        assert store.progress.held_by(line.id, ANN) == {place}
        assert store.progress.held_by(line.id, BOB) == set()
        assert spans(store.progress.poll_ordered(line, place, want(ANN, 4, 2))) == [(2, 3)]

    def test_of_many_who_claim_it_one_gets_it(
        self, store: Store, place: int, line: Group, other: Store
    ) -> None:
        append(store, place, batch(4))
        calls = [
            lambda token=token, through=through: through.progress.poll_ordered(line, place, want(token, 4))
            for token, through in enumerate([store, other] * 3, start=1)
        ]
        granted = in_threads(*calls)
        assert sorted(spans(one) for one in granted) == [[]] * 5 + [[(0, 3)]]
        assert sum(one.holder is None for one in granted) == 1

    def test_polls_and_heartbeats_renew_the_lease(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(2))
        store.progress.poll_ordered(line, place, want(ANN, 2))
        for renew in (
            lambda: store.progress.extend(line, place, ANN, [(0, 1)]),
            lambda: store.progress.poll_ordered(line, place, want(ANN, 2, 2)),
            lambda: store.progress.extend(line, place, ANN, []),
        ):
            clock.ms += LEASE - 1
            renew()
        clock.ms += LEASE - 1
        assert store.progress.poll_ordered(line, place, want(BOB, 2)).holder is not None
        clock.ms += 1
        assert spans(store.progress.poll_ordered(line, place, want(BOB, 2))) == [(0, 0)]
        assert store.progress.extend(line, place, ANN, [(0, 1), (7, 9)]) == ((0, 1), (7, 9))

    def test_a_holder_that_is_late_goes_on_if_nobody_took_over(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(4))
        store.progress.poll_ordered(line, place, want(ANN, 4, messages=2))
        clock.ms += 5 * LEASE
        assert shown(store.progress.poll_ordered(line, place, want(ANN, 4, 2))) == [(2, 3, 1, False)]
        assert store.progress.settle(line, place, ANN, acks((0, 3))) == Settled()

    def test_whoever_expects_something_and_does_not_hold_it_is_refused(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """What it has may have been settled by others meanwhile: it must drop that first."""
        append(store, place, batch(4))
        assert store.progress.poll_ordered(line, place, want(BOB, 4, 2)).holder == Holder()
        store.progress.poll_ordered(line, place, want(ANN, 4, messages=2))
        store.progress.hand_over(line, place, ANN)
        refused = store.progress.poll_ordered(line, place, want(ANN, 4, 2))
        assert refused.holder is not None and refused.holder.token == 0 and not refused.deliveries
        assert spans(store.progress.poll_ordered(line, place, want(ANN, 4))) == [(0, 1), (2, 3)]
        ahead = store.progress.poll_ordered(line, place, want(ANN, 9, 5))  # a crash forgot its last poll (I8)
        assert ahead.holder is not None and not ahead.deliveries

    def test_a_claim_that_nobody_received_is_given_back(
        self, store: Store, place: int, line: Group, other: Store
    ) -> None:
        """I6: but not once a repetition of the poll was answered, within the same millisecond even."""
        append(store, place, batch(4))
        claimed = store.progress.poll_ordered(line, place, want(ANN, 4, messages=2))
        again = other.progress.poll_ordered(line, place, want(ANN, 4, messages=2))
        assert spans(again) == [(0, 1)]
        assert store.progress.give_back(line, place, ANN, claimed.until) == 0
        assert store.progress.settle(line, place, ANN, acks((0, 0))) == Settled()
        assert self.durably_announced(
            store, lambda: store.progress.give_back(line, place, ANN, again.until) == 1
        )
        assert store.progress.give_back(line, place, ANN, again.until) == 0
        assert shown(store.progress.poll_ordered(line, place, want(BOB, 4))) == [
            (1, 1, 1, False),
            (2, 3, 1, False),
        ]

    def test_handing_over_lets_the_next_one_in_at_once(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(6))
        store.progress.poll_ordered(line, place, want(ANN, 6, messages=4))
        store.progress.settle(line, place, ANN, [*acks((1, 1)), *retry(2, 2, clock.ms + 9000)])
        store.progress.hand_over(line, place, BOB)  # it is not BOB's
        assert store.progress.poll_ordered(line, place, want(BOB, 6)).holder is not None
        assert self.durably_announced(store, lambda: store.progress.hand_over(line, place, ANN))
        assert store.progress.held_by(line.id, ANN) == set()
        next_one = store.progress.poll_ordered(line, place, want(BOB, 6))
        assert shown(next_one) == [(0, 0, 1, False), (2, 2, 2, False), (3, 3, 1, False), (4, 5, 1, False)]
        assert [d.visible_at for d in next_one.deliveries] == [0, clock.ms + 9000, 0, 0]
        assert store.progress.settle(line, place, ANN, acks((0, 5))).lost == ((0, 0), (2, 2), (3, 3), (4, 5))
        assert store.progress.settle(line, place, BOB, acks((0, 5))) == Settled()

    def test_no_takeover_for_one_lease_after_the_database_was_started(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """I8: renewals that were not flushed may be lost."""
        append(store, place, batch(2))
        store.progress.poll_ordered(line, place, want(ANN, 2))
        clock.ms += 10 * LEASE
        with self.restarted(store, clock.ms):
            clock.ms += LEASE - 1
            assert store.progress.poll_ordered(line, place, want(BOB, 2)).holder is not None
            clock.ms += 1
            assert spans(store.progress.poll_ordered(line, place, want(BOB, 2))) == [(0, 0)]

    def test_shared_groups_wait_as_long_after_a_start(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(3))
        store.progress.poll(group, place, ask(1, 3))
        store.progress.settle(group, place, 1, retry(2, 2, clock.ms))  # in nobody's hands
        clock.ms += 10 * LEASE
        with self.restarted(store, clock.ms):
            clock.ms += LEASE - 1
            assert spans(store.progress.poll(group, place, ask(2, 3))) == [(2, 2)]
            clock.ms += 1
            assert spans(store.progress.poll(group, place, ask(3, 3))) == [(0, 0)]

    def test_what_must_be_durable_is(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """I8: a change of holder, a redelivery, a stamp; not a first hand-out, an ack, a renewal."""
        append(store, place, batch(6))
        progress = store.progress
        progress.rewind(line, [place])
        assert self.flushed(store, lambda: progress.poll_ordered(line, place, want(ANN, 6, messages=2)))
        assert not self.flushed(
            store, lambda: progress.poll_ordered(line, place, want(ANN, 6, 2, messages=2))
        )
        assert not self.flushed(store, lambda: progress.settle(line, place, ANN, acks((0, 0))))
        assert not self.flushed(store, lambda: progress.extend(line, place, ANN, [(1, 3)]))
        move = [Settlement(Kind.MOVE, 3, 3, stamp=DEAD)]
        assert self.flushed(store, lambda: progress.settle(line, place, ANN, move))
        clock.ms += LEASE
        assert self.flushed(store, lambda: progress.poll_ordered(line, place, want(BOB, 6)))
        progress.settle(line, place, BOB, acks((1, 1)))
        assert self.flushed(store, lambda: progress.poll_ordered(line, place, want(BOB, 6, 2)))

    # ---- order, and lost replies (I6) ----

    def test_a_lost_reply_is_sent_again_before_anything_new(
        self, store: Store, place: int, line: Group, other: Store
    ) -> None:
        append(store, place, batch(10))
        store.progress.poll_ordered(line, place, want(ANN, 10, messages=3))
        lost = store.progress.poll_ordered(line, place, want(ANN, 10, 3, messages=4))
        again = other.progress.poll_ordered(line, place, want(ANN, 10, 3, messages=4))
        assert spans(lost) == spans(again) == [(3, 6)]
        assert spans(other.progress.poll_ordered(line, place, want(ANN, 10, 3, messages=2))) == [(3, 4)]
        assert store.progress.peek(line, [place])[place].cursor == 7
        assert spans(store.progress.poll_ordered(line, place, want(ANN, 10, 5))) == [(5, 6), (7, 9)]
        assert spans(store.progress.poll_ordered(line, place, want(ANN, 10, 10))) == []

    def test_the_lost_reply_to_a_claim_is_sent_again(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(5))
        for _ in range(3):
            granted = store.progress.poll_ordered(line, place, want(ANN, 5, messages=2))
            assert shown(granted) == [(0, 1, 1, False)]
        clock.ms += LEASE + 2  # granted anew within a millisecond, it ends later each time (I6)
        for _ in range(2):
            assert shown(store.progress.poll_ordered(line, place, want(BOB, 5))) == [(0, 0, 2, True)]

    def test_what_is_settled_is_not_sent_again(self, store: Store, place: int, line: Group) -> None:
        append(store, place, batch(10))
        store.progress.poll_ordered(line, place, want(ANN, 10, messages=8))
        store.progress.settle(line, place, ANN, acks((0, 1), (4, 5)))
        assert spans(store.progress.poll_ordered(line, place, want(ANN, 10))) == [(2, 3), (6, 7), (8, 9)]
        assert store.progress.committed(line.id, place) == 2

    def test_the_budget_and_the_end_hold_and_one_message_always_goes_out(
        self, store: Store, place: int, line: Group
    ) -> None:
        """I17."""
        append(store, place, batch(30))
        store.progress.poll_ordered(line, place, want(ANN, 30, messages=20))
        store.progress.hand_over(line, place, ANN)
        steps = [(None, 3, 30, (0, 2)), (3, 30, 6, (3, 5)), (6, 30, 2, (6, 6)), (7, 0, 30, (7, 7))]
        for expects, messages, end, expected in steps:
            granted = store.progress.poll_ordered(line, place, want(BOB, end, expects, messages=messages))
            assert spans(granted) == [expected]
        assert store.progress.peek(line, [place])[place].cursor == 20
        assert spans(store.progress.poll_ordered(line, place, want(BOB, 25, 8))) == [(8, 19), (20, 24)]

    def test_handing_out_in_threads_keeps_the_order(
        self, store: Store, place: int, line: Group, other: Store
    ) -> None:
        """R22: whoever holds it, messages come lowest first, and nobody is handed what another one has."""
        append(store, place, *(batch(5) for _ in range(12)))
        begun: list[int] = []
        writing = threading.Lock()
        tokens = count(100)

        def consume(through: Store) -> None:
            while len(begun) < 60:
                token, position = next(tokens), None
                for _ in range(3):
                    granted = through.progress.poll_ordered(
                        line, place, want(token, 60, position, messages=4)
                    )
                    for first, last in spans(granted):
                        with writing:
                            begun.extend(range(first, last + 1))
                        through.progress.settle(line, place, token, acks((first, last)))
                        position = last + 1
                through.progress.hand_over(line, place, token)

        in_threads(*(lambda through=through: consume(through) for through in (store, other, store)))
        assert begun == list(range(60))
        assert store.progress.committed(line.id, place) == 60

    # ---- suspects (I14) ----

    def test_what_a_lapsed_holder_had_comes_alone_in_halves_and_in_order(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(12))
        store.progress.poll_ordered(line, place, want(ANN, 12, messages=8))
        store.progress.settle(line, place, ANN, retry(6, 6, clock.ms + LEASE + 1))  # waits: not at work
        store.progress.poll_ordered(line, place, want(ANN, 12, 8, messages=1))
        clock.ms += 3 * LEASE
        found, position = list[tuple[int, int, int, bool]](), None
        for _ in range(20):
            granted = store.progress.poll_ordered(line, place, want(BOB, 12, position))
            store.progress.settle(line, place, BOB, acks(*spans(granted)))
            found += shown(granted)
            position = found[-1][1] + 1
        assert found == [
            (0, 2, 2, True), (3, 5, 2, True), (6, 6, 2, False), (7, 7, 2, True), (8, 8, 2, True),
            (9, 11, 1, False),
        ]  # fmt: skip

    def test_nothing_goes_past_a_suspect_that_waits_for_empty_hands(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(6))
        store.progress.poll_ordered(line, place, want(ANN, 6, messages=2))
        clock.ms += LEASE
        busy = store.progress.poll_ordered(line, place, want(BOB, 6, empty_handed=False))
        assert (busy.deliveries, busy.draining, busy.holder) == ((), True, None)
        clock.ms += LEASE - 1
        assert store.progress.poll_ordered(line, place, want(BOB, 6, empty_handed=False)).draining
        clock.ms += 1
        company = store.progress.poll_ordered(line, place, want(BOB, 6, empty_handed=False))
        assert shown(company) == [(0, 0, 2, False), (1, 1, 2, False), (2, 5, 1, False)]

    def test_whoever_asks_for_more_has_nothing_alone(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """It could not handle it, since its key is held: whatever kills the holder then is something else."""
        append(store, place, batch(4))
        store.progress.poll_ordered(line, place, want(1, 4, messages=2))
        for token in range(2, 8):
            clock.ms += LEASE
            assert shown(store.progress.poll_ordered(line, place, want(token, 4))) == [(0, 0, token, True)]
            store.progress.poll_ordered(line, place, want(token, 4, 1))
        clock.ms += LEASE
        (alone,) = store.progress.poll_ordered(line, place, want(9, 4)).deliveries
        assert (alone.failures, alone.attempt) == (0, 8)

    def test_only_what_kills_its_holder_alone_is_given_up(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(2))
        store.progress.poll_ordered(line, place, want(1, 2))
        for token in (2, 3, 4):  # (0, 1) was held by the first in company, and 0 by these alone
            clock.ms += LEASE
            assert shown(store.progress.poll_ordered(line, place, want(token, 2))) == [(0, 0, token, True)]
        clock.ms += LEASE
        unplaced = store.progress.poll_ordered(line, place, want(5, 2))
        assert (unplaced.deliveries, unplaced.unplaced) == ((), ((0, 0),))  # nor 1, which may have its key
        placed = store.progress.poll_ordered(line, place, want(5, 2, dead=DEAD))
        assert shown(placed) == [(1, 1, 2, True)] and spans(placed.leaving) == [(0, 0)]
        assert store.progress.settle(line, place, placed.leaving[0].token, acks((0, 0))) == Settled()
        assert store.progress.settle(line, place, 5, acks((1, 1))) == Settled()
        assert store.progress.committed(line.id, place) == 2

    # ---- the rest of a group's life ----

    def test_on_delivery_settles_as_it_hands_out(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """R16: never handed out twice."""
        append(store, place, batch(5))
        once = want(ANN, 5, messages=3, on_delivery=True)
        assert spans(store.progress.poll_ordered(line, place, once)) == [(0, 2)]
        assert store.progress.committed(line.id, place) == 3
        clock.ms += 10 * LEASE
        again = store.progress.poll_ordered(line, place, want(BOB, 5, on_delivery=True))
        assert spans(again) == [(3, 4)]
        assert self.flushed(
            store, lambda: store.progress.poll_ordered(line, place, want(BOB, 5, 5, on_delivery=True))
        )
        assert store.progress.backlog(line, [place])[0].unsettled == 0

    def test_a_reset_ends_the_holders_time(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """I10."""
        append(store, place, batch(5))
        store.progress.poll_ordered(line, place, want(ANN, 5))
        again = store.catalog.reset_group(line.topic, line.name, Start("offsets", offsets=((0, 2),)))
        store.progress.rewind(again, [place])
        for verb in (
            lambda: store.progress.poll_ordered(line, place, want(ANN, 5, 5)),
            lambda: store.progress.settle(line, place, ANN, acks((0, 1))),
            lambda: store.progress.extend(line, place, ANN, [(0, 1)]),
            lambda: store.progress.hand_over(line, place, ANN),
            lambda: store.progress.restart_stopped(line, place),
        ):
            with pytest.raises(GenerationChanged):
                verb()
        assert store.progress.peek(again, [place])[place].holder == Holder()
        assert store.progress.poll_ordered(again, place, want(ANN, 5, 5)).holder == Holder()
        assert store.progress.settle(again, place, ANN, acks((2, 4))).lost == ((2, 4),)
        assert spans(store.progress.poll_ordered(again, place, want(BOB, 5))) == [(2, 4)]

    def test_what_lies_below_the_log_is_passed_over(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, *(batch(10) for _ in range(3)))
        store.progress.poll_ordered(line, place, want(ANN, 30, messages=8))
        granted = store.progress.poll_ordered(line, place, want(ANN, 30, 8, messages=2), log_start=5)
        assert spans(granted) == [(8, 9)]
        assert store.progress.committed(line.id, place) == 5
        assert store.progress.settle(line, place, ANN, acks((0, 9))) == Settled()
        granted = store.progress.poll_ordered(line, place, want(ANN, 30, 10, messages=4), log_start=20)
        assert (spans(granted), store.progress.committed(line.id, place)) == ([(20, 23)], 20)

    def test_a_group_changes_its_mode(
        self, store: Store, place: int, line: Group, clock: MovableClock, settings: GroupSettings
    ) -> None:
        """What is in somebody's hands is left to it for its lease; nothing is lost, nothing is stuck."""
        append(store, place, batch(6))
        store.progress.poll_ordered(line, place, want(ANN, 6, messages=2))
        store.progress.settle(line, place, ANN, retry(1, 1, clock.ms + 5 * LEASE))
        shared = GroupSettings(lease_ms=LEASE, max_attempts=3)
        loose = store.catalog.alter_group(line.topic, line.name, shared, paused=False)
        assert spans(store.progress.poll(loose, place, ask(1, 6, messages=2))) == [(2, 3)]
        assert store.progress.settle(loose, place, ANN, acks((0, 0))) == Settled()
        again = store.catalog.alter_group(line.topic, line.name, settings, paused=False)
        granted = store.progress.poll_ordered(again, place, want(BOB, 6))
        waiting = [(d.first, d.last, d.visible_at - clock.ms) for d in granted.deliveries]
        assert waiting == [(1, 1, 5 * LEASE), (2, 3, LEASE), (4, 5, -clock.ms)]
        assert store.progress.settle(again, place, 1, acks((2, 3))).lost == ((2, 3),)
        assert store.progress.settle(again, place, BOB, acks((1, 5))) == Settled()
        assert store.progress.committed(line.id, place) == 6
