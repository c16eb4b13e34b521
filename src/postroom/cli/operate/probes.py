"""What a worker answers over HTTP: whether it lives, whether its handlers run, and its figures.

    /healthz (/health)   the process lives
    /readyz  (/ready)    every handler's consumer is connected; else 503, with what it waits for
    /metrics             figures for Prometheus

Small on purpose: a worker has no use for a web framework, and the base install has none. One request for each
connection, GET and HEAD only, a bounded head, and a bounded number of connections; who is slow is cut off.
There is no token: what is shown are names of topics, groups and handlers, and numbers. So it listens on this
machine alone unless it is told otherwise. Must never show an address of the queue, and never keep a worker
from stopping.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from http import HTTPStatus
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self

from ...config import DEFAULTS, HttpTuning
from ...metrics import CONTENT_TYPE
from ...wire.server.listening import listen

__all__ = ["Door", "Probed"]

log = logging.getLogger("postroom.worker")

_MOST = 64  # connections at once
_HEAD_BYTES = 8 << 10
_HEALTH, _READY, _METRICS = ("/healthz", "/health"), ("/readyz", "/ready"), ("/metrics",)


class Probed(Protocol):
    """A worker that can be asked how it is doing."""

    async def health(self) -> dict[str, Any]:
        """How it is doing; `ok` says whether all of its handlers run."""

    async def text(self) -> str:
        """Its figures for Prometheus."""


class _Answer(NamedTuple):
    status: HTTPStatus
    kind: str
    body: bytes


class Door:
    """It listens while its block runs. UsageError if the port is taken."""

    def __init__(
        self, probed: Probed, host: str, port: int, tuning: HttpTuning = DEFAULTS.tuning.http
    ) -> None:
        self._probed, self._host, self._port, self._tuning = probed, host, port, tuning
        self._servers: list[asyncio.Server] = []
        self._open: set[asyncio.Task[None]] = set()
        self.port = 0  # where it listens

    async def __aenter__(self) -> Self:
        sockets = listen(self._host, self._port, " for HTTP", "choose another --http-port")
        for one in sockets:
            self._servers.append(await asyncio.start_server(self._accept, sock=one, limit=_HEAD_BYTES))
        self.port = int(sockets[0].getsockname()[1])
        log.info("health, readiness and metrics on http://%s:%d", self._host, self.port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.close()
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._open) >= _MOST:
            writer.transport.abort()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(self._tuning.headers_s):
                head = await reader.readuntil(b"\r\n\r\n")
                answer = await self._answer(head)
                writer.write(_written(answer, with_body=not head.startswith(b"HEAD ")))
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # it was slow, is gone, or said too much: nobody to tell
        finally:
            with contextlib.suppress(OSError):
                writer.transport.abort()

    async def _answer(self, head: bytes) -> _Answer:
        method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if path not in (*_HEALTH, *_READY, *_METRICS):
            return _said(HTTPStatus.NOT_FOUND, {"error": "ask for /healthz, /readyz or /metrics"})
        if method not in ("GET", "HEAD"):
            return _said(HTTPStatus.METHOD_NOT_ALLOWED, {"error": "ask with GET"})
        if path in _HEALTH:
            return _said(HTTPStatus.OK, {"status": "ok"})
        try:
            if path in _METRICS:
                return _Answer(HTTPStatus.OK, CONTENT_TYPE, (await self._probed.text()).encode())
            health = await self._probed.health()
        except Exception:  # such as a connection that is being closed
            log.exception("a probe could not be answered")
            return _said(HTTPStatus.SERVICE_UNAVAILABLE, {"error": "the worker's log has more"})
        return _said(HTTPStatus.OK if health["ok"] else HTTPStatus.SERVICE_UNAVAILABLE, health)


def _said(status: HTTPStatus, body: dict[str, Any]) -> _Answer:
    return _Answer(status, "application/json", json.dumps(body).encode() + b"\n")


def _written(answer: _Answer, *, with_body: bool) -> bytes:
    head = (
        f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
        f"Content-Type: {answer.kind}\r\nContent-Length: {len(answer.body)}\r\n"
        "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (answer.body if with_body else b"")
