"""`postroom doctor` on PostgreSQL: a server that is well, and what can be wrong with one, made so on purpose.

Cites R6 (what "confirmed" survives), I1 (isolation), I8 (flushing), I19 (old snapshots).
"""

from __future__ import annotations

import re
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from postroom.cli.checks import postgres
from tests.contract.cli_runner import Cli
from tests.servers import PostgresServer
from tests.tuned import Tune


class Doctor:
    """The doctor on one database, and an administrator who spoils it."""

    def __init__(self, owner: PostgresServer, url: str, folder: Path) -> None:
        self.server, self.cli, self.database = owner, Cli(folder, url), url.rpartition("/")[2]

    def admin(self, *statements: str, database: str | None = None) -> None:
        with self.server.connect(database or self.database, admin=True) as connection:
            connection.autocommit = True
            for statement in statements:
                connection.execute(statement)  # type: ignore[call-overload]


@pytest.fixture
def bare(spare_postgres: PostgresServer, tmp_path: Path) -> Iterator[Doctor]:
    """A database without tables, on a durable server that is this process's own."""
    name = spare_postgres.create_database()
    yield Doctor(spare_postgres, spare_postgres.url(name), tmp_path)
    spare_postgres.drop_database(name)


@pytest.fixture
def doctor(bare: Doctor) -> Iterator[Doctor]:
    """A migrated database; settings of the role are taken back."""
    bare.cli.ok("migrate")
    yield bare
    taken_back = ("ALTER ROLE postroom RESET ALL", "ALTER ROLE postroom CONNECTION LIMIT -1")
    bare.admin(*taken_back, database="postgres")


def states(found: dict[str, dict[str, str]]) -> set[str]:
    return {check["state"] for check in found.values()}


def test_a_server_that_is_well(doctor: Doctor) -> None:
    found = doctor.cli.findings()
    slow = {"round trip", "commit"}  # a busy machine may be slow
    assert {f["state"] for name, f in found.items() if name not in slow} == {"ok"}
    assert found["server"]["message"].startswith("PostgreSQL ")
    assert {
        "schema",
        "rights",
        "fsync",
        "full_page_writes",
        "synchronous_commit",
        "isolation",
    } <= found.keys()
    assert {"clock", "connections", "pooler", "standbys", "transactions", "autovacuum"} <= found.keys()
    said = doctor.cli.ok("doctor").out
    assert re.search(r"commit +\d+\.\d\d ms typically", said) and "0 failed" in said
    assert doctor.server.password not in said and "p%40ss" not in said


def test_the_queue_is_as_it_was(doctor: Doctor) -> None:
    """What the doctor writes to measure a commit is taken back."""
    rows = "SELECT COUNT(*) FROM postroom_duties"
    doctor.cli.findings()
    with doctor.server.connect(doctor.database) as connection:
        assert connection.execute(rows).fetchone() == (0,)


def test_no_tables(bare: Doctor) -> None:
    found = bare.cli.findings()
    assert found["schema"]["state"] == "fail" and "postroom migrate" in found["schema"]["advice"]
    assert found["commit"]["state"] == "skip" and "members" not in found


def test_a_newer_schema(doctor: Doctor) -> None:
    doctor.admin("INSERT INTO postroom_schema (version, applied_at) VALUES (999, 0)")
    found = doctor.cli.findings()
    assert found["schema"]["state"] == "fail" and "run `pip install .`" in found["schema"]["advice"]


def test_a_role_that_does_not_wait_for_the_disk(doctor: Doctor) -> None:
    """I8: messages are flushed all the same; the role's own default is worth a look."""
    doctor.admin("ALTER ROLE postroom SET synchronous_commit = off")
    found = doctor.cli.findings()["synchronous_commit"]
    assert found["state"] == "warn" and found["message"].startswith("on for messages")


