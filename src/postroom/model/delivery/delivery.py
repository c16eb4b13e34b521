"""Deliveries: who holds which offsets of a partition, for one group. Every decision is made here.

A group's progress in a partition is a cursor (everything below it was handed out) and the deliveries not
yet settled: ranges of offsets, each in somebody's hands or waiting to be handed out again. The functions
below take the few deliveries a decision needs and return what changes; they read no clock, draw no random
number and touch no database. The store loads, calls, and writes the change in one transaction.

Rules kept here:
- the committed offset is the lowest unsettled one; a delivery leaves only by being settled (R1, R21);
- a live lease is never handed out a second time; an expired one is, under a new token (I7);
- what expired is a suspect: handed out again in halves, as its member's only delivery; an expiry counts
  towards the limit only for a single message held alone; a retry always counts, a release never, though
  one that says so shows as an attempt (I14);
- waiting deliveries take at most half of a poll while new messages are there (I17);
- what is to leave for another topic is stamped before it is moved (I12).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from enum import Enum

from ..frozen import dataclass
from ..policy.bounds import Key, Offset, Whole

__all__ = [
    "MOVED_TOGETHER",
    "NOBODY",
    "WENT_AWAY",
    "Ask",
    "Change",
    "Delivery",
    "Holder",
    "Kind",
    "Line",
    "OrderedAsk",
    "Settlement",
    "Span",
    "Stamp",
    "Terms",
    "cut",
    "expire",
    "halve",
    "in_moves",
    "poll",
    "received",
    "renewed",
    "set_aside",
    "stamped",
    "widened",
]


# ---- parked lines: what waits behind a failing message of its key, kept in the store (I27) ----
# A line claims every message of its key from `first` to `last`, and says nothing about the other offsets
# in between: those have been settled, or are deliveries. So a million messages behind one failing key are
# one row, the member that holds the partition keeps none of them in memory, and the other keys go on.
# Claimed offsets leave the deliveries in the same transaction, so that each offset is in one place.
#
# Pure, like `model.delivery`. Must never let an offset fall between a line and the deliveries: a line
# shrinks only from its start, by offsets that were looked at.


@dataclass(frozen=True, slots=True)
class Line:
    """The messages of a key, from `first` to `last`, that wait behind an earlier message of it."""

    id: Offset  # the offset of the message that was parked first; stays the same while the line exists
    key: Key | None  # None: messages without a key, which count as one key
    first: Offset
    last: Offset
    messages: Whole  # how many; retention may have taken some of them


def received(line: Line, cursor: int) -> Line | None:
    """Return what of a line its holder can have received: nothing was handed out from the cursor on."""
    last = min(line.last, cursor - 1)
    if last < line.first:
        return None
    return replace(line, last=last, messages=min(line.messages, last - line.first + 1))


def widened(line: Line | None, more: Line) -> Line | None:
    """The line with what `more` claims as well; None if it claims nothing new (a repeated request)."""
    if line is None:
        return more
    first, last = min(line.first, more.first), max(line.last, more.last)
    if (first, last) == (line.first, line.last):
        return None
    return replace(line, first=first, last=last, messages=line.messages + more.messages)


def cut(line: Line, upto: int, taken: int) -> Line | None:
    """Return what is left of the line once everything up to an offset was read; None if nothing is."""
    if upto >= line.last:
        return None
    return replace(line, first=max(line.first, upto + 1), messages=max(1, line.messages - taken))


# ---- deliveries ----

NOBODY = 0
"""The token of a delivery that waits in nobody's hands."""

Span = tuple[int, int]
"""First and last offset, both included."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The identity under which a delivery is moved to another topic: the append is safe to repeat."""

    producer_id: int
    partition_id: int
    due_at: int = 0  # it leaves through the schedule, and is due then (I17); 0: it leaves at once


