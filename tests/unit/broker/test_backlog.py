"""The gate before a topic whose backlog is limited: what counts between two measurements (R9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from postroom.broker.publish.backlog import BacklogGate
from postroom.config import Limits
from postroom.errors import BacklogFull, StoreBusy
from postroom.model.policy.settings import TopicSettings
from postroom.store import SqlStore, open_memory
from postroom.store.contract import Append, Topic
from postroom.testing.store_contract.harness import batch

ANEW = Limits(backlog_look_ms=0)  # every batch measures the backlog


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    opened = open_memory(str(tmp_path))
    yield opened
    opened.close()


@pytest.fixture
def topic(store: SqlStore) -> Topic:
    return store.catalog.create_topic("orders", TopicSettings(max_backlog=3), 1)


def gate_on(store: SqlStore, limits: Limits = ANEW) -> BacklogGate:
    async def in_thread(function: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.to_thread(function, *args)

    return BacklogGate(store, limits, in_thread)


async def test_what_is_in_flight_counts_whenever_the_backlog_is_measured(
    store: SqlStore, topic: Topic
) -> None:
    gate = gate_on(store)
    for _ in range(3):
        (await gate.pass_through(topic, 1, 100)).__enter__()
    with pytest.raises(BacklogFull):
        await gate.pass_through(topic, 1, 100)


async def test_what_is_stored_counts_once(store: SqlStore, topic: Topic) -> None:
    gate = gate_on(store)
    for _ in range(3):
        with await gate.pass_through(topic, 1, 100):
            store.log.append([Append(topic.route.ranges[0].partition_id, batch())])
    with pytest.raises(BacklogFull):
        await gate.pass_through(topic, 1, 100)
    assert gate._in_flight == {}


@pytest.mark.parametrize("limits", [ANEW, Limits(backlog_look_ms=3_600_000)], ids=["anew", "remembered"])
async def test_what_failed_is_put_back(store: SqlStore, topic: Topic, limits: Limits) -> None:
    gate = gate_on(store, limits)
    for _ in range(10):
        with pytest.raises(StoreBusy), await gate.pass_through(topic, 1, 100):
            raise StoreBusy("not now")
    assert gate._in_flight == {}
    await gate.pass_through(topic, 1, 100)
