"""Names that are none, and others who act at the same time: the console stays itself (R50)."""

from __future__ import annotations

import pytest

from postroom import PostroomError
from tests.integration.console.browser import Desk, desk

HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


async def harmless(one: Desk) -> None:
    """Nothing of a queue has become part of the page."""
    assert await one.page.locator("main img, main script, main iframe").count() == 0
    assert "owned" not in await one.page.title()


@pytest.mark.slow("drives a browser")
async def test_nothing_that_a_client_calls_itself_or_asks_for_becomes_part_of_the_page() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.limit_rate(producer=HOSTILE[:100], messages_per_s=5)
        with pytest.raises(PostroomError):
            await one.broker.delete_topic(HOSTILE)
        await one.open("audit")
        await one.sees_in("tr", "delete_topic")
        await one.sees_in("td", "<script>")
        await harmless(one)
        await one.open("rates")
        await one.sees_in("td", "<img")
        await harmless(one)
        async with one.mq.consumer("orders", group="billing", member="m<b>x") as consumer:
            await consumer.poll(max_messages=1, wait=0)
            await one.open("topics/orders/groups/billing")
            await one.sees_in("td", "m<b>x")
            await harmless(one)


@pytest.mark.slow("drives a browser")
async def test_an_address_with_a_script_in_it_is_no_page() -> None:
    async with desk() as one:
        one.expected += ["404", "400"]
        for path in ("%3Cimg src=x onerror=alert(1)%3E", "runbooks/%3Cb%3E", "%E0%A4%A"):
            await one.open(path)
            await one.sees("There is no such page")
            await harmless(one)
            await one.open("shards")  # so that the next is not taken for this
            await one.sees("first")
        await one.open("topics/%3Cscript%3E")
        await one.page.locator("#toasts .bad").first.wait_for()
        await harmless(one)


@pytest.mark.slow("drives a browser")
async def test_of_two_who_split_at_once_one_is_told_that_the_other_was_first() -> None:
    async with desk() as one:
        one.expected += ["404", "409", "400"]
        await one.mq.create_topic("orders", partitions=1)
        other = await one.context.new_page()
        for page in (one.page, other):
            await page.goto(f"{one.url}/console#/topics/orders")
            await page.get_by_role("button", name="Split …").click()
            await page.get_by_text("Split partition 0 of orders?").wait_for()
        await one.press("Split")
        await one.sees("Route of orders: version 2")
        await one.press("Split", within=other)
        await other.locator("#toasts .bad").wait_for()
        said = await other.locator("#toasts .bad").inner_text()
        assert "partition 0" in said and "Traceback" not in said
        assert (await one.mq.route("orders")).version == 2
