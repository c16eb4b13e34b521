"""Leases for background work: at most one holder per duty, on the shard the duty works on (I12)."""

from __future__ import annotations

from .session import Lane, Session, Transaction, verbs

__all__ = ["SqlDuties", "holds"]

_LONGEST_MS = 120_000  # of leases on duties

_LOOK = "SELECT holder, until_ms FROM postroom_duties WHERE name = ?"


@verbs
class SqlDuties:
    def __init__(self, session: Session) -> None:
        self._session = session

    def acquire(self, duty: str, holder: str, lease_ms: int) -> bool:
        """Take or renew the lease. A look without a lock first: most who ask are refused."""
        with self._session.read(Lane.LOG) as tx:
            row = tx.one(_LOOK, duty)
            if row is not None and row[0] != holder and _is_held(row[1], tx.now_ms(), lease_ms):
                return False
        with self._session.write(Lane.LOG) as tx:
            row = tx.locked(_LOOK, duty)
            until = tx.now_ms() + lease_ms
            if row is None:  # two at once: one meets the other's row, and looks again
                tx.do(
                    "INSERT INTO postroom_duties (name, holder, until_ms) VALUES (?, ?, ?)",
                    duty,
                    holder,
                    until,
                )
                return True
            if row[0] != holder and _is_held(row[1], tx.now_ms(), lease_ms):
                return False
            tx.do("UPDATE postroom_duties SET holder = ?, until_ms = ? WHERE name = ?", holder, until, duty)
            return True

    def release(self, duty: str, holder: str) -> None:
        with self._session.write(Lane.LOG) as tx:
            tx.do("DELETE FROM postroom_duties WHERE name = ? AND holder = ?", duty, holder)


def _is_held(until: int, now: int, lease_ms: int) -> bool:
    """One that ends later than any that is given now is of a clock that was set back (I26)."""
    return now < until <= now + max(lease_ms, _LONGEST_MS)


def holds(tx: Transaction, duty: str, holder: str) -> bool:
    """Whether the lease is still this holder's; locks it until the transaction ends."""
    row = tx.locked(_LOOK, duty)
    return row is not None and row[0] == holder and row[1] > tx.now_ms()
