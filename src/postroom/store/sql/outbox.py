"""Outboxes that are in the queue's own database: their rows leave in the append's own transaction (R30).

The tables belong to the caller (`client.outbox`); known here are their names and four columns. Whether an
outbox is in this database is told by its lease: the relay has just written a random name there, which nobody
finds in another database. That lease is locked and looked at in the transaction, after the partitions (I1);
without it nothing is stored and nothing deleted (I12).

Without it the rows are stamped, stored and deleted in three transactions, as for any other queue. One in
their stead sends 1.25 times as many messages a second on SQLite, 1.13 on PostgreSQL (`bench.mechanisms`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import LeaseLost
from ..contract.values import Append, Drawn
from .lists import blanks, parts
from .session import Area, Session, Transaction, verbs

__all__ = ["OUTBOX", "Drawing", "OutboxLook", "SqlOutboxes"]

OUTBOX = "postroom_outbox"
"""The name of an outbox that was given no other."""

_HOLDER = "SELECT holder FROM {table}_relay WHERE id = 1"
_LOOK = "SELECT stuck FROM {table}_relay WHERE id = 1"


@dataclass(frozen=True, slots=True)
class OutboxLook:
    messages: int
    age_ms: int  # of the one that waits for longest
    stuck: tuple[str, ...]  # topics that can take none of their messages


@verbs
class SqlOutboxes:
    def __init__(self, session: Session) -> None:
        self._session = session

    def leads(self, table: str, holder: str) -> bool:
        """Return whether the outbox is in this database, and that relay leads it."""
        with self._session.read(Area.LOG) as tx:
            if not tx.dialect.has_table(tx, f"{table}_relay"):
                return False
            row = tx.one(_HOLDER.format(table=table))
        return row is not None and row[0] == holder

    def look(self, table: str) -> OutboxLook | None:
        """Return what waits in an outbox; None if there is no such outbox in this database."""
        with self._session.read(Area.LOG) as tx:
            if not tx.dialect.has_table(tx, f"{table}_relay"):
                return None
            row = tx.one(_LOOK.format(table=table))
            count = tx.one(f"SELECT COUNT(*) FROM {table}")
            oldest = tx.one(f"SELECT sent_at FROM {table} ORDER BY id LIMIT 1")
        if row is None or count is None:
            return None
        known = {} if row[0] is None else json.loads(bytes(row[0]))
        stuck = tuple(sorted(topic for topic, one in known.items() if one["stuck"]))
        age = 0 if oldest is None else max(0, self._session.now_ms() - int(oldest[0]))
        return OutboxLook(int(count[0]), age, stuck)


class Drawing:
    """The rows that leave outboxes with the batches of one append transaction."""

    def __init__(self, tx: Transaction, appends: Sequence[Append]) -> None:
        """Locks the leases that are needed; the partitions are locked already."""
        self._tx = tx
        self._leads: dict[tuple[str, str], bool] = {}
        self._gone: dict[str, list[int]] = {}
        for table in sorted({one.drawn.table for one in appends if one.drawn is not None}):
            row = tx.locked(_HOLDER.format(table=table))
            for one in appends:
                if one.drawn is not None and one.drawn.table == table:
                    self._leads[table, one.drawn.holder] = row is not None and row[0] == one.drawn.holder

    def check(self, drawn: Drawn) -> None:
        if not self._leads[drawn.table, drawn.holder]:
            raise LeaseLost("another relay leads this outbox now: nothing was stored")

    def stored(self, drawn: Drawn) -> None:
        self._gone.setdefault(drawn.table, []).extend(drawn.ids)

    def write(self) -> None:
        for table, ids in self._gone.items():
            for some in parts(ids):
                self._tx.do(f"DELETE FROM {table} WHERE id IN ({blanks(len(some))})", *some)
