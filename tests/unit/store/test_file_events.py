"""Being told that a file was written; and what a watcher does where nobody tells."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.model.policy.settings import TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import Store
from postroom.store.dialects.watchers import FileEvents, open_events
from tests.tuned import Tune

LONG = 30.0
only_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="inotify is Linux's")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a-wal"
    path.touch()
    return path


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    found = open_sqlite(tmp_path / "queue.db")
    yield found
    found.close()


def opened(file: Path) -> FileEvents:
    events = open_events([str(file)])
    assert events is not None
    return events


@only_linux
def test_a_write_is_told_once_whoever_wrote(file: Path) -> None:
    events = opened(file)
    assert not events.wait(0)
    file.write_bytes(b"1")
    file.write_bytes(b"2")
    assert events.wait(LONG)
    assert not events.wait(0)
    events.close()


@only_linux
def test_a_wait_can_be_ended_by_another_thread(file: Path) -> None:
    events, began = opened(file), time.monotonic()
    threading.Timer(0.01, events.wake).start()
    assert not events.wait(LONG)
    assert time.monotonic() - began < LONG / 2
    events.close()


def test_where_nothing_tells_there_are_no_events(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert open_events([str(file.with_name("not-there"))]) is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert open_events([str(file)]) is None


@only_linux
def test_a_watcher_that_waits_is_told_of_a_commit_at_once(
    store: Store, monkeypatch: pytest.MonkeyPatch, tune: Tune
) -> None:
    tune(store={"watch_patience_s": LONG})
    watcher = store.watch()
    while any(watcher.changed()):
        pass
    monkeypatch.setattr(watcher, "_quiet_at", 0.0)
    threading.Timer(0.05, store.catalog.create_topic, ("t", TopicSettings(), 1)).start()
    began = time.monotonic()
    while not any(watcher.changed()):
        assert time.monotonic() - began < LONG / 2
    watcher.close()


def test_a_watcher_that_was_not_told_looks_by_itself(
    store: Store, monkeypatch: pytest.MonkeyPatch, tune: Tune
) -> None:
    class Deaf:
        closed = False

        def wait(self, seconds: float) -> bool:
            store.catalog.create_topic("t", TopicSettings(), 1)
            return False

        def wake(self) -> None: ...

        def close(self) -> None:
            self.closed = True

    deaf = Deaf()
    monkeypatch.setattr("postroom.store.dialects.sqlite.open_events", lambda files: deaf)
    tune(store={"watch_quiet_s": 0.0})
    watcher = store.watch()
    assert watcher.changed() == (True, True)
    assert watcher.changed()[0]  # the commit is seen, though nobody told of it
    assert deaf.closed
    assert watcher.changed() == (False, False)  # without a wait: it would make the topic again
    watcher.close()
