"""The pytest plugin: fixtures for users' tests. Installed with Penstock, nothing to import or configure.

    async def test_an_order_is_billed(penstock_queue):
        await penstock_queue.create_topics("orders", "bills")
        captured = penstock_queue.capture()
        await penstock_queue.send("orders", b'{"id": 1}')
        await penstock_queue.run_until_idle(app)
        assert captured.values("bills") == [b"1"]

Must never open anything before a test asks for it: pytest loads this module wherever Penstock is
installed. Must not need a plugin for asyncio, and works with any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..clock import ManualClock
    from .fixture import SyncTestQueue, TestQueue

__all__ = ["penstock_clock", "penstock_queue", "penstock_sync"]


@pytest.fixture
def penstock_clock() -> ManualClock:
    """The clock of the test's queue. It stands still until the test moves it: `advance(seconds)`."""
    from ..clock import ManualClock

    return ManualClock()


@pytest.fixture
def penstock_queue(penstock_clock: ManualClock) -> Iterator[TestQueue]:
    """A connection to a queue in memory, for async tests; with `capture()` and `run_until_idle(app)`."""
    from .fixture import TestQueue

    queue = TestQueue(penstock_clock)
    yield queue
    queue.end()


@pytest.fixture
def penstock_sync(penstock_clock: ManualClock) -> Iterator[SyncTestQueue]:
    """The same for plain tests: `penstock.sync`'s names, without await."""
    from .fixture import open_sync

    queue = open_sync(penstock_clock)
    yield queue
    queue.close()
