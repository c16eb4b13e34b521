"""MariaDB servers that replicate: a primary, and replicas that read its binary log from the beginning.

confirm_by(replica)    commits of the primary wait until the replica has them (semi-synchronous)
promote()              the replica has done all that it has received, and follows nobody any more
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pymysql
from pymysql.cursors import DictCursor

from .mariadb import MariaServer
from .places import HOST

__all__ = ["MariaReplica"]

_numbers = itertools.count(1)
_OPTIONS = (
    "--log-bin=binlog",
    "--log-slave-updates=ON",
    "--gtid-strict-mode=ON",
    "--sync-binlog=1",
    "--slave-net-timeout=10",
    "--rpl-semi-sync-master-wait-point=AFTER_SYNC",
    "--rpl-semi-sync-master-timeout=600000",  # longer than any test: it never goes on alone
    "--rpl-semi-sync-slave-enabled=ON",
)


class MariaReplica(MariaServer):
    """Follows `primary`, by way of `primary_port` if that is a proxy's; None: it is the first primary."""

    def __init__(self, primary: MariaReplica | None = None, *, primary_port: int | None = None) -> None:
        self._number, self._primary = next(_numbers), primary
        self._primary_port = primary_port or (0 if primary is None else primary.port)
        super().__init__()
        if primary is not None:
            self._follow(primary)

    def _command(self, port: int) -> list[str | Path]:
        return [*super()._command(port), *_OPTIONS, f"--server-id={self._number}"]

    def _create_user(self) -> None:
        if self._primary is None:  # else they come with the primary's log
            super()._create_user()

    def _follow(self, primary: MariaReplica) -> None:
        self._do(
            f"CHANGE MASTER TO MASTER_HOST='{HOST}', MASTER_PORT={self._primary_port}, "
            f"MASTER_USER='{self.admin}', MASTER_PASSWORD='{self.password}', "
            "MASTER_CONNECT_RETRY=1, MASTER_USE_GTID=slave_pos",
            "START SLAVE",
        )
        self._until(lambda: self._state()["Slave_IO_Running"] == "Yes", "it follows the primary")

    def confirm_by(self, replica: MariaReplica) -> None:
        """From now on; and the replica has all that was committed before."""
        with closing(self.connect("mysql", admin=True)) as connection, connection.cursor() as cursor:
            cursor.execute("SET GLOBAL rpl_semi_sync_master_enabled = ON")
            cursor.execute("SELECT @@gtid_binlog_pos")
            (position,) = cursor.fetchone()
        self._until(lambda: self._confirmed_by() > 0, "a replica confirms")
        replica._until(lambda: replica._has(position), "it has what was committed before")

    def confirm_alone(self) -> None:
        self._do("SET GLOBAL rpl_semi_sync_master_enabled = OFF")

    def promote(self) -> None:
        self._do("STOP SLAVE IO_THREAD")
        self._until(self._done, "what was received is done")
        self._do("STOP SLAVE", "RESET SLAVE ALL", "SET GLOBAL rpl_semi_sync_slave_enabled = OFF")

    def _has(self, position: str) -> bool:
        with closing(self._root()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT MASTER_GTID_WAIT(%s, 0.1) AS missing", (position,))
            return bool(cursor.fetchone()["missing"] == 0)

    def _done(self) -> bool:
        state = self._state()
        received = (state["Master_Log_File"], state["Read_Master_Log_Pos"])
        return received == (state["Relay_Master_Log_File"], state["Exec_Master_Log_Pos"])

    def _confirmed_by(self) -> int:
        with closing(self._root()) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW STATUS LIKE 'Rpl_semi_sync_master_clients'")
            return int(cursor.fetchone()["Value"])

    def _state(self) -> dict[str, Any]:
        with closing(self._root()) as connection, connection.cursor() as cursor:
            cursor.execute("SHOW SLAVE STATUS")
            return dict(cursor.fetchone() or {})

    def _do(self, *statements: str) -> None:
        with closing(self._root()) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def _root(self) -> Any:
        """`root` needs no password until the primary's users have come here."""
        for user, password in (("root", ""), (self.admin, self.password)):
            try:
                return pymysql.connect(
                    unix_socket=self._socket, user=user, password=password, autocommit=True,
                    cursorclass=DictCursor,
                )  # fmt: skip
            except pymysql.err.OperationalError as error:
                refused = error
        raise refused

    def _until(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds} s; its log:\n{self._last_words()}")
            time.sleep(0.02)
