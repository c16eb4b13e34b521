"""Judges a run by what the processes noted, and by nothing else: lost, repeated, out of order.

Lost: confirmed, and not handled by the group.

Repeated: handled once more without a reason. There are five: whoever handled it before
- was killed before it noted that it is settled;
- was told that somebody else has it (`gone`);
- was cut off from the database by an outage between the two;
- noted that it is settled, and a crash of the server (not an orderly stop) came within `LAZY_NS`: acks are
  not flushed (I8, R15);
- was handed it after a crash of the server that had forgotten whose it was: first hand-outs are not flushed
  either (I8), and the other has it in its hands for `HELD_NS` at most, one lease.
Once settled, and not in that moment before a crash, no reason counts.

Out of order, in an ordered group: message `a` of a key was sent before `b` if the same run of the producer
sent it earlier, or if an earlier run sent it and had it confirmed (what a killed producer had under way may
arrive late). Then
- the first handling of `a` comes before the first handling of `b`, whoever does it;
- whoever handles `b` does not handle `a` after it, unless it had handled `a` before and was given it again.
The second rule is about repeats: after a kill the next holder starts at the lowest unsettled message of each
key and goes on in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .journal import Entry
from .values import Value, parse

__all__ = ["HELD_NS", "LAZY_NS", "Outage", "Report", "Trail", "check"]

HELD_NS = 4_000_000_000
LAZY_NS = 3_000_000_000
"""PostgreSQL flushes what was committed lazily within three times `wal_writer_delay`, 0.6 s, and as long as a
flush takes: seconds, on a disk that has much else to write."""


@dataclass(frozen=True, slots=True)
class Outage:
    """The database was away. `crash`: it had no time to flush."""

    begin: int
    end: int
    crash: bool


@dataclass(frozen=True, slots=True)
class Trail:
    """What the processes of one topic and group noted, by process, and what was done to them."""

    producers: Mapping[str, Sequence[Entry]]
    consumers: Mapping[str, Sequence[Entry]]
    killed: Mapping[str, int] = field(default_factory=dict)
    outages: Sequence[Outage] = ()


@dataclass(slots=True)
class _Handling:
    at: int
    process: str
    value: str
    outcome: str = ""
    outcome_at: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    confirmed: int
    handled: int
    lost: list[str]
    strange: list[str]  # handled, and never sent
    repeated: list[str]
    out_of_order: list[str]
    excused: Counter[str]  # repeats that have a reason

    @property
    def clean(self) -> bool:
        return not (self.lost or self.strange or self.repeated or self.out_of_order)

    def __str__(self) -> str:
        kinds = ("lost", "strange", "repeated", "out_of_order")
        faults = ", ".join(f"{len(getattr(self, kind))} {kind.replace('_', ' ')}" for kind in kinds)
        examples = [example for kind in kinds for example in getattr(self, kind)[:3]]
        named = f" ({', '.join(examples)})" if examples else ""
        return f"{self.confirmed} confirmed, {faults}{named}; repeats with a reason: {dict(self.excused)}"


def check(trail: Trail, *, ordered: bool = False, since_ns: int = 0) -> Report:
    """`since_ns`: what was sent before may be lost (volatile topics, and a crash)."""
    entries = [entry for notes in trail.producers.values() for entry in notes]
    sent = {entry.value: entry.at for entry in entries if entry.verb == "sending"}
    confirmed = {entry.value for entry in entries if entry.verb == "confirmed"}
    handlings = [h for process, notes in trail.consumers.items() for h in _handlings(process, notes)]
    handlings.sort(key=lambda h: h.at)
    values = {h.value for h in handlings}
    repeated, excused = _repeats(handlings, trail)
    return Report(
        confirmed=len(confirmed),
        handled=len(values),
        lost=sorted(value for value in confirmed - values if sent[value] >= since_ns),
        strange=sorted(values - sent.keys()),
        repeated=repeated,
        out_of_order=_out_of_order(handlings, confirmed) if ordered else [],
        excused=excused,
    )


def _handlings(process: str, notes: Iterable[Entry]) -> list[_Handling]:
    """What one process handled, each with how that ended."""
    found: list[_Handling] = []
    last: dict[str, _Handling] = {}
    for entry in notes:
        if entry.verb == "handled":
            last[entry.value] = _Handling(entry.at, process, entry.value)
            found.append(last[entry.value])
        else:
            last[entry.value].outcome, last[entry.value].outcome_at = entry.verb, entry.at
    return found


# ---- repeats ----


def _repeats(handlings: Sequence[_Handling], trail: Trail) -> tuple[list[str], Counter[str]]:
    repeated: list[str] = []
    excused: Counter[str] = Counter()
    before: defaultdict[str, list[_Handling]] = defaultdict(list)
    for handling in handlings:
        reasons = [_reason(earlier, handling, trail) for earlier in before[handling.value]]
        if "" in reasons:
            repeated.append(f"{handling.value} by {handling.process}")
        elif reasons:
            excused[reasons[-1]] += 1
        before[handling.value].append(handling)
    return repeated, excused


def _reason(earlier: _Handling, later: _Handling, trail: Trail) -> str:
    """Why it may have been handled again; "" if it may not."""
    if _forgotten(earlier, later, trail):
        return "forgotten"
    if earlier.outcome == "settled" and earlier.outcome_at <= later.at:
        unflushed = (o for o in trail.outages if o.crash and o.begin - LAZY_NS <= earlier.outcome_at <= o.end)
        return "crash" if any(o.begin <= later.at for o in unflushed) else ""
    if earlier.outcome == "gone":
        return "gone"
    if any(earlier.at <= o.end and o.begin <= later.at for o in trail.outages):
        return "outage"
    killed_at = trail.killed.get(earlier.process)
    return "killed" if killed_at is not None and killed_at <= later.at and not earlier.outcome else ""


def _forgotten(earlier: _Handling, later: _Handling, trail: Trail) -> bool:
    """A crash forgot a hand-out: another was handed it after that, and its holder handles it all the same."""
    others = earlier.process != later.process
    return others and any(
        o.crash and o.begin <= earlier.at <= later.at <= o.begin + HELD_NS for o in trail.outages
    )


# ---- order ----


class _Line:
    """The messages of a key as they come: the highest so far, over all and of each run."""

    def __init__(self, confirmed: set[str]) -> None:
        self._confirmed = confirmed
        self._highest = (0, 0)
        self._numbers: dict[int, int] = {}

    def in_order(self, value: Value) -> bool:
        overtaken = value.number < self._numbers.get(value.run, 0) or (
            value.rank < self._highest and str(value) in self._confirmed
        )
        self._highest = max(self._highest, value.rank)
        self._numbers[value.run] = max(value.number, self._numbers.get(value.run, 0))
        return not overtaken


def _out_of_order(handlings: Sequence[_Handling], confirmed: set[str]) -> list[str]:
    anybody: defaultdict[str, _Line] = defaultdict(lambda: _Line(confirmed))
    one: defaultdict[tuple[str, str], _Line] = defaultdict(lambda: _Line(confirmed))
    seen: set[str] = set()
    seen_by: set[tuple[str, str]] = set()
    wrong: list[str] = []
    for handling in handlings:
        value, process = parse(handling.value), handling.process
        if handling.value not in seen and not anybody[value.key].in_order(value):
            wrong.append(f"{handling.value} by {process}")
        elif (process, handling.value) not in seen_by and not one[process, value.key].in_order(value):
            wrong.append(f"{handling.value} by {process}, after a takeover")
        seen.add(handling.value)
        seen_by.add((process, handling.value))
    return wrong
