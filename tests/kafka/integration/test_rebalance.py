"""Consumers come and go, a partition moves and brokers are killed, while messages arrive (I28).

Nothing is lost, the order of a partition is kept, and no committed offset goes back. Brokers are processes,
so that they can be killed; consumers are librdkafka's, each in a thread.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

import postroom
from tests.kafka.integration.clients import PATIENCE_S, Sender
from tests.kafka.integration.test_groups import consumer

MESSAGES, PARTITIONS = 3_000, 3
BROKER = """
import asyncio, sys, postroom

async def main():
    async with postroom.connect(sys.argv[1], shards={"other": sys.argv[2]}) as mq:
        async with await mq.serve(port=0, kafka=int(sys.argv[3])) as served:
            print(served.kafka, flush=True)
            await asyncio.Event().wait()

asyncio.run(main())
"""


class Broker:
    def __init__(self, url: str, other: str, port: str = "0") -> None:
        command = [sys.executable, "-c", BROKER, url, other, port]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()
        assert self.address, "it did not start"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()


class Member(threading.Thread):
    """Consumes and commits until it is told to stop; every run is one consumer."""

    def __init__(self, addresses: str, seen: Seen) -> None:
        super().__init__(daemon=True)
        self._addresses, self._seen, self._done = addresses, seen, threading.Event()

    def run(self) -> None:
        client = consumer(self._addresses, **{"session.timeout.ms": 6_000})
        client.subscribe(["orders"])
        while not self._done.is_set():
            for message in client.consume(50, timeout=0.2):
                if message.error() is None:
                    self._seen.note(message.partition(), message.offset(), message.value())
                else:
                    self._seen.errors[str(message.error())] += 1
            try:
                client.commit(asynchronous=False)
            except Exception:  # left behind, or nothing to commit: it comes again
                pass
        client.close()

    def stop(self) -> None:
        self._done.set()
        self.join(PATIENCE_S)
        assert not self.is_alive(), "it does not end"


class Seen:
    """What all members have received, by partition and offset."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.values: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.errors = Counter[str]()  # that members were told

    def note(self, partition: int, offset: int, value: bytes) -> None:
        with self._lock:
            known = self.values[partition].setdefault(offset, value)
            assert known == value, "an offset is one message"

    def count(self) -> int:
        with self._lock:
            return sum(map(len, self.values.values()))


@pytest.mark.slow("rebalances for seconds")
@pytest.mark.timeout(300)
async def test_consumers_that_come_and_go_lose_nothing_over_a_move_and_a_killed_broker(
    any_url: str, tmp_path: Path
) -> None:
    """Groups are on the first database, whichever it is; partitions move to another and back."""
    url, other = any_url, f"sqlite:///{tmp_path}/other.db"
    async with postroom.connect(url, shards={"other": other}, migrate=True) as mq:
        await mq.create_topic("orders", kafka_partitions=PARTITIONS)
        brokers = [await asyncio.to_thread(Broker, url, other) for _ in range(2)]
        seen, crew = Seen(), list[Member]()
        try:
            await run(mq, brokers, seen, crew)
        finally:
            for member in crew:
                await asyncio.to_thread(member.stop)
            for broker in brokers:
                broker.kill()
    for partition, values in seen.values.items():
        numbers = [int(values[offset]) for offset in sorted(values)]
        assert sorted(values) == list(range(len(values))), f"partition {partition} has a hole"
        assert numbers == sorted(numbers), f"partition {partition} is out of order"
    assert seen.count() == MESSAGES


async def run(mq: Any, brokers: list[Broker], seen: Seen, crew: list[Member]) -> None:
    addresses = ",".join(broker.address for broker in brokers)
    store, highest = mq._endpoint.store, dict[int, int]()

    def check_committed() -> None:
        for partition, offset in (
            next(iter(store.kafka_groups.positions().values()), {}).get("billing", {}).items()
        ):
            assert offset >= highest.get(partition, 0), "a committed offset went back"
            highest[partition] = offset

    async def until(count: int) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while seen.count() < count:
            if time.monotonic() > give_up_at:
                group = await asyncio.to_thread(store.kafka_groups.group, "billing")
                nodes = await asyncio.to_thread(store.brokers.nodes)
                alive = [member.is_alive() for member in crew]
                raise TimeoutError(
                    f"{seen.count()} of {count}; {group}, read by {alive}, who were told {seen.errors}; "
                    f"{nodes} of {addresses}; native groups: {await mq.groups('orders')}"
                )
            await asyncio.to_thread(check_committed)
            await asyncio.sleep(0.02)

    def start() -> None:
        crew.append(Member(addresses, seen))
        crew[-1].start()

    def send(first: int) -> None:
        for partition in range(PARTITIONS):
            values = [b"%d" % n for n in range(first, first + MESSAGES // 3) if n % PARTITIONS == partition]
            sender.send("orders", values, partition)

    sender = Sender(addresses, **{"message.timeout.ms": int(PATIENCE_S * 1000)})
    start()
    start()
    await asyncio.to_thread(send, 0)
    await until(500)
    start()
    await mq.move("orders", (await mq.route("orders")).ranges[0].partition)
    await until(MESSAGES // 3)
    await asyncio.to_thread(crew.pop(0).stop)
    group = await asyncio.to_thread(store.kafka_groups.group, "billing")
    holders = {one.broker_id: one.address for one in store.brokers.nodes()}
    [killed] = [one for one in brokers if one.address == holders[group.holder]]
    killed.kill()
    brokers.remove(killed)
    await asyncio.to_thread(send, MESSAGES // 3)
    start()
    await until(2 * MESSAGES // 3)
    await asyncio.to_thread(send, 2 * MESSAGES // 3)
    await until(MESSAGES)
    await asyncio.to_thread(check_committed)
