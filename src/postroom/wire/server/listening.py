"""Listening: connections are accepted here, for the wire and for HTTP, one socket at a time.

Bounds what event loops leave open: how many TLS handshakes are under way and for how long (the oldest makes
room for the newest, since an honest one takes milliseconds), and what happens when the process has no file
left for another connection: that is said in the log, and the port rests for a moment, so that neither clients
wonder nor a core spins. An answer that is written in pieces leaves at once (TCP_NODELAY, which connections
inherit): event loops see to that only for sockets that name their protocol, and else the second piece waits
40 ms for the acknowledgement of the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Protocol

from ...config import DEFAULTS, WireTuning
from ...errors import UsageError

__all__ = [
    "HANDSHAKES",
    "Acceptor",
    "Listening",
    "Stoppable",
    "certificate_name",
    "end_all",
    "from_loopback",
    "listen",
    "peer_of",
    "told_address",
]


_log = logging.getLogger("postroom.wire")

HANDSHAKES = 256  # TLS handshakes under way, of one port
_BACKLOG = 1024
_AT_ONCE = 64  # accepted in one turn of the loop, at most
_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # such as IPv6 where there is none
_NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def listen(host: str, port: int, what: str, advice: str) -> list[socket.socket]:
    """Returns sockets that listen on that host; "": on all of this machine. UsageError if none can."""
    found: list[socket.socket] = []
    failed: OSError | None = None
    try:
        flags = 0 if host else socket.AI_PASSIVE
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)
        for family, _, _, _, address in dict.fromkeys(places):
            try:
                found.append(socket.create_server(address[:2], family=family, backlog=_BACKLOG))
                found[-1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                failed = error
            if port == 0 and found:
                break  # another would have another port
        if not found:
            raise failed or OSError("it has no address")
    except OSError as error:
        for one in found:
            one.close()
        raise UsageError(
            f"cannot listen{what} on {host}:{port} ({error.strerror or error}): {advice}"
        ) from error
    return found


class Acceptor:
    """Accepts until it is closed. Used in the event loop only."""

    def __init__(
        self,
        sockets: list[socket.socket],
        protocol: Callable[[], asyncio.Protocol],
        *,
        tls: ssl.SSLContext | None = None,
        handshakes: int = HANDSHAKES,
        handshake_s: float | None = None,
        tuning: WireTuning = DEFAULTS.tuning.wire,
    ) -> None:
        self.port = int(sockets[0].getsockname()[1])
        self._protocol, self._tls = protocol, tls
        self._handshakes, self._tuning = handshakes, tuning
        self._handshake_s = tuning.handshake_s if handshake_s is None else handshake_s
        self._loop = asyncio.get_running_loop()
        self._begun: dict[asyncio.Task[None], socket.socket] = {}  # the oldest first
        self._said_at = float("-inf")
        self._accepting = [self._begin_accepting(one) for one in sockets]

    def _begin_accepting(self, listening: socket.socket) -> asyncio.Task[None]:
        listening.setblocking(False)
        task = self._loop.create_task(self._accept(listening))
        task.add_done_callback(lambda _: listening.close())
        return task

    async def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                for _ in range(_AT_ONCE):
                    accepted, _address = await self._loop.sock_accept(listening)
                    self._begin(accepted)
                await asyncio.sleep(0)  # whoever waits is accepted without a turn of the loop
            except OSError as error:
                self._failed(error)
                await asyncio.sleep(0 if error.errno == errno.ECONNABORTED else self._tuning.no_files_s)

    def _failed(self, error: OSError) -> None:
        """Most often no file is left; else it was one connection that ended before it was accepted."""
        if error.errno not in _NO_FILES:
            _log.debug("a connection could not be accepted: %s", error)
        elif self._loop.time() - self._said_at >= self._tuning.no_files_told_s:
            self._said_at = self._loop.time()
            _log.error(
                "no further connection can be accepted (%s): raise the limit of open files (ulimit -n, "
                "LimitNOFILE), or lower max_connections",
                error.strerror,
            )

    def _begin(self, accepted: socket.socket) -> None:
        if self._tls is not None and len(self._begun) >= self._handshakes:
            _end(self._begun.pop(next(iter(self._begun))))
        task = self._loop.create_task(self._connect(accepted))
        self._begun[task] = accepted
        task.add_done_callback(lambda done: self._begun.pop(done, None))

    async def _connect(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._protocol,
                accepted,
                ssl=self._tls,
                ssl_handshake_timeout=self._handshake_s if self._tls is not None else None,
            )
        except OSError as error:  # an SSLError is one, too
            _log.debug("a connection ended before it began: %s", error)
        except Exception:
            _log.exception("a connection could not be begun")
            _end(accepted)

    # ---- the end ----

    def close(self) -> None:
        """Accept no more. Connections that were accepted go on; handshakes end. Harmless twice."""
        for task in self._accepting:
            task.cancel()
        for accepted in self._begun.values():
            _end(accepted)

    async def wait_closed(self) -> None:
        await asyncio.gather(*self._accepting, *self._begun, return_exceptions=True)


def _end(accepted: socket.socket) -> None:
    """Both sides find it ended; whoever has the socket by now closes it."""
    with contextlib.suppress(OSError):  # it has ended already
        accepted.shutdown(socket.SHUT_RDWR)


@dataclass(frozen=True, slots=True)
class Listening:
    """The settings of a server of brokers, and what it gives everybody together."""

    host: str = "127.0.0.1"
    port: int = 7070  # 0: any that is free
    zone: str = ""
    advertise: str = ""  # host:port that clients are told; "": made from host and port
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    max_connections: int = 10_000
    handshakes: int = 256  # of TLS, under way
    max_frame_bytes: int = 16 * 1024 * 1024
    first_frame_bytes: int = 64 * 1024  # before a client is known
    unauthenticated_ms: int = 10_000  # a connection has to be greeted within this
    frame_ms: int = 30_000  # a frame that has begun has to be whole within this
    silent_ms: int = 60_000  # a connection on which nothing came for so long is closed
    requests_at_once: int = 512  # of one connection; more of them wait in its socket
    polls_at_once: int = 8192  # the same for those that wait for messages
    request_bytes: int = 64 * 1024 * 1024  # of one connection, under way
    answer_bytes: int = 64 * 1024 * 1024  # of one connection: answers being made, or not read yet
    one_answer_bytes: int = 16 * 1024 * 1024  # whatever is asked for; one batch always fits
    all_answer_bytes: int = 256 * 1024 * 1024  # of all connections; of one principal half of it
    answer_wait_ms: int = 10_000  # for room; then the client is told to ask again
    slow_reader_ms: int = 10_000  # who has not read its answers for so long is cut off if others need room
    all_request_bytes: int = 256 * 1024 * 1024  # of all connections, under way
    ask_before_ms: int = 3_000  # before a lease ends its holder is asked (R19)
    tuning: WireTuning = DEFAULTS.tuning.wire


# ---- connections of any server ----


def peer_of(transport: asyncio.BaseTransport | None) -> str:
    """Who is at the other end, for the log."""
    name = transport.get_extra_info("peername") if transport is not None else None
    return f"{name[0]}:{name[1]}" if name else "unknown"


def from_loopback(transport: asyncio.BaseTransport | None) -> bool:
    name = transport.get_extra_info("peername") if transport is not None else None
    return name is not None and ip_address(name[0].partition("%")[0]).is_loopback


def certificate_name(transport: asyncio.BaseTransport | None) -> str | None:
    """The common name of the client's certificate, which the server has verified."""
    found = transport.get_extra_info("peercert") if transport is not None else None
    pairs = [pair for group in (found or {}).get("subject", ()) for pair in group]
    return next((value for name, value in pairs if name == "commonName"), None)


def told_address(listening: Listening, port: int) -> str:
    """Where clients are told to find a server: host:port."""
    if listening.advertise:
        return listening.advertise
    host = socket.getfqdn() if _is_any(listening.host) else listening.host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_any(host: str) -> bool:
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return not host


class Stoppable(Protocol):
    """A connection, as far as its end is concerned."""

    async def stop(self) -> None:
        """Let what is under way end, then close."""

    def abort(self) -> None: ...


async def end_all(connections: Collection[Stoppable], grace_ms: int) -> None:
    """Stop all of these; those that take longer than the grace are cut off."""
    stopping = [asyncio.create_task(one.stop()) for one in connections]
    if stopping:
        await asyncio.wait(stopping, timeout=grace_ms / 1000)
    for connection in list(connections):
        connection.abort()
    for task in stopping:
        task.cancel()
    await asyncio.gather(*stopping, return_exceptions=True)
