"""What of a topic a job looks at: from where to where, decided once, so that every query sees the same.

Looks at the queue before the first query and pins the offsets of every partition. Also knows which partitions
come before which, so that the messages of a key have an order across splits and merges (R26).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import InvalidSetting
from ...model.route import Route
from .. import positions
from ..columns import COLUMNS, HEADERS
from ..options import read_options
from ..queue import Queue

__all__ = ["Stored", "look", "ranks"]


@dataclass(frozen=True, slots=True)
class Stored:
    """Offsets of the partitions of a topic, by number: from `start` up to, and without, `end`."""

    topic: str
    route: Route
    start: Mapping[int, int] = field(hash=False)
    end: Mapping[int, int] = field(hash=False)
    queue: Mapping[str, str] = field(repr=False, hash=False)

    @property
    def offsets(self) -> int:
        return sum(self.end[number] - self.start[number] for number in self.end)

    def frame(self, spark: Any, columns: Sequence[str], *, lossy: bool = False) -> Any:
        """A DataFrame with these columns only. `lossy`: what is not there any more is left out."""
        kinds = {**COLUMNS, "headers": HEADERS}
        options = {
            **self.queue,
            "subscribe": self.topic,
            "failOnDataLoss": str(not lossy).lower(),
            "startingOffsets": json.dumps({self.topic: {str(n): at for n, at in self.start.items()}}),
            "endingOffsets": json.dumps({self.topic: {str(n): at for n, at in self.end.items()}}),
        }
        schema = ", ".join(f"`{name}` {kinds[name]}" for name in columns)
        return spark.read.format("postroom").schema(schema).options(**options).load()


def look(
    queue: Mapping[str, str], topic: str, *, start_ms: int | None = None, end_ms: int | None = None
) -> Stored:
    """By the time of the messages: since `start_ms`, and before `end_ms`; else all that is there now."""
    if start_ms is not None and end_ms is not None and start_ms >= end_ms:
        raise InvalidSetting("the range is empty: it begins where it ends, or after that")
    given = {**queue, "subscribe": topic, "startingOffsetsByTimestampStrategy": "latest"}
    if start_ms is not None:
        given["startingTimestamp"] = str(start_ms)
    if end_ms is not None:
        given["endingTimestamp"] = str(end_ms)
    options = read_options(given, streaming=False)
    with Queue(options.reach) as opened:
        now = positions.look(opened, options.topics)
        first, last = positions.starts(opened, options, now), positions.ends(opened, options, now)
        route = opened.routes(options.topics)[0]
    start = {number: at for (_, number), at in first.at.items()}
    end = {number: max(at, start[number]) for (_, number), at in last.at.items()}
    return Stored(topic, route, start, end, dict(queue))


def ranks(route: Route) -> dict[int, int]:
    """By number: a partition has a higher rank than all that it follows."""
    numbers = {piece.partition_id: piece.partition for piece in route.partitions}
    found: dict[int, int] = {}
    for piece in route.partitions:  # whatever follows comes later
        before = [numbers[id] for id in route.predecessors.get(piece.partition_id, ()) if id in numbers]
        found[piece.partition] = 1 + max((found.get(number, 0) for number in before), default=0)
    return found
