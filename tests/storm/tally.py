"""How much everybody has done so far, by their journals: each is read on from where it was read to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

__all__ = ["Flow", "Tally"]


class Flow(NamedTuple):
    """What is done in one place: producers confirm to a topic, members settle for a group."""

    topic: str
    group: str  # "": of a producer
    verb: str


class Tally:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._counts: Counter[Flow] = Counter()

    def now(self) -> Counter[Flow]:
        """Return how often each was noted so far."""
        for path in self._folder.glob("*.journal"):
            role, topic, *rest = path.stem.split("-")
            group = rest[0] if role == "consumer" else ""
            for line in self._new(path):
                self._counts[Flow(topic, group, line.split(b" ", 2)[1].decode())] += 1
        return self._counts.copy()

    def total(self, verb: str) -> int:
        """Return how often anybody noted it."""
        return sum(count for flow, count in self.now().items() if flow.verb == verb)

    def _new(self, path: Path) -> list[bytes]:
        """Whole lines since the last time."""
        begin = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(begin)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._read[path] = begin + len(whole)
        return whole.splitlines()
