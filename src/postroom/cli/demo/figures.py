"""What was really handled, and the demo's figures, all counted from it.

Each handler writes a message into its ledger after handling it and before acking it. Ledgers are files, one
for each process, so that a process killed by force still leaves its record. Figures are counted from them and
from the receipts of sends, never from what the queue says about itself; `well` is whether the promises were
kept.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from postroom import Received

__all__ = [
    "HANDLED",
    "SENT",
    "Audit",
    "Figures",
    "Ledger",
    "LedgerAt",
    "Pipeline",
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
    """The file in which one process writes what it has handled."""

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
    """Tell whether the process that writes this ledger has messages in flight and waits to be killed."""
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
    """Count the messages that were handled before an earlier one of their key.

    `numbers` has the key of each message, and which of its key it is, from 0. Handling one again is no
    fault: the process that takes over repeats what was not settled, from the lowest on.
    """
    done: Counter[str] = Counter()  # how many of each key were handled, without a gap
    wrong = 0
    for at in in_order(ledgers):
        key, number = numbers[at]
        if number > done[key]:
            wrong += 1
        done[key] = max(done[key], number + 1)
    return wrong


def in_order(ledgers: Iterable[Path]) -> list[LedgerAt]:
    """Return what all processes have handled, in the order in which they did: once for each time."""
    entries = sorted((entry for path in ledgers for entry in _entries(path)), key=lambda entry: entry[3])
    return [(partition, offset) for partition, offset, _, _ in entries]


def _entries(path: Path) -> Iterator[tuple[int, int, int, int]]:
    """Yield partition, offset, attempt and time of each line that was written to its end."""
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n") and line != _HOLDS:  # else it was cut off by a kill: not handled to the end
            partition, offset, attempt, when = map(int, line.split())
            yield partition, offset, attempt, when


SENT, HANDLED = "trades-sent.csv", "trades-handled.csv"


def write_journals(folder: Path, sent: Iterable[LedgerAt], ledgers: Iterable[Path]) -> None:
    """Write down which trades were sent and which were handled, in that order, for the job `audit`.

    They come from the same receipts and ledgers that the demo counts from, so that two audits that know
    nothing of each other look at the same. The queue is never asked: it would be the witness of its own case.
    `sent` has the messages of a key in the order in which they were sent.
    """
    for name, messages in ((SENT, sent), (HANDLED, in_order(ledgers))):
        lines = (f"{partition}:{offset},{at}\n" for at, (partition, offset) in enumerate(messages))
        (folder / name).write_text("".join(("place,at\n", *lines)))


# ---- the figures ----

_NOTHING = Audit(0, 0, 0, 0, 0)


@dataclass(slots=True)
class Pipeline:
    """The jobs on Spark found this."""

    archived: int = 0
    table: str = ""
    audited: int = 0
    verdict: str = ""
    bad: dict[str, int] = field(default_factory=dict)  # messages, by stage and kind
    nothing_bad: bool = False  # but for what was handled twice: at-least-once delivery may do that
    agrees: bool = False  # the audit, with what the demo counted by itself
    report: str | None = None  # a file with what is bad
    plan: str | None = None  # a file, if there is something to split
    steps: int = 0  # of the plan
    seconds: float = 0.0

    @property
    def well(self) -> bool:
        return self.nothing_bad and self.agrees

    def fields(self) -> dict[str, Any]:
        return {**asdict(self), "seconds": round(self.seconds, 2)}


@dataclass(slots=True)
class Figures:
    """The demo has measured this."""

    url: str
    shown: str  # the same without a password
    sent: int = 0
    sent_per_s: float = 0.0
    billing: Audit = _NOTHING
    search: Audit = _NOTHING
    deaths: int = 0  # processes that met the poison
    dead: int = 0  # dead letters
    dead_is_poison: bool = False
    neighbours: Audit = _NOTHING  # of the poison message
    redriven: int = 0
    redriven_handled: int = 0
    bookings: Audit = _NOTHING  # handled by an ordered group, one of whose members is killed
    out_of_order: int = 0  # begun before an earlier one of their key was handled
    trades: Audit = _NOTHING  # handled by an ordered group while the route changes
    trades_out_of_order: int = 0
    changes: int = 0  # of the route
    longest_send_ms: float = 0.0  # meanwhile
    reminders: int = 0  # delayed messages that came
    reminders_sent: int = 0  # without the one that was cancelled
    early: int = 0  # came before they were due
    late_ms: tuple[float, float] = (0.0, 0.0)  # how late they came: typically, and the slowest of a hundred
    cancelled: bool = False
    pipeline: Pipeline | None = None  # None: it was not shown
    seconds: float = 0.0

    @property
    def lost(self) -> int:
        audits = (self.billing, self.search, self.neighbours, self.bookings, self.trades)
        return sum(audit.lost for audit in audits) + self.reminders_sent - self.reminders

    @property
    def well(self) -> bool:
        """True if nothing was lost, the poison alone died and was handled at last, and all came in order."""
        complete = self.billing.handled == self.search.handled == self.sent > 0
        poison = self.dead_is_poison and self.redriven_handled == 1
        ordered = self.bookings.handled > 0 and self.out_of_order == 0
        elastic = self.trades.handled > 0 and self.changes > 0 and self.trades_out_of_order == 0
        on_time = self.reminders > 0 and self.early == 0 and self.cancelled
        queue = complete and self.lost == 0 and poison and ordered and elastic and on_time
        return queue and (self.pipeline is None or self._piped_well(self.pipeline))

    def _piped_well(self, pipeline: Pipeline) -> bool:
        return pipeline.well and pipeline.archived == self.sent

    @property
    def where(self) -> str:
        if self.shown.startswith("sqlite:"):
            return f"The queue is a file: {self.shown}. No server runs."
        return f"The queue is a database: {self.shown}. No other server runs."

    def fields(self) -> dict[str, Any]:
        return {
            "well": self.well,
            "url": self.shown,
            "sent": self.sent,
            "sent_per_s": round(self.sent_per_s),
            "lost": self.lost,
            "groups": {"billing": self.billing.fields(), "search": self.search.fields()},
            "poison": {
                "deaths": self.deaths,
                "dead_letters": self.dead,
                "dead_is_poison": self.dead_is_poison,
                "neighbours": self.neighbours.fields(),
                "redriven": self.redriven,
                "redriven_handled": self.redriven_handled,
            },
            "ordered": {**self.bookings.fields(), "out_of_order": self.out_of_order},
            "split": {
                **self.trades.fields(),
                "changes": self.changes,
                "out_of_order": self.trades_out_of_order,
                "longest_send_ms": round(self.longest_send_ms, 1),
            },
            "delayed": {
                "sent": self.reminders_sent,
                "arrived": self.reminders,
                "early": self.early,
                "late_p50_ms": round(self.late_ms[0], 1),
                "late_p99_ms": round(self.late_ms[1], 1),
                "cancelled": self.cancelled,
            },
            "pipeline": None if self.pipeline is None else self.pipeline.fields(),
            "seconds": round(self.seconds, 2),
        }
