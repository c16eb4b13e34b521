"""`Store.watch`, `now_ms` and `close`. A watcher may wake without cause, but never fails to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from ...errors import PenstockError
from ...model.settings import GroupSettings, TopicSettings
from ...store.contract import Group, Store, Watcher
from .harness import MovableClock, StoreHarness, acks, append, ask, batch, in_threads

__all__ = ["WatchContract"]


class WatchContract(StoreHarness):
    def test_the_first_look_says_yes(self, store: Store) -> None:
        """So that whoever begins to watch looks once, at what came before."""
        with _watching(store) as watcher:
            assert watcher.changed() == (True, True)
            assert watcher.changed() == (False, False)

    def test_nothing_changes_by_reading(self, store: Store, place: int, group: Group) -> None:
        append(store, place, batch(3))
        with _watching(store) as watcher:
            watcher.changed()
            store.log.read(place, 0, max_messages=5, max_bytes=1000)
            store.log.news()
            store.catalog.topics()
            store.progress.peek(group, [place])
            store.progress.backlog(group, [place])
            store.duties.release("nothing", "nobody")
            assert watcher.changed()[1] is False

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
        log: list[Callable[[], object]] = [
            lambda: append(through, place, batch(5)),
            lambda: through.catalog.create_topic("more", TopicSettings(), 1),
            lambda: through.catalog.create_group("more", "billing", GroupSettings()),
            lambda: through.catalog.alter_group("orders", "billing", group.settings, True),
            lambda: through.log.trim(place, 1),
            lambda: through.duties.acquire("sweep", "me", 1000),
        ]
        progress: list[Callable[[], object]] = [
            lambda: through.progress.rewind(group, [place]),
            lambda: through.progress.poll(group, place, ask(1, 5)),
            lambda: through.progress.extend(group, place, 1, [(1, 1)]),
            lambda: through.progress.settle(group, place, 1, acks((1, 4))),
            lambda: through.progress.join(group.id, "ann", "host", 1000),
            lambda: through.progress.forget(group.id),
        ]
        watcher.changed()
        for verb in log:
            verb()
            assert watcher.changed() == (True, False)
            assert watcher.changed() == (False, False)
        for verb in progress:
            verb()
            assert watcher.changed() == (False, True)
            assert watcher.changed() == (False, False)

    def test_watchers_do_not_take_news_from_each_other(self, store: Store, place: int) -> None:
        with _watching(store) as one, _watching(store) as two:
            for watcher in (one, two):
                watcher.changed()
            append(store, place, batch())
            append(store, place, batch())
            assert (one.changed(), two.changed()) == ((True, False), (True, False))
            assert (one.changed(), two.changed()) == ((False, False), (False, False))

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
                    if watcher.changed()[0]:
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
            with pytest.raises(PenstockError):
                verb()
        store.close = lambda: None  # type: ignore[method-assign]  # the fixture closes it again


@contextmanager
def _watching(store: Store) -> Iterator[Watcher]:
    with closing(store.watch()) as watcher:
        yield watcher
