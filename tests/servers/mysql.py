"""A MySQL server of our own: MySQL itself, which Debian has in its unstable release only (`make mysql`).

See `server` for its life. It differs from MariaDB in how its data folder is made and where it keeps users.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pymysql

from .binaries import find_mysql
from .mariadb import MariaServer
from .server import Server

__all__ = ["MySqlServer"]

_KEPT = ("mysql.infoschema", "mysql.session", "mysql.sys")  # own system views, and cannot log in


class MySqlServer(MariaServer):
    kind = "mysql"

    def __init__(self, *, durable: bool = True, folder: Path | None = None) -> None:
        self._server = find_mysql()
        Server.__init__(self, durable=durable, folder=folder)

    def _initialize(self) -> None:
        self._run([self._server, *self._options(), "--initialize-insecure"])

    def _command(self, port: int) -> list[str | Path]:
        return [*super()._command(port), "--mysqlx=OFF", "--secure-file-priv=NULL"]

    def _options(self) -> list[str]:
        mariadbs = "--innodb-log-file-size=32M"  # it has another name here
        return [option for option in super()._options() if option != mariadbs]

    def _create_user(self) -> None:
        everything = r"`postroom\_%`.*"
        root = pymysql.connect(unix_socket=self._socket, user="root", autocommit=True)
        with closing(root), root.cursor() as cursor:
            for user, rights in ((self.admin, "*.*"), (self.user, everything)):
                cursor.execute(f"CREATE USER {user}@'%%' IDENTIFIED BY %s", (self.password,))
                cursor.execute(f"GRANT ALL ON {rights} TO {user}@'%' WITH GRANT OPTION")
            cursor.execute("DELETE FROM mysql.user WHERE User NOT IN %s", ((self.admin, self.user, *_KEPT),))
            cursor.execute("FLUSH PRIVILEGES")
