"""Postroom, as a server and embedded in both processes; on SQLite, every commit of a message flushed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import postroom
from tests.servers.places import base_folder, free_port

from .peer import HOST, NotInstalled, Peer, ServerProcess

__all__ = ["PostroomEmbedded", "PostroomPushed", "PostroomServed"]

SERVE = [sys.executable, "-m", "postroom", "serve"]


class PostroomEmbedded(Peer):
    name = "postroom embedded"
    how = "both processes on one SQLite file, synchronous=FULL; send_many, poll and ack of 1,000"
    batch = 1000
    at_once = 2
    acks_at_once = 2

    @contextmanager
    def serve(self) -> Iterator[str]:
        with tempfile.TemporaryDirectory(prefix="postroom-bench-", dir=base_folder()) as folder:
            yield f"sqlite:///{folder}/bench.db"

    async def create(self, address: str, queue: str) -> None:
        async with postroom.connect(address) as mq:
            await mq.create_topic(queue, partitions=1)
            await mq.create_group(queue, "bench")

    async def publisher(self, address: str, queue: str, *, paced: bool) -> _Publisher:
        return _Publisher(await postroom.connect(address), queue)

    async def taker(self, address: str, queue: str) -> _Taker:
        mq = await postroom.connect(address)
        consumer = mq.consumer(queue, group="bench", window=4000)
        return _Taker(mq, await consumer.__aenter__())


class PostroomServed(PostroomEmbedded):
    name = "postroom"
    how = "postroom serve on SQLite, synchronous=FULL; send_many, poll and ack of 1,000"

    @contextmanager
    def serve(self) -> Iterator[str]:
        if subprocess.run([*SERVE, "--help"], capture_output=True, timeout=60).returncode != 0:
            raise NotInstalled("not available: `postroom serve` does not start")
        with ServerProcess("served") as server:
            port = free_port()
            store = f"sqlite:///{Path(server.folder, 'bench.db')}"
            options = ["--dev", "--host", HOST, "--port", str(port), "--http-port", "0"]
            server.start([*SERVE, store, *options], port)
            yield f"postroom://{HOST}:{port}"


class PostroomPushed(PostroomServed):
    name = "postroom pushed"
    how = "the same; messages come one by one (async for), and are acked one by one"
    acks_at_once = 64

    async def taker(self, address: str, queue: str) -> _Pushed:
        mq = await postroom.connect(address)
        consumer = mq.consumer(queue, group="bench", window=4000)
        return _Pushed(mq, await consumer.__aenter__())


class _Publisher:
    def __init__(self, mq: postroom.Connection, queue: str) -> None:
        self._mq, self._queue = mq, queue

    async def publish(self, values: list[bytes]) -> int:
        if len(values) == 1:
            await self._mq.send(self._queue, values[0])
            return 1
        return len(await self._mq.send_many(self._queue, [postroom.Message(value) for value in values]))

    async def close(self) -> None:
        await self._mq.close()


class _Taker:
    def __init__(self, mq: postroom.Connection, consumer: postroom.Consumer) -> None:
        self._mq, self._consumer = mq, consumer

    async def take(self) -> tuple[list[bytes], list[postroom.Received]]:
        messages = await self._consumer.poll(max_messages=1000, wait=1)
        return [message.value for message in messages], messages

    async def ack(self, token: list[postroom.Received]) -> None:
        await self._consumer.ack(token)

    async def close(self) -> None:
        await self._consumer.__aexit__(None, None, None)
        await self._mq.close()


class _Pushed(_Taker):
    """What the broker sends while there is room in the window, one message after the other."""

    def __init__(self, mq: postroom.Connection, consumer: postroom.Consumer) -> None:
        super().__init__(mq, consumer)
        self._messages = aiter(consumer)

    async def take(self) -> tuple[list[bytes], list[postroom.Received]]:
        try:
            async with asyncio.timeout(1):
                message = await anext(self._messages)
        except TimeoutError:
            return [], []
        return [message.value], [message]
