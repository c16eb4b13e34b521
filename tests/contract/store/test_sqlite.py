"""The store contract on SQLite: a file, and memory."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

from postroom.clock import ManualClock
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.store import open_memory, open_sqlite
from postroom.store.contract import Store
from postroom.testing.store_contract import MovableClock, StoreContract
from tests.contract.stores import smoke


class TestSqliteFile(StoreContract):
    def open_store(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_sqlite(tmp_path / "store.db", clock)

    def reopen(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_sqlite(tmp_path / "store.db", clock)


@smoke
class TestSqliteMemory(StoreContract):
    """There is no second process: whoever opens the same name gets the same store."""

    def open_store(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_memory(str(tmp_path), clock)

    def reopen(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_memory(str(tmp_path), clock)


def test_a_new_group_is_made_on_one_connection(tmp_path: Path) -> None:
    """A second one would read the schema again, all of it, after every new topic: 15 ms with 2,000 topics."""
    store = open_sqlite(tmp_path / "store.db", ManualClock())
    try:
        store.catalog.create_topic("orders", TopicSettings(), 3)
        with mock.patch.object(store.session, "read", side_effect=AssertionError("another connection")):
            store.catalog.create_group("orders", "billing", GroupSettings())
    finally:
        store.close()
