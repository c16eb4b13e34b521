"""Fetch: when the log is read, and when a fetch is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from postroom.broker.deliver.fetch import Wanted
from postroom.endpoint.values import Fetched
from postroom.kafka.hot import Fetch, FetchedTopic, FetchPartition, FetchTopic
from postroom.kafka.reading import Reading
from postroom.model.topology.chain import Chain, Link
from postroom.store.contract import StoredBatch

BATCH = StoredBatch(0, 1, 0, b"\0" * 70)


class _Topic:
    """One partition, whose log is partition 7."""

    name, id = "orders", None

    def chain(self, index: int) -> Chain | None:
        return Chain(0, (Link(7, 0),)) if index == 0 else None


class _Broker:
    """A log that is empty until `arrive`."""

    def __init__(self) -> None:
        self.reads = 0
        self.read = asyncio.Event()
        self.batches: tuple[StoredBatch, ...] = ()
        self.news = asyncio.Event()

    async def view(self, name: str) -> _Topic:
        return _Topic()

    async def fetch_each(self, wanted: Sequence[Wanted], max_bytes: int) -> list[Fetched]:
        self.reads += 1
        self.read.set()
        return [Fetched(self.batches, 0, len(self.batches), False) for _ in wanted]

    @contextmanager
    def arrivals(self, partition_ids: Iterable[int]) -> Iterator[asyncio.Event]:
        assert set(partition_ids) == {7}
        self.news = asyncio.Event()
        yield self.news

    def arrive(self) -> None:
        self.batches = (BATCH,)
        self.news.set()


async def fetch(broker: Any, wait_ms: int) -> list[FetchedTopic]:
    reading = Reading(broker, broker, lambda operation, topic: None)
    wanted = FetchTopic("orders", None, [FetchPartition(0, 0, 1000)])
    return await reading.fetch(4, Fetch(wait_ms, 1, 1000, 0, [wanted]), 1 << 20)


async def test_a_fetch_that_waits_in_vain_reads_the_log_once() -> None:
    for wait_ms in (0, 20):
        broker = _Broker()
        (topic,) = await fetch(broker, wait_ms)
        assert [(one.error, one.end, one.pieces) for one in topic.partitions] == [(0, 0, [])]
        assert broker.reads == 1


async def test_what_arrives_ends_the_wait_at_once() -> None:
    broker = _Broker()
    waiting = asyncio.create_task(fetch(broker, 60_000))
    await broker.read.wait()
    broker.arrive()
    (topic,) = await asyncio.wait_for(waiting, 30)
    assert [(one.end, one.pieces) for one in topic.partitions] == [(1, [BATCH.data])]
    assert broker.reads == 2
