"""Where the tests run: on each kind of store in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

_FIXTURES = {"postgres": "postgres_ready", "mariadb": "mysql_ready"}


@pytest.fixture(params=["sqlite", "postgres", "mariadb"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store with tables, on a server that the test must not stop."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'queue.db'}"
    return str(request.getfixturevalue(_FIXTURES[request.param]))
