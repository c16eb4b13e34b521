"""What thousands of idle connections cost a served broker: memory, CPU, transactions of the database.

Each connection is a member of a group that polls and beats as the SDK does; nothing is sent. Then one message
is sent, and the time until every group has it is measured. The broker is a process of its own.

python -m bench.connections [--store sqlite|postgresql] [--connections 5000] [--groups 100] [--seconds 20]
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import postroom
from postroom.endpoint import requests as r
from postroom.endpoint.operations import OPERATIONS
from postroom.endpoint.values import Beat, PollReply, PollRequest
from postroom.errors import PostroomError
from postroom.model.policy.settings import GroupWish
from postroom.wire import messages as m
from postroom.wire.client.link import Link, connect
from tests.servers.places import free_port

from .grounds import Ground, ground
from .measure import cpu_s

__all__ = ["Connections", "run"]

_WAIT_MS = 15_000  # as the SDK asks for with a lease of 30 s
_BEAT_S = 10.0
_AT_ONCE = 100  # connections that are being made


@dataclass(frozen=True)
class Connections:
    store: str
    connections: int
    groups: int
    kb_each: float
    memory_mb: float
    cpu_percent: float
    commits_per_s: float  # -1: not known
    first_ms: float  # one message: until the first group had it, and the last
    last_ms: float


class _Crowd:
    def __init__(self, address: str, groups: int) -> None:
        self._address, self._groups = address, groups
        self.links: list[Link] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.received: dict[str, float] = {}
        self.all_received = asyncio.Event()

    async def join(self, count: int) -> None:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(number: int) -> None:
            async with turns:
                hello = m.Hello(m.MIN_VERSION, m.MAX_VERSION, f"client-{number}")
                link = await connect(self._address, hello, None, timeout_ms=60_000)
                self.links.append(link)
                group, member = f"g{number % self._groups}", f"member-{number}"
                request = r.Subscribe("idle", group, GroupWish(), member, "bench")
                await link.call(OPERATIONS["subscribe"], request)
            for work in (self._poll(link, group, member), self._beat(link, group, member)):
                self._tasks.add(asyncio.create_task(work))

        await asyncio.gather(*(one(number) for number in range(count)))

    async def _poll(self, link: Link, group: str, member: str) -> None:
        while True:
            token = secrets.randbits(63) | 1
            request = PollRequest("idle", group, member, token, 1000, 1 << 24, _WAIT_MS, True)
            reply: PollReply = await link.call(OPERATIONS["poll"], r.Poll(request))
            if reply.grants:
                self.received.setdefault(group, time.perf_counter())
                if len(self.received) == self._groups:
                    self.all_received.set()

    async def _beat(self, link: Link, group: str, member: str) -> None:
        await asyncio.sleep(_BEAT_S * secrets.randbelow(1000) / 1000)
        while True:
            await link.call(OPERATIONS["beat"], r.Beats((Beat("idle", group, member, "bench", ()),)))
            await asyncio.sleep(_BEAT_S)

    async def leave(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self.links))


def _resident_mb(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


def _commits(where: Ground, url: str) -> int:
    if where.store != "postgresql":
        return 0
    import psycopg

    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = current_database()"
        ).fetchone()
    return int(row[0]) if row else 0


async def run(where: Ground, connections: int = 5000, groups: int = 100, seconds: float = 20) -> Connections:
    with tempfile.TemporaryDirectory() as folder:
        url, port = where.fresh(Path(folder)), free_port()
        command = [sys.executable, "-m", "postroom", "serve", url, "--dev", "--migrate"]
        options = ["--port", str(port), "--http-port", "0"]
        server = await asyncio.create_subprocess_exec(*command, *options, stderr=asyncio.subprocess.DEVNULL)
        try:
            return await _measure(where, url, server.pid, port, connections, groups, seconds)
        finally:
            server.terminate()
            await server.wait()


async def _measure(
    where: Ground, url: str, pid: int, port: int, connections: int, groups: int, seconds: float
) -> Connections:
    mq = await _connected(f"postroom://127.0.0.1:{port}")
    await mq.create_topic("idle", partitions=4)
    for number in range(groups):
        await mq.create_group("idle", f"g{number}", start="latest")
    crowd = _Crowd(f"127.0.0.1:{port}", groups)
    before_mb = _resident_mb(pid)
    await crowd.join(connections)
    await asyncio.sleep(_BEAT_S)
    memory_mb, cpu, commits, began = _resident_mb(pid), cpu_s(pid), _commits(where, url), time.perf_counter()
    await asyncio.sleep(seconds)
    took = time.perf_counter() - began
    cpu, commits = cpu_s(pid) - cpu, _commits(where, url) - commits
    sent = time.perf_counter()
    await mq.send("idle", b"news")
    async with asyncio.timeout(60):
        await crowd.all_received.wait()
    times = sorted(1000 * (at - sent) for at in crowd.received.values())
    await crowd.leave()
    await mq.close()
    return Connections(
        where.store, connections, groups, 1024 * (memory_mb - before_mb) / connections, memory_mb,
        100 * cpu / took, commits / took if where.store == "postgresql" else -1, times[0], times[-1],
    )  # fmt: skip


async def _connected(url: str) -> postroom.Connection:
    while True:
        try:
            return await postroom.connect(url)
        except PostroomError:
            await asyncio.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.connections", description=__doc__)
    parser.add_argument("--store", default="sqlite", choices=("sqlite", "postgresql"))
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20)
    args = parser.parse_args()
    with ground(args.store) as where:
        print(asyncio.run(run(where, args.connections, args.groups, args.seconds)))


if __name__ == "__main__":
    main()
