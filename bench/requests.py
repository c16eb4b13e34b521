"""Requests and their replies: round trips a second with many under way, and how long a single one takes.

python -m bench requests [--store sqlite|postgresql|mariadb|all] [--seconds 2]

embedded   who asks and who answers are one program, which has the store open
served     broker, worker and requester are three processes on this machine

The handler does nothing. The topic of the requests is volatile, or durable: then each is flushed before it is
answered. Replies are always volatile.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import postroom

from .grounds import Ground
from .measure import percentile

__all__ = ["RoundTrips", "measure", "run"]

AT_ONCE = 100
SIZE = 100
_STORAGE = ("volatile", "durable")


@dataclass(frozen=True)
class RoundTrips:
    store: str
    way: str  # "embedded" or "served"
    storage: str  # of the topic of the requests
    at_once: int
    per_s: float  # with `at_once` under way
    p50_ms: float  # of single ones, one after the other
    p99_ms: float
    max_ms: float
    samples: int


async def run(where: Ground, seconds: float) -> list[RoundTrips]:
    found = []
    for way in ("embedded", "served"):
        for storage in _STORAGE:
            with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
                async with _asking(where.fresh(Path(folder)), way) as mq:
                    found.append(await measure(mq, where.store, way, storage, seconds))
    return found


async def measure(mq: postroom.Connection, store: str, way: str, storage: str, seconds: float) -> RoundTrips:
    value = b"x" * SIZE
    await mq.request(storage, value)  # makes the reply topic
    alone: list[float] = []
    end = time.perf_counter() + seconds
    while (before := time.perf_counter()) < end:
        await mq.request(storage, value)
        alone.append(time.perf_counter() - before)
    done, began = 0, time.perf_counter()

    async def ask() -> None:
        nonlocal done
        while time.perf_counter() - began < seconds:
            await mq.request(storage, value)
            done += 1

    await asyncio.gather(*(ask() for _ in range(AT_ONCE)))
    per_s = done / (time.perf_counter() - began)
    return RoundTrips(
        store,
        way,
        storage,
        AT_ONCE,
        per_s,
        p50_ms=1000 * percentile(alone, 50),
        p99_ms=1000 * percentile(alone, 99),
        max_ms=1000 * max(alone),
        samples=len(alone),
    )


# ---- who serves ----


def app_on(where: str | postroom.Connection) -> postroom.App:
    app = postroom.App(where)

    async def echo(body: bytes) -> bytes:
        return body

    for topic in _STORAGE:
        app.reply(topic, group="bench", concurrency=AT_ONCE)(echo)
    return app


@asynccontextmanager
async def _asking(url: str, way: str) -> AsyncIterator[postroom.Connection]:
    """A connection that asks, and a worker that answers."""
    async with postroom.connect(url, migrate=True) as mq:
        for storage in _STORAGE:
            await mq.create_topic(storage, partitions=1, storage=storage)  # type: ignore[arg-type]
        if way == "embedded":
            async with app_on(mq):
                yield mq
            return
    with _process("broker", url) as address, _process("worker", address):
        async with postroom.connect(address) as mq:
            yield mq


@contextmanager
def _process(what: str, url: str) -> Iterator[str]:
    """This module in a process of its own; what it says once it is ready."""
    command = [sys.executable, "-m", "bench.requests", what, url]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        process.kill()
        process.wait()


async def _work(what: str, url: str) -> None:
    if what == "worker":
        async with app_on(url):
            print("ready", flush=True)
            await asyncio.Event().wait()
    async with postroom.connect(url) as mq, await mq.serve("127.0.0.1", 0) as served:
        print(served.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_work(*sys.argv[1:3]))
