"""The app: what is served over HTTP beside a broker, put together behind one door.

    /health /ready          without authentication
    /metrics                for Prometheus: any principal
    /api/v1/…               topics, groups, routes, shards, rates, brokers, sending and polling
    /docs /openapi.json     what there is; without authentication

The handlers are in modules of their own. The door decides who comes in, how large, how long; and counts it.
Order: the principal first, so that nobody unknown can send a body; then the body, chunk by chunk, within
limits of its size, of its time and of all bodies together; then the handler, within the time of a request.
Large answers are written piece by piece, as the client reads, within a time and within the broker's room for
all answers.
Whatever goes wrong in there is answered in the one shape of `failures`. What needs no principal is in
`service.OPEN`. A body that is too large is answered at once, and the rest of it read and thrown away, up to a
limit: whoever sends before it reads would find a reset otherwise, and no reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..broker.access import Gatekeeper
from ..broker.exposition import Sampler
from ..broker.served import Servable, unmeasured
from ..endpoint.asker import asked_by
from ..errors import AccessError, BrokerUnavailable, PostroomError, UsageError, how_to_install
from ..model.access import Principal
from ..model.audit import Asker
from ..wire.server.answers import Share, no_room
from ..wire.server.server import WireServer

try:
    from fastapi import Depends, FastAPI, Request, Response
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from fastapi.security import HTTPBearer
    from starlette.exceptions import HTTPException
except ModuleNotFoundError as missing:
    raise UsageError(
        f"HTTP needs a package that is not installed ({missing.name}): {how_to_install('server')}"
    ) from missing

from . import reference
from .access import LOGGED_IN, authenticate, careful
from .administration import groups_router, queue_router, topics_router
from .failures import failure, plain_failure
from .messages import SCHEMAS, polling_router, sending_router
from .monitoring import Metrics, Readiness, health_router, metrics_router
from .service import OPEN, Service

__all__ = ["API", "OPEN", "Door", "HttpLimits", "make_app"]

_log = logging.getLogger("postroom.http")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")

API = "/api/v1"

_PIECE_BYTES = 64 << 10

_ABOUT = 'Every error is `{"error": {"code", "message", "retriable", "details"}}`.'


def make_app(
    broker: Servable,
    gatekeeper: Gatekeeper,
    *,
    server: WireServer | None = None,
    limits: HttpLimits | None = None,
) -> FastAPI:
    """The broker should be a measured one, and the same as the server's: then /metrics counts both."""
    service = Service(broker, gatekeeper, server)
    app = FastAPI(
        title="Postroom",
        description=_ABOUT,
        version="1",
        lifespan=service.lifespan,
        docs_url=None,  # a page of our own: `reference`
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.service = service
    app.state.readiness = Readiness(service)
    app.state.metrics = Metrics(service, Sampler(unmeasured(service.broker)))
    app.add_middleware(Door, service=service, limits=limits or HttpLimits())
    for kind in (PostroomError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _failed)
    app.include_router(health_router)
    app.include_router(metrics_router)
    app.include_router(reference.router)
    shown = [Depends(HTTPBearer(auto_error=False))]  # for /docs: who it is was decided at the door
    for router in (topics_router, groups_router, sending_router, polling_router, queue_router):
        app.include_router(router, prefix=API, dependencies=shown)
    setattr(app, "openapi", partial(_described, app.openapi))  # noqa: B010
    return app


def _described(made: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found = made()
    found["components"]["schemas"].update(SCHEMAS)
    return found


async def _failed(request: Request, error: Exception) -> JSONResponse:
    return failure(error)


# ---- the door ----


@dataclass(frozen=True, slots=True)
class HttpLimits:
    body_bytes: int = 16 << 20
    other_bytes: int = 4 << 20  # of a body that sends no messages
    path_bytes: int = 4096  # of a path, and of what follows it: names are short
    all_bodies_bytes: int = 128 << 20  # of requests under way
    body_s: float = 30.0  # for a body to arrive
    request_s: float = 120.0  # for everything
    drained_bytes: int = 64 << 20  # of a body that was refused, read so that its sender hears why
    drained_s: float = 5.0
    answer_s: float = 60.0  # of that, for an answer to be read


class _Refused(Exception):
    def __init__(self, response: Response) -> None:
        self.response = response


class Door:
    """ASGI middleware."""

    def __init__(self, app: App, service: Service, limits: HttpLimits) -> None:
        self._app, self._service, self._limits = app, service, limits
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def answer(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await carefully(message)

        carefully = careful(send)
        share = self._service.answers.share("")
        try:
            async with asyncio.timeout(self._limits.request_s):
                await self._serve(scope, receive, self._in_pieces(scope, answer), share)
        except Exception as error:
            if status:
                _log.warning("an answer over HTTP was cut off: %r", error)
                raise
            self._say(scope, error)
            response = self._response_for(error)
            if response.status_code == 413:
                await self._refuse_body(response, scope, receive, answer)
            else:
                await response(scope, receive, answer)
        finally:
            share.hold(-share.held)
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._service.figures.http.add((method, _route(scope), str(status or "cut off")))

    def _in_pieces(self, scope: Scope, send: Send) -> Send:
        """Send a large body as fast as it is read, and no faster: nobody's memory is to be filled by it.

        Its head waits for it, so that there may still be no room.
        """
        head: list[MutableMapping[str, Any]] = []

        async def pieces(message: MutableMapping[str, Any]) -> None:
            if message["type"] != "http.response.body":
                head.append(message)
                return
            body: bytes = message.get("body", b"")
            if len(body) > _PIECE_BYTES:
                self._hold(scope["state"]["share"] if "state" in scope else None, len(body))
            for one in head:
                await send(one)
            head.clear()
            async with asyncio.timeout(self._limits.answer_s):
                for at in range(_PIECE_BYTES, len(body), _PIECE_BYTES):
                    piece = body[at - _PIECE_BYTES : at]
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                rest = body[(max(0, len(body) - 1) // _PIECE_BYTES) * _PIECE_BYTES :]
                await send({**message, "body": rest})

        return pieces

    @staticmethod
    def _hold(share: Share | None, size: int) -> None:
        if share is None:
            return
        more = size - share.held
        if not share.held and not share.fits(size):
            raise no_room()
        share.hold(more)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, share: Share) -> None:
        if scope["path"] in self._service.open:
            await self._app(scope, receive, send)
            return
        if self._service.stopping:
            raise BrokerUnavailable("this broker is stopping: ask another, or again in a moment")
        if len(scope["path"]) + len(scope.get("query_string", b"")) > self._limits.path_bytes:
            sentence = f"a path has at most {self._limits.path_bytes:,} bytes: names are shorter than that"
            raise _Refused(plain_failure(414, "too_large", sentence))
        scope.setdefault("state", {})
        principal = await authenticate(scope, self._service.gatekeeper, self._service.logins)
        scope["state"]["principal"] = principal
        scope["state"]["share"], share.principal = share, principal.name
        held = 0

        def hold(size: int) -> None:
            nonlocal held
            held += size
            self._held_bytes += size

        try:
            body = await self._body(scope, receive, hold)
            with asked_by(_asker(scope, principal)):
                await self._app(scope, _replay(body, receive), send)
        finally:
            self._held_bytes -= held

    async def _body(self, scope: Scope, receive: Receive, hold: Callable[[int], None]) -> bytes:
        limits, chunks, size = self._limits, list[bytes](), 0
        expected = _said_bytes(dict(scope["headers"]))
        most = limits.body_bytes if scope["path"].endswith("/messages") else limits.other_bytes
        self._refuse_large(expected, self._held_bytes + expected, most)
        try:
            async with asyncio.timeout(limits.body_s):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        raise _Refused(plain_failure(408, "timeout", "the request was not sent to its end"))
                    chunk = message.get("body", b"")
                    size += len(chunk)
                    hold(len(chunk))
                    self._refuse_large(size, self._held_bytes, most)
                    chunks.append(chunk)
                    if not message.get("more_body", False):
                        return b"".join(chunks)
        except TimeoutError:
            sentence = f"the request's body did not arrive within {limits.body_s:g} seconds"
            raise _Refused(plain_failure(408, "timeout", sentence, retriable=True)) from None

    async def _refuse_body(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        """The whole answer first; its end, with which the connection is closed, when the body has come."""

        async def without_end(message: MutableMapping[str, Any]) -> None:
            await send({**message, "more_body": True} if message["type"] == "http.response.body" else message)

        await response(scope, receive, without_end)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._limits.drained_s):
                await self._drain(scope, receive)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self, scope: Scope, receive: Receive) -> None:
        headers, left = dict(scope["headers"]), self._limits.drained_bytes
        if _said_bytes(headers) > left or b"expect" in headers:  # the latter waits for our word
            return
        while left > 0:
            message = await receive()
            left -= len(message.get("body", b""))
            if message["type"] != "http.request" or not message.get("more_body", False):
                return

    def _say(self, scope: Scope, error: Exception) -> None:
        if isinstance(error, AccessError):
            client = (scope.get("client") or ("unknown",))[0]
            said = "a request over HTTP from %s was refused: %s"
            self._service.gatekeeper.refusals.say("http", _log, said, client, error)

    def _refuse_large(self, size: int, held: int, most: int) -> None:
        limits = self._limits
        if size > most:
            sentence = f"this request has at most {most:,} bytes: send fewer messages, or less, at a time"
            raise _Refused(plain_failure(413, "too_large", sentence, details={"limit": most}))
        if held > limits.all_bodies_bytes:
            raise BrokerUnavailable("too much is being sent to this broker over HTTP: again in a moment")

    def _response_for(self, error: Exception) -> Response:
        if isinstance(error, _Refused):
            return error.response
        if isinstance(error, TimeoutError):
            sentence = f"this took longer than {self._limits.request_s:g} seconds; it may yet be done"
            return plain_failure(504, "timeout", sentence)
        if isinstance(error, PostroomError) and self._service.stopping:
            return failure(BrokerUnavailable(f"this broker is stopping: {error}"))
        return failure(error)


def _asker(scope: Scope, principal: Principal) -> Asker:
    """Returns whom the audit log names: a browser that has logged in comes through the console."""
    client = scope.get("client")
    address = "unknown" if client is None else f"{client[0]}:{client[1]}"
    return Asker(principal.name, "console" if scope["state"].get(LOGGED_IN) else "http", address)


def _said_bytes(headers: dict[bytes, bytes]) -> int:
    said = headers.get(b"content-length", b"0")
    return int(said) if said.isdigit() else 0


def _route(scope: Scope) -> str:
    """Returns the path as its handler was registered, whatever names are in it."""
    found = getattr(scope.get("route"), "path", None)
    if found is None:
        return "(none)"
    return f"{API}{found}" if scope["path"].startswith(f"{API}/") and not found.startswith(API) else found


def _replay(body: bytes, receive: Receive) -> Receive:
    """Returns a `receive` that gives what was read already, and then what comes: that the client has gone."""
    told = False

    async def again() -> MutableMapping[str, Any]:
        nonlocal told
        if told:
            return await receive()
        told = True
        return {"type": "http.request", "body": body, "more_body": False}

    return again
