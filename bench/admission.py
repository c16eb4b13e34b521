"""What it costs to look into batches that come over the wire: CPU for a million messages.

python -m bench.admission [--seconds 1] [--json FILE]

One process, one thread, no store. The longest step is what an event loop may be held for by one of them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from postroom.model.messages.admission import admit, walk
from postroom.model.messages.batch import BatchBuilder, verify

__all__ = ["Admission", "run"]

SHAPES = [(1000, 100, "none"), (1000, 100, "lz4"), (1, 100, "none"), (1, 100, "lz4"), (8, 1_000_000, "lz4")]
_NOW = 1_700_000_000_000


@dataclass(frozen=True)
class Admission:
    messages: int  # in a batch
    size: int
    compression: str
    cpu_s_per_million: float
    checksum_s_per_million: float  # what a broker did before, and does as well
    longest_step_ms: float


def run(seconds: float) -> list[Admission]:
    return [_measured(*shape, seconds) for shape in SHAPES]


def _measured(messages: int, size: int, compression: str, seconds: float) -> Admission:
    builder = BatchBuilder(compression, max_bytes=2**31 - 1)
    for at in range(messages):
        builder.append(_NOW, None, b"%09d" % at + bytes(size - 9), [])
    batch = builder.build(1, 0, 0)
    walked, summed = _cost(lambda: admit(batch, _NOW), seconds), _cost(lambda: verify(batch), seconds / 4)
    millions = 1e6 / messages
    return Admission(
        messages, size, compression, round(walked * millions, 3), round(summed * millions, 3), _longest(batch)
    )


def _cost(work: Callable[[], object], seconds: float) -> float:
    """CPU seconds of one call: the best of ten turns."""
    best = float("inf")
    for _ in range(10):
        calls, begun = 0, time.process_time()
        while (spent := time.process_time() - begun) < seconds / 10:
            work()
            calls += 1
        best = min(best, spent / calls)
    return best


def _longest(batch: bytes) -> float:
    longest = float("inf")
    for _ in range(10):
        steps, here, before = walk(batch, _NOW), 0.0, time.perf_counter()
        for _ in steps:
            here = max(here, time.perf_counter() - before)
            before = time.perf_counter()
        longest = min(longest, here)
    return round(longest * 1000, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--json", type=Path)
    wish = parser.parse_args()
    found = run(wish.seconds)
    for one in found:
        print(
            f"{one.messages:5} x {one.size:7} B {one.compression:5} {one.cpu_s_per_million:9.3f} CPU s/1M "
            f"(checksum {one.checksum_s_per_million:.3f}), longest step {one.longest_step_ms:.3f} ms"
        )
    if wish.json:
        wish.json.write_text(json.dumps([asdict(one) for one in found], indent=2))


if __name__ == "__main__":
    main()
