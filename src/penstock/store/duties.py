"""Leases for background work: at most one holder per duty, on the shard the duty works on (I12)."""

from __future__ import annotations

from .session import Lane, Session

__all__ = ["SqlDuties"]


class SqlDuties:
    def __init__(self, session: Session) -> None:
        self._session = session

    def acquire(self, duty: str, holder: str, lease_ms: int) -> bool:
        """Take or renew the lease. A look without a lock first: most who ask are refused."""
        look = "SELECT holder, until_ms FROM penstock_duties WHERE name = ?"
        with self._session.read(Lane.LOG) as tx:
            row = tx.one(look, duty)
            if row is not None and row[0] != holder and row[1] > tx.now_ms():
                return False
        with self._session.write(Lane.LOG) as tx:
            row = tx.one(look + self._session.dialect.for_update, duty)
            now = tx.now_ms()
            if row is not None and row[0] != holder and row[1] > now:
                return False
            upsert = self._session.dialect.upsert("penstock_duties", ("name",), ("holder", "until_ms"))
            tx.run(upsert, duty, holder, now + lease_ms)
            return True

    def release(self, duty: str, holder: str) -> None:
        with self._session.write(Lane.LOG) as tx:
            tx.run("DELETE FROM penstock_duties WHERE name = ? AND holder = ?", duty, holder)
