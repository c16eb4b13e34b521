"""What the console costs and how fast it answers, with many topics and groups, and while messages flow.

A broker is served by a process of its own, and its CPU is read from /proc. `cold` is the first overview that
a broker is asked for after its start. Viewers keep a stream open, each of another page of topics; what they
cost is the broker's CPU with them, less that without.

python -m bench console [--store sqlite|postgresql|mariadb] [--seconds 15]
python -m bench.console [--topics 1000] [--groups 5] [--viewers 50]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import postroom
from postroom.address import parse
from postroom.broker.broker import open_endpoint
from postroom.errors import PostroomError
from postroom.model.policy.settings import GroupWish, TopicSettings
from tests.servers.places import free_port

from .grounds import Ground, ground
from .measure import cpu_s, percentile

__all__ = ["GOAL_MS", "GOAL_PERCENT", "ConsoleCost", "run"]

GOAL_MS, GOAL_PERCENT = 300, 5
_STARTS = 3  # of a broker: the first answer of each is cold
_ASKED = 40  # overviews for a percentile
_PER_S = 200  # messages that flow
_PAGES = 20
_SETTLE_S = 5.0  # after a start, or a change of what goes on


@dataclass(frozen=True)
class ConsoleCost:
    """Milliseconds of an overview, and percent of a core."""

    store: str
    topics: int
    groups: int
    viewers: int
    cold: float  # the slowest of a few starts
    quiet: float  # p50 and the slowest
    quiet_max: float
    flowing: float
    flowing_max: float
    idle_percent: float  # the broker without any viewer
    viewers_percent: float  # what they add to it
    flow_percent: float  # the same while messages flow
    flow_viewers_percent: float
    events_per_s: float  # that each viewer got

    @property
    def good(self) -> bool:
        slowest = max(self.cold, self.quiet_max, self.flowing_max)
        return slowest < GOAL_MS and max(self.viewers_percent, self.flow_viewers_percent) < GOAL_PERCENT


async def run(
    where: Ground, topics: int = 1000, groups: int = 5, viewers: int = 50, seconds: float = 15
) -> ConsoleCost:
    with tempfile.TemporaryDirectory() as folder:
        url = where.fresh(Path(folder))
        await _create(url, topics, groups)
        cold = []
        for _ in range(_STARTS):
            async with _served(url, Path(folder)) as (pid, port, http_port):
                cold.append(await _overview_ms(http_port, topics))
                if len(cold) == _STARTS:
                    return await _measure(
                        ConsoleCost(where.store, topics, groups, viewers, max(cold), *(0.0,) * 9),
                        (pid, port, http_port),
                        seconds,
                    )
        raise AssertionError("there is at least one start")


async def _create(url: str, topics: int, groups: int) -> None:
    broker = await open_endpoint(parse(url), migrate=True)
    try:
        for number in range(topics):
            await broker.create_topic(_name(number), TopicSettings(), 1, False)
            for group in range(groups):
                await broker.create_group(_name(number), f"group-{group}", GroupWish())
    finally:
        await broker.close()


def _name(number: int) -> str:
    return f"topic-{number:05d}"


@asynccontextmanager
async def _served(url: str, folder: Path) -> AsyncIterator[tuple[int, int, int]]:
    """The broker's process, its port, and that of HTTP, once it answers there."""
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "postroom", "serve", url, "--migrate", "--dev"]
    with (folder / "broker.log").open("wb") as log:
        options = ["--port", str(port), "--http-port", str(http_port)]
        server = await asyncio.create_subprocess_exec(*command, *options, stderr=log)
        try:
            await _ready(http_port)
            yield server.pid, port, http_port
        finally:
            server.terminate()
            await server.wait()


async def _ready(http_port: int) -> None:
    async with asyncio.timeout(120):
        while True:
            with contextlib.suppress(OSError):
                await _get(http_port, "/health")
                return
            await asyncio.sleep(0.02)


