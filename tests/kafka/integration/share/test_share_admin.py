"""Admin clients see share groups, and native tools see them too: listed, described, moved, deleted."""

from __future__ import annotations

from typing import Any

import pytest

from postroom import Connection
from postroom.kafka.apis import Code
from tests.kafka.integration.share.client import ACCEPT, ShareConsumer, asked, every
from tests.kafka.integration.test_bad_input import Wire

ALTER, DESCRIBE, DELETE = (91, 0), (90, 1), (92, 0)


async def listed(wire: Wire, *types: str) -> dict[str, tuple[str, str]]:
    found = await asked(wire, 16, 5, {"states_filter": (), "types_filter": types})
    assert not int(found.error_code)
    return {one.group_id: (one.group_type, one.group_state) for one in found.groups}


async def described(wire: Wire, name: str) -> Any:
    asking = {"group_ids": (name,), "include_authorized_operations": False}
    [found] = (await asked(wire, 77, 1, asking)).groups
    return found


async def offsets(wire: Wire, name: str, topic: str | None = "orders") -> dict[int, tuple[int, int]]:
    topics = None if topic is None else [{"topic_name": topic, "partitions": (0, 1)}]
    found = await asked(wire, *DESCRIBE, {"groups": [{"group_id": name, "topics": topics}]})
    [group] = found.groups
    assert not int(group.error_code), group
    return {one.partition_index: (one.start_offset, one.lag) for t in group.topics for one in t.partitions}


async def altered(wire: Wire, name: str, **at: int) -> int:
    partitions = [{"partition_index": int(p[1:]), "start_offset": offset} for p, offset in at.items()]
    topics = [{"topic_name": "orders", "partitions": partitions}]
    found = await asked(wire, *ALTER, {"group_id": name, "topics": topics})
    return int(found.responses[0].partitions[0].error_code)


async def test_share_groups_are_listed_and_described_with_their_members(
    queue: Connection, consumer: ShareConsumer
) -> None:
    await queue.create_group("orders", "quiet")
    await queue.create_group("orders", "in-order", mode="ordered")
    found = await listed(consumer.wire, "share")
    assert found == {"billing": ("Share", "Stable"), "quiet": ("Share", "Empty")}
    assert await listed(consumer.wire, "classic") == {}
    group = await described(consumer.wire, "billing")
    assert (int(group.error_code), group.group_state) == (0, "Stable")
    [member] = group.members
    assert member.member_id == consumer.member and member.subscribed_topic_names == ("orders",)
    [assigned] = member.assignment.topic_partitions
    assert (assigned.topic_name, assigned.partitions) == ("orders", (0, 1))
    assert (await described(consumer.wire, "quiet")).group_state == "Empty"
    assert int((await described(consumer.wire, "none")).error_code) == Code.GROUP_ID_NOT_FOUND
    async with queue.consumer("orders", group="billing", member="native-1"):
        names = {one.member_id for one in (await described(consumer.wire, "billing")).members}
    assert names == {consumer.member, "native-1"}
    await consumer.beat(epoch=-1)
    assert (await described(consumer.wire, "billing")).group_state == "Empty"


async def test_a_group_is_called_as_kafka_clients_call_it(queue: Connection, consumer: ShareConsumer) -> None:
    dotted = ShareConsumer(consumer.wire, group="eu.billing")
    await dotted.join("orders")
    assert "eu.billing" in await listed(consumer.wire)
    assert (await described(consumer.wire, "eu.billing")).members[0].member_id == dotted.member
    await dotted.beat(epoch=-1)
    found = await asked(consumer.wire, 42, 2, {"groups_names": ("eu.billing", "none")})
    assert [int(one.error_code) for one in found.results] == [0, Code.GROUP_ID_NOT_FOUND]
    assert [one.name for one in await queue.groups("orders")] == ["billing"]


