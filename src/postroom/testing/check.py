"""Judges a run by what its processes noted, and by nothing else: what was lost, repeated, out of order.

A history is a list of events: what each process did to which message, and what was done to the processes.
It can be kept as lines of JSON. The queue is never asked: it would be the witness of its own case.

    history = check.read(path)
    verdict = check.group(history, "billing", ordered=True)
    assert verdict.clean, verdict

Judges only what is promised. A repeat is no fault if it has a reason: whoever had the message before was
killed, stopped or cut off, was told that it had lost it, gave it back, or a crash came before its ack was
flushed (I8). Must never do I/O but in `read` and `write`, nor take time that grows faster than the history.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

__all__ = ["Did", "Event", "Fault", "Kind", "Verdict", "group", "log", "read", "write"]

Did = Literal[
    "sending",  # a producer is about to send it
    "confirmed",  # it has the receipt: it must never be lost
    "failed",  # it has an error instead: it may be stored, or not
    "handled",  # a member did what there is to do
    "settled",  # and its ack, or its verdict that it is a dead letter, was taken
    "gone",  # and was told that somebody else has the message
    "returned",  # a member gave it back, to come again: a retry or a release
    "condemned",  # a member says that it is to be a dead letter
    "dead",  # it was found among the dead letters
    "stored",  # it was found in the log, in the order of the log
    "committed",  # a group is that far in a partition
    "reset",  # a group was set to begin elsewhere: offsets may go back
    "killed",  # a process was killed
    "paused",  # it stood still, until `until`: its leases may have ended
    "outage",  # the store was away, until `until`
]

Kind = Literal[
    "lost",  # confirmed, and not handled
    "strange",  # handled, stored or dead, and never sent
    "repeated",  # handled again without a reason
    "acked again",  # handled again although its ack was taken
    "out of order",  # handled, or stored, after a later one of its key
    "early",  # handled before it was due
    "innocent",  # a dead letter that nobody condemned
    "not dead",  # condemned, and not among the dead letters
    "buried twice",  # among the dead letters more than once
    "went back",  # the offset of a group
    "same offset",  # two messages have the receipt of one offset
    "not stored",  # confirmed, and not in the log
    "stored twice",
    "misplaced",  # stored elsewhere than its receipt says
]


class Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What one process noted. `at` is in nanoseconds of a clock that all processes share."""

    at: int
    did: Did
    by: str = ""  # a process; one that is started again is another
    id: str = ""  # of the message: of its own, whatever the queue calls it
    key: str = ""  # messages of a key have an order; "": it has none
    topic: str = ""
    group: str = ""
    partition: int = -1
    offset: int = -1
    due: int = 0  # it must not be handled before this
    until: int = 0  # of an outage or a pause
    crash: bool = False  # in that outage what was not flushed is gone


_encoder, _decoder = msgspec.json.Encoder(), msgspec.json.Decoder(Event)


def write(path: Path, events: Iterable[Event]) -> None:
    """Append events to a file, a line of JSON each."""
    with path.open("ab") as file:
        file.write(b"".join(_encoder.encode(event) + b"\n" for event in events))


