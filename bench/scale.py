"""What many topics, groups and members cost: each figure beside the same with ten topics.

A broker is served by a process of its own, and its CPU is read from /proc. Members that come and go are a
step of its own: each joins, polls once and leaves, or dies without a word.

python -m bench.scale [--store sqlite|postgresql|mariadb] [--topics 10000] [--seconds 20] [--folder /dev/shm]
python -m bench.scale --members 100000
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path

import postroom
from postroom.address import parse
from postroom.broker.broker import Broker, open_endpoint
from postroom.endpoint.values import PollRequest
from postroom.errors import PostroomError
from postroom.model.policy.settings import GroupWish, TopicSettings
from tests.servers.places import free_port

from .grounds import Ground, ground
from .measure import cpu_s, percentile

__all__ = ["Members", "Scale", "members", "run"]

_FEW = 10
_GROUPS = 1000  # on one topic
_MANY_GROUPS = 100  # topics that have a group, for the figures of groups
_CONSUMERS = 20  # idle ones
_SETTLE_S = 12.0  # after a start: every duty has run once


@dataclass(frozen=True)
class Scale:
    """Milliseconds, unless the name says otherwise."""

    topics: int
    create: float
    create_first: float  # of the first tenth, and of the last
    create_last: float
    start_s: float  # of a broker, until a client is let in
    idle_cpu_percent: float
    idle_cpu_percent_waiting: float  # while some consumers wait
    memory_mb: float
    send: float  # p50, as all that follow
    poll: float
    send_to_poll: float  # from the call until a consumer that waits has it
    topic: float
    unknown_topic: float
    listing: float
    listing_nothing: float  # by somebody who may see none
    metrics: float
    metrics_again: float
    delete: float
    create_groups: float  # on one topic, each
    groups: float  # listing them


@dataclass(frozen=True)
class Members:
    members: int
    first: float  # ms each, of the first tenth and of the last
    last: float
    memory_first_mb: float
    memory_last_mb: float
    rows: dict[str, int] = field(default_factory=dict)  # what is left of them in the store
    maps: dict[str, int] = field(default_factory=dict)  # and in the broker


# ---- many topics ----


async def run(where: Ground, topics: int, seconds: float, folder: Path) -> Scale:
    url = where.fresh(folder)
    created = await _create(url, topics)
    port, http_port = free_port(), free_port()
    command = [sys.executable, "-m", "postroom", "serve", url, "--migrate", "--dev"]
    ports = ["--port", str(port), "--http-port", str(http_port)]
    began = time.perf_counter()
    log = (folder / "broker.log").open("wb")
    server = await asyncio.create_subprocess_exec(*command, *ports, stderr=log)
    try:
        mq = await _connected(f"postroom://127.0.0.1:{port}")
        start_s = time.perf_counter() - began
        token = await _nobody(url)
        nobody = await postroom.connect(f"postroom://127.0.0.1:{port}", token=token)
        try:
            return await _measure(mq, nobody, server.pid, http_port, created, start_s, seconds)
        finally:
            await nobody.close()
            await mq.close()
    finally:
        server.terminate()
        await server.wait()
        log.close()


async def _create(url: str, topics: int) -> list[float]:
    broker = await open_endpoint(parse(url), migrate=True)
    took = []
    try:
        for number in range(topics):
            began = time.perf_counter()
            await broker.create_topic(f"topic-{number:05d}", TopicSettings(), 1, False)
            took.append(1000 * (time.perf_counter() - began))
        for number in range(min(_MANY_GROUPS, topics)):
            await broker.create_group(f"topic-{number:05d}", "billing", GroupWish())
    finally:
        await broker.close()
    return took


async def _nobody(url: str) -> str:
    """The token of a principal that may do nothing."""
    command = [sys.executable, "-m", "postroom", "access", "add", "nobody", "--url", url, "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    return next(word for word in said.decode().split('"') if word.startswith("pst_"))


async def _measure(
    mq: postroom.Connection,
    nobody: postroom.Connection,
    pid: int,
    http_port: int,
    created: list[float],
    start_s: float,
    seconds: float,
) -> Scale:
    await asyncio.sleep(_SETTLE_S)
    idle = await _cpu_percent(pid, seconds)
    async with _waiting(mq, min(_CONSUMERS, len(created))):
        waiting = await _cpu_percent(pid, seconds)
    first = "topic-00000"
    send = await _p50(lambda: mq.send(first, b"news"), 200)
    poll, through = await _consumed(mq, first)
    tenth = max(1, len(created) // 10)
    return Scale(
        topics=len(created),
        create=sum(created) / len(created),
        create_first=sum(created[:tenth]) / tenth,
        create_last=sum(created[-tenth:]) / tenth,
        start_s=start_s,
        idle_cpu_percent=idle,
        idle_cpu_percent_waiting=waiting,
        memory_mb=_resident_mb(pid),
        send=send,
        poll=poll,
        send_to_poll=through,
        topic=await _p50(lambda: mq.topic(first), 20),
        unknown_topic=await _p50(lambda: _refused(mq.topic("topic-0O000")), 20),
        listing=await _p50(mq.topics, 3),
        listing_nothing=await _p50(nobody.topics, 5),
        metrics=await _scrape(http_port),
        metrics_again=await _scrape(http_port),
        delete=await _p50(_deleting(mq, len(created)), min(5, len(created) // 2)),
        create_groups=await _p50(_grouping(mq, first), _GROUPS),
        groups=await _p50(lambda: mq.groups(first), 3),
    )


@asynccontextmanager
async def _waiting(mq: postroom.Connection, count: int) -> AsyncIterator[None]:
    consumers = [mq.consumer(f"topic-{number:05d}", group="idle") for number in range(count)]
    for consumer in consumers:
        await consumer.__aenter__()
    polls = [asyncio.create_task(_poll_on(consumer)) for consumer in consumers]
    try:
        yield
    finally:
        for poll in polls:
            poll.cancel()
        await asyncio.gather(*polls, return_exceptions=True)
        for consumer in consumers:
            await consumer.__aexit__(None, None, None)


async def _poll_on(consumer: postroom.Consumer) -> None:
    while True:
        await consumer.poll(wait=10)


async def _consumed(mq: postroom.Connection, topic: str) -> tuple[float, float]:
    """A poll of what is there, and the time from a send until a consumer that waits has it."""
    polls, through = [], []
    async with mq.consumer(topic, group="latency", window=1) as consumer:
        for _ in range(100):
            began = time.perf_counter()
            found = await consumer.poll(max_messages=1, wait=10)
            polls.append(time.perf_counter() - began)
            await consumer.ack(found)
    async with mq.consumer(topic, group="latest", start="latest") as consumer:
        for _ in range(100):
            waiting = asyncio.create_task(consumer.poll(max_messages=1, wait=10))
            await asyncio.sleep(0.01)
            began = time.perf_counter()
            await mq.send(topic, b"news")
            found = await waiting
            through.append(time.perf_counter() - began)
            await consumer.ack(found)
    return 1000 * percentile(polls, 50), 1000 * percentile(through, 50)


def _deleting(mq: postroom.Connection, topics: int) -> Callable[[], Awaitable[None]]:
    last = iter(range(topics - 1, 0, -1))
    return lambda: mq.delete_topic(f"topic-{next(last):05d}")


def _grouping(mq: postroom.Connection, topic: str) -> Callable[[], Awaitable[object]]:
    names = (f"group-{number}" for number in range(10 * _GROUPS))
    return lambda: mq.create_group(topic, next(names))


async def _refused(call: Awaitable[object]) -> None:
    try:
        await call
    except PostroomError:
        pass


async def _p50(call: Callable[[], Awaitable[object]], times: int) -> float:
    took = []
    for _ in range(times):
        began = time.perf_counter()
        await call()
        took.append(1000 * (time.perf_counter() - began))
    return percentile(took, 50)


async def _scrape(port: int) -> float:
    def get() -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
            answer.read()

    began = time.perf_counter()
    await asyncio.to_thread(get)
    return 1000 * (time.perf_counter() - began)


async def _connected(url: str) -> postroom.Connection:
    while True:
        try:
            return await postroom.connect(url)
        except PostroomError:
            await asyncio.sleep(0.05)


async def _cpu_percent(pid: int, seconds: float) -> float:
    cpu, began = cpu_s(pid), time.perf_counter()
    await asyncio.sleep(seconds)
    return 100 * (cpu_s(pid) - cpu) / (time.perf_counter() - began)


def _resident_mb(pid: int) -> float:
    line = next(x for x in Path(f"/proc/{pid}/status").read_text().splitlines() if x.startswith("VmRSS"))
    return int(line.split()[1]) / 1024


# ---- members that come and go ----


async def members(where: Ground, count: int, folder: Path, dying: float = 0.1) -> Members:
    """Each joins, polls once and leaves; of ten, one dies without a word."""
    broker = await open_endpoint(parse(where.fresh(folder)), migrate=True)
    took, memory = [], []
    try:
        await broker.create_topic("jobs", TopicSettings(), 4, False)
        for number in range(count):
            began = time.perf_counter()
            await _come_and_go(broker, f"member-{number}", leave=secrets.randbelow(1000) >= 1000 * dying)
            took.append(1000 * (time.perf_counter() - began))
            if number in (count // 10, count - 1):
                memory.append(_resident_mb(os.getpid()))
        tenth = max(1, count // 10)
        first, last = sum(took[:tenth]) / tenth, sum(took[-tenth:]) / tenth
        rows = {"members": len(broker.store.progress.members(broker.store.catalog.group("jobs", "work").id))}
        return Members(count, first, last, memory[0], memory[-1], rows, sizes(broker))
    finally:
        await broker.close()


async def _come_and_go(broker: Broker, member: str, *, leave: bool) -> None:
    await broker.subscribe("jobs", "work", GroupWish(lease_ms=1000), member, member)
    await broker.poll(PollRequest("jobs", "work", member, secrets.randbits(62) + 1, 10, 1 << 20, 0, True))
    if leave:
        await broker.unsubscribe("jobs", "work", member)


def sizes(broker: object) -> dict[str, int]:
    """How many things each map of a broker, or a server, has that could grow with members and topics."""
    found: dict[str, int] = {}
    seen: set[int] = set()

    def walk(thing: object, path: str, depth: int) -> None:
        if id(thing) in seen or depth > 4:
            return
        seen.add(id(thing))
        if isinstance(thing, dict | set | list):
            found[path] = len(thing)
        elif type(thing).__module__.startswith("postroom.") and hasattr(thing, "__dict__"):
            for name, value in vars(thing).items():
                walk(value, f"{path}.{name}" if path else name, depth + 1)

    walk(broker, "", 0)
    return {path: size for path, size in found.items() if size > _FEW}


# ---- the command ----


def _shown(few: Scale, many: Scale) -> str:
    lines = [f"{'':28}{few.topics:>10,}{many.topics:>10,}   ratio"]
    for one in fields(Scale)[1:]:
        a, b = getattr(few, one.name), getattr(many, one.name)
        lines.append(f"{one.name:28}{a:10.2f}{b:10.2f}{b / a if a else 0:8.1f}")
    return "\n".join(lines)


async def _both(where: Ground, args: argparse.Namespace) -> None:
    found = []
    for count in (_FEW, args.topics):
        with tempfile.TemporaryDirectory(prefix="postroom-bench-", dir=args.folder) as folder:
            found.append(await run(where, count, args.seconds, Path(folder)))
    print(_shown(*found))


async def _members(where: Ground, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="postroom-bench-", dir=args.folder) as folder:
        print(await members(where, args.members, Path(folder)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--store", default="sqlite", choices=["sqlite", "postgresql", "mariadb"])
    parser.add_argument("--topics", type=int, default=10_000)
    parser.add_argument("--members", type=int, default=0, help="instead: so many that come and go")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which CPU is counted")
    parser.add_argument("--folder", help="where SQLite's files are; one in memory leaves the disk out")
    args = parser.parse_args()
    with ground(args.store) as where:
        asyncio.run((_members if args.members else _both)(where, args))


if __name__ == "__main__":
    main()
