"""What handlers did, counted: messages handled and failed, how long calls took, what is in flight.

One set of numbers for each handler, written by the event loop that runs it and read from any thread. A call
is counted once, however many messages it has. The numbers belong to the app: they go on when a handler's
worker ends and another takes over. Must never raise, and decides nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

from ...metrics import Family, Labels, counter, gauge, histogram
from .subscription import Subscription

__all__ = ["HandlerFigures", "HandlersFigures"]

BOUNDS_S = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0,
)  # fmt: skip
"""Upper edges of the buckets, in seconds: handlers may take long."""

_NAMES = ("topic", "group", "handler")


class HandlerFigures:
    """The figures of one handler."""

    __slots__ = ("counts", "failed", "handled", "in_flight", "seconds")

    def __init__(self) -> None:
        self.handled = 0  # messages, one way or the other
        self.failed = 0  # of those, messages whose handling raised
        self.in_flight = 0  # messages that a handler is at
        self.counts = [0] * (len(BOUNDS_S) + 1)  # calls, by how long they took
        self.seconds = 0.0  # all calls together

    def began(self, messages: int) -> None:
        self.in_flight += messages

    def ended(self, messages: int, seconds: float) -> None:
        """A call has ended, well or not."""
        self.in_flight -= messages
        self.handled += messages
        self.counts[bisect_left(BOUNDS_S, seconds)] += 1
        self.seconds += seconds


class HandlersFigures:
    """The figures of all handlers of an app."""

    def __init__(self) -> None:
        self._found: dict[Labels, HandlerFigures] = {}

    def of(self, subscription: Subscription) -> HandlerFigures:
        key = (subscription.topic, subscription.group, subscription.handler.name)
        return self._found.setdefault(key, HandlerFigures())

    def families(self, running: Iterable[tuple[Labels, float]]) -> Iterator[Family]:
        """Return all of them as metrics; `running`: which consumers do, by topic and group."""
        found = list(self._found.items())
        said = "Messages whose handler has ended, failed ones too."
        yield counter("handler_messages", said, _NAMES, ((key, one.handled) for key, one in found))
        said = "Messages whose handling failed: it raised, timed out, or the body did not fit."
        yield counter("handler_failures", said, _NAMES, ((key, one.failed) for key, one in found))
        said = "Time of a handler's call; one of a handler of lists has many messages."
        calls = ((key, one.counts, one.seconds) for key, one in found)
        yield histogram("handler_seconds", said, _NAMES, calls, BOUNDS_S)
        said = "Messages that handlers are at."
        yield gauge("handler_in_flight", said, _NAMES, ((key, one.in_flight) for key, one in found))
        said = "1: the consumer is connected and its handlers run; 0: it waits, or failed."
        yield gauge("handler_running", said, _NAMES[:2], running)
