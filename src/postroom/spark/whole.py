"""A stream under Spark 4.0 or 4.1, where each micro-batch reads all that is there.

That Spark says neither where a micro-batch begins nor whether another follows: `availableNow` is one of them,
and the end. So the stream keeps by itself where it is: at the end of the last micro-batch that was planned,
which Spark names after a restart before it asks for more. It passes through all successors of a partition at
once; the messages of a key are in order from one micro-batch to the next, as everywhere.

Only a stream from "latest" begins with an empty micro-batch that pins it: a run that ends there misses
nothing. Any other beginning is found again after a crash before the first commit. Options by which a
micro-batch might leave something behind are refused.
"""

from __future__ import annotations

from .offsets import Offsets
from .options import LATEST, ReadOptions, bad_option
from .planning import Snapshot, Span, advance
from .streaming import Stream

__all__ = ["WholeStream", "refuse_short_runs"]


def refuse_short_runs(options: ReadOptions, version: str) -> None:
    """`version` is that of PySpark, for people."""
    for name, value in (
        ("maxOffsetsPerTrigger", options.max_offsets),
        ("minOffsetsPerTrigger", options.min_offsets),
    ):
        if value is not None:
            raise bad_option(
                name,
                f"it needs PySpark 4.2 or newer, and this is {version}, where a run with availableNow would "
                "end before everything is read: leave it out; a micro-batch then reads all that is there",
            )
    if options.start.kind == "offsets" and LATEST in options.start.at.values():
        raise bad_option(
            options.start.option,
            f"-1 (latest) needs PySpark 4.2 or newer, and this is {version}: name the offsets, or write "
            "latest for all partitions",
        )


class WholeStream(Stream):
    _at: Offsets | None = None  # None: of a new stream, until it is asked

    def tasks(self, start: Offsets, end: Offsets) -> list[tuple[Span, ...]]:
        self._at = end
        return super().tasks(start, end)

    def next(self) -> Offsets:
        """Where the next micro-batch ends; what was told before is in the checkpoint by now."""
        self._at = self.latest(self._at or self.initial(), None)
        return self._at

    def _pins(self, start: Offsets) -> bool:
        return self._options.start.kind == "latest" and super()._pins(start)

    def _advanced(self, start: Offsets, now: Snapshot, limit: int | None) -> Offsets:
        found = advance(start, now, limit)
        while (further := advance(found, now, limit)) != found:
            found = further
        return found
