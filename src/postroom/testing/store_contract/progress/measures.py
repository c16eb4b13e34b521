"""`Progress.backlog`: how far behind a group is, against the same figures computed the long way (R43)."""

from __future__ import annotations

import random

import pytest

from ....errors import UnknownPartition
from ....model.delivery import first_waits
from ....model.delivery.delivery import Delivery, Kind, Settlement
from ....model.policy.settings import GroupSettings, Start, TopicSettings
from ....store.contract import Backlog, Group, Store, Topic
from ..harness import LEASE, MovableClock, StoreHarness, acks, append, ask, batch, partitions, read_all, spans

__all__ = ["MeasureContract", "WalkContract", "bytes_from"]


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

    def test_waits_of_the_last_minutes_are_counted_by_their_size(
        self, store: Store, topic: Topic, group: Group, clock: MovableClock
    ) -> None:
        (piece,) = topic.route.ranges
        append(store, piece.partition_id, batch(100))
        store.progress.rewind(group, [piece.partition_id])

        def waited(share: float) -> int | None:
            return first_waits.percentile(_backlog(store, group, piece.partition_id).first_waits, share)

        assert waited(0.5) is None
        for token, messages, waited_ms in ((1, 90, 100), (2, 10, 60_000)):
            asked = ask(token, 100, messages=messages)
            store.progress.poll(group, piece.partition_id, asked, waited_ms=waited_ms)
        median, most = waited(0.5), waited(0.95)
        assert median is not None and 80 <= median <= 125
        assert most is not None and 48_000 <= most <= 75_000
        clock.ms += 3_600_000
        assert waited(0.5) is None

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


# ---- a random walk over all verbs of a group's life, beside a model that keeps every offset by itself ----
# What a poll hands out is the model's to check, not to predict (`model.delivery` decides it and has tests
# of its own): nothing settled, nothing in other hands, nothing outside the log, and in the end
# everything.

LEASE_MS = 500
STEPS = 120


class WalkContract(StoreHarness):
    @pytest.mark.parametrize("seed", range(5))
    def test_any_walk_keeps_every_message_in_one_hand_until_it_is_settled(
        self, store: Store, topic: Topic, place: int, clock: MovableClock, seed: int
    ) -> None:
        """R1, R19, R21, I6, I7."""
        settings = GroupSettings(lease_ms=LEASE_MS, max_attempts=10_000)
        walk = _Walk(store, place, store.catalog.create_group(topic.name, "walk", settings), clock, seed)
        for _ in range(STEPS):
            walk.step()
            walk.check()
        walk.finish()


