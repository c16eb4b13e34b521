"""Where the outbox is in the queue's own database: a row leaves it in the transaction that stores its
message.

Used by the relay of an embedded queue on one database, for partitions that are flushed. Their stamps need
not be durable: a row that is still there was not stored, and one that is gone was. They are kept in memory,
so that an append of unknown fate is repeated as it was. Must never be used unless the queue's own session
sees this relay's lease: that is how the two are known to be one database.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....broker.broker import Broker
from ....endpoint.asking import AskingEndpoint
from ....endpoint.endpoint import Endpoint
from ....endpoint.operations import Operation
from ....endpoint.values import Beat, Held
from ....model.delivery.delivery import Span
from ....model.messages.batch import read_header
from ....model.moves.forwarding import Batch, Stamp
from ....store import SqlStore
from ....store.contract import Appended
from ....store.contract.values import Drawn

__all__ = ["DrawingEndpoint"]


class DrawingEndpoint(AskingEndpoint):
    """The queue's own broker, for the forwarder, and what the source asks and tells. From any thread."""

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

    async def append(
        self,
        topic: str,
        partition_id: int,
        batch: bytes,
        *,
        due_at: int = 0,
        ids: bytes = b"",
        producer: str = "",
    ) -> Appended:
        return await self._broker.append(
            topic,
            partition_id,
            batch,
            due_at=due_at,
            ids=ids,
            producer=producer,
            drawn=self._drawn(partition_id, batch),
        )

    def _drawn(self, partition_id: int, batch: bytes) -> Drawn | None:
        """The rows that leave with this batch; None: it was stamped in the table."""
        header = read_header(batch)
        found = self.open.get(Stamp(header.producer_id, partition_id, header.base_sequence))
        if found is None:
            return None
        return Drawn(self._table, self._holder, tuple(row.id for row in found.rows))

    async def _ask(self, operation: Operation, arguments: dict[str, Any]) -> Any:
        return await getattr(self._broker, operation.name)(**arguments)

    def beat(self, beats: Sequence[Beat]) -> list[tuple[Held, tuple[Span, ...]]]:
        return self._broker.beat(beats)

    def now_ms(self) -> int:
        return self._broker.now_ms()

    async def close(self) -> None:
        """The broker lives on: it is the connection's."""
