"""What a broker remembers of the catalog, and how long that is good enough (R6)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from postroom.broker.topology.catalog_cache import CatalogCache
from postroom.errors import StoreUnavailable
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import open_memory
from postroom.store.contract import Store


class Catalog:
    """That of a store, which may be away."""

    def __init__(self, store: Store) -> None:
        self._store, self.away = store, False

    def __getattr__(self, name: str) -> Any:
        if self.away:
            raise StoreUnavailable("the first shard is away")
        return getattr(self._store.catalog, name)


@pytest.fixture
def catalog() -> Iterator[Catalog]:
    with closing(open_memory()) as store:
        store.catalog.create_topic("orders", TopicSettings(), 1)
        store.catalog.create_group("orders", "billing", GroupSettings())
        yield Catalog(store)


def test_who_was_handed_messages_can_settle_them_while_the_catalog_is_away(catalog: Catalog) -> None:
    """A poll asks for the sources, a heartbeat and a verdict for the group: both are the same (I14)."""
    cache: Any = CatalogCache(catalog, lasting=True, fresh_s=0.0)  # type: ignore[arg-type]
    ((topic, group),) = cache.sources("orders", "billing")
    catalog.away = True
    assert cache.sources("orders", "billing") == [(topic, group)]
    assert cache.group("orders", "billing") == group and cache.topic("orders") == topic
    with pytest.raises(StoreUnavailable):
        cache.group("orders", "ledger")


def test_without_other_shards_nothing_is_good_enough(catalog: Catalog) -> None:
    cache: Any = CatalogCache(catalog, fresh_s=0.0)  # type: ignore[arg-type]
    cache.sources("orders", "billing")
    catalog.away = True
    with pytest.raises(StoreUnavailable):
        cache.group("orders", "billing")
