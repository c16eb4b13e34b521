"""Every page of the console and what can be done there, in a real browser (R50)."""

from __future__ import annotations

import pytest

from postroom import Message
from postroom.model.access import hash_of
from tests.integration.console.browser import Desk, desk

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


async def died(one: Desk, values: list[bytes], *, topic: str = "orders", group: str = "billing") -> None:
    """Messages that the group gave up on."""
    await one.mq.send_many(topic, values)
    async with one.mq.consumer(topic, group=group) as consumer:
        for _ in values:
            (message,) = await consumer.poll(max_messages=1, wait=10)
            await message.dead(f"ValueError: cannot bill {message.text[:40]}")


@pytest.mark.slow("drives a browser")
async def test_a_topic_shows_its_partitions_route_and_messages() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=2)
        await one.mq.send("orders", b'{"order": 1, "sum": [1, 2]}', key="ann", headers={"source": "web"})
        await one.mq.send("orders", b"\x00\xff\x10", key="bob")
        await one.open("topics/orders")
        await one.sees("Nobody reads this topic.")
        await one.sees_in("section[aria-label=Messages] table", "ann")
        await one.shoot("topic")
        await one.page.get_by_label("Key").fill("ann")
        await one.press("Show")
        await one.sees("1 messages")
        await one.page.get_by_role("button", name="Open").first.click()
        await one.sees('"order": 1')
        await one.page.get_by_label("Value as").select_option("hex")
        await one.sees("7b 22 6f 72 64 65 72")
        await one.shoot("message")


@pytest.mark.slow("drives a browser")
async def test_nothing_in_a_message_becomes_part_of_the_page() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.send("orders", HOSTILE.encode(), key=HOSTILE, headers={"source": HOSTILE})
        async with one.mq.consumer("orders", group="billing") as consumer:
            (message,) = await consumer.poll(max_messages=1, wait=10)
            await message.dead(HOSTILE)
        await one.open("topics/orders")
        await one.page.get_by_role("button", name="Open 0:0").click()
        await one.sees("Header source")
        assert await one.page.title() == "orders · Postroom"
        assert await one.page.locator("main img, main script").count() == 0
        await one.open("topics/orders/groups/billing/dead")
        await one.page.get_by_role("button", name="Open").first.click()
        await one.sees_in("pre", "onerror")
        assert await one.page.locator("main img, main script").count() == 0
        assert "owned" not in await one.page.title()


@pytest.mark.slow("drives a browser")
async def test_a_message_of_4_mb_is_listed_in_part_and_opened_whole() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.send("orders", b"x" * (4 * 1024 * 1024 - 200))
        await one.open("topics/orders")
        await one.sees("4.0 MB")
        await one.page.get_by_role("button", name="Open 0:0").click()
        await one.sees_in("pre", "xxxxx")


@pytest.mark.slow("drives a browser")
async def test_a_message_is_sent() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.open("topics/orders")
        await one.page.get_by_role("link", name="Send a message").click()
        await one.page.get_by_label("Value", exact=True).fill('{"order": 7}')
        await one.page.get_by_label("Key").fill("ann")
        await one.page.get_by_label("Headers").fill("source: web")
        await one.press("Send")
        await one.sees("Stored: partition 0, offset 0")
        await one.shoot("send")
        (found,) = [message async for message in one.mq.read("orders")]
        assert (found.value, found.key, found.header("source")) == (b'{"order": 7}', b"ann", "web")


@pytest.mark.slow("drives a browser")
async def test_a_group_is_paused_and_resumed() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=2)
        await one.mq.create_group("orders", "billing")
        await one.mq.send_many("orders", [b"x"] * 10)
        await one.open("topics/orders/groups/billing")
        await one.sees("nobody reads it")
        await one.press("Pause")
        await one.sees("is paused")
        (group,) = await one.mq.groups("orders")
        assert group.paused
        await one.shoot("group")
        await one.press("Resume")
        await one.sees("is resumed")
        (group,) = await one.mq.groups("orders")
        assert not group.paused


