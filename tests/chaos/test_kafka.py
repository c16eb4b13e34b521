"""Kafka clients go on while brokers and consumers are killed and the database restarts (I28).

Nothing that was confirmed is lost or stored twice, each partition stays in order, and no committed offset
goes back but what a crash of the database has forgotten (I8). Clients are librdkafka's, unchanged.
"""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import postroom
from postroom.testing import check
from postroom.testing.check import Event
from tests.ready import ready
from tests.servers.places import HOST, free_port
from tests.servers.server import Server

from .stage import SECONDS, arrives, until

PARTITIONS = 3
_SOME = 60  # messages that are handled after each trouble: it is over
_PATIENCE_S = 90.0
_LAZY_NS = 3_000_000_000  # as in `stage`
_BROKER = """
import asyncio, sys, postroom

async def main():
    async with postroom.connect(sys.argv[1]) as mq, await mq.serve(port=0, kafka=int(sys.argv[2])):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


class Sending(threading.Thread):
    """An idempotent producer that sends to each partition in turn until it is told to stop."""

    def __init__(self, addresses: str) -> None:
        super().__init__(daemon=True)
        self._producer = Producer(
            {"bootstrap.servers": addresses, "enable.idempotence": True, "linger.ms": 5,
             "message.timeout.ms": int(_PATIENCE_S * 1000), "reconnect.backoff.max.ms": 500}
        )  # fmt: skip
        self.stopped, self.events = threading.Event(), list[Event]()

    def run(self) -> None:
        for number in itertools.count():
            if self.stopped.wait(0.004):
                break
            id, partition = f"m{number}", number % PARTITIONS
            self.events.append(Event(time.time_ns(), "sending", "p", id, str(partition), "orders"))
            self._producer.produce("orders", id.encode(), partition=partition, on_delivery=self._told)
            self._producer.poll(0)
        self._producer.flush(_PATIENCE_S)

    def _told(self, error: Any, message: Any) -> None:
        id, partition = message.value().decode(), message.partition()
        did: check.Did = "confirmed" if error is None else "failed"
        offset = message.offset() if error is None else -1
        now = time.time_ns()
        self.events.append(Event(now, did, "p", id, str(partition), "orders", "", partition, offset))


class Troupe:
    """Brokers and members, each a process; all are gone at the end."""

    def __init__(self, url: str, tmp_path: Path) -> None:
        self._url, self._tmp_path = url, tmp_path
        self._names = itertools.count()
        self.ports = [free_port(), free_port()]
        self.addresses = ",".join(f"{HOST}:{port}" for port in self.ports)
        self.brokers: dict[int, subprocess.Popen[str]] = {}
        self.members: dict[str, subprocess.Popen[bytes]] = {}
        self.events: list[Event] = []

    def __enter__(self) -> Troupe:
        return self

    def __exit__(self, *args: object) -> None:
        for process in [*self.brokers.values(), *self.members.values()]:
            process.kill()
            process.wait(_PATIENCE_S)
            if process.stdout is not None:
                process.stdout.close()

    def serve(self, port: int) -> None:
        command = [sys.executable, "-c", _BROKER, self._url, str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.brokers[port] = process
        assert process.stdout is not None and process.stdout.readline(), "the broker did not start"

    def join(self) -> None:
        name = f"c{next(self._names)}"
        words = ["-m", "tests.chaos.kafka_member_process", self.addresses, str(self._journal(name)), name]
        self.members[name] = subprocess.Popen([sys.executable, *words])

    def kill_broker(self) -> None:
        port, process = next(iter(self.brokers.items()))
        process.kill()
        process.wait(_PATIENCE_S)
        assert process.stdout is not None
        process.stdout.close()
        del self.brokers[port]
        self.serve(port)

    def kill_member(self) -> None:
        name, process = next(iter(self.members.items()))
        process.kill()
        process.wait(_PATIENCE_S)
        self.events.append(Event(time.time_ns(), "killed", name))
        del self.members[name]
        self.join()

    def _journal(self, name: str) -> Path:
        return self._tmp_path / f"{name}.jsonl"

    def history(self) -> list[Event]:
        noted = [event for path in self._tmp_path.glob("c*.jsonl") for event in check.read(path)]
        return [*self.events, *noted]

    def handled(self) -> int:
        return len({event.id for event in self.history() if event.did == "handled"})


@pytest.mark.slow("makes trouble for seconds, in many processes")
@pytest.mark.timeout(SECONDS * 3 + 400)
async def test_kafka_clients_lose_nothing_while_everything_around_them_fails(
    own_postgres: Server, tmp_path: Path
) -> None:
    with ready(own_postgres) as ground, Troupe(ground.url, tmp_path) as troupe:
        async with postroom.connect(ground.url) as mq:
            await mq.create_topic("orders", kafka_partitions=PARTITIONS)
        for port in troupe.ports:
            await asyncio.to_thread(troupe.serve, port)
        sending = Sending(troupe.addresses)
        sending.start()
        troupe.join()
        troupe.join()
        try:
            await _goes_on(troupe, 0, "the beginning")
            await _fail(troupe, own_postgres)
        finally:
            sending.stopped.set()
            await asyncio.to_thread(sending.join, _PATIENCE_S)
        confirmed = {event.id for event in sending.events if event.did == "confirmed"}
        await arrives(lambda: troupe.handled() >= len(confirmed), "all is handled", _PATIENCE_S)
        async with postroom.connect(ground.url) as mq:
            stored = [message async for message in mq.read("orders")]
    _judge([*sending.events, *troupe.history()], stored)


async def _fail(troupe: Troupe, server: Server) -> None:
    end = time.monotonic() + SECONDS
    while True:
        before = troupe.handled()
        await asyncio.to_thread(troupe.kill_broker)
        before = await _goes_on(troupe, before, "a killed broker")
        await asyncio.to_thread(troupe.kill_member)
        before = await _goes_on(troupe, before, "a killed consumer")
        for way in ("fast", "kill"):
            begin = time.time_ns()
            await asyncio.to_thread(server.kill if way == "kill" else lambda: server.stop("fast"))
            crash = way == "kill"
            await asyncio.to_thread(server.start)
            troupe.events.append(Event(begin, "outage", until=time.time_ns(), crash=crash))
            before = await _goes_on(troupe, before, f"a database that was stopped ({way})")
        if time.monotonic() > end:
            return


async def _goes_on(troupe: Troupe, before: int, what: str) -> int:
    await until(lambda: troupe.handled() > before + _SOME, f"work goes on after {what}", _PATIENCE_S)
    return troupe.handled()


def _judge(history: list[Event], stored: list[Any]) -> None:
    """A rebalance may bring again what was handled and not committed: that alone is no fault here."""
    read = [
        Event(time.time_ns(), "stored", id=one.value.decode(), topic="orders", partition=one.partition,
              offset=one.offset)
        for one in stored
    ]  # fmt: skip
    log = check.log([*history, *read], "orders")
    assert log.clean and log.confirmed > _SOME, log
    verdict = check.group(history, "billing", topic="orders", ordered=True, lazy_ns=_LAZY_NS)
    faults = [fault for fault in verdict.faults if fault.kind != "repeated"]
    print(f"Kafka clients: {verdict}; {Counter(event.did for event in history)}")
    assert not faults, faults[:5]
