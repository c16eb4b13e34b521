"""Messages a second, published and consumed with ack, for batches of 1, 100 and 1000."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from .contenders import Contender
from .measure import Throughput, timed

__all__ = ["run"]

SHAPES = ((1, 1), (1, 64), (100, 1), (1000, 1), (1000, 4))  # (batch, calls at once)


async def run(
    contenders: list[Callable[[], Contender]],
    *,
    seconds: float,
    sizes: tuple[int, ...] = (100, 1000),
    shapes: tuple[tuple[int, int], ...] = SHAPES,
) -> AsyncIterator[Throughput]:
    """Contenders take turns shape by shape, so that a slow moment of the machine hits both."""
    for size in sizes:
        for batch, at_once in shapes:
            for make in contenders:
                async for result in _one(make(), batch, at_once, size, seconds):
                    yield result


async def _one(
    contender: Contender, batch: int, at_once: int, size: int, seconds: float
) -> AsyncIterator[Throughput]:
    values = [os.urandom(size // 2).hex().encode()[:size] for _ in range(batch)]
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        await contender.open(Path(folder))
        try:

            async def publish() -> int:
                return sum(await asyncio.gather(*(contender.publish(values) for _ in range(at_once))))

            sent, *spent = await timed(seconds, 3_000_000, publish)
            yield Throughput(contender.name, "publish", batch, at_once, size, sent, *spent)
            if at_once == 1:
                await contender.start_consuming(batch)
                taken, *spent = await timed(seconds * 3, sent, lambda: contender.consume(batch))
                yield Throughput(contender.name, "consume + ack", batch, 1, size, taken, *spent)
        finally:
            await contender.close()
