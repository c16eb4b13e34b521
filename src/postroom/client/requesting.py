"""Requests: sent as messages, and answered through a topic of the requester's own (R38).

The reply topic is volatile, made when something is first asked, shared by all requests of the connection,
and deleted when it closes. Replies are matched by the request's id; those that nobody waits for any more are
dropped and counted. Decides when a request ends: with its reply, its handler's failure, the failure to send
it, or its deadline. Must never send a request again by itself (it may have been handled), and never leave
one waiting for a reply that cannot come.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..broker.endpoint import Endpoint, GroupInfo
from ..config import DEFAULTS
from ..errors import InvalidSetting, NoReply, PostroomError, RequestFailed, SendTimeout
from ..model.requests import REPLY_TO, REQUEST, Failure, ReplyTopic
from ..units import Duration, duration_ms
from .codec import Packed, pack
from .ending import end
from .guard import Guard
from .message import Message, Received, Value
from .producing.producer import Producer
from .reply_topic import OwnReplyTopic, closed_meanwhile
from .tracing import posting

__all__ = ["Requesting", "Requests"]

log = logging.getLogger("postroom.requests")

_LOOK_S = 1.0  # for finding out whether anybody serves a topic

_Answer = tuple[Received, bool]  # and whether it tells of a failure


class Requesting:
    """The part of a connection that asks."""

    client_id: str
    _endpoint: Endpoint
    _guard: Guard
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
            self._requests = Requests(self._endpoint, self._guard, self.client_id)
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

    def __init__(self, endpoint: Endpoint, guard: Guard, client_id: str) -> None:
        self._endpoint, self._guard = endpoint, guard
        self._topic = OwnReplyTopic(endpoint, guard, client_id, take=self._take, lost=self._give_up)
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
            async with asyncio.timeout(_LOOK_S):
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
