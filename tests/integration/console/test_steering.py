"""What steers a queue from the console: shards, slow lanes, stopped keys; and messages found (R50)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from postroom import Message, SlowLane
from tests.integration.console.browser import desk


@pytest.mark.slow("drives a browser")
async def test_a_partition_is_moved_and_its_shard_drained_with_the_plan_first(tmp_path: Path) -> None:
    address, other = (f"sqlite:///{tmp_path / name}.db" for name in ("first", "second"))
    async with desk(address=address, shards={"second": other}) as one:
        await one.mq.create_topic("orders", partitions=1)
        (before,) = (await one.mq.route("orders")).ranges
        to = "first" if before.shard == "second" else "second"
        await one.open("topics/orders")
        await one.page.get_by_label("To shard").select_option(before.shard)
        await one.press("Move …")
        await one.sees(f"Partition 0 is on shard {before.shard} already.")
        await one.page.get_by_label("To shard").select_option(to)
        await one.press("Move …")
        await one.sees(f"Move partition 0 of orders to shard {to}?")
        await one.sees("takes slots 0–1023")
        await one.shoot("move")
        await one.press("Move")
        await one.sees("Route of orders: version 2")
        (after,) = (await one.mq.route("orders")).ranges
        assert after.shard == to
        if to == "first":
            await one.mq.move("orders", after.partition, shard="second")
        await one.open("shards")
        await one.press("Drain second")
        await one.sees("Drain shard second?")
        await one.sees("1 partitions are moved to first.")
        await one.shoot("drain")
        await one.press("Cancel")
        assert {shard.state for shard in await one.mq.shards()} == {"open"}
        await one.press("Drain second")
        await one.press("Drain")
        await one.sees("Shard second is being drained")
        states = {shard.name: shard.state for shard in await one.mq.shards()}
        assert states["second"] in ("draining", "empty")
        await one.press("Open second")
        await one.sees("Shard second takes partitions again")
        assert {shard.state for shard in await one.mq.shards()} == {"open"}


@pytest.mark.slow("drives a browser")
async def test_messages_are_found_by_offset_and_by_time() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=2)
        for at in range(20):
            await one.mq.send("orders", b"order %d" % at, key="ann")
        (place,) = {message.partition async for message in one.mq.read("orders")}
        await one.open("topics/orders")
        await one.sees_in("caption", "20 messages")
        await one.page.get_by_label("From offset").fill("15")
        await one.press("Show")
        await one.sees("choose the partition as well")
        await one.page.get_by_label("Partition").last.select_option(str(place))
        await one.press("Show")
        await one.sees_in("caption", "5 messages")
        one.expected.append("400")
        await one.page.get_by_label("From offset").fill("")
        await one.page.get_by_label("From time").fill(f"{datetime.now(UTC).year + 1}-01-01T00:00:00")
        await one.press("Show")
        await one.sees("There are no messages there.")
        await one.page.get_by_label("From time").fill("2020-01-01T00:00:00")
        await one.press("Show")
        await one.sees_in("caption", "20 messages")


@pytest.mark.slow("drives a browser")
async def test_a_group_shows_its_members_what_each_holds_and_its_slow_lane() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=2)
        lane = SlowLane(failures=0.5, at_least=3, window="1m", clean="5m")
        await one.mq.create_group("orders", "billing", slow_lane=lane)
        await one.mq.create_group("orders", "audit", mode="ordered")
        await one.mq.send_many(
            "orders", [Message(b"%d" % at, key=f"k{at}", source="bad") for at in range(30)]
        )
        async with one.mq.consumer("orders", group="audit", mode="ordered", member="ann") as consumer:
            await consumer.poll(max_messages=1, wait=10)
            await one.open("topics/orders/groups/audit")
            await one.sees_in("section, div", "in use")
            await one.sees_in("tr", "ann")
            await one.shoot("members")
        async with one.mq.consumer("orders", group="billing") as consumer:
            for message in await consumer.poll(max_messages=5, wait=10):
                await message.dead("no good")
        await one.open("topics/orders/groups/billing")
        await one.sees("Slow lane")
        await one.sees_in("td", "bad")
        await one.shoot("slow-lane")


@pytest.mark.slow("drives a browser")
async def test_stopped_keys_are_restarted_or_dropped_after_a_question() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.create_group("orders", "billing", mode="ordered", max_attempts=1, exhausted="stop")
        await one.mq.send_many("orders", [Message(b"bad", key="ann"), Message(b"worse", key="bob")])
        async with one.mq.consumer("orders", group="billing", mode="ordered") as consumer:
            for message in await consumer.poll(max_messages=2, wait=10):
                await message.retry(reason="ValueError: no")
        (first, second) = await one.mq.stopped("orders", "billing")
        await one.open("topics/orders/groups/billing/stopped")
        await one.press(f"Open {first.id}")
        await one.press("Drop it …")
        await one.sees(f"Drop message {first.id} (key {(first.key or b'').decode()})?")
        await one.press("Cancel")
        assert len(await one.mq.stopped("orders", "billing")) == 2
        await one.press("Drop it …")
        await one.press("Drop")
        await one.sees("It was dropped; its key goes on")
        await one.press(f"Open {second.id}")
        await one.press("Restart it")
        await one.sees("No key is stopped.")
        assert await one.mq.stopped("orders", "billing") == []
        assert (await one.mq.lag("orders", "billing")).total.messages == 1
