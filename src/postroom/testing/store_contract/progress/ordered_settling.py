"""`Progress.settle` and what is decided about stopped messages: what becomes of what a holder has received.

I5, I7, I10, I12, R17, R20, R23.
"""

from __future__ import annotations

import pytest

from ....errors import StoreError
from ....model.delivery.delivery import NOBODY, Delivery, Kind, Line, Settlement, Span
from ....model.delivery.ordered import FAR
from ....model.policy.settings import GroupSettings, Start
from ....store.contract import Granted, Group, Settled, Store
from ..harness import LEASE, MovableClock, acks, append, ask, batch, spans
from .ordered import ANN, BOB, CAT, DEAD, HOLD, OrderedHarness, retry, shown, want

__all__ = ["OrderedSettleContract", "ParkingContract"]


class OrderedSettleContract(OrderedHarness):
    # ---- settle ----

    def test_only_the_holder_settles(
        self, store: Store, place: int, line: Group, clock: MovableClock, other: Store
    ) -> None:
        """I7."""
        append(store, place, batch(6))
        store.progress.poll_ordered(line, place, want(ANN, 6, messages=4))
        assert store.progress.settle(line, place, BOB, acks((1, 2), (5, 5))).lost == ((1, 2), (5, 5))
        assert other.progress.settle(line, place, ANN, acks((1, 2))) == Settled()
        assert store.progress.settle(line, place, ANN, acks((0, 2), (5, 5))).lost == ((5, 5),)
        clock.ms += LEASE
        store.progress.poll_ordered(line, place, want(BOB, 6))
        for kind in (Kind.ACK, Kind.RETRY, Kind.RELEASE, Kind.MOVE):
            late = [Settlement(kind, 0, 3, visible_at=clock.ms, stamp=DEAD)]
            assert store.progress.settle(line, place, ANN, late) == Settled(lost=((3, 3),))
        with self.failing_commits(store), pytest.raises(StoreError):
            store.progress.settle(line, place, BOB, acks((3, 3)))
        assert store.progress.settle(line, place, BOB, acks((0, 3))) == Settled()
        assert store.progress.committed(line.id, place) == 4

    def test_settlements_may_lie_far_apart(self, store: Store, place: int, line: Group) -> None:
        append(store, place, *(batch(2000) for _ in range(3)))
        for position in (None, 4000):  # one delivery reaches from the first to the second
            store.progress.poll_ordered(line, place, want(ANN, 6000, position, messages=4000))
        asked = acks((0, 0), (3000, 3001), (5999, 6003))
        assert store.progress.settle(line, place, ANN, asked).lost == ((6000, 6003),)
        assert store.progress.backlog(line, [place])[0].unsettled == 5996
        assert store.progress.settle(line, place, BOB, asked).lost == ((6000, 6003),)
        late = store.progress.settle(line, place, BOB, acks((1, 1), (2999, 3002), (5998, 5998)))
        assert late.lost == ((1, 1), (2999, 2999), (3002, 3002), (5998, 5998))

    def test_a_retry_stays_with_its_holder_and_counts(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """R17, R20, I5."""
        append(store, place, batch(3))
        store.progress.poll_ordered(line, place, want(ANN, 3))
        since, at = clock.ms, clock.ms + 100
        for later in (0, 50):  # the second time the reply to the first was lost: it is one failure
            (kept,) = store.progress.settle(line, place, ANN, retry(1, 1, at + later)).kept
            assert (kept.first, kept.attempt, kept.visible_at, kept.reason) == (1, 2, at, "no")
            assert (kept.failures, kept.failing_since, kept.token) == (1, since, ANN)
        assert store.progress.poll_ordered(line, place, want(ANN, 3, 3)).deliveries == ()
        clock.ms += 100
        (kept,) = store.progress.settle(line, place, ANN, retry(1, 1, clock.ms + 1)).kept
        assert (kept.attempt, kept.failures, kept.failing_since) == (3, 2, since)
        assert store.progress.settle(line, place, ANN, acks((0, 2))) == Settled()

    def test_a_release_stays_with_its_holder_and_does_not_count(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(3))
        store.progress.poll_ordered(line, place, want(ANN, 3))
        for _ in range(5):
            release = [Settlement(Kind.RELEASE, 0, 1, visible_at=clock.ms)]
            assert shown(store.progress.settle(line, place, ANN, release).kept) == [(0, 1, 1, False)]

    def test_the_exhausted_leave_under_a_stamp_and_their_key_goes_on(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """I12, R20, R23."""
        append(store, place, batch(3))
        store.progress.poll_ordered(line, place, want(ANN, 3))
        for _ in range(2):
            store.progress.settle(line, place, ANN, retry(0, 0, clock.ms))
        last = retry(0, 0, clock.ms)
        assert store.progress.settle(line, place, ANN, last) == Settled(unplaced=((0, 0),))
        (leaving,) = store.progress.settle(line, place, ANN, retry(0, 0, clock.ms, DEAD)).leaving
        assert leaving.stamp is not None and leaving.stamp.partition_id == DEAD.partition_id
        assert store.progress.settle(line, place, ANN, acks((0, 0))).lost == ((0, 0),)
        store.progress.hand_over(line, place, ANN)
        assert spans(store.progress.poll_ordered(line, place, want(BOB, 3))) == [(1, 2)]
        clock.ms += 60_000  # its mover went away
        store.progress.extend(line, place, BOB, [])
        taken_up = store.progress.poll_ordered(line, place, want(BOB, 3, 3))
        assert [d.stamp for d in taken_up.leaving] == [leaving.stamp]
        assert store.progress.settle(line, place, leaving.token, acks((0, 0))) == Settled()
        clock.ms += 60_000
        store.progress.poll_ordered(line, place, want(BOB, 3, 3))
        assert store.progress.peek(line, [place])[place].next_due is None

    def test_many_that_leave_hold_nobody_up(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """More than one poll looks at; what stays behind them is neither forgotten nor overtaken."""
        append(store, place, batch(150))
        store.progress.poll_ordered(line, place, want(ANN, 150, messages=102))
        moves = [Settlement(Kind.MOVE, n, n, stamp=DEAD) for n in range(100)]
        store.progress.settle(line, place, ANN, moves)
        store.progress.hand_over(line, place, ANN)
        granted = store.progress.poll_ordered(line, place, want(BOB, 150, messages=1))
        assert spans(granted) == [(100, 100)]
        clock.ms += 60_000  # all movers went away
        store.progress.extend(line, place, BOB, [])
        left, found = list[int](), list[Span]()
        for _ in range(4):
            granted = store.progress.poll_ordered(line, place, want(BOB, 150, 101 + len(found), messages=1))
            left += (d.first for d in granted.leaving)
            found += spans(granted)
        assert sorted(left) == list(range(100))
        assert found[:2] == [(101, 101), (102, 102)]

    def test_a_message_holds_its_key_for_a_stated_time(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """I10."""
        append(store, place, batch(2))
        store.progress.poll_ordered(line, place, want(ANN, 2))
        begun = clock.ms
        assert store.progress.settle(line, place, ANN, retry(0, 0, begun + 10)).kept
        clock.ms += 10
        over = retry(0, 0, begun + HOLD + 1, DEAD)
        assert spans(store.progress.settle(line, place, ANN, over).leaving) == [(0, 0)]
        within = retry(1, 1, clock.ms + HOLD, DEAD)
        assert spans(store.progress.settle(line, place, ANN, within).kept) == [(1, 1)]

    # ---- stopped messages ----

    def test_a_stopped_message_waits_in_all_hands_until_it_is_restarted(
        self, store: Store, place: int, stopping: Group, clock: MovableClock
    ) -> None:
        """R23, I10."""
        append(store, place, batch(4))
        progress = store.progress
        progress.poll_ordered(stopping, place, want(ANN, 4, messages=3))
        progress.settle(stopping, place, ANN, retry(1, 1, clock.ms))

        def stop() -> Settled:
            return progress.settle(stopping, place, ANN, retry(1, 1, clock.ms))

        assert self.flushed(store, stop)
        assert [d.visible_at for d in stop().kept] == [FAR]  # said twice
        assert progress.backlog(stopping, [place])[0].stopped == 1
        progress.hand_over(stopping, place, ANN)
        assert [
            (d.first, d.visible_at) for d in progress.poll_ordered(stopping, place, want(BOB, 3)).deliveries
        ] == [(0, 0), (1, FAR), (2, 0)]
        assert self.durably_announced(store, lambda: progress.restart_stopped(stopping, place))
        assert progress.restart_stopped(stopping, place) == 0
        assert progress.backlog(stopping, [place])[0].stopped == 0
        for _ in range(2):  # told again if the reply is lost
            told = progress.poll_ordered(stopping, place, want(BOB, 4, 3))
            assert told.recall and not told.deliveries
        progress.hand_over(stopping, place, BOB)
        again = progress.poll_ordered(stopping, place, want(CAT, 4))
        assert shown(again) == [(0, 0, 1, False), (1, 1, 3, False), (2, 2, 1, False), (3, 3, 1, False)]
        assert (again.recall, again.deliveries[1].failures) == (False, 0)
        assert progress.settle(stopping, place, CAT, acks((0, 3))) == Settled()
        assert progress.committed(stopping.id, place) == 4

    def stop(self, store: Store, place: int, group: Group, clock: MovableClock, *numbers: int) -> None:
        """ANN, who has received them, fails them for good."""
        for number in numbers:
            for _ in range(2):
                store.progress.settle(group, place, ANN, retry(number, number, clock.ms))

    def test_what_stopped_can_be_listed(
        self, store: Store, place: int, stopping: Group, clock: MovableClock, other: Store
    ) -> None:
        """R23."""
        append(store, place, batch(9))
        assert store.progress.stopped(stopping, place, limit=9) == []
        store.progress.poll_ordered(stopping, place, want(ANN, 9))
        since = clock.ms
        self.stop(store, place, stopping, clock, 1, 4, 7)
        clock.ms += 500
        found = other.progress.stopped(stopping, place, limit=9)
        assert [(d.first, d.last, d.spent, d.reason, d.failing_since) for d in found] == [
            (number, number, 2, "no", since) for number in (1, 4, 7)
        ]
        assert spans(other.progress.stopped(stopping, place, limit=1, after=1)) == [(4, 4)]
        assert other.progress.stopped(stopping, place, limit=9, after=7) == []
        backlog = other.progress.backlog(stopping, [place])[0]
        assert (backlog.stopped, backlog.stopped_age_ms) == (3, 500)
        group = store.catalog.reset_group(stopping.topic, stopping.name, Start())
        assert other.progress.stopped(group, place, limit=9) == []

    def test_of_what_stopped_some_is_restarted(
        self, store: Store, place: int, stopping: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(6))
        progress = store.progress
        progress.poll_ordered(stopping, place, want(ANN, 6))
        assert spans(progress.settle(stopping, place, ANN, retry(1, 4, clock.ms)).kept) == [(1, 4)]
        progress.settle(stopping, place, ANN, retry(1, 4, clock.ms))  # four in one delivery
        assert progress.restart_stopped(stopping, place, [(0, 0), (2, 2), (5, 99)]) == 1
        assert spans(progress.stopped(stopping, place, limit=9)) == [(1, 1), (3, 4)]
        for _ in range(2):
            assert progress.peek(stopping, [place])[place].recalled
            assert progress.poll_ordered(stopping, place, want(ANN, 6, 6)).recall
        progress.hand_over(stopping, place, ANN)
        again = progress.poll_ordered(stopping, place, want(BOB, 6))
        assert [(d.first, d.last, d.visible_at) for d in again.deliveries] == [
            (0, 0, 0), (1, 1, FAR), (2, 2, clock.ms), (3, 4, FAR), (5, 5, 0),
        ]  # fmt: skip
        assert not progress.peek(stopping, [place])[place].recalled

    @pytest.mark.parametrize("held", [True, False])
    def test_what_stopped_is_skipped_under_a_stamp(
        self, store: Store, place: int, stopping: Group, clock: MovableClock, held: bool
    ) -> None:
        """I12: with its reason, and whoever resumes finds it; another stopped one stays where it is."""
        append(store, place, batch(4))
        progress = store.progress
        progress.poll_ordered(stopping, place, want(ANN, 4))
        self.stop(store, place, stopping, clock, 1, 2)
        if not held:
            progress.hand_over(stopping, place, ANN)
        left: list[Delivery] = []

        def skip() -> None:
            left.extend(progress.skip_stopped(stopping, place, DEAD, [(1, 1)]))

        assert self.durably_announced(store, skip)
        assert [(d.first, d.last, d.reason, d.spent) for d in left] == [(1, 1, "no", 2)]
        assert left[0].stamp is not None and left[0].stamp.partition_id == DEAD.partition_id
        assert progress.skip_stopped(stopping, place, DEAD, [(1, 1)]) == ()  # once more is harmless
        assert spans(progress.stopped(stopping, place, limit=9)) == [(2, 2)]
        assert progress.peek(stopping, [place])[place].recalled is held
        if held:
            assert progress.poll_ordered(stopping, place, want(ANN, 4, 4)).recall
            progress.hand_over(stopping, place, ANN)
        next_one = progress.poll_ordered(stopping, place, want(BOB, 4))
        assert [(d.first, d.last, d.visible_at) for d in next_one.deliveries] == [
            (0, 0, 0), (2, 2, FAR), (3, 3, 0),
        ]  # fmt: skip
        clock.ms += 60_000  # its mover went away
        progress.extend(stopping, place, BOB, [])
        taken_up = progress.poll_ordered(stopping, place, want(BOB, 4, 4)).leaving
        assert [(d.first, d.stamp) for d in taken_up] == [(1, left[0].stamp)]
        assert progress.settle(stopping, place, left[0].token, acks((1, 1))) == Settled()

    @pytest.mark.parametrize("held", [True, False])
    def test_what_stopped_is_dropped(
        self, store: Store, place: int, stopping: Group, clock: MovableClock, held: bool
    ) -> None:
        append(store, place, batch(5))
        progress = store.progress
        progress.poll_ordered(stopping, place, want(ANN, 5))
        progress.settle(stopping, place, ANN, acks((0, 0)))
        self.stop(store, place, stopping, clock, 1, 3)
        if not held:
            progress.hand_over(stopping, place, ANN)
        with self.failing_commits(store), pytest.raises(StoreError):
            progress.drop_stopped(stopping, place)
        dropped: list[int] = []
        assert self.durably_announced(
            store, lambda: dropped.append(progress.drop_stopped(stopping, place, [(1, 2)]))
        )
        assert dropped == [1] and progress.drop_stopped(stopping, place, [(1, 2)]) == 0
        assert progress.committed(stopping.id, place) == 2
        if held:
            assert progress.poll_ordered(stopping, place, want(ANN, 5, 5)).recall
            progress.hand_over(stopping, place, ANN)
        assert spans(progress.poll_ordered(stopping, place, want(BOB, 5))) == [(2, 2), (3, 3), (4, 4)]
        assert progress.drop_stopped(stopping, place) == 1  # all that is left
        assert progress.backlog(stopping, [place])[0].stopped == 0
        assert progress.settle(stopping, place, BOB, acks((2, 4))) == Settled()
        assert progress.committed(stopping.id, place) == 5

    def test_a_poisonous_message_is_stopped(
        self, store: Store, place: int, stopping: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(1))
        for token in (1, 2, 3):
            assert spans(store.progress.poll_ordered(stopping, place, want(token, 1))) == [(0, 0)]
            clock.ms += LEASE
        (stopped,) = store.progress.poll_ordered(stopping, place, want(4, 1)).deliveries
        assert (stopped.visible_at, stopped.suspect, stopped.alone) == (FAR, False, False)
        assert store.progress.restart_stopped(stopping, place) == 1


# ---- parked lines: what waits behind a failing message of its key is kept by the store (I27) ----


def park(*claimed: Span, id: int = 1, key: bytes | None = b"k") -> list[Settlement]:
    """The line claims these, and they are acked in the same call."""
    first, last = claimed[0][0], claimed[-1][1]
    line = Line(id, key, first, last, sum(b - a + 1 for a, b in claimed))
    return [Settlement(Kind.PARK, first, last, line=line), *acks(*claimed)]


class ParkingContract(OrderedHarness):
    def begun(self, store: Store, line: Group, place: int, *claimed: Span) -> None:
        """Ten messages in ANN's hands, the first of which fails; these are parked behind it."""
        append(store, place, batch(10))
        store.progress.poll_ordered(line, place, want(ANN, 10))
        store.progress.settle(line, place, ANN, retry(0, 0, store.now_ms() + 50))
        assert store.progress.settle(line, place, ANN, park(*claimed)) == Settled()

    def unpark(self, store: Store, line: Group, place: int, upto: int, *found: Span) -> Granted:
        return store.progress.unpark(line, place, ANN, "ann", 1, found, upto)

    def test_what_is_parked_is_unsettled_and_in_nobodys_hands(
        self, store: Store, place: int, line: Group, other: Store
    ) -> None:
        self.begun(store, line, place, (1, 1), (3, 4), (7, 7))
        store.progress.settle(line, place, ANN, acks((0, 0), (2, 2), (5, 6), (8, 9)))
        assert other.progress.lines(line, place) == [Line(1, b"k", 1, 7, 4)]
        assert other.progress.committed(line.id, place) == 1
        (backlog,) = other.progress.backlog(line, [place])
        assert (backlog.committed, backlog.unsettled, backlog.parked, backlog.messages) == (1, 4, 4, 4)
        assert other.progress.peek(line, [place])[place].parked == 4
        assert other.usage.committed([line], [place]) == {line.id: {place: 1}}
        assert store.progress.held_by(line.id, ANN) == {place}  # the partition, and no delivery of it
        store.progress.hand_over(line, place, ANN)
        assert shown(store.progress.poll_ordered(line, place, want(BOB, 10))) == []

    def test_only_the_holder_parks(self, store: Store, place: int, line: Group, clock: MovableClock) -> None:
        self.begun(store, line, place, (1, 1))
        assert store.progress.settle(line, place, BOB, park((3, 3), id=3)).lost == ((3, 3), (3, 3))
        clock.ms += LEASE
        store.progress.poll_ordered(line, place, want(BOB, 10))
        assert store.progress.settle(line, place, ANN, park((3, 3))).lost == ((3, 3), (3, 3))
        assert store.progress.lines(line, place) == [Line(1, b"k", 1, 1, 1)]

    def test_to_park_twice_is_to_park_once(self, store: Store, place: int, line: Group) -> None:
        self.begun(store, line, place, (1, 1), (3, 3))
        for _ in range(2):
            assert store.progress.settle(line, place, ANN, park((1, 1), (3, 3))) == Settled()
            assert store.progress.settle(line, place, ANN, park((5, 6))) == Settled()
        assert store.progress.lines(line, place) == [Line(1, b"k", 1, 6, 4)]
        with self.failing_commits(store), pytest.raises(StoreError):
            store.progress.settle(line, place, ANN, park((8, 8)))
        assert store.progress.lines(line, place) == [Line(1, b"k", 1, 6, 4)]

    def test_keys_have_lines_of_their_own_and_any_bytes(self, store: Store, place: int, line: Group) -> None:
        self.begun(store, line, place, (1, 1))
        long = bytes(range(256)) * 20
        for at, key in ((2, None), (3, b""), (4, long)):
            store.progress.settle(line, place, ANN, park((at, at), (at + 4, at + 4), id=at, key=key))
        store.progress.hand_over(line, place, ANN)
        granted = store.progress.poll_ordered(line, place, want(BOB, 10))
        assert [(one.key, one.first, one.last) for one in granted.lines] == [
            (b"k", 1, 1),
            (None, 2, 6),
            (b"", 3, 7),
            (long, 4, 8),
        ]

    def test_a_line_is_taken_out_from_its_start(self, store: Store, place: int, line: Group) -> None:
        """I6: asked again since the answer was lost, it is answered the same."""
        self.begun(store, line, place, (1, 1), (3, 4), (7, 7))
        store.progress.settle(line, place, ANN, acks((0, 0), (2, 2), (5, 6), (8, 9)))
        for _ in range(2):
            assert spans(self.unpark(store, line, place, 3, (1, 1), (3, 3))) == [(1, 1), (3, 3)]
        assert store.progress.lines(line, place) == [Line(1, b"k", 4, 7, 2)]
        assert spans(self.unpark(store, line, place, 4, (1, 1), (3, 4))) == [(1, 1), (3, 3), (4, 4)]
        store.progress.settle(line, place, ANN, acks((1, 1), (3, 4)))
        assert store.progress.committed(line.id, place) == 5
        for _ in range(2):  # the second time there is no line any more
            assert spans(self.unpark(store, line, place, 9, (7, 7))) == [(7, 7)]
        assert store.progress.lines(line, place) == []
        assert store.progress.settle(line, place, ANN, acks((7, 7))) == Settled()
        (backlog,) = store.progress.backlog(line, [place])
        assert (backlog.committed, backlog.messages, backlog.parked) == (10, 0, 0)

    def test_what_was_taken_out_is_like_any_delivery(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        self.begun(store, line, place, (1, 1), (3, 3))
        store.progress.settle(line, place, ANN, acks((0, 0), (2, 2), (4, 9)))
        self.unpark(store, line, place, 1, (1, 1))
        (kept,) = store.progress.settle(line, place, ANN, retry(1, 1, clock.ms + 9)).kept
        assert (kept.first, kept.attempt) == (1, 2)
        store.progress.settle(line, place, ANN, park((1, 1)))  # the holder decides what it parks
        self.unpark(store, line, place, 1, (1, 1))
        clock.ms += LEASE
        lapsed = store.progress.poll_ordered(line, place, want(BOB, 10))
        assert shown(lapsed) == [(1, 1, 2, True)] and lapsed.lines == (Line(1, b"k", 2, 3, 1),)

    def test_only_the_holder_takes_out(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        self.begun(store, line, place, (1, 1))
        refused = store.progress.unpark(line, place, BOB, "bob", 1, [(1, 1)], 1)
        assert refused.deliveries == () and refused.holder is not None and refused.holder.token == ANN
        assert store.progress.lines(line, place) == [Line(1, b"k", 1, 1, 1)]

    def test_the_next_holder_is_told_the_lines(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        self.begun(store, line, place, (1, 1), (3, 3))
        clock.ms += LEASE
        for _ in range(2):  # the second time the first reply was lost
            granted = store.progress.poll_ordered(line, place, want(BOB, 10, messages=2))
            assert granted.lines == (Line(1, b"k", 1, 3, 2),)
        assert store.progress.poll_ordered(line, place, want(BOB, 10, 0)).lines == ()

    def test_what_the_holder_has_not_received_comes_before_its_lines(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        """I5: it may be of the same key."""
        self.begun(store, line, place, (2, 2), (3, 3))
        store.progress.hand_over(line, place, ANN)
        store.progress.poll_ordered(line, place, want(BOB, 10, messages=1))
        early = store.progress.unpark(line, place, BOB, "bob", 1, [(2, 2)], 2)
        assert early.draining and early.deliveries == ()
        store.progress.poll_ordered(line, place, want(BOB, 10, 1))
        assert spans(store.progress.unpark(line, place, BOB, "bob", 1, [(2, 2)], 2)) == [(2, 2)]

    def test_settled_as_it_is_taken_out(self, store: Store, place: int, line: Group) -> None:
        """R16: at most once, so it is flushed."""
        self.begun(store, line, place, (1, 1), (3, 3))
        store.progress.settle(line, place, ANN, acks((0, 0), (2, 2), (4, 9)))

        def take() -> None:
            found = store.progress.unpark(line, place, ANN, "ann", 1, [(1, 1)], 2, on_delivery=True)
            assert spans(found) == [(1, 1)]

        assert self.flushed(store, take)
        assert store.progress.committed(line.id, place) == 3

    def test_retention_cuts_lines(self, store: Store, place: int, line: Group) -> None:
        append(store, place, *(batch(2) for _ in range(5)))
        store.progress.poll_ordered(line, place, want(ANN, 10))
        store.progress.settle(line, place, ANN, park((1, 1), (7, 7)))
        store.progress.settle(line, place, ANN, park((2, 2), (3, 3), id=2, key=b"l"))
        store.log.trim(place, 4)
        store.progress.poll_ordered(line, place, want(ANN, 10, 10), log_start=4)
        assert [(one.key, one.first, one.last) for one in store.progress.lines(line, place)] == [(b"k", 4, 7)]
        store.log.trim(place, 10)
        store.progress.poll_ordered(line, place, want(ANN, 10, 10), log_start=10)
        assert store.progress.lines(line, place) == []
        assert store.progress.committed(line.id, place) == 10

    def test_a_sealed_partition_with_a_line_is_not_drained(
        self, store: Store, place: int, line: Group
    ) -> None:
        """I10."""
        self.begun(store, line, place, (1, 1), (3, 3))
        self.seal(store, place)
        store.progress.poll_ordered(line, place, want(ANN, 11, 10))
        store.progress.settle(line, place, ANN, acks((0, 0), (2, 2), (4, 10)))
        assert not store.progress.drain(line, place)
        self.unpark(store, line, place, 3, (1, 1), (3, 3))
        assert not store.progress.drain(line, place)
        store.progress.settle(line, place, ANN, acks((1, 3)))
        assert store.progress.drain(line, place)

    def test_a_reset_forgets_lines(self, store: Store, place: int, line: Group) -> None:
        self.begun(store, line, place, (1, 1), (3, 3))
        again = store.catalog.reset_group(line.topic, line.name, Start("offsets", offsets=((0, 2),)))
        store.progress.rewind(again, [place])
        assert store.progress.lines(again, place) == []
        granted = store.progress.poll_ordered(again, place, want(BOB, 10))
        assert (spans(granted), granted.lines) == ([(2, 9)], ())
        store.progress.settle(again, place, BOB, park((4, 4), id=4))
        store.catalog.delete_group(line.topic, line.name)
        store.progress.forget(again.id)
        assert store.progress.lines(again, place) == []

    def test_in_a_group_that_is_shared_now_anybody_receives_them(
        self, store: Store, place: int, line: Group, clock: MovableClock
    ) -> None:
        self.begun(store, line, place, (1, 1), (3, 3))
        store.progress.settle(line, place, ANN, acks((0, 0), (2, 2), (4, 9)))
        shared = GroupSettings(lease_ms=LEASE, max_attempts=3)
        loose = store.catalog.alter_group(line.topic, line.name, shared, paused=False)
        store.progress.poll(loose, place, ask(BOB, 10))
        store.progress.unpark(loose, place, NOBODY, "", 1, [(1, 1), (3, 3)], 3)
        assert store.progress.lines(loose, place) == []
        assert spans(store.progress.poll(loose, place, ask(BOB, 10))) == [(1, 1), (3, 3)]
