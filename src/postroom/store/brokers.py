"""Brokers that are served now: each enters itself and says from time to time that it lives (R2)."""

from __future__ import annotations

from .session import Lane, Session, verbs
from .values import ServedBroker

__all__ = ["SqlBrokers"]

_FORGET_MS = 60_000  # one that was silent for so long is removed by the next that says it lives


@verbs
class SqlBrokers:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._enter = session.dialect.upsert(
            "postroom_brokers", ("id",), ("address", "zone", "started_at", "until_ms")
        )

    def enter(self, id: str, address: str, zone: str, started_at: int, ttl_ms: int) -> None:
        with self._session.write(Lane.PROGRESS, flush=False) as tx:
            now = tx.now_ms()
            tx.do(self._enter, id, address, zone, started_at, now + ttl_ms)
            tx.do("DELETE FROM postroom_brokers WHERE until_ms < ?", now - _FORGET_MS)

    def leave(self, id: str) -> None:
        with self._session.write(Lane.PROGRESS, flush=False) as tx:
            tx.do("DELETE FROM postroom_brokers WHERE id = ?", id)

    def live(self) -> list[ServedBroker]:
        with self._session.read(Lane.PROGRESS) as tx:
            rows = tx.all(
                "SELECT id, address, zone, started_at FROM postroom_brokers WHERE until_ms > ? "
                "ORDER BY started_at, id",
                tx.now_ms(),
            )
        return [ServedBroker(*row) for row in rows]

    def queue(self) -> str:
        with self._session.read(Lane.PROGRESS) as tx:
            row = tx.one("SELECT uuid FROM postroom_owner")
        assert row is not None, "it was written down when the store was opened"
        return str(row[0])
