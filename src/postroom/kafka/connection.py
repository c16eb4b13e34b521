"""The broker's side of one Kafka client's connection: frames in, answers out, in the order of the requests.

Requests are handled one after the other, as Kafka does, so a fetch that waits holds up what follows it:
clients open a second connection where that matters. Batches that are sent are the exception: they are put in
line in their order, and the next is taken while they are being stored.

Bounded in everything: the size of a frame, the time for one, requests and bytes that wait, answers that are
not read. Must never let one client's fault reach another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine
from typing import Any, Protocol, cast

from ..errors import PostroomError, ProtocolError
from ..wire.server.listening import Listening, certificate_name, from_loopback, peer_of
from .primitives import Piece
from .session import Answer, Session, read_header

__all__ = ["Connection", "FrameParser", "Host"]

_log = logging.getLogger("postroom.kafka")

_LENGTH_BYTES = 4
_FIRST_FRAME_BYTES = 64 * 1024  # before a client is known
_SMALL_PIECE_BYTES = 4096  # of a frame that is not whole
_PENDING_FRAMES = 64  # that were received and not begun
_PRODUCES_AT_ONCE = 64  # that were begun and not answered


class FrameParser:
    """Cuts a stream into frames: four bytes of length, and so many bytes.

    A frame is put together once, when all of it is there; it is a view of what was put together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.begun = 0
        """Bytes of a frame that has begun and is not whole."""
        self._pieces: list[bytes] = []  # they are those
        self._wanted = _LENGTH_BYTES  # as many bytes decide more: a length, or a whole frame

    def feed(self, data: bytes) -> list[memoryview]:
        """The frames that are whole now. ProtocolError for one that is too long, or none."""
        if self._pieces and len(self._pieces[-1]) < _SMALL_PIECE_BYTES:
            self._pieces[-1] += data  # or many small ones would take more room than their bytes (I22)
        else:
            self._pieces.append(data)
        self.begun += len(data)
        if self.begun < self._wanted:
            return []
        view, found, at = memoryview(b"".join(self._pieces)), list[memoryview](), 0
        self._wanted = _LENGTH_BYTES
        while len(view) - at >= _LENGTH_BYTES:
            size = int.from_bytes(view[at : at + _LENGTH_BYTES], "big", signed=True)
            if not 0 < size <= self.max_bytes:
                raise ProtocolError(
                    f"a frame of {size:,} bytes was announced, and {self.max_bytes:,} is the most that "
                    "is taken: send smaller batches; or it is not a Kafka client"
                )
            end = at + _LENGTH_BYTES + size
            if len(view) < end:
                self._wanted = end - at
                break
            found.append(view[at + _LENGTH_BYTES : end])
            at = end
        self._pieces = [bytes(view[at:])] if at < len(view) else []
        self.begun = len(view) - at
        return found


class Host(Protocol):
    """The server, as far as a connection needs it."""

    listening: Listening
    pending_bytes: int

    def session(self, loopback: bool, certificate_name: str | None) -> Session:
        """What the client of a new connection asks goes there."""

    def connected(self, connection: Connection) -> None: ...
    def disconnected(self, connection: Connection) -> None: ...
    def freed(self) -> None: ...
    def refused(self, peer: str, error: BaseException) -> None: ...


