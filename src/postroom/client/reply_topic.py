"""The requester's side of its reply topic: made when it is first needed, kept, read, and deleted (R38).

Replies are read as they come, without a group. Decides when replies are lost: when the topic is gone, or
cannot be read at all; not when a broker or the database is away for a while, nor when the topic was moved to
another shard. Must never skip a reply that can still be read.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable

from ..broker.endpoint import Endpoint, Fetched
from ..errors import ClosedError, NoReply, PostroomError, UnknownPartition, UnknownTopic
from ..model.requests import ReplyTopic, request_of
from .codec import unpack
from .consuming.reading import Browsed
from .consuming.unreadable import readable
from .ending import end
from .guard import Guard
from .message import Received
from .producing.appending import pause

__all__ = ["OwnReplyTopic", "closed_meanwhile"]

log = logging.getLogger("postroom.requests")

_CHUNK_MESSAGES = 1000
_CHUNK_BYTES = 4 * 1024 * 1024
_KEEP_S = 15.0  # how often the broker is told that the requester lives
_CLOSE_S = 5.0  # for deleting the topic; else a broker does it by and by


class OwnReplyTopic:
    """`take` is given each reply, with the id of its request and whether it tells of a failure.

    `lost` is told when replies to what was asked so far will not come, with what to say about it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        client_id: str,
        *,
        take: Callable[[str, Received, bool], None],
        lost: Callable[[Callable[[], PostroomError]], None],
    ) -> None:
        self._endpoint, self._guard, self._take, self._lost = endpoint, guard, take, lost
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", client_id)[:60]
        self._name = f"{readable}-{secrets.token_hex(8)}"
        self._at: ReplyTopic | None = None
        self._offset = 0
        self._kept_at = 0.0  # when the broker was last told
        self._opening: asyncio.Task[ReplyTopic] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    # ---- life ----

    async def opened(self) -> ReplyTopic:
        """Where replies go now."""
        if self._at is not None:
            return self._at
        if self._opening is None or self._opening.done():
            self._opening = self._guard.loop.create_task(self._open())
            self._opening.add_done_callback(_retrieved)
        try:
            return await asyncio.shield(self._opening)
        except asyncio.CancelledError:
            if self._closed:
                raise closed_meanwhile() from None
            raise

    async def _open(self) -> ReplyTopic:
        found = await self._kept()
        self._at, self._offset = found, 0
        if self._reading is None or self._reading.done():
            self._reading = self._guard.loop.create_task(self._read())
        return found

    async def _kept(self) -> ReplyTopic:
        """Say that the requester lives; where its topic is."""
        found = await self._endpoint.open_replies(self._name)
        self._kept_at = self._guard.loop.time()
        return found

    async def close(self) -> None:
        opened, self._closed = self._opening is not None, True
        await end([task for task in (self._opening, self._reading) if task is not None])
        if not opened:
            return
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._endpoint.close_replies(self._name)
        except (PostroomError, TimeoutError) as error:
            log.warning("the reply topic is left for a broker to delete: %r", error)

    # ---- reading ----

    async def _read(self) -> None:
        try:
            await self._keep_reading()
        except Exception as error:
            log.error("replies cannot be read any more; the next request begins anew: %r", error)
            self._at, said = None, f"replies cannot be read: {error}"
            self._lost(lambda: NoReply(said, served=None))

    async def _keep_reading(self) -> None:
        tries, gone = 0, False
        while self._at is not None:
            try:
                if gone:
                    await self._begin_anew(self._at)
                gone = False
                await self._step(self._at, wait=not tries)
                tries = 0
                continue
            except (UnknownTopic, UnknownPartition):
                gone = True
            except PostroomError as error:
                if not error.retriable:
                    raise
            tries += 1
            await asyncio.sleep(pause(tries))

    async def _step(self, at: ReplyTopic, *, wait: bool) -> None:
        """`wait` not: after a fault, first of all how far the topic is."""
        if self._guard.loop.time() - self._kept_at >= _KEEP_S:
            await self._kept()
        fetched = await self._endpoint.fetch(
            at.name, at.partition_id, self._offset, max_messages=_CHUNK_MESSAGES, max_bytes=_CHUNK_BYTES,
            wait_ms=int(_KEEP_S * 1000) if wait else 0,
        )  # fmt: skip
        if fetched.batches:
            self._given(fetched, at)
        elif fetched.end < self._offset:  # a crash of the database set a volatile topic back
            self._offset = fetched.start
        elif fetched.sealed:  # moved to another shard, and read to its end
            found = await self._kept()
            if found == at:  # its successor is a moment away
                await asyncio.sleep(pause(1))
            else:
                self._at, self._offset = found, 0

    async def _begin_anew(self, at: ReplyTopic) -> None:
        found = await self._kept()
        if found == at:
            return
        self._at, self._offset = found, 0
        self._lost(_gone)

    def _given(self, fetched: Fetched, at: ReplyTopic) -> None:
        browsed = Browsed(at.name, 0, at.partition_id)
        for batch in fetched.batches:
            for record in readable(batch, at.name, 0):
                found = request_of(record.headers) if record.offset >= self._offset else None
                if found is not None:
                    self._take(found[0], unpack([record], browsed)[0], found[1])
            self._offset = max(self._offset, batch.last_offset + 1)


def _gone() -> NoReply:
    return NoReply(
        "the topic that the reply was to come through is gone: it is not known whether the request was "
        "handled; look before you ask again",
        served=None,
    )


def closed_meanwhile() -> ClosedError:
    return ClosedError("the connection was closed while the request waited")


def _retrieved(opening: asyncio.Task[ReplyTopic]) -> None:
    if not opening.cancelled():
        opening.exception()  # whoever waited for it may be gone
