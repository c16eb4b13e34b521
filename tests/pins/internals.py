"""Everything that pins read of the package's inside. When modules move, this is the one file to mend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import httpx
import typer

from postroom.address import parse
from postroom.broker.access import Gatekeeper
from postroom.broker.broker import open_endpoint
from postroom.cli.root import app as cli_app
from postroom.client.forward import outbox_source
from postroom.clock import SystemClock
from postroom.config import DEFAULTS
from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS
from postroom.http.app import make_app
from postroom.model.access import ACTIONS as PERMISSIONS
from postroom.model.policy.settings import GroupSettings, TopicSettings
from postroom.serve_settings import ServeSettings, key_of
from postroom.store.sql.schema import MIGRATIONS
from postroom.wire import messages
from postroom.wire.frames import ERROR, REPLY, FrameParser, encode
from postroom.wire.messages import failure_of, raised
from postroom.wire.replies import packed, unpacked

__all__ = [
    "DEFAULTS",
    "NEEDS",
    "PERMISSIONS",
    "GroupSettings",
    "Operation",
    "ServeSettings",
    "TopicSettings",
    "command_tree",
    "decoded_failure",
    "failure_frame",
    "key_of",
    "metric_families",
    "migrations",
    "operations",
    "other_frames",
    "served",
]

NEEDS: dict[str, str] = {
    **{name: row.need for name, row in OPERATIONS.items()},
    "now_ms": "none",  # this and the next two are answered without asking the broker
    "reached_ms": "none",
    "close": "none",
}
"""The permission that each operation needs."""

_ID = 0x01020304  # of every golden frame


# ---- the wire ----


class Operation(NamedTuple):
    """A request and its reply, as frames."""

    kind: int
    name: str
    request_type: Any
    reply_type: Any  # of the value that the caller gets
    repeatable: bool
    has_body: bool
    row: Any

    def request_frame(self, header: Any, body: bytes) -> bytes:
        return b"".join(encode(self.kind, _ID, messages.encode_header(header), [body] if body else ()))

    def request_of(self, data: bytes) -> tuple[Any, bytes]:
        frame = _only(data, self.kind, 0)
        return messages.decode(frame.header, self.request_type), frame.body

    def reply_frame(self, value: Any) -> bytes:
        header, body = packed(self.row, value)
        return b"".join(encode(self.kind, _ID, messages.encode_header(header), body, REPLY))

    def reply_of(self, data: bytes) -> Any:
        return unpacked(self.row, _only(data, self.kind, REPLY))


def operations() -> Iterator[Operation]:
    for row in (messages.LIST_BROKERS, *OPERATIONS.values()):
        yield Operation(row.kind, row.name, row.request, row.reply, row.repeatable, bool(row.body), row)


class Other(NamedTuple):
    """A frame that is not of an operation: a header of that type."""

    name: str
    kind: int
    flags: int
    header_type: Any

    def frame(self, header: Any) -> bytes:
        return b"".join(encode(self.kind, _ID, messages.encode_header(header), (), self.flags))

    def header_of(self, data: bytes) -> Any:
        return messages.decode(_only(data, self.kind, self.flags).header, self.header_type)


def other_frames() -> list[Other]:
    """The handshake, a cancelled request, and what a broker asks a client."""
    return [
        Other("hello", messages.HELLO, 0, messages.Hello),
        Other("welcome", messages.HELLO, REPLY, messages.Welcome),
        Other("cancel", messages.CANCEL, 0, messages.Cancel),
        Other("ask (pushed by the broker)", messages.ASK, 0, r.Ask),
        Other("answer (to ask)", messages.ASK, REPLY, r.Answer),
    ]


def failure_frame(error: Exception) -> bytes:
    """An error as the reply to a request of kind 10."""
    return b"".join(encode(10, _ID, messages.encode_header(failure_of(error)), (), REPLY | ERROR))


def decoded_failure(data: bytes) -> Exception:
    return raised(messages.decode(_only(data, 10, REPLY | ERROR).header, messages.Failure))


def _only(data: bytes, kind: int, flags: int) -> Any:
    [frame] = FrameParser(len(data)).feed(data)
    assert (frame.kind, frame.flags, frame.id) == (kind, flags, _ID)
    return frame


# ---- the store ----


def migrations() -> Iterator[tuple[int, str, str]]:
    """Version, which part of the store (a file, on SQLite), and a statement; types are the dialect's."""
    for version, parts in MIGRATIONS.items():
        for part, statements in parts.items():
            yield from ((version, part.value, statement) for statement in statements)


# ---- the command line ----


def command_tree() -> Any:
    """The root of the commands; `commands` has those below."""
    return typer.main.get_command(cli_app)


# ---- HTTP ----


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Any, httpx.AsyncClient]]:
    """The HTTP app on a queue in memory, and a client of it in this process."""
    broker = await open_endpoint(parse("memory://"))
    try:
        app = make_app(broker, Gatekeeper(broker.store, broker.in_thread, SystemClock(), dev=True))
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1234))
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://localhost") as client,
        ):
            yield app, client
    finally:
        await broker.close()


def metric_families(app: Any) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Name, type and labels of every metric of a served broker, then of an outbox's relay."""
    for family in app.state.metrics.collector.collect():
        yield family.name, family.type, family.labels
    for name in outbox_source._GAUGES:
        yield f"{name} (relay)", "gauge", ("table",)
