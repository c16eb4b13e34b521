"""A PostgreSQL server of our own. See `server` for its life."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import psycopg
from psycopg import sql

from .binaries import find_postgres
from .server import Mode, Server

__all__ = ["PostgresServer"]

_SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "max_wal_size": "256MB",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "dynamic_shared_memory_type": "mmap",  # in the data folder: a killed server leaves nothing in /dev/shm
    "timezone": "Asia/Kathmandu",  # +05:45: time that is not handled as UTC shows at once
    "log_line_prefix": "%m [%p] %u@%d ",
    "password_encryption": "scram-sha-256",
}


class PostgresServer(Server):
    kind = "postgres"
    scheme = "postgresql"
    accounts = ("postgres", "nobody")
    signals: ClassVar[dict[Mode, signal.Signals]] = {"fast": signal.SIGINT, "immediate": signal.SIGQUIT}
    admin = "postgres"

    def __init__(self, *, durable: bool = True, folder: Path | None = None) -> None:
        self._binaries = find_postgres()
        super().__init__(durable=durable, folder=folder)

    def _initialize(self) -> None:
        password = self.folder / "password"
        password.write_text(self.password)
        password.chmod(0o644)  # its folder lets in the server's user alone
        self._run(
            [
                self._binaries / "initdb",
                *("-D", self.data, "-U", self.admin, "--pwfile", password, "--auth", "scram-sha-256"),
                *("-E", "UTF8", "--locale", "C", "--no-sync"),
            ]
        )
        password.unlink()
        lines = [f"{name} = '{value}'" for name, value in _SETTINGS.items()]
        with (self.data / "postgresql.conf").open("a") as settings:
            settings.write("\n".join(lines) + "\n")

    def _command(self, port: int) -> list[str | Path]:
        loose = () if self.durable else ("-c", "fsync=off", "-c", "full_page_writes=off")
        return [self._binaries / "postgres", "-D", self.data, "-p", str(port), *loose]

    def _ready(self, port: int) -> bool:
        """What `pg_ctl` waits for: the last line of the server's own `postmaster.pid`."""
        lines = self._postmaster_lines()
        return len(lines) >= 8 and lines[0].strip() == str(self.pid) and lines[7].strip() == "ready"

    def _create_user(self) -> None:
        with self._administer() as connection:
            connection.execute(
                sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(
                    sql.Identifier(self.user), sql.Literal(self.password)
                )
            )

    def create_database(self) -> str:
        name = self._new_name()
        statement = sql.SQL("CREATE DATABASE {} OWNER {}")
        with self._administer() as connection:
            connection.execute(statement.format(sql.Identifier(name), sql.Identifier(self.user)))
        return name

    def drop_database(self, name: str) -> None:
        with self._administer() as connection:
            connection.execute(
                sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            )

    def connect(
        self, database: str, *, port: int | None = None, admin: bool = False
    ) -> psycopg.Connection[tuple[Any, ...]]:
        return psycopg.connect(self.url(database, port=port, admin=admin))

    def take_writes(self, on: bool) -> None:
        """Or refuse them from now on, also in sessions that are open."""
        with self._administer() as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(f"ALTER SYSTEM SET default_transaction_read_only = {'off' if on else 'on'}")
            connection.execute("SELECT pg_reload_conf()")

    @contextmanager
    def _administer(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        with self.connect("postgres", admin=True) as connection:
            connection.autocommit = True  # CREATE DATABASE wants no transaction around it
            yield connection

    def _free_memory(self) -> None:
        """The small System V segment by which two servers on one folder notice each other."""
        lines = self._postmaster_lines()
        if len(lines) >= 7 and lines[6].strip():
            ipc_rmid = 0
            ctypes.CDLL(None).shmctl(int(lines[6].split()[1]), ipc_rmid, None)

    def _postmaster_lines(self) -> list[str]:
        """Empty when it was stopped in order: the server removes the file then."""
        try:
            return (self.data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []
