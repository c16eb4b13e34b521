"""`postroom migrate` on real servers: makes the tables, says what is missing, prints the statements (R7)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pymysql
import pytest

from postroom.address import parse
from postroom.store import open_session
from postroom.store.sql.schema import MIGRATIONS, VERSION, statements
from postroom.store.sql.session import Area
from tests.contract.cli_runner import Cli
from tests.servers import PostgresServer


@pytest.fixture(params=["postgres", "mysql"])
def cli(request: pytest.FixtureRequest, tmp_path: Path) -> Cli:
    """An empty database."""
    return Cli(tmp_path, request.getfixturevalue(f"{request.param}_url"))


def _connect(url: str) -> Any:
    address = parse(url)
    if address.kind == "postgresql":
        return psycopg.connect(address.dsn, autocommit=True)
    return pymysql.connect(**dict(address.server), autocommit=True)  # type: ignore[arg-type]


def _run(url: str, statements: list[str]) -> list[Any]:
    """One statement after the other, as a DBA's tool does; the rows of the last."""
    connection = _connect(url)
    with connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        return list(cursor.fetchall()) if cursor.description else []


def _tables(url: str) -> set[str]:
    look = "SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'postroom%'"
    schema = "current_schema()" if parse(url).kind == "postgresql" else "DATABASE()"
    return {row[0] for row in _run(url, [f"{look} AND table_schema = {schema}"])}


def test_without_tables_everything_says_what_to_do(cli: Cli) -> None:
    answer = cli("topic", "create", "orders", "--json")
    assert answer.code == 1 and answer.error["error"] == "schema_mismatch"
    assert "run `postroom migrate`" in answer.error["message"] and "migrate=True" not in answer.err
    assert _tables(cli.url) == set()


def test_the_tables_are_made_once(cli: Cli) -> None:
    made = cli.ok("migrate", "--json").json
    assert (made["before"], made["version"]) == (0, VERSION) and made["changes"] > 10
    assert "@" in made["url"] and "p%40ss" not in made["url"]
    assert {"postroom_topics", "postroom_progress", "postroom_schedule"} <= _tables(cli.url)
    again = cli.ok("migrate", "--json").json
    assert (again["before"], again["changes"]) == (VERSION, 0)
    assert "is up to date" in cli.ok("migrate").out
    cli.ok("topic", "create", "orders", "--partitions", "1")
    cli.ok("send", "orders", "hello")
    assert cli.ok("consume", "orders", "-g", "billing", "--create", "-n", "1").out == "hello\n"


def test_check_says_what_is_missing_and_changes_nothing(cli: Cli) -> None:
    answer = cli("migrate", "--check")
    assert answer.code == 3 and "missing: table postroom_topics\n" in answer.out
    assert "has no Postroom tables" in answer.err and "run `postroom migrate`" in answer.err
    as_json = cli("migrate", "--check", "--json")
    assert as_json.code == 3 and as_json.error["error"] == "not_migrated"
    assert as_json.json["version"] == 0 and "column postroom_progress.holder" in as_json.json["missing"]
    assert _tables(cli.url) == set()
    cli.ok("migrate")
    assert cli.ok("migrate", "--check", "--json").json["missing"] == []
    assert f"schema version {VERSION}" in cli.ok("migrate", "--check").out


def test_an_older_version_is_brought_up_to_date(cli: Cli) -> None:
    """What version 1 made, as its own script would have made it."""
    script = cli.ok("migrate", "--sql", "--json").json["statements"]
    noted = [n for n, s in enumerate(script) if "INTO postroom_schema" in s]
    assert len(noted) == len(MIGRATIONS)
    _run(cli.url, script[: noted[0] + 1])
    answer = cli("migrate", "--check", "--json")
    assert answer.code == 3 and answer.json["version"] == 1
    assert "table postroom_schedule" in answer.json["missing"]
    assert "table postroom_topics" not in answer.json["missing"]
    assert "has schema version 1" in cli("topic", "list").err
    assert cli.ok("migrate", "--json").json["before"] == 1
    cli.ok("migrate", "--check")


def test_a_newer_version_is_refused(cli: Cli) -> None:
    cli.ok("migrate")
    _run(cli.url, ["INSERT INTO postroom_schema (version, applied_at) VALUES (999, 0)"])
    for words in (["migrate"], ["migrate", "--check"], ["migrate", "--sql"], ["topic", "list"]):
        answer = cli(*words, "--json")
        assert answer.code == 1 and answer.error["error"] == "schema_mismatch"
        assert "update your checkout of Postroom and run `pip install .`" in answer.error["message"]


