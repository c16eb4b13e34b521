"""A broker in a process of its own, to be killed, stopped and started again on the same port."""

from __future__ import annotations

import asyncio

from .patience import connected

__all__ = ["serve"]


async def serve(url: str, shards: dict[str, str], topic: str, journal: str, port: int) -> None:
    mq = await connected(url, shards)
    await mq.serve("127.0.0.1", port)
    await asyncio.Event().wait()
