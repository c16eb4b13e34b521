"""The servers other tests rely on: they are real, durable, closed to strangers, and leave nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import psycopg
import pymysql
import pytest

from tests.servers import MariaServer, PostgresServer
from tests.servers.processes import running
from tests.servers.server import Server

ROOT = Path(__file__).resolve().parents[3]
DriverError = (psycopg.OperationalError, pymysql.err.OperationalError, pymysql.err.InterfaceError)

both = pytest.mark.parametrize("kind", ["postgres", "mariadb"])


@pytest.fixture
def shared(kind: str, request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(f"{kind}_server")


@pytest.fixture
def own(kind: str, request: pytest.FixtureRequest) -> Server:
    return request.getfixturevalue(f"own_{kind}")


@pytest.fixture
def table(shared: Server) -> Iterator[str]:
    """A database with a table `things`: its name."""
    name = shared.create_database()
    run(shared.connect(name), "CREATE TABLE things (id INTEGER PRIMARY KEY)")
    yield name
    shared.drop_database(name)


def run(connection: Any, *statements: str) -> list[tuple[Any, ...]]:
    """In one transaction; the rows of the last statement, if it has any."""
    with closing(connection), connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        rows = list(cursor.fetchall()) if cursor.description else []
        connection.commit()
    return rows


# --- a database for a test -----------------------------------------------------------------------------


def test_postgres_url_opens_an_empty_database(postgres_url: str) -> None:
    with psycopg.connect(postgres_url) as connection:
        connection.execute("CREATE TABLE things (id INTEGER)")
        rows = connection.execute("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'").fetchall()
    assert rows == [(1,)]


def test_mysql_url_opens_an_empty_database(mysql_url: str) -> None:
    url = urlsplit(mysql_url)
    assert url.scheme == "mysql" and url.hostname and url.port and url.username and url.password
    login = {"user": url.username, "password": unquote(url.password), "database": url.path[1:]}
    connection = pymysql.connect(host=url.hostname, port=url.port, **login)
    assert run(connection, "CREATE TABLE things (id INTEGER)", "SHOW TABLES") == [("things",)]


@both
def test_every_database_is_a_new_one(shared: Server) -> None:
    first, second = shared.create_database(), shared.create_database()
    for name in (first, second):
        run(shared.connect(name), "CREATE TABLE things (id INTEGER)")
    shared.drop_database(first)
    with pytest.raises(DriverError):
        shared.connect(first)
    shared.drop_database(second)


@both
def test_a_forgotten_transaction_does_not_hold_up_the_drop(shared: Server) -> None:
    name = shared.create_database()
    run(shared.connect(name), "CREATE TABLE things (id INTEGER)")
    forgotten = shared.connect(name)
    forgotten.cursor().execute("INSERT INTO things VALUES (1)")
    shared.drop_database(name)
    with pytest.raises(DriverError):
        forgotten.cursor().execute("SELECT 1")
    forgotten.close()


# --- like a server in earnest --------------------------------------------------------------------------


def test_a_commit_of_postgres_is_flushed(spare_postgres: PostgresServer) -> None:
    for setting in ("fsync", "synchronous_commit", "full_page_writes"):
        assert run(spare_postgres.connect("postgres", admin=True), f"SHOW {setting}") == [("on",)]


def test_a_commit_of_mariadb_is_flushed(spare_mariadb: MariaServer) -> None:
    query = "SELECT @@innodb_flush_log_at_trx_commit, @@innodb_doublewrite"
    assert run(spare_mariadb.connect("mysql", admin=True), query) == [(1, 1)]


@both
def test_the_server_that_tests_share_flushes_nothing(shared: Server) -> None:
    """It is never started again: whatever is there to survive is on another one."""
    query = "SHOW fsync" if shared.kind == "postgres" else "SELECT @@innodb_flush_method"
    assert run(shared.connect(shared.create_database(), admin=True), query) in ([("off",)], [("nosync",)])


@both
def test_a_wrong_password_is_refused(shared: Server, table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Server, "password", "guessed")
    for admin in (False, True):
        with pytest.raises(DriverError, match=r"password authentication failed|Access denied"):
            shared.connect(table, admin=admin)


def test_nobody_gets_in_without_a_password(
    postgres_server: PostgresServer, mariadb_server: MariaServer
) -> None:
    with pytest.raises(psycopg.OperationalError, match="no password supplied"):
        psycopg.connect(host="127.0.0.1", port=postgres_server.port, user="postgres", dbname="postgres")
    for user in ("root", "", "admin"):
        with pytest.raises(pymysql.err.OperationalError, match="Access denied"):
            pymysql.connect(host="127.0.0.1", port=mariadb_server.port, user=user)


@both
def test_the_user_may_only_do_what_a_careful_operator_allows(shared: Server, table: str) -> None:
    with pytest.raises((psycopg.errors.InsufficientPrivilege, pymysql.err.OperationalError)):
        run(shared.connect(table), "CREATE ROLE another")


@both
def test_it_does_not_run_as_root(shared: Server) -> None:
    assert os.stat(f"/proc/{shared.pid}").st_uid != 0


@pytest.mark.slow("starts servers of its own")
@both
@pytest.mark.skipif(os.geteuid() != 0, reason="without root the server runs as the one who owns TMPDIR")
def test_a_temporary_folder_closed_to_others_is_not_in_the_way(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tmp_path.chmod(0o700)
    with {"postgres": PostgresServer, "mariadb": MariaServer}[kind]() as server:
        server.connect(server.create_database()).close()


AS_ANYBODY = """
import encodings.idna, os, pwd  # while we still may read the interpreter's own folder
from tests.servers import MariaServer, PostgresServer

