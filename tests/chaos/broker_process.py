"""A broker in a process of its own, to be killed, stopped and started again on the same port."""

from __future__ import annotations

import asyncio

import postroom

from .patience import connected

__all__ = ["serve"]


async def serve(
    url: str, shards: dict[str, str], topic: str, journal: str, port: int, advertise: str
) -> None:
    """`advertise`: the address that clients are told, if it is another one."""
    mq = await connected(url, shards)
    while True:
        try:
            await mq.serve("127.0.0.1", port, advertise=advertise)
            break
        except postroom.StoreError as error:  # the database went away meanwhile, or the first shard is
            if not error.retriable:
                raise
        await asyncio.sleep(0.05)
    await asyncio.Event().wait()
