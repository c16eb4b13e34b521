"""Every page by day, by night and on a phone, and all of it without a mouse (R50).

The pictures are in build/console/light, /dark and /phone; each page is checked by axe.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest

from postroom import App, Message
from postroom.client.app.recurring import Ticker, prepare
from postroom.config import DEFAULTS
from postroom.console.sampling import Sampler
from tests.integration.console.browser import Desk, desk

LOOKS: dict[str, dict[str, Any]] = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "has_touch": True},
}
PAGES = {  # and a text that is there once it is complete
    "": "The last hour",
    "topics/orders": "Messages a second, in and out",
    "topics/orders/send": "Headers, a line each",
    "topics/orders/groups/billing": "Behind by partition",
    "topics/orders/groups/billing/dead": "dead letters, the oldest first",
    "topics/payments/groups/charge/stopped": "the card was refused",
    "delayed": "sent with a delay",
    "topics/orders/delayed": "the soonest first",
    "schedules": "Europe/Berlin",
    "rates": "Set a limit",
    "shards": "Database",
    "access": "send:orders",
    "audit": "create_topic",
    "runbooks": "PostroomGroupLate",
}


@asynccontextmanager
async def busy_queue(one: Desk, sampler: Sampler) -> AsyncIterator[None]:
    """A queue with something on every page, and messages that come and go meanwhile."""
    mq = one.mq
    await mq.create_topic("orders", partitions=3)
    await mq.create_topic("payments", partitions=1)
    await mq.create_group("payments", "charge", mode="ordered", max_attempts=1, exhausted="stop")
    await mq.send_many("payments", [Message(b'{"sum": 12}', key="ann"), Message(b'{"sum": 7}', key="ann")])
    async with mq.consumer("payments", group="charge", mode="ordered") as consumer:
        (message, *_) = await consumer.poll(max_messages=1, wait=10)
        await message.retry(reason="ValueError: the card was refused")
    await mq.send_many("orders", [Message(b'{"order": %d}' % at, key=f"customer-{at}") for at in range(40)])
    async with mq.consumer("orders", group="billing") as consumer:
        found = []
        while len(found) < 20:
            found += await consumer.poll(max_messages=20 - len(found), wait=10)
        for message in found[:3]:
            await message.dead("ValueError: no such customer\n\nTraceback (most recent call last):\n  bill()")
        await consumer.ack(found[3:])
    await mq.split("orders", 1)
    await mq.send("orders", b'{"order": 99}', key="ann", id="later-1", delay="2h")
    await mq.limit_rate(topic="payments", messages_per_s=500)
    one.add("shop", "send:orders")
    app = App(mq)

    @app.every("0 2 * * *", timezone="Europe/Berlin")
    async def nightly(tick: datetime) -> None: ...

    await prepare(mq, app.schedules)
    await Ticker(mq, app.schedules[0]).step()
    async with mq.consumer("orders", group="mailing") as reading:
        flowing = asyncio.create_task(_flow(one, reading))
        try:
            async with asyncio.timeout(60):
                while len(sampler.charts.times) < 40:
                    await sampler.next(sampler.number)
            yield
        finally:
            flowing.cancel()
            await asyncio.gather(flowing, return_exceptions=True)


async def _flow(one: Desk, consumer: Any) -> None:
    number = 0
    while True:
        await one.mq.send_many("orders", [Message(b'{"order": 1}', key=f"c{at}") for at in range(number % 7)])
        await consumer.ack(await consumer.poll(max_messages=100, wait=0.05))
        number += 1


@pytest.mark.slow("drives a browser through every page")
@pytest.mark.parametrize("look", LOOKS)
async def test_every_page_is_readable_by_day_by_night_and_on_a_phone(look: str) -> None:
    apps: list[Any] = []

    def often(app: Any) -> None:
        """Charts of an hour within seconds."""
        quick = replace(DEFAULTS.tuning.console, sample_s=0.1, quiet_sample_s=0.1, chart_step_s=0.1)
        app.state.sampler._tuning = quick
        apps.append(app)

    async with desk(change=often, **LOOKS[look]) as one, busy_queue(one, apps[0].state.sampler):
        for path, text in PAGES.items():
            await one.open(path)
            await one.sees(text)
            if path in ("", "topics/orders"):
                await one.page.locator("svg.chart").nth(1).wait_for()
            if not path:
                for chart in (
                    "Messages a second",
                    "Behind, in messages",
                    "Wait for the first",
                    "Time of a commit",
                ):
                    await one.sees(chart)
            if path == "topics/orders":
                pieces = one.page.locator("svg.route rect")
                await pieces.nth(3 + 4 - 1).wait_for()
                assert await pieces.count() == 3 + 4  # both versions of its route
            await one.shoot(f"{look}/{path.replace('/', '-') or 'overview'}", whole=True)
            wide = await one.page.evaluate(
                "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"
            )
            assert wide <= 0, f"{path or 'the overview'} is {wide} px too wide"


@pytest.mark.slow("drives a browser")
async def test_a_group_is_found_paused_and_moved_without_a_mouse() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=1)
        await one.mq.create_group("orders", "billing")
        await one.mq.send_many("orders", [b"x"] * 5)
        await one.open()
        await one.sees("nobody reads it, 5 behind")
        keys = one.page.keyboard

        async def tab_to(text: str) -> None:
            for _ in range(60):
                await keys.press("Tab")
                if await one.page.evaluate("() => document.activeElement.textContent.trim()") == text:
                    return
            raise AssertionError(f"{text} cannot be reached by the Tab key")

        await tab_to("orders / billing")
        await keys.press("Enter")
        await one.sees("Behind by partition")
        await tab_to("Pause")
        await keys.press("Enter")
        await one.sees("is paused")
        await tab_to("Preview")
        await keys.press("Enter")
        await one.sees("are delivered once more")
        await tab_to("Move the group …")
        await keys.press("Enter")
        await one.sees("Move group billing of orders?")
        await keys.press("Escape")
        await one.page.locator("dialog").wait_for(state="detached")
        assert await one.page.evaluate("() => document.activeElement.textContent") == "Move the group …"
