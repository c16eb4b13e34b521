"""`Log.trim`, `sweep`, `expire_by_limits` and `forget_producers`: what goes, and what must not (I19, R44)."""

from __future__ import annotations

from ...errors import UnknownProducer
from ...model.settings import TopicSettings
from ...store.contract import Append, Store, Topic
from .harness import (
    MovableClock,
    StoreHarness,
    append,
    batch,
    in_threads,
    partitions,
    read_all,
    refused,
)

__all__ = ["RetentionContract"]


class RetentionContract(StoreHarness):
    # ---- trim ----

    def test_trim_raises_the_start_and_never_lowers_it(self, store: Store, place: int) -> None:
        append(store, place, batch(5), batch(5))
        wanted = [0, 3, 1, 7, -4, 7, 10, 2]
        assert [store.log.trim(place, below) for below in wanted] == [0, 3, 3, 7, 7, 7, 10, 10]
        assert store.log.bounds([place])[place].start == 10

    def test_trim_goes_no_further_than_the_end(self, store: Store, place: int) -> None:
        append(store, place, batch(5))
        assert store.log.trim(place, 2**62) == 5
        assert append(store, place, batch(2))[0].base_offset == 5
        assert store.log.bounds([place])[place].start == 5

    def test_trim_deletes_nothing_yet(self, store: Store, place: int) -> None:
        append(store, place, batch(2), batch(2))
        kept = read_all(store, place)
        store.log.trim(place, 4)
        assert store.log.read(place, 0, max_messages=10, max_bytes=10**6) == kept

    def test_trim_is_for_one_partition(self, store: Store) -> None:
        one, two = partitions(store.catalog.create_topic("wide", TopicSettings(), 2))
        append(store, one, batch(5))
        append(store, two, batch(5))
        store.log.trim(one, 3)
        assert [store.log.bounds([p])[p].start for p in (one, two)] == [3, 0]

    def test_trims_at_the_same_time_do_not_lower_the_start(self, store: Store, place: int) -> None:
        append(store, place, batch(1000))
        orders = [range(0, 1000, 40), range(990, 0, -40), range(3, 1000, 50), range(970, 0, -50)]

        def trim_all(order: range) -> list[int]:
            return [store.log.trim(place, below) for below in order]

        for starts, order in zip(in_threads(*(lambda o=o: trim_all(o) for o in orders)), orders, strict=True):
            assert starts == sorted(starts)
            assert all(start >= below for start, below in zip(starts, order, strict=True))
        assert store.log.bounds([place])[place].start == 990

    # ---- sweep ----

    def test_sweep_deletes_whole_batches_below_the_start_in_slices(self, store: Store, place: int) -> None:
        append(store, place, *(batch(2) for _ in range(10)))
        assert store.log.sweep(place, rows=3) == 0
        store.log.trim(place, 15)  # inside the eighth
        assert [store.log.sweep(place, rows=3) for _ in range(4)] == [3, 3, 1, 0]
        found = store.log.read(place, 0, max_messages=100, max_bytes=10**6)
        assert [piece.base_offset for piece in found] == [14, 16, 18]

    def test_offsets_go_on_when_all_is_swept(self, store: Store, place: int) -> None:
        append(store, place, batch(4, producer=7), batch(3))
        store.log.trim(place, 7)
        assert store.log.sweep(place, rows=100) == 2
        assert store.log.offset_at(place, 0) == 7
        done = append(store, place, batch(1, producer=7, sequence=4), batch(4, producer=7))
        assert [(d.base_offset, d.duplicate) for d in done] == [(7, False), (0, True)]
        assert [piece.base_offset for piece in read_all(store, place)] == [7]

    def test_the_log_of_a_deleted_topic_can_be_emptied(self, store: Store, topic: Topic, place: int) -> None:
        append(store, place, *(batch() for _ in range(5)))
        store.catalog.delete_topic(topic.name)
        assert store.log.trim(place, 2**62) == 5
        assert [store.log.sweep(place, rows=3) for _ in range(3)] == [3, 2, 0]
        store.catalog.drop_log(place)

    # ---- limits ----

    def test_limits_by_age_and_size(self, store: Store, place: int, clock: MovableClock) -> None:
        """Against a list: the lowest start that leaves nothing too old, and no more than so many bytes."""
        begin, log = clock.ms, list[tuple[int, int, int]]()
        for size in (3, 1, 4, 1, 5, 2):
            sent = batch(size, value=b"x" * 10 * size)
            log.append((append(store, place, sent)[0].base_offset, clock.ms, len(sent)))
            clock.ms += 7
        total = sum(length for _, _, length in log)
        moments = [0, *range(begin - 1, clock.ms + 2)]
        budgets = [0, 1, log[-1][2] - 1, log[-1][2], log[-1][2] + log[-2][2], total - 1, total, total + 1]
        for before in moments:
            for keep in budgets:
                start = store.log.expire_by_limits(place, before_ms=before, keep_bytes=keep)
                assert start == _limit(log, 16, before, keep)

    def test_limits_count_what_is_left_after_a_sweep(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        sizes = []
        for _ in range(6):
            sizes.append(len(batch(2)))
            append(store, place, batch(2))
            clock.ms += 10
        store.log.trim(place, 4)
        store.log.sweep(place, rows=100)
        assert store.log.expire_by_limits(place, before_ms=clock.ms - 25, keep_bytes=0) == 8
        assert store.log.expire_by_limits(place, before_ms=0, keep_bytes=sum(sizes[-3:])) == 6
        assert store.log.expire_by_limits(place, before_ms=clock.ms, keep_bytes=0) == 12

    def test_without_limits_all_is_kept(self, store: Store, place: int, clock: MovableClock) -> None:
        assert store.log.expire_by_limits(place, before_ms=clock.ms, keep_bytes=1) == 0
        append(store, place, batch(5))
        assert store.log.expire_by_limits(place, before_ms=0, keep_bytes=0) == 0

    # ---- producers ----

    def test_silent_producers_are_forgotten(self, store: Store, place: int, clock: MovableClock) -> None:
        append(store, place, batch(producer=1), batch(producer=2))
        clock.ms += 1000
        append(store, place, batch(producer=2, sequence=1), batch(producer=3))
        assert store.log.forget_producers(clock.ms) == 1
        assert store.log.forget_producers(clock.ms) == 0
        forgotten = store.log.append([Append(place, batch(producer=1, sequence=1))])[0]
        refused(forgotten, UnknownProducer)
        assert append(store, place, batch(producer=2))[0].duplicate
        assert append(store, place, batch(producer=3))[0].duplicate
        assert store.log.forget_producers(clock.ms + 1) == 2


def _limit(log: list[tuple[int, int, int]], end: int, before: int, keep: int) -> int:
    by_age = next((offset for offset, at, _ in log if at >= before), end) if before else 0
    if not keep:
        return by_age
    starts = [offset for offset, _, _ in log] + [end]
    left = [sum(length for _, _, length in log[number:]) for number in range(len(log) + 1)]
    by_size = next(start for start, size in zip(starts, left, strict=True) if size <= keep)
    return max(by_age, by_size)
