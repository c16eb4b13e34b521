"""uvicorn in the event loop of a broker: it starts, and stops when it is told; signals are not its affair.

Bounds what uvicorn does not: a client has `HEADERS_S` to say what it wants, from the connection or from the
first byte of its next request. Puts the name of a client's certificate where `access` finds it. Must never
end the process, believe in headers about who a client is (`X-Forwarded-For`), or write tokens into a log.
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

from ..errors import UsageError
from ..install import how_to_install
from ..tls import certificate_name
from .access import CERTIFICATE_NAME

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as missing:
    raise UsageError(
        f"HTTP needs a package that is not installed ({missing.name}): {how_to_install('server')}"
    ) from missing

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["HEADERS_S", "HttpServer", "serve_http"]

_log = logging.getLogger("postroom.http")

HEADERS_S = 10.0
_IDLE_S = 30  # between two requests of a connection
_MOST = 1000  # connections at once, or requests; beyond it 503
_HEADER_BYTES = 32 << 10


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


async def serve_http(app: FastAPI, host: str, port: int, tls: ssl.SSLContext | None = None) -> HttpServer:
    """Listens when it returns. UsageError if the port is taken."""
    listening = _listen(host, port)
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
            limit_concurrency=_MOST,
            timeout_keep_alive=_IDLE_S,
            h11_max_incomplete_event_size=_HEADER_BYTES,
        )
        config.load()
        config.ssl = tls
    except BaseException:
        listening.close()
        raise
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if task.done():
        task.result()
    return HttpServer(app, server, task, listening.getsockname()[1])


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"cannot listen for HTTP on {host}:{port} ({error.strerror or error}): choose another http_port, "
            "or 0 for no HTTP"
        ) from error


class _Server(uvicorn.Server):
    """Without signals of its own, and with an event that says that it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Protocol(H11Protocol):
    """One connection."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        name = certificate_name(transport.get_extra_info("peercert"))
        if name is not None:
            self.app = _named(self.app, name)
        self._expect()

    def data_received(self, data: bytes) -> None:
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
        super().connection_lost(exc)

    @property
    def _at_work(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self) -> None:
        self._late = self.loop.call_later(HEADERS_S, self._too_late)

    def _unexpect(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self) -> None:
        self._late = None
        if not self._at_work and self.transport is not None:
            with contextlib.suppress(OSError):
                self.transport.close()


def _named(app: Any, name: str) -> Any:
    async def with_name(scope: Any, receive: Any, send: Any) -> None:
        scope[CERTIFICATE_NAME] = name
        await app(scope, receive, send)

    return with_name
