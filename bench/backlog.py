"""Does the cost grow with the backlog? Consume + ack at 100 thousand and at 10 million waiting messages.

The same process, the same number of messages taken; the resident memory is read at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from .contenders import PenstockQueue
from .measure import timed

__all__ = ["Backlog", "run"]


@dataclass(frozen=True)
class Backlog:
    waiting: int
    per_s: float
    peak_mb: float


async def run(waiting: int, *, take: int = 90_000, batch: int = 1000) -> Backlog:
    contender = PenstockQueue()
    values = [os.urandom(50).hex().encode() for _ in range(batch)]
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        await contender.open(Path(folder))
        for _ in range(waiting // batch):
            await contender.publish(values)
        await contender.start_consuming(batch)
        messages, seconds, _ = await timed(60, take, lambda: contender.consume(batch))
        await contender.close()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return Backlog(waiting, messages / seconds, peak)


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run(int(sys.argv[1]))))))