async def test_how_far_a_group_is_can_be_asked_and_altered_if_nobody_is_in_it(
    queue: Connection, consumer: ShareConsumer
) -> None:
    wire = consumer.wire
    for number in range(5):
        await queue.send("orders", b"%d" % number, key="same")
    got = sorted(await consumer.poll_until(lambda got: len(got) >= 5), key=lambda one: one.offset)
    partition = got[0].partition
    await consumer.acknowledge(every(ACCEPT, got[:2]))
    assert (await offsets(wire, "billing"))[partition] == (2, 3)
    assert await altered(wire, "billing", **{f"p{partition}": 4}) == Code.NON_EMPTY_GROUP
    await consumer.acknowledge({}, epoch=-1)
    await consumer.beat(epoch=-1)
    assert await altered(wire, "billing", **{f"p{partition}": 4}) == 0
    assert (await offsets(wire, "billing", None))[partition] == (4, 1)
    assert await altered(wire, "fresh", **{f"p{partition}": 3}) == 0
    assert (await offsets(wire, "fresh"))[partition] == (3, 2)
    assert await altered(wire, "fresh", p9=3) == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert await altered(wire, "fresh", p0=-1) == Code.INVALID_CONFIG
    for code in (0, Code.GROUP_ID_NOT_FOUND):
        asking = {"group_id": "fresh", "topics": [{"topic_name": "orders"}]}
        [gone] = (await asked(wire, *DELETE, asking)).responses
        assert int(gone.error_code) == code
    assert [one.name for one in await queue.groups("orders")] == ["billing"]


async def configs(wire: Wire, name: str) -> dict[str, str]:
    resource = {"resource_type": 32, "resource_name": name, "configuration_keys": None}
    asking = {"resources": [resource], "include_synonyms": False, "include_documentation": False}
    [found] = (await asked(wire, 32, 4, asking)).results
    assert not int(found.error_code), found
    return {one.name: one.value for one in found.configs}


async def set_config(wire: Wire, group: str, name: str, value: str | None) -> int:
    one = {"name": name, "config_operation": 0 if value is not None else 1, "value": value}
    resource = {"resource_type": 32, "resource_name": group, "configs": [one]}
    found = await asked(wire, 44, 1, {"resources": [resource], "validate_only": False})
    return int(found.responses[0].error_code)


async def test_configs_of_a_group_are_its_settings(queue: Connection, consumer: ShareConsumer) -> None:
    wire = consumer.wire
    assert await set_config(wire, "billing", "share.record.lock.duration.ms", "15000") == 0
    assert await set_config(wire, "billing", "share.delivery.count.limit", "5") == 0
    [group] = await queue.groups("orders")
    assert (group.settings.lease_ms, group.settings.max_attempts) == (15_000, 5)
    found = await configs(wire, "billing")
    assert found["share.record.lock.duration.ms"] == "15000" and found["share.delivery.count.limit"] == "5"
    assert await set_config(wire, "billing", "share.record.lock.duration.ms", None) == 0
    [group] = await queue.groups("orders")
    assert group.settings.lease_ms == 30_000
    assert (await configs(wire, "unmade"))["share.auto.offset.reset"] == "latest"


async def test_a_group_that_a_share_consumer_makes_delivers_a_message_as_often_as_kafka_does(
    queue: Connection, consumer: ShareConsumer
) -> None:
    made = ShareConsumer(consumer.wire, group="made")
    await made.join("orders")
    attempts = {one.name: one.settings.max_attempts for one in await queue.groups("orders")}
    assert attempts == {"made": 5, "billing": 16}
    assert (await configs(consumer.wire, "made"))["share.delivery.count.limit"] == "5"
    assert await set_config(consumer.wire, "made", "share.delivery.count.limit", "7") == 0
    assert await set_config(consumer.wire, "made", "share.delivery.count.limit", None) == 0
    assert (await configs(consumer.wire, "made"))["share.delivery.count.limit"] == "5"


@pytest.mark.slow("waits for clients of Kafka")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share.auto.offset.reset", "soon"),
        ("share.record.lock.duration.ms", "0"),
        ("share.record.lock.duration.ms", "x"),
        ("share.record.lock.duration.ms", "9" * 30),
        ("share.delivery.count.limit", "-1"),
        ("share.delivery.count.limit", "³"),
        ("consumer.session.timeout.ms", "5"),
    ],
)
async def test_a_config_that_cannot_be_is_refused(consumer: ShareConsumer, name: str, value: str) -> None:
    assert await set_config(consumer.wire, "billing", name, value) == Code.INVALID_CONFIG
