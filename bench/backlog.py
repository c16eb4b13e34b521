"""Does the cost grow with the backlog? Consume + ack at 100 thousand and at 10 million waiting messages.

The same process, the same number of messages taken; the resident memory is read at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from .contenders import PostroomQueue
from .measure import timed

__all__ = ["Backlog", "run"]


@dataclass(frozen=True)
class Backlog:
    waiting: int
    per_s: float
    peak_mb: float


async def run(waiting: int, *, take: int = 90_000, batch: int = 1000) -> Backlog:
    contender = PostroomQueue()
    values = [os.urandom(50).hex().encode() for _ in range(batch)]
    with tempfile.TemporaryDirectory(prefix="postroom-bench-") as folder:
        await contender.open(Path(folder))
        for _ in range(waiting // batch):
            await contender.publish(values)
        await contender.start_consuming(batch)
        messages, seconds, _ = await timed(60, take, lambda: contender.consume(batch))
        await contender.close()
    return Backlog(waiting, messages / seconds, _peak_mb())


def _peak_mb() -> float:
    """Of this process alone; `ru_maxrss` would begin with that of the process it was forked from."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


if __name__ == "__main__":
    print(json.dumps(asdict(asyncio.run(run(int(sys.argv[1]))))))
