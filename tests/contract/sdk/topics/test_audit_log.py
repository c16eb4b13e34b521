"""The audit log: every administrative operation has its entry, with what it changed; nothing else has one."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest import mock

import pytest

from postroom import AuditEntry, Connection, InvalidSetting, StoreUnavailable, TopicExists, UnknownTopic
from postroom.broker.audit import ForgetAudit
from postroom.clock import ManualClock
from postroom.endpoint.operations import OPERATIONS
from tests.contract.brokers import broker_of, run_duty
from tests.contract.stores import embedded, everywhere, only_file

ADMINISTRATIVE = {name for name, operation in OPERATIONS.items() if operation.changes is not None}


async def newest(mq: Connection) -> AuditEntry:
    (found,) = await mq.audit_log(limit=1)
    return found


@everywhere
async def test_an_entry_says_who_did_what_when_and_what_it_changed(
    mq: Connection, clock: ManualClock, endpoint: str
) -> None:
    await mq.create_topic("orders", partitions=2, retention="1d")
    made = await newest(mq)
    assert (made.action, made.topic, made.group, made.outcome) == ("create_topic", "orders", "", "done")
    assert made.before is None and made.after == {"partitions": 2, "retention_ms": 86_400_000}
    assert made.door == ("embedded" if endpoint == "embedded" else "wire")
    assert made.who and made.address
    if endpoint != "embedded":
        assert made.who == "anonymous" and made.address.startswith("127.0.0.1:")
    await mq.alter_topic("orders", retention="2d")
    altered = await newest(mq)
    assert altered.before == {"retention_ms": 86_400_000} and altered.after == {"retention_ms": 172_800_000}
    assert altered.id > made.id and altered.at >= made.at
    await mq.create_group("orders", "billing")
    await mq.pause("orders", "billing")
    paused = await newest(mq)
    assert (paused.action, paused.topic, paused.group) == ("pause", "orders", "billing")
    assert (paused.before, paused.after) == ({"paused": False}, {"paused": True})
    await mq.split("orders", 0)
    split = await newest(mq)
    assert split.before == {"version": 1, "partition 0": "slots 0-511 on shard first"}
    assert split.after is not None and len(split.after) == 3 and split.after["version"] == 2
    await mq.delete_topic("orders")
    deleted = await newest(mq)
    assert deleted.action == "delete_topic" and deleted.after is None
    assert deleted.before is not None and deleted.before["partitions"] == 3


async def test_every_administrative_operation_has_its_entry(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=2)
    await mq.alter_topic("orders", retention="1h")
    await mq.create_group("orders", "billing", mode="ordered", max_attempts=1, exhausted="stop")
    await mq.alter_group("orders", "billing", lease=40)
    await mq.pause("orders", "billing")
    await mq.resume("orders", "billing")
    await mq.send("orders", b"secret value", key="secret key", headers={"name": "secret header"})
    await mq.reset("orders", "billing", to="latest")
    await mq.limit_rate(topic="orders", messages_per_s=10)
    await mq.limit_rate(topic="orders")
    for act in (mq.redrive, mq.discard_dead_letters, mq.restart_stopped, mq.skip_stopped, mq.drop_stopped):
        await act("orders", "billing")
    route = await mq.split("orders", 0)
    await mq.merge("orders", *(piece.partition for piece in route.ranges[:2]))
    with pytest.raises(InvalidSetting):
        await mq.move("orders", 1, shard="elsewhere")
    for change in (mq.drain_shard, mq.open_shard):
        with pytest.raises(InvalidSetting):
            await change("elsewhere")
    await mq.purge("orders")
    await mq.create_topic("trades", kafka_partitions=1)
    await mq.create_group("trades", "ledger", mode="ordered")
    await mq.convert_group("trades", "ledger", "kafka")
    await mq.delete_group("orders", "billing")
    await mq.delete_topic("orders")
    entries = await mq.audit_log(limit=1000)
    assert {entry.action for entry in entries} == ADMINISTRATIVE
    assert not [entry for entry in entries if entry.outcome == "begun"]
    assert {entry.outcome for entry in entries if entry.action in ("move", "drain_shard")} != {"done"}
    assert "secret" not in repr(entries)


async def test_what_changed_nothing_or_only_read_has_no_entry(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.create_group("orders", "billing")
    before = await mq.audit_log()
    await mq.create_topic("orders", partitions=1, exist_ok=True)
    await mq.alter_topic("orders", retention="7d")
    await mq.resume("orders", "billing")
    await mq.limit_rate(topic="orders")
    await mq.reset("orders", "billing", to="latest", dry_run=True)
    await mq.send("orders", b"x")
    async with mq.consumer("orders", group="billing") as consumer:
        await consumer.ack(await consumer.poll(max_messages=1, wait=10))
    await mq.topics()
    await mq.lag("orders", "billing")
    await mq.audit_log()
    assert await mq.audit_log() == before


async def test_a_consumer_that_makes_its_group_is_no_administrator(mq: Connection) -> None:
    await mq.create_topic("orders")
    async with mq.consumer("orders", group="billing") as consumer:
        await consumer.poll(max_messages=1, wait=0)
    assert [entry.action for entry in await mq.audit_log()] == ["create_topic"]


async def test_what_failed_says_why(mq: Connection) -> None:
    await mq.create_topic("orders")
    with pytest.raises(TopicExists):
        await mq.create_topic("orders")
    assert (await newest(mq)).outcome == "topic_exists"
    with pytest.raises(UnknownTopic):
        await mq.delete_topic("order")
    assert ((await newest(mq)).topic, (await newest(mq)).outcome) == ("order", "unknown_topic")


async def test_a_reset_says_which_offsets_it_moved(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    await mq.send_many("orders", [b"x"] * 5)
    async with mq.consumer("orders", group="billing") as consumer:
        await consumer.ack(await consumer.poll(max_messages=5, wait=10))
    await mq.reset("orders", "billing", to="earliest")
    entry = await newest(mq)
    assert entry.after == {"again": 5, "skipped": 0, "partition 0 of billing": "5 to 0"}


async def test_entries_are_listed_by_topic_by_whom_since_a_moment_and_page_by_page(
    mq: Connection, clock: ManualClock
) -> None:
    for name in ("orders", "payments", "invoices"):
        await mq.create_topic(name)
        clock.advance(60)
    assert [entry.topic for entry in await mq.audit_log()] == ["invoices", "payments", "orders"]
    assert [entry.topic for entry in await mq.audit_log(topic="payments")] == ["payments"]
    (first,) = await mq.audit_log(limit=1)
    assert [entry.topic for entry in await mq.audit_log(before=first.id)] == ["payments", "orders"]
    assert len(await mq.audit_log(who=first.who)) == 3 and await mq.audit_log(who="nobody") == []
    since = datetime.fromtimestamp(first.at / 1000, UTC) - timedelta(seconds=61)
    assert [entry.topic for entry in await mq.audit_log(since=since)] == ["invoices", "payments"]
    assert [entry.topic for entry in await mq.audit_log(after=first.id)] == []
    with pytest.raises(InvalidSetting, match="1 to 1,000"):
        await mq.audit_log(limit=0)


@embedded("looks into the store")
async def test_nothing_is_done_if_the_entry_cannot_be_written(mq: Connection) -> None:
    broker = broker_of(mq)
    failing = mock.patch.object(broker.store.audit, "begin", side_effect=StoreUnavailable("gone"))
    with failing, pytest.raises(StoreUnavailable):
        await mq.create_topic("orders")
    assert await mq.topics() == []


@embedded("looks into the store")
async def test_what_was_done_stays_done_if_its_entry_cannot_be_completed(mq: Connection) -> None:
    broker = broker_of(mq)
    with mock.patch.object(broker.store.audit, "end", side_effect=StoreUnavailable("gone")):
        await mq.create_topic("orders")
    assert [topic.name for topic in await mq.topics()] == ["orders"]
    assert (await newest(mq)).outcome == "begun"


@embedded("looks into the broker")
@only_file
async def test_what_is_cut_off_says_that_its_end_is_not_known(mq: Connection) -> None:
    await mq.create_topic("orders")
    broker, reached = broker_of(mq), asyncio.Event()

    async def hang(*_: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    with mock.patch.object(broker._help, "run", hang):
        splitting = asyncio.create_task(mq.split("orders", 0))
        await reached.wait()
        splitting.cancel()
        await asyncio.wait([splitting])
    entry = await newest(mq)
    assert (entry.action, entry.outcome) == ("split", "begun")


async def test_old_entries_are_forgotten_by_a_duty(mq: Connection, clock: ManualClock) -> None:
    await mq.create_topic("orders")
    clock.advance(366 * 24 * 3600)
    await mq.create_topic("payments")
    await run_duty(mq, ForgetAudit)
    assert [entry.topic for entry in await mq.audit_log()] == ["payments"]


async def test_two_who_act_at_once_have_an_entry_each(mq: Connection) -> None:
    await mq.create_topic("orders", partitions=1)
    results = await asyncio.gather(*(mq.split("orders", 0) for _ in range(2)), return_exceptions=True)
    splits = [entry.outcome for entry in await mq.audit_log() if entry.action == "split"]
    assert len(splits) == 2 and splits.count("done") == sum(not isinstance(one, Exception) for one in results)
