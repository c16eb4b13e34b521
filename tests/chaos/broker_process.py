"""A broker in a process of its own, to be killed, stopped and started again on the same port.

SIGTERM ends it in order.
"""

from __future__ import annotations

import asyncio
import signal

import postroom

from .patience import connected

__all__ = ["serve"]


async def serve(
    url: str, shards: dict[str, str], topic: str, journal: str, port: int, advertise: str
) -> None:
    """`advertise`: the address that clients are told, if it is another one."""
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    mq = await connected(url, shards)
    while True:
        try:
            await mq.serve("127.0.0.1", port, advertise=advertise)
            break
        except postroom.StoreError as error:  # the database went away meanwhile, or the first shard is
            if not error.retriable:
                raise
        await asyncio.sleep(0.05)
    await ended.wait()
    await mq.close()