@dataclass(frozen=True, slots=True)
class Delivery:
    """A range of offsets of one partition that one group has not settled yet."""

    first: int
    last: int
    visible_at: int  # held: the lease ends then; waiting: not before then
    token: int = NOBODY  # proof of holding it; random, so a forgotten grant cannot be issued again (I7)
    holder: str = ""  # the member, for people to read; the token decides
    spent: int = 0  # attempts already used up; shown to users as attempt = spent + 1; never shrinks
    failures: int = 0  # counted towards max_attempts
    suspect: bool = False  # expired at least once
    alone: bool = False  # held as its member's only delivery
    stamp: Stamp | None = None  # leaving for another topic
    reason: str = ""
    failing_since: int = 0  # ordered groups: it holds its key since then (I10); 0: it has not failed

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    @property
    def attempt(self) -> int:
        return self.spent + 1

    def part(self, first: int, last: int) -> Delivery:
        """Some of it. A fragment is not held alone: the other fragments are in the same hands (I14)."""
        if (first, last) == (self.first, self.last):
            return self
        return replace(self, first=first, last=last, alone=False)


@dataclass(frozen=True, slots=True)
class Terms:
    """A group's settings say this about its deliveries."""

    lease_ms: int
    max_attempts: int
    mover_ms: int = 10_000  # a stamped delivery is taken over by another mover after this time
    stop: bool = False  # ordered groups: an exhausted message stops its key instead of leaving
    max_hold_ms: int = 2**62  # ordered groups: a failing message holds its key no longer (I10)


@dataclass(frozen=True, slots=True)
class Ask:
    """A member asks for this in one poll of one partition."""

    member: str
    token: int
    messages: int
    end: int  # offsets from here on are not to be handed out now (log's end, or the byte budget)
    empty_handed: bool = True  # the member holds nothing else
    on_delivery: bool = False  # settle as it is handed out: at most once (R16)
    dead: Stamp | None = None  # where exhausted messages go; None: not known yet
    fresh: bool = False  # new messages alone: what is due is left to another poll


@dataclass(frozen=True, slots=True)
class Holder:
    """Ordered groups: who holds a partition; the only lease there is (I5)."""

    token: int = NOBODY
    member: str = ""
    until: int = 0


@dataclass(frozen=True, slots=True)
class OrderedAsk:
    """A member of an ordered group asks for this in one poll of one partition."""

    member: str
    token: int  # the holder's, the same in all its polls
    messages: int
    end: int  # offsets from here on are not to be handed out now
    expects: int | None = None  # next offset it has not received; None: it has received nothing here (I6)
    empty_handed: bool = True  # the member handles nothing else just now
    on_delivery: bool = False
    dead: Stamp | None = None


@dataclass(frozen=True, slots=True)
class Change:
    """A decision changes these rows. `drop` has the `first` of rows to delete, before `put` is written."""

    cursor: int
    drop: tuple[int, ...] = ()
    put: tuple[Delivery, ...] = ()
    granted: tuple[Delivery, ...] = ()  # to hand to the member
    leaving: tuple[Delivery, ...] = ()  # stamped: to move to another topic now
    settled: int = 0  # how many messages are settled by this
    unplaced: tuple[Span, ...] = ()  # exhausted and left as it was: nobody said where it is to go
    kept: tuple[Delivery, ...] = ()  # retried or released, and still in the same hands (ordered groups)
    missing: tuple[Span, ...] = ()  # asked to settle or extend, but not in these hands
    draining: bool = False  # a suspect waits for this member's hands to be empty
    recall: bool = False  # the holder is to hand the partition over (ordered groups)


class Kind(Enum):
    ACK = "ack"
    RETRY = "retry"  # counts as an attempt
    RELEASE = "release"  # does not
    MOVE = "move"  # to another topic: dead letters, redrive
    LANE = "lane"  # to the group's slow lane, untried: not an attempt (R42)
    PARK = "park"  # ordered groups: its key's messages in the range wait in a line of the store (I27)

    # `dead` in the API is MOVE with the group's dead-letter topic as its target.


