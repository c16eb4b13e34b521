"""A served queue, fuzzed with a token in hand: requests of the protocol, and HTTP as bytes and as bodies.

A real broker on a queue in memory, made anew every `_RENEWED` requests. Four principals have one right each
(or none); a fifth may do everything. Whatever they send, only errors of our tree may come out: anything else
would be a traceback in a broker's log.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from msgspec import inspect
from uvicorn.server import ServerState

from postroom.address import parse
from postroom.broker.access import Gatekeeper, new_token
from postroom.broker.broker import Broker, open_endpoint
from postroom.clock import SystemClock
from postroom.config import DEFAULTS
from postroom.endpoint.operations import OPERATIONS
from postroom.errors import PostroomError
from postroom.http.app import make_app
from postroom.http.server import _Protocol, _Room
from postroom.model.access import Principal, hash_of, parse_permissions
from postroom.model.messages.batch import BatchBuilder
from postroom.wire import messages as m
from postroom.wire.replies import packed
from postroom.wire.server.answers import Answers
from postroom.wire.server.listening import Listening
from postroom.wire.server.session import Session

__all__ = ["SERVED_SEEDS", "http_bodies", "http_bytes", "prepare", "sessions"]

_RIGHTS = {
    "none": (),
    "sender": ("send:orders",),
    "consumer": ("consume:orders",),
    "manager": ("manage:orders",),
    "admin": ("send:*", "consume:*", "manage:*"),
}
_PATIENCE_S = 0.05  # a request that waits is given up after it, as by a client that has gone
_RENEWED = 2_000
_OPERATIONS = tuple(OPERATIONS.values())
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE")
_FINE = 500  # what is at fault from here up is the broker,
_BUSY = (503, 507)  # unless it says that it has no room


@dataclass
class _Queue:
    """What is fuzzed, and the loop that it lives in: one for a process."""

    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    asked: int = 0
    broker: Broker | None = None
    ending: AsyncExitStack = field(default_factory=AsyncExitStack)
    sessions: list[Session] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    app: Any = None
    paths: list[str] = field(default_factory=list)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    async def ready(self) -> None:
        if self.broker is None:
            await self._open()
        self.asked += 1

    async def renew(self) -> None:
        if self.asked >= _RENEWED:
            self.asked = 0
            await self.ending.aclose()
            await self._open()

    async def _open(self) -> None:
        self.broker = broker = await open_endpoint(parse("memory://"))
        self.ending = AsyncExitStack()
        self.ending.push_async_callback(broker.close)
        gatekeeper = Gatekeeper(broker.store, broker.in_thread, SystemClock())
        self.tokens, self.sessions = [], []
        for name, rights in _RIGHTS.items():
            principal = Principal(name, parse_permissions(rights))
            self.tokens.append(new_token())
            broker.store.access.add(principal, hash_of(self.tokens[-1]))
            self.sessions.append(_session(broker, gatekeeper, principal))
        await self.restored()
        self.app = make_app(broker, gatekeeper)
        await self.ending.enter_async_context(self.app.router.lifespan_context(self.app))
        self.paths = sorted(self.app.openapi()["paths"])

    async def restored(self) -> None:
        """The topic and the group that samples name are there, also after they were deleted."""
        for name, request in (
            ("create_topic", ["orders", {}, 1, True]),
            ("create_group", ["orders", "orders", {}]),
        ):
            try:
                await _ask(self.sessions[-1], name, request)
            except PostroomError:
                pass  # it is there


def _session(broker: Broker, gatekeeper: Gatekeeper, principal: Principal) -> Session:
    limits = Listening(one_answer_bytes=1 << 20)
    share = Answers(limits.all_answer_bytes, limits.answer_bytes, limits.answer_wait_ms).share(principal.name)
    return Session(broker, gatekeeper, principal, "fuzzer", share, limits)


async def _ask(session: Session, name: str, request: list[Any]) -> Any:
    operation = OPERATIONS[name]
    return await session.call(operation, m.decode(m.encode_header(request), operation.request), b"")


_queue = _Queue()


def prepare() -> None:
    """Makes the queue anew if it is time, so that no input is blamed for it."""
    _queue.run(_queue.renew())


# ---- the protocol ----


def sessions(data: bytes) -> None:
    """Three bytes choose principal, operation and the length of the header; then header and body."""
    if len(data) >= 4:
        _queue.run(_in_session(data))


async def _in_session(data: bytes) -> None:
    await _queue.ready()
    session = _queue.sessions[data[0] % len(_queue.sessions)]
    operation = _OPERATIONS[data[1] % len(_OPERATIONS)]
    end = 4 + int.from_bytes(data[2:4])
    try:
        request = m.decode(data[4:end], operation.request)
        async with asyncio.timeout(_PATIENCE_S):
            reply = await session.call(operation, request, data[end:])
        header, _ = packed(operation, reply)
        m.encode_header(header)
    except (PostroomError, TimeoutError):
        return
    if operation.name in ("delete_topic", "delete_group"):
        await _queue.restored()


# ---- HTTP ----


def http_bodies(data: bytes) -> None:
    """Three bytes choose principal, method and path; a line has what fills the path, the rest is the body."""
    if len(data) >= 3:
        _queue.run(_with_body(data))


async def _with_body(data: bytes) -> None:
    await _queue.ready()
    token = _queue.tokens[data[0] % len(_queue.tokens)]
    template = _queue.paths[data[2] % len(_queue.paths)]
    line, _, body = data[3:].partition(b"\n")
    filled, _, query = line.partition(b"?")
    path = template
    for part, value in zip(_names(template), [*filled.split(b"/"), *([b"orders"] * 9)], strict=False):
        path = path.replace(part, value.decode("latin-1") or "orders")
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http",
        "method": _METHODS[data[1] % len(_METHODS)], "path": path, "raw_path": path.encode("latin-1"),
        "root_path": "", "query_string": query, "client": ("127.0.0.1", 1), "server": ("localhost", 80),
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json"),
                    (b"authorization", b"Bearer " + token.encode())],
    }  # fmt: skip
    sent: list[dict[str, Any]] = []
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        return pieces.pop() if pieces else {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    try:
        async with asyncio.timeout(_PATIENCE_S):
            await _queue.app(scope, receive, send)
    except TimeoutError:
        return
    status = next((one["status"] for one in sent if one["type"] == "http.response.start"), 0)
    assert status < _FINE or status in _BUSY, (scope["method"], path, body, sent)
    if scope["method"] == "DELETE":
        await _queue.restored()


def _names(template: str) -> list[str]:
    return [part for part in template.split("/") if part.startswith("{")]


def http_bytes(data: bytes) -> None:
    """A connection as it comes from the network; `TOKEN` in it becomes one that may do everything."""
    if data:  # a transport never brings nothing
        _queue.run(_as_bytes(data))


async def _as_bytes(data: bytes) -> None:
    await _queue.ready()
    config = uvicorn.Config(_queue.app, http=_Protocol, ws="none", lifespan="off", log_config=None)
    config.load()
    state, transport = ServerState(), _Transport()
    protocol = _Protocol(config, state, {}, room=_Room(10), headers_s=DEFAULTS.tuning.http.headers_s)
    protocol.connection_made(transport)
    protocol.data_received(data.replace(b"TOKEN", _queue.tokens[-1].encode()))
    if state.tasks:
        await asyncio.wait(set(state.tasks), timeout=_PATIENCE_S)
    protocol.connection_lost(None)
    tracebacks, _logged.texts = _logged.texts, []
    assert not tracebacks, (data, tracebacks)
    assert not any(part.startswith(b"HTTP/1.1 500") for part in transport.written), (data, transport.written)


class _Logged(logging.Handler):
    """What a broker's log would have of it, but for warnings."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []
        logging.getLogger("uvicorn.error").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


