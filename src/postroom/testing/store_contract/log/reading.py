"""`Log.read`, `bounds`, `offset_at` and `news`, each against a plain list of what was appended."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ....errors import UnknownPartition, UnknownProducer
from ....model.messages.batch import SEAL, build_control
from ....model.policy.settings import TopicSettings
from ....model.topology.route import split
from ....store.contract import Append, Bounds, Store, StoredBatch, Topic
from ..harness import MovableClock, StoreHarness, append, batch, in_threads, partitions, read_all, refused
from ..routes import carried_out

__all__ = ["MarkContract", "ReadContract", "RetentionContract"]


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


# ---- `Log.marks`, `removed`, `Catalog.incarnation`, `restored`: what tells a log from the one it was ----


def _mark(store: Store, place: int, offset: int) -> str | None:
    return store.log.marks({place: offset}).get(place)


class MarkContract(StoreHarness):
    def test_offsets_behind_one_batch_have_its_mark(self, store: Store, place: int) -> None:
        append(store, place, batch(3), batch(2, value=b"other"))
        marks = [_mark(store, place, offset) for offset in range(1, 6)]
        assert marks[0] is not None and marks[3] is not None
        assert marks == [marks[0]] * 3 + [marks[3]] * 2
        assert marks[0] != marks[3]
        assert _mark(store, place, 0) is None and _mark(store, place, 6) is None

    def test_other_messages_in_the_same_place_have_another_mark(self, store: Store) -> None:
        topic = store.catalog.create_topic("many", TopicSettings(), 3)
        one, other, same = partitions(topic)
        append(store, one, batch(3, value=b"one"))
        append(store, other, batch(3, value=b"other"))
        append(store, same, batch(3, value=b"one"))
        found = store.log.marks({one: 3, other: 3, same: 3})
        assert found[one] == found[same] != found[other]

    def test_marks_of_many_partitions_come_in_one_call(self, store: Store, other: Store) -> None:
        topic = store.catalog.create_topic("many", TopicSettings(), 64)
        places = partitions(topic)
        for place in places[::2]:
            append(store, place, batch(2, value=b"%d" % place))
        found = other.log.marks(dict.fromkeys(places, 2))
        assert set(found) == set(places[::2])
        assert len(set(found.values())) == len(found)

    def test_what_is_not_kept_has_no_mark(self, store: Store, place: int) -> None:
        append(store, place, batch(3), batch(2))
        before = _mark(store, place, 5)
        store.log.trim(place, 3)
        assert store.log.sweep(place, rows=100) == 1
        assert _mark(store, place, 3) is None
        assert _mark(store, place, 5) == before is not None

    def test_a_partition_that_is_gone_has_none(self, store: Store, topic: Topic, place: int) -> None:
        append(store, place, batch())
        store.catalog.delete_topic(topic.name)
        store.catalog.drop_log(place)
        with pytest.raises(UnknownPartition):
            store.log.marks({place: 1})

    def test_where_a_removed_partition_ended_is_known(self, store: Store, topic: Topic, place: int) -> None:
        append(store, place, batch(3))
        opened = carried_out(store, split(topic.route, topic.route.ranges[0].partition)).opens
        store.log.trim(place, 4)
        while store.log.sweep(place, rows=10):
            pass
        store.routes.remove(place)
        successor = opened[0].partition_id
        assert store.log.removed([place, successor, NOWHERE]) == {place: 4}

    def test_a_queue_has_one_incarnation_until_it_was_restored(self, store: Store, other: Store) -> None:
        first = store.catalog.incarnation()
        assert first and other.catalog.incarnation() == first
        second = other.catalog.restored()
        assert second != first and store.catalog.incarnation() == second


# ---- `Log.trim`, `sweep`, `expire_by_limits`, `forget_producers`: what goes and what stays (I19, R44) ----


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
