"""More than anybody can look at: thousands of dead letters and topics, and the page goes on (R50)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from postroom import Message
from postroom.model.policy.settings import TopicSettings
from tests.integration.console.browser import WAIT_MS, Desk, desk

LETTERS, TOPICS = 20_000, 10_000
FREEZES_MS = 3_000  # nobody waits so long for a click, on a machine three times as busy either

# The longest time that the page did not draw anything.
_WATCH = """() => {
  window.longest = 0;
  let last = performance.now();
  const look = (now) => {
    window.longest = Math.max(window.longest, now - last);
    last = now;
    requestAnimationFrame(look);
  };
  requestAnimationFrame(look);
}"""


@asynccontextmanager
async def never_frozen(one: Desk) -> AsyncIterator[None]:
    await one.page.evaluate(_WATCH)
    yield
    longest = await one.page.evaluate("() => window.longest")
    assert longest < FREEZES_MS, f"the page stood still for {longest:.0f} ms"


async def many_died(one: Desk, letters: int) -> None:
    """As fast as programs make them: in lists, with three errors that differ in numbers alone."""
    await one.mq.create_topic("orders", partitions=1)
    await one.mq.send_many("orders", [Message(b"order %d" % at) for at in range(letters)])
    errors = ("ValueError: cannot bill order {}", "TimeoutError: no answer in {} ms", "KeyError: {}")
    async with one.mq.consumer("orders", group="billing") as consumer:
        left = letters
        while left:
            found = await consumer.poll(max_messages=1000, wait=30)
            await asyncio.gather(
                *(message.dead(errors[int(message.text[6:]) % 10 % 3].format(left)) for message in found)
            )
            left -= len(found)


async def left_of(one: Desk) -> int:
    return (await one.mq.lag("orders.billing.dead", "_redrive")).total.messages


@pytest.mark.slow("makes 20,000 dead letters, and drives a browser")
@pytest.mark.timeout(300)
async def test_thousands_of_dead_letters_are_counted_stopped_half_way_and_all_done() -> None:
    async with desk() as one:
        await many_died(one, LETTERS)
        began = time.perf_counter()
        await one.open("topics/orders/groups/billing/dead")
        await one.sees("200 dead letters, the oldest first")
        await one.sees("dead letters, by error")
        assert time.perf_counter() - began < WAIT_MS / 1000
        while await one.page.get_by_role("button", name="Count on").count():
            counted = await one.page.locator("caption", has_text="by error").inner_text()
            assert f"of {LETTERS:,}" in counted  # it says that these are not all
            await one.press("Count on")
            await one.page.wait_for_function(
                "(before) => document.querySelector('caption').innerText !== before", arg=counted
            )
        await one.sees(f"{LETTERS:,} dead letters, by error")
        await one.sees_in("td", "8,000")  # ValueError: of each ten orders, four
        async with never_frozen(one):
            await one.press("Show those with KeyError: <n>")
            await one.sees("Letters with the error “KeyError: <n>”")
            await one.press("Discard all of this error …")
            await one.sees("Discard all dead letters with the error “KeyError: <n>” of orders / billing?")
            await one.press("Discard")
            await one.sees("Discarded: 6,000")
            assert await left_of(one) == LETTERS - 6_000
            await one.sees("14,000 dead letters, by error")
            await one.page.route("**/redrive-next", _one_piece_then_slow())
            await one.press("Redrive all …")
            await one.press("Redrive")
            await one.sees("1,000 of 14,000 …")
        await one.shoot("dead-letters-progress")  # what checks the page keeps it busy
        async with never_frozen(one):
            await one.press("Stop")
            await one.sees("Stopped: the others are as they were.")
            some = await left_of(one)
            assert 0 < some < LETTERS - 6_000
            await one.page.unroute_all(behavior="wait")
            await one.press("Redrive all …")  # goes on with the rest
            await one.press("Redrive")
            await one.sees(f"Handed back: {some:,}")
            await one.sees("This group has no dead letters.")
        assert await left_of(one) == 0
        assert (await one.mq.lag("orders", "billing")).total.messages == LETTERS - 6_000


def _one_piece_then_slow() -> object:
    """The first piece is done at once; the second takes a while, so that there is something to stop."""
    asked = 0

    async def answer(route: object) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            await asyncio.sleep(1)
        await route.continue_()  # type: ignore[attr-defined]

    return answer


@pytest.mark.slow("makes 10,000 topics, and drives a browser")
@pytest.mark.timeout(300)
async def test_ten_thousand_topics_are_found_by_name_and_turned_page_by_page() -> None:
    async with desk() as one:
        for at in range(TOPICS):
            await one.broker.create_topic(f"topic-{at:05d}", TopicSettings(), 1, False)
        await one.mq.create_group("topic-07777", "billing")
        await one.mq.send_many("topic-07777", [b"x"] * 3)
        await one.open()
        await one.sees("10,000 topics")
        async with never_frozen(one):
            await one.sees("topic-07777 / billing")  # it needs attention
            await one.sees("Page 1 of 200")
            await one.press("Next")
            await one.sees("Page 2 of 200")
            await one.page.get_by_label("Topics that contain").fill("TOPIC-0995")
            await one.sees("topic-09959")
            await one.sees("10 topics")
            await one.page.get_by_label("Topics that contain").fill("7777")
            await one.sees("1 topics")
            await one.page.get_by_role("link", name="topic-07777", exact=True).click()
            await one.sees("Partitions")
            await one.page.get_by_role("link", name="Delayed").click()
            await one.sees("No delayed messages wait.")
        await one.open()
        await one.sees("Page 1 of 200")
        assert await one.page.locator("tbody tr").count() == 50
        await one.shoot("many-topics")
