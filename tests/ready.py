"""Databases with Postroom's tables in them: made once per test process, emptied for each test.

    postgres_ready, mysql_ready   the URL of one (a new database takes five times as long)
    ground                        one on each server in turn: its URL, its server, stores, plain connections

A test that changes tables, rights or settings of its database takes `postgres_url` or `mysql_url`; one that
stops its server takes a `Ground` on a spare server, or on one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import pytest

from postroom.address import parse
from postroom.clock import Clock
from postroom.config import DEFAULTS, Limits
from postroom.store import SqlStore, open_server

from .servers import MariaServer, PostgresServer
from .servers.server import Server

__all__ = ["Ground", "both", "ground", "mysql_ready", "opened", "postgres_ready", "ready"]

both = pytest.mark.parametrize("kind", ["postgres", "mariadb"])

_KEPT = ("postroom_schema", "postroom_settings")


class Ground:
    """A database on a server, for tests that look at it from both sides."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name = server, name
        self.kind, self.url = server.kind, server.url(name)
        self._open = ExitStack()

    def store(
        self, *, port: int | None = None, limits: Limits = DEFAULTS, clock: Clock | None = None
    ) -> SqlStore:
        """Closed with the ground. `port`: of a proxy."""
        return self._open.enter_context(closing(opened(self.server.url(self.name, port=port), limits, clock)))

    def connect(self, *, admin: bool = False) -> Any:
        """With the driver; closed with the ground."""
        return self._open.enter_context(closing(self.server.connect(self.name, admin=admin)))

    def rows(self, sql: str, *args: object, admin: bool = False) -> list[tuple[Any, ...]]:
        """A statement on a connection of its own, committed."""
        with (
            closing(self.server.connect(self.name, admin=admin)) as connection,
            connection.cursor() as cursor,
        ):
            cursor.execute(sql, args)
            found = list(cursor.fetchall()) if cursor.description else []
            connection.commit()
        return found

    def close(self) -> None:
        self._open.close()


@contextmanager
def ready(server: Server) -> Iterator[Ground]:
    """A new database with tables."""
    name = server.create_database()
    opened(server.url(name), make_tables=True).close()
    ground = Ground(server, name)
    try:
        yield ground
    finally:
        ground.close()


def opened(
    url: str, limits: Limits = DEFAULTS, clock: Clock | None = None, *, make_tables: bool = False
) -> SqlStore:
    store = open_server(parse(url), clock, limits, make_tables=make_tables)
    assert isinstance(store, SqlStore)
    return store


@pytest.fixture(scope="session")
def _spare_postgres(postgres_server: PostgresServer) -> Iterator[Ground]:
    with ready(postgres_server) as ground:
        yield ground


@pytest.fixture(scope="session")
def _spare_mariadb(mariadb_server: MariaServer) -> Iterator[Ground]:
    with ready(mariadb_server) as ground:
        yield ground


@pytest.fixture
def postgres_ready(_spare_postgres: Ground) -> str:
    _empty(_spare_postgres)
    return _spare_postgres.url


@pytest.fixture
def mysql_ready(_spare_mariadb: Ground) -> str:
    _empty(_spare_mariadb)
    return _spare_mariadb.url


@pytest.fixture(params=["postgres", "mariadb"])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    spare: Ground = request.getfixturevalue(f"_spare_{request.param}")
    _empty(spare)
    ground = Ground(spare.server, spare.name)
    yield ground
    ground.close()


def _empty(ground: Ground) -> None:
    """As after `migrate`, but for the ids, which count on."""
    postgres = ground.kind == "postgres"
    others = (
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = %s AND pid <> pg_backend_pid()"
        if postgres
        else "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = %s AND ID <> CONNECTION_ID()"
    )
    tables = "SELECT table_name FROM information_schema.tables WHERE table_schema = " + (
        "'public'" if postgres else "DATABASE()"
    )
    with closing(ground.server.connect(ground.name, admin=True)) as connection, connection.cursor() as cursor:
        cursor.execute(others, (ground.name,))  # left by a test, perhaps with a lock
        for (process,) in () if postgres else cursor.fetchall():
            cursor.execute("KILL %s", (process,))
        cursor.execute(tables)
        names = [str(name) for (name,) in cursor.fetchall()]
        logs = [name for name in names if name.startswith("postroom_log_")]
        if logs:
            cursor.execute(f"DROP TABLE {', '.join(logs)}")
        for name in {*names} - {*logs, *_KEPT}:
            cursor.execute(f"DELETE FROM {name}")
        cursor.execute("DELETE FROM postroom_settings WHERE name NOT IN ('uuid', 'catalog_version')")
        connection.commit()
