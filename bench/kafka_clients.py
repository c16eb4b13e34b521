"""Kafka clients against Postroom's listener and against Kafka, in one run: `python -m bench kafka`.

The client is confluent-kafka for both, acks=all, one partition; both brokers flush before they confirm:
Postroom on a SQLite file, Kafka with flush.messages=1. A consumer is given its partition and reads from the
beginning; it is measured from its first message on, since librdkafka waits for half a second before it asks.
What the broker's process used of the processor is counted over the same time, and what the thread used that
calls the client: no broker can make that one faster. Idle consumers are connections that keep a Fetch
waiting, half a second each, as clients do.

Brokers take turns, round by round and each first in turn, so that a slow moment of the machine hits both; the
median counts. With them goes a bare file, to which pieces of a megabyte are appended, each flushed: no broker
that writes its bytes once is faster.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tests.servers.places import base_folder, free_port

from .peers.kafka_server import kafka_server
from .peers.peer import HOST, NotInstalled, ServerProcess
from .peers.postroom_peers import SERVE

__all__ = ["Speed", "run"]

SIZES = (100, 1000)
_TICK = os.sysconf("SC_CLK_TCK")
_PATIENCE_S = 120
_PIECE_BYTES = 1 << 20
_IDLE_WAIT_MS = 500  # fetch.max.wait.ms, as clients have it


@dataclass(frozen=True)
class Speed:
    broker: str
    what: str
    size: int  # bytes of a message; of idle consumers, 0
    per_s: float  # messages a second; of idle consumers, how many there were
    cpu_s: float  # of the broker, for a million messages; of idle consumers, a second
    client_s: float = 0.0  # of the thread that sends or takes them, for a million messages


@dataclass(frozen=True)
class _Broker:
    name: str
    address: str
    pid: int

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICK


def run(
    seconds: float, rounds: int = 3, idle: int = 1000, told: Callable[[str], None] = print
) -> list[Speed]:
    """The median of each figure."""
    with ExitStack() as servers:
        brokers = [servers.enter_context(_postroom())]
        try:
            brokers.append(servers.enter_context(_kafka()))
        except NotInstalled as missing:
            told(f"kafka: {missing}")
        found: dict[tuple[str, str, int], list[Speed]] = {}
        for number in range(rounds):
            for size in SIZES:
                turns = (_round(broker, f"round{number}-{size}", size, seconds) for broker in brokers)
                for speed in chain(_bare_file(size, seconds), *turns):
                    found.setdefault((speed.broker, speed.what, size), []).append(speed)
                    told(f"{speed.broker}: {speed.what} {size} B: {speed.per_s:,.0f}/s")
            brokers.reverse()
        medians = [_median(speeds) for speeds in found.values()]
        return medians + [asyncio.run(_idle(broker, idle, 2 * seconds)) for broker in brokers]


def _median(speeds: list[Speed]) -> Speed:
    one = speeds[0]
    per_s, cpu_s, client_s = (
        statistics.median(values)
        for values in zip(*((s.per_s, s.cpu_s, s.client_s) for s in speeds), strict=True)
    )
    return Speed(one.broker, one.what, one.size, per_s, cpu_s, client_s)


# ---- brokers ----


@contextmanager
def _postroom() -> Iterator[_Broker]:
    with ServerProcess("kafka-listener") as server:
        port = free_port()
        options = ["--dev", "--port", str(free_port()), "--http-port", "0", "--kafka", str(port)]
        server.start([*SERVE, f"sqlite:///{server.folder}/bench.db", *options], port)
        yield _Broker("postroom", f"{HOST}:{port}", _child("postroom\0serve"))


@contextmanager
def _kafka() -> Iterator[_Broker]:
    with kafka_server() as address:
        yield _Broker("kafka", address, _child("kafka.Kafka"))


def _child(words: str) -> int:
    """The id of our own process that was started with these words."""
    for folder in Path("/proc").iterdir():
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and words in (folder / "cmdline").read_text():
                return int(folder.name)
        except (OSError, ValueError, IndexError):  # no process, or one that has ended
            continue
    raise RuntimeError(f"no process of ours was started with {words!r}")


# ---- messages ----


class _Watch:
    """What a number of messages took: time, and of the processor the broker and this thread."""

    def __init__(self, broker: _Broker) -> None:
        self._broker = broker
        self.begin()

    def begin(self) -> None:
        self._began = time.perf_counter(), self._broker.cpu_s(), time.thread_time()

    def end(self, what: str, size: int, count: int) -> Speed:
        now = time.perf_counter(), self._broker.cpu_s(), time.thread_time()
        took, cpu_s, client_s = (after - before for before, after in zip(self._began, now, strict=True))
        millions = count / 1e6
        return Speed(self._broker.name, what, size, count / took, cpu_s / millions, client_s / millions)


def _round(broker: _Broker, topic: str, size: int, seconds: float) -> Iterator[Speed]:
    from confluent_kafka import admin

    client = admin.AdminClient({"bootstrap.servers": broker.address, "log_level": 3})
    wanted = admin.NewTopic(topic, 1, 1, config={"flush.messages": "1"})
    client.create_topics([wanted])[topic].result(_PATIENCE_S)
    yield _published(broker, topic, size, seconds)
    yield _consumed(broker, topic, size)


def _bare_file(size: int, seconds: float) -> Iterator[Speed]:
    """What the disk takes, as messages of that size a second."""
    piece, pieces = os.urandom(_PIECE_BYTES), 0
    with tempfile.TemporaryFile(dir=base_folder(), buffering=0) as file:
        began, used = time.perf_counter(), time.thread_time()
        while time.perf_counter() < began + seconds:
            file.write(piece)
            os.fdatasync(file.fileno())
            pieces += 1
        took, used = time.perf_counter() - began, time.thread_time() - used
    messages = pieces * _PIECE_BYTES / size
    yield Speed("bare file", "publish", size, messages / took, used / messages * 1e6)


def _published(broker: _Broker, topic: str, size: int, seconds: float) -> Speed:
    """All are confirmed. The log of the topic must hold as many."""
    from confluent_kafka import Producer

    settings = {"bootstrap.servers": broker.address, "acks": "all", "linger.ms": 5}
    producer, value = Producer(settings | {"queue.buffering.max.messages": 200_000}), os.urandom(size)
    watch, until, sent = _Watch(broker), time.perf_counter() + seconds, 0
    while time.perf_counter() < until:
        for _ in range(1000):
            try:
                producer.produce(topic, value, partition=0)
                sent += 1
            except BufferError:
                producer.poll(0.01)
        producer.poll(0)
    left = producer.flush(_PATIENCE_S)
    speed, stored = watch.end("publish", size, sent), _end(broker.address, topic)
    if left or stored != sent:
        raise RuntimeError(f"{sent} were sent, {left} are not confirmed, {stored} are there")
    return speed


def _consumer(address: str) -> Any:
    from confluent_kafka import Consumer

    settings = {"bootstrap.servers": address, "group.id": "bench", "enable.auto.commit": False}
    return Consumer(settings | {"fetch.queue.backoff.ms": 5})


def _end(address: str, topic: str) -> int:
    from confluent_kafka import TopicPartition

    consumer = _consumer(address)
    try:
        return int(consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=_PATIENCE_S)[1])
    finally:
        consumer.close()


def _consumed(broker: _Broker, topic: str, size: int) -> Speed:
    """All that there is."""
    from confluent_kafka import OFFSET_BEGINNING, TopicPartition

    wanted, consumer = _end(broker.address, topic), _consumer(broker.address)
    consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
    give_up_at = time.perf_counter() + _PATIENCE_S
    left = wanted - len(consumer.consume(1, timeout=_PATIENCE_S))
    watch = _Watch(broker)
    while left:
        if time.perf_counter() > give_up_at:
            raise RuntimeError(f"{left} of {wanted} did not come in {_PATIENCE_S} s")
        messages = consumer.consume(min(left, 10_000), timeout=0.1)  # it waits for so many
        left -= sum(message.error() is None for message in messages)
    speed = watch.end("consume", size, wanted)
    consumer.close()
    return speed


# ---- idle consumers ----


async def _idle(broker: _Broker, count: int, seconds: float) -> Speed:
    """What consumers cost the broker that wait for messages."""
    host, _, port = broker.address.rpartition(":")
    request = _fetch_request(
        f"round0-{SIZES[0]}", await asyncio.to_thread(_end, broker.address, f"round0-{SIZES[0]}")
    )
    answered = [0] * count

    async def wait(number: int) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            while True:
                writer.write(request)
                await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                answered[number] += 1
        finally:
            writer.close()

    async with asyncio.timeout(_PATIENCE_S):
        waiting = [asyncio.create_task(wait(number)) for number in range(count)]
        while not all(answered):  # noqa: ASYNC110 (a thousand of them)
            await asyncio.sleep(0.1)
        used, begun = broker.cpu_s(), time.perf_counter()
        await asyncio.sleep(seconds)
        used, took = broker.cpu_s() - used, time.perf_counter() - begun
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return Speed(broker.name, "idle consumers", 0, count, used / took)


def _fetch_request(topic: str, offset: int) -> bytes:
    """Fetch in version 4, of one partition from that offset on, as a whole frame."""
    name = topic.encode()
    header = struct.pack(">hhih5s", 1, 4, 1, 5, b"bench")
    limits = struct.pack(">iiiib", -1, _IDLE_WAIT_MS, 1, 1 << 20, 0)
    wanted = struct.pack(f">ih{len(name)}siiqi", 1, len(name), name, 1, 0, offset, 1 << 20)
    body = header + limits + wanted
    return struct.pack(">i", len(body)) + body
