"""Whatever a share consumer may say: the right error, nothing settled, and no other consumer disturbed."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

import postroom
from postroom import Connection
from postroom.kafka.apis import Code
from postroom.kafka.share import fetching
from postroom.kafka.share.sessions import ShareError, ShareSessions
from tests.kafka.integration.share.client import (
    ACCEPT,
    REJECT,
    RENEW,
    ShareConsumer,
    asked,
    codes,
    every,
)
from tests.kafka.integration.test_access import allow
from tests.kafka.integration.test_bad_input import Wire, connected

NOBODYS = UUID(int=5)


async def logged_in(wire: Wire, token: str) -> None:
    await asked(wire, 17, 1, {"mechanism": "PLAIN"})
    found = await asked(wire, 36, 2, {"auth_bytes": b"\0any\0" + token.encode()})
    assert not int(found.error_code), found


async def given(queue: Connection, consumer: ShareConsumer) -> Any:
    await queue.send("orders", b"paid")
    [one] = await consumer.poll_until(lambda got: bool(got))
    return one


async def unsettled(queue: Connection) -> int:
    return (await queue.lag("orders", "billing")).total.messages


# ---- sessions ----


async def test_a_request_that_does_not_follow_is_refused_and_the_right_one_is_not(
    queue: Connection, consumer: ShareConsumer
) -> None:
    one = await given(queue, consumer)
    right = consumer.session
    for wrong in (right + 1, right + 7, -2, 2**31 - 1):
        found = await consumer.acknowledge(every(ACCEPT, [one]), epoch=wrong)
        assert int(found.error_code) == Code.INVALID_SHARE_SESSION_EPOCH
        assert int((await consumer.fetch(epoch=wrong)).error_code) == Code.INVALID_SHARE_SESSION_EPOCH
    assert await unsettled(queue) == 1
    assert codes(await consumer.acknowledge(every(ACCEPT, [one]), epoch=right)) == {0}


@pytest.mark.parametrize("epoch", [0, 1, -1])
async def test_an_acknowledgement_opens_no_session(consumer: ShareConsumer, epoch: int) -> None:
    found = await consumer.acknowledge({0: [(0, 5, [ACCEPT])]}, epoch=epoch)
    assert int(found.error_code) == Code.SHARE_SESSION_NOT_FOUND


async def test_a_request_that_opens_a_session_acknowledges_nothing(
    queue: Connection, consumer: ShareConsumer
) -> None:
    one = await given(queue, consumer)
    found = await consumer.fetch(every(ACCEPT, [one]), epoch=0)
    assert int(found.error_code) == Code.INVALID_REQUEST and await unsettled(queue) == 1


def test_sessions_are_bounded_and_the_one_that_was_silent_for_longest_gives_way() -> None:
    now = 0
    sessions = ShareSessions(lambda: now, idle_ms=100, most=6)  # of which one that is alone has 3
    for member in "abc":
        sessions.begin(("", "g", member), 0, opens=True)
    with pytest.raises(ShareError) as refused:
        sessions.begin(("", "g", "d"), 0, opens=True)
    assert refused.value.code == Code.SHARE_SESSION_LIMIT_REACHED
    now = 99
    sessions.begin(("", "g", "a"), 1, opens=True)
    now = 101
    sessions.begin(("", "g", "d"), 0, opens=True)
    with pytest.raises(ShareError) as gone:
        sessions.begin(("", "g", "b"), 1, opens=True)
    assert gone.value.code == Code.SHARE_SESSION_NOT_FOUND
    sessions.begin(("", "g", "a"), 2, opens=True)
    sessions.begin(("", "g", "a"), -1, opens=False)
    assert len(sessions) == 2


async def test_a_session_of_too_many_partitions_is_refused(
    consumer: ShareConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_MOST_PARTITIONS", 50)
    [(id, _), *_] = consumer.assigned
    found = await consumer.fetch(partitions=[(id, index) for index in range(51)])
    assert int(found.error_code) == Code.INVALID_REQUEST


async def test_a_consumer_has_no_more_in_flight_than_it_may(
    queue: Connection, consumer: ShareConsumer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetching, "_MOST_IN_FLIGHT", 3)
    for number in range(6):
        await queue.send("orders", b"%d" % number)
    got = await consumer.poll_until(lambda got: len(got) >= 3, strict=True)
    assert len(got) == 3 and not await consumer.poll(strict=True)
    await consumer.acknowledge(every(ACCEPT, got))
    assert await consumer.poll(strict=True)


# ---- what is not its own ----


async def test_nobody_settles_what_it_has_not(
    queue: Connection, consumer: ShareConsumer, address: str
) -> None:
    one = await given(queue, consumer)
    async with connected(address) as wire:
        other = ShareConsumer(wire)
        await other.join("orders")
        await other.poll()
        for kind in (ACCEPT, REJECT):
            found = await other.acknowledge(every(kind, [one]))
            assert codes(found) == {Code.INVALID_RECORD_STATE}
        everything = {0: [(0, 2**62, [ACCEPT])], 1: [(0, 2**62, [ACCEPT])]}
        assert codes(await other.acknowledge(everything)) == {Code.INVALID_RECORD_STATE}
        found = await other.acknowledge(every(RENEW, [one]), renews=True)
        assert codes(found) == {Code.INVALID_RECORD_STATE}
    assert await unsettled(queue) == 1
    assert codes(await consumer.acknowledge(every(ACCEPT, [one]))) == {0}
    assert codes(await consumer.acknowledge(every(ACCEPT, [one]))) == {Code.INVALID_RECORD_STATE}


@pytest.mark.slow("waits for clients of Kafka")
@pytest.mark.parametrize(
    "batch", [(5, 4, [1]), (0, 9, [1, 1]), (0, 0, [9]), (0, 0, []), (-5, 0, [1]), (0, 0, [RENEW])]
)
async def test_what_is_no_acknowledgement_is_refused(
    queue: Connection, consumer: ShareConsumer, batch: tuple[int, int, list[int]]
) -> None:
    await given(queue, consumer)
    found = await consumer.acknowledge({0: [batch], 1: [batch]})
    assert codes(found) == {Code.INVALID_REQUEST} and await unsettled(queue) == 1


async def test_topics_and_partitions_that_are_not_there_are_told(consumer: ShareConsumer) -> None:
    [(id, _), *_] = consumer.assigned
    found = await consumer.fetch(partitions=[(NOBODYS, 0), (id, 99), (id, -1)])
    told = [(one.partition_index, int(one.error_code)) for t in found.responses for one in t.partitions]
    assert sorted(told) == [
        (-1, Code.UNKNOWN_TOPIC_OR_PARTITION),
        (0, Code.UNKNOWN_TOPIC_ID),
        (99, Code.UNKNOWN_TOPIC_OR_PARTITION),
    ]


async def test_whoever_has_not_joined_is_told_that_there_is_no_such_group(
    consumer: ShareConsumer, address: str
) -> None:
    async with connected(address) as wire:
        stranger = ShareConsumer(wire, group="never-made")
        stranger.assigned = consumer.assigned
        assert int((await stranger.fetch()).error_code) == Code.GROUP_ID_NOT_FOUND


# ---- members ----


@pytest.mark.parametrize(
    ("group", "member", "code"),
    [
        ("", "m", Code.INVALID_GROUP_ID),
        ("g" * 250, "m", Code.INVALID_GROUP_ID),
        ("billing", "m" * 121, Code.INVALID_REQUEST),
        ("billing", "m\n", Code.INVALID_REQUEST),
    ],
)
async def test_names_are_bounded(consumer: ShareConsumer, group: str, member: str, code: int) -> None:
    odd = ShareConsumer(consumer.wire, group=group, member=member)
    assert int((await odd.beat("orders")).error_code) == code
    assert int((await odd.fetch()).error_code) == code


async def test_a_member_is_known_by_its_epoch(consumer: ShareConsumer) -> None:
    assert int((await consumer.beat(epoch=consumer.epoch + 5)).error_code) == Code.FENCED_MEMBER_EPOCH
    assert int((await consumer.beat()).error_code) == 0
    await consumer.beat("orders", "later")
    assert int((await consumer.beat(epoch=consumer.epoch)).error_code) == 0
    stranger = ShareConsumer(consumer.wire)
    assert int((await stranger.beat(epoch=3)).error_code) == Code.UNKNOWN_MEMBER_ID
    assert int((await stranger.beat()).error_code) == Code.INVALID_REQUEST, "it subscribes to nothing"
    assert int((await consumer.beat(*map(str, range(251)))).error_code) == Code.INVALID_REQUEST
    assert int((await consumer.beat(epoch=-1)).error_code) == 0
    assert int((await consumer.beat(epoch=-1)).error_code) == Code.UNKNOWN_MEMBER_ID


async def test_an_ordered_group_and_a_classic_one_are_not_shared(
    queue: Connection, consumer: ShareConsumer
) -> None:
    await queue.create_group("orders", "ordered", mode="ordered")
    found = await ShareConsumer(consumer.wire, group="ordered").beat("orders")
    assert int(found.error_code) == Code.INVALID_REQUEST and "ordered" in (found.error_message or "")


# ---- permissions ----


async def test_a_share_consumer_needs_the_permission_to_consume(tmp_path: Path) -> None:
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        await mq.create_topic("secret", kafka_partitions=1)
        await mq.create_group("secret", "billing")
        token = allow(mq, "consume:orders", "send:secret")
        async with await mq.serve(port=0, token="unused", kafka=0) as served:
            address = str(served.kafka)
            async with connected(address) as wire:
                await logged_in(wire, token)
                consumer = ShareConsumer(wire)
                found = await consumer.beat("orders", "secret")
                assert int(found.error_code) == Code.TOPIC_AUTHORIZATION_FAILED
                assert "consume:secret" in found.error_message
                await consumer.join("orders")
                secret = await asked(wire, 3, 12, _metadata("secret"))
                place = (secret.topics[0].topic_id, 0)
                found = await consumer.fetch(partitions=[place])
                [one] = found.responses[0].partitions
                assert int(one.error_code) == Code.TOPIC_AUTHORIZATION_FAILED
                consumer.assigned = [place]
                found = await consumer.acknowledge({0: [(0, 0, [ACCEPT])]})
                assert codes(found) == {Code.TOPIC_AUTHORIZATION_FAILED}
                config = {"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}
                for group, code in (("billing", 29), ("unmade", 29)):
                    resource = {"resource_type": 32, "resource_name": group, "configs": [config]}
                    found = await asked(wire, 44, 1, {"resources": [resource], "validate_only": False})
                    assert int(found.responses[0].error_code) == code
                described = await asked(
                    wire, 77, 1, {"group_ids": ("billing",), "include_authorized_operations": False}
                )
                assert int(described.groups[0].error_code) in (0, Code.GROUP_AUTHORIZATION_FAILED)
                deleted = await asked(wire, 42, 2, {"groups_names": ("billing",)})
                assert int(deleted.results[0].error_code) == Code.GROUP_AUTHORIZATION_FAILED


async def test_a_session_and_a_member_are_those_of_their_principal(tmp_path: Path) -> None:
    async with postroom.connect(f"sqlite:///{tmp_path}/q.db") as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        await mq.create_group("orders", "billing")
        token = allow(mq, "consume:orders")
        async with await mq.serve(port=0, token="pst_other", kafka=0) as served:
            address = str(served.kafka)
            async with connected(address) as mine, connected(address) as theirs:
                await logged_in(mine, token)
                await logged_in(theirs, "pst_other")
                consumer = ShareConsumer(mine)
                await consumer.join("orders")
                await mq.send("orders", b"paid")
                got = await consumer.poll_until(lambda got: bool(got))
                thief = ShareConsumer(theirs, member=consumer.member)
                thief.assigned, thief.epoch = consumer.assigned, consumer.epoch
                found = await thief.acknowledge(every(ACCEPT, got), epoch=consumer.session)
                assert int(found.error_code) == Code.SHARE_SESSION_NOT_FOUND
                for epoch in (consumer.epoch, 0, -1):
                    found = await thief.beat("orders", epoch=epoch)
                    assert int(found.error_code) == Code.UNKNOWN_MEMBER_ID
                assert int((await consumer.beat()).error_code) == 0
                assert codes(await consumer.acknowledge(every(ACCEPT, got))) == {0}


def _metadata(topic: str) -> dict[str, Any]:
    return {
        "topics": [{"topic_id": None, "name": topic}], "allow_auto_topic_creation": False,
        "include_topic_authorized_operations": False,
    }  # fmt: skip