@dataclass(frozen=True, slots=True)
class Settlement:
    kind: Kind
    first: int
    last: int
    visible_at: int = 0  # RETRY, RELEASE: not before then
    reason: str = ""
    stamp: Stamp | None = None  # MOVE: its target; RETRY: where it goes if that was the last attempt
    later: Stamp | None = None  # RETRY: so far away that it leaves through the schedule (I17)
    used: int = 0  # RETRY: failures that were counted before it came here through the schedule
    shown: bool = False  # RELEASE: it may have been read, so it shows as an attempt; it is no failure (I14)
    line: Line | None = None  # PARK: what the line claims; its offsets are acked beside it


# ---- poll -------------------------------------------------------------------------------------------


def poll(cursor: int, due: Sequence[Delivery], now: int, ask: Ask, terms: Terms) -> Change:
    """Hand out what is due, then new messages.

    `due` are the deliveries with `visible_at <= now`, lowest offset first; the store may pass only the
    first few.
    """
    draft = _Draft(cursor, now, ask, terms)
    for delivery in due:
        if not draft.consider(delivery):
            break
    if not draft.closed:
        draft.advance()
    return draft.change()


class _Draft:
    """A poll under way: the change so far and what is left of the budget."""

    def __init__(self, cursor: int, now: int, ask: Ask, terms: Terms) -> None:
        self.cursor, self.now, self.ask, self.terms = cursor, now, ask, terms
        fresh = max(0, ask.end - cursor)
        self.left = max(1, ask.messages)
        self.for_due = self.left if fresh == 0 else max(self.left - fresh, (self.left + 1) // 2)
        self.drop: list[int] = []
        self.put: list[Delivery] = []
        self.granted: list[Delivery] = []
        self.leaving: list[Delivery] = []
        self.unplaced: list[Span] = []
        self.closed = False  # nothing more for this member in this poll
        self.draining = False

    def consider(self, delivery: Delivery) -> bool:
        """Take one due delivery; False when no further one can be taken."""
        if delivery.stamp is not None:
            self._leave(replace(delivery, visible_at=self._moved_by))
            return True
        expired = delivery.token != NOBODY
        loose = expire(delivery) if expired else delivery
        if loose.failures >= self.terms.max_attempts:
            return self._exhausted(loose)
        if loose.suspect:
            return self._grant_suspect(halve(loose) if expired else (loose,))
        self._hand_out(self._fit((loose,), self.for_due), alone=False)
        return self.for_due > 0

    def _exhausted(self, delivery: Delivery) -> bool:
        if self.ask.dead is None:
            self.unplaced.append((delivery.first, delivery.last))
        else:
            reasoned = replace(delivery, reason=delivery.reason or WENT_AWAY)
            for piece in in_moves(reasoned):
                self._leave(stamped(piece, self.ask.dead, self._moved_by))
        return True

    def _grant_suspect(self, pieces: Sequence[Delivery]) -> bool:
        """A suspect goes out alone, to a member with nothing else in its hands.

        A member that holds something is given nothing new until its hands are empty, so that suspects
        are not starved by a busy group. If no hands were empty for a whole lease, the suspect goes out
        with other messages; its expiry then counts for nothing, so no innocent is harmed.
        """
        if self.ask.empty_handed and not self.granted:
            self._hand_out(self._fit(pieces, self.left), alone=True)
            self.closed = True
            return False
        if self.now - pieces[0].visible_at >= self.terms.lease_ms:
            self._hand_out(self._fit(pieces, self.for_due), alone=False)
            return self.for_due > 0
        self.closed = self.draining = True
        return True

    @staticmethod
    def _fit(pieces: Sequence[Delivery], room: int) -> Sequence[Delivery]:
        """Return the pieces, the first one cut if it is larger than the room."""
        head, cut = pieces[0], pieces[0].first + room
        if cut > head.last:
            return pieces
        return (head.part(head.first, cut - 1), head.part(cut, head.last), *pieces[1:])

    def _hand_out(self, pieces: Sequence[Delivery], *, alone: bool) -> None:
        """Hand out the first of the pieces of a delivery; the others wait."""
        piece, *rest = pieces
        held = self._held(piece, alone)
        self.drop.append(piece.first)
        self.put.extend(rest)
        if not self.ask.on_delivery:
            self.put.append(held)
        self.granted.append(held)
        self.left -= piece.size
        self.for_due -= piece.size

    def _held(self, piece: Delivery, alone: bool) -> Delivery:
        return replace(
            piece,
            token=self.ask.token,
            holder=self.ask.member,
            visible_at=self.now + self.terms.lease_ms,
            alone=alone,
        )

    @property
    def _moved_by(self) -> int:
        return self.now + self.terms.mover_ms

    def _leave(self, moving: Delivery) -> None:
        self.drop.append(moving.first)
        self.put.append(moving)
        self.leaving.append(moving)

    def advance(self) -> None:
        last = min(self.ask.end, self.cursor + self.left) - 1
        if last < self.cursor or self.left <= 0:
            return
        ask, until = self.ask, self.now + self.terms.lease_ms
        held = Delivery(self.cursor, last, until, ask.token, ask.member)
        self.cursor = last + 1
        if not self.ask.on_delivery:
            self.put.append(held)
        self.granted.append(held)

    def change(self) -> Change:
        gone = sum(d.size for d in self.granted) if self.ask.on_delivery else 0
        return Change(
            cursor=self.cursor,
            drop=tuple(self.drop),
            put=tuple(self.put),
            granted=tuple(self.granted),
            leaving=tuple(self.leaving),
            settled=gone,
            unplaced=tuple(self.unplaced),
            draining=self.draining,
        )


WENT_AWAY = "its consumers went away while they held it alone"


def expire(delivery: Delivery) -> Delivery:
    """Return what an expired lease leaves behind: a suspect that no member has."""
    counted = 1 if delivery.size == 1 and delivery.alone else 0
    return replace(
        delivery,
        token=NOBODY,
        holder="",
        spent=delivery.spent + 1,
        failures=delivery.failures + counted,
        suspect=True,
        alone=False,
    )


def renewed(until: int, before: int) -> int:
    """The end of a lease that is granted anew: `until`, but later than it was if both are of one moment.

    So whoever was answered first can be told from whoever was answered again (I6).
    """
    return before + 1 if until <= before < until + _MOMENT_MS else until


_MOMENT_MS = 1000  # a clock that was put back by more than this is no moment


def halve(loose: Delivery) -> tuple[Delivery, ...]:
    if loose.size == 1:
        return (loose,)
    middle = (loose.first + loose.last) // 2
    return (loose.part(loose.first, middle), loose.part(middle + 1, loose.last))


def set_aside(delivery: Delivery, stamp: Stamp, until: int) -> Delivery:
    """Stamp it as one of many that move together, in one append: all of them have this identity (I12).

    They are settled together as well, so whoever resumes finds all of them, or none.
    """
    identity = stamp.producer_id % _IDENTITIES + 1
    moved = replace(stamp, producer_id=identity)
    return replace(delivery, stamp=moved, token=identity, holder="", visible_at=until, alone=False)


def in_moves(delivery: Delivery) -> list[Delivery]:
    """Cut it into pieces that are moved one by one: each is in memory while it is moved."""
    return [
        delivery.part(first, min(first + MOVED_TOGETHER - 1, delivery.last))
        for first in range(delivery.first, delivery.last + 1, MOVED_TOGETHER)
    ]


def stamped(delivery: Delivery, base: Stamp, until: int) -> Delivery:
    """Give a delivery the identity it moves under: its own, since each is appended by itself (I12).

    The identity is also its token, so the former holder's acks and heartbeats no longer touch it.
    """
    identity = (base.producer_id + delivery.first) % _IDENTITIES + 1
    stamp = Stamp(identity, base.partition_id, base.due_at)
    return replace(delivery, stamp=stamp, token=identity, holder="", visible_at=until, alone=False)


_IDENTITIES = 2**63 - 1

MOVED_TOGETHER = 64
"""Messages that leave for another topic in one append: of the largest that there may be, 256 MB."""
