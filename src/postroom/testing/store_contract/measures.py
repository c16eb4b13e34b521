"""`Progress.backlog`: how far behind a group is, against the same figures computed the long way (R43)."""

from __future__ import annotations

import random

import pytest

from ...errors import UnknownPartition
from ...model.delivery import Kind, Settlement
from ...model.settings import GroupSettings, Start, TopicSettings
from ...store.contract import Backlog, Group, Store, Topic
from .harness import LEASE, MovableClock, StoreHarness, acks, append, ask, batch, partitions, read_all

__all__ = ["MeasureContract", "bytes_from"]


class MeasureContract(StoreHarness):
    # ---- how much ----

    def test_a_group_that_never_polled_is_behind_from_its_start(
        self, store: Store, place: int, group: Group
    ) -> None:
        append(store, place, batch(3), batch(4))
        late = store.catalog.create_group("orders", "late", GroupSettings(start=Start("latest")))
        append(store, place, batch(2))
        early = _backlog(store, group, place)
        assert (early.committed, early.cursor, early.end, early.unsettled) == (0, 0, 9, 0)
        assert early.bytes == sum(len(piece.data) for piece in read_all(store, place))
        behind = _backlog(store, late, place)
        assert (behind.committed, behind.cursor, behind.end) == (7, 7, 9)
        assert behind.bytes == len(batch(2))

    def test_the_figures_are_those_of_a_naive_count(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """For every way to settle 12 messages in three batches, one after another."""
        for size in (5, 3, 4):
            append(store, place, batch(size, value=b"x" * size * 9))
            clock.ms += 100
        draw = random.Random(7)
        store.progress.poll(group, place, ask(1, 12, messages=9))
        settled: set[int] = set()
        for offset in draw.sample(range(9), 9):
            store.progress.settle(group, place, 1, acks((offset, offset)))
            settled.add(offset)
            committed = min(set(range(10)) - settled)
            found = _backlog(store, group, place)
            assert (found.committed, found.cursor, found.end) == (committed, 9, 12)
            assert found.unsettled == 9 - len(settled)
            assert found.bytes == bytes_from(store, place, committed)
            assert found.oldest_age_ms == clock.ms - _appended_at(store, place, committed)

    def test_open_spans_are_listed_as_far_as_asked(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(10))
        store.progress.poll(group, place, ask(1, 10, messages=8))
        store.progress.settle(group, place, 1, acks((2, 3), (5, 5)))
        store.progress.settle(group, place, 1, [Settlement(Kind.RETRY, 7, 7, visible_at=clock.ms)])
        assert _backlog(store, group, place).open == ()
        for limit, expected in (
            (1, [(0, 1)]),
            (3, [(0, 1), (4, 4), (6, 6)]),
            (9, [(0, 1), (4, 4), (6, 6), (7, 7)]),
        ):
            assert list(store.progress.backlog(group, [place], open_spans=limit)[0].open) == expected
        for first, expected in ((1, [(0, 1), (4, 4)]), (2, [(4, 4), (6, 6)]), (7, [(7, 7)]), (8, [])):
            found = store.progress.backlog(group, [place], open_spans=2, open_from=first)[0]
            assert list(found.open) == expected
            assert found.unsettled == 5

    def test_nobody_is_behind_at_the_end(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        empty = _backlog(store, group, place)
        assert (empty.end, empty.bytes, empty.oldest_age_ms, empty.arrival_per_s, empty.drain_per_s) == (
            0,
        ) * 5
        append(store, place, batch(4))
        store.progress.poll(group, place, ask(1, 4))
        store.progress.settle(group, place, 1, acks((0, 3)))
        clock.ms += 5000
        done = _backlog(store, group, place)
        assert (done.committed, done.unsettled, done.bytes, done.oldest_age_ms) == (4, 0, 0, 0)

    def test_what_was_trimmed_no_longer_counts(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """Swept or not: a group that is behind the log has as much before it as is kept."""
        begin = clock.ms
        for _ in range(5):
            append(store, place, batch(4))
            clock.ms += 100
        store.progress.poll(group, place, ask(1, 20, messages=10))
        store.progress.settle(group, place, 1, acks((6, 6)))
        for below, committed, unsettled, appended_at in ((5, 5, 4, begin + 100), (14, 14, 0, begin + 300)):
            store.log.trim(place, below)
            for rows in (0, 100):
                store.log.sweep(place, rows=rows)
                found = store.progress.backlog(group, [place], open_spans=9)[0]
                assert (found.committed, found.cursor, found.unsettled) == (
                    committed,
                    max(10, below),
                    unsettled,
                )
                assert found.bytes == bytes_from(store, place, committed)
                assert found.oldest_age_ms == clock.ms - appended_at
                assert sum(last - first + 1 for first, last in found.open) == unsettled
        never = store.catalog.create_group("orders", "never", GroupSettings())
        store.log.trim(place, 18)
        store.log.sweep(place, rows=100)
        found = _backlog(store, never, place)
        assert (found.committed, found.cursor, found.bytes > 0) == (18, 18, True)

    def test_several_partitions_in_the_order_asked_for(self, store: Store) -> None:
        places = partitions(store.catalog.create_topic("wide", TopicSettings(), 3))
        group = store.catalog.create_group("wide", "billing", GroupSettings())
        for number, place in enumerate(places):
            append(store, place, batch(number + 1))
        asked = [places[2], places[0]]
        found = store.progress.backlog(group, asked)
        assert [(b.partition_id, b.end) for b in found] == [(places[2], 3), (places[0], 1)]
        assert store.progress.backlog(group, []) == []

    def test_a_reset_shows_at_once(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(8))
        store.progress.poll(group, place, ask(1, 8))
        reset = store.catalog.reset_group("orders", "billing", Start("offsets", offsets=((0, 6),)))
        found = store.progress.backlog(reset, [place], open_spans=5)[0]
        assert (found.committed, found.cursor, found.unsettled, found.open) == (6, 6, 0, ())

    def test_a_dropped_log_has_no_backlog(self, store: Store, topic: Topic, place: int, group: Group) -> None:
        store.progress.rewind(group, [place])
        store.catalog.delete_topic("orders")
        store.catalog.drop_log(place)
        with pytest.raises(UnknownPartition):
            store.progress.backlog(group, [place])

    # ---- how fast ----

    def test_the_first_wait_is_the_last_one_reported(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        append(store, place, batch(4))
        assert _backlog(store, group, place).first_wait_ms == 0
        store.progress.poll(group, place, ask(1, 4, messages=2), waited_ms=250)
        assert _backlog(store, group, place).first_wait_ms == 250
        store.progress.poll(group, place, ask(2, 4))
        assert _backlog(store, group, place).first_wait_ms == 250  # nobody said
        clock.ms += LEASE
        store.progress.poll(group, place, ask(3, 4), waited_ms=9000)
        assert _backlog(store, group, place).first_wait_ms == 250  # that was no first delivery

    def test_the_arrival_rate_is_that_of_the_last_minute(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        draw = random.Random(3)
        arrived: list[tuple[int, int]] = []
        for _ in range(60):
            clock.ms += draw.choice([1, 500, 2500, 4000])
            size = draw.randint(1, 5)
            append(store, place, batch(size))
            arrived.append((clock.ms, size))
            recent = sum(size for at, size in arrived if at >= clock.ms - 60_000)
            window_s = min(60.0, max(1.0, (clock.ms - arrived[0][0]) / 1000))
            assert _backlog(store, group, place).arrival_per_s == pytest.approx(recent / window_s)
        clock.ms += 60_001
        assert _backlog(store, group, place).arrival_per_s == 0

    def test_the_drain_rate_follows_what_is_settled(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        """Ten messages a second for a minute, then two, then none."""
        append(store, place, *(batch(100) for _ in range(8)))
        token = 0
        for rate, seconds in ((10, 60), (2, 60)):
            for _ in range(seconds):
                token += 1
                clock.ms += 1000
                granted = store.progress.poll(group, place, ask(token, 800, messages=rate))
                store.progress.settle(
                    group, place, token, acks(*((d.first, d.last) for d in granted.deliveries))
                )
                assert _backlog(store, group, place).drain_per_s >= 0
            assert _backlog(store, group, place).drain_per_s == pytest.approx(rate, rel=0.12)
        clock.ms += 3_600_000
        assert _backlog(store, group, place).drain_per_s < 0.05


def _backlog(store: Store, group: Group, place: int) -> Backlog:
    (found,) = store.progress.backlog(group, [place])
    assert found.partition_id == place
    return found


def bytes_from(store: Store, place: int, offset: int) -> int:
    """The bytes of all batches from that offset on; of the one it lies in, its share."""
    total = 0
    for piece in read_all(store, place):
        done = min(max(offset - piece.base_offset, 0), piece.records)
        total += len(piece.data) - len(piece.data) * done // piece.records
    return total


def _appended_at(store: Store, place: int, offset: int) -> int:
    return next(piece.appended_at for piece in read_all(store, place) if piece.last_offset >= offset)
