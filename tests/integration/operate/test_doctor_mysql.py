"""`postroom doctor` on MariaDB: a server that is well, and each thing that can be wrong, made so on purpose.

Cites R6 (what "confirmed" survives), I1 (isolation), I8 (flushing), I15 (locks end).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.contract.cli_runner import Cli
from tests.servers import MariaServer
from tests.tuned import Tune


class Doctor:
    """The doctor on one database, and an administrator who spoils it."""

    def __init__(self, owner: MariaServer, url: str, folder: Path) -> None:
        self.server, self.cli, self.database = owner, Cli(folder, url), url.rpartition("/")[2]

    def admin(self, *statements: str) -> None:
        with closing(self.server.connect("mysql", admin=True)) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    @property
    def as_admin(self) -> str:
        return self.cli.url.replace("//postroom:", f"//{self.server.admin}:")


@pytest.fixture
def bare(spare_mariadb: MariaServer, tmp_path: Path) -> Iterator[Doctor]:
    """A database without tables, on a durable server that is this process's own."""
    name = spare_mariadb.create_database()
    yield Doctor(spare_mariadb, spare_mariadb.url(name), tmp_path)
    spare_mariadb.drop_database(name)


@pytest.fixture
def doctor(bare: Doctor) -> Doctor:
    bare.cli.ok("migrate")
    return bare


def test_a_server_that_is_well(doctor: Doctor) -> None:
    found = doctor.cli.findings("--url", doctor.as_admin)
    slow = {"round trip", "commit"}  # a busy machine may be slow
    assert {f["state"] for name, f in found.items() if name not in slow} == {"ok"}
    assert found["server"]["message"].startswith("MariaDB ")
    assert {"schema", "rights", "innodb_flush_log_at_trx_commit", "innodb_doublewrite"} <= found.keys()
    assert {"sync_binlog", "isolation", "connections", "max_allowed_packet", "replicas"} <= found.keys()
    said = doctor.cli.ok("doctor").out
    assert "0 failed" in said and doctor.server.password not in said and "p%40ss" not in said


def test_what_may_not_be_looked_at_is_said(doctor: Doctor) -> None:
    found = doctor.cli.findings()["transactions"]
    assert found["state"] == "skip" and "PROCESS" in found["message"]
    assert "1 not looked at" in doctor.cli.ok("doctor").out


def test_no_tables(bare: Doctor) -> None:
    found = bare.cli.findings()
    assert found["schema"]["state"] == "fail" and "postroom migrate" in found["schema"]["advice"]
    assert found["commit"]["state"] == "skip" and "members" not in found


def test_an_old_transaction(doctor: Doctor, tune: Tune) -> None:
    """I15."""
    tune(cli={"old_transaction_ms": 500})
    with closing(doctor.server.connect(doctor.database)) as idle, idle.cursor() as cursor:
        cursor.execute("START TRANSACTION")
        cursor.execute("UPDATE postroom_settings SET value = value")
        _until(lambda: doctor.cli.findings("--url", doctor.as_admin)["transactions"]["state"] == "warn")
        found = doctor.cli.findings("--url", doctor.as_admin)["transactions"]
        assert "of postroom has had one open for" in found["message"] and "KILL" in found["advice"]
        idle.rollback()
    _until(lambda: doctor.cli.findings("--url", doctor.as_admin)["transactions"]["state"] == "ok")


def test_missing_rights(doctor: Doctor) -> None:
    doctor.admin(
        "CREATE USER guest@'%' IDENTIFIED BY 'guest'",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON `{doctor.database}`.* TO guest@'%'",
    )
    try:
        url = f"mysql://guest:guest@{doctor.cli.url.rpartition('@')[2]}"
        found = doctor.cli.findings("--url", url)["rights"]
        assert found["state"] == "fail" and "CREATE, ALTER, DROP, INDEX" in found["message"]
        doctor.admin(found["advice"].partition(": ")[2])  # what it advises is what helps
        assert doctor.cli.findings("--url", url)["rights"]["state"] == "ok"
    finally:
        doctor.admin("DROP USER guest@'%'")


