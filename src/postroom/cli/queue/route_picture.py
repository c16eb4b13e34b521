"""A route as a picture: what the slots, the lineage, the versions and the groups look like, as text and JSON.

Decides how a range is drawn: a bar over all slots, so that what follows what can be seen from one line to the
next. Asks nobody and changes nothing: routes and lags come in, rows and fields go out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...address import FIRST_SHARD
from ...config import SLOTS

if TYPE_CHECKING:
    from postroom import Change, Lag, Range, Route

__all__ = [
    "COLUMNS",
    "NUMBERS",
    "change_fields",
    "change_line",
    "group_fields",
    "group_row",
    "lineage",
    "listed",
    "name_of",
    "partition_fields",
    "range_fields",
    "rows",
    "shard_name",
    "span",
]

COLUMNS = ("partition", "slots", f"0 to {SLOTS - 1}", "shard", "end", "state", "from", "into")
NUMBERS = ("partition", "end")

_CELLS, _FEW_CELLS = 32, 16
_WIDE = 100  # columns that a terminal needs for the long bars
_PRETTY = {"whole": "█", "partly": "▌", "sealed": "░", "others": "·"}
_PLAIN = {"whole": "#", "partly": "+", "sealed": "=", "others": "."}

Ends = Mapping[int, int]
"""By number of a partition; one whose shard is away is missing."""


def shard_name(shard: str) -> str:
    return shard or FIRST_SHARD


def name_of(piece: Range) -> str:
    """A partition that is not there yet has no number."""
    return "new" if piece.partition < 0 else str(piece.partition)


def span(piece: Range) -> str:
    return f"{piece.first_slot}-{piece.last_slot}"


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers)) or "–"


# ---- partitions ----


def rows(route: Route, ends: Ends, width: int) -> list[tuple[str, ...]]:
    """One for each partition: those that take messages in the order of their slots, then the sealed ones."""
    cells = _CELLS if width >= _WIDE else _FEW_CELLS
    sealed = {piece.partition_id for piece in route.sealed}
    return [
        (
            name_of(piece),
            span(piece),
            _bar(piece, cells, sealed=piece.partition_id in sealed),
            shard_name(piece.shard),
            f"{ends[piece.partition]:,}" if piece.partition in ends else "–",
            "sealed" if piece.partition_id in sealed else "open",
            listed(_follows(route, piece)),
            _followed_by(route, piece),
        )
        for piece in (*route.ranges, *route.sealed)
    ]


def partition_fields(route: Route, ends: Ends) -> list[dict[str, Any]]:
    sealed = {piece.partition_id for piece in route.sealed}
    return [
        {
            **range_fields(piece),
            "end": ends.get(piece.partition),
            "sealed": piece.partition_id in sealed,
            "follows": _follows(route, piece),
            "followed_by": [new.partition for new in _successors(route, piece)],
        }
        for piece in (*route.ranges, *route.sealed)
    ]


def range_fields(piece: Range) -> dict[str, Any]:
    return {
        "partition": None if piece.partition < 0 else piece.partition,
        "first_slot": piece.first_slot,
        "last_slot": piece.last_slot,
        "shard": shard_name(piece.shard),
    }


def _bar(piece: Range, count: int, *, sealed: bool) -> str:
    """
    >>> from postroom.model.topology.route import Range
    >>> _bar(Range(0, 511, 1, 1), 8, sealed=False) in ("████····", "####....")
    True
    """
    marks = _PRETTY if (sys.stdout.encoding or "").lower().startswith("utf") else _PLAIN
    width = SLOTS // count
    cells = []
    for first in range(0, SLOTS, width):
        inside = min(first + width - 1, piece.last_slot) - max(first, piece.first_slot) + 1
        kind = "others" if inside <= 0 else "whole" if inside == width else "partly"
        cells.append(marks["sealed" if sealed and kind != "others" else kind])
    return "".join(cells)


def _follows(route: Route, piece: Range) -> list[int]:
    numbers = {one.partition_id: one.partition for one in route.partitions}
    before = route.predecessors.get(piece.partition_id, ())
    return sorted(numbers[one] for one in before if one in numbers)


def _successors(route: Route, piece: Range) -> list[Range]:
    after = [
        new for new in route.partitions if piece.partition_id in route.predecessors.get(new.partition_id, ())
    ]
    return sorted(after, key=lambda new: new.first_slot)


def _followed_by(route: Route, piece: Range) -> str:
    return ", ".join(map(name_of, _successors(route, piece))) or "–"


def lineage(route: Route) -> list[str]:
    """Return what became of what, as far as it is there: "0 → 1, 2".

    >>> from postroom.model.topology.route import Range, Route
    >>> whole, left, right = Range(0, 1023, 0, 7), Range(0, 511, 1, 8), Range(512, 1023, 2, 9)
    >>> lineage(Route("orders", 2, (left, right), sealed=(whole,), predecessors={8: (7,), 9: (7,)}))
    ['0 → 1, 2']
    """
    steps: dict[tuple[int, ...], list[str]] = {}
    for piece in sorted(route.partitions, key=lambda piece: piece.partition):
        before = tuple(_follows(route, piece))
        if before:
            steps.setdefault(before, []).append(name_of(piece))
    return [f"{listed(before)} → {', '.join(after)}" for before, after in steps.items()]


# ---- a change, and groups ----


def change_line(change: Change) -> str:
    sealed = " and ".join(str(piece.partition) for piece in change.seals)
    opened = " and ".join(f"{new.partition} ({span(new)})" for new in change.opens)
    return f"under way: {change.kind} of {sealed} into {opened}, for version {change.version + 1}"


def change_fields(change: Change | None) -> dict[str, Any] | None:
    if change is None:
        return None
    return {
        "kind": change.kind,
        "version": change.version + 1,
        "seals": [piece.partition for piece in change.seals],
        "opens": [range_fields(piece) for piece in change.opens],
    }


def group_row(lag: Lag, mode: str) -> tuple[str, ...]:
    """Return what a group has still to read of what is sealed, and what waits for that."""
    fields = group_fields(lag, mode)
    left = [f"{one['partition']} ({one['messages']:,})" for one in fields["to_read"]]
    waiting = [f"{one['partition']} for {listed(one['waits_for'])}" for one in fields["waiting"]]
    return (lag.group, mode, ", ".join(left) or "–", "; ".join(waiting) or "–")


def group_fields(lag: Lag, mode: str) -> dict[str, Any]:
    parts = [part for part in lag.partitions if part.topic == lag.topic]
    own = sorted(parts, key=lambda part: part.partition)
    return {
        "group": lag.group,
        "mode": mode,
        "to_read": [{"partition": p.partition, "messages": p.messages} for p in own if p.sealed],
        "waiting": [{"partition": p.partition, "waits_for": list(p.waits_for)} for p in own if p.waits_for],
    }
