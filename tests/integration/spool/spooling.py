"""What tests of the spool share: processes that fill one and die at a step, and what a topic holds then."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import postroom
from postroom.client.forward.spool_file import SpoolFile

__all__ = ["KEYS", "STEPS", "fill", "fill_and_die", "in_order", "serve", "stored"]

KEYS = 5

STEPS = {
    "nothing is written": ("add", "before"),
    "rows are written": ("add", "after"),
    "rows are taken": ("stamp", "before"),
    "rows are stamped": ("stamp", "after"),
    "messages are appended": ("finish", "before"),
    "rows are deleted": ("finish", "after"),
}
"""Where a process is killed: before or after which call of the file, each of which is one transaction."""


async def fill(producer: postroom.Producer, first: int, count: int) -> None:
    """Messages that say their number, and come in one order per key."""
    await producer.send_many(
        [postroom.Message(b"%d" % n, key=str(n % KEYS)) for n in range(first, first + count)]
    )


def fill_and_die(url: str, spool: Path, step: str, times: int, pipe: Pipe) -> None:
    """Reports how many messages are durable, again and again, until it dies."""
    name, when = STEPS[step]
    whole: Callable[..., Any] = getattr(SpoolFile, name)
    calls = 0

    def dying(self: SpoolFile, *args: Any) -> Any:
        nonlocal calls
        calls += 1
        if when == "before" and calls == times:
            os.kill(os.getpid(), signal.SIGKILL)
        found = whole(self, *args)
        if when == "after" and calls == times:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    setattr(SpoolFile, name, dying)
    asyncio.run(_fill(url, spool, pipe))


async def _fill(url: str, spool: Path, pipe: Pipe) -> None:
    async with postroom.connect(url) as mq, mq.producer("orders", spool=spool) as producer:
        for first in range(0, 400, 20):
            await fill(producer, first, 20)
            pipe.send(first + 20)
            await producer.forwarded(20)
        pipe.send("it did not die")


def serve(url: str, port: int, pipe: Pipe) -> None:
    """A broker, until it is killed."""

    async def run() -> None:
        async with postroom.connect(url) as mq:
            served = await mq.serve("127.0.0.1", port)
            pipe.send(served.url)
            await asyncio.Event().wait()

    asyncio.run(run())


async def stored(mq: postroom.Connection, topic: str = "orders") -> list[int]:
    """The numbers that a topic holds, as an ordered group gets them."""
    wanted = (await mq.topic(topic)).messages
    found: list[int] = []
    async with mq.consumer(topic, group="check", mode="ordered") as consumer:
        async with asyncio.timeout(60):
            while len(found) < wanted:
                messages = await consumer.poll(max_messages=5000, wait=1)
                await consumer.ack(messages)
                found += [int(message.value) for message in messages]
    return found


def in_order(found: list[int]) -> bool:
    """Each number once, and those of each key in order."""
    by_key = [[n for n in found if n % KEYS == key] for key in range(KEYS)]
    return len(set(found)) == len(found) and all(some == sorted(some) for some in by_key)
