"""A process to be killed that looks after what stopped: it lists it, and restarts, skips or drops some of it.

It notes what it is going to skip or drop before it does, and afterwards that it has: a message that was
neither handled nor noted is lost. What it restarts is handled in the end.
"""

from __future__ import annotations

import asyncio
import random

import postroom

from .journal import Journal
from .patience import connected

__all__ = ["operate"]

_LONGEST_S = 0.3  # between two looks


async def operate(url: str, shards: dict[str, str], topic: str, journal: str, group: str) -> None:
    mq = await connected(url, shards)
    notes = Journal(journal)
    while True:
        await asyncio.sleep(random.random() * _LONGEST_S)
        try:
            stopped = await mq.stopped(topic, group, limit=100)
            for one in random.sample(stopped, random.randint(0, len(stopped))):
                await _decide(mq, one, notes)
        except postroom.CatalogError:
            pass  # another operator was faster, or the one that was killed here
        except postroom.StoreError as error:
            if not error.retriable:
                raise


async def _decide(mq: postroom.Connection, one: postroom.Stopped, notes: Journal) -> None:
    value = one.value.decode()
    chosen = {"keys": [one.key]} if random.random() < 0.3 else {"ids": [one.id]}
    fate = random.choice(("restart", "restart", "skip", "drop"))
    if fate == "restart":
        if await mq.restart_stopped(one.topic, one.group, **chosen):  # type: ignore[arg-type]
            notes.note("restarted", [value])
        return
    notes.note(f"{fate}s", [value])
    verb = mq.skip_stopped if fate == "skip" else mq.drop_stopped
    if await verb(one.topic, one.group, ids=[one.id]):
        notes.note("skipped" if fate == "skip" else "dropped", [value])
