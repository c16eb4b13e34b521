"""The store contract on SQLite: a file, and memory."""

from __future__ import annotations

from pathlib import Path

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
