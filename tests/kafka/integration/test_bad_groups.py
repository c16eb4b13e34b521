"""Whatever a client may say about groups: the right error, nothing committed, no other member disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaException

import postroom
from postroom import Connection
from postroom.kafka.apis import Code
from postroom.kafka.primitives import Writer
from postroom.model.kafka_group import Generation, GroupError
from postroom.store.contract.kafka import KafkaOffset
from tests.kafka.integration.clients import PATIENCE_S, admin
from tests.kafka.integration.test_access import allow, login
from tests.kafka.integration.test_bad_input import Wire, connected
from tests.kafka.integration.test_groups import consumer

JOIN, SYNC, BEAT, LEAVE, COMMIT = (11, 4), (14, 3), (12, 3), (13, 2), (8, 7)  # keys and versions


def subscription(*topics: str) -> bytes:
    out = Writer(flexible=False)
    out.i16(1)
    out.count(len(topics))
    for topic in topics:
        out.string(topic)
    out.count(-1)
    out.count(0)
    return b"".join(out.done())


def joining(
    group: str = "billing",
    member: str = "",
    protocols: list[tuple[str, bytes]] | None = None,
    session_ms: int = 10_000,
    kind: str = "consumer",
) -> bytes:
    out = Writer(flexible=False)
    out.string(group)
    out.i32(session_ms)
    out.i32(60_000)
    out.string(member)
    out.string(kind)
    protocols = [("range", subscription("orders"))] if protocols is None else protocols
    out.count(len(protocols))
    for name, metadata in protocols:
        out.string(name)
        out.count(len(metadata))
        out.raw([metadata])
    return b"".join(out.done())


def committing(member: str, generation: int, offset: int, topic: str = "orders", note: str = "") -> bytes:
    out = Writer(flexible=False)
    out.string("billing")
    out.i32(generation)
    out.string(member)
    out.string(None)
    out.count(1)
    out.string(topic)
    out.count(1)
    out.i32(0)
    out.i64(offset)
    out.i32(-1)
    out.string(note)
    return b"".join(out.done())


async def asked(wire: Wire, api: tuple[int, int], body: bytes) -> Any:
    wire.send(*api, body)
    return await wire.answer(*api)


async def committed(wire: Wire, *args: Any, **more: Any) -> int:
    found = await asked(wire, COMMIT, committing(*args, **more))
    return int(found.topics[0].partitions[0].error_code)


async def entered(wire: Wire) -> tuple[str, int]:
    """Become the only member of a group; returns the member and its generation."""
    first = await asked(wire, JOIN, joining())
    assert int(first.error_code) == GroupError.MEMBER_ID_REQUIRED
    joined = await asked(wire, JOIN, joining(member=first.member_id))
    assert int(joined.error_code) == 0 and joined.leader == joined.member_id
    out = Writer(flexible=False)
    out.string("billing")
    out.i32(joined.generation_id)
    out.string(joined.member_id)
    out.string(None)
    out.count(1)
    out.string(joined.member_id)
    out.count(3)
    out.raw([b"all"])
    assert (await asked(wire, SYNC, b"".join(out.done()))).assignment == b"all"
    return joined.member_id, joined.generation_id


@pytest.fixture
async def wire(queue: Connection, address: str) -> AsyncIterator[Wire]:
    await queue.create_topic("orders", kafka_partitions=1)
    async with connected(address) as wire:
        yield wire


JOINS = {
    "no name": (joining(group=""), Code.INVALID_GROUP_ID),
    "a name that is too long": (joining(group="x" * 250), Code.INVALID_GROUP_ID),
    "a short session": (joining(session_ms=999), Code.INVALID_SESSION_TIMEOUT),
    "a long session": (joining(session_ms=1_800_001), Code.INVALID_SESSION_TIMEOUT),
    "no protocol": (joining(protocols=[]), GroupError.INCONSISTENT_PROTOCOL),
    "many protocols": (joining(protocols=[(str(n), b"") for n in range(65)]), Code.INVALID_REQUEST),
    "a protocol twice": (joining(protocols=[("a", b"")] * 2), Code.INVALID_REQUEST),
    "much metadata": (joining(kind="x", protocols=[("a", bytes(5 << 20))]), GroupError.GROUP_FULL),
    "an unknown member": (joining(member="nobody"), GroupError.UNKNOWN_MEMBER),
}


@pytest.mark.slow("waits for clients of Kafka")
@pytest.mark.parametrize("what", JOINS)
async def test_a_join_that_cannot_be_is_refused_and_the_connection_goes_on(
    queue: Connection, wire: Wire, what: str
) -> None:
    body, code = JOINS[what]
    assert int((await asked(wire, JOIN, body)).error_code) == code
    assert int((await asked(wire, JOIN, joining())).error_code) == GroupError.MEMBER_ID_REQUIRED
    assert await queue.groups("orders") == []


async def test_only_a_member_of_the_generation_commits(queue: Connection, wire: Wire) -> None:
    member, generation = await entered(wire)
    assert await committed(wire, member, generation, 5) == 0
    for who, code in (
        ((member, generation - 1), GroupError.ILLEGAL_GENERATION),
        ((member, generation + 1), GroupError.ILLEGAL_GENERATION),
        (("nobody", generation), GroupError.UNKNOWN_MEMBER),
        (("", -1), GroupError.UNKNOWN_MEMBER),
    ):
        assert await committed(wire, *who, 9) == code
    assert await committed(wire, member, generation, -5) == Code.INVALID_REQUEST
    assert await committed(wire, member, generation, 9, topic="none") == Code.UNKNOWN_TOPIC_OR_PARTITION
    too_long = await committed(wire, member, generation, 9, note="x" * 4097)
    assert too_long == Code.OFFSET_METADATA_TOO_LARGE
    store: Any = queue._endpoint.store  # type: ignore[attr-defined]
    assert [one.offset for one in store.kafka_groups.offsets("billing")] == [5]


async def test_a_coordinator_that_was_replaced_commits_nothing(queue: Connection, wire: Wire) -> None:
    """Another broker took the lease: this one believes that it coordinates until it writes something."""
    member, generation = await entered(wire)
    store: Any = queue._endpoint.store  # type: ignore[attr-defined]
    [group] = store.kafka_groups.groups()
    store.kafka_groups.release(group.holder)
    assert store.kafka_groups.take("billing", "another", 6_000).holder == "another"
    assert await committed(wire, member, generation, 5) == Code.NOT_COORDINATOR
    again = await asked(wire, JOIN, joining(member=member))
    assert int(again.error_code) == Code.NOT_COORDINATOR
    store.kafka_groups.release("another")
    assert await committed(wire, member, generation, 5) == 0, "a member in the row is never unknown"


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_member_that_hangs_up_in_the_middle_of_a_join_disturbs_nobody(
    queue: Connection, wire: Wire, address: str
) -> None:
    async with connected(address) as other:
        first = await asked(other, JOIN, joining())
        other.send(*JOIN, joining(member=first.member_id))
    member, generation = await entered(wire)
    assert await committed(wire, member, generation, 5) in (0, GroupError.REBALANCING)
    store: Any = queue._endpoint.store  # type: ignore[attr-defined]
    assert store.kafka_groups.group("billing").generation != Generation()


async def test_groups_are_for_those_who_may_consume_their_topics(tmp_path: Path) -> None:
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        for topic in ("orders", "secret"):
            await mq.create_topic(topic, kafka_partitions=1)
        token = allow(mq, "consume:orders")
        store: Any = mq._endpoint.store  # type: ignore[attr-defined]
        store.kafka_groups.put("theirs", [KafkaOffset(store.catalog.topic("secret").id, 0, 3)])
        async with await mq.serve(port=0, token="unused", kafka=0) as served:
            address = str(served.kafka)

            def code_of_joining(group: str, topic: str) -> int:
                client = consumer(address, group, **login(token))
                try:
                    client.subscribe([topic])
                    return int(client.poll(PATIENCE_S).error().code())
                finally:
                    client.close()

            assert await asyncio.to_thread(code_of_joining, "theirs", "orders") == (
                Code.GROUP_AUTHORIZATION_FAILED
            )
            asking = admin(address, **login(token))
            listed = await asyncio.to_thread(lambda: asking.list_consumer_groups().result(PATIENCE_S))
            assert listed.valid == [], "what it may not see is not shown"
            with pytest.raises(KafkaException):
                await asyncio.to_thread(
                    lambda: asking.delete_consumer_groups(["theirs"])["theirs"].result(PATIENCE_S)
                )
        assert store.kafka_groups.group("theirs") is not None
