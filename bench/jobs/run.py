"""`python -m bench jobs`: handlers that do nothing, a second, in one run.

The jobs are there before the workers start; what is measured is from the first handled to the last, in all
processes. Each contender has two processes that run handlers, its own defaults for what happens on the way,
and a server of its own. Durability is not the same everywhere: the table says what each waits for.
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from tests.servers import PostgresServer

from ..peers.peer import NotInstalled
from ..peers.redis_streams import RedisStreams
from .programs import COUNTED, PROCESSES

__all__ = ["Rate", "show"]

_PATIENCE_S = 180.0


@dataclass(frozen=True)
class Contender:
    name: str
    program: str
    server: str  # "redis", "redis always" (it flushes each command), "postgresql" or "sqlite"
    keeps: str  # what is safe when a job is accepted, and when it is handled
    prefix: str = ""
    workers: int = PROCESSES


_FLUSHED = "flushed when sent; acked after it ran"
_EARLY = "flushed when sent; acked before it runs"
_REDIS_EARLY = "Redis flushes once a second; acked before it runs"
_REDIS_LATE = "Redis flushes once a second; acked after it ran"

CONTENDERS = (
    Contender("Postroom App, SQLite", "postroom", "sqlite", _FLUSHED),
    Contender("Postroom App, PostgreSQL", "postroom", "postgresql", _FLUSHED),
    Contender("Procrastinate, PostgreSQL", "procrastinate", "postgresql", _FLUSHED),
    Contender("dramatiq, Redis", "dramatiq", "redis", _REDIS_LATE),
    Contender("arq, Redis", "arq", "redis", _REDIS_LATE),
    Contender("Celery, Redis", "celery", "redis", _REDIS_EARLY, workers=1),
    Contender("Celery, Redis flushed", "celery", "redis always", _EARLY, workers=1),
    Contender("Celery, Postroom on SQLite", "celery", "sqlite", _EARLY, "postroom+", workers=1),
    Contender("Celery, Postroom on PostgreSQL", "celery", "postgresql", _EARLY, "postroom+", workers=1),
)


@dataclass(frozen=True)
class Rate:
    contender: str
    keeps: str
    jobs: int
    per_s: float  # median of the rounds; 0: it is not here, or did not finish


class _Redis(RedisStreams):
    def __init__(self, flushing: str) -> None:
        self.flushing = flushing


@contextmanager
def _served(server: str, folder: Path) -> Iterator[str]:
    if server.startswith("redis"):
        with _Redis(server.partition(" ")[2] or "everysec").serve() as address:
            yield address
    elif server == "postgresql":
        with PostgresServer() as postgres:
            yield postgres.url(postgres.create_database())
    else:
        yield f"sqlite:///{folder}/queue.db"


def _program(one: Contender, env: dict[str, str], *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", "-m", "bench.jobs.programs", one.program, *arguments]
    return subprocess.Popen(command, env=env, start_new_session=True, stdout=subprocess.DEVNULL)


def measure(one: Contender, jobs: int) -> float:
    """Handlers a second."""
    with tempfile.TemporaryDirectory() as name, _served(one.server, Path(name)) as address:
        tallies = Path(name) / "tally"
        tallies.mkdir()
        env = os.environ | {"BENCH_URL": one.prefix + address, "BENCH_TALLY": str(tallies)}
        if _program(one, env, "enqueue", str(jobs)).wait(_PATIENCE_S):
            raise NotInstalled(f"{one.name}: the jobs could not be enqueued")
        workers = [_program(one, env, "work") for _ in range(one.workers)]
        try:
            return _rate(tallies, jobs)
        finally:
            for worker in workers:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()


def _rate(tallies: Path, jobs: int) -> float:
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        found = [COUNTED.unpack(file.read_bytes()) for file in tallies.iterdir() if file.stat().st_size]
        if sum(count for count, _, _ in found) >= jobs:
            took_s: float = max(last for _, _, last in found) - min(first for _, first, _ in found)
            return jobs / took_s
        time.sleep(0.05)
    raise NotInstalled("not all jobs were handled in time")


def run(jobs: int, rounds: int, told: Callable[[str], None]) -> list[Rate]:
    found = []
    for one in CONTENDERS:
        try:
            rates = [measure(one, jobs) for _ in range(rounds)]
        except (NotInstalled, OSError, subprocess.TimeoutExpired) as error:
            told(f"{one.name}: {error}")
            rates = [0.0]
        told(f"{one.name:32} {statistics.median(rates):10,.0f}/s")
        found.append(Rate(one.name, one.keeps, jobs, statistics.median(rates)))
    return found


def show(jobs: int, console: Any, rounds: int = 3) -> list[dict[str, Any]]:
    found = run(jobs, rounds, lambda line: console.print(f"  {line}", style="dim", markup=False))
    beside = next(rate.per_s for rate in found if rate.contender == "Celery, Redis")
    table = Table(
        "task queue", "handlers/s", "to Celery on Redis", "what is safe when", title="Jobs that do nothing"
    )
    for rate in found:
        cells = (f"{rate.per_s:,.0f}", f"{rate.per_s / beside:.1f}" if beside and rate.per_s else "no figure")
        table.add_row(rate.contender, *cells, rate.keeps)
    console.print(table)
    return [asdict(rate) for rate in found]
