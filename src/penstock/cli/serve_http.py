"""HTTP beside a served broker, in the same event loop: uvicorn, if `penstock[server]` is installed.

Decides how it starts and stops. Signals are the broker's: uvicorn must never install handlers of its own, and
must never end the process because a port is taken.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from ..broker.embedded import Broker
from ..broker.gatekeeper import Gatekeeper
from ..errors import UsageError
from ..serve_settings import ServeSettings

__all__ = ["HttpServer", "start_http"]

log = logging.getLogger("penstock.serve")

_PACKAGES = ("fastapi", "starlette", "uvicorn", "prometheus_client", "penstock.http")


class HttpServer:
    def __init__(self, server: Any, task: asyncio.Task[None], url: str) -> None:
        self._server = server
        self.task = task
        self.url = url

    def stop(self) -> None:
        """Take no more; `ended` waits for what is under way."""
        self._server.should_exit = True

    async def ended(self, grace_ms: int) -> None:
        await asyncio.wait([self.task], timeout=grace_ms / 1000)
        if not self.task.done():
            self._server.force_exit = True
            self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def start_http(broker: Broker, gatekeeper: Gatekeeper, settings: ServeSettings) -> HttpServer | None:
    """None: it is switched off, or not installed. UsageError if the port is taken."""
    if not settings.http_port:
        return None
    try:
        import uvicorn

        make_app = import_module("penstock.http.app").make_app
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith(_PACKAGES):
            raise
        log.info("no HTTP: penstock[server] is not installed; http_port = 0 says that this is meant")
        return None
    listening = _listen(settings.http_host, settings.http_port)
    try:
        config = uvicorn.Config(
            make_app(broker, gatekeeper, settings),
            log_config=None,
            access_log=False,
            ssl_certfile=settings.tls_cert or None,
            ssl_keyfile=settings.tls_key or None,
            timeout_graceful_shutdown=max(1, settings.grace_ms // 1000),
        )
    except BaseException:
        listening.close()
        raise
    server = _quiet(uvicorn.Server)(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    ready = asyncio.create_task(server.ready.wait())
    await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
    ready.cancel()
    if task.done():
        task.result()
    scheme = "https" if settings.tls else "http"
    host = f"[{settings.http_host}]" if ":" in settings.http_host else settings.http_host
    return HttpServer(server, task, f"{scheme}://{host}:{settings.http_port}")


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise UsageError(
            f"cannot listen for HTTP on {host}:{port} ({error.strerror or error}): choose another http_port, "
            "or 0 for no HTTP"
        ) from error


def _quiet(kind: Any) -> Any:
    """uvicorn's server without signals of its own, and with an event that says that it listens."""

    class Server(kind):  # type: ignore[misc]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.ready = asyncio.Event()

        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            self.ready.set()

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        def install_signal_handlers(self) -> None:
            """Of older versions."""

    return Server