class _Walk:
    def __init__(self, store: Store, place: int, group: Group, clock: MovableClock, seed: int) -> None:
        self.store, self.place, self.group, self.clock = store, place, group, clock
        self.draw = random.Random(seed)
        self.start = self.end = self.cursor = 0
        self.unsettled: set[int] = set()  # below the cursor
        self.held: dict[int, tuple[int, int]] = {}  # offset → token, lease
        self.tokens: list[int] = []
        self.seen: set[int] = set()

    def step(self) -> None:
        steps = [
            self.add,
            self.poll,
            self.poll,
            self.poll_again,
            self.ack,
            self.ack,
            self.give_back,
            self.extend,
        ]
        self.draw.choice([*steps, self.wait, self.wait, self.trim, self.reset])()

    # ---- verbs ----

    def add(self) -> None:
        sizes = [self.draw.randint(1, 6) for _ in range(self.draw.randint(1, 4))]
        append(self.store, self.place, *(batch(size) for size in sizes))
        self.end += sum(sizes)

    def poll(self) -> None:
        token = self.draw.getrandbits(62) + 1
        self.tokens = [*self.tokens[-5:], token]
        for delivery in self._polled(token):
            assert delivery.visible_at == self.clock.ms + LEASE_MS
            for offset in range(delivery.first, delivery.last + 1):
                self._hand_out(offset, token)

    def _hand_out(self, offset: int, token: int) -> None:
        assert max(self.start, 0) <= offset < self.end
        assert offset in self.unsettled or offset >= self.cursor, "handed out after it was settled"
        assert self.held.get(offset, (0, 0))[1] <= self.clock.ms, "handed out while somebody holds it"
        self.cursor = max(self.cursor, offset + 1)
        self.unsettled.add(offset)
        self.held[offset] = (token, self.clock.ms + LEASE_MS)
        self.seen.add(offset)

    def poll_again(self) -> None:
        if not self.tokens:
            return
        token = self.draw.choice(self.tokens)
        mine = {offset for offset in self._of(token) if offset >= self.start}
        if mine:
            found = {o for d in self._polled(token) for o in range(d.first, d.last + 1)}
            assert found == mine, "the same poll was answered otherwise"
            self.held.update(dict.fromkeys(mine, (token, self.clock.ms + LEASE_MS)))

    def _polled(self, token: int) -> tuple[Delivery, ...]:
        empty_handed = self.draw.random() < 0.7
        wish = ask(token, self.end, messages=self.draw.randint(1, 12), empty_handed=empty_handed)
        granted = self.store.progress.poll(self.group, self.place, wish, log_start=self.start)
        self._passed_over()
        assert (granted.leaving, granted.unplaced) == ((), ())
        return granted.deliveries

    def _passed_over(self) -> None:
        """A poll with a start of the log has dropped what lies below it."""
        self.cursor = max(self.cursor, self.start)
        self.unsettled = {offset for offset in self.unsettled if offset >= self.start}
        self.held = {offset: held for offset, held in self.held.items() if offset >= self.start}

    def ack(self) -> None:
        if self.tokens:
            token, first, last = self._somewhere()
            done = self.store.progress.settle(self.group, self.place, token, acks((first, last)))
            mine = self._of(token) & set(range(first, last + 1))
            self.unsettled -= mine
            self._lose(mine)
            assert _offsets(done.lost) == {o for o in range(first, last + 1) if self._open(o)}

    def give_back(self) -> None:
        if not self.tokens:
            return
        token, first, last = self._somewhere()
        kind = self.draw.choice([Kind.RETRY, Kind.RELEASE])
        back = Settlement(kind, first, last, visible_at=self.clock.ms + self.draw.choice([0, 50, 700]))
        self.store.progress.settle(self.group, self.place, token, [back])
        self._lose(self._of(token) & set(range(first, last + 1)))

    def extend(self) -> None:
        if self.tokens:
            token, first, last = self._somewhere()
            lost = self.store.progress.extend(self.group, self.place, token, [(first, last)])
            mine = self._of(token) & set(range(first, last + 1))
            self.held.update(dict.fromkeys(mine, (token, self.clock.ms + LEASE_MS)))
            assert _offsets(lost) == set(range(first, last + 1)) - mine

    def wait(self) -> None:
        self.clock.ms += self.draw.choice([1, 100, LEASE_MS - 1, LEASE_MS, 3 * LEASE_MS])

    def trim(self) -> None:
        self.start = self.store.log.trim(self.place, min(self.end, self.start + self.draw.randint(0, 4)))
        self.store.log.sweep(self.place, rows=self.draw.choice([0, 1, 100]))

    def reset(self) -> None:
        if self.draw.random() < 0.3:
            to = Start("offsets", offsets=((0, self.draw.randint(0, self.end)),))
            self.group = self.store.catalog.reset_group(self.group.topic, self.group.name, to)
            self.store.progress.rewind(self.group, [self.place])
            self.cursor = max(self.start, min(to.offsets[0][1], self.end))
            self.unsettled, self.held, self.tokens = set(), {}, []

    # ---- what must hold ----

    def check(self) -> None:
        (found,) = self.store.progress.backlog(self.group, [self.place], open_spans=1000)
        unsettled = {offset for offset in self.unsettled if offset >= self.start}
        cursor = max(self.cursor, self.start)
        committed = min(unsettled, default=cursor)
        assert (found.cursor, found.end, found.unsettled) == (cursor, self.end, len(unsettled))
        assert (found.committed, _offsets(found.open)) == (committed, unsettled)
        assert found.bytes == bytes_from(self.store, self.place, committed)
        kept = self.store.progress.committed(self.group.id, self.place)
        assert kept is None or kept == min(self.unsettled, default=self.cursor)

    def finish(self) -> None:
        """Whatever happened before: consumers that live settle everything."""
        for token in range(1, 10_000):
            self.clock.ms += LEASE_MS
            wish = ask(token, self.end)
            granted = self.store.progress.poll(self.group, self.place, wish, log_start=self.start)
            self.store.progress.settle(self.group, self.place, token, acks(*spans(granted)))
            if self.store.progress.committed(self.group.id, self.place) == self.end:
                break
        (found,) = self.store.progress.backlog(self.group, [self.place])
        assert (found.committed, found.unsettled, found.bytes) == (self.end, 0, 0)

    # ---- help ----

    def _of(self, token: int) -> set[int]:
        return {offset for offset, (owner, _) in self.held.items() if owner == token}

    def _open(self, offset: int) -> bool:
        return offset in self.unsettled or offset >= self.cursor

    def _lose(self, offsets: set[int]) -> None:
        for offset in offsets:
            del self.held[offset]

    def _somewhere(self) -> tuple[int, int, int]:
        first = self.draw.randint(0, max(0, self.end - 1))
        return self.draw.choice(self.tokens), first, first + self.draw.randint(0, 8)


def _offsets(found: tuple[tuple[int, int], ...]) -> set[int]:
    offsets = [offset for first, last in found for offset in range(first, last + 1)]
    assert len(offsets) == len(set(offsets)), "an offset is there twice"
    return set(offsets)
