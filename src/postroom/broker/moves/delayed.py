"""Delayed messages for whoever asks about them: a page of a topic's, and taking one back (R35).

Decides how much an answer has. The broker opens no batch for it: whoever asks has the right to consume the
topic, and opens them. Must never wait for the mover, nor for a shard that is away.
"""

from __future__ import annotations

from ...endpoint.values import DelayedBatch
from ...model.messages.ids import digest
from ...model.moves.schedule import DelayedPosition
from ...store.contract import Store, Topic
from ..workers import Workers

__all__ = ["DelayedVerbs"]

_PAGE = 1000  # messages in one answer, and
_PAGE_BYTES = 4 * 1024 * 1024  # so much of them; one batch always fits


class DelayedVerbs:
    """The part of a broker that is about messages that are not due yet."""

    store: Store
    _workers: Workers

    async def _topic(self, name: str) -> Topic:
        raise NotImplementedError  # the broker's

    async def delayed(
        self, topic: str, limit: int, since: DelayedPosition | None = None
    ) -> list[DelayedBatch]:
        topic_id = (await self._topic(topic)).id
        return await self._workers.run(self._page, topic_id, max(1, min(limit, _PAGE)), since)

    def _page(self, topic_id: int, limit: int, since: DelayedPosition | None) -> list[DelayedBatch]:
        rows = self.store.schedule.listed(topic_id, since=since, messages=limit, max_bytes=_PAGE_BYTES)
        return [DelayedBatch(row.id, row.partition_id, row.due_at, row.records, row.batch) for row in rows]

    async def cancel(self, topic: str, id: str) -> bool:
        topic_id = (await self._topic(topic)).id
        return await self._workers.run(self.store.schedule.cancel, topic_id, digest(id))
