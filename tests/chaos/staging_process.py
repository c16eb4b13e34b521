"""A job that copies numbers into a topic, batch by batch, until it is done or killed.

    python -m tests.chaos.staging_process URL CHECKPOINT END

As Spark's streams do, it remembers where a batch ended only once it is committed; the next try of a batch may
have another end.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import postroom.sync

__all__ = ["KEYS", "run"]

KEYS = 7


def run(url: str, checkpoint: Path, end: int) -> None:
    chance = random.Random()
    with postroom.sync.connect(url) as mq:
        while (at := _position(checkpoint))[1] < end:
            batch, first = at
            last = min(end, first + chance.randint(20, 120))
            staging = mq.staging("copy", batch)
            staged = [_task(staging, range(first, last), place) for place in (0, 1, 1)]  # one is tried twice
            staging.commit(staged[:2])
            new = checkpoint.with_suffix(".new")
            new.write_text(f"{batch + 1} {last}")
            new.replace(checkpoint)


def _position(checkpoint: Path) -> tuple[int, int]:
    """The next batch, and where it begins."""
    if not checkpoint.exists():
        return 0, 0
    batch, first = checkpoint.read_text().split()
    return int(batch), int(first)


def _task(staging: postroom.sync.Staging, rows: range, place: int) -> object:
    marks = staging.marks(["out"])  # type: ignore[attr-defined]
    mine = [n for n in rows if n % 2 == place]
    new = [n for n in mine if n > marks.get("s", -1)]
    segment = staging.segment()  # type: ignore[attr-defined]
    segment.add_columns("out", [b"%d" % n for n in new], [b"%d" % (n % KEYS) for n in new])
    source = {"s": (mine[0], mine[-1])} if mine else {}
    segment.saw(len(mine), ["out"], source, {"s": marks.get("s", -1)} if mine else {})
    return segment.close()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
