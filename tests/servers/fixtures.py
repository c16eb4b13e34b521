"""The servers as pytest fixtures, and what happens where one is not installed.

    postgres_url, mysql_url           a fresh, empty database for this test, on a server that all tests share
    postgres_server, mariadb_server   that server: one in a run, started by the first test that asks; it
                                      does not flush, for speed
    spare_postgres, spare_mariadb     a durable one per test process, which a test may stop, restart and kill,
                                      and whose users and settings it may change if it takes that back
    spare_postgres_url, spare_mysql_url
                                      a fresh, empty database for this test on that one
    own_postgres, own_mariadb         a durable server for this test alone
    proxy_to                          `proxy_to(server.port)`: a proxy in front of it, see `proxy`
    pgbouncer                         a PgBouncer in front of the shared PostgreSQL server

A test that stops the shared server, or changes more of it than a database, breaks others, also in other
processes: it takes the spare one, which runs again for the next test. So does a test of what is durable.
Missing server: on a laptop the tests that need it are skipped, and the summary says so loudly; with CI set
they fail, so that nobody takes a green run for more than it was. A missing PgBouncer is skipped there too.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from . import MariaServer, MissingServer, PgBouncer, PostgresServer, Proxy
from .run import Run
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
    "pytest_configure",
    "pytest_configure_node",
    "pytest_terminal_summary",
    "pytest_unconfigure",
    "spare_mariadb",
    "spare_mariadb_server",
    "spare_mysql_url",
    "spare_postgres",
    "spare_postgres_server",
    "spare_postgres_url",
]

S = TypeVar("S", bound=Server)
RUN = pytest.StashKey[Run]()


def pytest_configure(config: pytest.Config) -> None:
    told = getattr(config, "workerinput", {}).get("postroom_run")  # by `pytest_configure_node`
    run = config.stash[RUN] = Run(Path(told)) if told else Run.begin()
    Server.pristine = Server.pristine or run.pristine


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Called in xdist's controller, for each of its workers."""
    node.workerinput["postroom_run"] = str(node.config.stash[RUN].folder)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    if RUN in config.stash:
        config.stash[RUN].end()


@pytest.fixture(scope="session")
def postgres_server(pytestconfig: pytest.Config) -> PostgresServer:
    with _installed():
        return pytestconfig.stash[RUN].server(PostgresServer)


@pytest.fixture(scope="session")
def mariadb_server(pytestconfig: pytest.Config) -> MariaServer:
    with _installed():
        return pytestconfig.stash[RUN].server(MariaServer)


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
def spare_postgres_url(spare_postgres: PostgresServer) -> Iterator[str]:
    yield from _fresh_database(spare_postgres)


@pytest.fixture
def spare_mysql_url(spare_mariadb: MariaServer) -> Iterator[str]:
    yield from _fresh_database(spare_mariadb)


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


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except MissingServer as missing:
        if os.environ.get("CI", "").lower() in ("", "0", "false"):
            pytest.skip(str(missing))
        pytest.fail(str(missing), pytrace=False)


def _serving(make: Callable[[], S]) -> Iterator[S]:
    with _installed():
        server = make()
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
