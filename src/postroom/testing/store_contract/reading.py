"""`Log.read`, `bounds`, `offset_at` and `news`, each against a plain list of what was appended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ...errors import UnknownPartition
from ...model.batch import SEAL, build_control
from ...model.settings import TopicSettings
from ...store.contract import Bounds, Store, StoredBatch, Topic
from .harness import MovableClock, StoreHarness, append, batch, partitions, read_all

__all__ = ["ReadContract"]

NOWHERE = 987_654_321
SIZES = [3, 1, 1, 4, 2, 1, 5]


class ReadContract(StoreHarness):
    # ---- read ----

    def test_a_read_gives_what_fits_and_at_least_one_batch(self, store: Store, place: int) -> None:
        append(store, place, *(batch(size, value=b"x" * 40 * size) for size in SIZES))
        kept = read_all(store, place)
        lengths = [len(piece.data) for piece in kept]
        budgets = {0, 1, *lengths, lengths[0] + lengths[1], sum(lengths) - 1, sum(lengths), 10**9}
        for offset in range(sum(SIZES) + 3):
            for max_messages in (1, 2, 3, 5, 8, 100):
                for max_bytes in budgets:
                    found = store.log.read(place, offset, max_messages=max_messages, max_bytes=max_bytes)
                    assert found == _within(kept, offset, max_messages, max_bytes)

    def test_an_offset_inside_a_batch_gives_that_batch(self, store: Store, place: int) -> None:
        append(store, place, batch(3), batch(5), batch(2))
        for offset in (3, 4, 7):
            found = store.log.read(place, offset, max_messages=1, max_bytes=1)
            assert [(piece.base_offset, piece.last_offset) for piece in found] == [(3, 7)]

    def test_there_is_nothing_beyond_the_end(self, store: Store, place: int) -> None:
        assert store.log.read(place, 0, max_messages=10, max_bytes=1000) == []
        append(store, place, batch(3))
        for offset in (3, 4, 10**15):
            assert store.log.read(place, offset, max_messages=10, max_bytes=1000) == []

    def test_a_read_below_what_is_kept_starts_with_the_first_that_is(self, store: Store, place: int) -> None:
        append(store, place, batch(3), batch(2), batch(4))
        store.log.trim(place, 6)
        assert store.log.sweep(place, rows=100) == 2
        for offset in range(6):
            found = store.log.read(place, offset, max_messages=100, max_bytes=10**6)
            assert [piece.base_offset for piece in found] == [5]

    def test_a_read_of_many_small_batches_goes_on_where_it_ended(self, store: Store, place: int) -> None:
        """One read may be cut; nothing is skipped between two of them."""
        append(store, place, *(batch() for _ in range(2500)))
        offset, reads = 0, 0
        while found := store.log.read(place, offset, max_messages=10**6, max_bytes=10**9):
            assert [piece.base_offset for piece in found] == list(range(offset, offset + len(found)))
            offset, reads = found[-1].last_offset + 1, reads + 1
        assert (offset, reads <= 25) == (2500, True)

    # ---- what is not there ----

    @pytest.mark.parametrize("gone", ["never", "deleted", "dropped"])
    def test_a_partition_that_is_gone_is_unknown(
        self, store: Store, topic: Topic, place: int, gone: str
    ) -> None:
        append(store, place, batch())
        if gone != "never":
            store.catalog.delete_topic(topic.name)
        if gone == "dropped":
            store.catalog.drop_log(place)
        wanted = NOWHERE if gone == "never" else place
        calls: list[Callable[[], object]] = [lambda: store.log.bounds([wanted])]
        if gone != "deleted":  # the log of a deleted topic is still there, to be emptied
            calls += [
                lambda: store.log.read(wanted, 0, max_messages=1, max_bytes=1),
                lambda: store.log.offset_at(wanted, 0),
                lambda: store.log.expire_by_limits(wanted, before_ms=1, keep_bytes=1),
                lambda: store.log.trim(wanted, 1),
            ]
        for call in calls:
            with pytest.raises(UnknownPartition) as caught:
                call()
            assert caught.value.details == {"partition_id": wanted}

    def test_bounds_of_several_partitions(self, store: Store) -> None:
        one, two, three = partitions(store.catalog.create_topic("wide", TopicSettings(), 3))
        append(store, one, batch(3), batch(2))
        append(store, two, batch(4))
        store.log.trim(one, 4)
        self.seal(store, two)
        expected = {one: Bounds(4, 5), two: Bounds(0, 5, sealed=True), three: Bounds(0, 0)}
        assert store.log.bounds([one, two, three]) == expected
        assert store.log.bounds(iter([two])) == {two: expected[two]}
        assert store.log.bounds([]) == {}
        with pytest.raises(UnknownPartition):
            store.log.bounds([one, NOWHERE])

    # ---- time ----

    def test_offset_at_is_the_first_batch_of_that_time_or_later(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        """Against a list, for every length of log and every moment; several batches share a moment."""
        begin, log = clock.ms, list[tuple[int, int]]()
        steps = [0, 0, 3, 0, 1, 5, 0, 0, 2, 1, 0, 4]
        for number, step in enumerate(steps):
            clock.ms += step
            offset = append(store, place, batch(1 + number % 3))[0].base_offset
            log.append((clock.ms, offset))
            end = store.log.bounds([place])[place].end
            for moment in range(begin - 2, clock.ms + 3):
                assert store.log.offset_at(place, moment) == _first_at(log, moment, end)

    def test_offset_at_when_the_older_part_is_gone(
        self, store: Store, place: int, clock: MovableClock
    ) -> None:
        log = []
        for _ in range(12):
            clock.ms += 10
            log.append((clock.ms, append(store, place, batch(2))[0].base_offset))
        for below in (1, 2, 9, 10, 23, 24):
            store.log.trim(place, below)
            store.log.sweep(place, rows=100)
            kept = [(at, offset) for at, offset in log if offset + 2 > below]
            for moment in range(log[0][0] - 1, clock.ms + 2):
                assert store.log.offset_at(place, moment) == _first_at(kept, moment, 24)

    def test_offset_at_in_an_empty_log_is_its_end(self, store: Store, place: int) -> None:
        assert store.log.offset_at(place, 0) == store.log.offset_at(place, 10**14) == 0

    # ---- news ----

    def test_news_tell_the_ends_and_the_catalogs_version(
        self, store: Store, topic: Topic, place: int
    ) -> None:
        before = store.log.news()
        assert before.ends == {place: 0}
        assert before.catalog_version == store.catalog.version()
        append(store, place, batch(3))
        after = store.log.news()
        assert (after.catalog_version, after.ends) == (before.catalog_version, {place: 3})
        one, two = partitions(store.catalog.create_topic("more", TopicSettings(), 2))
        append(store, two, batch(2))
        news = store.log.news()
        assert news.ends == {place: 3, one: 0, two: 2}
        assert news.catalog_version > before.catalog_version
        store.catalog.delete_topic(topic.name)
        assert store.log.news().ends == {one: 0, two: 2}

    def test_news_and_edges_of_some_partitions(self, store: Store, topic: Topic) -> None:
        """Edges are of those that ever had a message, and are still there."""
        one, two, three = partitions(store.catalog.create_topic("more", TopicSettings(), 3))
        append(store, two, batch(2))
        append(store, three, batch(5))
        store.log.trim(three, 4)
        gone = max(one, two, three) + 1000
        assert store.log.news([one, two, gone]).ends == {one: 0, two: 2}
        assert store.log.news([]).ends == {}
        assert store.log.news([]).catalog_version == store.catalog.version()
        assert store.log.edges() == {two: Bounds(0, 2), three: Bounds(4, 5)}
        assert store.log.edges([one, three, gone]) == {three: Bounds(4, 5)}
        assert store.log.edges(sealed=True) == store.log.edges([]) == {}
        store.log.seal(two, build_control(SEAL, b"", timestamp=1))
        assert store.log.edges(sealed=True) == {two: Bounds(0, 3, sealed=True)}
        assert store.log.edges([three], sealed=True) == {}
        store.catalog.delete_topic("more")
        assert store.log.edges() == {}

    def test_edges_of_volatile_topics(self, store: Store) -> None:
        (place,) = partitions(store.catalog.create_topic("fast", TopicSettings("volatile"), 1))
        append(store, place, batch(3))
        edges = store.log.edges([place])[place]
        assert (edges.messages, store.log.edges()) == (3, {place: edges})


def _within(kept: Sequence[StoredBatch], offset: int, max_messages: int, max_bytes: int) -> list[StoredBatch]:
    """The batch with `offset`, and those behind it while messages are wanted and the bytes suffice."""
    found: list[StoredBatch] = []
    for piece in kept:
        if piece.last_offset < offset:
            continue
        messages = found[-1].last_offset + 1 - offset if found else 0
        size = sum(len(other.data) for other in found)
        if found and (messages >= max_messages or size + len(piece.data) > max_bytes):
            break
        found.append(piece)
    return found


def _first_at(log: Sequence[tuple[int, int]], moment: int, end: int) -> int:
    return next((offset for at, offset in log if at >= moment), end)
