"""Heartbeats of a remote client: through its loop if that turns, else on a connection of their own.

They come from a thread, since a handler may block the loop for minutes. So the loop is asked first, which
costs no second connection; if it does not take the beat within a moment, the thread connects by itself and
beats there from then on, until the loop turns again. A beat that was sent twice is harmless.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
import ssl
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from ...endpoint.operations import OPERATIONS
from ...endpoint.requests import Beats
from ...errors import BrokerUnavailable, ProtocolError
from ..frames import ERROR, Frame, FrameParser, encode
from ..messages import HELLO, Failure, Hello, Welcome, decode, encode_header, raised
from ..replies import unpacked

__all__ = ["Beater"]

_TURN_S = 0.25  # the loop takes a beat within this, or it is blocked; well below the shortest lease in use
_ANSWER_S = 10.0  # longest wait for an answer
_MAX_BYTES = 2**31 - 1
_GONE = (OSError, EOFError, BrokerUnavailable, ProtocolError)  # then the next one is asked


class Beater:
    """`through_loop` makes the call a link makes; `addresses` are where brokers may be found now."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        through_loop: Callable[[Beats], Coroutine[Any, Any, Any]],
        addresses: Callable[[], Sequence[str]],
        hello: Hello,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._loop, self._through_loop, self._addresses = loop, through_loop, addresses
        self._hello, self._tls = hello, tls
        self._own: _BlockingLink | None = None
        self._lock = threading.Lock()

    def beat(self, beats: Beats) -> Any:
        """Blocking; from any thread but the loop's."""
        taken, given_up = threading.Event(), threading.Event()

        async def ask() -> Any:
            if given_up.is_set():
                return None
            taken.set()
            return await self._through_loop(beats)

        asking = ask()
        try:
            answer = asyncio.run_coroutine_threadsafe(asking, self._loop)
        except RuntimeError:  # the loop was closed
            asking.close()
            raise BrokerUnavailable("the event loop of this connection is closed") from None
        if taken.wait(_TURN_S) and self._turns_until(answer):
            self._drop()
            return answer.result()
        given_up.set()
        answer.cancel()
        with self._lock:
            return self._beat_alone(beats)

    def _turns_until(self, answer: concurrent.futures.Future[Any]) -> bool:
        """Wait for the answer, while the loop turns: a handler may block it right after it took the beat."""
        while not answer.done():
            turned = threading.Event()
            try:
                self._loop.call_soon_threadsafe(turned.set)
            except RuntimeError:  # it was closed meanwhile
                return False
            if not turned.wait(_TURN_S):
                return False
            concurrent.futures.wait([answer], timeout=_TURN_S)
        return True

    def _beat_alone(self, beats: Beats) -> Any:
        why: Exception | None = None
        if self._own is not None:
            with suppress(*_GONE):
                return self._own.call(beats)
            self._forget()
        for address in self._addresses():
            try:
                self._own = _BlockingLink(address, self._hello, self._tls)
                return self._own.call(beats)
            except _GONE as error:
                why = error
                self._forget()
        raise BrokerUnavailable(f"no broker could be reached for a heartbeat ({why})")

    def _drop(self) -> None:
        if self._own is not None:
            with self._lock:
                self._forget()

    def _forget(self) -> None:
        if self._own is not None:
            self._own.close()
            self._own = None

    def close(self) -> None:
        with self._lock:
            self._forget()


class _BlockingLink:
    """One request at a time, without an event loop."""

    def __init__(self, address: str, hello: Hello, tls: ssl.SSLContext | None) -> None:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        self._socket = socket.create_connection((host, int(port)), timeout=_ANSWER_S)
        try:
            if tls is not None:
                self._socket = tls.wrap_socket(self._socket, server_hostname=host)
            self._parser = FrameParser(_MAX_BYTES)
            decode(self._ask(HELLO, encode_header(hello)).header, Welcome)
        except BaseException:
            self._socket.close()
            raise

    def call(self, beats: Beats) -> Any:
        operation = OPERATIONS["beat"]
        return unpacked(operation, self._ask(operation.kind, encode_header(beats)))

    def _ask(self, kind: int, header: bytes) -> Frame:
        self._socket.sendall(b"".join(encode(kind, 1, header)))
        while True:
            data = self._socket.recv(65536)
            if not data:
                raise EOFError("the broker closed the connection")
            for frame in self._parser.feed(data):
                if frame.flags & ERROR:
                    raise raised(decode(frame.header, Failure))
                if frame.kind == kind:
                    return frame

    def close(self) -> None:
        self._socket.close()
