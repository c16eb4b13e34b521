"""`Store.watch`, `now_ms` and `close`. A watcher may wake without cause, but never fails to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest

from ...errors import PostroomError
from ...model.delivery import Kind, Settlement
from ...model.settings import GroupSettings, TopicSettings
from ...store.contract import Group, Store, Watcher
from .harness import MovableClock, StoreHarness, append, ask, batch, in_threads

__all__ = ["WatchContract"]


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
        """All that lets a waiting poll find something, or makes what is cached of the catalog old."""
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
    """Whether it says so before long."""
    deadline = time.monotonic() + _SOON_S
    while not watcher.changed()[which]:
        if time.monotonic() > deadline:
            return False
    return True


def _quiet(watcher: Watcher) -> bool:
    """Whether it has nothing more to say, before long."""
    deadline = time.monotonic() + _SOON_S
    while watcher.changed() != (False, False):
        if time.monotonic() > deadline:
            return False
    return True


def _poll_and_release(store: Store, group: Group, place: int) -> None:
    store.progress.poll(group, place, ask(1, 5))
    store.progress.settle(group, place, 1, [Settlement(Kind.RELEASE, 0, 4)])
