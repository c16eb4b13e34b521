"""The writer: what is stored in the event loop, and what in the thread."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from postroom.backoff import Pauses
from postroom.broker.deliver.readable import TailCache
from postroom.broker.publish.writer import Writer
from postroom.config import Limits
from postroom.errors import ClosedError, PostroomError
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore, open_sqlite
from postroom.store.contract import Append, Appended
from postroom.testing.store_contract.harness import batch
from tests.tuned import tuned

EASY = tuned(broker={"commit_quick_s": 60.0})  # however busy the machine is


class Watched:
    """A log that notes in which thread, and how many at once, batches were stored."""

    def __init__(self, store: SqlStore) -> None:
        self.log = store.log
        self.stored: list[tuple[bool, int]] = []  # in the event loop's thread, batches
        self.loop = threading.get_ident()
        self.slow_s = 0.0
        self.fails: Exception | None = None

    def append(self, appends: Sequence[Append]) -> list[Appended | PostroomError]:
        self.stored.append((threading.get_ident() == self.loop, len(appends)))
        return self.log.append(appends)

    def append_at_once(self, appends: Sequence[Append]) -> list[Appended | PostroomError] | None:
        assert threading.get_ident() == self.loop
        if self.fails is not None:
            raise self.fails
        time.sleep(self.slow_s)
        found = self.log.append_at_once(appends)
        if found is not None:
            self.stored.append((True, len(appends)))
        return found


@pytest.fixture
async def watched(tmp_path: Path) -> AsyncIterator[Watched]:
    store = open_sqlite(tmp_path / "store.db")
    store.catalog.create_topic("orders", TopicSettings(), 1)
    yield Watched(store)
    store.close()


def writer_of(watched: Watched, limits: Limits = EASY) -> Writer:
    return Writer(watched, TailCache(10_000_000), limits, lambda ends: None, at_once=True)  # type: ignore[arg-type]


def sent(number: int, producer: int = 7, size: int = 10) -> Append:
    return Append(1, batch(producer=producer, sequence=number, value=b"x" * size))


async def test_one_after_the_other_is_stored_in_the_loop(watched: Watched) -> None:
    writer = writer_of(watched)
    found = [await writer.append(sent(number)) for number in range(5)]
    await writer.close()
    assert [one.base_offset for one in found] == [0, 1, 2, 3, 4]
    assert watched.stored == [(False, 1)] + [(True, 1)] * 4  # of the first, nothing is known


async def test_what_comes_together_is_one_commit(watched: Watched) -> None:
    writer = writer_of(watched)
    await writer.append(sent(0))
    found = await asyncio.gather(*(writer.append(sent(number)) for number in range(1, 6)))
    assert [one.base_offset for one in found] == [1, 2, 3, 4, 5]
    assert watched.stored[1:] == [(True, 5)]
    await asyncio.gather(*(writer.append(sent(number, size=20_000)) for number in range(6, 10)))
    assert {here for here, _ in watched.stored[2:]} == {False}  # that is much
    await writer.close()


async def test_now_and_then_the_thread_stores_one(watched: Watched) -> None:
    """It does the checkpoints that are put off in the loop."""
    writer = writer_of(watched)
    for number in range(250):
        await writer.append(sent(number))
    await writer.close()
    assert [at for at, (here, _) in enumerate(watched.stored) if not here] == [0, 101, 202]


async def test_a_slow_disk_holds_up_the_loop_seldom(watched: Watched) -> None:
    limits = tuned(broker={"commit_quick_s": 0.005, "commit_pauses": Pauses(3600.0, 3600.0)})
    writer = writer_of(watched, limits)
    watched.slow_s = 0.02
    for number in range(10):
        await writer.append(sent(number))
    await writer.close()
    assert sum(here for here, _ in watched.stored) <= 1


async def test_what_fails_in_the_loop_is_told_by_the_thread(watched: Watched) -> None:
    writer = writer_of(watched)
    await writer.append(sent(0))
    watched.fails = RuntimeError("a fault")
    assert (await writer.append(sent(1))).base_offset == 1
    assert watched.stored == [(False, 1), (False, 1)]
    await writer.close()


async def test_what_has_just_come_is_stored_when_it_is_closed(watched: Watched) -> None:
    writer = writer_of(watched)
    await writer.append(sent(0))
    last = writer.append(sent(1))
    await writer.close()
    assert (await last).base_offset == 1
    with pytest.raises(ClosedError):
        writer.append(sent(2))
    assert len(watched.log.read(1, 0, max_messages=10, max_bytes=10_000)) == 2
