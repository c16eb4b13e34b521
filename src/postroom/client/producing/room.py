"""Back-pressure: how many bytes a producer may hold, and who waits for room, first come first served.

Must never refuse for ever: when nothing is held, anything fits (I17). Room is taken for a waiter at the
moment it is woken, so nobody who comes later gets in before it.
"""

from __future__ import annotations

import asyncio
from collections import deque

__all__ = ["Room"]


class Room:
    __slots__ = ("_limit", "_waiters", "taken")

    def __init__(self, limit: int) -> None:
        self.taken = 0
        self._limit = limit
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()

    def try_take(self, size: int) -> bool:
        if self._waiters or not self._fits(size):
            return False
        self.taken += size
        return True

    async def take(self, size: int) -> None:
        if self.try_take(size):
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append((size, waiter))
        try:
            await waiter
        except asyncio.CancelledError:
            taken = waiter.done() and not waiter.cancelled()
            self.give_back(size if taken else 0)
            raise

    def give_back(self, size: int) -> None:
        self.taken -= size
        while self._waiters:
            wanted, waiter = self._waiters[0]
            if not waiter.done():
                if not self._fits(wanted):
                    return
                self.taken += wanted
                waiter.set_result(None)
            self._waiters.popleft()

    def _fits(self, size: int) -> bool:
        return not self.taken or self.taken + size <= self._limit