def read(path: Path) -> list[Event]:
    """Return the events of a file; a last line that a kill has cut is left out."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_decoder.decode(line) for line in lines]


# ---- the verdict ----


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    id: str
    by: str = ""
    at: int = 0
    why: str = ""

    def __str__(self) -> str:
        parts = (f" by {self.by}" if self.by else "", f" at {self.at}" if self.at else "", self.why)
        return f"{self.kind}: {self.id}{parts[0]}{parts[1]}{f' ({self.why})' if self.why else ''}"


@dataclass(frozen=True, slots=True)
class Verdict:
    faults: tuple[Fault, ...]
    confirmed: int = 0
    handled: int = 0  # different messages
    twice: int = 0  # of these, more than once, with a reason or without
    excused: Mapping[str, int] = field(default_factory=dict)  # repeats that have a reason, by reason

    @property
    def clean(self) -> bool:
        return not self.faults

    def of(self, kind: Kind) -> list[str]:
        """Return the ids of the messages that have this fault."""
        return [fault.id for fault in self.faults if fault.kind == kind]

    def __str__(self) -> str:
        counts = Counter(fault.kind for fault in self.faults)
        named = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing wrong"
        first = "; ".join(str(fault) for fault in self.faults[:3])
        examples = f" ({first})" if first else ""
        return (
            f"{self.confirmed} confirmed, {self.handled} handled: {named}{examples}; repeats with a reason: "
            f"{dict(self.excused)}"
        )


# ---- a group ----


def group(
    history: Iterable[Event],
    name: str = "",
    *,
    topic: str = "",
    ordered: bool = False,
    exactly_once: bool = False,
    since: int = 0,
    lease_ns: int = 0,
    lazy_ns: int = 0,
    dead_letters: bool = False,
) -> Verdict:
    """Judge what one group did with what was sent; `topic`: with what was sent there.

    `ordered`: messages of a key are handled in their order. `exactly_once`: no reason excuses a repeat.
    `since`: what was sent before may be lost. `lazy_ns`: so long before a crash hand-outs and acks may not
    have been flushed. `lease_ns`: so long after a crash a member may still have what the crash forgot that it
    has, and so long after any outage it may handle what it had before, under a lease that it could not renew
    meanwhile. `dead_letters`: the history says what was found among them.
    """
    seen = _Seen.of(history, name, topic)
    repeats = _Repeats(seen, lease_ns, lazy_ns, exactly_once)
    faults = [*_lost(seen, since), *_early(seen), *repeats.faults, *_went_back(seen)]
    if ordered:
        faults += _out_of_order(seen)
    if dead_letters:
        faults += _buried(seen)
    times = Counter(handling.id for handling in seen.handlings)
    return Verdict(
        faults=tuple(sorted(faults, key=lambda fault: fault.at)),
        confirmed=len(seen.confirmed),
        handled=len(times),
        twice=sum(1 for count in times.values() if count > 1),
        excused=dict(repeats.excused),
    )


class _Handling:
    __slots__ = ("at", "by", "id", "key", "outcome", "outcome_at")

    def __init__(self, event: Event, key: str) -> None:
        self.at, self.by, self.id, self.key = event.at, event.by, event.id, key
        self.outcome, self.outcome_at = "", 0


@dataclass(slots=True)
class _Seen:
    """A history, sorted by what its events are about."""

    sent: dict[str, Event] = field(default_factory=dict)
    rank: dict[str, int] = field(default_factory=dict)  # which of its sender's messages it is
    confirmed: dict[str, int] = field(default_factory=dict)  # when
    handlings: list[_Handling] = field(default_factory=list)
    killed: dict[str, int] = field(default_factory=dict)
    paused: dict[str, list[Event]] = field(default_factory=dict)  # by process
    outages: list[Event] = field(default_factory=list)
    condemned: set[str] = field(default_factory=set)
    dead: list[str] = field(default_factory=list)
    offsets: list[Event] = field(default_factory=list)  # committed, and resets

    @classmethod
    def of(cls, history: Iterable[Event], name: str, topic: str) -> _Seen:
        seen = cls()
        last: dict[tuple[str, str], _Handling] = {}
        for event in sorted(history, key=_at):
            if event.did in ("killed", "paused", "outage"):
                seen._done_to(event)
            elif topic and event.topic and event.topic != topic:
                continue
            elif event.did in ("sending", "confirmed"):
                seen._sent(event)
            elif event.group == name:
                seen._handled(event, last)
        return seen

    def _sent(self, event: Event) -> None:
        if event.did == "sending":
            self.sent[event.id] = event
            self.rank[event.id] = len(self.rank)
        else:
            self.confirmed.setdefault(event.id, event.at)

    def _done_to(self, event: Event) -> None:
        if event.did == "killed":
            self.killed[event.by] = event.at
        elif event.did == "paused":
            self.paused.setdefault(event.by, []).append(event)
        else:
            self.outages.append(event)

    def _handled(self, event: Event, last: dict[tuple[str, str], _Handling]) -> None:
        did = event.did
        if did == "handled":
            sent = self.sent.get(event.id)
            handling = _Handling(event, sent.key if sent is not None else event.key)
            last[event.by, event.id] = handling
            self.handlings.append(handling)
        elif did in ("settled", "gone", "returned"):
            found = last.get((event.by, event.id))
            if found is not None:
                found.outcome, found.outcome_at = did, event.at
        elif did == "condemned":
            self.condemned.add(event.id)
        elif did == "dead":
            self.dead.append(event.id)
        elif did in ("committed", "reset"):
            self.offsets.append(event)


def _at(event: Event) -> int:
    return event.at


def _lost(seen: _Seen, since: int) -> Iterator[Fault]:
    handled = {handling.id for handling in seen.handlings}
    done = handled.union(seen.dead)
    for id, at in seen.confirmed.items():
        if id not in done and (seen.sent[id].at if id in seen.sent else at) >= since:
            yield Fault("lost", id, at=at)
    for id in handled - seen.sent.keys():
        yield Fault("strange", id)


def _early(seen: _Seen) -> Iterator[Fault]:
    for handling in seen.handlings:
        sent = seen.sent.get(handling.id)
        if sent is not None and handling.at < sent.due:
            yield Fault("early", handling.id, handling.by, handling.at, f"due at {sent.due}")


def _buried(seen: _Seen) -> Iterator[Fault]:
    times = Counter(seen.dead)
    for id, count in times.items():
        if id not in seen.sent:
            yield Fault("strange", id, why="a dead letter")
        elif id not in seen.condemned:
            yield Fault("innocent", id)
        if count > 1:
            yield Fault("buried twice", id)
    for id in sorted(seen.condemned - times.keys()):
        yield Fault("not dead", id)


def _went_back(seen: _Seen) -> Iterator[Fault]:
    highest: dict[tuple[str, int], Event] = {}
    crashes = [outage.at for outage in seen.outages if outage.crash]
    for event in seen.offsets:
        if event.did == "reset":
            highest.clear()
            continue
        log_of = (event.topic, event.partition)
        before = highest.get(log_of)
        if before is not None and event.offset < before.offset:
            at = bisect_left(crashes, before.at)
            if at == len(crashes) or crashes[at] > event.at:  # no crash that may have forgotten acks
                why = f"partition {event.partition} was at {before.offset}, and is at {event.offset}"
                yield Fault("went back", f"{event.topic}/{event.partition}", event.by, event.at, why)
        highest[log_of] = event


# ---- repeats ----


class _Repeats:
    """Every handling needs a reason for each that came before it."""

    def __init__(self, seen: _Seen, lease_ns: int, lazy_ns: int, exactly_once: bool) -> None:
        self._seen, self._lease_ns, self._lazy_ns = seen, lease_ns, lazy_ns
        self.faults: list[Fault] = []
        self.excused: Counter[str] = Counter()
        before: defaultdict[str, list[_Handling]] = defaultdict(list)
        for handling in seen.handlings:
            earlier = before[handling.id]
            if earlier:
                self._judge(handling, earlier, exactly_once)
            earlier.append(handling)

    def _judge(self, handling: _Handling, before: Sequence[_Handling], exactly_once: bool) -> None:
        reasons = [self._reason(earlier, handling) for earlier in before]
        if exactly_once or "" in reasons:
            culprit = before[0 if exactly_once else reasons.index("")]
            acked = culprit.outcome == "settled" and culprit.outcome_at <= handling.at
            why = f"{culprit.by} handled it at {culprit.at}"
            kind: Kind = "acked again" if acked else "repeated"
            self.faults.append(Fault(kind, handling.id, handling.by, handling.at, why))
        else:
            self.excused[reasons[-1]] += 1

    def _reason(self, earlier: _Handling, later: _Handling) -> str:
        """Why it may have been handled again; "" if it may not."""
        seen = self._seen
        if self._forgotten(earlier, later):
            return "forgotten"
        if earlier.outcome == "settled" and earlier.outcome_at <= later.at:
            return "crash" if self._unflushed(earlier, later) else ""
        if earlier.outcome in ("gone", "returned"):
            return earlier.outcome
        if any(
            earlier.at <= outage.until + self._lease_ns and outage.at <= later.at for outage in seen.outages
        ):
            return "outage"
        if any(
            earlier.at <= pause.until and pause.at <= later.at for pause in seen.paused.get(earlier.by, ())
        ):
            return "paused"
        killed_at = seen.killed.get(earlier.by)
        return "killed" if killed_at is not None and killed_at <= later.at and not earlier.outcome else ""

    def _unflushed(self, earlier: _Handling, later: _Handling) -> bool:
        """A crash forgot an ack that was stored and not flushed yet. If its holder stood still, the answer
        may have waited for it since."""
        at = earlier.outcome_at
        pauses = self._seen.paused.get(earlier.by, ())
        since = min([at, *(one.at for one in pauses if earlier.at <= one.until and one.at <= at)])
        return any(
            outage.crash and outage.at - self._lazy_ns <= at and since <= outage.until
            for outage in self._seen.outages
            if outage.at <= later.at
        )

    def _forgotten(self, earlier: _Handling, later: _Handling) -> bool:
        """A crash forgot a hand-out: it is handed out again, and its holder handles it all the same, or had
        just done so. The next may be the holder itself, whose ack was confirmed once the database was back.
        Nobody takes over for a lease from then on."""
        return any(
            outage.crash
            and outage.at - self._lazy_ns <= earlier.at
            and outage.at <= later.at <= outage.until + self._lease_ns
            for outage in self._seen.outages
        )


# ---- order ----
# Message `a` of a key was sent before `b` if the same process sent it earlier, or if it was confirmed
# before `b` was sent: what a producer that was killed had under way may arrive late. Then the first
# handling of `a` comes before the first of `b`, whoever does it; and whoever handles `b` does not handle
# `a` after it, unless it had handled `a` before and was given it again. The second rule is about repeats:
# after a kill the next holder begins at the lowest unsettled message of each key, and goes on in order.


class _KeyOrder:
    """The messages of a key as they come."""

    __slots__ = ("_last_sent", "_ranks", "_seen")

    def __init__(self, seen: _Seen) -> None:
        self._seen, self._last_sent = seen, -1
        self._ranks: dict[str, int] = {}  # by sender, the latest of its messages

    def overtaken(self, id: str) -> bool:
        """Take the next one; returns whether a later one came before it."""
        sent, rank = self._seen.sent[id], self._seen.rank[id]
        confirmed = self._seen.confirmed.get(id)
        before = self._ranks.get(sent.by, -1)
        wrong = rank < before or (confirmed is not None and confirmed < self._last_sent)
        self._ranks[sent.by] = max(rank, before)
        self._last_sent = max(sent.at, self._last_sent)
        return wrong


def _out_of_order(seen: _Seen) -> Iterator[Fault]:
    anybody: defaultdict[str, _KeyOrder] = defaultdict(lambda: _KeyOrder(seen))
    one: defaultdict[tuple[str, str], _KeyOrder] = defaultdict(lambda: _KeyOrder(seen))
    known: set[str] = set()
    known_by: set[tuple[str, str]] = set()
    for handling in seen.handlings:
        id, by, key = handling.id, handling.by, handling.key
        if not key or id not in seen.sent:
            continue
        if id not in known and anybody[key].overtaken(id):
            yield Fault("out of order", id, by, handling.at)
        elif (by, id) not in known_by and one[by, key].overtaken(id):
            yield Fault("out of order", id, by, handling.at, "after a takeover")
        known.add(id)
        known_by.add((by, id))


# ---- the log ----


def log(history: Iterable[Event], topic: str = "", *, ordered: bool = True, since: int = 0) -> Verdict:
    """Judge what is stored by what was sent: exactly once each, where its receipt says, keys in order.

    `stored` events are in the order of the log: partition by partition, predecessors before successors.
    """
    seen, receipts, stored = _Seen(), list[Event](), list[Event]()
    for event in sorted(history, key=_at):
        if topic and event.topic and event.topic != topic:
            continue
        if event.did in ("sending", "confirmed"):
            seen._sent(event)
        if event.did == "confirmed" and event.offset >= 0:
            receipts.append(event)
        elif event.did == "stored":
            stored.append(event)
    faults = [*_same_offset(receipts), *_stored(seen, stored, receipts, since)]
    if ordered:
        faults += _stored_out_of_order(seen, stored)
    return Verdict(tuple(faults), len(seen.confirmed), len({event.id for event in stored}))


def _same_offset(receipts: Sequence[Event]) -> Iterator[Fault]:
    owner: dict[tuple[int, int], str] = {}
    for event in receipts:
        other = owner.setdefault((event.partition, event.offset), event.id)
        if other != event.id:
            why = f"{event.partition}:{event.offset} is also that of {other}"
            yield Fault("same offset", event.id, event.by, event.at, why)


def _stored(seen: _Seen, stored: Sequence[Event], receipts: Sequence[Event], since: int) -> Iterator[Fault]:
    found: dict[str, Event] = {}
    for event in stored:
        if event.id not in seen.sent:
            yield Fault("strange", event.id, why="stored")
        elif event.id in found:
            yield Fault("stored twice", event.id, why=f"{event.partition}:{event.offset}")
        found.setdefault(event.id, event)
    for id, at in seen.confirmed.items():
        if id not in found and (seen.sent[id].at if id in seen.sent else at) >= since:
            yield Fault("not stored", id, at=at)
    for event in receipts:
        at_last = found.get(event.id)
        if at_last is not None and (at_last.partition, at_last.offset) != (event.partition, event.offset):
            why = f"at {at_last.partition}:{at_last.offset}, not {event.partition}:{event.offset}"
            yield Fault("misplaced", event.id, event.by, event.at, why)


def _stored_out_of_order(seen: _Seen, stored: Sequence[Event]) -> Iterator[Fault]:
    keys: defaultdict[str, _KeyOrder] = defaultdict(lambda: _KeyOrder(seen))
    known: set[str] = set()
    for event in stored:
        sent = seen.sent.get(event.id)
        if sent is not None and sent.key and event.id not in known and keys[sent.key].overtaken(event.id):
            yield Fault("out of order", event.id, why="in the log")
        known.add(event.id)
