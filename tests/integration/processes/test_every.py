"""Recurring schedules when workers are killed between every two steps: no tick is lost or sent twice."""

from __future__ import annotations

import asyncio
import itertools
import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import postroom
from tests.integration.processes.children import child

SECONDS = 60  # a child that has not died by then never does
STEPS = ["before the mark", "after the mark", "before a run", "after a run", "in the handler"]


def make(url: str, step: str | None, handled: list[int] | None = None) -> postroom.App:
    app = postroom.App(url)

    @app.every("1s", missed="all", name="beat", max_attempts=50)
    async def beat() -> None:
        if step == "in the handler":
            os._exit(9)
        if handled is not None:
            handled.append(1)

    return app


def die_at(url: str, step: str, pipe: Any) -> None:
    """A worker that ends, as if killed, at that step."""
    send = postroom.Connection.send

    async def dying(self: postroom.Connection, *args: Any, **options: Any) -> Any:
        what = "the mark" if "expires" in options else "a run"
        if step == f"before {what}":
            os._exit(9)
        receipt = await send(self, *args, **options)
        if step == f"after {what}":
            os._exit(9)
        return receipt

    postroom.Connection.send = dying  # type: ignore[method-assign]
    make(url, step).run()


async def moments(url: str) -> list[datetime]:
    """The ticks that are in the topic, in order."""
    async with postroom.connect(url) as mq:
        return [datetime.fromisoformat(m.value.decode()) async for m in mq.read("every.beat")]


async def works(url: str, runs: int) -> None:
    """A worker that is well, until it has run so many ticks."""
    handled: list[int] = []
    async with make(url, None, handled), asyncio.timeout(SECONDS):
        for _ in itertools.count():
            if len(handled) >= runs:
                return
            await asyncio.sleep(0.01)


async def test_a_worker_that_dies_at_any_step(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/q.db"
    for step in STEPS:
        with child(die_at, url, step) as (process, _):
            await asyncio.to_thread(process.join, SECONDS)
            assert process.exitcode == 9, f"it did not get to: {step}"
    await works(url, runs=3)
    ticks = await moments(url)
    assert len(ticks) >= 3
    assert ticks == [ticks[0] + timedelta(seconds=n) for n in range(len(ticks))]
    async with postroom.connect(url) as mq:
        assert await mq.dead_letters("every.beat", "every") == []
