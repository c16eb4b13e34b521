"""Log lines about strangers who were refused: a few of each kind in a minute, and then a count.

Whoever can reach a port can be refused a thousand times a second. The first `SHOWN` lines of a minute are
written as they are; of all others there is one line when the minute is over. Nothing else may log a refusal.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

__all__ = ["KINDS", "SHOWN", "Refusals"]

SHOWN = 10  # lines of each kind in a minute
_MINUTE_S = 60.0

KINDS = {
    "greeting": "refused greetings",
    "wrong token": "warnings of wrong tokens",
    "http": "refused requests over HTTP",
}
"""What is counted, as the line about the rest calls it."""


class Refusals:
    """Used in the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: dict[str, float] = {}
        self._count: dict[str, int] = {}
        self._log: dict[str, logging.Logger] = {}

    def say(self, kind: str, log: logging.Logger, message: str, *args: Any) -> None:
        """Log a warning, or only count it."""
        self.tick()
        self._began.setdefault(kind, self._clock())
        self._log[kind] = log
        self._count[kind] = count = self._count.get(kind, 0) + 1
        if count <= SHOWN:
            log.warning(message, *args)

    def tick(self) -> None:
        """Tell of what was left out in minutes that are over; from time to time."""
        now = self._clock()
        for kind in [kind for kind, began in self._began.items() if now - began >= _MINUTE_S]:
            del self._began[kind]
            more = self._count.pop(kind) - SHOWN
            if more > 0:
                self._log[kind].warning("… and %s more %s in the last minute", f"{more:,}", KINDS[kind])
