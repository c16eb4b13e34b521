"""Requests and replies: sent as messages, and answered through a topic of the requester's own (R38).

The reply topic is volatile, made when something is first asked, shared by all requests of the connection,
and deleted when it closes. Replies are matched by the request's id; those that nobody waits for any more are
dropped and counted. Decides when a request ends: with its reply, its handler's failure, the failure to send
it, or its deadline. Must never send a request again by itself (it may have been handled), and never leave
one waiting for a reply that cannot come.

On the side that serves (R38), replies to one requester that are ready at the same time go together, in a
batch; each waits until it is stored. A requester that is gone has no topic any more, and its reply is
dropped. Must never keep anything of a requester once its replies are stored: they come and go.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from ..backoff import pause
from ..config import DEFAULTS, ClientTuning, Limits
from ..endpoint.endpoint import Endpoint
from ..endpoint.values import Fetched, GroupInfo
from ..errors import (
    ClosedError,
    InvalidSetting,
    NoReply,
    PartitionSealed,
    PostroomError,
    RequestFailed,
    SendTimeout,
    UnknownPartition,
    UnknownTopic,
    UsageError,
)
from ..model.messages.batch import BatchBuilder
from ..model.messages.requests import FAILURE, REPLY_TO, REQUEST, Asked, Failure, ReplyTopic, request_of
from ..tasks import SharedTask, end
from ..units import Duration, duration_ms
from .codec import Entry, Packed, pack, unpack
from .consumer.opened import Browsed, readable
from .message import Message, Received, Value
from .owner_check import Guard
from .producer.producer import Producer
from .tracing import posting

if TYPE_CHECKING:
    from .consumer.settle import Settler


__all__ = [
    "Answers",
    "OwnReplyTopic",
    "Requesting",
    "Requests",
    "answer",
    "answers_of",
    "closed_meanwhile",
    "fail",
]


log = logging.getLogger("postroom.requests")

_CHUNK_MESSAGES = 1000
_CHUNK_BYTES = 4 * 1024 * 1024
_CLOSED = "the connection was closed while the request waited"


class OwnReplyTopic:
    """The requester's side of its reply topic: made when it is first needed, kept, read, and deleted (R38).

    Replies are read as they come, without a group. Decides when replies are lost: when the topic is gone, or
    cannot be read at all; not when a broker or the database is away for a while, nor when the topic was moved
    to another shard. Must never skip a reply that can still be read.

    `take` is given each reply, with the id of its request and whether it tells of a failure. `lost`
    is told when replies to what was asked so far will not come, with what to say about it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        guard: Guard,
        client_id: str,
        *,
        take: Callable[[str, Received, bool], None],
        lost: Callable[[Callable[[], PostroomError]], None],
        tuning: ClientTuning = DEFAULTS.tuning.client,
    ) -> None:
        self._tuning = tuning
        self._endpoint, self._guard, self._take, self._lost = endpoint, guard, take, lost
        readable = re.sub(r"[^A-Za-z0-9_-]+", "-", client_id)[:60]
        self._name = f"{readable}-{secrets.token_hex(8)}"
        self._at: ReplyTopic | None = None
        self._offset = 0
        self._kept_at = 0.0  # when the broker was last told
        self._opening = SharedTask(self._open, _CLOSED)
        self._asked_for = False  # a broker may have made it
        self._reading: asyncio.Task[None] | None = None

    # ---- life ----

    async def opened(self) -> ReplyTopic:
        """Where replies go now."""
        if self._at is not None:
            return self._at
        return await self._opening.result()

    async def _open(self) -> ReplyTopic:
        self._asked_for = True
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
        await self._opening.end()
        if self._reading is not None:
            await end((self._reading,))
        if not self._asked_for:
            return
        try:
            async with asyncio.timeout(self._tuning.reply_close_s):
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
        if self._guard.loop.time() - self._kept_at >= self._tuning.keep_s:
            await self._kept()
        fetched = await self._endpoint.fetch(
            at.name, at.partition_id, self._offset, max_messages=_CHUNK_MESSAGES, max_bytes=_CHUNK_BYTES,
            wait_ms=int(self._tuning.keep_s * 1000) if wait else 0,
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
            for record in readable(batch, browsed, self._offset):
                found = request_of(record.headers)
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
    return ClosedError(_CLOSED)


_Answer = tuple[Received, bool]  # and whether it tells of a failure


class Requesting:
    """The part of a connection that asks."""

    client_id: str
    _endpoint: Endpoint
    _guard: Guard
    _limits: Limits
    _requests: Requests | None = None

    def _sender(self, topic: str) -> Producer:
        raise NotImplementedError

    async def request(
        self,
        topic: str,
        value: Value,
        *,
        timeout: Duration = DEFAULTS.send_timeout_ms / 1000,
        key: str | bytes | None = None,
        headers: Mapping[str, str | bytes] | None = None,
        source: str | None = None,
    ) -> Received:
        """Send a message and wait for the reply of whoever serves the topic: its value and headers.

        The deadline travels along: nobody begins to handle a request whose requester waits no longer. NoReply
        after `timeout`; RequestFailed if the handler failed. Neither means that nothing was done.
        """
        self._guard.check()
        timeout_ms = duration_ms(timeout, name="timeout")
        if not timeout_ms:
            raise InvalidSetting("timeout=0 leaves no time for a reply: give some, such as timeout=2")
        if self._requests is None:
            self._requests = Requests(self._endpoint, self._guard, self.client_id, self._limits.tuning.client)
        message = Message(value, key, headers, source=source, expires=timeout_ms / 1000)
        return await self._requests.ask(self._sender(topic), message, timeout_ms)

    @property
    def late_replies(self) -> int:
        """Replies that came when nobody waited for them any more. They were dropped."""
        return self._requests.late if self._requests is not None else 0

    async def _close_requests(self) -> None:
        if self._requests is not None:
            await self._requests.close()


class Requests:
    """What one connection asks, and the replies it waits for."""

    def __init__(self, endpoint: Endpoint, guard: Guard, client_id: str, tuning: ClientTuning) -> None:
        self._endpoint, self._guard, self._tuning = endpoint, guard, tuning
        self._topic = OwnReplyTopic(
            endpoint, guard, client_id, take=self._take, lost=self._give_up, tuning=tuning
        )
        self._waiting: dict[str, asyncio.Future[_Answer]] = {}
        self._looks: dict[str, asyncio.Task[list[GroupInfo]]] = {}
        self._closed = False
        self.late = 0

    # ---- asking ----

    async def ask(self, producer: Producer, message: Message, timeout_ms: int) -> Received:
        deadline = self._guard.loop.time() + timeout_ms / 1000
        packed = pack(message, self._endpoint.now_ms())
        sent: list[asyncio.Future[Any]] = []
        id = secrets.token_hex(8)
        waiting: asyncio.Future[_Answer] = self._guard.loop.create_future()
        try:
            async with asyncio.timeout_at(deadline) as limit:
                _address(packed, id, await self._topic.opened())
                if self._closed:
                    raise closed_meanwhile()
                self._waiting[id] = waiting
                posting(packed)
                call = await producer._submit(packed, None, timeout_ms / 1000, single=True)
                sent.append(call.future)
                call.future.add_done_callback(partial(_sent, waiting))
                reply, failed = await waiting
        except (TimeoutError, SendTimeout) as error:
            if isinstance(error, TimeoutError) and not limit.expired():
                raise
            raise await self._no_reply(producer.topic, timeout_ms, error) from None
        finally:
            self._waiting.pop(id, None)
            if waiting.done() and not waiting.cancelled():
                waiting.exception()  # it came together with the deadline
            for future in sent:
                future.cancel()  # if it has not left yet, it need not
        if failed:
            raise _failure(producer.topic, reply)
        return reply

    async def _no_reply(self, topic: str, timeout_ms: int, error: Exception) -> NoReply:
        """What to tell a requester whose time is over."""
        within = f"no reply within {timeout_ms / 1000:g} seconds"
        if isinstance(error, SendTimeout):
            return NoReply(f"{within}: {error}", **{**error.details, "topic": topic, "served": None})
        groups = await self._groups(topic)
        if groups is None:
            text = f"{within}; it is not known whether anybody serves {topic!r}"
            return NoReply(text, topic=topic, served=None)
        members = sum(len(group.members) for group in groups)
        if not members:
            return NoReply(
                f"{within}: nobody serves {topic!r}; start a worker that has @app.reply({topic!r}, group=…)",
                topic=topic,
                served=False,
            )
        return NoReply(
            f"{within}, though {topic!r} has {members} live member(s): they are slow or busy, or no handler "
            "there replies. It may still be handled: look before you ask again, or give it more time",
            topic=topic,
            served=True,
        )

    async def _groups(self, topic: str) -> list[GroupInfo] | None:
        """Of the topic, looked up once for all whose time is over now; None: that took too long."""
        look = self._looks.get(topic)
        if look is None:
            look = self._looks[topic] = self._guard.loop.create_task(self._endpoint.groups(topic))
            look.add_done_callback(lambda done: self._looked(topic, done))
        try:
            async with asyncio.timeout(self._tuning.served_check_s):
                return await asyncio.shield(look)
        except (TimeoutError, PostroomError):
            return None

    def _looked(self, topic: str, done: asyncio.Task[list[GroupInfo]]) -> None:
        del self._looks[topic]
        if not done.cancelled():
            done.exception()  # whoever waited for it may be gone

    # ---- replies ----

    def _take(self, id: str, reply: Received, failed: bool) -> None:
        waiting = self._waiting.pop(id, None)
        if waiting is None or waiting.done():
            self.late += 1
            log.debug("a reply came too late and is dropped")
        else:
            waiting.set_result((reply, failed))

    def _give_up(self, error: Callable[[], PostroomError]) -> None:
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(error())

    async def close(self) -> None:
        """Whoever waits is told, and the reply topic is deleted."""
        self._closed = True
        self._give_up(closed_meanwhile)
        await end(self._looks.values())
        await self._topic.close()


def _address(packed: Packed, id: str, to: ReplyTopic) -> None:
    """Make the message a request."""
    key, value, headers = packed.entries[0]
    own = [(REQUEST, id.encode()), (REPLY_TO, to.encode().encode())]
    packed.entries[0] = (key, value, [*headers, *own])
    packed.size += sum(len(name) + len(content) for name, content in own)


def _sent(waiting: asyncio.Future[_Answer], sent: asyncio.Future[Any]) -> None:
    """A request that was not sent is not answered."""
    error = None if sent.cancelled() else sent.exception()
    if error is not None and not waiting.done():
        waiting.set_exception(error)


def _failure(topic: str, reply: Received) -> RequestFailed:
    found = Failure.decode(reply.value)
    error = RequestFailed(found.message, kind=found.kind, topic=topic)
    if found.traceback:
        error.details["traceback"] = found.traceback
        error.add_note(found.traceback)
    return error


# ---- replies, on the side that serves ----


_Waiting = tuple[Entry, "asyncio.Future[bool]"]


class Answers:
    """What one consumer replies."""

    def __init__(
        self, endpoint: Endpoint, guard: Guard, tuning: ClientTuning = DEFAULTS.tuning.client
    ) -> None:
        self._endpoint, self._guard = endpoint, guard
        self._give_up_s = tuning.reply_s
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
        give_up_at, tries, place = self._guard.loop.time() + self._give_up_s, 0, to.partition_id
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
