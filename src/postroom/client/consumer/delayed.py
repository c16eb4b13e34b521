"""What a connection can do about messages that are not due yet: list them, take one back (R35).

Opens the batches of a page and says where the next page begins: a moment, a row and a message in it. Must
never hold more than a page: there may be millions.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from ...endpoint.endpoint import Endpoint
from ...endpoint.values import DelayedBatch
from ...errors import CorruptBatch, InvalidSetting
from ...model.messages.batch import records
from ...model.policy.bounds import MOST_MOMENTS_MS
from ..codec import unpack
from ..message import Delayed
from ..owner_check import Guard
from .opened import Browsed

__all__ = ["DelayedMessages", "page"]

_log = logging.getLogger("postroom.client")

_Cursor = tuple[int, int, int, int]  # a moment, a partition id, a row, and a message in it
_BOUNDS = (MOST_MOMENTS_MS, 2**63 - 1, 2**63 - 2, 2**31 - 1)


class DelayedMessages:
    """The part of a connection that is about delayed messages."""

    _endpoint: Endpoint
    _guard: Guard

    if TYPE_CHECKING:

        async def _explained(self, topic: str, call: Awaitable[Any]) -> Any: ...

    async def delayed(
        self, topic: str, *, limit: int = 1000, after: Delayed | str | None = None
    ) -> list[Delayed]:
        """Messages of the topic that are not due yet, the soonest first.

        `after`: the last one of the page before, or its `cursor`. Retries that wait in their group are not
        among them; those further away than 15 minutes are in the group's own topic, such as
        "orders.billing.retry".
        """
        if type(limit) is not int or limit < 1:
            raise InvalidSetting(f"limit={limit!r}: a whole number from 1 up")
        found: list[Delayed] = []
        async with aclosing(self._delayed(topic, limit, after)) as messages:
            async for message in messages:
                found.append(message)
                if len(found) == limit:
                    break
        return found

    async def _delayed(
        self, topic: str, limit: int, after: Delayed | str | None = None
    ) -> AsyncGenerator[Delayed, None]:
        """All of them, page by page; one batch is open at a time. `limit`: how many are wanted, about."""
        due_at, partition_id, row, number = _position(after)
        since = None if after is None else (due_at, partition_id, row)
        while True:
            self._guard.check()
            page = await self._explained(topic, self._endpoint.delayed(topic, limit, since))
            for batch in page:
                same = (batch.partition_id, batch.row) == (partition_id, row)
                behind = number + 1 if same else 0
                for message in _messages(topic, batch, behind):
                    yield message
            if not page:
                return
            last = page[-1]
            since, number = (last.due_at, last.partition_id, last.row + 1), -1

    async def cancel(self, topic: str, id: str) -> bool:
        """Take back a delayed message; True if it was still waiting.

        False: it was delivered or is about to be, was cancelled before, or never was there. If several wait
        under that id, all are taken back.
        """
        self._guard.check()
        if not isinstance(id, str) or not id:
            raise InvalidSetting(f"id={id!r}: the id of the message, such as receipt.id")
        found: bool = await self._explained(topic, self._endpoint.cancel(topic, id))
        return found


async def page(
    mq: DelayedMessages, topic: str, limit: int, after: str | None, fits: Callable[[Delayed], bool] = bool
) -> tuple[list[Delayed], str | None]:
    """Return the next of them as far as they fit, one at least, and where to go on; None: that was all."""
    found: list[Delayed] = []
    async with aclosing(mq._delayed(topic, limit, after)) as messages:
        async for message in messages:
            is_small = fits(message)  # asked of each: it counts
            if found and (len(found) == limit or not is_small):
                return found, found[-1].cursor
            found.append(message)
    return found, None


def _messages(topic: str, batch: DelayedBatch, behind: int) -> Iterator[Delayed]:
    """Yield the messages of a batch from that one on; one that cannot be read has none."""
    try:
        opened = list(records(batch.data))
    except CorruptBatch as error:
        _log.warning("delayed messages of topic %r in row %d cannot be read: %s", topic, batch.row, error)
        return
    browsed = Browsed(topic, -1, batch.partition_id)
    for number, message in enumerate(unpack(opened, browsed)):
        if number >= behind:
            yield Delayed(
                topic=topic,
                id=message.id,
                key=message.key,
                value=message.value,
                headers=message.headers,
                timestamp=message.timestamp,
                due_ms=batch.due_at,
                cursor=f"{batch.due_at}-{batch.partition_id}-{batch.row}-{number}",
            )


def _position(after: Delayed | str | None) -> _Cursor:
    """Return the position that a cursor names; the first there can be if it is None."""
    if after is None:
        return 0, 0, 0, -1
    text = after.cursor if isinstance(after, Delayed) else after
    parts = text.split("-") if isinstance(text, str) and len(text) < 100 else []
    if len(parts) == len(_BOUNDS) and all(part.isascii() and part.isdigit() for part in parts):
        due_at, partition_id, row, number = map(int, parts)
        if all(
            found <= most for found, most in zip((due_at, partition_id, row, number), _BOUNDS, strict=True)
        ):
            return due_at, partition_id, row, number
    raise InvalidSetting(
        "after= is the last message of the page before, or its cursor: begin again without it", name="after"
    )
