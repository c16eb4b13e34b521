"""Shards that a broker is given while it runs: its settings are read again at SIGHUP (R6).

Decides what of a change can be done without a restart: what is new is added. An address that is another one
now, or gone, is not: partitions may be in use there, and the log says so. A mistake in the settings changes
nothing. Must never log an address: there may be a password in it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from ..address import parse_shards
from ..broker.embedded import Broker
from ..errors import PostroomError
from ..serve_settings import ServeSettings
from .serve_logging import fields

__all__ = ["NewShards"]

log = logging.getLogger("postroom.serve")


class NewShards:
    def __init__(self, broker: Broker, known: Mapping[str, str], read: Callable[[], ServeSettings]) -> None:
        self._broker, self._read = broker, read
        self._known = dict(known)
        self._looking: asyncio.Task[None] | None = None

    def look(self) -> None:
        """In the event loop. One look at a time: what changes during one is seen by the next signal."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.get_running_loop().create_task(self.run_once())

    async def run_once(self) -> None:
        try:
            found = self._read().shards
            parse_shards(found)
        except PostroomError as error:
            log.error("the settings were read again, and nothing is changed: %s", error)
            return
        other = sorted(name for name, url in self._known.items() if found.get(name) != url)
        if other:
            log.warning("shards that were changed or left out need a restart", extra=fields(shards=other))
        new = {name: url for name, url in found.items() if name not in self._known}
        for name, url in new.items():
            await self._add(name, url)
        if not new:
            log.info("the settings were read again: no new shard", extra=fields(shards=len(self._known) + 1))

    async def _add(self, name: str, url: str) -> None:
        try:
            await self._broker.add_shards(parse_shards({name: url}))
        except PostroomError as error:
            log.error("shard %r is not added: %s", name, error)
        else:
            self._known[name] = url
            log.info("shard added", extra=fields(shard=name, shards=len(self._known) + 1))