@pytest.mark.parametrize(
    ("settings", "check", "state", "advice"),
    [
        (["innodb_flush_log_at_trx_commit = 2"], "innodb_flush_log_at_trx_commit", "fail", "_commit = 1"),
        (["max_connections = 10"], "connections", "warn", "max_connections"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_settings_that_are_wrong(
    spoilt: Callable[[list[str]], Doctor], settings: list[str], check: str, state: str, advice: str
) -> None:
    """I8: a connection cannot ask for a flush, so the server's settings are what counts."""
    found = spoilt(settings).cli.findings()[check]
    assert found["state"] == state and advice in found["advice"]


def test_packets_that_are_too_small(spoilt: Callable[[list[str]], Doctor]) -> None:
    """The store refuses such a server: a batch would not fit."""
    found = spoilt(["max_allowed_packet = 1048576"]).cli.findings()["server"]
    assert found["state"] == "fail" and "set max_allowed_packet to 16M" in found["message"]


@pytest.fixture
def spoilt(doctor: Doctor) -> Iterator[Callable[[list[str]], Doctor]]:
    """Settings of the whole server, put back as they were."""
    changed: dict[str, str] = {}

    def spoil(settings: list[str]) -> Doctor:
        with closing(doctor.server.connect("mysql", admin=True)) as connection, connection.cursor() as cursor:
            for setting in settings:
                name = setting.partition(" ")[0]
                cursor.execute(f"SELECT @@global.{name}")
                changed[name] = str(cursor.fetchone()[0])
                cursor.execute(f"SET GLOBAL {setting}")
        return doctor

    yield spoil
    doctor.admin(*(f"SET GLOBAL {name} = {value}" for name, value in changed.items()))


@pytest.mark.timeout(60)
def test_a_server_of_its_own(
    own_mariadb: MariaServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binary log that is not flushed, replicas that need not confirm, no writes, and away (R6)."""
    binlog = ("--log-bin=binlog", "--server-id=1", "--sync-binlog=0", "--binlog-format=ROW")
    options = [*own_mariadb._options(), *binlog]
    monkeypatch.setattr(own_mariadb, "_options", lambda: options)
    own_mariadb.restart()
    doctor = Doctor(own_mariadb, own_mariadb.url(own_mariadb.create_database()), tmp_path)
    doctor.cli.ok("migrate")
    found = doctor.cli.findings()
    assert found["sync_binlog"]["state"] == "warn" and "sync_binlog = 1" in found["sync_binlog"]["advice"]
    assert found["replicas"]["state"] == "warn" and "rpl_semi_sync" in found["replicas"]["advice"]
    doctor.admin("SET GLOBAL rpl_semi_sync_master_timeout = 1")  # ms: there is no replica to wait for
    doctor.admin("SET GLOBAL rpl_semi_sync_master_enabled = ON", "SET GLOBAL sync_binlog = 1")
    found = doctor.cli.findings()
    assert found["sync_binlog"]["state"] == "ok"
    assert found["replicas"]["state"] == "warn" and "AFTER_SYNC" in found["replicas"]["advice"]
    doctor.admin("SET GLOBAL rpl_semi_sync_master_wait_point = AFTER_SYNC")
    assert doctor.cli.findings()["replicas"]["state"] == "ok"
    doctor.admin("SET GLOBAL rpl_semi_sync_master_enabled = OFF", "SET GLOBAL binlog_format = STATEMENT")
    assert "binlog_format = ROW" in doctor.cli.findings()["isolation"]["advice"]
    doctor.admin("SET GLOBAL read_only = ON")
    found = doctor.cli.findings()
    assert found["server"]["state"] == "fail" and "takes no writes" in found["server"]["message"]
    own_mariadb.stop()
    found = doctor.cli.findings()
    assert found["server"]["state"] == "fail" and "cannot be reached" in found["server"]["message"]


def _until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)
