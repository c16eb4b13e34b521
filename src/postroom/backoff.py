"""Back-off: how long somebody waits before what failed is tried again.

Every wait of that kind is one of these schedules: it doubles from try to try up to a longest pause, and has
some jitter, so that those who failed together do not come back together. Which errors are worth another try
is decided by their `retriable`.
"""

from __future__ import annotations

import random
from typing import NamedTuple

__all__ = ["ROUTE", "SLOW", "SOON", "STEADY", "STUCK", "Pauses", "pause"]


class Pauses(NamedTuple):
    """A schedule: the first pause and the longest one, in seconds."""

    first_s: float
    longest_s: float

    def after(self, tries: int) -> float:
        """Return the pause after so many failed tries, from 1 up: up to half as long again, by chance."""
        doubled = self.first_s * 2.0 ** min(max(tries, 1) - 1, 16)
        return min(doubled, self.longest_s) * (1 + random.random() / 2)


SOON = Pauses(0.005, 0.5)  # a call of the queue that somebody waits for
STEADY = Pauses(0.005, 2.0)  # the same for what goes on by itself, however long it takes
SLOW = Pauses(0.05, 5.0)  # something that is opened anew: a connection, a subscription, a schedule
STUCK = Pauses(1.0, 30.0)  # what was refused for good, until somebody has done something about it
ROUTE = Pauses(0.002, 0.5)  # a route that is being changed: its next version is a moment away


def pause(tries: int) -> float:
    """Return the seconds before the next try of a call: 5 ms, doubled each time up to half a second."""
    return SOON.after(tries)
