"""The broker's side of one connection: who it is, requests in, answers out.

    new ──hello──▶ open ──stop or fault──▶ closed

Bounded in everything: time until it is greeted, time for a frame, bytes of frames, requests and bytes under
way, bytes of answers (`answers`: together with all others). What is over a bound waits in the client's socket
or for its turn, or ends the connection with a sentence. Must never let one client's fault reach another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any, Protocol, cast

from ...endpoint.operations import OPERATIONS, Operation
from ...endpoint.requests import Answer, Append, Ask
from ...errors import BrokerUnavailable, PartitionSealed, PostroomError, ProtocolError, UnknownTopic
from ...store.contract import Appended
from ..frames import ERROR, PART, REPLY, Frame, FrameParser, encode
from ..messages import (
    ASK,
    BROKERS,
    CANCEL,
    HELLO,
    MAX_VERSION,
    MIN_VERSION,
    Cancel,
    Hello,
    Welcome,
    decode,
    encode_header,
    failure_of,
    operation,
)
from ..replies import packed
from .answers import no_room
from .listening import Listening, certificate_name, from_loopback, peer_of
from .session import APPEND, Session

__all__ = ["Connection", "Host"]

_log = logging.getLogger("postroom.wire")

_WAITING = frozenset(one.kind for one in OPERATIONS.values() if one.waits)
_UNDONE = _WAITING | {APPEND.kind}  # not done for a client that is gone: it asks elsewhere
_ASKED_AT_ONCE = 1000  # questions whose answers are waited for; a client need not answer
_SMALL_BYTES = 32 * 1024  # of a frame that may wait for others of its turn
_STOPPING = "this broker is stopping: ask another"


class Host(Protocol):
    """The server, as far as a connection needs it."""

    listening: Listening
    held_bytes: int
    begun_bytes: int
    short_of_room: bool  # somebody waits for requests of others to end

    def joined(self, connection: Connection) -> None: ...
    def left(self, connection: Connection) -> None: ...
    async def welcome(
        self, hello: Hello, connection: Connection, version: int
    ) -> tuple[Session, Welcome]: ...
    def broker_list(self) -> Any: ...
    def freed(self) -> None: ...
    def refused(self, peer: str, error: Exception) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, host: Host) -> None:
        self._host, self._tuning = host, host.listening.tuning
        self._loop, self._tick_ms = asyncio.get_running_loop(), 1000 * self._tuning.tick_s
        self._parser = FrameParser(host.listening.first_frame_bytes)
        self._transport: asyncio.Transport | None = None
        self._session: Session | None = None
        self._greeting = False
        self._tasks: dict[int, asyncio.Future[None]] = {}  # by request, until it is answered
        self._waiting: set[asyncio.Future[None]] = set()  # of these, polls and the like
        self._undone: set[asyncio.Future[None]] = set()
        self._sends: set[asyncio.Future[None]] = set()  # those on the long way
        self._out: list[bytes] = []  # frames that are written at the end of this turn
        self._held_bytes = 0
        self._begun_bytes = 0  # of a frame that is not whole
        self._reading = True
        self._stopping = False
        self._refused_at: float | None = None
        self._gone = asyncio.Event()
        self._written: asyncio.Event | None = None  # set once the client has read; None: it reads
        self._made_at = self._heard_at = self._frame_at = self._stuck_at = self._loop.time()
        self.client = ""
        self._asked: dict[int, Ask] = {}
        self._asked_id = 0
        self._acting: set[asyncio.Task[None]] = set()
        self._looking: asyncio.TimerHandle | None = None  # at short leases, more often than it ticks

    # ---- the transport's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is none by its class
        self._transport.set_write_buffer_limits(high=1 << 20)
        self._host.joined(self)

    def data_received(self, data: bytes) -> None:
        if self._refused_at is not None:
            return
        self._heard_at = self._loop.time()
        if not self._parser.waiting:
            self._frame_at = self._heard_at
        try:
            for frame in self._parser.feed(data):
                self._frame_at = self._heard_at
                self._take(frame)
        except PostroomError as error:
            self.refuse(error)
        self._count_begun(self._parser.waiting)

    def _count_begun(self, size: int) -> None:
        """Bounds what all connections together hold of frames that are not whole."""
        grown, self._begun_bytes = size - self._begun_bytes, size
        self._host.begun_bytes += grown
        if grown > 0 and self._host.begun_bytes > self._host.listening.all_request_bytes:
            self.refuse(BrokerUnavailable("this broker is short of memory: ask another, or try again later"))

    def pause_writing(self) -> None:
        self._written = asyncio.Event()
        self._stuck_at = self._loop.time()
        self.throttle()

    def resume_writing(self) -> None:
        self._go_on_writing()
        self.count_unread()
        self.throttle()

    def _go_on_writing(self) -> None:
        if self._written is not None:
            self._written.set()
            self._written = None

    def connection_lost(self, error: Exception | None) -> None:
        self._count_begun(0)
        if self._looking is not None:
            self._looking.cancel()
        self._go_on_writing()
        self._transport = None
        self.count_unread()
        for task in self._undone:
            task.cancel()
        self._gone.set()
        self._host.left(self)

    # ---- requests ----

    def _take(self, frame: Frame) -> None:
        if self._session is None:
            if frame.kind != HELLO or self._greeting:
                raise ProtocolError("a connection begins with Hello, and goes on once that is answered")
            self._greeting = True
            self._begin(frame, self._greet(frame))
        elif frame.flags & REPLY:
            self._answered(frame)
        elif frame.kind == HELLO:
            raise ProtocolError("Hello came twice: a connection is of one client")
        elif frame.kind == CANCEL:
            self._cancel(decode(frame.header, Cancel).id)
        elif frame.id in self._tasks:
            raise ProtocolError(f"request {frame.id} is under way already: each needs an id of its own")
        elif frame.kind == BROKERS:
            self._write(frame, self._host.broker_list())
        elif frame.kind != APPEND.kind or not self._queued(frame):
            self._begin(frame, self._serve(frame))

    def _queued(self, frame: Frame) -> bool:
        """The short way of a send: nothing is waited for but its commit. False: it goes the long way, which
        also says what is wrong with it. None overtakes one that goes there (I3)."""
        session = self._session
        if session is None or self._sends or self._stopping or self._written is not None:
            return False
        answer: asyncio.Future[None] = self._loop.create_future()
        try:
            request = decode(frame.header, Append)
            if not session.append_soon(request, frame.body, partial(self._told, frame, answer), answer.done):
                return False
        except Exception:  # whatever it is, the long way meets it again, and tells
            return False
        self._follow(frame, answer)
        return True

    def _told(self, frame: Frame, answer: asyncio.Future[None], result: Appended | PostroomError) -> None:
        """What became of a send on the short way."""
        if answer.done():  # it was cancelled, or its client is gone
            return
        if isinstance(result, Appended):
            header, body = packed(APPEND, result)
            self._write(frame, header, body)
        elif isinstance(result, PartitionSealed):  # the long way sees to its successors
            self._begin(frame, self._serve(frame))
        else:
            self._fail(frame, result)
        answer.set_result(None)

    def _begin(self, frame: Frame, serving: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(serving)
        if frame.kind == APPEND.kind:
            self._sends.add(task)
        self._follow(frame, task)

    def _follow(self, frame: Frame, task: asyncio.Future[None]) -> None:
        """It is under way until the task, or the answer that is to come, is done."""
        size = len(frame.header) + len(frame.body)
        self._held_bytes += size
        self._host.held_bytes += size
        self._tasks[frame.id] = task
        if frame.kind in _WAITING:
            self._waiting.add(task)
        if frame.kind in _UNDONE:
            self._undone.add(task)
        task.add_done_callback(lambda done: self._ended(frame, size, done))
        self.throttle()

    def _ended(self, frame: Frame, size: int, task: asyncio.Future[None]) -> None:
        if self._tasks.get(frame.id) is task:
            if task.cancelled():  # before its first step
                self._fail(frame, self._cancelled())
            self._tasks.pop(frame.id, None)
        self._waiting.discard(task)
        self._undone.discard(task)
        self._sends.discard(task)
        self._held_bytes -= size
        self._host.held_bytes -= size
        if not self._reading:
            self.throttle()
        if self._host.short_of_room:
            self._host.freed()

    async def _greet(self, frame: Frame) -> None:
        hello: Hello | None = None
        try:
            hello = decode(frame.header, Hello)
            version = min(hello.max_version, MAX_VERSION)
            if version < max(hello.min_version, MIN_VERSION):
                raise ProtocolError(
                    f"the client speaks versions {hello.min_version} to {hello.max_version} of the protocol, "
                    f"and this broker {MIN_VERSION} to {MAX_VERSION}: install versions of Postroom that are "
                    "closer to each other"
                )
            self.client = hello.client[:250]
            session, welcome = await self._host.welcome(hello, self, version)
        except asyncio.CancelledError:
            return
        except Exception as error:
            self._host.refused(self.peer, error)
            self.refuse(error, frame.id)
            return
        self._session = session
        self._parser.max_bytes = self._host.listening.max_frame_bytes
        self._write(frame, welcome)

    async def _serve(self, frame: Frame) -> None:
        try:
            found = operation(frame.kind)
            try:
                request = decode(frame.header, found.request)
            except ProtocolError as error:
                self.refuse(error, frame.id)  # what else it says is not to be trusted either
                return
            if self._stopping:
                raise BrokerUnavailable(_STOPPING)
            if self._written is not None:
                await self._written.wait()  # no more is fetched for a client that does not read
            assert self._session is not None
            if found.small:  # no room is looked for
                reply = await self._session.call(found, request, frame.body)
                header, body = packed(found, reply)
                self._write(frame, header, body)
            else:
                await self._serve_large(self._session, frame, found, request)
        except asyncio.CancelledError:
            self._fail(frame, self._cancelled())
        except UnknownTopic as error:
            self._fail(frame, error if self._session is None else self._session.shown(error))
        except Exception as error:
            self._fail(frame, error)

    async def _serve_large(self, session: Session, frame: Frame, found: Operation, request: Any) -> None:
        """Serves what may have a large answer: room is held for it first, until it is read."""
        share, held = session.share, session.expected(found, request)
        await share.room(held)
        try:
            if self._written is not None:
                await self._written.wait()
            early = partial(self._send_part, frame, self._tasks.get(frame.id)) if found.early else None
            reply = await session.call(found, request, frame.body, early)
            header, body = packed(found, reply)
            head = encode_header(header)
            size = len(head) + sum(map(len, body))
            if size > held and not share.fits(size - held, held) and session.may_drop(found, request):
                await session.give_back(request, reply)
                raise no_room()
            session.granted(found, request, reply, size)
            share.hold(size - held)
            held = size
            self._send(frame, head, body)
            if self._looking is None:
                self._look_soon()
        finally:
            share.hold(-held)

    def _cancelled(self) -> BrokerUnavailable:
        return BrokerUnavailable(_STOPPING if self._stopping else "the request was cancelled")

    def _cancel(self, id: int) -> None:
        task = self._tasks.get(id)
        if task is not None:
            task.cancel()

    # ---- asking the client (R19) ----

    def _look_soon(self) -> None:
        look_ms = 0 if self._session is None else self._session.look_ms
        if 0 < look_ms < self._tick_ms and self._transport is not None:
            self._looking = self._loop.call_later(max(self._tuning.least_check_s, look_ms / 1000), self._look)

    def _look(self) -> None:
        self._looking = None
        self._ask_due()
        self._look_soon()

    def _ask_due(self) -> None:
        if self._session is not None and self._refused_at is None:
            for ask in self._session.due(self._host.listening.ask_before_ms):
                self._ask(ask)

    def _ask(self, ask: Ask) -> None:
        self._asked_id = self._asked_id % 0xFFFFFFFF + 1
        self._asked[self._asked_id] = ask
        if len(self._asked) > _ASKED_AT_ONCE:
            del self._asked[next(iter(self._asked))]  # the oldest: its lease is over
        if self._transport is not None:
            self._put(encode(ASK, self._asked_id, encode_header(ask)))

    def _answered(self, frame: Frame) -> None:
        ask = self._asked.pop(frame.id, None)
        if frame.kind != ASK or not 0 < frame.id <= self._asked_id:
            raise ProtocolError("an answer to nothing that was asked")
        if ask is None or frame.flags & ERROR:  # it took too long, or does not know the question
            return
        answer = decode(frame.header, Answer)
        assert self._session is not None
        acting = self._loop.create_task(self._session.answered(ask, answer))
        self._acting.add(acting)
        acting.add_done_callback(self._acted)

    def _acted(self, acting: asyncio.Task[None]) -> None:
        self._acting.discard(acting)
        if self._looking is None:
            self._look_soon()

    # ---- answers ----

    def _write(self, frame: Frame, header: Any, body: Any = ()) -> None:
        self._send(frame, encode_header(header), body)

    def _send(self, frame: Frame, head: bytes, body: Any) -> None:
        pieces = encode(frame.kind, frame.id, head, body, REPLY)
        self._tasks.pop(frame.id, None)  # whoever has the answer may use the id again
        if self._transport is not None:
            self._put(pieces)

    def _send_part(self, frame: Frame, task: asyncio.Future[Any] | None, part: Any) -> None:
        """Sends the first part of an answer, unless the request was ended otherwise: it is small."""
        if self._transport is not None and self._tasks.get(frame.id) is task:
            self._put(encode(frame.kind, frame.id, encode_header(part), (), REPLY | PART))

    def _put(self, pieces: Sequence[bytes]) -> None:
        """Write a frame; a small one at the end of this turn of the event loop, with the others that the turn
        brings for this client: each write wakes it."""
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out += pieces
        if sum(map(len, pieces)) > _SMALL_BYTES:
            self._flush()

    def _flush(self) -> None:
        out, self._out = self._out, []
        if out and self._transport is not None:
            self._transport.writelines(out)
            self.count_unread()

    def count_unread(self) -> None:
        """Holds room for what the client has not read; nothing, as a rule."""
        share = None if self._session is None else self._session.share
        size = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if share is not None and (size or share.unread):
            share.saw_unread(size)

    def _fail(self, frame: Frame, error: BaseException) -> None:
        self._tasks.pop(frame.id, None)
        if self._transport is not None:
            header = encode_header(failure_of(error))
            self._put(encode(frame.kind, frame.id, header, (), REPLY | ERROR))

    def refuse(self, error: Exception, id: int = 0) -> None:
        """Say why, and close."""
        if self._transport is None or self._refused_at is not None:
            return
        self._refused_at = self._loop.time()
        self._flush()
        if isinstance(error, PostroomError) and error.details.get("spoke") == "HTTP":
            text = f"{error}; its HTTP interface is on another port, see the broker's log.\r\n".encode()
            head = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\nContent-Type: text/plain\r\n"
            self._transport.write(head + b"Content-Length: %d\r\n\r\n" % len(text) + text)
        else:
            header = encode_header(failure_of(error))
            self._transport.writelines(encode(0, id, header, (), REPLY | ERROR))
        self._transport.close()

    # ---- bounds ----

    def throttle(self) -> None:
        """Read on only while there is room for what comes."""
        if self._transport is None:
            return
        limits = self._host.listening
        room = (
            len(self._tasks) - len(self._waiting) < limits.requests_at_once
            and len(self._waiting) < limits.polls_at_once
            and self._held_bytes < limits.request_bytes
            and self._host.held_bytes < limits.all_request_bytes
            and self._written is None
        )
        if self._host.held_bytes >= limits.all_request_bytes:
            self._host.short_of_room = True
        if room and not self._reading:
            self._reading = True
            self._heard_at = self._frame_at = self._loop.time()
            self._transport.resume_reading()
        elif not room and self._reading:
            self._reading = False
            self._transport.pause_reading()

    @property
    def _patience_ms(self) -> int:
        """For so long it may leave its answers unread: not as long if others wait for the room."""
        limits = self._host.listening
        wanted = self._session is not None and self._session.share.wanted
        return min(limits.silent_ms, limits.slow_reader_ms) if wanted else limits.silent_ms

    def tick(self, now: float) -> None:
        """Looks whether its time is up for something; called about once a second."""
        limits = self._host.listening
        if self._refused_at is not None:
            if now - self._refused_at > self._tuning.refused_s:
                self.abort()
            return
        self._ask_due()
        if self._session is not None and self._session.share.unread:
            self.count_unread()
        if self._session is None and (now - self._made_at) * 1000 > limits.unauthenticated_ms:
            self.refuse(ProtocolError(f"no Hello within {limits.unauthenticated_ms} ms"))
        elif self._written is not None and (now - self._stuck_at) * 1000 > self._patience_ms:
            _log.warning("%s (%s) does not read its answers: closed", self.client, self.peer)
            self.abort()
        elif not self._reading:
            return
        elif self._parser.waiting and (now - self._frame_at) * 1000 > limits.frame_ms:
            self.refuse(ProtocolError(f"a frame was begun and not finished within {limits.frame_ms} ms"))
        elif not self._tasks and (now - self._heard_at) * 1000 > limits.silent_ms:
            self.refuse(ProtocolError(f"nothing was heard for {limits.silent_ms} ms: send Brokers"))

    # ---- who ----

    @property
    def peer(self) -> str:
        return peer_of(self._transport)

    @property
    def is_loopback(self) -> bool:
        return from_loopback(self._transport)

    @property
    def certificate_name(self) -> str | None:
        """The common name of the client's certificate, which the server has verified."""
        return certificate_name(self._transport)

    # ---- the end ----

    async def stop(self) -> None:
        """Polls end at once, other requests when they are done; nothing new is begun."""
        self._stopping = True
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._tasks.values(), *self._acting, return_exceptions=True)
        self._flush()
        if self._transport is not None:
            self._transport.close()
            await self._gone.wait()  # its last answers are sent

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
