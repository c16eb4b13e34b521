"""What is due later in the console: delayed messages, and schedules with their next runs (R50, R35)."""

from __future__ import annotations

from datetime import datetime

import pytest

from postroom import App, Message
from postroom.client.app.recurring import Ticker, prepare
from tests.integration.console.browser import Desk, desk

HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


async def delayed_orders(one: Desk) -> None:
    await one.mq.create_topic("orders", partitions=1)
    await one.mq.send("orders", b'{"order": 1}', key="ann", id="o-1", delay="1h")
    await one.mq.send("orders", HOSTILE.encode(), key=HOSTILE, id=f"a/b {HOSTILE}", delay="2h")


@pytest.mark.slow("drives a browser")
async def test_a_delayed_message_is_found_opened_and_cancelled_after_a_question() -> None:
    async with desk() as one:
        await delayed_orders(one)
        await one.open()
        await one.page.get_by_role("link", name="Delayed").click()
        await one.sees("sent with a delay")
        await one.page.get_by_role("link", name="orders").click()
        await one.sees_in("td", "ann")
        await one.page.get_by_role("button", name="Open o-1").click()
        await one.sees('"order": 1')
        await one.shoot("delayed")
        await one.press("Cancel o-1")
        await one.sees("Cancel message o-1 of orders?")
        await one.press("Cancel")
        assert len(await one.mq.delayed("orders")) == 2
        await one.press("Cancel o-1")
        await one.press("Cancel the message")
        await one.sees("Message o-1 was cancelled")
        (left,) = await one.mq.delayed("orders")
        await one.press(f"Cancel {left.id}")
        await one.press("Cancel the message")
        await one.sees("No delayed messages wait in this topic.")
        assert await one.mq.delayed("orders") == []
        assert await one.page.locator("main img, main script").count() == 0
        assert "owned" not in await one.page.title()


@pytest.mark.slow("drives a browser")
async def test_a_long_list_of_delayed_messages_comes_page_by_page() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.send_many("orders", [Message(b"%d" % n, id=f"o-{n}", delay=3600 + n) for n in range(70)])
        await one.open("topics/orders")
        await one.page.get_by_role("link", name="70 delayed").click()
        await one.sees("50 messages, the soonest first; there are more.")
        await one.press("Load more")
        await one.sees("70 messages, the soonest first.")
        await one.sees_in("td", "o-69")


@pytest.mark.slow("drives a browser")
async def test_who_may_only_consume_sees_what_waits_and_cannot_cancel_it() -> None:
    async with desk(dev=False) as one:
        await delayed_orders(one)
        one.expected.append("401")  # before the log-in
        one.add("reader", "consume:orders")
        await one.log_in("reader")
        await one.open("topics/orders/delayed")
        await one.sees_in("td", "ann")
        assert await one.page.get_by_role("button", name="Cancel").count() == 0


@pytest.mark.slow("drives a browser")
async def test_schedules_are_listed_with_their_next_runs_and_who_runs_them() -> None:
    async with desk() as one:
        app = App(one.mq)

        @app.every("0 2 * * *", timezone="Europe/Berlin")
        async def nightly(tick: datetime) -> None: ...

        await one.open("schedules")
        await one.sees("There are no recurring schedules")
        await prepare(one.mq, app.schedules)
        await Ticker(one.mq, app.schedules[0]).step()
        await one.sees_in("td", "0 2 * * * Europe/Berlin")
        await one.sees("nobody runs it")
        (found,) = await one.mq.schedules()
        assert found.next is not None
        await one.sees_in("td", f"{found.next:%Y-%m-%d %H:%M:%S}Z")
        await one.shoot("schedules")
