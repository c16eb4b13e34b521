"""The hint about a write-ahead log whose end was lost."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest

from postroom.cli.checks.sqlite import damaged_end, examine_file
from postroom.model.policy.settings import TopicSettings
from postroom.store import open_sqlite


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A queue as a crash leaves it: its files while it was open."""
    store = open_sqlite(tmp_path / "q.db")
    for number in range(5):
        store.catalog.create_topic(f"t{number}", TopicSettings(), 1)
    folder = tmp_path / "copy"
    folder.mkdir()
    for file in tmp_path.glob("q.db*"):
        shutil.copy(file, folder)
    store.close()
    return folder / "q.db"


def wal(path: Path) -> Path:
    return path.with_name(f"{path.name}-wal")


def hints(path: Path) -> list[str]:
    return [f.state for f in examine_file(path, lambda name, steps: None) if f.check == "wal end (log)"]


def test_a_whole_log_is_not_spoken_of(crashed: Path) -> None:
    assert wal(crashed).stat().st_size > 10_000
    assert not damaged_end(wal(crashed)) and hints(crashed) == []


@pytest.mark.parametrize("bytes_lost", [1, 4000])
def test_a_frame_that_was_cut_short_is_hinted_at(crashed: Path, bytes_lost: int) -> None:
    with wal(crashed).open("rb+") as file:
        file.truncate(wal(crashed).stat().st_size - bytes_lost)
    assert damaged_end(wal(crashed)) and hints(crashed) == ["warn"]


def test_a_frame_that_was_changed_is_hinted_at(crashed: Path) -> None:
    with wal(crashed).open("rb+") as file:
        file.seek(-100, 2)
        file.write(b"\xff" * 8)
    assert damaged_end(wal(crashed)) and hints(crashed) == ["warn"]


def test_frames_left_from_an_earlier_run_are_no_damage(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("CREATE TABLE t (a)")
    for _ in range(50):
        connection.execute("INSERT INTO t VALUES (?)", (b"x" * 3000,))
    connection.execute("PRAGMA wal_checkpoint(RESTART)")
    connection.execute("INSERT INTO t VALUES (1)")  # overwrites the first frames only
    assert not damaged_end(tmp_path / "x.db-wal")
    connection.close()
