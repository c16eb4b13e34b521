"""A producer whose messages land in a spool first (R31): the same calls, and receipts that say so.

Decides nothing about batches: those are made when messages are forwarded. A call waits for room and for the
commit that makes its messages durable, and never for the queue.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Self

from ...broker.endpoint import Endpoint
from ...config import DEFAULTS
from ...errors import PostroomError, SendTimeout, UnknownFate
from ...model.route import Route
from ...units import Duration, duration_ms
from ..codec import Packed
from ..delay import as_datetime
from ..forwarding import as_rows
from ..guard import Guard
from ..message import Receipt
from ..producing.accumulator import Batching
from ..producing.parcel import Call, Parcel
from ..producing.producer import Producer, check_slot
from .file import Spooled
from .landing import Landing

__all__ = ["SpooledProducer"]


class SpooledProducer(Producer):
    """Made by `Connection.producer(…, spool=…)` and `Spool.producer`."""

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        topic: str,
        landing: Landing,
        *,
        timeout_ms: int = DEFAULTS.send_timeout_ms,
        buffer_bytes: int = DEFAULTS.buffer_bytes,
    ) -> None:
        super().__init__(
            endpoint,
            guard,
            topic,
            _no_route,
            Batching(),
            timeout_ms=timeout_ms,
            buffer_bytes=buffer_bytes,
        )
        self._landing = landing

    @property
    def spooled(self) -> Spooled:
        return self._landing.depth()

    async def forwarded(self, timeout: Duration | None = None) -> bool:
        self._check()
        limit_s = None if timeout is None else duration_ms(timeout, name="timeout") / 1000
        return await self._landing.forwarded(limit_s)

    async def _submit(
        self, packed: Packed, slot: int | None, timeout: Duration | None, *, single: bool
    ) -> Call:
        self._check()
        slot, deadline = check_slot(slot), self._deadline(timeout)
        rows = as_rows(self.topic, packed, slot, self._endpoint.now_ms())
        size = sum([row.size for row in rows])
        if not self._room.try_take(packed.size):
            await self._in_time(self._room.take(packed.size), deadline)
        if not self._landing.try_room(size):
            try:
                await self._landing.make_room(size, deadline)
            except BaseException:
                self._room.give_back(packed.size)
                raise
        count = len(packed.entries)
        self._unresolved += count
        call = Call(self._guard.loop.create_future(), count, deadline, self._resolved, single=single)
        parcel = Parcel(call, packed, range(count), slot)
        self._landing.add(rows, partial(self._landed, parcel))
        return call

    def _landed(self, parcel: Parcel, error: Exception | None) -> None:
        if error is None:
            parcel.call.stored(parcel, _receipts(self.topic, parcel))
        elif isinstance(error, PostroomError):
            parcel.call.failed(parcel, error)
        else:
            failure = UnknownFate(f"an unexpected error while messages were spooled: {error!r}")
            failure.__cause__ = error
            parcel.call.failed(parcel, failure)

    async def _result(self, call: Call) -> Any:
        try:
            async with asyncio.timeout_at(call.deadline):
                return await call.future
        except TimeoutError:
            raise SendTimeout(
                "the disk did not take the message within the time: it is not known whether it is in the "
                "spool; look before sending it again, or let the handler drop an id it has seen"
            ) from None

    async def __aenter__(self) -> Self:
        self._check()
        await self._landing.open()
        return self


def _receipts(topic: str, parcel: Parcel) -> list[Receipt]:
    if parcel.ids is None:
        return [Receipt(topic, -1, -1, spooled=True)] * len(parcel.entries)
    none: list[None] = [None] * len(parcel.entries)
    return [
        Receipt(topic, -1, -1, due=as_datetime(due or 0), _id=id, spooled=True)
        for id, due in zip(parcel.ids or none, parcel.dues or none, strict=True)
    ]


async def _no_route(topic: str) -> Route:
    raise AssertionError("where a spooled message goes is decided when it is forwarded")
