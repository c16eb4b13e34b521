"""The store contract on a database of yours, by hand: `make other-databases URL=mysql://…`.

Not among the tests of `make test-all`: its name keeps it out. Each test has a database of its own, which is
made and dropped, so that the user in the URL needs the right to do both.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pymysql
import pytest

from postroom.address import parse
from postroom.store import open_server
from postroom.store.contract import Store
from postroom.testing.store_contract import MovableClock, StoreContract

_URL = os.environ.get("POSTROOM_OTHER_URL", "")
_numbers = itertools.count(1)

if not _URL:
    pytest.skip("name a database: make other-databases URL=mysql://…", allow_module_level=True)


def _run(statement: str) -> None:
    address = parse(_URL)
    if address.kind == "postgresql":
        with psycopg.connect(address.dsn, autocommit=True) as connection:
            connection.execute(statement)
        return
    with pymysql.connect(**dict(address.server), autocommit=True) as connection:  # type: ignore[arg-type]
        connection.cursor().execute(statement)


class TestOther(StoreContract):
    @pytest.fixture(autouse=True)
    def _database(self) -> Iterator[None]:
        name = f"postroom_other_{os.getpid()}_{next(_numbers)}"
        _run(f"CREATE DATABASE {name}")
        self.url = urlsplit(_URL)._replace(path=f"/{name}").geturl()
        yield
        _run(f"DROP DATABASE {name}")

    def open_store(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_server(parse(self.url), clock, make_tables=True)

    def reopen(self, tmp_path: Path, clock: MovableClock) -> Store:
        return open_server(parse(self.url), clock)
