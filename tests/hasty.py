"""An event loop that does not wait: where nothing is left to do until a timer ends, its time runs ahead.

For tests whose peers are fakes in the same loop: pauses, leases and time-outs keep their order, and take no
time. Must never be used where a thread, a process or a socket has to answer: time-outs would come first.
"""

from __future__ import annotations

import asyncio
import selectors
from typing import Any

__all__ = ["HastyLoop"]


class HastyLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._ahead_s = 0.0
        super().__init__(_Hasty(self))

    def time(self) -> float:
        return super().time() + self._ahead_s

    def run_ahead(self, seconds: float) -> None:
        self._ahead_s += seconds


class _Hasty(selectors.DefaultSelector):
    def __init__(self, loop: HastyLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        found = super().select(0)
        if not found:
            self._loop.run_ahead(timeout)
        return found
