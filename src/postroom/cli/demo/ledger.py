"""What was really handled: each handler writes down a message after handling it and before acking it.

Files, one per process, so that a process killed by force still leaves its record; the figures of the demo are
counted from them and from the receipts of the sends, never from what the queue says about itself.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from postroom import Received

__all__ = [
    "HANDLED",
    "SENT",
    "Audit",
    "Ledger",
    "LedgerAt",
    "audit",
    "holds",
    "in_order",
    "out_of_order",
    "write_journals",
]


LedgerAt: TypeAlias = tuple[int, int]
"""Partition and offset: a message of the topic."""


_HOLDS = "# holds\n"  # a line: this process is at work on something that it will not finish


class Ledger:
    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.noted = 0

    def note(self, messages: Sequence[Received]) -> None:
        now = time.monotonic_ns()  # the same for all processes of a machine
        lines = "".join(f"{m.partition} {m.offset} {m.attempt} {now}\n" for m in messages)
        os.write(self._file, lines.encode())
        self.noted += len(messages)

    def note_hold(self) -> None:
        os.write(self._file, _HOLDS.encode())


def holds(path: Path) -> bool:
    """Whether the process that writes this one has messages in its hands and waits for its end."""
    return path.exists() and path.read_text().endswith(_HOLDS)


@dataclass(frozen=True, slots=True)
class Audit:
    sent: int
    handled: int  # different messages
    lost: int
    twice: int  # messages handled more than once
    again: int  # handled at a second or later delivery

    def fields(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("sent", "handled", "lost", "twice", "again")}


def audit(sent: set[LedgerAt], ledgers: Iterable[Path]) -> Audit:
    """Hold what was handled against what was sent."""
    times: Counter[LedgerAt] = Counter()
    again: set[LedgerAt] = set()
    for path in ledgers:
        for partition, offset, attempt, _ in _entries(path):
            times[partition, offset] += 1
            if attempt > 1:
                again.add((partition, offset))
    return Audit(
        sent=len(sent),
        handled=len(sent & times.keys()),
        lost=len(sent - times.keys()),
        twice=sum(1 for count in times.values() if count > 1),
        again=len(again),
    )


def out_of_order(numbers: Mapping[LedgerAt, tuple[str, int]], ledgers: Iterable[Path]) -> int:
    """How many messages were handled before an earlier one of their key.

    `numbers` has the key at each place, and which of its key it is, from 0. Handling one again is no
    fault: whoever takes over repeats what was not settled, from the lowest on.
    """
    done: Counter[str] = Counter()  # how many of each key were handled, without a gap
    wrong = 0
    for place in in_order(ledgers):
        key, number = numbers[place]
        if number > done[key]:
            wrong += 1
        done[key] = max(done[key], number + 1)
    return wrong


def in_order(ledgers: Iterable[Path]) -> list[LedgerAt]:
    """What was handled, by whomever, in the order in which it was: once for each time."""
    entries = sorted((entry for path in ledgers for entry in _entries(path)), key=lambda entry: entry[3])
    return [(partition, offset) for partition, offset, _, _ in entries]


def _entries(path: Path) -> Iterator[tuple[int, int, int, int]]:
    """Partition, offset, attempt and when."""
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n") and line != _HOLDS:  # else it was cut off by a kill: not handled to the end
            partition, offset, attempt, when = map(int, line.split())
            yield partition, offset, attempt, when


# ---- journals ----
# Which trades were sent and which were handled, in that order, as the job `audit` reads it.
#
# Written from the same receipts and ledgers that the demo counts from, so that two audits that know
# nothing of each other look at the same. Must never ask the queue: then it would be the witness of its
# own case.

SENT, HANDLED = "trades-sent.csv", "trades-handled.csv"


def write_journals(folder: Path, sent: Iterable[LedgerAt], ledgers: Iterable[Path]) -> None:
    """`sent` has the messages of a key in the order in which they were sent."""
    for name, places in ((SENT, sent), (HANDLED, in_order(ledgers))):
        lines = (f"{partition}:{offset},{at}\n" for at, (partition, offset) in enumerate(places))
        (folder / name).write_text("".join(("place,at\n", *lines)))
