"""Many at once: threads, and stores that know nothing of each other, on the same data (I1, R2, R21)."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from itertools import count

import pytest

from ...errors import PostroomError, StoreError, TopicExists, UnknownTopic
from ...model.delivery.delivery import Kind, Settlement
from ...model.policy.settings import GroupSettings, TopicSettings
from ...store.contract import Append, Appended, Group, Store, Topic, Watcher
from .harness import (
    MovableClock,
    StoreHarness,
    acks,
    append,
    ask,
    batch,
    in_threads,
    partitions,
    read_all,
    spans,
    stored,
    values,
)

__all__ = ["ConcurrencyContract", "WatchContract"]


WRITERS = 4
ROUNDS = 25
_Answer = tuple[int, int, Appended]  # producer, number of its batch, what it was told


class ConcurrencyContract(StoreHarness):
    # ---- append ----

    def test_many_writers_give_dense_offsets_and_no_batch_twice(
        self, store: Store, place: int, other: Store
    ) -> None:
        """Two threads through each of two stores; each batch is sent by two of them at the same time."""

        def write(through: Store, producers: tuple[int, int], step: threading.Barrier) -> list[_Answer]:
            done = []
            for number in range(ROUNDS):
                step.wait(30)  # a producer that runs far ahead of its twin makes the twin's repeats too old
                calls = [
                    Append(place, batch(2, producer=who, sequence=2 * number, value=b"%d:%d" % (who, number)))
                    for who in producers
                ]
                for who, result in zip(producers, through.log.append(calls), strict=True):
                    done.append((who, number, stored(result)))
            return done

        left, right = threading.Barrier(2), threading.Barrier(2)
        results = in_threads(
            lambda: write(store, (1, 2), left),
            lambda: write(other, (2, 1), left),
            lambda: write(other, (3, 4), right),
            lambda: write(store, (4, 3), right),
        )
        answers = [answer for done in results for answer in done]
        kept = read_all(store, place)
        assert len(kept) == WRITERS * ROUNDS
        assert len(set(values(kept))) == 2 * WRITERS * ROUNDS
        offsets: dict[tuple[int, int], set[int]] = {}
        for who, number, done in answers:
            offsets.setdefault((who, number), set()).add(done.base_offset)
        assert all(len(found) == 1 for found in offsets.values())  # both were told the same place
        assert Counter(done.duplicate for _, _, done in answers) == {False: 100, True: 100}
        for who in range(1, WRITERS + 1):
            in_order = [min(offsets[who, number]) for number in range(ROUNDS)]
            assert in_order == sorted(in_order)

    def test_a_reader_never_sees_a_hole_that_fills_later(
        self, store: Store, place: int, other: Store
    ) -> None:
        """The offset pitfall: whoever reads on from the last offset it saw misses nothing."""
        writing = threading.Event()
        total = WRITERS * ROUNDS * 3

        def write(through: Store) -> None:
            for _ in range(ROUNDS):
                append(through, place, batch(1), batch(2))

        def follow(through: Store) -> list[int]:
            last, found = 0, []
            while last < total:
                ended = writing.is_set()
                batches = through.log.read(place, last, max_messages=50, max_bytes=10**6)
                assert batches or not ended, f"the log ends at {last}, after all was written"
                for piece in batches:
                    assert piece.base_offset == last, "something is missing, and may appear later"
                    last = piece.last_offset + 1
                    found.append(piece.base_offset)
            return found

        def write_all() -> list[int]:
            in_threads(*(lambda through=through: write(through) for through in (store, other, store, other)))
            writing.set()
            return []

        _, one, two = in_threads(write_all, lambda: follow(store), lambda: follow(other))
        assert one == two == [piece.base_offset for piece in read_all(store, place)]

    def test_ends_are_never_ahead_of_what_can_be_read(self, store: Store, place: int, other: Store) -> None:
        def write() -> None:
            for _ in range(ROUNDS * 2):
                append(store, place, batch(2))

        def look() -> None:
            end = 0
            while end < ROUNDS * 4:
                end = other.log.bounds([place])[place].end
                assert other.log.news().ends[place] >= end
                if end:
                    assert other.log.read(place, end - 1, max_messages=1, max_bytes=1), (
                        "told of, but not there"
                    )

        in_threads(write, look)

    def test_appends_to_several_partitions_do_not_lock_each_other_out(
        self, store: Store, other: Store
    ) -> None:
        """I1: locks are taken in one order, whatever the order of the call."""
        places = partitions(store.catalog.create_topic("wide", TopicSettings(), 4))

        def write(through: Store, seed: int) -> None:
            draw = random.Random(seed)
            for _ in range(15):
                order = draw.sample(places, len(places))
                for result in through.log.append([Append(place, batch()) for place in order]):
                    stored(result)

        in_threads(
            *(lambda s=s, through=through: write(through, s) for s, through in enumerate([store, other] * 2))
        )
        assert {b.end for b in store.log.bounds(places).values()} == {60}

    def test_a_failing_writer_harms_no_other(self, store: Store, place: int, other: Store) -> None:
        def fail() -> int:
            failed = 0
            for _ in range(10):
                with self.failing_commits(other):
                    try:
                        append(other, place, batch(3))
                    except StoreError:
                        failed += 1
            return failed

        def write() -> int:
            return sum(1 for _ in range(20) if append(store, place, batch(2)))

        if other is store:
            return  # it cannot fail for one of two alone
        assert in_threads(fail, write) == [10, 20]
        assert len(read_all(store, place)) == 20

    def test_nobody_sees_what_is_not_committed(self, store: Store, place: int, other: Store) -> None:
        """Whoever looks while a transaction is under way sees what was before it, or waits for its end."""
        begun, looked = threading.Event(), threading.Event()

        def look(through: Store) -> tuple[int, int]:
            through.log.bounds([place])  # connected before, so that only the look itself may wait
            ready.wait(30)
            assert begun.wait(30)
            found = through.log.read(place, 0, max_messages=9, max_bytes=10**6)
            end = through.log.bounds([place])[place].end
            looked.set()
            return end, len(found)

        def meanwhile() -> None:
            begun.set()
            looked.wait(0.3)  # a store may make readers wait

        def fail() -> tuple[int, int]:
            ready.wait(30)
            with self.failing_commits(store, meanwhile), pytest.raises(StoreError):
                append(store, place, batch(3))
            return 0, 0

        ready = threading.Barrier(3)
        assert in_threads(fail, lambda: look(store), lambda: look(other)) == [(0, 0)] * 3

    # ---- deliveries ----

    def test_a_message_is_in_one_hand_at_a_time(
        self, store: Store, place: int, group: Group, other: Store
    ) -> None:
        append(store, place, *(batch(10) for _ in range(30)))
        tokens = count(1)

        def consume(through: Store, member: str) -> list[int]:
            mine: list[int] = []
            while True:
                token = next(tokens)
                granted = through.progress.poll(group, place, ask(token, 300, messages=7, member=member))
                if not granted.deliveries:
                    return mine
                for first, last in spans(granted):
                    mine += range(first, last + 1)
                done = through.progress.settle(group, place, token, acks(*spans(granted)))
                assert done.lost == ()

        hands = [(store, "ann"), (other, "bob"), (store, "cat"), (other, "dan")]
        found = in_threads(*(lambda t=t, m=m: consume(t, m) for t, m in hands))
        assert sorted(offset for mine in found for offset in mine) == list(range(300))
        assert store.progress.committed(group.id, place) == 300

    def test_the_first_poll_of_many_makes_one_beginning(
        self, store: Store, place: int, group: Group, other: Store
    ) -> None:
        append(store, place, batch(40))
        calls = [
            lambda number=number, through=through: through.progress.poll(
                group, place, ask(number + 1, 40, messages=10, member=f"m{number}")
            )
            for number, through in enumerate([store, other] * 2)
        ]
        granted = in_threads(*calls)
        assert sorted(span for one in granted for span in spans(one)) == [
            (0, 9),
            (10, 19),
            (20, 29),
            (30, 39),
        ]

    # ---- catalog ----

    def test_of_many_who_create_a_topic_one_does(self, store: Store, other: Store) -> None:
        def create(through: Store, name: str) -> bool:
            try:
                through.catalog.create_topic(name, TopicSettings(), 2)
            except TopicExists:
                return False
            return True

        for name in ("a", "b", "c"):
            made = in_threads(*(lambda t=t, n=name: create(t, n) for t in (store, other, store, other)))
            assert sum(made) == 1
        assert [topic.name for topic in store.catalog.topics()] == ["a", "b", "c"]
        ids = [place for topic in store.catalog.topics() for place in partitions(topic)]
        assert len(ids) == len(set(ids)) == 6

    def test_a_topic_is_there_as_a_whole_or_not_at_all(self, store: Store, other: Store) -> None:
        ended = threading.Event()

        def come_and_go() -> None:
            for _ in range(10):
                store.catalog.create_topic("flighty", TopicSettings(), 2)
                store.catalog.delete_topic("flighty")
            ended.set()

        def whole(*topics: Topic) -> None:
            assert all(len(topic.route.ranges) == 2 for topic in topics)

        def look(read: Callable[[], object]) -> None:
            while not ended.is_set():
                try:
                    read()
                except UnknownTopic:
                    pass

        in_threads(
            come_and_go,
            lambda: look(lambda: whole(other.catalog.topic("flighty"))),
            lambda: look(lambda: whole(*other.catalog.topics())),
            lambda: look(lambda: other.catalog.groups("flighty")),
        )

    def test_every_change_of_the_catalog_counts(self, store: Store, other: Store) -> None:
        before = store.catalog.version()

        def create(through: Store, prefix: str) -> None:
            for number in range(5):
                through.catalog.create_topic(f"{prefix}{number}", TopicSettings(), 1)

        in_threads(lambda: create(store, "a"), lambda: create(other, "b"), lambda: create(store, "c"))
        assert store.catalog.version() == other.catalog.version() >= before + 15

    # ---- reads beside retention ----

    def test_looking_for_a_time_ends_while_the_log_is_swept(
        self, store: Store, place: int, other: Store
    ) -> None:
        append(store, place, *(batch(3) for _ in range(400)))
        ended = threading.Event()

        def sweep() -> None:
            for below in range(0, 1200, 60):
                store.log.trim(place, below)
                while store.log.sweep(place, rows=8):
                    pass
            ended.set()

        def look() -> None:
            while not ended.is_set():
                assert 0 <= other.log.offset_at(place, 1) <= 1200
                assert other.log.offset_at(place, 2**60) == 1200

        in_threads(sweep, look, look)


# ---- `Store.watch`, `now_ms` and `close` ----
# A watcher may wake without cause, but never fails to.


class WatchContract(StoreHarness):
    def test_the_first_look_says_yes(self, store: Store) -> None:
        """So that whoever begins to watch looks once, at what came before."""
        with _watching(store) as watcher:
            assert watcher.changed() == (True, True)
            assert _quiet(watcher)

    def test_nothing_changes_by_reading(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(3))
        with _watching(store) as watcher:
            assert _quiet(watcher)
            store.log.read(place, 0, max_messages=5, max_bytes=1000)
            store.log.news()
            store.catalog.topics()
            store.progress.peek(group, [place])
            store.progress.backlog(group, [place])
            assert watcher.changed() == (False, False)

    def test_commits_of_others_are_noticed(
        self, store: Store, place: int, group: Group, other: Store
    ) -> None:
        with _watching(store) as watcher:
            self._every_kind(watcher, other, place, group)

    def test_ones_own_commits_are_noticed_too(self, store: Store, place: int, group: Group) -> None:
        """A watcher serves every thread of its process; it does not ask who it was."""
        with _watching(store) as watcher:
            self._every_kind(watcher, store, place, group)

    @staticmethod
    def _every_kind(watcher: Watcher, through: Store, place: int, group: Group) -> None:
        """Do all that lets a poll find something, or makes what is cached of the catalog old."""
        log: list[Callable[[], object]] = [
            lambda: append(through, place, batch(5)),
            lambda: through.catalog.create_topic("more", TopicSettings(), 1),
            lambda: through.catalog.create_group("more", "billing", GroupSettings()),
            lambda: through.catalog.alter_group("orders", "billing", group.settings, True),
            lambda: append(through, place, batch(5)),
        ]
        progress: list[Callable[[], object]] = [
            lambda: through.progress.rewind(group, [place]),
            lambda: _poll_and_release(through, group, place),
            lambda: through.progress.forget(group.id),
        ]
        for verb in log:
            assert _quiet(watcher)
            verb()
            assert _noticed(watcher, 0), "log or catalog"
        for verb in progress:
            assert _quiet(watcher)
            verb()
            assert _noticed(watcher, 1), "progress"

    def test_watchers_do_not_take_news_from_each_other(self, store: Store, place: int) -> None:
        with _watching(store) as one, _watching(store) as two:
            for watcher in (one, two):
                assert _quiet(watcher)
            append(store, place, batch())
            append(store, place, batch())
            assert _noticed(one, 0) and _noticed(two, 0)
            assert _quiet(one) and _quiet(two)

    def test_what_was_announced_can_be_seen(self, store: Store, place: int, other: Store) -> None:
        """Whoever sleeps until `changed` and then looks misses no commit."""
        ended = threading.Event()

        def write() -> None:
            for _ in range(60):
                append(other, place, batch())
            ended.set()

        def watch() -> int:
            seen = 0
            with _watching(store) as watcher:
                while True:
                    last = ended.is_set()
                    if _noticed(watcher, 0) if last and seen < 60 else watcher.changed()[0]:
                        seen = store.log.bounds([place])[place].end
                    if last:
                        return seen

        assert in_threads(watch, write)[0] == 60

    # ---- the store itself ----

    def test_the_clock_is_the_stores(self, store: Store, clock: MovableClock) -> None:
        clock.ms += 12_345
        assert store.now_ms() == clock.ms

    def test_a_closed_store_says_so(
        self, store: Store, place: int, group: Group, clock: MovableClock
    ) -> None:
        store.close()
        verbs: list[Callable[[], object]] = [
            lambda: append(store, place, batch()),
            lambda: store.log.read(place, 0, max_messages=1, max_bytes=1),
            lambda: store.catalog.topics(),
            lambda: store.progress.poll(group, place, ask(1, 1)),
            lambda: store.duties.acquire("sweep", "me", 1000),
        ]
        for verb in verbs:
            with pytest.raises(PostroomError):
                verb()
        store.close = lambda: None  # type: ignore[method-assign]  # the fixture closes it again


@contextmanager
def _watching(store: Store) -> Iterator[Watcher]:
    with closing(store.watch()) as watcher:
        yield watcher


_SOON_S = 5.0  # a watcher wakes long before; but the machine may be busy


def _noticed(watcher: Watcher, which: int) -> bool:
    """Tell whether it says so before long."""
    deadline = time.monotonic() + _SOON_S
    while not watcher.changed()[which]:
        if time.monotonic() > deadline:
            return False
    return True


def _quiet(watcher: Watcher) -> bool:
    """Tell whether it has nothing more to say, before long."""
    deadline = time.monotonic() + _SOON_S
    while watcher.changed() != (False, False):
        if time.monotonic() > deadline:
            return False
    return True


def _poll_and_release(store: Store, group: Group, place: int) -> None:
    store.progress.poll(group, place, ask(1, 5))
    store.progress.settle(group, place, 1, [Settlement(Kind.RELEASE, 0, 4)])
