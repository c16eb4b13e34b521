"""A PgBouncer in front of a PostgreSQL server, in transaction mode: what many operators put there.

A connection to it is nobody's session: each transaction may run on another connection to the server.
"""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

from .binaries import find_pgbouncer
from .places import HOST, account, base_folder, free_port
from .postgres import PostgresServer
from .watchdog import Watchdog

__all__ = ["PgBouncer"]

_SETTINGS = """
[databases]
* = host={host} port={target}

[pgbouncer]
listen_addr = {host}
listen_port = {port}
unix_socket_dir =
auth_type = scram-sha-256
auth_file = {folder}/users
pool_mode = transaction
default_pool_size = {pool}
max_client_conn = 200
logfile = {folder}/log
"""


class PgBouncer:
    def __init__(self, server: PostgresServer, *, pool: int = 3) -> None:
        self._program = find_pgbouncer()
        self._server = server
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="postroom-pgbouncer-", dir=base_folder()))
        self._watchdog = Watchdog(self.folder, "INT")
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._write(pool)
            self._start()
        except BaseException:
            self.close()
            raise

    def url(self, database: str) -> str:
        """As the SDK wants it: told that there is a pool in between."""
        return f"{self._server.url(database, port=self.port)}?pgbouncer=1"

    def close(self) -> None:
        """May be called twice."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(10)
            self._process = None
            self._watchdog.guard(None)
        self._watchdog.dismiss()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- inside ---------------------------------------------------------------------------------------

    def _write(self, pool: int) -> None:
        places = {"host": HOST, "port": self.port, "target": self._server.port, "folder": self.folder}
        (self.folder / "pgbouncer.ini").write_text(_SETTINGS.format(pool=pool, **places))
        (self.folder / "users").write_text(f'"{self._server.user}" "{self._server.password}"\n')

    def _start(self) -> None:
        runner = account(PostgresServer.accounts)  # it refuses root
        if runner is not None:
            for path in (self.folder, *self.folder.iterdir()):
                os.chown(path, runner.pw_uid, runner.pw_gid)
        who = {} if runner is None else {"user": runner.pw_uid, "group": runner.pw_gid, "extra_groups": []}
        self._process = subprocess.Popen(
            [self._program, "-q", self.folder / "pgbouncer.ini"],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            **who,  # type: ignore[call-overload]
        )
        self._watchdog.guard(self._process.pid)
        deadline = time.monotonic() + 20
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"PgBouncer did not start:\n{(self.folder / 'log').read_text()}")
            time.sleep(0.02)

    def _ready(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((HOST, self.port)) == 0