class Connection(asyncio.Protocol):
    def __init__(self, host: Host) -> None:
        self._host = host
        self._loop = asyncio.get_running_loop()
        self._parser = FrameParser(_FIRST_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._session: Session
        self._frames: deque[memoryview] = deque()
        self._arrived = asyncio.Event()
        self._answers: asyncio.Queue[asyncio.Task[list[Piece] | None] | list[Piece]] = asyncio.Queue(
            _PRODUCES_AT_ONCE
        )
        self._answering = 0  # answers that are in line
        self._tasks: list[asyncio.Task[None]] = []
        self._pending_bytes = 0  # bytes of frames that are not answered, and of one that is not whole
        self._reading = True
        self._busy = False  # a request is being handled
        self._stopping = False
        self._gone = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self._made_at = self._heard_at = self._frame_at = self._stuck_at = self._loop.time()

    # ---- the transport's side ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._transport.set_write_buffer_limits(high=1 << 20)
        self._session = self._host.session(from_loopback(transport), certificate_name(transport))
        self._session.host = f"/{peer_of(transport).rpartition(':')[0]}"
        self._transport.pause_reading()  # until it is known how much may be read
        self._reading = False
        self._host.connected(self)
        self._tasks = [self._loop.create_task(self._serve()), self._loop.create_task(self._answer())]

    def data_received(self, data: bytes) -> None:
        self._heard_at = self._loop.time()
        if not self._parser.begun:
            self._frame_at = self._heard_at
        try:
            frames = self._parser.feed(data)
        except ProtocolError as error:
            self.refuse(error)
            return
        if frames:
            self._frame_at = self._heard_at
            self._frames.extend(frames)
            self._arrived.set()
        self._hold(len(data))

    def _hold(self, size: int) -> None:
        """Counts bytes that came, or (below 0) were answered."""
        self._pending_bytes += size
        self._host.pending_bytes += size
        self.throttle()
        if size < 0:
            self._host.freed()

    def pause_writing(self) -> None:
        self._writable.clear()
        self._stuck_at = self._loop.time()
        self.throttle()

    def resume_writing(self) -> None:
        self._writable.set()
        self._count_unread()
        self.throttle()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._writable.set()
        self._count_unread()
        self._hold(-self._pending_bytes)
        for task in self._tasks:
            task.cancel()
        self._gone.set()
        self._host.disconnected(self)

    # ---- requests ----

    async def _serve(self) -> None:
        try:
            await self._session.welcome()
            self._allow_more()
            while True:
                while not self._frames:
                    self._arrived.clear()
                    await self._arrived.wait()
                await self._writable.wait()  # nothing is read for a client that does not read
                frame = self._frames.popleft()
                self._busy = True
                await self._begin(frame)
                self._busy = False
                self._allow_more()
                self._hold(-min(self._pending_bytes, len(frame) + _LENGTH_BYTES))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.refuse(error)

    def _allow_more(self) -> None:
        """Whoever is known may send more at a time."""
        if self._session.known:
            self._parser.max_bytes = self._host.listening.max_frame_bytes
        self.throttle()

    async def _begin(self, frame: memoryview) -> None:
        answer: Answer = await self._session.begin(read_header(frame))
        if isinstance(answer, list):
            if not self._answering:
                self._write(answer)
                return
            self._answering += 1
            await self._answers.put(answer)
        else:
            self._answering += 1
            await self._answers.put(self._loop.create_task(_run(answer)))

    async def _answer(self) -> None:
        """Answers leave in the order of their requests."""
        try:
            while True:
                answer = await self._answers.get()
                pieces = answer if isinstance(answer, list) else await answer
                if pieces is not None:
                    self._write(pieces)
                self._answering -= 1
                self._answers.task_done()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self.refuse(error)

    def _write(self, pieces: list[Piece]) -> None:
        if self._transport is not None:
            self._transport.writelines(pieces)
            self._count_unread()

    def _count_unread(self) -> None:
        """Holds room for what the client has not read; nothing, as a rule."""
        share = self._session.share
        size = 0 if self._transport is None else self._transport.get_write_buffer_size()
        if share is not None and (size or share.unread):
            share.saw_unread(size)

    # ---- bounds ----

    def throttle(self) -> None:
        """Read on only while there is room for what comes."""
        if self._transport is None:
            return
        limits = self._host.listening
        room = (
            len(self._frames) < _PENDING_FRAMES
            and self._pending_bytes < limits.request_bytes
            and self._host.pending_bytes < limits.all_request_bytes
            and self._writable.is_set()
        )
        if room and not self._reading:
            self._reading = True
            self._heard_at = self._frame_at = self._loop.time()
            self._transport.resume_reading()
        elif not room and self._reading and self._frames:
            self._reading = False
            self._transport.pause_reading()

    def tick(self, now: float) -> None:
        """Looks whether its time is up for something; called about once a second."""
        limits = self._host.listening
        if not self._session.known and (now - self._made_at) * 1000 > limits.unauthenticated_ms:
            self.refuse(ProtocolError(f"nothing was asked within {limits.unauthenticated_ms} ms"))
        elif not self._writable.is_set() and (now - self._stuck_at) * 1000 > limits.silent_ms:
            self.refuse(ProtocolError("it does not read its answers"))
            self.abort()
        elif self._reading and self._parser.begun and (now - self._frame_at) * 1000 > limits.frame_ms:
            self.refuse(ProtocolError(f"a frame was begun and not finished within {limits.frame_ms} ms"))
        elif not self._busy and not self._answering and now - self._heard_at > limits.tuning.kafka_idle_s:
            self.abort()

    # ---- who ----

    @property
    def known(self) -> bool:
        return self._session.known

    @property
    def peer(self) -> str:
        return peer_of(self._transport)

    # ---- the end ----

    def refuse(self, error: BaseException) -> None:
        """Close, as Kafka does: its protocol has no answer for this. The log says why."""
        if self._transport is None or self._transport.is_closing():
            return
        if isinstance(error, PostroomError):
            self._host.refused(self.peer, error)
        else:
            _log.error("a request of %s failed in an unexpected way", self.peer, exc_info=error)
        self._transport.close()

    async def stop(self) -> None:
        """What is being stored is answered, if it is soon; nothing new is begun."""
        self._stopping = True
        if self._tasks:
            self._tasks[0].cancel()
            await self._answers.join()
        if self._transport is not None:
            self._transport.close()
            await self._gone.wait()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


async def _run(answer: Coroutine[Any, Any, list[Piece] | None]) -> list[Piece] | None:
    return await answer
