"""A queue that Kafka clients talk to, on every store: `queue` is a connection to it, they use `address`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import postroom
from postroom import Connection
from tests.contract.stores import SERVERS, places


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_url" in metafunc.fixturenames:
        stores = [store for store, _ in places(("sqlite", "postgres", "mysql"), served=False)]
        metafunc.parametrize("any_url", stores, indirect=True)


@pytest.fixture
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param in SERVERS:
        return str(request.getfixturevalue(SERVERS[request.param]))
    return f"sqlite:///{tmp_path}/q.db"


@pytest.fixture
async def queue(any_url: str) -> AsyncIterator[Connection]:
    async with postroom.connect(any_url, migrate=True) as mq:
        yield mq


@pytest.fixture
async def address(queue: Connection) -> AsyncIterator[str]:
    async with await queue.serve(port=0, kafka=0) as served:
        assert served.kafka is not None
        yield served.kafka
