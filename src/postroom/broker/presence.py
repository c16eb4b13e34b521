"""This process among those that use the queue: who it is, and which shards it can reach (R6).

Addresses of shards are in each process's own configuration. A partition on a shard that one of them was not
given is out of its reach: so each says which it has, and partitions are put only where all can reach them.
Decides who does not know a shard, and what is said then. Must never hold up a start or an end: a store that
is away is told later.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from ..config import DEFAULTS, BrokerTuning
from ..errors import PostroomError, ShardUnknown
from ..store.contract import Process, Store

__all__ = ["Presence", "refuse_unknown", "unaware"]

_log = logging.getLogger("postroom.broker")

_SHOWN = 5  # names in a message


class Presence:
    """Used in the event loop only."""

    def __init__(
        self,
        store: Store,
        in_thread: Callable[..., Awaitable[Any]],
        tuning: BrokerTuning = DEFAULTS.tuning.broker,
    ) -> None:
        self._every_s, self._ttl_ms = tuning.announce_s, tuning.announced_ms
        self._store, self._in_thread = store, in_thread
        self._id = str(uuid.uuid4())
        self._name = ""
        self._task: asyncio.Task[None] | None = None

    async def enter(self, name: str) -> None:
        """Be known under that name from now on, with the shards that the store has now."""
        self._name = name
        await self._announce()
        if self._task is None:
            self._task = asyncio.create_task(self._keep())

    async def changed(self) -> None:
        """The store has other shards: say so now."""
        if self._task is not None:
            await self._announce()

    async def leave(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._in_thread(self._store.brokers.withdraw, self._id)
        except PostroomError as error:
            _log.debug("this process is still listed, for some seconds: %s", error)

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(self._every_s)
            await self._announce()

    async def _announce(self) -> None:
        me = Process(self._id, self._name[:250], frozenset(name for name in self._store.parts() if name))
        try:
            await self._in_thread(self._store.brokers.announce, me, self._ttl_ms)
        except PostroomError as error:
            _log.debug("others are not told now that this process is here: %s", error)


def unaware(processes: Iterable[Process], shard: str) -> list[str]:
    """The names of those that were not given the shard's address."""
    return [process.name for process in processes if not process.knows(shard)]


def refuse_unknown(processes: Iterable[Process], shard: str) -> None:
    """ShardUnknown if a partition on that shard would be out of somebody's reach."""
    names = unaware(processes, shard)
    if not names:
        return
    listed = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    who = (
        f"shard {shard!r} is not known to all that use this queue: {listed} could not reach what is put there"
    )
    raise ShardUnknown(
        f"{who}. Give them its address (shards= of connect(), POSTROOM_SHARDS, or [shards] of a broker's "
        "settings and then SIGHUP), and try again; a process that has ended is forgotten after 20 seconds",
        shard=shard,
        processes=names,
        _served=f"{who}. Ask the operator of the brokers to give them its address, then try again",
    )
