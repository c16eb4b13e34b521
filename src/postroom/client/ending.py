"""Ending tasks for certain.

One `cancel()` may not do: on Python 3.11 `asyncio.wait_for` swallows a cancel that arrives together with the
result it waits for, and whoever then awaits the task waits for ever. Must never be used on a task that has
something to finish: that one is awaited, not ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

__all__ = ["end"]

_AGAIN_SECONDS = 0.05


async def end(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks until they are done; what they raise is nobody's concern any more."""
    running = {task for task in tasks if not task.done()}
    while running:
        for task in running:
            task.cancel()
        done, running = await asyncio.wait(running, timeout=_AGAIN_SECONDS)
        for task in done:
            if not task.cancelled():
                task.exception()
