"""What is read ahead for those who are behind: given once, bounded, and never instead of an error."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from postroom.broker.deliver import fetch
from postroom.broker.deliver.fetch import ReadAhead, Wanted
from postroom.config import DEFAULTS
from postroom.errors import StoreUnavailable
from postroom.store.contract import StoredBatch
from tests.tuned import tuned

MEGABYTE = 1024 * 1024


class _Log:
    """Gives one batch at each offset, and counts who asked."""

    def __init__(self, size: int = 10) -> None:
        self.asked: list[tuple[int, int]] = []
        self.size = size
        self.fails = False

    def read(self, partition_id: int, offset: int, max_messages: int, max_bytes: int) -> list[StoredBatch]:
        self.asked.append((partition_id, offset))
        if self.fails:
            raise StoreUnavailable("the log cannot be read now")
        return [StoredBatch(offset, 1, 0, b"x" * self.size)]

    async def run(self, function: Callable[..., list[StoredBatch]], *args: Any) -> list[StoredBatch]:
        await asyncio.sleep(0)
        return function(*args)


async def test_what_was_read_ahead_is_given_once() -> None:
    log = _Log()
    ahead = ReadAhead(log.run, log.read, DEFAULTS)
    ahead.begin(1, 5, MEGABYTE)
    found = await ahead.take([Wanted(1, 5, MEGABYTE), Wanted(1, 6, MEGABYTE), Wanted(2, 5, MEGABYTE)])
    assert {key: [batch.base_offset for batch in batches] for key, batches in found.items()} == {(1, 5): [5]}
    assert await ahead.take([Wanted(1, 5, MEGABYTE)]) == {}
    assert log.asked == [(1, 5)]


async def test_the_same_is_not_read_twice_at_a_time() -> None:
    log = _Log()
    ahead = ReadAhead(log.run, log.read, DEFAULTS)
    ahead.begin(1, 5, MEGABYTE)
    ahead.begin(1, 5, MEGABYTE)
    await ahead.take([Wanted(1, 5, MEGABYTE)])
    assert log.asked == [(1, 5)]


async def test_without_room_nothing_is_read_ahead() -> None:
    log = _Log()
    ahead = ReadAhead(log.run, log.read, DEFAULTS)
    most = fetch._MOST_BYTES // MEGABYTE
    for offset in range(most + 5):
        ahead.begin(1, offset, MEGABYTE)
    wanted = [Wanted(1, offset, MEGABYTE) for offset in range(most + 5)]
    assert len(await ahead.take(wanted)) == most == len(log.asked)
    ahead.begin(1, 99, MEGABYTE)  # there is room again
    assert len(await ahead.take([Wanted(1, 99, MEGABYTE)])) == 1


async def test_batches_larger_than_what_was_asked_for_count_as_large_as_they_are() -> None:
    """A client that asks for one byte gets a whole batch (I17), and must not fill the memory by that."""
    log = _Log(size=8 * MEGABYTE)
    ahead = ReadAhead(log.run, log.read, DEFAULTS)
    for offset in range(20):
        ahead.begin(1, offset, 1)
        await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})  # it is read
    assert len(log.asked) * log.size == fetch._MOST_BYTES


async def test_what_nobody_asked_for_makes_room() -> None:
    log = _Log()
    ahead = ReadAhead(log.run, log.read, tuned(broker={"read_ahead_s": -1.0}))
    for offset in range(100):
        ahead.begin(1, offset, fetch._MOST_BYTES)
    found = await ahead.take([Wanted(1, offset, MEGABYTE) for offset in range(100)])
    assert list(found) == [(1, 99)]


async def test_a_failure_is_left_to_whoever_asks() -> None:
    log = _Log()
    log.fails = True
    ahead = ReadAhead(log.run, log.read, DEFAULTS)
    ahead.begin(1, 5, MEGABYTE)
    assert await ahead.take([Wanted(1, 5, MEGABYTE)]) == {(1, 5): []}
