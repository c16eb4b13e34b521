"""Replies on their way from who serves to who asked (R38).

Replies to one requester that are ready at the same time go together, as a batch; each waits until it is
stored. Decides what becomes of a reply that nobody can get: a requester that is gone has no topic any more,
and its reply is dropped. Must never keep anything of a requester once its replies are stored: they come and
go.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...backoff import pause
from ...endpoint.endpoint import Endpoint
from ...errors import PartitionSealed, PostroomError, UnknownPartition, UnknownTopic, UsageError
from ...model.messages.batch import BatchBuilder
from ...model.messages.requests import FAILURE, REQUEST, Asked, Failure, ReplyTopic
from ..codec import Entry, pack
from ..message import Message, Received, Value
from ..owner_check import Guard

if TYPE_CHECKING:
    from ..consumer.settle import Settler

__all__ = ["Answers", "answer", "answers_of", "fail"]

log = logging.getLogger("postroom.requests")

_GIVE_UP_S = 10.0  # a store that is away is waited for no longer

_Waiting = tuple[Entry, "asyncio.Future[bool]"]


class Answers:
    """What one consumer replies."""

    def __init__(self, endpoint: Endpoint, guard: Guard) -> None:
        self._endpoint, self._guard = endpoint, guard
        self._lines: dict[ReplyTopic, list[_Waiting]] = {}
        self._pumps: set[asyncio.Task[None]] = set()
        self.expired = 0  # requests that were not handled: their deadline passed while they waited here

    def is_over(self, message: Received) -> bool:
        """Whether its requester waits no longer; then it is counted."""
        over = message.expires is not None and message.expires.timestamp() * 1000 <= self._endpoint.now_ms()
        self.expired += over
        return over

    def ms_left(self, message: Received) -> float:
        """Until its requester waits no longer."""
        if message.expires is None:
            return float("inf")
        return message.expires.timestamp() * 1000 - self._endpoint.now_ms()

    async def send(self, asked: Asked, message: Message, *, failed: bool = False) -> bool:
        """Wait until it is stored; False: the requester is gone."""
        self._guard.check()
        key, value, headers = pack(message, self._endpoint.now_ms()).entries[0]
        own = [(REQUEST, asked.id.encode()), *([(FAILURE, b"1")] if failed else [])]
        done: asyncio.Future[bool] = self._guard.loop.create_future()
        line = self._lines.get(asked.to)
        if line is None:
            line = self._lines[asked.to] = []
            pump = self._guard.loop.create_task(self._pump(asked.to, line))
            self._pumps.add(pump)
            pump.add_done_callback(self._pumps.discard)
        line.append(((key, value, [*headers, *own]), done))
        return await done

    async def _pump(self, to: ReplyTopic, line: list[_Waiting]) -> None:
        """Batch after batch until nothing waits."""
        while line:
            builder = BatchBuilder()
            taken = builder.extend(self._endpoint.now_ms(), [entry for entry, _ in line])
            waiting, line[:taken] = line[:taken], []
            try:
                stored: bool | Exception = await self._stored(to, builder.build())
            except Exception as error:
                stored = error
            for _, done in waiting:
                if done.done():
                    continue
                if isinstance(stored, Exception):
                    done.set_exception(stored)
                else:
                    done.set_result(stored)
        del self._lines[to]

    async def _stored(self, to: ReplyTopic, batch: bytes) -> bool:
        """Repeated until it is; who asked takes the first of two that are the same."""
        give_up_at, tries, place = self._guard.loop.time() + _GIVE_UP_S, 0, to.partition_id
        while True:
            try:
                await self._endpoint.append(to.name, place, batch)
                return True
            except (UnknownTopic, UnknownPartition):
                log.debug("nobody gets the replies to %s: the requester is gone", to.name)
                return False
            except PartitionSealed:  # moved to another shard
                place = await self._moved(to, place)
            except PostroomError as error:
                if not error.retriable or self._guard.loop.time() > give_up_at:
                    raise
            tries += 1
            await asyncio.sleep(pause(tries))

    async def _moved(self, to: ReplyTopic, place: int) -> int:
        try:
            return (await self._endpoint.route(to.name)).ranges[0].partition_id
        except UnknownTopic:
            return place  # the next try says so


# ---- what a message is answered with ----


def answers_of(message: Received) -> Answers:
    settler: Settler | None = getattr(message._delivery, "settler", None)
    if settler is None:
        raise UsageError("this message was read, not delivered: whoever consumes it replies")
    return settler.answers


async def answer(message: Received, value: Value, headers: Mapping[str, str | bytes] | None = None) -> bool:
    """Reply to a request; False: the requester is gone."""
    answers, asked = answers_of(message), message._asked
    if asked is None:
        raise UsageError("this message is no request, so nobody waits for a reply: send it with mq.request()")
    return await answers.send(asked, Message(value, headers=headers))


async def fail(message: Received, failure: Failure) -> bool:
    """Tell the requester that it failed."""
    answers, asked = answers_of(message), message._asked
    return asked is not None and await answers.send(asked, Message(failure.encode()), failed=True)
