"""Parked lines: what waits behind a failing message of its key is kept by the store (I27)."""

from __future__ import annotations

import pytest

from ...errors import StoreError
from ...model.delivery import NOBODY, Kind, Settlement, Span
from ...model.parking import Line
from ...model.settings import GroupSettings, Start
from ...store.contract import Granted, Group, Settled, Store
from .harness import LEASE, MovableClock, acks, append, ask, batch, spans
from .ordered import ANN, BOB, OrderedHarness, retry, shown, want

__all__ = ["ParkingContract"]


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
