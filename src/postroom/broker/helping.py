"""Route changes as the event loop sees them: each in a thread of its own, so that polls do not wait for it.

A change may have to wait for a store. Somebody may also have died in the middle of one, and left a sealed
partition without successors: the broker whose producer meets it goes on with the change, once for all who
wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from ..errors import PartitionSealed, PostroomError
from .routes import RouteChanges

__all__ = ["RouteHelp"]

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.005, 0.1  # between looks at a change that others make

_log = logging.getLogger("postroom.broker")

T = TypeVar("T")


class RouteHelp:
    """Used in the event loop only. `changed` is called when a route may be another one."""

    def __init__(self, changes: RouteChanges, changed: Callable[[], None]) -> None:
        self._changes = changes
        self._changed = changed
        self._under_way: dict[str, asyncio.Task[None]] = {}
        self._closed = False

    async def run(self, change: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.to_thread(change, *args)
        finally:
            self._changed()

    async def met_seal(self, topic: str, partition_id: int, error: PartitionSealed) -> None:
        """A producer met a sealed partition: name its successors, or see to it that there are some."""
        with suppress(PostroomError):  # it is refused in any case, and finds out by itself
            route = await asyncio.to_thread(self._changes.route, topic)
            error.details["successors"] = [piece.partition for piece in route.successors(partition_id)]
        if not error.details.get("successors") and topic not in self._under_way:
            self._under_way[topic] = asyncio.create_task(self._help(topic))

    async def _help(self, topic: str) -> None:
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._closed and not await asyncio.to_thread(self._changes.help, topic):
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except PostroomError as error:
            _log.warning("the route of topic %r waits: %s", topic, error)
        finally:
            del self._under_way[topic]
            self._changed()

    async def close(self) -> None:
        self._closed = True
        await asyncio.gather(*self._under_way.values(), return_exceptions=True)