@pytest.mark.slow("drives a browser")
async def test_a_reset_is_shown_before_it_is_done() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.send_many("orders", [b"x"] * 10)
        async with one.mq.consumer("orders", group="billing") as consumer:
            await consumer.ack(await consumer.poll(max_messages=10, wait=10))
        await one.open("topics/orders/groups/billing")
        await one.press("Preview")  # yesterday, at this time
        await one.sees("10 messages are delivered once more, 0 are passed over.")
        assert (await one.mq.lag("orders", "billing")).total.messages == 0
        await one.shoot("reset")
        await one.press("Move the group …")
        await one.sees("Move group billing of orders?")
        await one.press("Cancel")
        assert (await one.mq.lag("orders", "billing")).total.messages == 0
        await one.press("Move the group …")
        await one.press("Move the group")
        await one.sees("Group billing was moved.")
        assert (await one.mq.lag("orders", "billing")).total.messages == 10


@pytest.mark.slow("drives a browser")
async def test_dead_letters_are_seen_by_error_and_redriven_one_by_one_or_discarded() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await died(one, [b"order 1", b"order 2", b"order 3"])
        await one.open()
        await one.sees("3 dead letters")
        await one.page.get_by_role("link", name="orders / billing").first.click()
        await one.sees("Dead letters of")
        await one.sees_in("td", "3")
        await one.page.get_by_role("button", name="Open").first.click()
        await one.sees_in("pre", "cannot bill order 1")
        await one.shoot("dead-letters")
        await one.press("Redrive it")
        await one.sees("Handed back: 1")
        assert len(await one.mq.dead_letters("orders", "billing")) == 2
        await one.press("Discard all …")
        await one.sees("Discard all dead letters of orders / billing?")
        await one.press("Discard")
        await one.sees("Discarded: 2")
        await one.sees("This group has no dead letters.")
        assert await one.mq.dead_letters("orders", "billing") == []


@pytest.mark.slow("drives a browser")
async def test_some_dead_letters_are_chosen_by_their_error() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await died(one, [b"order %d" % at for at in range(250)])
        await one.open("topics/orders/groups/billing/dead")
        await one.sees("250 dead letters, by error")
        await one.sees("200 dead letters, the oldest first")
        await one.press("Load more")
        await one.press("Choose 250 shown")
        await one.press("Redrive 250 chosen")
        await one.press("Redrive")
        await one.sees("Handed back: 250")
        assert await one.mq.dead_letters("orders", "billing") == []


@pytest.mark.slow("drives a browser")
async def test_a_stopped_key_is_restarted() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.create_group("orders", "billing", mode="ordered", max_attempts=1, exhausted="stop")
        await one.mq.send_many("orders", [Message(b"bad", key="ann"), Message(b"after", key="ann")])
        async with one.mq.consumer("orders", group="billing", mode="ordered") as consumer:
            (message, *_) = await consumer.poll(max_messages=1, wait=10)
            await message.retry()
            await one.open("topics/orders/groups/billing/stopped")
            await one.sees_in("td", "ann")
            await one.page.get_by_role("button", name="Open").first.click()
            await one.sees_in("pre", "bad")
            await one.shoot("stopped")
            await one.press("Skip it …")
            await one.press("Skip")
            await one.sees("No key is stopped.")
        assert await one.mq.stopped("orders", "billing") == []


@pytest.mark.slow("drives a browser")
async def test_a_partition_is_split_and_merged_with_the_plan_first() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.open("topics/orders")
        await one.press("Split …")
        await one.sees("Split partition 0 of orders?")
        await one.sees("slots 512–1023")
        await one.shoot("split")
        await one.press("Split")
        await one.sees("Route of orders: version 2")
        assert len((await one.mq.route("orders")).ranges) == 2
        await one.page.get_by_role("img", name="Route, version 2").wait_for()  # the page is that of now
        await one.page.get_by_role("button", name="Merge with the next …").click()
        await one.press("Merge")
        await one.sees("Route of orders: version 3")
        assert len((await one.mq.route("orders")).ranges) == 1


