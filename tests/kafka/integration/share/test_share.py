"""Share consumers are members of a group in mode "shared": its leases, attempts, retries and dead letters."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import postroom
from postroom import Connection, Message
from postroom.kafka.apis import Code
from tests.kafka.integration.clients import PATIENCE_S
from tests.kafka.integration.share.client import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    Record,
    ShareConsumer,
    asked,
    codes,
    every,
)
from tests.kafka.integration.test_bad_input import connected


async def send(mq: Connection, count: int, topic: str = "orders", first: int = 0) -> set[bytes]:
    values = [b"%d" % number for number in range(first, first + count)]
    await mq.send_many(topic, [Message(value, key=value) for value in values])
    return set(values)


def values(got: list[Record]) -> set[bytes]:
    return {one.value for one in got}


async def unsettled(mq: Connection, topic: str = "orders") -> int:
    return (await mq.lag(topic, "billing")).total.messages


async def test_what_is_accepted_is_settled(queue: Connection, consumer: ShareConsumer) -> None:
    sent = await send(queue, 100)
    got = await consumer.poll_until(lambda got: len(got) >= 100)
    assert values(got) == sent and {one.count for one in got} == {1}
    assert await unsettled(queue) == 100
    found = await consumer.acknowledge(every(ACCEPT, got))
    assert codes(found) == {0} and await unsettled(queue) == 0


async def test_acknowledgements_ride_on_the_next_fetch(queue: Connection, consumer: ShareConsumer) -> None:
    await send(queue, 10)
    got = await consumer.poll_until(lambda got: len(got) >= 10)
    found = await consumer.fetch(every(ACCEPT, got))
    assert codes(found) == {0} and await unsettled(queue) == 0


async def test_a_fetch_waits_and_is_woken_by_what_arrives(queue: Connection, consumer: ShareConsumer) -> None:
    await consumer.poll()
    waiting = asyncio.create_task(consumer.poll(wait_ms=30_000))
    await asyncio.sleep(0)
    await queue.send("orders", b"paid")
    async with asyncio.timeout(25):
        assert values(await waiting) == {b"paid"}


async def test_whoever_has_no_room_for_a_byte_is_handed_nothing(
    queue: Connection, consumer: ShareConsumer
) -> None:
    await queue.send("orders", b"paid")
    assert not await consumer.poll(max_bytes=0)
    assert values(await consumer.poll_until(lambda got: bool(got))) == {b"paid"}


async def test_a_topic_that_is_gone_keeps_nothing_of_the_others_back(
    queue: Connection, consumer: ShareConsumer
) -> None:
    [here] = {id for id, _ in consumer.assigned}
    await queue.create_topic("gone", kafka_partitions=1)
    await consumer.join("orders", "gone")
    [gone] = {id for id, _ in consumer.assigned} - {here}
    await consumer.poll()
    await queue.delete_topic("gone")
    await queue.send("orders", b"paid")
    found = await consumer.fetch(wait_ms=30_000)
    told = {topic.topic_id: topic.partitions for topic in found.responses}
    assert [int(one.error_code) for one in told[gone]] == [Code.UNKNOWN_TOPIC_ID]
    assert [int(one.error_code) for one in told[here] if one.acquired_records] == [0]


async def test_what_is_released_comes_again_and_counts_as_an_attempt(
    queue: Connection, consumer: ShareConsumer
) -> None:
    await queue.send("orders", b"paid")
    [one] = await consumer.poll_until(lambda got: bool(got))
    assert codes(await consumer.fetch(every(RELEASE, [one]), records=0)) == {0}
    [again] = await consumer.poll_until(lambda got: bool(got))
    assert (again.value, again.offset, again.count) == (b"paid", one.offset, 2)


async def test_after_the_last_attempt_a_message_is_a_dead_letter(
    queue: Connection, consumer: ShareConsumer
) -> None:
    await queue.alter_group("orders", "billing", max_attempts=2)
    await queue.send("orders", b"paid")
    for _ in range(2):
        [one] = await consumer.poll_until(lambda got: bool(got))
        await consumer.acknowledge(every(RELEASE, [one]))
    [dead] = await queue.dead_letters("orders", "billing")
    assert dead.value == b"paid" and "released" in dead.reason
    assert not await consumer.poll()


async def test_what_is_rejected_is_a_dead_letter_and_comes_again_when_it_is_redriven(
    queue: Connection, consumer: ShareConsumer
) -> None:
    await queue.send("orders", b"paid")
    got = await consumer.poll_until(lambda got: bool(got))
    assert codes(await consumer.acknowledge(every(REJECT, got))) == {0}
    assert [one.value for one in await queue.dead_letters("orders", "billing")] == [b"paid"]
    assert await queue.redrive("orders", "billing") == 1
    [again] = await consumer.poll_until(lambda got: bool(got))
    assert again.value == b"paid" and again.topic == got[0].topic
    assert codes(await consumer.acknowledge(every(ACCEPT, [again]))) == {0}
    assert await unsettled(queue) == 0


async def test_each_offset_may_be_told_another_thing(queue: Connection, consumer: ShareConsumer) -> None:
    for number in range(3):
        await queue.send("orders", b"%d" % number, key="same")
    got = sorted(await consumer.poll_until(lambda got: len(got) >= 3), key=lambda one: one.offset)
    first, partition = got[0].offset, got[0].partition
    acks = {partition: [(first, first + 2, [ACCEPT, RELEASE, REJECT])]}
    assert codes(await consumer.acknowledge(acks)) == {0}
    [again] = await consumer.poll_until(lambda got: bool(got))
    assert (again.value, again.count) == (b"1", 2)
    assert [one.value for one in await queue.dead_letters("orders", "billing")] == [b"2"]


async def test_consumers_share_the_messages_and_none_is_given_out_twice(
    queue: Connection, consumer: ShareConsumer, address: str
) -> None:
    sent = await send(queue, 60)
    async with connected(address) as wire:
        other = ShareConsumer(wire)
        await other.join("orders")
        mine, theirs = list[Record](), list[Record]()
        async with asyncio.timeout(PATIENCE_S):
            while len(mine) + len(theirs) < 60:
                mine += await consumer.poll(records=5, strict=True)
                theirs += await other.poll(records=5, strict=True)
        assert mine and theirs and not values(mine) & values(theirs)
        assert values(mine) | values(theirs) == sent
        names = [one.name for one in (await queue.groups("orders"))[0].members]
        assert sorted(names) == sorted([consumer.member, other.member])


async def test_no_more_comes_than_was_asked_for_where_that_is_a_limit(
    queue: Connection, consumer: ShareConsumer
) -> None:
    await send(queue, 50)
    assert 1 <= len(await consumer.poll(records=3, strict=True)) <= 3


async def test_a_whole_batch_comes_where_that_is_none(queue: Connection, consumer: ShareConsumer) -> None:
    await queue.send_many("orders", [Message(b"%d" % number, key="same") for number in range(50)])
    got = await consumer.poll(records=3)
    assert len(got) == 50, "it was sent whole: to have it in parts is to have it sent in each"


async def test_native_and_share_consumers_are_members_of_one_group(
    queue: Connection, consumer: ShareConsumer
) -> None:
    sent = await send(queue, 20)
    mine = await consumer.poll(records=5, strict=True)
    async with queue.consumer("orders", group="billing") as native:
        theirs = list[bytes]()
        async with asyncio.timeout(PATIENCE_S):
            while len(theirs) + len(mine) < 20:
                for message in await native.poll(max_messages=20, wait=1):
                    theirs.append(message.value)
                    await message.ack()
    assert values(mine) | set(theirs) == sent and not values(mine) & set(theirs)


@pytest.mark.slow("waits for clients of Kafka")
async def test_a_consumer_that_falls_silent_loses_its_messages_when_its_lease_ends(
    queue: Connection, consumer: ShareConsumer, address: str
) -> None:
    await queue.alter_group("orders", "billing", lease=1)
    sent = await send(queue, 4)
    lost = await consumer.poll_until(lambda got: len(got) >= 4)
    assert consumer.lease_ms == 1000
    async with connected(address) as wire:
        other = ShareConsumer(wire)
        await other.join("orders")
        got = set[bytes]()
        async with asyncio.timeout(PATIENCE_S):
            while got != sent:
                some = await other.poll(wait_ms=500)
                assert all(one.count >= 2 for one in some)
                got |= values(some)
                await other.acknowledge(every(ACCEPT, some))
        assert codes(await consumer.acknowledge(every(ACCEPT, lost))) == {Code.INVALID_RECORD_STATE}
    assert await unsettled(queue) == 0


async def test_a_lease_that_is_renewed_lasts_longer(queue: Connection, consumer: ShareConsumer) -> None:
    await queue.send("orders", b"paid")
    got = await consumer.poll_until(lambda got: bool(got))
    found = await consumer.acknowledge(every(RENEW, got), renews=True)
    assert codes(found) == {0} and await unsettled(queue) == 1
    assert codes(await consumer.acknowledge(every(ACCEPT, got))) == {0}
    assert await unsettled(queue) == 0


async def test_what_a_consumer_gives_back_as_it_closes_is_no_first_delivery_to_the_next(
    queue: Connection, consumer: ShareConsumer, address: str
) -> None:
    """As Kafka 4.3.1 shows it: it was acquired twice. librdkafka accepts nothing of its own as it closes."""
    sent = await send(queue, 5)
    assert values(await consumer.poll_until(lambda got: len(got) >= 5)) == sent
    assert not int((await consumer.acknowledge({}, epoch=-1)).error_code)
    async with connected(address) as wire:
        other = ShareConsumer(wire)
        await other.join("orders")
        again = await other.poll_until(lambda got: len(got) >= 5)
        assert values(again) == sent and {one.count for one in again} == {2}


async def test_consumers_that_close_take_no_message_to_the_dead_letters(
    queue: Connection, consumer: ShareConsumer
) -> None:
    """I14: who lives to give it back was not taken down by it, however often it was delivered."""
    await queue.alter_group("orders", "billing", max_attempts=2)
    await queue.send("orders", b"paid")
    for count in range(1, 5):
        other = ShareConsumer(consumer.wire)
        await other.join("orders")
        [one] = await other.poll_until(lambda got: bool(got))
        assert (one.value, one.count) == (b"paid", count)
        assert not int((await other.acknowledge({}, epoch=-1)).error_code)
    assert not await queue.dead_letters("orders", "billing")


async def test_a_session_goes_on_over_another_connection(
    queue: Connection, consumer: ShareConsumer, address: str
) -> None:
    await queue.send("orders", b"paid")
    got = await consumer.poll_until(lambda got: bool(got))
    async with connected(address) as wire:
        consumer.wire = wire
        assert codes(await consumer.acknowledge(every(ACCEPT, got))) == {0}
    assert await unsettled(queue) == 0


async def test_a_paused_group_is_given_nothing(queue: Connection, consumer: ShareConsumer) -> None:
    await queue.pause("orders", "billing")
    await queue.send("orders", b"paid")
    assert not await consumer.poll(wait_ms=300)
    await queue.resume("orders", "billing")
    assert await consumer.poll_until(lambda got: bool(got))


async def test_any_topic_can_be_shared_also_over_a_split(queue: Connection, address: str) -> None:
    await queue.create_topic("plain", partitions=1)
    await queue.create_group("plain", "billing")
    before = await send(queue, 20, "plain")
    async with connected(address) as wire:
        consumer = ShareConsumer(wire)
        await consumer.join("plain")
        await queue.split("plain", 0)
        after = await send(queue, 20, "plain", first=100)
        found = await consumer.beat()
        assert found.assignment is not None, "there are partitions that it does not know"
        assert [index for _, index in consumer.assigned] == [0, 1, 2]
        got = await consumer.poll_until(lambda got: len(got) >= 40)
        assert values(got) == before | after
        assert codes(await consumer.acknowledge(every(ACCEPT, got))) == {0}
    assert await unsettled(queue, "plain") == 0


async def test_a_move_is_not_noticed(tmp_path: Path) -> None:
    url, other = f"sqlite:///{tmp_path}/q.db", f"sqlite:///{tmp_path}/other.db"
    async with postroom.connect(url, shards={"other": other}) as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        await mq.create_group("orders", "billing")
        async with await mq.serve(port=0, kafka=0) as served, connected(str(served.kafka)) as wire:
            consumer = ShareConsumer(wire)
            await consumer.join("orders")
            before = await send(mq, 20)
            await mq.move("orders", 0)
            after = await send(mq, 20, first=100)
            got = await consumer.poll_until(lambda got: len(got) >= 40)
            assert values(got) == before | after
            assert sorted(one.offset for one in got) == list(range(40)), "the seal has no offset (I28)"
            assert codes(await consumer.acknowledge(every(ACCEPT, got))) == {0}
            assert await unsettled(mq) == 0


async def test_several_topics_are_read_by_one_fetch(queue: Connection, address: str) -> None:
    for topic in ("a", "b", "c"):
        await queue.create_topic(topic, kafka_partitions=1)
        await queue.create_group(topic, "billing")
    async with connected(address) as wire:
        consumer = ShareConsumer(wire)
        await consumer.join("a", "b", "c", "not-there")
        assert len(consumer.assigned) == 3
        for topic in ("a", "b", "c"):
            await queue.send(topic, topic.encode())
        got = await consumer.poll_until(lambda got: len(got) >= 3)
        assert values(got) == {b"a", b"b", b"c"}
        await queue.create_topic("not-there", kafka_partitions=1)
        assert (await consumer.beat()).assignment is not None and len(consumer.assigned) == 4


async def test_only_the_partitions_of_the_session_are_read(
    queue: Connection, consumer: ShareConsumer
) -> None:
    sent = await send(queue, 40)
    one, other = consumer.assigned
    first = await consumer.poll(partitions=[one], records=1000)
    assert first and {record.partition for record in first} == {one[1]}
    rest = await consumer.poll(partitions=[other], forgotten=[one], records=1000)
    assert rest and {record.partition for record in rest} == {other[1]}
    assert values(first) | values(rest) == sent


@pytest.mark.slow("waits for clients of Kafka")
async def test_another_broker_goes_on_where_one_was_killed(queue: Connection, orders: str) -> None:
    await queue.alter_group("orders", "billing", lease=1)
    sent = await send(queue, 10)
    async with await queue.serve(port=0, kafka=0) as first, await queue.serve(port=0, kafka=0) as second:
        addresses = [str(first.kafka), str(second.kafka)]
        async with connected(addresses[0]) as wire, connected(addresses[1]) as backup:
            found = await asked(wire, 10, 6, {"key_type": 0, "coordinator_keys": ("billing",)})
            mine = found.coordinators[0]
            if f"{mine.host}:{mine.port}" != addresses[0]:
                wire, backup = backup, wire
            consumer = ShareConsumer(wire)
            await consumer.join(orders)
            got = await consumer.poll_until(lambda got: len(got) >= 10)
            consumer.wire = backup  # which knows nothing of the session
            found = await consumer.acknowledge(every(ACCEPT, got))
            assert int(found.error_code) == Code.SHARE_SESSION_NOT_FOUND
            consumer.session, again = 0, set[bytes]()
            async with asyncio.timeout(PATIENCE_S):
                while again != sent:
                    some = await consumer.poll(wait_ms=500)
                    again |= values(some)
                    await consumer.acknowledge(every(ACCEPT, some))
    assert await unsettled(queue) == 0


async def test_a_group_that_kafka_clients_make_begins_at_the_end_or_as_its_config_says(
    queue: Connection, orders: str, address: str
) -> None:
    await send(queue, 5)
    async with connected(address) as wire:
        late = ShareConsumer(wire, group="late")
        await late.join(orders)
        assert not await late.poll()
        config = {"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}
        resource = {"resource_type": 32, "resource_name": "early.bird", "configs": [config]}
        found = await asked(wire, 44, 1, {"resources": [resource], "validate_only": False})
        assert not int(found.responses[0].error_code), found
        early = ShareConsumer(wire, group="early.bird")
        await early.join(orders)
        assert len(await early.poll_until(lambda got: len(got) >= 5)) == 5
        await queue.send("orders", b"new")
        assert values(await late.poll_until(lambda got: bool(got))) == {b"new"}
    native = sorted(one.name for one in await queue.groups("orders"))
    assert native[0] == "billing" and native[1].startswith("early-bird-") and native[2] == "late"


async def test_a_database_on_disk_remembers_a_groups_configs(tmp_path: Path) -> None:
    async with postroom.connect(f"sqlite:///{tmp_path}/c.db") as mq:
        await mq.create_topic("orders", kafka_partitions=1)
        async with await mq.serve(port=0, kafka=0) as served, connected(str(served.kafka)) as wire:
            config = {"name": "share.record.lock.duration.ms", "config_operation": 0, "value": "15000"}
            resource = {"resource_type": 32, "resource_name": "g", "configs": [config]}
            await asked(wire, 44, 1, {"resources": [resource], "validate_only": False})
    async with postroom.connect(f"sqlite:///{tmp_path}/c.db") as mq:
        served = await mq.serve(port=0, kafka=0)
        async with served, connected(str(served.kafka)) as wire:
            consumer = ShareConsumer(wire, group="g")
            await consumer.join("orders")
            await consumer.poll()
            assert consumer.lease_ms == 15_000
