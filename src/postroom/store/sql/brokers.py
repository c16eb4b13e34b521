"""Who uses the queue now: each enters itself and says from time to time that it lives (R2, R6).

Brokers that are served, for clients that look for them; and all processes, with the shards that each of them
can reach.
"""

from __future__ import annotations

import json

from ..contract.values import KafkaNode, Process, ServedBroker
from .session import Area, Session, Transaction, verbs

__all__ = ["SqlBrokers", "SqlDuties", "holds"]


_NEW_NODE = "INSERT INTO postroom_kafka_nodes (node_id, broker_id, address, until_ms) VALUES (?, ?, ?, ?)"
_NODE_LIVES = "UPDATE postroom_kafka_nodes SET address = ?, until_ms = ? WHERE node_id = ?"
_NODES = """SELECT node_id, broker_id, address FROM postroom_kafka_nodes WHERE until_ms > ?
            ORDER BY node_id"""


@verbs
class SqlBrokers:
    def __init__(self, session: Session) -> None:
        self._session = session
        self._enter = session.dialect.upsert(
            "postroom_brokers", ("id",), ("address", "zone", "started_at", "until_ms")
        )
        self._announce = session.dialect.upsert("postroom_processes", ("id",), ("name", "shards", "until_ms"))

    def enter(self, id: str, address: str, zone: str, started_at: int, ttl_ms: int) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            now = tx.now_ms()
            tx.do(self._enter, id, address, zone, started_at, now + ttl_ms)
            tx.do(
                "DELETE FROM postroom_brokers WHERE until_ms < ?", now - self._session.tuning.silent_broker_ms
            )

    def leave(self, id: str) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            tx.do("DELETE FROM postroom_brokers WHERE id = ?", id)

    def live(self) -> list[ServedBroker]:
        with self._session.read(Area.PROGRESS) as tx:
            rows = tx.all(
                "SELECT id, address, zone, started_at FROM postroom_brokers WHERE until_ms > ? "
                "ORDER BY started_at, id",
                tx.now_ms(),
            )
        return [ServedBroker(*row) for row in rows]

    def queue(self) -> str:
        with self._session.read(Area.PROGRESS) as tx:
            row = tx.one("SELECT uuid FROM postroom_owner")
        assert row is not None, "it was written down when the store was opened"
        return str(row[0])

    # ---- those that listen for Kafka clients ----

    def enter_node(self, id: str, address: str, ttl_ms: int) -> int:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            now = tx.now_ms()
            tx.do(
                "DELETE FROM postroom_kafka_nodes WHERE until_ms < ?",
                now - self._session.tuning.silent_broker_ms,
            )
            taken: dict[int, str] = dict(tx.all("SELECT node_id, broker_id FROM postroom_kafka_nodes"))
            mine = next((number for number, broker in taken.items() if broker == id), None)
            if mine is not None:
                tx.do(_NODE_LIVES, address, now + ttl_ms, mine)
                return mine
            free = next(number for number in range(1, len(taken) + 2) if number not in taken)
            tx.do(_NEW_NODE, free, id, address, now + ttl_ms)  # two at once: as with duties
            return free

    def leave_node(self, id: str) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            tx.do("DELETE FROM postroom_kafka_nodes WHERE broker_id = ?", id)

    def nodes(self) -> list[KafkaNode]:
        with self._session.read(Area.PROGRESS) as tx:
            return [KafkaNode(*row) for row in tx.all(_NODES, tx.now_ms())]

    # ---- processes ----

    def announce(self, process: Process, ttl_ms: int) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            now = tx.now_ms()
            shards = json.dumps(sorted(process.shards))
            tx.do(self._announce, process.id, process.name, shards, now + ttl_ms)
            tx.do(
                "DELETE FROM postroom_processes WHERE until_ms < ?",
                now - self._session.tuning.silent_broker_ms,
            )

    def withdraw(self, id: str) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            tx.do("DELETE FROM postroom_processes WHERE id = ?", id)

    def announced(self) -> list[Process]:
        with self._session.read(Area.PROGRESS) as tx:
            rows = tx.all(
                "SELECT id, name, shards FROM postroom_processes WHERE until_ms > ? ORDER BY name, id",
                tx.now_ms(),
            )
        return [Process(id, name, frozenset(json.loads(shards))) for id, name, shards in rows]


_LOOK = "SELECT holder, until_ms FROM postroom_duties WHERE name = ?"


@verbs
class SqlDuties:
    """Leases for background work: at most one holder per duty, on the shard the duty works on (I12)."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def acquire(self, duty: str, holder: str, lease_ms: int) -> bool:
        """Take or renew the lease. A look without a lock first: most who ask are refused."""
        with self._session.read(Area.LOG) as tx:
            row = tx.one(_LOOK, duty)
            if row is not None and row[0] != holder and self._is_held(row[1], tx.now_ms(), lease_ms):
                return False
        with self._session.write(Area.LOG) as tx:
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
            if row[0] != holder and self._is_held(row[1], tx.now_ms(), lease_ms):
                return False
            tx.do("UPDATE postroom_duties SET holder = ?, until_ms = ? WHERE name = ?", holder, until, duty)
            return True

    def release(self, duty: str, holder: str) -> None:
        with self._session.write(Area.LOG) as tx:
            tx.do("DELETE FROM postroom_duties WHERE name = ? AND holder = ?", duty, holder)

    def _is_held(self, until: int, now: int, lease_ms: int) -> bool:
        """One that ends later than any that is given now is of a clock that was set back (I26)."""
        return now < until <= now + max(lease_ms, self._session.tuning.longest_duty_ms)


def holds(tx: Transaction, duty: str, holder: str) -> bool:
    """Return whether the lease is still this holder's; it is locked until the transaction ends."""
    row = tx.locked(_LOOK, duty)
    return row is not None and row[0] == holder and row[1] > tx.now_ms()
