"""The harness: contenders in turn, both sides of each in processes of their own, all bounded in time.

A contender that is not installed, or fails, is a result with the reason; it never ends the run.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import msgspec

from ..latency import RATE, bare_commit
from ..measure import Latency
from .peer import NotInstalled, Peer
from .worker import WARMING, Figures, Task

__all__ = ["SIZES", "Result", "Run", "Speed", "run"]

SIZES = (100, 1000)
GRACE_S = 30.0  # beyond a task's own time: to connect, to end, and what a busy machine takes
What = Literal["publish", "consume + ack", "publish beside", "consume + ack beside"]  # beside: both at once
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Speed:
    size: int
    what: What
    messages: int
    seconds: float
    cpu_s: float  # of the client's process

    @property
    def per_s(self) -> float:
        return self.messages / self.seconds


Measure = Callable[[Peer, str, int, float], Awaitable[list[Speed]]]


@dataclass
class Result:
    contender: str
    how: str
    reason: str = ""  # why there are no figures, or not all of them
    speeds: list[Speed] = field(default_factory=list)
    latency: Latency | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self) | {"speeds": [asdict(s) | {"per_s": s.per_s} for s in self.speeds]}


@dataclass(frozen=True)
class Run:
    results: list[Result]
    commit: Latency  # one flushed SQLite commit at the same pace, right before the steady runs


Step = Callable[[Peer, str, Result], Awaitable[str]]


async def run(
    peers: Iterable[type[Peer]],
    *,
    seconds: float,
    sizes: Iterable[int] = SIZES,
    told: Callable[[str], None] = lambda _: None,
) -> Run:
    """All servers run throughout; contenders take turns step by step, so that a slow moment hits all."""
    results: list[Result] = []
    with ExitStack() as servers:
        running = []
        for peer in (kind() for kind in peers):
            results.append(result := Result(peer.name, peer.how))
            with _reason_kept(result, told):
                told(f"{peer.name}: starting")
                running.append((peer, servers.enter_context(peer.serve()), result))
        for step in _speed_steps(sizes, seconds):
            await _turns(step, running, told)
        commit = await asyncio.to_thread(bare_commit, seconds * 2)
        await _turns(partial(_steady_step, seconds * 2), running, told)
    return Run(results, commit)


async def _turns(step: Step, running: list[tuple[Peer, str, Result]], told: Callable[[str], None]) -> None:
    for peer, address, result in running:
        if not result.reason:
            with _reason_kept(result, told):
                told(f"{peer.name}: {await step(peer, address, result)}")


@contextmanager
def _reason_kept(result: Result, told: Callable[[str], None]) -> Iterator[None]:
    """One contender's trouble is a row of the table, not the end of the run."""
    try:
        yield
    except NotInstalled as missing:
        result.reason = str(missing)
    except Exception as failed:
        result.reason = f"failed: {failed!r}"
    if result.reason:
        told(f"{result.contender}: {result.reason}")


def _speed_steps(sizes: Iterable[int], seconds: float) -> Iterator[Step]:
    for size in sizes:
        for measured in (_alone, _both):
            yield partial(_speed_step, measured, size, seconds)


async def _speed_step(
    measured: Measure, size: int, seconds: float, peer: Peer, address: str, result: Result
) -> str:
    speeds = await measured(peer, address, size, seconds)
    result.speeds += speeds
    return f"{size} B, " + ", ".join(f"{speed.what} {speed.per_s:,.0f}/s" for speed in speeds)


async def _steady_step(seconds: float, peer: Peer, address: str, result: Result) -> str:
    result.latency = found = await _steady(peer, address, seconds)
    return f"{found.what} p50 {found.p50_ms:.2f} ms, p99 {found.p99_ms:.2f} ms"


async def _alone(peer: Peer, address: str, size: int, seconds: float) -> list[Speed]:
    """First the producer, then a consumer of what that one left."""
    queue = f"alone{size}"
    await peer.create(address, queue)
    (published,) = await _do(Task(_path(peer), "publish", address, queue, size, seconds))
    taking = Task(_path(peer), "drain", address, queue, size, seconds, most=published.messages)
    (taken,) = await _do(taking)
    return [_speed(size, "publish", published), _speed(size, "consume + ack", taken)]


async def _both(peer: Peer, address: str, size: int, seconds: float) -> list[Speed]:
    queue = f"both{size}"
    await peer.create(address, queue)
    taken, published = await _do(
        Task(_path(peer), "follow", address, queue, size, seconds),
        Task(_path(peer), "publish", address, queue, size, seconds),
    )
    return [
        _speed(size, "publish beside", published),
        _speed(size, "consume + ack beside", taken),
    ]


async def _steady(peer: Peer, address: str, seconds: float) -> Latency:
    """From the call of publish to the message in the hands of a consumer that waits for it."""
    await peer.create(address, "steady")
    count = int(seconds * RATE)
    taken, _ = await _do(
        Task(_path(peer), "receive", address, "steady", 100, seconds + 5, most=count),
        Task(_path(peer), "pace", address, "steady", 100, seconds),
    )
    if len(taken.waits) < count:
        raise RuntimeError(f"{len(taken.waits)} of {count} messages at a steady pace came in time")
    return Latency.of(peer.name, "publish until received", taken.waits[count // WARMING :])


def _path(peer: Peer) -> str:
    return f"{type(peer).__module__}:{type(peer).__name__}"


def _speed(size: int, what: What, found: Figures) -> Speed:
    return Speed(size, what, found.messages, found.seconds, found.cpu_s)


async def _do(*tasks: Task) -> list[Figures]:
    """Each in a process; all begin when the last is ready. Taken back, by their ids, when time is up."""
    processes = [await _start(task) for task in tasks]
    try:
        async with asyncio.timeout(GRACE_S + 2 * max(task.seconds for task in tasks)):
            for process in processes:
                await _line(process, "connected")
            for process in processes:
                assert process.stdin is not None
                process.stdin.write(b"go\n")
            lines = await asyncio.gather(*(_line(process, "measured") for process in processes))
            await asyncio.gather(*(process.wait() for process in processes))
    except TimeoutError:
        raise RuntimeError(f"{' and '.join(task.do for task in tasks)} took too long") from None
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    return [msgspec.json.decode(line, type=Figures) for line in lines]


async def _start(task: Task) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.peers.worker", msgspec.json.encode(task).decode()),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        limit=64 * 1024 * 1024,  # the waits of a long run are one line
    )


async def _line(process: asyncio.subprocess.Process, what: str) -> bytes:
    assert process.stdout is not None and process.stderr is not None
    line = await process.stdout.readline()
    if not line:
        words = (await process.stderr.read()).decode(errors="replace").strip()
        raise RuntimeError(f"a process ended before it had {what}: {words.splitlines()[-1:] or 'no word'}")
    return line
