"""What is measured, and how a run is timed."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["Latency", "Throughput", "cpu_s", "percentile", "timed"]


@dataclass(frozen=True)
class Throughput:
    contender: str
    what: str  # "publish" or "consume + ack"
    batch: int
    at_once: int  # calls in flight
    size: int  # bytes of a message
    messages: int
    seconds: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.messages / self.seconds

    @property
    def mb_per_s(self) -> float:
        return self.per_s * self.size / 1e6

    @property
    def cpu_s_per_million(self) -> float:
        return self.cpu_s / self.messages * 1e6

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {
            "per_s": self.per_s,
            "mb_per_s": self.mb_per_s,
            "cpu_s_per_million": self.cpu_s_per_million,
        }


@dataclass(frozen=True)
class Latency:
    contender: str
    what: str
    p50_ms: float
    p99_ms: float
    max_ms: float
    samples: int
    cpu_percent: float | None = None  # of a core, of the broker's process

    @staticmethod
    def of(contender: str, what: str, seconds: Sequence[float], cpu_percent: float | None = None) -> Latency:
        return Latency(
            contender,
            what,
            percentile(seconds, 50) * 1000,
            percentile(seconds, 99) * 1000,
            max(seconds) * 1000,
            len(seconds),
            cpu_percent,
        )


def cpu_s(pid: int) -> float:
    """Return what a process has used of the processors, as Linux counts it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def percentile(values: Sequence[float], percent: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


async def timed(seconds: float, most: int, step: Callable[[], Awaitable[int]]) -> tuple[int, float, float]:
    """Repeat `step` until time or count is used up: messages, seconds, CPU seconds of this process."""
    messages = 0
    cpu, start = time.process_time(), time.perf_counter()
    while messages < most and time.perf_counter() - start < seconds:
        done = await step()
        if done == 0:
            break
        messages += done
    return messages, time.perf_counter() - start, time.process_time() - cpu
