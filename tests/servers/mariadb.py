"""A MariaDB server of our own. See `server` for its life."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pymysql

from .binaries import find_mariadb
from .places import HOST
from .server import Mode, Server

__all__ = ["MariaServer"]

_SETTINGS = (
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--max-connections=200",
    "--max-allowed-packet=64M",
    "--innodb-buffer-pool-size=64M",
    "--innodb-log-file-size=32M",
    "--innodb-flush-log-at-trx-commit=1",
    "--innodb-doublewrite=ON",
    "--default-time-zone=+05:45",  # time that is not handled as UTC shows at once
)


_LOOSE = ("--debug-no-sync", "--innodb-flush-method=nosync", "--innodb-doublewrite=OFF")


class MariaServer(Server):
    kind = "mariadb"
    scheme = "mysql"
    accounts = ("mysql", "nobody")
    # It knows nothing between an orderly stop and a crash.
    signals: ClassVar[dict[Mode, signal.Signals]] = {"fast": signal.SIGTERM, "immediate": signal.SIGKILL}
    admin = "admin"

    def __init__(self, *, durable: bool = True, folder: Path | None = None) -> None:
        self._server, self._installer = find_mariadb()
        super().__init__(durable=durable, folder=folder)

    @property
    def _socket(self) -> str:
        return str(self.folder / "socket")

    def _initialize(self) -> None:
        method = "--auth-root-authentication-method=normal"
        self._run([self._installer, *self._options(), method, "--skip-test-db"])

    def _command(self, port: int) -> list[str | Path]:
        pid_file = self.data / "mariadb.pid"
        return [
            self._server,
            *self._options(),
            *(() if self.durable else _LOOSE),
            *(f"--port={port}", f"--socket={self._socket}", f"--pid-file={pid_file}"),
        ]

    def _options(self) -> list[str]:
        return ["--no-defaults", f"--datadir={self.data}", *_SETTINGS]

    def _ready(self, port: int) -> bool:
        """Whether it greets on its socket, which it opens after its port.

        Not on the port: a server of another test process may have taken that one, and greet there.
        """
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(self._socket)
                return client.recv(1) != b""
            except OSError:
                return False

    def _create_user(self) -> None:
        """A new server lets in anybody without a password: replace those users by two of ours."""
        everything = r"`postroom\_%`.*"  # all databases of that name, and no right beyond them
        root = pymysql.connect(unix_socket=self._socket, user="root", autocommit=True)
        with closing(root), root.cursor() as cursor:
            for user, rights in ((self.admin, "*.*"), (self.user, everything)):
                cursor.execute(f"CREATE USER {user}@'%%' IDENTIFIED BY %s", (self.password,))
                cursor.execute(f"GRANT ALL ON {rights} TO {user}@'%'")
            cursor.execute("GRANT GRANT OPTION ON *.* TO admin@'%'")
            kept = (self.admin, self.user, "mariadb.sys")  # the last owns system views and cannot log in
            cursor.execute("DELETE FROM mysql.global_priv WHERE User NOT IN %s", (kept,))
            cursor.execute("FLUSH PRIVILEGES")

    def create_database(self) -> str:
        name = self._new_name()
        with self._administer() as cursor:
            cursor.execute(f"CREATE DATABASE `{name}` CHARACTER SET utf8mb4")
        return name

    def drop_database(self, name: str) -> None:
        with self._administer() as cursor:
            # A transaction somebody left open on one of its tables would hold up the DROP.
            cursor.execute("SELECT ID FROM information_schema.PROCESSLIST WHERE DB = %s", (name,))
            for (connection_id,) in cursor.fetchall():
                try:
                    cursor.execute("KILL %s", (connection_id,))
                except pymysql.err.OperationalError:
                    pass  # it left by itself meanwhile
            cursor.execute(f"DROP DATABASE IF EXISTS `{name}`")

    def _free_memory(self) -> None:
        """It leaves none."""

    def connect(self, database: str, *, port: int | None = None, admin: bool = False) -> Any:
        user = self.admin if admin else self.user
        return pymysql.connect(
            host=HOST,
            port=port or self.port,
            user=user,
            password=self.password,
            database=database,
            ssl_disabled=True,  # to be prepared for TLS takes longer than the rest
        )

    def take_writes(self, on: bool) -> None:
        """Or refuse those of anybody but an administrator from now on."""
        with self._administer() as cursor:
            cursor.execute(f"SET GLOBAL read_only = {'OFF' if on else 'ON'}")

    @contextmanager
    def _administer(self) -> Iterator[Any]:
        with closing(self.connect("mysql", admin=True)) as connection, connection.cursor() as cursor:
            yield cursor
