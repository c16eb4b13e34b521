"""A standby of a PostgreSQL server of our own: copied from it, following it, and promoted when it is gone.

follow(primary)            a copy that streams from it
confirmed_by(primary)      from now on its commits wait for the standby's flush
promote()                  the standby is the primary now; nobody waits for a standby any more
"""

from __future__ import annotations

import time
from collections.abc import Callable

from .places import HOST
from .postgres import PostgresServer

__all__ = ["PostgresStandby"]


class PostgresStandby(PostgresServer):
    """Use it like a server. `primary_port`: where it streams from, which may be a proxy's."""

    def __init__(self, primary: PostgresServer, *, primary_port: int | None = None) -> None:
        self._primary, self._primary_port = primary, primary_port or primary.port
        super().__init__(durable=primary.durable)

    @classmethod
    def follow(cls, primary: PostgresServer, *, primary_port: int | None = None) -> PostgresStandby:
        standby = cls(primary, primary_port=primary_port)
        standby._until(lambda: standby._states(primary) != [], "the standby streams")
        return standby

    def _make_data(self) -> None:
        """A copy of the primary as it is now, with what it takes to follow it."""
        source = (
            f"host={HOST} port={self._primary_port} user={self.admin} password={self.password} "
            f"application_name={self.folder.name}"
        )
        programs = (self._binaries / "postgres").resolve().parent  # PATH may have links to some of them
        copy = (programs / "pg_basebackup", "-D", self.data, "-d", source)
        self._run([*copy, "-R", "-X", "stream", "--checkpoint=fast", "--no-sync"])

    def _create_user(self) -> None:
        """The primary's users are here already."""

    def confirmed_by(self, primary: PostgresServer) -> None:
        """Commits of the primary wait for this one from now on, and it has all that was committed before."""
        with primary._administer() as connection:
            connection.execute("ALTER SYSTEM SET synchronous_standby_names = '*'")
            connection.execute("SELECT pg_reload_conf()")
        self._until(lambda: "sync" in self._states(primary), "the standby is synchronous")

    def unconfirmed_by(self, primary: PostgresServer) -> None:
        """Commits of that server wait for nobody any more."""
        with primary._administer() as connection:
            connection.execute("ALTER SYSTEM RESET synchronous_standby_names")
            connection.execute("SELECT pg_reload_conf()")
        self._until(lambda: "sync" not in self._states(primary), "the standby is asynchronous")

    def promote(self) -> None:
        with self._administer() as connection:
            connection.execute("SELECT pg_promote(true, 60)")
        self.unconfirmed_by(self)

    def _states(self, primary: PostgresServer) -> list[str]:
        with primary._administer() as connection:
            rows = connection.execute(
                "SELECT sync_state FROM pg_stat_replication WHERE state = 'streaming'"
            ).fetchall()
        return [state for (state,) in rows]

    def _until(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{what}: not within {seconds} s; its log:\n{self._last_words()}")
            time.sleep(0.02)
