"""The pytest plugin: fixtures for users' tests. Installed with Postroom, nothing to import or configure.

    async def test_an_order_is_billed(postroom_queue):
        await postroom_queue.create_topics("orders", "bills")
        captured = postroom_queue.capture()
        await postroom_queue.send("orders", b'{"id": 1}')
        await postroom_queue.run_until_idle(app)
        assert captured.values("bills") == [b"1"]

Must never open anything before a test asks for it: pytest loads this module wherever Postroom is
installed. Must not need a plugin for asyncio, and works with any.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ..clock import ManualClock
    from .fixture import SyncTestQueue, TestQueue

__all__ = ["postroom_clock", "postroom_queue", "postroom_sync"]


@pytest.fixture
def postroom_clock() -> ManualClock:
    """The clock of the test's queue. It stands still until the test moves it: `advance(seconds)`."""
    from ..clock import ManualClock

    return ManualClock()


@pytest.fixture
def postroom_queue(postroom_clock: ManualClock) -> Iterator[TestQueue]:
    """A connection to a queue in memory, for async tests; with `capture()` and `run_until_idle(app)`."""
    from .fixture import TestQueue

    queue = TestQueue(postroom_clock)
    yield queue
    queue.end()


@pytest.fixture
def postroom_sync(postroom_clock: ManualClock) -> Iterator[SyncTestQueue]:
    """A queue for plain tests: `postroom.sync`'s names, without await."""
    from .fixture import open_sync

    queue = open_sync(postroom_clock)
    yield queue
    queue.close()