async def _get(http_port: int, path: str) -> tuple[int, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
        return int(head.split(maxsplit=2)[1]), body
    finally:
        writer.close()


async def _overview_ms(http_port: int, topics: int) -> float:
    began = time.perf_counter()
    status, body = await _get(http_port, "/console/data/overview")
    took = 1000 * (time.perf_counter() - began)
    assert status == 200 and json.loads(body)["totals"]["topics"] == topics, body[:200]
    return took


async def _overviews(http_port: int, topics: int, seconds: float) -> tuple[float, float]:
    took = []
    for _ in range(_ASKED):
        took.append(await _overview_ms(http_port, topics))
        await asyncio.sleep(seconds / _ASKED)
    return percentile(took, 50), max(took)


async def _measure(found: ConsoleCost, there: tuple[int, int, int], seconds: float) -> ConsoleCost:
    pid, port, http_port = there
    await asyncio.sleep(_SETTLE_S)
    idle = await _percent(pid, seconds)
    quiet = await _overviews(http_port, found.topics, seconds)
    async with _viewing(http_port, found.viewers) as events:
        seen, before = events[0], time.perf_counter()
        with_viewers = await _percent(pid, seconds)
        per_s = (events[0] - seen) / (time.perf_counter() - before) / found.viewers
    async with _flow(f"postroom://127.0.0.1:{port}", found.topics):
        flow = await _percent(pid, seconds)
        flowing = await _overviews(http_port, found.topics, seconds)
        async with _viewing(http_port, found.viewers):
            flow_viewers = await _percent(pid, seconds)
    return ConsoleCost(
        found.store, found.topics, found.groups, found.viewers, found.cold, *quiet, *flowing,
        idle, with_viewers - idle, flow, flow_viewers - flow, per_s,
    )  # fmt: skip


async def _percent(pid: int, seconds: float) -> float:
    before, began = cpu_s(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    return 100 * (cpu_s(pid) - before) / (time.perf_counter() - began)


@asynccontextmanager
async def _viewing(http_port: int, viewers: int) -> AsyncIterator[list[int]]:
    """Streams as a browser keeps them; gives the number of events so far, in a list."""
    events = [0]

    async def view(number: int) -> None:
        path = f"/console/data/live?page={number % _PAGES}&sort=name"
        while True:  # a stream ends after a while, and the browser asks for the next
            reader, writer = await asyncio.open_connection("127.0.0.1", http_port)
            try:
                writer.write(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
                while line := await reader.readline():
                    events[0] += line.startswith(b"data: ")
                    if line == b"0\r\n":
                        break
            finally:
                writer.close()

    tasks = [asyncio.create_task(view(number)) for number in range(viewers)]
    try:
        await asyncio.sleep(_SETTLE_S)
        yield events
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def _flow(address: str, topics: int) -> AsyncIterator[None]:
    """So many messages a second, over all topics in turn."""
    mq = await _connected(address)

    async def send() -> None:
        began, sent = time.perf_counter(), 0
        while True:
            await mq.send(_name(sent % topics), b"x" * 100)
            sent += 1
            await asyncio.sleep(max(0.0, began + sent / _PER_S - time.perf_counter()))

    task = asyncio.create_task(send())
    try:
        await asyncio.sleep(_SETTLE_S)
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        await mq.close()


async def _connected(address: str) -> postroom.Connection:
    while True:
        try:
            return await postroom.connect(address)
        except PostroomError:
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.console", description=__doc__)
    parser.add_argument("--store", default="sqlite", choices=("sqlite", "postgresql", "mariadb"))
    parser.add_argument("--topics", type=int, default=1000)
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--viewers", type=int, default=50)
    parser.add_argument("--seconds", type=float, default=15)
    args = parser.parse_args()
    with ground(args.store) as where:
        print(asyncio.run(run(where, args.topics, args.groups, args.viewers, args.seconds)))


if __name__ == "__main__":
    main()
