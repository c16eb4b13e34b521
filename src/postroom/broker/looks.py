"""Looks into the store that many wait for: one looks, and all go on with what it found, in their order.

Appends of one producer come in the order of their sequences (I3), and must not overtake each other because
one of them had to look something up. Used in the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Any, TypeVar

__all__ = ["Looks"]

T = TypeVar("T")


class Looks:
    def __init__(self, in_thread: Callable[..., Awaitable[Any]]) -> None:
        self._in_thread = in_thread
        self._under_way: dict[Hashable, asyncio.Future[Any]] = {}

    async def look(self, key: Hashable, known: T | None, function: Callable[..., T], *args: Any) -> T:
        """`known`: what it is, if that is known already; also then nobody who looks is overtaken."""
        looking = self._under_way.get(key)
        if looking is None:
            if known is not None:
                return known
            looking = self._under_way[key] = asyncio.ensure_future(self._in_thread(function, *args))
            looking.add_done_callback(lambda done: self._looked(key, done))
        found: T = await asyncio.shield(looking)
        return found

    def _looked(self, key: Hashable, done: asyncio.Future[Any]) -> None:
        del self._under_way[key]
        if not done.cancelled():
            done.exception()  # those who wait are told
