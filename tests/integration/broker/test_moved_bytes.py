"""Rows of a few bytes that unpack to megabytes are moved a few at a time: memory stays small (R56).

Anybody with a token may have thousands of them fall due in one moment, or stage them for one decision.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest

from postroom.broker.moves.staged import Publisher
from postroom.model.messages.batch import BatchBuilder, read_header
from postroom.model.policy.settings import TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import Append, Appended, Staged, Store, Topic
from postroom.testing.store_contract import MovableClock
from postroom.testing.store_contract.moving import mover
from postroom.testing.store_contract.staging import wish

ROWS, UNPACKED = 60, 4 * 1024 * 1024
ALLOWED = 96 * 1024 * 1024  # of the 240 MB that all of them would take


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
def store(clock: MovableClock) -> Iterator[Store]:
    opened = open_sqlite(None, clock)
    yield opened
    opened.close()


@pytest.fixture
def topic(store: Store) -> Topic:
    return store.catalog.create_topic("orders", TopicSettings(), 1)


def bomb(number: int, producer_id: int = -1) -> bytes:
    builder = BatchBuilder("zstd", max_bytes=2 * UNPACKED)
    assert builder.append(1_000 + number, None, bytes(UNPACKED), [])
    return builder.build(producer_id, 0, number if producer_id >= 0 else -1)


def arrived(store: Store, topic: Topic) -> int:
    (piece,) = topic.route.ranges
    found = store.log.read(piece.partition_id, 0, max_messages=10 * ROWS, max_bytes=2**30)
    assert [read_header(one.data).first_ts for one in found] == [1_000 + n for n in range(ROWS)]
    return len(found)


def test_of_delayed_messages_that_fall_due_together(store: Store, topic: Topic, clock: MovableClock) -> None:
    (piece,) = topic.route.ranges
    for number in range(ROWS):
        (result,) = store.log.append([Append(piece.partition_id, bomb(number, 5), clock.ms + 100)])
        assert isinstance(result, Appended)
    clock.ms += 1_000
    moving = mover(store, "mover")
    tracemalloc.start()
    try:
        moving.tick()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrived(store, topic) == ROWS
    assert peak < ALLOWED


def test_of_messages_that_are_staged_for_one_decision(store: Store, topic: Topic) -> None:
    (piece,) = topic.route.ranges
    rows = [Staged(topic.id, piece.partition_id, bomb(number)) for number in range(ROWS)]
    store.staging.put("q", 0, "a", 0, rows)
    publisher = Publisher(store)
    publisher.decide("q", 0, wish({"a": ROWS}))
    tracemalloc.start()
    try:
        assert publisher.publish("q", 0).published_at
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrived(store, topic) == ROWS
    assert peak < ALLOWED
