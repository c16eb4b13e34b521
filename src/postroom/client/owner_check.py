"""Who may use a connection: the process and the event loop it was opened in, until it is closed.

Every public call asks here first. Must never wait or touch the store: after a fork the store's files and
locks belong to the parent, and the child must find out before it touches them.
"""

from __future__ import annotations

import asyncio
import os

from ..errors import ClosedError, ForkError, UsageError

__all__ = ["Guard"]


class Guard:
    __slots__ = ("closed", "loop", "pid")

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.loop = asyncio.get_running_loop()
        self.closed = False

    def check(self) -> None:
        """Raise unless this process and this loop may use the connection now."""
        if asyncio._get_running_loop() is self.loop and not self.closed and os.getpid() == self.pid:
            return
        if os.getpid() != self.pid:
            raise ForkError(
                "this connection was opened before a fork and belongs to the parent process: "
                "connect again in the child"
            )
        if self.closed:
            raise ClosedError("this connection is closed: connect again")
        self.check_loop()

    def check_loop(self) -> None:
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            raise UsageError(
                "a connection is used from the event loop it was opened in; none is running"
            ) from None
        if running is not self.loop:
            raise UsageError(
                "this connection was opened in another event loop: connect once in each loop, "
                "or use postroom.sync from plain threads"
            )