os.setgroups([])
os.setgid(pwd.getpwnam("nobody").pw_gid)
os.setuid(pwd.getpwnam("nobody").pw_uid)
for make in (PostgresServer, MariaServer):
    with make() as server:
        server.connect(server.create_database()).close()
        server.kill()
        server.start()
        assert os.stat(server.log).st_uid == os.geteuid() != 0
"""


@pytest.mark.slow("makes data folders of both servers anew")
@pytest.mark.skipif(os.geteuid() != 0, reason="then every other test shows it")
def test_a_user_without_rights_can_run_both() -> None:
    subprocess.run([sys.executable, "-B", "-W", "error", "-c", AS_ANYBODY], cwd=ROOT, check=True, timeout=60)


# --- a server of one's own -----------------------------------------------------------------------------


@both
def test_a_restart_keeps_port_and_data(own: Server) -> None:
    name, port = own.create_database(), own.port
    run(own.connect(name), "CREATE TABLE things (id INTEGER)")
    for expected, mode in enumerate(("fast", "immediate"), start=1):
        run(own.connect(name), f"INSERT INTO things VALUES ({expected})")
        own.restart(mode)  # type: ignore[arg-type]
        assert run(own.connect(name), "SELECT count(*) FROM things") == [(expected,)]
    assert own.port == port


@both
def test_the_end_of_one_server_does_not_disturb_another(own: Server, shared: Server, table: str) -> None:
    """Though the data folder of one is a copy of the other's, as it was before its first start."""
    connection = shared.connect(table)
    own.kill()
    own.close()
    assert run(connection, "SELECT id FROM things") == []


@both
def test_a_stopped_server_refuses_connections(own: Server) -> None:
    name = own.create_database()
    own.stop()
    with pytest.raises(DriverError):
        own.connect(name)
    own.start()
    own.connect(name).close()


@both
def test_a_crash_keeps_what_was_committed_and_nothing_else(own: Server) -> None:
    name = own.create_database()
    run(own.connect(name), "CREATE TABLE things (id INTEGER)", "INSERT INTO things VALUES (1)")
    survivor = own.connect(name)
    survivor.cursor().execute("INSERT INTO things VALUES (2)")
    own.kill()
    with pytest.raises(DriverError):
        survivor.commit()
    survivor.close()
    own.start()
    assert run(own.connect(name), "SELECT id FROM things") == [(1,)]


def test_a_crash_takes_the_processes_that_are_busy_too(own_postgres: PostgresServer) -> None:
    """A busy process of PostgreSQL does not notice that the first one died; it would go on and write."""
    with own_postgres.connect("postgres", admin=True) as busy:
        pid = busy.info.backend_pid
        busy.pgconn.send_query(b"SELECT count(*) FROM generate_series(1, 1000000000)")
        assert running(pid)
        own_postgres.kill()
        assert not running(pid)
        busy.close()


@both
def test_a_server_that_cannot_start_says_why(own: Server) -> None:
    own.stop()
    with socket.create_server(("127.0.0.1", own.port)), pytest.raises(RuntimeError, match="in use"):
        own.start()
    own.start()


@both
def test_nothing_is_left_of_a_killed_server(own: Server) -> None:
    segments = Path("/proc/sysvipc/shm")
    folder, pid = own.folder, own.pid
    own.kill()
    own.close()
    assert not folder.exists() and not running(pid)
    assert str(pid) not in segments.read_text().split()
