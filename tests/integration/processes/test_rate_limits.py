"""Two processes share one rate limit (R40), in real time, without a broker between them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import postroom
from postroom.errors import SendTimeout
from tests.integration.processes.children import Connection, child, received

PER_S = 400
SECONDS = 2.0
LATE = 0.7  # of what the rate gives passes at least, on a machine that is busy with other things


def send_for_a_while(url: str, pipe: Connection) -> None:
    async def run() -> None:
        async with postroom.connect(url) as mq, mq.producer("orders", batch_messages=10) as producer:
            await producer.send(b"warm")
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            end = asyncio.get_running_loop().time() + SECONDS

            async def one() -> None:
                with suppress(SendTimeout):
                    while (left := end - asyncio.get_running_loop().time()) > 0:
                        await producer.send(b"x", timeout=left)

            await asyncio.gather(*(one() for _ in range(50)))
        pipe.send("done")

    asyncio.run(run())


def consume_for_a_while(url: str, pipe: Connection) -> None:
    async def run() -> None:
        count = 0
        async with (
            postroom.connect(url) as mq,
            mq.consumer("orders", "billing", ack="on_delivery") as consumer,
        ):
            pipe.send("ready")
            await asyncio.to_thread(pipe.recv)
            with suppress(TimeoutError):
                async with asyncio.timeout(SECONDS):
                    async for _ in consumer:
                        count += 1
        pipe.send(count)

    asyncio.run(run())


def run_two(work: Any, url: str) -> list[Any]:
    with ExitStack() as stack:
        pipes = [stack.enter_context(child(work, url))[1] for _ in range(2)]
        assert [received(pipe) for pipe in pipes] == ["ready"] * 2
        for pipe in pipes:
            pipe.send("go")
        return [received(pipe) for pipe in pipes]


async def test_producers_in_two_processes_share_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=2)
        await mq.limit_rate(topic="orders", messages_per_s=PER_S)
        await asyncio.to_thread(run_two, send_for_a_while, url)
        stored = (await mq.topic("orders")).messages
    burst, slices = PER_S, 2 * PER_S // 10
    assert PER_S * SECONDS * LATE <= stored <= PER_S * SECONDS + burst + slices + 10 + 2


async def test_members_in_two_processes_share_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders", partitions=4)
        await mq.create_group("orders", "billing")
        await mq.send_many("orders", [postroom.Message(b"x") for _ in range(5000)])
        await mq.limit_rate(topic="orders", group="billing", messages_per_s=PER_S)
        counts = await asyncio.to_thread(run_two, consume_for_a_while, url)
    burst, slices = PER_S // 10, 3 * PER_S // 10
    warm = burst + slices  # before both were ready
    assert PER_S * SECONDS * LATE <= sum(counts) <= PER_S * SECONDS + burst + slices + warm
    assert min(counts) > 0
