"""Turns: one at a time, in bounded time, whatever becomes of the side file."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest

from postroom.config import DEFAULTS
from postroom.store.dialects.sqlite import FileLock

fcntl = pytest.importorskip("fcntl")

LIMITS = replace(DEFAULTS, busy_timeout_ms=5_000, side_lock_ms=5_000)
SOON = replace(DEFAULTS, busy_timeout_ms=50, side_lock_ms=50)


def taken_by_thread(turn: FileLock) -> tuple[threading.Thread, list[bool]]:
    """A thread that takes the turn, notes whether it got it, and gives it back."""
    result: list[bool] = []

    def take() -> None:
        result.append(turn.acquire())
        if result[0]:
            turn.release()

    thread = threading.Thread(target=take)
    thread.start()
    return thread, result


@pytest.fixture
def side_file(tmp_path: Path) -> Path:
    return tmp_path / "orders.db.lock"


@pytest.fixture
def pair(side_file: Path) -> Iterator[tuple[FileLock, FileLock]]:
    """Two processes' turns on the same file: what is locked belongs to the open file, not to the process."""
    with ExitStack() as stack:
        one, two = (stack.enter_context(closing(FileLock(side_file, LIMITS))) for _ in range(2))
        yield one, two


def test_another_process_waits_for_its_turn(pair: tuple[FileLock, FileLock]) -> None:
    one, two = pair
    assert one.acquire()
    thread, result = taken_by_thread(two)
    thread.join(0.05)
    assert thread.is_alive() and not result
    one.release()
    thread.join(4)
    assert result == [True]


def test_another_thread_waits_for_its_turn(side_file: Path) -> None:
    with closing(FileLock(side_file, LIMITS)) as turn:
        assert turn.acquire()
        thread, result = taken_by_thread(turn)
        thread.join(0.05)
        assert thread.is_alive() and not result
        turn.release()
        thread.join(4)
        assert result == [True]


def test_a_thread_gives_up_in_the_end(side_file: Path) -> None:
    with closing(FileLock(side_file, SOON)) as turn:
        assert turn.acquire()
        thread, result = taken_by_thread(turn)
        thread.join(4)
        assert result == [False]
        turn.release()
        assert turn.acquire()
        turn.release()


def test_a_process_that_keeps_its_turn_is_passed_over_in_the_end(side_file: Path) -> None:
    """SQLite's own lock decides then; its time-out gives the error (I15)."""
    with closing(FileLock(side_file, SOON)) as stuck, closing(FileLock(side_file, SOON)) as other:
        assert stuck.acquire()
        assert other.acquire()
        other.release()
        with open(side_file) as third, pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the release was not of the stuck one's lock
        stuck.release()


def test_without_a_side_file_threads_still_take_turns(tmp_path: Path) -> None:
    for path in (None, tmp_path / "missing" / "file"):
        with closing(FileLock(path, SOON)) as turn:
            assert turn.acquire()
            thread, result = taken_by_thread(turn)
            thread.join(4)
            assert result == [False]
            turn.release()


def test_a_turn_interrupted_while_it_waits_is_given_back(
    side_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: float) -> None:
        raise KeyboardInterrupt

    with closing(FileLock(side_file, LIMITS)) as holder, closing(FileLock(side_file, LIMITS)) as turn:
        assert holder.acquire()
        with monkeypatch.context() as patch:
            patch.setattr("postroom.store.dialects.sqlite.time.sleep", interrupt)
            with pytest.raises(KeyboardInterrupt):
                turn.acquire()
        holder.release()
        thread, result = taken_by_thread(turn)
        thread.join(4)
        assert result == [True]
