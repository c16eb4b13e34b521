"""The console's overview and its log-in, in a real browser (R50)."""

from __future__ import annotations

import pytest

from tests.integration.console.browser import desk


async def test_the_overview_shows_what_happens_without_being_loaded_again() -> None:
    async with desk() as one:
        await one.mq.create_topic("orders", partitions=2)
        await one.mq.create_group("orders", "billing")
        await one.open()
        await one.sees("billing")
        await one.sees("Nothing needs attention.")
        await one.shoot("overview-quiet")
        await one.mq.send_many("orders", [b"%d" % at for at in range(42)])
        await one.sees_in("tbody", "42")
        await one.sees("nobody reads it, 42 behind")
        await one.shoot("overview")
        await one.page.get_by_role("link", name="What to do").first.click()
        await one.sees("Start its consumers.")
        await one.shoot("runbook")


@pytest.mark.slow("drives a browser")
async def test_nobody_sees_anything_without_a_token_and_a_principal_its_own_topics() -> None:
    async with desk(dev=False) as one:
        one.expected.append("401")
        one.add("shop", "send:orders")
        await one.mq.create_topic("orders")
        await one.mq.create_topic("secret")
        await one.open()
        await one.sees("Token")
        await one.shoot("log-in")
        await one.page.get_by_label("Token").fill("pst_wrong")
        await one.press("Log in")
        await one.sees("invalid token")
        await one.log_in("shop")
        await one.sees("orders")
        assert "secret" not in await one.text()
        cookies = await one.context.cookies()
        (cookie,) = [found for found in cookies if found["name"].startswith("postroom-console")]
        assert cookie["httpOnly"] and cookie["sameSite"] == "Strict"
        await one.press("Log out")
        await one.sees("Token")
        await one.page.reload()
        await one.sees("Token")
