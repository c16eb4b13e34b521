"""Latency at a steady 1,000 messages a second: publish until confirmed, and publish until received.

Beside it, in the same run and on the same disk: one flushed commit of one small row, at the same pace.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path

import postroom
from tests.servers.places import free_port

from .contenders import Contender, PostroomQueue
from .measure import Latency, cpu_s
from .peers.peer import HOST, ServerProcess
from .peers.postroom_peers import SERVE

__all__ = ["bare_commit", "end_to_end", "publish", "served"]

RATE = 1000


def bare_commit(seconds: float) -> Latency:
    """One row, one transaction, one flush, a thousand times a second."""
    samples = []
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        db = sqlite3.connect(Path(folder) / "bare.db", isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=FULL")
        db.execute("CREATE TABLE rows (id INTEGER PRIMARY KEY, value BLOB)")
        value, start = os.urandom(100), time.perf_counter()
        for i in range(int(seconds * RATE)):
            time.sleep(max(0.0, start + i / RATE - time.perf_counter()))
            before = time.perf_counter()
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT INTO rows (value) VALUES (?)", (value,))
            db.execute("COMMIT")
            samples.append(time.perf_counter() - before)
        db.close()
    return Latency.of("sqlite3", "one flushed commit", samples)


async def publish(contender: Contender, seconds: float) -> Latency:
    """From the call to the confirmation; calls start on time whether or not earlier ones are done."""
    samples: list[float] = []
    value = os.urandom(100)

    async def one(_: int) -> None:
        before = time.perf_counter()
        await contender.publish([value])
        samples.append(time.perf_counter() - before)

    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        await contender.open(Path(folder))
        await _paced(one, seconds)
        await contender.close()
    return Latency.of(contender.name, "publish until confirmed", samples)


async def end_to_end(seconds: float) -> Latency:
    """From the call to the moment an idle consumer has the message."""
    samples: list[float] = []
    contender = PostroomQueue()

    async def one(_: int) -> None:
        await contender.mq.send("bench", str(time.perf_counter_ns()).encode())

    async def receive(consumer: postroom.Consumer) -> None:
        async for message in consumer:
            samples.append((time.perf_counter_ns() - int(message.value)) / 1e9)

    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        await contender.open(Path(folder))
        async with contender.mq.consumer("bench", group="bench", ack="after") as consumer:
            receiving = asyncio.create_task(receive(consumer))
            await _paced(one, seconds)
            await asyncio.sleep(0.2)
            receiving.cancel()
            await asyncio.gather(receiving, return_exceptions=True)
        await contender.close()
    return Latency.of(contender.name, "publish until received", samples)


async def served(seconds: float) -> list[Latency]:
    """Through a broker in a process of its own, with keys: until confirmed, and until a consumer, which acks
    each, has the message; and what the broker's process uses of a core."""
    confirmed: list[float] = []
    received: list[tuple[int, float]] = []  # when it was sent, and how long it took
    with ServerProcess("latency") as server:
        port = free_port()
        options = ["--dev", "--host", HOST, "--port", str(port), "--http-port", "0"]
        server.start([*SERVE, f"sqlite:///{server.folder}/bench.db", *options], port)
        async with postroom.connect(f"postroom://{HOST}:{port}") as mq:
            await mq.create_topic("bench", partitions=4)

            async def one(number: int) -> None:
                before = time.perf_counter_ns()
                await mq.send("bench", str(before).encode(), key=f"key {number % 1000}")
                confirmed.append((time.perf_counter_ns() - before) / 1e9)

            async def receive(messages: int) -> None:
                async with mq.consumer("bench", group="bench", ack="after", start="earliest") as consumer:
                    async for message in consumer:
                        sent = int(message.value)
                        received.append((sent, (time.perf_counter_ns() - sent) / 1e9))
                        if len(received) == messages:
                            return

            receiving = asyncio.create_task(receive(RATE + int(seconds * RATE)))
            await _paced(one, 1)  # until all is warm
            confirmed.clear()
            cpu, began = cpu_s(server.pid), time.perf_counter_ns()
            await _paced(one, seconds)
            percent = 1e11 * (cpu_s(server.pid) - cpu) / (time.perf_counter_ns() - began)
            await receiving
    return [
        Latency.of("postroom served", "publish until confirmed", confirmed),
        Latency.of(
            "postroom served",
            "publish until received",
            [ms for sent, ms in received if sent >= began],
            percent,
        ),
    ]


async def _paced(one: Callable[[int], Coroutine[None, None, None]], seconds: float) -> None:
    gc.collect()
    gc.freeze()  # what the benchmark has loaded: to look through it takes 100 ms
    start = time.perf_counter()
    tasks: set[asyncio.Task[None]] = set()
    for i in range(int(seconds * RATE)):
        ahead = start + i / RATE - time.perf_counter()
        if ahead > 0:
            await asyncio.sleep(ahead)
        task = asyncio.create_task(one(i))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
