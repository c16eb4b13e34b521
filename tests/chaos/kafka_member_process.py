"""A consumer of librdkafka's in a group, which notes what it handles and commits: it may be killed any time.

    python -m tests.chaos.kafka_member_process ADDRESSES JOURNAL NAME

Order is judged by partition, so that a message's key is the number of its partition.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaException

from postroom.testing import check
from postroom.testing.check import Event

__all__ = ["consume"]


def consume(addresses: str, journal: Path, name: str) -> None:
    client = Consumer(
        {"bootstrap.servers": addresses, "group.id": "billing", "auto.offset.reset": "earliest",
         "enable.auto.commit": False, "session.timeout.ms": 6_000, "heartbeat.interval.ms": 500}
    )  # fmt: skip
    client.subscribe(["orders"])
    while True:
        messages = [one for one in client.consume(50, timeout=0.5) if one.error() is None]
        if messages:
            check.write(journal, [_noted("handled", one, name) for one in messages])
            _commit(client, journal, messages, name)


def _commit(client: Any, journal: Path, messages: list[Any], name: str) -> None:
    try:
        taken = client.commit(asynchronous=False)
    except KafkaException:  # left behind, or the coordinator is away: they come again
        return
    at = time.time_ns()
    ends = {one.partition: one.offset for one in taken if one.error is None and one.offset >= 0}
    events = [
        Event(at, "committed", name, topic="orders", group="billing", partition=number, offset=offset)
        for number, offset in ends.items()
    ]
    settled = [one for one in messages if one.offset() < ends.get(one.partition(), 0)]
    check.write(journal, [*events, *(_noted("settled", one, name) for one in settled)])


def _noted(did: check.Did, message: Any, name: str) -> Event:
    return Event(
        time.time_ns(), did, name, message.value().decode(), str(message.partition()), "orders", "billing",
        message.partition(), message.offset(),
    )  # fmt: skip


if __name__ == "__main__":
    consume(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
