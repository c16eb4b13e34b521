"""What the tests of the SDK share: a clock that they move, and connections to one empty store.

    any_url      the store, for tests that open it in ways of their own: they run embedded
    opened       opens connections to it, embedded or served: `async with opened() as other`
    connection   one that is open
    mq           the same; a file that wants topics in it makes them in a fixture of this name

`tests.contract.stores` says on which stores and endpoints a test runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import postroom
from postroom import Connection
from postroom.clock import Clock, ManualClock
from tests.contract.brokers import serving
from tests.contract.stores import SERVERS, Open, places


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "any_url" not in metafunc.fixturenames:
        return
    stores = metafunc.definition.get_closest_marker("stores")
    both = "endpoint" in metafunc.fixturenames
    served = both and metafunc.definition.get_closest_marker("embedded") is None
    found = places(stores and stores.args, served=served)
    ids = [store if endpoint == "embedded" else f"{store}-{endpoint}" for store, endpoint in found]
    if both:
        metafunc.parametrize(("any_url", "endpoint"), found, indirect=True, ids=ids)
    else:
        metafunc.parametrize("any_url", [store for store, _ in found], indirect=True, ids=ids)


@pytest.fixture
def any_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store; connections to it ask for `migrate=True`."""
    if request.param in SERVERS:
        return str(request.getfixturevalue(SERVERS[request.param]))
    return f"sqlite:///{tmp_path}/q.db" if request.param == "sqlite" else f"memory://{tmp_path.name}"


@pytest.fixture
def endpoint(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def opened(any_url: str, endpoint: str, clock: Clock | None) -> AsyncIterator[Open]:
    """Opens connections to one and the same store."""
    if endpoint == "embedded":
        yield lambda: postroom.connect(any_url, migrate=True, clock=clock)
        return
    async with postroom.connect(any_url, migrate=True, clock=clock) as host, serving(host) as url:
        yield lambda: postroom.connect(url, clock=clock)


@pytest.fixture
async def connection(opened: Open) -> AsyncIterator[Connection]:
    async with opened() as connection:
        yield connection


@pytest.fixture
def mq(connection: Connection) -> Connection:
    return connection
