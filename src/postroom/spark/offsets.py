"""How far a stream has read: the text in its checkpoint.

    {"v": 2, "topics": {"orders": {"0": 13, "1": 7}}, "sealed": {"orders": [0]}, "ids": {"orders": 1},
     "queue": "5f0c…", "marks": {"orders": {"0": "10-9f1c20aa", "1": "0-00d3b1c4"}},
     "turns": {"orders": {"1": [1, 0]}}}

`topics` has the next offset of each partition, by its number. Partitions in `sealed` are read to their seal:
they may leave as soon as retention has dropped them, and nothing is lost by that. `ids` tells a topic from
another of the same name that was made later. `first` marks the empty batch that pins where a stream begins.

`queue` and `marks` tell whether the log is still the one that was read (`model.marks`). A partition whose log
was another one, and that is read again, is in its next turn: `turns` has how many there were, and the offset
at which the newest began.

A checkpoint outlives the program that wrote it: `VERSION` grows when the meaning changes, and what a newer
version wrote is refused. Version 1 had no `queue`, `marks` or `turns`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from ..errors import InvalidSetting

__all__ = ["VERSION", "Offsets", "Place", "Turn"]

T = TypeVar("T")

Place: TypeAlias = tuple[str, int]
"""A partition: topic and number."""

Turn: TypeAlias = tuple[int, int]
"""How often a partition was begun again, and the offset at which that was."""

VERSION = 2


@dataclass(frozen=True, slots=True)
class Offsets:
    at: Mapping[Place, int] = field(default_factory=dict, hash=False)
    sealed: frozenset[Place] = frozenset()
    ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    first: bool = False
    queue: str = ""  # its incarnation; "": not known
    marks: Mapping[Place, str] = field(default_factory=dict, hash=False)
    turns: Mapping[Place, Turn] = field(default_factory=dict, hash=False)

    def encode(self) -> dict[str, Any]:
        """Equal offsets give equal texts: Spark compares those."""
        found: dict[str, Any] = {"v": VERSION, "topics": _nested(self.at)}
        if self.sealed:
            found["sealed"] = {
                topic: sorted(n for name, n in self.sealed if name == topic)
                for topic in sorted({name for name, _ in self.sealed})
            }
        found["ids"] = dict(sorted(self.ids.items()))
        if self.first:
            found["first"] = True
        if self.queue:
            found["queue"] = self.queue
        if self.marks:
            found["marks"] = _nested(self.marks)
        if self.turns:
            found["turns"] = {
                topic: {number: list(turn) for number, turn in numbers.items()}
                for topic, numbers in _nested(self.turns).items()
            }
        return found

    def goes_to(self, other: Offsets) -> bool:
        """Whether these are the same places, however they are marked."""
        return (self.at, self.sealed, self.ids, self.turns) == (
            other.at,
            other.sealed,
            other.ids,
            other.turns,
        )

    @staticmethod
    def decode(data: object, takes: Callable[[str], bool], wanted: str) -> Offsets:
        """`takes` tells whether a topic is read by this query, `wanted` is what it reads, for people."""
        if not isinstance(data, dict) or not isinstance(data.get("v"), int):
            raise InvalidSetting(
                "the checkpoint was not written by a stream from Postroom: give the query a "
                "checkpointLocation of its own"
            )
        if data["v"] > VERSION:
            raise InvalidSetting(
                f"the checkpoint has version {data['v']} and was written by a newer Postroom; this one knows "
                f"{VERSION}: install that version here as well, or begin with a new checkpointLocation"
            )
        try:
            at = {place: int(offset) for place, offset in _flat(data["topics"]).items()}
            sealed = frozenset((str(t), int(n)) for t, ns in data.get("sealed", {}).items() for n in ns)
            ids = {str(t): int(n) for t, n in data.get("ids", {}).items()}
            marks = {place: str(mark) for place, mark in _flat(data.get("marks", {})).items()}
            turns = {place: (int(n), int(o)) for place, (n, o) in _flat(data.get("turns", {})).items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InvalidSetting(
                "the offsets in the checkpoint are damaged: restore it, or begin with a new one"
            ) from None
        foreign = sorted({topic for topic, _ in at if not takes(topic)})
        if foreign:
            raise InvalidSetting(
                f"the checkpoint is of topic {', '.join(map(repr, foreign))}, and this query reads {wanted}: "
                "give the query a checkpointLocation of its own"
            )
        queue = str(data.get("queue", ""))
        return Offsets(at, sealed, ids, bool(data.get("first", False)), queue, marks, turns)


def _nested(at: Mapping[Place, T]) -> dict[str, dict[str, T]]:
    found: dict[str, dict[str, T]] = {}
    for topic, number in sorted(at):
        found.setdefault(topic, {})[str(number)] = at[topic, number]
    return found


def _flat(data: Mapping[str, Mapping[str, Any]]) -> dict[Place, Any]:
    return {(str(topic), int(n)): value for topic, numbers in data.items() for n, value in numbers.items()}
