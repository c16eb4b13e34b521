"""The store contract on database servers: PostgreSQL, also behind a pool, and MariaDB for the dialect of
MySQL (R7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from postroom.address import parse
from postroom.store import open_server
from postroom.store.contract import Store
from postroom.testing.store_contract import MovableClock, StoreContract
from tests.contract.stores import dialect, smoke
from tests.tuned import tuned

# A watcher that is asked whether all is quiet waits for so long each time.
QUIET = tuned(store={"listen_s": 0.05})


@dialect
class TestPostgres(StoreContract):
    @pytest.fixture(autouse=True)
    def _database(self, postgres_ready: str) -> None:
        self.url = postgres_ready

    def open_store(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_server(parse(self.url), clock, QUIET)

    def reopen(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_server(parse(self.url), clock, QUIET)


@smoke
class TestPgBouncer(StoreContract):
    """Its statements go another way: nothing is prepared, a lone batch is in a transaction."""

    @pytest.fixture(autouse=True)
    def _database(self, postgres_pooled: str) -> None:
        self.url = postgres_pooled

    def open_store(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_server(parse(self.url), clock)

    def reopen(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_server(parse(self.url), clock)


@dialect
class TestMariaDB(StoreContract):
    @pytest.fixture(autouse=True)
    def _database(self, mysql_ready: str) -> None:
        self.url = mysql_ready

    def open_store(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_server(parse(self.url), clock)

    def reopen(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_server(parse(self.url), clock)
