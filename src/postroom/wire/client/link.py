"""A client's connection to one broker: requests out, answers in, in any order.

Decides when the broker is gone: the connection broke, or it did not answer a sign of life in time (a process
that was stopped keeps its connections). Whoever waits for an answer is then told `LinkLost`, and whether the
request had left. Must never repeat a request: where to, and whether that is safe, is the pool's to decide.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

from ...config import DEFAULTS, WireTuning
from ...endpoint.operations import Operation
from ...endpoint.requests import Answer, Ask, Request
from ...endpoint.values import PollReply
from ...errors import BrokerUnavailable, MessageTooLarge, PostroomError, ProtocolError
from ..frames import ERROR, PART, PREFIX_BYTES, REPLY, Frame, FrameParser, encode
from ..messages import (
    ASK,
    CANCEL,
    HELLO,
    LIST_BROKERS,
    Brokers,
    Cancel,
    Failure,
    Hello,
    Welcome,
    decode,
    encode_header,
    raised,
)
from ..replies import unpacked

__all__ = ["Link", "LinkLost", "NotOfferedError", "connect"]

_log = logging.getLogger("postroom.wire")

_ANSWER_BYTES = 2**31 - 1  # a broker is trusted: its answers may be as long as what it was asked for


class LinkLost(Exception):
    """The broker is gone. `sent`: the request may have reached it."""

    def __init__(self, why: str, *, sent: bool) -> None:
        super().__init__(why)
        self.sent = sent


class NotOfferedError(Exception):
    """The broker does not know this operation: it is an older one."""


class Link(asyncio.Protocol):
    def __init__(self, address: str, tuning: WireTuning = DEFAULTS.tuning.wire) -> None:
        self.address, self._tuning = address, tuning
        self.welcome: Welcome
        self.on_ask: Callable[[Ask], Answer] = lambda ask: Answer()
        self.on_late: Callable[[Any, Any], None] = lambda request, reply: None  # nobody waits for it any more
        self.on_list: Callable[[Link, Any, float], None] = lambda link, answer, sent_at: None
        self.why = ""  # it is gone
        self.fault: PostroomError | None = None  # what the broker had against us before it closed
        self.silent = False  # it is gone because nothing was heard
        self._loop = asyncio.get_running_loop()
        self._parser = FrameParser(_ANSWER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._waiting: dict[int, asyncio.Future[Frame]] = {}
        self._told: dict[int, tuple[Operation, Callable[[Any], None]]] = {}  # who is told an answer instead
        self._parts: dict[int, Callable[[Frame], None]] = {}  # who is told the first part of an answer
        self._urgent: dict[int, float] = {}  # by the loop's clock, since when requests that are no poll wait
        self._busy = False  # of late: whoever is, learns sooner that the broker is gone
        self._late: dict[int, tuple[Operation, Request]] = {}  # nobody waits for the answers any more
        self._crossed: dict[int, Frame] = {}  # answers to what was cancelled at that very moment
        self._none_late = asyncio.Event()
        self._none_late.set()
        self._last_id = 0
        self._heard_at = self._listed_at = self.greeted_at = self._loop.time()
        self._writable = asyncio.Event()
        self._writable.set()
        self._watching: asyncio.Task[None] | None = None

    @property
    def gone(self) -> bool:
        return bool(self.why)

    # ---- asking ----

    async def greet(self, hello: Hello) -> Welcome:
        self.greeted_at = self._loop.time()  # what it took to connect says nothing of the broker's clock
        answer = await self._ask(HELLO, encode_header(hello))
        self.welcome = decode(answer.header, Welcome)
        self._watching = self._loop.create_task(self._watch())
        return self.welcome

    async def call(
        self,
        operation: Operation,
        request: Request,
        body: Sequence[bytes] = (),
        early: Callable[[Any], None] | None = None,
    ) -> Any:
        """`early` is told the first part of an answer that has two."""
        if operation.early and operation.name not in self.welcome.offers:
            raise NotOfferedError(operation.name)
        slow = operation.waits or operation.slow
        late = (operation, request) if operation.reply is PollReply and operation.waits else None
        header = encode_header(request)
        size, limit = _size(header, body), self.welcome.max_frame_bytes
        if size > limit:
            raise MessageTooLarge(
                f"a request of {size:,} bytes is more than the {limit:,} that the broker takes: send smaller "
                "batches, or raise max_frame_bytes of the broker",
                max_bytes=limit,
            )
        part = None if early is None else partial(self._told_early, operation, early)
        answer = await self._ask(operation.kind, header, body, slow=slow, late=late, part=part)
        return unpacked(operation, answer)

    def call_soon(
        self,
        operation: Operation,
        request: Request,
        body: Sequence[bytes],
        told: Callable[[Any], None],
    ) -> bool:
        """Ask now; `told` hears the answer, which may be a PostroomError, or LinkLost.

        False: nothing was sent, for it would have to wait, or is too long."""
        header = encode_header(request)
        if not self._writable.is_set() or _size(header, body) > self.welcome.max_frame_bytes:
            return False
        if self._transport is None or self.gone:
            return False
        id = self._next_id()
        self._told[id] = operation, told
        self._send(id, operation.kind, header, body, urgent=True)
        return True

    def _told_early(self, operation: Operation, early: Callable[[Any], None], frame: Frame) -> None:
        early(decode(frame.header, operation.early_reply))

    async def _ask(
        self,
        kind: int,
        header: bytes,
        body: Sequence[bytes] = (),
        *,
        slow: bool = False,
        late: tuple[Operation, Request] | None = None,
        part: Callable[[Frame], None] | None = None,
    ) -> Frame:
        while not self._writable.is_set() and not self.gone:
            await self._writable.wait()
        if self._transport is None or self.gone:
            raise LinkLost(self.why, sent=False)
        id = self._next_id()
        answered: asyncio.Future[Frame] = self._loop.create_future()
        self._waiting[id] = answered
        if part is not None:
            self._parts[id] = part
        # the first part is waited for, as any answer is
        self._send(id, kind, header, body, urgent=not slow or part is not None)
        try:
            frame = await answered
        except asyncio.CancelledError:
            self._cancel(id, late, answered)
            raise
        finally:
            self._waiting.pop(id, None)
            self._urgent.pop(id, None)
            self._crossed.pop(id, None)
            self._parts.pop(id, None)
        _check(frame)
        return frame

    def _send(self, id: int, kind: int, header: bytes, body: Sequence[bytes], *, urgent: bool) -> None:
        if urgent:
            self._busy = True
            self._urgent[id] = self._loop.time()
        if self._transport is not None:
            self._transport.writelines(encode(kind, id, header, body))

    def _next_id(self) -> int:
        """One that nobody waits under; 0 is of the connection itself."""
        while True:
            id = self._last_id = self._last_id % 0xFFFFFFFF + 1
            if id not in self._waiting and id not in self._told and id not in self._late:
                return id

    def _cancel(
        self, id: int, late: tuple[Operation, Request] | None, answered: asyncio.Future[Frame]
    ) -> None:
        """Nobody waits for the answer any more; what a poll was given has to be given back."""
        came = self._crossed.get(id)
        if answered.done() and not answered.cancelled() and answered.exception() is None:
            came = answered.result()
        if came is not None:
            if late is not None:
                self._came_late(late, came)
        elif not self.gone and self._transport is not None:
            if late is not None:
                self._late[id] = late
                self._none_late.clear()
            self._transport.writelines(encode(CANCEL, 0, encode_header(Cancel(id))))

    def _came_late(self, late: tuple[Operation, Request], frame: Frame) -> None:
        operation, request = late
        if frame.flags & ERROR:
            return
        try:
            self.on_late(request, unpacked(operation, frame))
        except ProtocolError as error:
            self._end(f"{self.address} answered with something else: {error}")

    async def no_more_late(self, timeout_s: float) -> None:
        """Wait for answers that nobody waits for: the broker gives one to every request."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._none_late.wait()

    # ---- signs of life ----

    async def _watch(self) -> None:
        """Ask for a sign of life when the broker is silent, and end the link if none comes."""
        while not self.gone:
            often_s = self._tuning.late_s if self._busy else self._tuning.idle_s
            pause, self._busy = min(self._pause(), often_s), False
            await asyncio.sleep(pause)
            if self._pause() > 0:
                continue
            sent_at, unsent = self._loop.time(), self._unsent()
            self._listed_at = sent_at
            try:
                async with asyncio.timeout(self._tuning.silence_s):
                    self.on_list(self, await self.call(LIST_BROKERS, Brokers()), sent_at)
            except TimeoutError:
                if self._heard_at < sent_at and self._unsent() >= unsent:  # a long request may be on its way
                    self.silent = True
                    self._end(f"the broker at {self.address} does not answer")
            except (LinkLost, PostroomError):
                pass  # whoever waits was told; or the broker is busy with something else

    def _unsent(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def _pause(self) -> float:
        """Seconds until a sign of life is wanted."""
        now, late_s, idle_s = self._loop.time(), self._tuning.late_s, self._tuning.idle_s
        late = min(self._urgent.values(), default=now) + late_s - now if self._urgent else idle_s
        silence = min(max(late, self._heard_at + late_s - now), self._heard_at + idle_s - now)
        return max(0.0, min(silence, self._listed_at + self._tuning.brokers_s - now))

    # ---- the transport's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its class
        self._transport.set_write_buffer_limits(high=1 << 20)

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        try:
            for frame in self._parser.feed(data):
                self._take(frame)
        except ProtocolError as error:
            self._end(f"{self.address} answered with something else: {error}")

    def _take(self, frame: Frame) -> None:
        if frame.flags & PART:
            self._urgent.pop(frame.id, None)
            if (part := self._parts.pop(frame.id, None)) is not None:
                part(frame)
        elif frame.flags & REPLY:
            answered = self._waiting.get(frame.id)
            if frame.id in self._told:
                self._urgent.pop(frame.id, None)
                self._tell(*self._told.pop(frame.id), frame)
            elif answered is not None and answered.done():  # cancelled: whoever waited does not know it yet
                self._crossed[frame.id] = frame
            elif answered is not None:
                answered.set_result(frame)
            elif frame.id in self._late:
                late = self._late.pop(frame.id)
                if not self._late:
                    self._none_late.set()
                self._came_late(late, frame)
            elif not frame.id and frame.flags & ERROR:  # of the connection itself, before it is closed
                self.fault = raised(decode(frame.header, Failure))
                self._end(str(self.fault))
        elif frame.kind == ASK and self._transport is not None:
            answer = self.on_ask(decode(frame.header, Ask))
            self._transport.writelines(encode(ASK, frame.id, encode_header(answer), flags=REPLY))

    def _tell(self, operation: Operation, told: Callable[[Any], None], frame: Frame) -> None:
        try:
            _check(frame)
            result = unpacked(operation, frame)
        except PostroomError as error:
            result = error
        told(result)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._end(f"the connection to {self.address} was lost" + (f" ({error})" if error else ""))

    def _end(self, why: str) -> None:
        if self.gone:
            return
        self.why = why
        self._writable.set()
        self._none_late.set()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(LinkLost(why, sent=True))
        if self._transport is not None:
            self._transport.abort()
        if self._watching is not None:
            self._watching.cancel()
        told, self._told = self._told, {}
        for _, tell in told.values():
            tell(LinkLost(why, sent=True))

    async def close(self) -> None:
        """Say no more; what is still waited for fails."""
        transport = self._transport
        if transport is not None and not self.gone:
            self._end(f"the connection to {self.address} was closed here")
        if self._watching is not None:
            await asyncio.gather(self._watching, return_exceptions=True)


def _check(answer: Frame) -> None:
    """Raise the error that it is."""
    if answer.flags & ERROR:
        raise raised(decode(answer.header, Failure))


def _size(header: bytes, body: Sequence[bytes]) -> int:
    return len(header) + sum(map(len, body)) + PREFIX_BYTES


async def connect(
    address: str,
    hello: Hello,
    tls: ssl.SSLContext | None,
    *,
    timeout_ms: int,
    tuning: WireTuning = DEFAULTS.tuning.wire,
) -> Link:
    """A link that was greeted. BrokerUnavailable if nobody is there; what the broker has against us."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    loop = asyncio.get_running_loop()
    link = Link(address, tuning)
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            transport, _ = await loop.create_connection(
                lambda: link, host, int(port), ssl=tls, server_hostname=host if tls else None
            )
            if (raw := transport.get_extra_info("socket")) is not None:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await link.greet(hello)
            return link
    except TimeoutError:
        await link.close()
        raise BrokerUnavailable(
            f"no answer from {address} within {timeout_ms} ms: check that a broker runs there"
        ) from None
    except LinkLost as error:
        if link.fault is not None:
            raise link.fault from None
        raise BrokerUnavailable(f"{error}: check that a broker runs there") from None
    except ssl.SSLError as error:
        await link.close()
        raise BrokerUnavailable(
            f"no TLS with {address}: {error.reason or error}; check its certificate, and tls= of connect()"
        ) from error
    except OSError as error:
        await link.close()
        raise BrokerUnavailable(
            f"cannot connect to {address} ({error.strerror or error}): check that a broker runs there "
            "(postroom serve)"
        ) from error
    except BaseException:
        await link.close()
        raise
