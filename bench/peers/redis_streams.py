"""Redis streams: the append-only file is flushed before each reply; a consumer group, XACK."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from postroom.errors import how_to_install
from tests.servers.places import free_port

from .peer import HOST, NotInstalled, Peer, ServerProcess, program

try:
    import redis
    import redis.asyncio
except ImportError:
    redis = None

__all__ = ["RedisStreams"]

GROUP, FIELD = "bench", b"value"


class RedisStreams(Peer):
    name = "redis"
    how = "stream; appendonly yes, appendfsync always; redis-py with hiredis, pipelines of 1,000"
    batch = 1000
    at_once = 2
    acks_at_once = 2
    flushing = "always"

    @contextmanager
    def serve(self) -> Iterator[str]:
        if redis is None:
            raise NotInstalled(f"not installed: {how_to_install('bench')}")
        binary = program("redis-server", "apt-get install redis-server (or, as root: make peers)")
        with ServerProcess("redis") as server:
            port = free_port()
            options = {
                "bind": HOST,
                "port": str(port),
                "dir": str(server.folder),
                "appendonly": "yes",
                "appendfsync": self.flushing,
                "save": "",
                "daemonize": "no",
            }
            server.start([binary, *(part for name, v in options.items() for part in (f"--{name}", v))], port)
            yield f"redis://{HOST}:{port}"

    async def create(self, address: str, queue: str) -> None:
        client = redis.asyncio.from_url(address)
        await client.xgroup_create(queue, GROUP, id="0", mkstream=True)
        await client.aclose()

    async def publisher(self, address: str, queue: str, *, paced: bool) -> _Single | _Pipelines:
        return (_Single if paced else _Pipelines)(address, queue)

    async def taker(self, address: str, queue: str) -> _Taker:
        return _Taker(redis.asyncio.from_url(address), queue)


class _Single:
    def __init__(self, address: str, queue: str) -> None:
        pool = redis.asyncio.BlockingConnectionPool.from_url(address, max_connections=32)
        self._client, self._queue = redis.asyncio.Redis.from_pool(pool), queue

    async def publish(self, values: list[bytes]) -> int:
        for value in values:
            await self._client.xadd(self._queue, {FIELD: value})
        return len(values)

    async def close(self) -> None:
        await self._client.aclose()


class _Pipelines:
    """The blocking client, in threads: it packs a pipeline in two thirds of the asynchronous one's time."""

    def __init__(self, address: str, queue: str) -> None:
        self._client, self._queue = redis.from_url(address), queue

    async def publish(self, values: list[bytes]) -> int:
        return await asyncio.to_thread(self._publish, values)

    def _publish(self, values: list[bytes]) -> int:
        with self._client.pipeline(transaction=False) as pipe:
            for value in values:
                pipe.xadd(self._queue, {FIELD: value})
            return len(pipe.execute())

    async def close(self) -> None:
        self._client.close()


class _Taker:
    """Acks go through a connection of their own, beside the blocking read."""

    def __init__(self, client: Any, queue: str) -> None:
        self._client, self._queue = client, queue

    async def take(self) -> tuple[list[bytes], list[bytes]]:
        found = await self._client.xreadgroup(GROUP, "member", {self._queue: ">"}, count=1000, block=1000)
        entries = [entry for _, some in _pairs(found) for entry in some]
        return [fields[FIELD] for _, fields in entries], [entry_id for entry_id, _ in entries]

    async def ack(self, token: list[bytes]) -> None:
        if await self._client.xack(self._queue, GROUP, *token) != len(token):
            raise RuntimeError("Redis acked fewer messages than it was told")

    async def close(self) -> None:
        await self._client.aclose()


def _pairs(found: Any) -> Any:
    """Answers of protocol 3 are a dict of lists of lists, those of protocol 2 a list of pairs."""
    if isinstance(found, dict):
        return [(name, [entry for some in parts for entry in some]) for name, parts in found.items()]
    return found or []
