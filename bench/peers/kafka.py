"""Kafka, one broker: the topic is flushed before each confirmation, and a group commits its offsets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from postroom.errors import how_to_install

from .kafka_server import kafka_server
from .peer import NotInstalled, Peer

try:
    import confluent_kafka
    from confluent_kafka import admin
except ImportError:
    confluent_kafka = None

__all__ = ["Kafka"]


class Kafka(Peer):
    name = "kafka"
    how = (
        "1 partition, acks=all, flush.messages=1; confluent-kafka, linger 5 ms; offsets committed, confirmed"
    )
    batch = 1000
    at_once = 4
    acks_at_once = 2

    @contextmanager
    def serve(self) -> Iterator[str]:
        if confluent_kafka is None:
            raise NotInstalled(f"not installed: {how_to_install('bench')}")
        with kafka_server() as address:
            yield address

    async def create(self, address: str, queue: str) -> None:
        topic = admin.NewTopic(queue, 1, 1, config={"flush.messages": "1"})
        client = admin.AdminClient({"bootstrap.servers": address, "log_level": 3})
        for made in client.create_topics([topic], operation_timeout=20).values():
            await asyncio.to_thread(made.result, 20)

    async def publisher(self, address: str, queue: str, *, paced: bool) -> _Publisher:
        return _Publisher(address, queue)

    async def taker(self, address: str, queue: str) -> _Taker:
        taker = _Taker(address, queue)
        await asyncio.to_thread(taker.join)
        return taker


class _Publisher:
    def __init__(self, address: str, queue: str) -> None:
        # Without a linger each single message is a request with flushes of its own: 30 times the latency.
        settings = {"bootstrap.servers": address, "acks": "all", "linger.ms": 5}
        self._producer = confluent_kafka.Producer(settings)
        self._loop, self._queue, self._closing = asyncio.get_running_loop(), queue, False
        self._thread = threading.Thread(target=self._serve_callbacks)
        self._thread.start()

    def _serve_callbacks(self) -> None:
        while not self._closing:
            self._producer.poll(0.1)

    async def publish(self, values: list[bytes]) -> int:
        done, left = self._loop.create_future(), len(values)

        def delivered(error: Any, message: Any) -> None:
            nonlocal left
            left -= 1
            if error is not None:
                self._loop.call_soon_threadsafe(done.set_exception, RuntimeError(str(error)))
            elif left == 0:
                self._loop.call_soon_threadsafe(done.set_result, len(values))

        for value in values:
            self._producer.produce(self._queue, value, on_delivery=delivered)
        return int(await done)

    async def close(self) -> None:
        self._closing = True
        await asyncio.to_thread(self._thread.join)


class _Taker:
    def __init__(self, address: str, queue: str) -> None:
        settings = {"bootstrap.servers": address, "group.id": "bench", "auto.offset.reset": "earliest"}
        # By default it rests for a second whenever 100,000 messages are fetched ahead.
        fast = {"fetch.queue.backoff.ms": 5, "enable.auto.commit": False}
        self._consumer = confluent_kafka.Consumer(settings | fast)
        self._consumer.subscribe([queue])
        self._first: list[Any] = []

    def join(self) -> None:
        while not self._first and not self._consumer.assignment():
            self._first = self._consumer.consume(1, timeout=0.1)

    def _take(self) -> list[Any]:
        first = self._first or self._consumer.consume(1, timeout=1)
        self._first = []
        return [*first, *self._consumer.consume(4999, timeout=0)] if first else []

    async def take(self) -> tuple[list[bytes], Any]:
        messages = await asyncio.to_thread(self._take)
        return [message.value() for message in messages], messages[-1] if messages else None

    async def ack(self, token: Any) -> None:
        await asyncio.to_thread(self._consumer.commit, message=token, asynchronous=False)

    async def close(self) -> None:
        await asyncio.to_thread(self._consumer.close)
