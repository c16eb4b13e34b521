"""Where the tests run: on each kind of store in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from .stage import LONG

_FIXTURES = {"postgres": "postgres_ready", "mariadb": "mysql_ready"}


# MariaDB's turn in short runs is where it is restarted, and where partitions move between two shards.
@pytest.fixture(params=["sqlite", "postgres", "mariadb"] if LONG else ["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store with tables, on a server that the test must not stop."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'queue.db'}"
    return str(request.getfixturevalue(_FIXTURES[request.param]))