def test_a_role_with_another_isolation(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    """I1: Postroom sets it, whatever the default is; and the check would see it if it did not."""
    doctor.admin("ALTER ROLE postroom SET default_transaction_isolation = 'repeatable read'")
    found = doctor.cli.findings()["isolation"]
    assert found["state"] == "ok" and "the default here is repeatable read" in found["message"]
    monkeypatch.setattr("postroom.store.dialects.postgres._BEGIN", "BEGIN")
    found = doctor.cli.findings()["isolation"]
    assert found["state"] == "fail" and found["message"].startswith("repeatable read")


def test_a_database_that_takes_no_writes(doctor: Doctor) -> None:
    doctor.admin(f"ALTER DATABASE {doctor.database} SET default_transaction_read_only = on")
    found = doctor.cli.findings()
    assert found["server"]["state"] == "fail" and "takes no writes" in found["server"]["message"]
    assert set(found) == {"python", "server"}


def test_missing_rights(doctor: Doctor) -> None:
    doctor.admin("CREATE ROLE guest LOGIN PASSWORD 'guest'", "GRANT CREATE, USAGE ON SCHEMA public TO guest")
    try:
        guest = Doctor(doctor.server, _as(doctor.cli.url, "guest"), doctor.cli.folder)
        found = guest.cli.findings()["rights"]
        assert found["state"] == "fail" and "lacks SELECT, INSERT, UPDATE, DELETE" in found["message"]
        doctor.admin("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO guest")
        found = guest.cli.findings()["rights"]
        assert found["state"] == "warn" and "belong to another role" in found["message"]
        doctor.admin("GRANT postroom TO guest")
        assert guest.cli.findings()["rights"]["state"] == "ok"
        doctor.admin("REVOKE postroom FROM guest", "REVOKE CREATE ON SCHEMA public FROM guest, public")
        found = guest.cli.findings()["rights"]
        assert found["state"] == "fail" and "GRANT USAGE, CREATE ON SCHEMA public TO guest" in found["advice"]
    finally:
        doctor.admin("DROP OWNED BY guest", "DROP ROLE guest")


def _as(url: str, user: str) -> str:
    return f"postgresql://{user}:{user}@{url.rpartition('@')[2]}"


def test_few_connections(doctor: Doctor) -> None:
    doctor.admin("ALTER ROLE postroom CONNECTION LIMIT 20")
    found = doctor.cli.findings()["connections"]
    assert found["state"] == "warn" and "of 20 in use" in found["message"] and "max_conn" in found["advice"]


def test_an_old_transaction(doctor: Doctor, tune: Tune) -> None:
    """I19: one that is idle keeps dead rows alive."""
    tune(cli={"old_transaction_ms": 200})
    with doctor.server.connect(doctor.database) as idle:
        idle.execute("SELECT COUNT(*) FROM postroom_topics")
        _until(lambda: doctor.cli.findings()["transactions"]["state"] == "warn")
        found = doctor.cli.findings()["transactions"]
        assert (
            "of postroom has had one open for" in found["message"]
            and "idle in transaction" in found["message"]
        )
        idle.rollback()
    assert doctor.cli.findings()["transactions"]["state"] == "ok"


def test_sessions_that_cannot_be_seen_are_counted(doctor: Doctor) -> None:
    with doctor.server.connect(doctor.database, admin=True):
        assert (
            "1 sessions of other roles cannot be looked at"
            in doctor.cli.findings()["transactions"]["message"]
        )


def test_dead_rows(doctor: Doctor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "_MANY_DEAD", 10)
    doctor.admin(
        "ALTER TABLE postroom_settings SET (autovacuum_enabled = off)",
        "INSERT INTO postroom_settings (name, value) SELECT 'x' || n, '' FROM generate_series(1, 50) n",
        "DELETE FROM postroom_settings WHERE name LIKE 'x%'",
    )
    _until(lambda: doctor.cli.findings()["autovacuum"]["state"] == "warn")
    assert "postroom_settings has 50 dead rows" in doctor.cli.findings()["autovacuum"]["message"]


def test_clocks_that_differ(doctor: Doctor, tune: Tune) -> None:
    tune(cli={"server_clock_ms": -1})
    found = doctor.cli.findings()["clock"]
    assert found["state"] == "warn" and "NTP" in found["advice"]


def test_a_server_that_is_slow(doctor: Doctor, tune: Tune) -> None:
    tune(cli={"slow_trip_ms": 0.0, "slow_commit_ms": 0.0})
    found = doctor.cli.findings()
    assert found["round trip"]["state"] == found["commit"]["state"] == "warn"


def test_groups_that_nobody_uses(doctor: Doctor) -> None:
    """R44."""
    doctor.cli.ok("topic", "create", "orders", "--partitions", "1")
    doctor.cli.ok("group", "create", "orders", "billing")
    assert states(doctor.cli.findings()) <= {"ok"}
    doctor.cli.ok("send", "orders", "hello")
    found = doctor.cli.findings()["idle group"]
    assert found["state"] == "warn" and "keeps them from being dropped" in found["message"]
    assert "postroom group delete orders billing" in found["advice"]


# --- a pooler ----------------------------------------------------------------------------------------


@contextmanager
def pretending_pooler(port: int) -> Iterator[int]:
    """A proxy that tells clients a process id that is not the server's, as PgBouncer does."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_accept, args=(listener, port), daemon=True).start()
        yield listener.getsockname()[1]


def _accept(listener: socket.socket, port: int) -> None:
    with suppress(OSError):
        while True:
            client, _ = listener.accept()
            upstream = socket.create_connection(("127.0.0.1", port))
            for source, target, change in ((client, upstream, False), (upstream, client, True)):
                threading.Thread(target=_pump, args=(source, target, change), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket, change: bool) -> None:
    key = re.compile(rb"(K\x00\x00\x00\x0c)....", re.DOTALL)
    with suppress(OSError), source, target:
        while data := source.recv(65536):
            target.sendall(key.sub(lambda found: found[1] + b"\0\0\0\7", data) if change else data)
            change = change and not key.search(data)


def test_a_pooler_is_noticed(doctor: Doctor) -> None:
    with pretending_pooler(doctor.server.port) as port:
        url = doctor.cli.url.replace(str(doctor.server.port), str(port))
        found = doctor.cli.findings("--url", url)["pooler"]
        assert found["state"] == "fail" and "?pgbouncer=1" in found["advice"]
        assert doctor.cli.findings("--url", f"{url}?pgbouncer=1")["pooler"]["state"] == "ok"
    found = doctor.cli.findings("--url", f"{doctor.cli.url}?pgbouncer=1")["pooler"]
    assert found["state"] == "warn" and "leave it out" in found["advice"]


# --- a server of its own, to be spoilt ---------------------------------------------------------------


@pytest.mark.timeout(60)
def test_a_server_that_may_lose_what_was_confirmed(own_postgres: PostgresServer, tmp_path: Path) -> None:
    doctor = Doctor(own_postgres, own_postgres.url(own_postgres.create_database()), tmp_path)
    doctor.cli.ok("migrate")
    doctor.admin(
        "ALTER SYSTEM SET fsync = off",
        "ALTER SYSTEM SET full_page_writes = off",
        "ALTER SYSTEM SET autovacuum = off",
        "SELECT pg_reload_conf()",
    )
    _until(lambda: doctor.cli.findings()["fsync"]["state"] == "fail")
    found = doctor.cli.findings()
    assert "set fsync = on" in found["fsync"]["advice"]
    assert found["full_page_writes"]["state"] == found["autovacuum"]["state"] == "fail"
    with _standby(own_postgres, tmp_path):
        _until(lambda: doctor.cli.findings()["standbys"]["state"] == "warn")
        assert "synchronous_standby_names" in doctor.cli.findings()["standbys"]["advice"]
        doctor.admin("ALTER SYSTEM SET synchronous_standby_names = 'watcher'", "SELECT pg_reload_conf()")
        _until(lambda: doctor.cli.findings()["standbys"]["state"] == "ok")
        assert "'watcher'" in doctor.cli.findings()["standbys"]["message"]
        doctor.admin("ALTER SYSTEM RESET synchronous_standby_names", "SELECT pg_reload_conf()")
    own_postgres.stop()
    found = doctor.cli.findings()
    assert found["server"]["state"] == "fail" and "cannot be reached" in found["server"]["message"]


@contextmanager
def _standby(owner: PostgresServer, folder: Path) -> Iterator[None]:
    """Receives the server's log as a standby does, and confirms it."""
    programs = (owner._binaries / "postgres").resolve().parent
    line: list[Any] = [programs / "pg_receivewal", "-D", folder, "--synchronous", "-d"]
    url = owner.url("postgres", admin=True) + "?application_name=watcher"
    receiver = subprocess.Popen([*line, url], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        yield
    finally:
        receiver.terminate()
        receiver.wait(10)


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
