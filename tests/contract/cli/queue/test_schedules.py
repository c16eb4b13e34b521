"""`postroom schedule list`: recurring schedules, their next runs, and who runs them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import postroom
from postroom.client.app.recurring import Ticker, prepare
from tests.contract.cli_runner import Cli


async def declared(url: str) -> None:
    """A schedule that was started once, and that nobody runs now."""
    app = postroom.App(url)

    @app.every("0 2 * * *", timezone="Europe/Berlin")
    async def nightly() -> None: ...

    async with postroom.connect(url) as mq:
        await prepare(mq, app.schedules)
        await Ticker(mq, app.schedules[0]).step()


def test_schedules_are_listed_and_one_that_nobody_runs_is_pointed_out(tmp_path: Path) -> None:
    cli = Cli(tmp_path)
    cli.ok("topic", "create", "orders")
    assert "a program declares one with @app.every" in cli.ok("schedule", "list").out
    asyncio.run(declared(cli.url))
    (found,) = cli.ok("schedule", "list", "--json").json
    assert (found["name"], found["rule"], found["timezone"]) == ("nightly", "0 2 * * *", "Europe/Berlin")
    assert len(found["next"]) == 3 and found["next"][0].endswith(":00:00.000Z")
    assert (found["last"], found["workers"], found["pending"], found["dead"]) == (None, [], 0, 0)
    shown = cli.ok("schedule", "list")
    assert "0 2 * * * Europe/Berlin" in shown.out and "nobody" in shown.out
    assert "start its workers" in shown.err and "postroom topic delete every.nightly" in shown.err
