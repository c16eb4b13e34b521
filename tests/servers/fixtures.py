"""The servers as pytest fixtures, and what happens where one is not installed.

    postgres_url, mysql_url           a fresh, empty database for this test, on a server that tests share
    postgres_server, mariadb_server   that server: one per test process, started by the first test that asks
    spare_postgres, spare_mariadb     another one per test process, which a test may stop, restart and kill
    own_postgres, own_mariadb         a server for this test alone, of which it may also change the settings
    proxy_to                          `proxy_to(server.port)`: a proxy in front of it, see `proxy`
    pgbouncer                         a PgBouncer in front of the shared PostgreSQL server

A test that stops, restarts or kills the shared server breaks all others: it takes the spare one, which runs
again for the next test.
Missing server: on a laptop the tests that need it are skipped, and the summary says so loudly; with CI set
they fail, so that nobody takes a green run for more than it was. A missing PgBouncer is skipped there too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from . import MariaServer, MissingServer, PgBouncer, PostgresServer, Proxy
from .server import Server

__all__ = [
    "mariadb_server",
    "mysql_url",
    "own_mariadb",
    "own_postgres",
    "pgbouncer",
    "postgres_server",
    "postgres_url",
    "proxy_to",
    "pytest_terminal_summary",
    "spare_mariadb",
    "spare_mariadb_server",
    "spare_postgres",
    "spare_postgres_server",
]

S = TypeVar("S", bound=Server)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[PostgresServer]:
    yield from _serving(PostgresServer)


@pytest.fixture(scope="session")
def mariadb_server() -> Iterator[MariaServer]:
    yield from _serving(MariaServer)


@pytest.fixture(scope="session")
def spare_postgres_server() -> Iterator[PostgresServer]:
    yield from _serving(PostgresServer)


@pytest.fixture(scope="session")
def spare_mariadb_server() -> Iterator[MariaServer]:
    yield from _serving(MariaServer)


@pytest.fixture
def spare_postgres(spare_postgres_server: PostgresServer) -> Iterator[PostgresServer]:
    yield from _running_again(spare_postgres_server)


@pytest.fixture
def spare_mariadb(spare_mariadb_server: MariaServer) -> Iterator[MariaServer]:
    yield from _running_again(spare_mariadb_server)


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    yield from _serving(PostgresServer)


@pytest.fixture
def own_mariadb() -> Iterator[MariaServer]:
    yield from _serving(MariaServer)


@pytest.fixture
def postgres_url(postgres_server: PostgresServer) -> Iterator[str]:
    yield from _fresh_database(postgres_server)


@pytest.fixture
def mysql_url(mariadb_server: MariaServer) -> Iterator[str]:
    yield from _fresh_database(mariadb_server)


@pytest.fixture
def proxy_to() -> Iterator[Callable[[int], Proxy]]:
    made: list[Proxy] = []

    def make(port: int) -> Proxy:
        made.append(Proxy(port))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()


@pytest.fixture(scope="session")
def pgbouncer(postgres_server: PostgresServer) -> Iterator[PgBouncer]:
    try:
        bouncer = PgBouncer(postgres_server)
    except MissingServer as missing:
        pytest.skip(str(missing))
    with bouncer:
        yield bouncer


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Read from the reports, because with xdist the tests were skipped in other processes."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
        if isinstance(report.longrepr, tuple) and MissingServer.sentence in report.longrepr[2]
    )
    if reasons:
        terminalreporter.section("NOT TESTED: a server is missing", sep="!", yellow=True, bold=True)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"{count} skipped. {reason}", yellow=True, bold=True)


def _serving(make: Callable[[], S]) -> Iterator[S]:
    try:
        server = make()
    except MissingServer as missing:
        if os.environ.get("CI", "").lower() in ("", "0", "false"):
            pytest.skip(str(missing))
        pytest.fail(str(missing), pytrace=False)
    with server:
        yield server


def _running_again(server: S) -> Iterator[S]:
    yield server
    if not server.runs:
        server.start()


def _fresh_database(server: Server) -> Iterator[str]:
    name = server.create_database()
    yield server.url(name)
    server.drop_database(name)
