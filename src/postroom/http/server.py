"""uvicorn in the event loop of a broker: it starts, and stops when it is told; signals are not its affair.

Bounds what uvicorn does not: a client has `HEADERS_S` to say what it wants, from the connection or from the
first byte of its next request. There are `_MOST` connections: whoever comes then takes the place of the one
that has asked for nothing, or is not known, for longest; if all of them are at work for somebody known, it is
told to come again, and `/health` is answered all the same. A request whose length is written in two ways is
refused: a proxy in front of us may believe the other. Puts the name of a client's certificate where `access`
finds it. Must never end the process, believe in headers about who a client is (`X-Forwarded-For`), or write
tokens into a log.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ..config import DEFAULTS, Limits, Tuning
from ..errors import BrokerUnavailable, UsageError, how_to_install
from ..tls import certificate_name
from ..wire.server.listening import HANDSHAKES, Acceptor, listen
from .access import CERTIFICATE_NAME, HEADERS, careful
from .failures import failure

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as missing:
    raise UsageError(
        f"HTTP needs a package that is not installed ({missing.name}): {how_to_install('server')}"
    ) from missing

if TYPE_CHECKING:
    from fastapi import FastAPI

    from .service import Service

__all__ = ["HttpServer", "serve_http"]

_log = logging.getLogger("postroom.http")

_MOST = 1000  # connections at once
_HEADER_BYTES = 32 << 10
_CROWDED = "this broker has no room for another request over HTTP: again in a moment"


class HttpServer:
    def __init__(self, app: FastAPI, server: uvicorn.Server, task: asyncio.Task[None], port: int) -> None:
        self._app, self._server, self.task, self.port = app, server, task, port

    async def stop(self, grace_s: float = 10.0) -> None:
        """Waiting polls end at once, other requests within the grace; then it is closed. Harmless twice."""
        self._app.state.service.stop()
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_s))
        self._server.should_exit = True
        await asyncio.wait((self.task,), timeout=grace_s + 2)
        if not self.task.done():
            self._server.force_exit = True
            self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def serve_http(
    app: FastAPI,
    host: str,
    port: int,
    tls: ssl.SSLContext | None = None,
    *,
    most: int | None = None,
    handshakes: int | None = None,
    limits: Limits = DEFAULTS,
) -> HttpServer:
    """Listens when it returns, for `most` connections. UsageError if the port is taken."""
    listening = listen(host, port, " for HTTP", "choose another http_port, or 0 for no HTTP")
    try:
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=limits.tuning.http.idle_s,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        config.load()
        config.ssl = tls
    except BaseException:
        for one in listening:
            one.close()
        raise
    server = _Server(config, app.state.service, most or _MOST, handshakes or HANDSHAKES, limits.tuning)
    task = asyncio.create_task(server.serve(sockets=listening))
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if task.done():
        task.result()
    return HttpServer(app, server, task, server.port)


class _Server(uvicorn.Server):
    """Without signals of its own, and with an event that says that it listens."""

    def __init__(
        self, config: uvicorn.Config, service: Service, most: int, handshakes: int, tuning: Tuning
    ) -> None:
        super().__init__(config)
        self._tuning = tuning
        self._handshakes = handshakes
        self.ready = asyncio.Event()
        self.port = 0
        self._quiet = _Quiet(service)
        self._room = _Room(most)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts as uvicorn's own does, with limits where a connection is accepted."""
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            raise UsageError("HTTP could not be started: the log has the reason")
        acceptor = Acceptor(
            sockets or [],
            self._protocol,
            tls=self.config.ssl,
            handshakes=self._handshakes,
            tuning=self._tuning.wire,
        )
        self.servers = [acceptor]  # type: ignore[list-item]
        self.port = acceptor.port
        logging.getLogger("uvicorn.error").addFilter(self._quiet)
        self.started = True
        self.ready.set()

    def _protocol(self) -> _Protocol:
        return _Protocol(
            self.config,
            self.server_state,
            self.lifespan.state,
            room=self._room,
            headers_s=self._tuning.http.headers_s,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown()
        logging.getLogger("uvicorn.error").removeFilter(self._quiet)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Quiet(logging.Filter):
    """A log filter: uvicorn warns of strangers' requests, which are logged as other refusals are."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        self._service.gatekeeper.refusals.say("http", _log, "a request over HTTP was refused: it is not HTTP")
        return False


class _Room:
    """The connections there are, those that were quiet for longest first."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._there: dict[_Protocol, None] = {}
        self._over: set[_Protocol] = set()  # came when all others were at work

    def enter(self, one: _Protocol) -> None:
        if len(self._there) >= self._most:
            stranger = next((other for other in self._there if not other.known), None)
            if stranger is None:
                self._over.add(one)
            else:
                self.leave(stranger)
                stranger.give_way()
        self._there[one] = None

    def heard(self, one: _Protocol) -> None:
        if self._there.pop(one, self) is None:
            self._there[one] = None

    def leave(self, one: _Protocol) -> None:
        self._there.pop(one, None)
        self._over.discard(one)

    def is_over(self, one: _Protocol) -> bool:
        """Returns whether it came when there was no room, and there still is none."""
        return one in self._over and len(self._there) > self._most


class _Strict(h11.Connection):
    """Refuses what a proxy may cut into requests in another place than we do."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = [name for name, _ in event.headers]
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version == b"1.0"):
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding together")
        return event


class _Protocol(H11Protocol):
    """One connection."""

    _late: asyncio.TimerHandle | None = None
    _name: str | None = None  # of its certificate

    def __init__(self, *args: Any, room: _Room, headers_s: float, **named: Any) -> None:
        """`headers_s`: the head of a request has to be there by then."""
        self._headers_s = headers_s
        super().__init__(*args, **named)
        self.conn = _Strict(h11.SERVER, _HEADER_BYTES)
        self._room, self._next, self.app = room, self.app, self._answer

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        if self._name is not None:
            scope[CERTIFICATE_NAME] = self._name
        if self._room.is_over(self) and scope["path"] != "/health":
            response = failure(BrokerUnavailable(_CROWDED))
            response.headers["Connection"] = "close"
            await response(scope, receive, careful(send))
        else:
            await self._next(scope, receive, send)

    @property
    def known(self) -> bool:
        """Returns whether it is at work for somebody who said who it is."""
        return self._at_work and "principal" in self.scope.get("state", {})

    def give_way(self) -> None:
        with contextlib.suppress(OSError):
            self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._room.enter(self)
        self._name = certificate_name(transport.get_extra_info("peercert"))
        self._expect()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._room.heard(self)
        if self._late is None and not self._at_work:
            self._expect()
        super().data_received(data)
        if self._at_work:
            self._unexpect()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._unexpect()  # from now on the idle time counts

    def connection_lost(self, exc: Exception | None) -> None:
        self._unexpect()
        self._room.leave(self)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self._at_work:  # what comes of the request so far has nobody to go to
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = b"this is not a request that can be understood"
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"connection", b"close"), *HEADERS]
        headers.append((b"content-length", b"%d" % len(body)))
        with contextlib.suppress(h11.LocalProtocolError):  # an answer was begun before
            for event in (
                h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _at_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self) -> None:
        self._late = self.loop.call_later(self._headers_s, self._too_late)

    def _unexpect(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if not self._at_work and self.transport is not None:
            with contextlib.suppress(OSError):
                self.transport.close()
