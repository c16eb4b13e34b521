"""Where the outbox is in the queue's own database: a row leaves it in the transaction that stores its
message.

Used by the relay of an embedded queue on one database, for partitions that are flushed. Their stamps need
not be durable: a row that is still there was not stored, and one that is gone was. They are kept in memory,
so that an append of unknown fate is repeated as it was. Must never be used unless the queue's own session
sees this relay's lease: that is how the two are known to be one database.
"""

from __future__ import annotations

from typing import Any

from ....broker.broker import Broker
from ....endpoint.endpoint import Endpoint
from ....model.messages.batch import read_header
from ....model.moves.forwarding import Batch, Stamp
from ....model.topology.route import Route
from ....store import SqlStore
from ....store.contract import Appended
from ....store.contract.values import Drawn

__all__ = ["DrawingEndpoint"]


class DrawingEndpoint:
    """The two calls that the forwarder makes, and what the source asks and tells. From any thread."""

    def __init__(self, broker: Broker, store: SqlStore, table: str, holder: str) -> None:
        self._broker, self._store = broker, store
        self._table, self._holder = table, holder
        self._same: bool | None = None  # database; None: not looked at yet
        self._volatile: dict[int, bool] = {}
        self.open: dict[Stamp, Batch] = {}  # sent by this way, and not confirmed yet

    @staticmethod
    def over(endpoint: Endpoint, table: str, holder: str) -> DrawingEndpoint | None:
        """None: the queue is served, has several shards, or is of a kind of its own."""
        if not isinstance(endpoint, Broker) or not isinstance(endpoint.store, SqlStore):
            return None
        return DrawingEndpoint(endpoint, endpoint.store, table, holder)

    # ---- for the source; blocking ----

    def leads(self) -> None:
        """This relay has the lease now: look whether the queue sees it."""
        if self._same is None:
            self._same = self._store.outboxes.leads(self._table, self._holder)

    def draws(self, partition_id: int) -> bool:
        """Whether rows for this partition leave by this way."""
        if not self._same:
            return False
        if partition_id not in self._volatile:
            self._volatile[partition_id] = self._store.log.is_volatile(partition_id)
        return not self._volatile[partition_id]

    # ---- for the forwarder ----

    async def route(self, topic: str) -> Route:
        return await self._broker.route(topic)

    async def append(self, topic: str, partition_id: int, batch: bytes, **options: Any) -> Appended:
        header = read_header(batch)
        found = self.open.get(Stamp(header.producer_id, partition_id, header.base_sequence))
        if found is None:  # it was stamped in the table
            return await self._broker.append(topic, partition_id, batch, **options)
        drawn = Drawn(self._table, self._holder, tuple(row.id for row in found.rows))
        return await self._broker.append(topic, partition_id, batch, drawn=drawn, **options)