_logged = _Logged()


class _Transport(asyncio.Transport):
    """Takes what is written, and says that it comes from this machine."""

    def __init__(self) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 80)})
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    def close(self) -> None:
        self.closed = True

    abort = close

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None: ...


# ---- where a fuzzer may set out ----


def _sample(info: inspect.Type) -> Any:
    """A value of the type, as plain as it may be."""
    match info:
        case inspect.StructType() if info.array_like:
            return [_sample(one.type) for one in info.fields]
        case inspect.StructType() | inspect.DataclassType():
            return {one.encode_name: _sample(one.type) for one in info.fields}
        case inspect.UnionType():
            return _sample(info.types[0])
        case inspect.ListType() | inspect.VarTupleType():
            return [_sample(info.item_type)]
        case inspect.TupleType():
            return [_sample(one) for one in info.item_types]
        case inspect.DictType():
            return {_sample(info.key_type): _sample(info.value_type)}
        case inspect.LiteralType() | inspect.EnumType():
            return info.values[0] if isinstance(info, inspect.LiteralType) else next(iter(info.cls)).value
        case inspect.StrType():
            return "orders"
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 0.5
        case inspect.BoolType():
            return False
        case inspect.BytesType():
            return b"x" * 16
        case _:
            return None


def _batch() -> bytes:
    builder = BatchBuilder("lz4")
    for number in range(3):
        builder.append(1_700_000_000_000, b"key", b"value %d" % number, [("source", b"web")])
    return builder.build(7, 1, 0)


