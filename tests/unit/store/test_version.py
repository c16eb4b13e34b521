"""What tells a verb that waits for nothing whether anybody else has changed the store."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest

from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import open_sqlite
from postroom.store.contract import Append, Store
from postroom.testing.store_contract.harness import append, batch, partitions


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_sqlite(tmp_path / "store.db")
    yield opened
    opened.close()


@pytest.fixture
def other(store: Store, tmp_path: Path) -> Iterator[Store]:
    opened = open_sqlite(tmp_path / "store.db")
    yield opened
    opened.close()


def version(store: Store) -> Hashable | None:
    assert store.at_once is not None
    with store.at_once():
        return store.version()


def test_it_stays_while_nobody_else_changes_anything(store: Store) -> None:
    partition = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))[0]
    append(store, partition, batch(producer=7, sequence=0))
    before = version(store)
    assert before is not None and version(store) == before
    assert store.log.append_at_once([Append(partition, batch(producer=7, sequence=1))]) is not None
    assert version(store) == before
    assert store.version() is None, "where verbs may wait, connections change topics, too"


_CHANGES: dict[str, Callable[[Store, int], object]] = {
    "an append": lambda store, partition: append(store, partition, batch()),
    "a trim": lambda store, partition: store.log.trim(partition, 1),
    "a topic": lambda store, _: store.catalog.create_topic("another", TopicSettings(), 1),
    "a pause": lambda store, _: store.catalog.alter_group("orders", "billing", GroupSettings(), True),
    "progress": lambda store, partition: store.progress.rewind(
        store.catalog.group("orders", "billing"), [partition]
    ),
}


@pytest.mark.parametrize("by_another_process", [False, True])
@pytest.mark.parametrize("change", _CHANGES)
def test_whatever_anybody_else_changes_makes_another(
    store: Store, other: Store, change: str, by_another_process: bool
) -> None:
    """Also who waits in this process."""
    partition = partitions(store.catalog.create_topic("orders", TopicSettings(), 1))[0]
    store.catalog.create_group("orders", "billing", GroupSettings())
    append(store, partition, batch())
    before = version(store)
    _CHANGES[change](other if by_another_process else store, partition)
    assert version(store) != before