def test_the_sql_is_valid_and_enough(cli: Cli) -> None:
    shown = cli.ok("migrate", "--sql").out
    assert _tables(cli.url) == set()
    first, *rest = shown.splitlines()
    assert first.startswith("-- ") and "p%40ss" not in shown
    statements = [part.strip() for part in "\n".join(rest).split(";\n") if part.strip()]
    assert shown.endswith(";\n") and all("?" not in s and "{" not in s for s in statements)
    _run(cli.url, [s.removesuffix(";") for s in statements])
    cli.ok("migrate", "--check")
    assert (
        cli.ok("migrate", "--sql").out.startswith("-- ") and cli.ok("migrate", "--sql").out.count("\n") == 1
    )
    cli.ok("topic", "create", "orders", "--partitions", "1")
    assert "offset 0" in cli.ok("send", "orders", "hello").out


def test_check_and_sql_exclude_each_other(cli: Cli) -> None:
    assert cli("migrate", "--check", "--sql").code == 2


# --- a server that says no ---------------------------------------------------------------------------


@pytest.fixture
def guest(spare_postgres: PostgresServer, tmp_path: Path) -> Iterator[Cli]:
    """A role that may connect and look, but not create."""
    name = spare_postgres.create_database()
    admin = spare_postgres.url(name, admin=True)
    _run(admin, ["CREATE ROLE guest LOGIN PASSWORD 'guest'", "REVOKE CREATE ON SCHEMA public FROM public"])
    yield Cli(tmp_path, f"postgresql://guest:guest@{admin.rpartition('@')[2]}")
    _run(admin, ["DROP OWNED BY guest", "DROP ROLE guest"])
    spare_postgres.drop_database(name)


def test_missing_rights(guest: Cli) -> None:
    answer = guest("migrate", "--json")
    assert answer.code == 1 and answer.error["error"] == "access_denied"
    assert "CREATE on the schema" in answer.error["message"]


def test_a_database_that_takes_no_writes(postgres_url: str, tmp_path: Path) -> None:
    name = parse(postgres_url).shown.rpartition("/")[2]
    admin = postgres_url.replace("//postroom:", "//postgres:")
    _run(admin, [f"ALTER DATABASE {name} SET default_transaction_read_only = on"])
    answer = Cli(tmp_path, postgres_url)("migrate", "--json")
    assert answer.code == 1 and answer.error["error"] == "store_unavailable"
    assert "takes no writes" in answer.error["message"]


def test_a_database_that_is_not_there(cli: Cli) -> None:
    answer = Cli(cli.folder, f"{cli.url}_none")("migrate")
    assert answer.code == 1 and answer.err.count("\n") == 1
    assert "create the database" in answer.err or "Access denied" in answer.err


# --- SQLite ------------------------------------------------------------------------------------------


def test_a_file_brings_itself_up_to_date(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    assert cli("migrate").code == 1 and list(tmp_path.iterdir()) == []
    cli.ok("topic", "create", "orders")
    assert "brings itself up to date" in cli.ok("migrate").out
    assert cli.ok("migrate", "--json").json["version"] == VERSION
    cli.ok("migrate", "--check")
    assert cli.ok("migrate", "--sql").out.startswith("-- ")


def test_a_file_of_version_1(tmp_path: Path) -> None:
    """Its progress and its log are found behind, the place of volatile topics missing."""
    cli = Cli(tmp_path)
    with closing(open_session(parse(cli.url))) as session:
        for area in (Area.LOG, Area.PROGRESS):
            with session.write(area) as tx:
                tx.do(
                    "CREATE TABLE postroom_schema (version INTEGER PRIMARY KEY, applied_at BIGINT NOT NULL)"
                )
                for statement in statements(1, area, session.dialect.areas):
                    tx.do(statement.format(serial=session.dialect.serial, blob="BLOB"))
                tx.do("INSERT INTO postroom_schema VALUES (1, 0)")
    before = {path.name for path in tmp_path.iterdir()}
    answer = cli("migrate", "--check", "--json")
    assert {path.name for path in tmp_path.iterdir()} == before
    assert answer.code == 3 and "column postroom_partitions.volatile" in answer.json["missing"]
    assert "brings itself up to date" in answer.error["message"]
    found = cli.findings()
    assert found["schema (log)"]["state"] == "warn"
    assert cli.ok("migrate", "--json").json["version"] == VERSION
    cli.ok("migrate", "--check")


def test_memory_has_nothing_to_migrate(tmp_path: Path) -> None:
    assert Cli(tmp_path, "memory://")("migrate").code == 2
