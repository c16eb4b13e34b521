"""A producer whose messages land in a spool first (R31): the same calls, and receipts that say so.

Decides nothing about batches: those are made when messages are forwarded. A call waits for room and for the
commit that makes its messages durable, and never for the queue.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ...config import DEFAULTS, Limits
from ...endpoint.endpoint import Endpoint
from ...errors import InvalidSetting, PostroomError, SendTimeout, UnknownFate
from ...model.topology.names import check_topic
from ...model.topology.route import Route
from ...units import Duration, duration_ms, size_bytes
from ..codec import Packed, as_datetime
from ..message import Receipt
from ..owner_check import Guard
from ..producer.accumulator import Batching
from ..producer.parcel import Call, Parcel
from ..producer.producer import Producer, check_slot
from .forwarder import as_rows
from .spool_file import Spooled
from .spool_writer import SpoolWriter

if TYPE_CHECKING:
    from .spool_writer import SpoolWriter


__all__ = ["SpooledProducer", "Spools", "limit_of", "path_of"]


class SpooledProducer(Producer):
    """Made by `Connection.producer(…, spool=…)` and `Spool.producer`."""

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        topic: str,
        writer: SpoolWriter,
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
        self._writer = writer

    @property
    def spooled(self) -> Spooled:
        return self._writer.depth()

    async def forwarded(self, timeout: Duration | None = None) -> bool:
        self._check()
        limit_s = None if timeout is None else duration_ms(timeout, name="timeout") / 1000
        return await self._writer.forwarded(limit_s)

    async def _submit(
        self, packed: Packed, slot: int | None, timeout: Duration | None, *, single: bool
    ) -> Call:
        self._check()
        slot, deadline = check_slot(slot), self._deadline(timeout)
        rows = as_rows(self.topic, packed, slot, self._endpoint.now_ms())
        size = sum([row.size for row in rows])
        if not self._room.try_take(packed.size):
            await self._in_time(self._room.take(packed.size), deadline)
        if not self._writer.try_room(size):
            try:
                await self._writer.make_room(size, deadline)
            except BaseException:
                self._room.give_back(packed.size)
                raise
        count = len(packed.entries)
        self._unresolved += count
        call = Call(self._guard.loop.create_future(), count, deadline, self._resolved, single=single)
        parcel = Parcel(call, packed, range(count), slot)
        self._writer.add(rows, partial(self._spooled, parcel))
        return call

    def _spooled(self, parcel: Parcel, error: Exception | None) -> None:
        if error is None:
            parcel.call.stored(parcel, _receipts(self.topic, parcel))
        elif isinstance(error, PostroomError):
            parcel.call.failed(parcel, error)
        else:
            failure = UnknownFate(f"an unexpected error while messages were spooled: {error!r}")
            failure.__cause__ = error
            parcel.call.failed(parcel, failure)

    def _give_up(self, call: Call) -> None:
        """The writer has its rows: they may be in the file by now, or yet be."""
        if not call.future.done():
            call.future.set_exception(
                SendTimeout(
                    "the disk did not take the message within the time: it is not known whether it is in the "
                    "spool; look before sending it again, or let the handler drop an id it has seen"
                )
            )

    async def __aenter__(self) -> Self:
        self._check()
        await self._writer.open()
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


log = logging.getLogger("postroom.spool")


class Spools:
    """The spools of one connection: producers that name the same file share it.

    They are open until the connection is closed, so that what was spooled goes on leaving when its producer
    is done.
    """

    def __init__(self, endpoint: Endpoint, guard: Guard, client: str, limits: Limits) -> None:
        self._endpoint, self._guard, self._client, self._limits = endpoint, guard, client, limits
        self._writers: dict[Path, tuple[SpoolWriter, int]] = {}

    def producer(
        self,
        topic: str,
        spool: str | Path,
        spool_bytes: int | str,
        *,
        timeout: Duration,
        buffer_bytes: int | str,
        confirm: bool,
    ) -> SpooledProducer:
        if not confirm:
            raise InvalidSetting(
                "confirm=False is for messages that may be lost, a spool for those that may not"
            )

        return SpooledProducer(
            self._endpoint,
            self._guard,
            check_topic(topic),
            self._writer(path_of(spool), limit_of(spool_bytes)),
            timeout_ms=duration_ms(timeout, name="timeout"),
            buffer_bytes=size_bytes(buffer_bytes, name="buffer_bytes"),
        )

    def _writer(self, path: Path, limit: int) -> SpoolWriter:
        from .spool_writer import SpoolWriter

        found = self._writers.get(path)
        if found is None:
            writer = SpoolWriter(path, limit, self._limits)
            writer.forward(self._endpoint, self._client)
            found = self._writers[path] = writer, limit
        if found[1] != limit:
            raise InvalidSetting(
                f"spool_bytes={limit}: another producer of this connection has opened {path} with {found[1]}"
            )
        return found[0]

    async def close(self) -> None:
        closing = [writer.close() for writer, _ in self._writers.values()]
        for outcome in await asyncio.gather(*closing, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.error("while a spool was closed: %r", outcome)


def path_of(spool: object) -> Path:
    if not isinstance(spool, str | Path) or not str(spool):
        raise InvalidSetting(f"spool={spool!r}: the path of a file, such as 'orders.spool'")
    return Path(spool).absolute()


def limit_of(spool_bytes: int | str) -> int:
    limit = size_bytes(spool_bytes, name="spool_bytes")
    if limit < 1:
        raise InvalidSetting("spool_bytes=0: a spool has room for something, such as '100 MB'")
    return limit
