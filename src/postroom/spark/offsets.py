"""How far a stream has read: the text in its checkpoint.

    {"v": 1, "topics": {"orders": {"0": 13, "1": 7}}, "sealed": {"orders": [0]}, "ids": {"orders": 1}}

`topics` has the next offset of each partition, by its number. Partitions in `sealed` are read to their seal:
they may leave as soon as retention has dropped them, and nothing is lost by that. `ids` tells a topic from
another of the same name that was made later. `first` marks the empty batch that pins where a stream begins.

A checkpoint outlives the program that wrote it: `VERSION` grows when the meaning changes, and what a newer
version wrote is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from ..errors import InvalidSetting

__all__ = ["VERSION", "Offsets", "Place"]

Place: TypeAlias = tuple[str, int]
"""A partition: topic and number."""

VERSION = 1


@dataclass(frozen=True, slots=True)
class Offsets:
    at: Mapping[Place, int] = field(default_factory=dict, hash=False)
    sealed: frozenset[Place] = frozenset()
    ids: Mapping[str, int] = field(default_factory=dict, hash=False)
    first: bool = False

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
        return found

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
            at = {
                (str(t), int(n)): int(o) for t, numbers in data["topics"].items() for n, o in numbers.items()
            }
            sealed = frozenset((str(t), int(n)) for t, ns in data.get("sealed", {}).items() for n in ns)
            ids = {str(t): int(n) for t, n in data.get("ids", {}).items()}
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
        return Offsets(at, sealed, ids, bool(data.get("first", False)))


def _nested(at: Mapping[Place, int]) -> dict[str, dict[str, int]]:
    found: dict[str, dict[str, int]] = {}
    for topic, number in sorted(at):
        found.setdefault(topic, {})[str(number)] = at[topic, number]
    return found
