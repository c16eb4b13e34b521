"""What a rate limit costs that is never reached, and how exact one is: `python -m bench.rates [URL]` (R40).

The cost: messages a second through one producer, in turn with limits on its topic and on itself and without
any, by the wall and by the processor's time. How exact: two processes send as fast as they can to a topic
that takes 1,000 messages a second.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import postroom
from postroom.errors import SendTimeout

MESSAGES, ROUNDS = 20_000, 15
PER_S, SECONDS = 1000, 5.0


async def publish(mq: postroom.Connection) -> tuple[float, float]:
    """Seconds, and seconds of the processor."""
    begin, busy = time.perf_counter(), time.process_time()
    async with mq.producer("cost", batch_messages=100) as producer:
        for _ in range(MESSAGES):
            await producer.post(b"x" * 100)
    return time.perf_counter() - begin, time.process_time() - busy


async def cost(url: str) -> None:
    async with postroom.connect(url, migrate=True, client_id="bench") as mq:
        await mq.create_topic("cost", partitions=4)
        await publish(mq)
        without, limited = [], []
        for _ in range(ROUNDS):
            await mq.limit_rate(topic="cost")
            await mq.limit_rate(producer="bench")
            without.append(await publish(mq))
            await mq.limit_rate(topic="cost", messages_per_s=1_000_000, bytes_per_s="1GB")
            await mq.limit_rate(producer="bench", messages_per_s=1_000_000, bytes_per_s="1GB")
            limited.append(await publish(mq))
    for place, what in enumerate(("wall", "processor")):
        plain, slowed = (statistics.median(took[place] for took in side) for side in (without, limited))
        figures = f"{MESSAGES / plain:,.0f}/s without, {MESSAGES / slowed:,.0f}/s with"
        print(f"{what}: {figures}: {plain / slowed:.3f}")


def sender(url: str, start: float) -> None:
    async def run() -> None:
        async with postroom.connect(url) as mq, mq.producer("exact", batch_messages=50) as producer:
            await asyncio.sleep(max(0.0, start - time.time()))
            end = asyncio.get_running_loop().time() + SECONDS + 2

            async def one() -> None:
                with suppress(SendTimeout):
                    while (left := end - asyncio.get_running_loop().time()) > 0:
                        await producer.send(b"x", timeout=left)

            await asyncio.gather(*(one() for _ in range(200)))

    asyncio.run(run())


async def exact(url: str) -> None:
    async with postroom.connect(url, migrate=True) as mq:
        await mq.create_topic("exact", partitions=4)
        await mq.limit_rate(topic="exact", messages_per_s=PER_S)
        start = time.time() + 3
        senders = [
            multiprocessing.get_context("spawn").Process(target=sender, args=(url, start)) for _ in "ab"
        ]
        for process in senders:
            process.start()
        await asyncio.sleep(start + 1 - time.time())  # after the burst
        first, begin = (await mq.topic("exact")).messages, time.perf_counter()
        await asyncio.sleep(SECONDS)
        last, took = (await mq.topic("exact")).messages, time.perf_counter() - begin
        for process in senders:
            await asyncio.to_thread(process.join)
        print(
            f"limit {PER_S}/s, two processes: {first} in the first second, then {(last - first) / took:.1f}/s"
        )


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        url = sys.argv[1] if len(sys.argv) > 1 else f"sqlite:///{Path(folder)}/q.db"
        asyncio.run(cost(url))
        asyncio.run(exact(url))


if __name__ == "__main__":
    main()
