"""One Spark session for all tests here: it takes seconds to start, and a process has one.

They run in one process (`tests.sharing`), which is why there are few of them, each with much in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import postroom.spark
import postroom.sync

HERE = "tests/integration/spark/"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.nodeid.startswith(HERE):
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """May be there already: pages about Spark run in this process, too."""
    session = postroom.spark.session("postroom-tests", master="local[2]")
    session.sparkContext.setLogLevel("FATAL")
    yield session
    session.stop()


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/queue.db"


@pytest.fixture
def mq(url: str) -> Iterator[postroom.sync.Connection]:
    with postroom.sync.connect(url) as connection:
        yield connection
