"""What an operator does at night, by somebody who has the console and no command line (R50)."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

import postroom
from postroom import Message
from tests.contract.stores import SERVERS
from tests.integration.console.browser import Desk, desk

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow("an operator works in a browser for seconds")
async def test_the_five_tasks_of_an_operator() -> None:
    async with desk() as one:
        await _trouble(one)
        await one.open()

        # find what is stuck, and why
        await one.sees("1 stopped message holds its key")
        await one.shoot("newcomer")
        await one.page.get_by_role("listitem").filter(has_text="stopped").get_by_role("link").first.click()
        await one.page.get_by_role("button", name="Open").first.click()
        await one.sees_in("pre", "the card was refused")

        # redrive one letter
        await one.page.get_by_role("link", name="Overview").click()
        await one.page.get_by_role("listitem").filter(has_text="dead").get_by_role("link").first.click()
        await one.page.get_by_role("button", name="Open").first.click()
        await one.press("Redrive it")
        await one.sees("Handed back: 1")

        # pause and resume a group
        await one.page.get_by_role("link", name="orders / billing").click()
        await one.press("Pause")
        await one.sees("is paused")
        await one.press("Resume")
        await one.sees("is resumed")

        # rewind it to yesterday, and see before what that does
        await one.press("Preview")
        await one.sees("messages are delivered once more")
        await one.press("Move the group …")
        await one.press("Move the group")
        await one.sees("Group billing was moved.")

        # split a hot partition
        await one.page.get_by_role("link", name="orders", exact=True).click()
        await one.press("Split …")
        await one.press("Split")
        await one.sees("Route of orders: version 2")

        assert (await one.mq.lag("orders", "billing")).total.messages >= 20
        assert len((await one.mq.route("orders")).ranges) == 2
        assert len(await one.mq.dead_letters("orders", "billing")) == 1


@pytest.mark.slow("a browser in front of each database server")
@pytest.mark.parametrize("server", SERVERS.values(), ids=SERVERS)
async def test_it_is_the_same_on_a_database_server(server: str, request: pytest.FixtureRequest) -> None:
    async with desk(address=str(request.getfixturevalue(server))) as one:
        await _trouble(one)
        await one.open()
        await one.sees("1 stopped message holds its key")
        await one.page.get_by_role("listitem").filter(has_text="dead").get_by_role("link").first.click()
        await one.page.get_by_role("button", name="Open").first.click()
        await one.press("Redrive it")
        await one.sees("Handed back: 1")
        await one.open("topics/orders")
        await one.press("Split …")
        await one.press("Split")
        await one.sees("Route of orders: version 2")
        await one.open("audit")
        await one.sees_in("tr", "slots 512-1023 on shard first")
        await one.sees_in("tr", "redrive")
        assert len(await one.mq.dead_letters("orders", "billing")) == 1


def test_the_picture_in_the_readme_is_one_of_the_tests_and_small() -> None:
    """`make screenshot` takes it anew, by `test_looks.py`."""
    picture = ROOT / "docs" / "pictures" / "console.png"
    assert "(docs/pictures/console.png)" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert picture.stat().st_size < 150_000


async def _trouble(one: Desk) -> None:
    """A queue with a stopped key, and two dead letters."""
    await one.mq.create_topic("orders", partitions=1)
    await one.mq.create_topic("payments", partitions=1)
    await one.mq.create_group("payments", "charge", mode="ordered", max_attempts=1, exhausted="stop")
    await one.mq.send("payments", b"bad", key="ann")
    async with one.mq.consumer("payments", group="charge", mode="ordered") as consumer:
        (message, *_) = await consumer.poll(max_messages=1, wait=10)
        await message.retry(reason="ValueError: the card was refused")
    await one.mq.send_many("orders", [Message(b"order %d" % at) for at in range(20)])
    async with one.mq.consumer("orders", group="billing") as consumer:
        messages = await consumer.poll(max_messages=20, wait=10)
        for message in messages[:2]:
            await message.dead("ValueError: no such customer")
        await consumer.ack(messages[2:])


@pytest.mark.slow("drives a browser")
async def test_a_file_that_nobody_serves_has_a_console_too(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/orders.db"
    async with postroom.connect(url) as mq:
        await mq.create_topic("orders")
    command = [sys.executable, "-m", "postroom", "console", url, "--no-browser", "--json"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert process.stdout is not None
        address = json.loads(await process.stdout.readline())["console"]
        async with desk() as one:
            one.elsewhere = address.partition("/console")[0]
            await one.page.goto(address)
            await one.sees("orders")
            assert "key" not in one.page.url
            await one.page.reload()
            await one.sees("orders")
    finally:
        process.send_signal(signal.SIGINT)
        code = await process.wait()
    assert code == 0
