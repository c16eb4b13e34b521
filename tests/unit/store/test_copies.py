"""Who has a file open, while processes come and go."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from postroom.store import copies


def test_a_process_that_ends_meanwhile_has_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "queue.db"
    gone, found = Path("/proc/4194305"), [*Path("/proc").glob("[0-9]*")]  # no id is so high
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter([gone, *found, gone]))
    with file.open("wb"):
        assert copies.users_of([file]) == [os.getpid()]
    assert copies.users_of([file]) == []
