"""What a group's users are promised, written down by somebody who sees no store: the ledger.

It knows what was appended under which key, what each member began to handle, and what was settled since;
no cursor, no delivery, no holder. Whoever begins a message must find every earlier one of its key settled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Ledger"]


@dataclass
class Ledger:
    keys: list[int] = field(default_factory=list)  # of every message
    start: int = 0  # of this generation
    settled: set[int] = field(default_factory=set)  # acked, or on its way to the dead letters
    acked: set[int] = field(default_factory=set)
    begun: dict[int, int] = field(default_factory=dict)  # the attempt with which it last began
    not_before: dict[int, int] = field(default_factory=dict)

    def append(self, keys: Sequence[int]) -> None:
        self.keys += keys

    def reset(self, start: int) -> None:
        self.start = min(start, len(self.keys))
        self.settled, self.acked, self.begun, self.not_before = set(), set(), {}, {}

    def began(self, offset: int, attempt: int, now: int) -> None:
        """In order, nothing skipped (R22, R23), nothing after it was settled, nothing too early (R17)."""
        key = self.keys[offset]
        assert self.start <= offset, "before the group's start"
        assert offset not in self.settled, "begun again after it was settled"
        earlier = [o for o in range(self.start, offset) if self.keys[o] == key and o not in self.settled]
        assert not earlier, f"{offset} begins before {earlier} of the same key"
        assert self.not_before.get(offset, 0) <= now, "begun before its time"
        assert attempt >= self.begun.get(offset, 1), "attempts shrank"
        self.begun[offset] = attempt

    def waits(self, offset: int, not_before: int) -> None:
        self.not_before[offset] = not_before

    def restarted(self) -> None:
        """Somebody wants stopped messages to be tried again, now; others keep their time."""
        far = [offset for offset, at in self.not_before.items() if at >= 2**61]
        for offset in far:
            del self.not_before[offset]

    def ack(self, offset: int) -> None:
        assert offset not in self.settled, "settled twice"
        self.acked.add(offset)
        self.settled.add(offset)

    def leave(self, offset: int) -> None:
        """It was stamped for the dead letters: its key goes on."""
        assert offset not in self.settled, "settled twice"
        self.settled.add(offset)

    @property
    def unsettled(self) -> list[int]:
        return [offset for offset in range(self.start, len(self.keys)) if offset not in self.settled]
