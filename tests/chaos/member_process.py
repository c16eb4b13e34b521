"""A broadcast member: a handler that notes what it handled, and when it was told it missed some."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping

import postroom

from .journal import Journal
from .patience import connected

__all__ = ["GROUP", "belong"]

GROUP = "cache"


async def belong(url: str, shards: Mapping[str, str], topic: str, path: str, member: str | None) -> None:
    """Until it is killed. It notes `ready` when it runs, `handled` for each message, and `missed`."""
    journal, app = Journal(path), postroom.App(await connected(url, shards))

    async def missed() -> None:
        journal.note("missed", ["-"])

    @app.subscribe(topic, group=GROUP, mode="broadcast", member=member, start="latest", on_missed=missed)
    async def handle(body: bytes) -> None:
        journal.note("handled", [body.decode()])

    async with app:
        for _ in itertools.count():
            if app.health().ok:
                break
            await asyncio.sleep(0.01)
        journal.note("ready", ["-"])
        await app.wait()
