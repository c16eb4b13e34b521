"""Databases with Postroom's tables in them: made once per test process, emptied for each test.

    postgres_ready, mysql_ready   the URL of one (a new database takes five times as long)
    ground                        one on each server in turn: its URL, its server, stores, plain connections

Marked `undisturbed`, a test has its `ground` on servers of this process's own: it asks what goes on in all of
their databases. `undisturbed("mariadb")`: it asks that of MariaDB alone.
A test that changes tables, rights or settings of its database takes `postgres_url` or `mysql_url`; one that
stops its server takes a `Ground` on a spare server, or on one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import psycopg
import pymysql
import pytest

from postroom.address import parse
from postroom.clock import Clock
from postroom.config import DEFAULTS, Limits
from postroom.store import SqlStore, open_server

from .servers import MariaServer, PgBouncer, PostgresServer
from .servers.server import Server

__all__ = [
    "Ground", "both", "ground", "mysql_ready", "opened", "postgres_pooled", "postgres_ready", "ready",
]  # fmt: skip

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
def _shared_postgres(postgres_server: PostgresServer) -> Iterator[Kept]:
    with Kept.ready(postgres_server) as kept:
        yield kept


@pytest.fixture(scope="session")
def _shared_mariadb(mariadb_server: MariaServer) -> Iterator[Kept]:
    with Kept.ready(mariadb_server) as kept:
        yield kept


@pytest.fixture(scope="session")
def _private_postgres(spare_postgres_server: PostgresServer) -> Iterator[Kept]:
    with Kept.ready(spare_postgres_server) as kept:
        yield kept


@pytest.fixture(scope="session")
def _private_mariadb(spare_mariadb_server: MariaServer) -> Iterator[Kept]:
    with Kept.ready(spare_mariadb_server) as kept:
        yield kept


@pytest.fixture
def postgres_ready(_shared_postgres: Kept) -> str:
    return _shared_postgres.emptied().url


@pytest.fixture
def postgres_pooled(_shared_postgres: Kept, pgbouncer: PgBouncer) -> str:
    """The same, through PgBouncer."""
    return pgbouncer.url(_shared_postgres.emptied(pooled=True).name)


@pytest.fixture
def mysql_ready(_shared_mariadb: Kept) -> str:
    return _shared_mariadb.emptied().url


@pytest.fixture(params=["postgres", "mariadb"])
def ground(request: pytest.FixtureRequest) -> Iterator[Ground]:
    mark = request.node.get_closest_marker("undisturbed")
    owner = "shared" if mark is None or request.param not in (mark.args or (request.param,)) else "private"
    kept: Kept = request.getfixturevalue(f"_{owner}_{request.param}")
    ground = kept.emptied()
    yield ground
    ground.close()


class Kept:
    """A database that test after test of this process is given empty.

    One connection for that is kept open: to log in takes longer than to empty it.
    """

    def __init__(self, ground: Ground) -> None:
        self._ground = ground
        self._connection: Any = None

    @classmethod
    @contextmanager
    def ready(cls, server: Server) -> Iterator[Kept]:
        with ready(server) as ground:
            kept = cls(ground)
            try:
                yield kept
            finally:
                kept._hang_up()

    def emptied(self, *, pooled: bool = False) -> Ground:
        """As after `migrate`, but for the ids, which count on."""
        if self._connection is not None:
            try:
                self._empty(pooled)
            except (psycopg.OperationalError, pymysql.err.Error):  # the server was restarted meanwhile
                self._hang_up()
        if self._connection is None:
            self._connection = self._ground.server.connect(self._ground.name, admin=True)
            self._empty(pooled)
        return Ground(self._ground.server, self._ground.name)

    def _empty(self, pooled: bool) -> None:
        with self._connection.cursor() as cursor:
            if self._ground.kind == "postgres":
                _empty_postgres(cursor, pooled=pooled)
            else:
                _empty_mariadb(cursor)
        self._connection.commit()

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


_EMPTY_POSTGRES = """
    DO $$
    DECLARE name text;
    BEGIN
        PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid()
            {spared}; -- left by a test, with a lock perhaps
        FOR name IN SELECT tablename FROM pg_tables WHERE schemaname = 'public' LOOP
            IF name LIKE 'postroom\\_log\\_%' THEN
                EXECUTE format('DROP TABLE %I', name);
            ELSIF name NOT IN ('postroom_schema', 'postroom_settings') THEN
                EXECUTE format('DELETE FROM %I', name);
            END IF;
        END LOOP;
        DELETE FROM postroom_settings s WHERE s.name NOT IN ('uuid', 'catalog_version');
    END $$
"""


def _empty_postgres(cursor: Any, *, pooled: bool) -> None:
    """`pooled`: whoever is idle belongs to a pool, which keeps it for the next test."""
    cursor.execute(_EMPTY_POSTGRES.replace("{spared}", "AND state <> 'idle'" if pooled else ""))


def _empty_mariadb(cursor: Any) -> None:
    """Only tables with rows in them: to delete nothing takes as long as to delete something."""
    others = "SELECT ID FROM information_schema.PROCESSLIST WHERE DB = DATABASE() AND ID <> CONNECTION_ID()"
    cursor.execute(others)
    for (process,) in cursor.fetchall():  # left by a test, perhaps with a lock
        try:
            cursor.execute("KILL %s", (process,))
        except pymysql.err.OperationalError:
            pass  # it left by itself meanwhile
    cursor.execute("SHOW TABLES")
    names = [str(name) for (name,) in cursor.fetchall()]
    logs = [name for name in names if name.startswith("postroom_log_")]
    if logs:
        cursor.execute(f"DROP TABLE {', '.join(logs)}")
    others = sorted({*names} - {*logs, *_KEPT})
    cursor.execute(
        " UNION ALL ".join(f"SELECT '{name}' WHERE EXISTS (SELECT 1 FROM {name})" for name in others)
    )
    for (name,) in cursor.fetchall():
        cursor.execute(f"DELETE FROM {name}")
    cursor.execute("DELETE FROM postroom_settings WHERE name NOT IN ('uuid', 'catalog_version')")
