"""A share consumer of ours, one request at a time: it says what it likes, and so can be wrong."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from uuid import UUID

from kio.index import load_request_schema
from kio.serial import entity_writer

from postroom.kafka.messages import _built
from postroom.kafka.primitives import Piece
from postroom.model.messages.batch import stored_records
from postroom.store.contract import StoredBatch
from tests.kafka.integration.clients import PATIENCE_S
from tests.kafka.integration.test_bad_input import Wire

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4

Acks = dict[int, list[tuple[int, int, list[int]]]]
"""By partition: first and last offset, and the types."""


class _Sink(list[Piece]):
    def write(self, piece: Piece) -> None:
        self.append(piece)


def body(key: int, version: int, values: dict[str, Any]) -> bytes:
    kind: type[Any] = load_request_schema(key, version)
    sink = _Sink()
    entity_writer(kind)(sink, _built(kind, values))  # type: ignore[arg-type]
    return b"".join(sink)


async def asked(wire: Wire, key: int, version: int, values: dict[str, Any]) -> Any:
    wire.send(key, version, body(key, version, values))
    return await wire.answer(key, version)


class Record:
    """A message as a share consumer gets it."""

    def __init__(self, topic: UUID, partition: int, offset: int, count: int, value: bytes) -> None:
        self.topic, self.partition, self.offset = topic, partition, offset
        self.count, self.value = count, value


class ShareConsumer:
    """`version` of ShareFetch and ShareAcknowledge."""

    def __init__(self, wire: Wire, group: str = "billing", member: str = "", version: int = 2) -> None:
        self.wire, self.group, self.version = wire, group, version
        self.member = member or uuid.uuid4().hex
        self.epoch = self.session = 0
        self.assigned: list[tuple[UUID, int]] = []
        self.lease_ms = 0

    async def beat(self, *topics: str, epoch: int | None = None) -> Any:
        values = {
            "group_id": self.group, "member_id": self.member, "rack_id": None,
            "member_epoch": self.epoch if epoch is None else epoch,
            "subscribed_topic_names": topics or None,
        }  # fmt: skip
        found = await asked(self.wire, 76, 1, values)
        if not int(found.error_code):
            self.epoch = found.member_epoch
            if found.assignment is not None:
                each = found.assignment.topic_partitions
                self.assigned = [(one.topic_id, index) for one in each for index in one.partitions]
        return found

    async def join(self, *topics: str) -> None:
        found = await self.beat(*topics or ("orders",))
        assert not int(found.error_code), found

    def topics(self, partitions: Iterable[tuple[UUID, int]], acks: Acks) -> list[dict[str, Any]]:
        found: dict[UUID, list[dict[str, Any]]] = {}
        for id, index in partitions:
            batches = [
                {"first_offset": first, "last_offset": last, "acknowledge_types": tuple(kinds)}
                for first, last, kinds in acks.get(index, [])
            ]
            one = {"partition_index": index, "acknowledgement_batches": batches}
            found.setdefault(id, []).append(one)
        return [{"topic_id": id, "partitions": some} for id, some in found.items()]

    async def fetch(
        self,
        acks: Acks | None = None,
        *,
        epoch: int | None = None,
        wait_ms: int = 0,
        records: int = 500,
        max_bytes: int = 50_000_000,
        partitions: Sequence[tuple[UUID, int]] | None = None,
        forgotten: Sequence[tuple[UUID, int]] = (),
        strict: bool = False,
        renews: bool = False,
    ) -> Any:
        epoch = self.session if epoch is None else epoch
        if partitions is None:
            partitions = self.assigned if epoch == 0 or acks else ()
        values = {
            "group_id": self.group, "member_id": self.member, "share_session_epoch": epoch,
            "max_wait": wait_ms, "min_bytes": 1, "max_bytes": max_bytes, "max_records": records,
            "batch_size": 500, "share_acquire_mode": int(strict), "is_renew_ack": renews,
            "topics": self.topics(partitions, acks or {}),
            "forgotten_topics_data": [{"topic_id": id, "partitions": (index,)} for id, index in forgotten],
        }  # fmt: skip
        found = await asked(self.wire, 78, self.version, values)
        if not int(found.error_code):
            self.session = epoch + 1
            self.lease_ms = int(found.acquisition_lock_timeout.total_seconds() * 1000)
        return found

    async def acknowledge(self, acks: Acks, *, epoch: int | None = None, renews: bool = False) -> Any:
        epoch = self.session if epoch is None else epoch
        values = {
            "group_id": self.group, "member_id": self.member, "share_session_epoch": epoch,
            "is_renew_ack": renews, "topics": self.topics(self.assigned, acks),
        }  # fmt: skip
        found = await asked(self.wire, 79, self.version, values)
        if not int(found.error_code):
            self.session = epoch + 1
        return found

    async def poll(self, **more: Any) -> list[Record]:
        found = await self.fetch(**more)
        assert not int(found.error_code), found
        return records(found)

    async def poll_until(self, enough: Callable[[list[Record]], bool], **more: Any) -> list[Record]:
        """Poll until that is so. Nothing is acknowledged on the way."""
        got: list[Record] = []
        async with asyncio.timeout(PATIENCE_S):
            while not enough(got):
                got += await self.poll(wait_ms=500, **more)
        return got


def records(fetched: Any) -> list[Record]:
    """The messages that were acquired, and no others."""
    found = []
    for topic in fetched.responses:
        for one in topic.partitions:
            assert not int(one.error_code), one
            messages = dict(_messages(bytes(one.records or b"")))
            for row in one.acquired_records:
                for offset in range(row.first_offset, row.last_offset + 1):
                    value = messages[offset]
                    found.append(
                        Record(topic.topic_id, one.partition_index, offset, row.delivery_count, value)
                    )
    return found


def _messages(data: bytes) -> Iterable[tuple[int, bytes]]:
    at = 0
    while at < len(data):
        base = int.from_bytes(data[at : at + 8], "big")
        end = at + 12 + int.from_bytes(data[at + 8 : at + 12], "big")
        count = int.from_bytes(data[at + 23 : at + 27], "big") + 1
        for one in stored_records(StoredBatch(base, count, 0, data[at:end])):
            yield one.offset, one.value or b""
        at = end


def every(kind: int, got: Iterable[Record]) -> Acks:
    """One thing said of all of them."""
    found: Acks = {}
    for one in sorted(got, key=lambda record: record.offset):
        found.setdefault(one.partition, []).append((one.offset, one.offset, [kind]))
    return found


def codes(found: Any) -> set[int]:
    """What is said of acknowledgements."""
    each = [one for topic in found.responses for one in topic.partitions]
    return {int(getattr(one, "acknowledge_error_code", one.error_code)) for one in each}
