"""What tests do with real clients of Kafka: send and read; in threads, since most of these clients block."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

__all__ = ["PATIENCE_S", "Sender", "admin", "read"]

PATIENCE_S = 60.0


class Sender:
    """librdkafka's producer: idempotent, so that it fails for good if a sequence is lost."""

    def __init__(self, address: str, **more: Any) -> None:
        self._producer = Producer({"bootstrap.servers": address, "enable.idempotence": True, **more})
        self.stored: list[tuple[int, int, bytes]] = []  # partition, offset, value
        self.failed: list[str] = []

    def send(self, topic: str, values: list[bytes], partition: int = 0) -> None:
        for value in values:
            self._producer.produce(topic, value, partition=partition, on_delivery=self._told)
        left = self._producer.flush(PATIENCE_S)
        assert not left and not self.failed, f"{left} were not confirmed: {self.failed[:3]}"

    def _told(self, error: Any, message: Any) -> None:
        if error is not None:
            self.failed.append(str(error))
        else:
            self.stored.append((message.partition(), message.offset(), message.value()))


def read(
    address: str, topic: str, count: int, partition: int = 0, start: int = OFFSET_BEGINNING, **more: Any
) -> Any:
    """So many messages from an offset on, as (offset, value)."""
    config = {"bootstrap.servers": address, "group.id": "none", "enable.auto.commit": False, **more}
    consumer = Consumer(config)
    try:
        consumer.assign([TopicPartition(topic, partition, start)])
        found: list[tuple[int, bytes]] = []
        give_up_at = time.monotonic() + PATIENCE_S
        while len(found) < count and time.monotonic() < give_up_at:
            for message in consumer.consume(count - len(found), timeout=1):
                assert message.error() is None, message.error()
                found.append((message.offset(), message.value()))
        return found
    finally:
        consumer.close()


def admin(address: str, **more: Any) -> AdminClient:
    return AdminClient({"bootstrap.servers": address, **more})
