"""Staging of a queue on several shards: it is on the first, and partitions may be away (I20, R6)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from postroom.address import parse
from postroom.broker.moves.staged import Publisher
from postroom.errors import StoreUnavailable
from postroom.model.policy.settings import TopicSettings
from postroom.store import open_store
from postroom.store.sharded.store import ShardedStore
from postroom.testing.store_contract import MovableClock
from postroom.testing.store_contract.harness import read_all, values
from postroom.testing.store_contract.staging import stage, wish
from tests.contract.store.test_across_shards import away, moved

VALUES = [f"k{number}.{turn}" for turn in range(20) for number in range(20)]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ShardedStore]:
    first, second = (parse(f"sqlite:///{tmp_path}/{name}.db") for name in ("first", "second"))
    opened = open_store(first, MovableClock(), shards={"b": second})
    assert isinstance(opened, ShardedStore)
    yield opened
    opened.close()


def there(store: ShardedStore) -> list[str]:
    pieces = store.catalog.topic("orders").route.partitions
    return [v.decode() for piece in pieces for v in values(read_all(store, piece.partition_id))]


def test_a_partition_that_is_away_is_waited_for_and_gets_everything_once(store: ShardedStore) -> None:
    topic = store.catalog.create_topic("orders", TopicSettings(), 2)
    assert {piece.shard for piece in topic.route.ranges} == {"", "b"}
    stage(store, topic, "q", 0, "a", *VALUES)
    publisher = Publisher(store, move_messages=50, sleep=lambda seconds: None)
    publisher.decide("q", 0, wish({"a": len(VALUES)}))
    with away(store, "b"):
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                publisher.publish("q", 0)
    assert publisher.publish("q", 0).published_at
    assert sorted(there(store)) == sorted(VALUES)


def test_a_partition_moves_to_another_shard_in_the_middle(store: ShardedStore) -> None:
    topic = store.catalog.create_topic("orders", TopicSettings(), 2)
    at = 0
    for turn in range(20):
        at = stage(store, topic, "q", 0, "a", *VALUES[turn * 20 : turn * 20 + 20], first=at)
    publisher = Publisher(store, move_messages=50, sleep=lambda seconds: None)
    publisher.decide("q", 0, wish({"a": len(VALUES)}))
    turns = iter((True, False, False, False))
    assert not publisher.publish("q", 0, lambda: next(turns)).published_at
    moved(store, topic, topic.route.ranges[1], "")
    assert publisher.publish("q", 0).published_at
    found = there(store)
    assert sorted(found) == sorted(VALUES)
    for number in range(20):
        mine = [value for value in VALUES if value.startswith(f"k{number}.")]
        assert [value for value in found if value in mine] == mine
