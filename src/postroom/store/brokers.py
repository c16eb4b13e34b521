"""Who uses the queue now: each enters itself and says from time to time that it lives (R2, R6).

Brokers that are served, for clients that look for them; and all processes, with the shards that each of them
can reach.
"""

from __future__ import annotations

import json

from .session import Lane, Session, verbs
from .values import Process, ServedBroker

__all__ = ["SqlBrokers"]

_FORGET_MS = 60_000  # one that was silent for so long is removed by the next that says it lives


@verbs
class SqlBrokers:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._enter = session.dialect.upsert(
            "postroom_brokers", ("id",), ("address", "zone", "started_at", "until_ms")
        )
        self._announce = session.dialect.upsert("postroom_processes", ("id",), ("name", "shards", "until_ms"))

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

    # ---- processes ----

    def announce(self, process: Process, ttl_ms: int) -> None:
        with self._session.write(Lane.PROGRESS, flush=False) as tx:
            now = tx.now_ms()
            shards = json.dumps(sorted(process.shards))
            tx.do(self._announce, process.id, process.name, shards, now + ttl_ms)
            tx.do("DELETE FROM postroom_processes WHERE until_ms < ?", now - _FORGET_MS)

    def withdraw(self, id: str) -> None:
        with self._session.write(Lane.PROGRESS, flush=False) as tx:
            tx.do("DELETE FROM postroom_processes WHERE id = ?", id)

    def announced(self) -> list[Process]:
        with self._session.read(Lane.PROGRESS) as tx:
            rows = tx.all(
                "SELECT id, name, shards FROM postroom_processes WHERE until_ms > ? ORDER BY name, id",
                tx.now_ms(),
            )
        return [Process(id, name, frozenset(json.loads(shards))) for id, name, shards in rows]
