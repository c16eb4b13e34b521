"""The statements that the pages about database servers show give a user all the rights Postroom needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.cli_runner import Cli
from tests.docs.pages import ROOT, blocks
from tests.servers import MariaServer, PostgresServer

USER, PASSWORD = "queue_user", "secret"


def _statements(page: str) -> list[str]:
    (shown,) = (b.text for b in blocks(ROOT / "docs" / "howto" / page) if b.language == "sql")
    return [statement.strip() for statement in shown.split(";") if statement.strip()]


@pytest.fixture
def on_postgres(spare_postgres: PostgresServer) -> Iterator[str]:
    """A database that belongs to somebody else, in which the page's statements were run."""
    database = spare_postgres.create_database()
    with spare_postgres.connect(database, admin=True) as connection:
        connection.autocommit = True
        for statement in _statements("postgresql.md"):
            connection.execute(statement)  # type: ignore[call-overload]
        yield f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{spare_postgres.port}/{database}"
        connection.execute(f"DROP OWNED BY {USER}")  # type: ignore[call-overload]
        connection.execute(f"DROP ROLE {USER}")  # type: ignore[call-overload]
    spare_postgres.drop_database(database)


@pytest.fixture
def on_mariadb(spare_mariadb: MariaServer) -> Iterator[str]:
    with spare_mariadb._administer() as cursor:
        for statement in _statements("mysql.md"):
            cursor.execute(statement)
        yield f"mysql://{USER}:{PASSWORD}@127.0.0.1:{spare_mariadb.port}/queue"
        cursor.execute("DROP DATABASE queue")
        cursor.execute(f"DROP USER {USER}@'%'")


@pytest.mark.parametrize("server", ["postgres", "mariadb"])
def test_the_rights_shown_are_enough(server: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    cli = Cli(tmp_path, request.getfixturevalue(f"on_{server}"))
    cli.ok("migrate")
    cli.ok("topic", "create", "orders", "--partitions", "1")
    cli.ok("topic", "create", "clicks", "--partitions", "1", "--storage", "volatile")
    cli.ok("send", "orders", "hello")
    assert cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "1").out == "hello\n"
    found = {check["check"]: check["state"] for check in cli.ok("doctor", "--json").json["checks"]}
    assert found["rights"] == "ok" and "fail" not in found.values()
    cli.ok("topic", "delete", "orders", "--yes")
