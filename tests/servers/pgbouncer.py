"""A PgBouncer in front of a PostgreSQL server: what many operators put there.

In transaction mode, its usual one here, a connection to it is nobody's session: each transaction may run on
another connection to the server. `lead_to(server)` has it connect to another one from now on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

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
pool_mode = {mode}
default_pool_size = {pool}
max_client_conn = 200
server_login_retry = 1
logfile = {folder}/log
"""


class PgBouncer:
    def __init__(
        self,
        server: PostgresServer,
        *,
        mode: Literal["session", "transaction"] = "transaction",
        pool: int = 3,
    ) -> None:
        self._program = find_pgbouncer()
        self._server, self._mode, self._pool = server, mode, pool
        self.port = free_port()
        self.folder = Path(tempfile.mkdtemp(prefix="postroom-pgbouncer-", dir=base_folder()))
        self._watchdog = Watchdog(self.folder, "INT")
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._write()
            self._start()
        except BaseException:
            self.close()
            raise

    def url(self, database: str) -> str:
        """As the SDK wants it: told that there is a pool in between, if its sessions are nobody's."""
        told = "?pgbouncer=1" if self._mode == "transaction" else ""
        return f"{self._server.url(database, port=self.port)}{told}"

    def lead_to(self, server: PostgresServer) -> None:
        """As an operator does after a failover: another address in its settings, which it reads again."""
        assert self._process is not None
        self._server = server
        self._write()
        self._process.send_signal(signal.SIGHUP)

    def said(self) -> str:
        return (self.folder / "log").read_text()

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

    def _write(self) -> None:
        places = {"host": HOST, "port": self.port, "target": self._server.port, "folder": self.folder}
        (self.folder / "pgbouncer.ini").write_text(
            _SETTINGS.format(pool=self._pool, mode=self._mode, **places)
        )
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