@pytest.mark.slow("drives a browser")
async def test_a_limit_is_set_and_removed() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders")
        await one.open()
        await one.page.get_by_role("link", name="Rates and limits").click()
        await one.sees("There are no limits.")
        await one.page.get_by_label("Topic").fill("orders")
        await one.page.get_by_label("Messages a second").fill("100")
        await one.press("Set the limit")
        await one.sees("topic orders")
        await one.shoot("rates")
        (limit,) = await one.mq.rates()
        assert limit.messages_per_s == 100
        await one.press("Remove the limit of topic orders")
        await one.press("Remove")
        await one.sees("There are no limits.")
        assert await one.mq.rates() == []


@pytest.mark.slow("drives a browser")
async def test_shards_and_brokers_are_listed() -> None:
    async with desk() as one:
        await one.open("shards")
        await one.sees("first")
        await one.shoot("shards")


@pytest.mark.slow("drives a browser")
async def test_the_audit_log_shows_who_changed_what_and_goes_on_by_itself() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.create_group("orders", "billing")
        await one.open("topics/orders/groups/billing")
        await one.press("Pause")
        await one.sees("is paused")
        await one.page.get_by_role("link", name="Audit log").click()
        await one.sees_in("tr", "paused: false → true")
        await one.sees_in("tr", "http, 127.0.0.1")  # with --dev nobody logs in
        await one.shoot("audit")
        await one.mq.create_topic("payments", partitions=1)
        await one.sees_in("tr", "payments")
        await one.page.get_by_label("Topic").fill("orders")
        await one.press("Show")
        await one.misses("payments")


@pytest.mark.slow("drives a browser")
async def test_access_shows_principals_and_never_their_tokens() -> None:
    async with desk(dev=False) as one:
        one.expected.append("401")
        one.add("boss", "manage:*", "consume:*")
        one.add("shop", "send:orders")
        await one.log_in("boss")
        await one.page.get_by_role("link", name="Access").click()
        await one.sees_in("tr", "send:orders")
        await one.shoot("access")
        found = await one.page.content()
        assert not [token for token in one.tokens.values() if token in found or hash_of(token) in found]


@pytest.mark.slow("drives a browser")
async def test_what_one_may_not_do_is_not_shown() -> None:
    async with desk(dev=False) as one:
        one.expected += ["401", "403"]
        one.add("reader", "consume:orders")
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.create_group("orders", "billing")
        await one.log_in("reader")
        await one.open("topics/orders")
        await one.sees("Settings")
        for name in (
            "Send a message",
            "Split …",
            "Rates and limits",
            "Shards and brokers",
            "Access",
            "Audit log",
        ):
            assert await one.page.get_by_text(name).count() == 0, name
        await one.open("topics/orders/groups/billing")
        await one.sees("nobody reads it")
        assert await one.page.get_by_role("button", name="Pause").count() == 0


@pytest.mark.slow("drives a browser")
async def test_the_page_says_so_when_the_broker_goes_away_and_when_somebody_else_was_first() -> None:
    async with desk() as one:
        one.expected += ["Failed to load", "ERR_", "404"]
        await one.mq.create_topic("orders", partitions=1)
        await died(one, [b"order 1"])
        await one.open("topics/orders/groups/billing/dead")
        await one.page.get_by_role("button", name="Open").first.click()
        await one.mq.discard_dead_letters("orders", "billing")  # meanwhile
        await one.press("Redrive it")
        await one.sees("Handed back: 0")
        await one.sees("This group has no dead letters.")
        await one.mq.delete_topic("orders")
        await one.open("topics/orders")
        await one.sees("there is no topic")
        await one.open()
        await one.sees("There are no topics yet")
        await one.server.stop(0.1)
        await one.sees("The broker does not answer.")