def _session_seeds() -> list[bytes]:
    seeds = []
    for place, operation in enumerate(_OPERATIONS):
        header = m.encode_header(_sample(inspect.type_info(operation.request)))
        body = _batch() if operation.body else b""
        for who in (4, place % 4):
            seeds.append(bytes([who, place]) + len(header).to_bytes(2) + header + body)
    return seeds


_BODIES: tuple[Any, ...] = (
    {"messages": [{"value": "text", "key": "k", "headers": {"a": "b"}, "delay": "1s"}]},
    {"json": {"a": [1, 2.5, None]}, "key_base64": "AA=="},
    {"group": "orders", "wait": 0, "limit": 10, "member": "m"},
    {"handles": ["x"], "verdict": "ack"},
    {"partitions": 2, "settings": {"retention": "7d"}},
    {"to": {"0": 5}, "dry_run": True},
)
_REQUEST = (
    b"POST /api/v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer TOKEN\r\n"
    b"Content-Type: application/json\r\nContent-Length: 15\r\n\r\n{\"value\": \"hi\"}"
)  # fmt: skip
_CHUNKED = (
    b"POST /api/v1/topics/orders/messages HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer TOKEN\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n5\r\n{\"val\r\na\r\nue\": \"hi\"}\r\n0\r\n\r\n"
)  # fmt: skip

SERVED_SEEDS: dict[str, list[bytes]] = {
    "sessions": _session_seeds(),
    "http_bodies": [
        bytes([4, method, path]) + b"orders/orders?limit=5&wait=0\n" + json.dumps(body).encode()
        for path in range(40)
        for method, body in (
            (1, _BODIES[path % len(_BODIES)]),
            (path % 5, _BODIES[(path + 1) % len(_BODIES)]),
        )
    ],
    "http_bytes": [
        _REQUEST,
        _CHUNKED,
        _CHUNKED.replace(b"\r\na\r\n", b"\r\nzz\r\n"),
        _CHUNKED.replace(b"\r\n5\r\n", b"\r\n1.5\r\n").replace(b"TOKEN", b"none"),
        b"GET /api/v1/topics HTTP/1.1\r\nHost: x\r\n\r\nGET /health HTTP/1.1\r\n\r\n",
    ],
}
