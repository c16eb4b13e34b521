"""A served queue in this process, and sockets that say to it whatever a test wants."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec

import postroom
from postroom.broker.access import Gatekeeper
from postroom.broker.broker import Broker
from postroom.clock import SystemClock
from postroom.wire.server.listening import Listening
from postroom.wire.server.server import WireServer

__all__ = ["Came", "Raw", "broker_of", "eventually", "frame", "healthy", "served", "settled"]

SECONDS = 20

HELLO, CANCEL, BROKERS, ASK = 1, 2, 3, 4
REPLY, ERROR = 1, 2


class Came(NamedTuple):
    kind: int
    flags: int
    id: int
    header: Any
    body: bytes

    @property
    def code(self) -> str:
        """Of an error."""
        assert self.flags == REPLY | ERROR, self
        return str(self.header[0])


def frame(kind: int, header: Any, *, id: int = 1, body: bytes = b"", flags: int = 0) -> bytes:
    head = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return struct.pack(">IIIBBH", 12 + len(head) + len(body), id, len(head), kind, flags, 0) + head + body


class Raw:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    @asynccontextmanager
    async def open(cls, port: int, *, hello: bool = True, token: str = "") -> AsyncIterator[Raw]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 16)
        raw = cls(reader, writer)
        try:
            if hello:
                raw.send(HELLO, [1, 1, "raw", token], id=1)
                assert (await raw.receive()).flags == REPLY
            yield raw
        finally:
            writer.transport.abort()

    def send(self, kind: int, header: Any, *, id: int = 2, body: bytes = b"", flags: int = 0) -> None:
        self.writer.write(frame(kind, header, id=id, body=body, flags=flags))

    async def receive(self) -> Came:
        async with asyncio.timeout(SECONDS):
            size, id, header, kind, flags, _ = struct.unpack(">IIIBBH", await self.reader.readexactly(16))
            rest = await self.reader.readexactly(size - 12)
        return Came(kind, flags, id, msgspec.msgpack.decode(rest[:header]), rest[header:])

    async def ask(self, kind: int, header: Any, *, id: int = 2, body: bytes = b"") -> Came:
        self.send(kind, header, id=id, body=body)
        came = await self.receive()
        assert came.id == id, came
        return came

    async def refused(self) -> Came:
        """The last thing that is said before the connection ends."""
        came = await self.receive()
        assert came.flags == REPLY | ERROR, came
        await self.ended()
        return came

    async def ended(self) -> bytes:
        async with asyncio.timeout(SECONDS):
            try:
                return await self.reader.read()
            except ConnectionError:
                return b""

    async def alive(self) -> bool:
        return (await self.ask(BROKERS, [], id=999)).flags == REPLY


def broker_of(mq: postroom.Connection) -> Broker:
    endpoint = mq._endpoint
    assert isinstance(endpoint, Broker)
    return endpoint


@asynccontextmanager
async def served(
    listening: Listening | None = None, *, dev: bool = True, url: str = "memory://"
) -> AsyncIterator[tuple[postroom.Connection, WireServer]]:
    """The queue, embedded, and its server; at the end nothing of any client may be left."""
    async with postroom.connect(url) as mq:
        broker = broker_of(mq)
        gatekeeper = Gatekeeper(broker.store, broker.in_thread, SystemClock(), dev=dev)
        server = WireServer(broker, listening or Listening(port=0), gatekeeper)
        await server.start()
        try:
            yield mq, server
            await settled(server)
        finally:
            await server.stop(grace_ms=1000)


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(SECONDS):
        while not holds():  # noqa: ASYNC110 - what is looked at has no event
            await asyncio.sleep(0.005)


async def settled(server: WireServer) -> None:
    """Every client is gone, and has left nothing behind."""
    await eventually(lambda: not server.connections)
    await eventually(lambda: server.held_bytes == 0)
    serving = {"Connection._serve", "Connection._greet", "Session.answered"}
    await eventually(lambda: not serving & {_name(task) for task in asyncio.all_tasks()})


def _name(task: asyncio.Task[Any]) -> str:
    return getattr(task.get_coro(), "__qualname__", "")


async def healthy(server: WireServer, topic: str = "health", values: Sequence[bytes] = (b"1", b"2")) -> None:
    """Another client is served at once."""
    async with asyncio.timeout(SECONDS), postroom.connect(server.url) as mq:
        await mq.create_topic(topic, partitions=1, exist_ok=True)
        for value in values:
            await mq.send(topic, value)
        async with mq.consumer(topic, group="doctor") as consumer:
            got: list[bytes] = []
            while len(got) < len(values):
                messages = await consumer.poll(max_messages=10, wait=5)
                got += [message.value for message in messages]
                await consumer.ack(messages)
        assert got == list(values)
