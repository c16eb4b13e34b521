"""Deliveries: who holds which offsets of a partition, for one group. Every decision is made here.

A group's progress in a partition is a cursor (everything below it was handed out) and the deliveries not
yet settled: ranges of offsets, each in somebody's hands or waiting to be handed out again. The functions
below take the few deliveries a decision needs and return what changes; they read no clock, draw no random
number and touch no database. The store loads, calls, and writes the change in one transaction.

Rules kept here:
- the committed offset is the lowest unsettled one; a delivery leaves only by being settled (R1, R21);
- a live lease is never handed out a second time; an expired one is, under a new token (I7);
- what expired is a suspect: handed out again in halves, as its member's only delivery; an expiry counts
  towards the limit only for a single message held alone; a retry always counts, a release never (I14);
- waiting deliveries take at most half of a poll while new messages are there (I17);
- what is to leave for another topic is stamped before it is moved (I12).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

__all__ = [
    "NOBODY",
    "Ask",
    "Change",
    "Delivery",
    "Kind",
    "Settlement",
    "Span",
    "Stamp",
    "Terms",
    "covered",
    "extend",
    "poll",
    "seize",
    "settle",
]

NOBODY = 0
"""The token of a delivery that waits in nobody's hands."""

Span = tuple[int, int]
"""First and last offset, both included."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The identity under which a delivery is moved to another topic: the append is safe to repeat."""

    producer_id: int
    partition_id: int


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

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    @property
    def attempt(self) -> int:
        return self.spent + 1

    def part(self, first: int, last: int) -> Delivery:
        """Some of it. A fragment is not held alone: the other fragments are in the same hands (I14)."""
        whole = (first, last) == (self.first, self.last)
        return replace(self, first=first, last=last, alone=self.alone and whole)


@dataclass(frozen=True, slots=True)
class Terms:
    """What the group says about its deliveries."""

    lease_ms: int
    max_attempts: int
    mover_ms: int = 10_000  # a stamped delivery is taken over by another mover after this time


@dataclass(frozen=True, slots=True)
class Ask:
    """What a member asks for in one poll of one partition."""

    member: str
    token: int
    messages: int
    end: int  # offsets from here on are not to be handed out now (log's end, or the byte budget)
    empty_handed: bool = True  # the member holds nothing else
    on_delivery: bool = False  # settle as it is handed out: at most once (R16)
    dead: Stamp | None = None  # where exhausted messages go; None: not known yet


@dataclass(frozen=True, slots=True)
class Change:
    """What a decision changes. `drop` holds the `first` of rows to delete, before `put` is written."""

    cursor: int
    drop: tuple[int, ...] = ()
    put: tuple[Delivery, ...] = ()
    granted: tuple[Delivery, ...] = ()  # to hand to the member
    leaving: tuple[Delivery, ...] = ()  # stamped: to move to another topic now
    settled: int = 0  # how many messages are settled by this
    unplaced: tuple[Span, ...] = ()  # exhausted and left as it was: nobody said where it is to go
    missing: tuple[Span, ...] = ()  # asked to settle or extend, but not in these hands
    draining: bool = False  # a suspect waits for this member's hands to be empty


class Kind(Enum):
    ACK = "ack"
    RETRY = "retry"  # counts as an attempt
    RELEASE = "release"  # does not
    MOVE = "move"  # to another topic: dead letters, redrive

    # `dead` in the API is MOVE with the group's dead-letter topic as its target.


@dataclass(frozen=True, slots=True)
class Settlement:
    kind: Kind
    first: int
    last: int
    visible_at: int = 0  # RETRY, RELEASE: not before then
    reason: str = ""
    stamp: Stamp | None = None  # MOVE: its target; RETRY: where it goes if that was the last attempt


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
        loose = _expire(delivery) if expired else delivery
        if loose.failures >= self.terms.max_attempts:
            return self._exhausted(loose)
        if loose.suspect:
            return self._grant_suspect(_halves(loose) if expired else (loose,))
        self._hand_out(self._fit((loose,), self.for_due), alone=False)
        return self.for_due > 0

    def _exhausted(self, delivery: Delivery) -> bool:
        if self.ask.dead is None:
            self.unplaced.append((delivery.first, delivery.last))
        else:
            reasoned = replace(delivery, reason=delivery.reason or _EXPIRED)
            self._leave(_stamped(reasoned, self.ask.dead, self._moved_by))
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
        """The same pieces, the first one cut if it is larger than the room."""
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
        held = self._held(Delivery(self.cursor, last, 0), alone=False)
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


_EXPIRED = "its consumers went away while they held it alone"


def _expire(delivery: Delivery) -> Delivery:
    """What an expired lease leaves behind: a suspect in nobody's hands."""
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


def _halves(loose: Delivery) -> tuple[Delivery, ...]:
    if loose.size == 1:
        return (loose,)
    middle = (loose.first + loose.last) // 2
    return (loose.part(loose.first, middle), loose.part(middle + 1, loose.last))


def _stamped(delivery: Delivery, base: Stamp, until: int) -> Delivery:
    """Give a delivery the identity it moves under: its own, since each is appended by itself (I12).

    The identity is also its token, so the former holder's acks and heartbeats no longer touch it.
    """
    identity = (base.producer_id + delivery.first) % _IDENTITIES + 1
    stamp = Stamp(identity, base.partition_id)
    return replace(delivery, stamp=stamp, token=identity, holder="", visible_at=until, alone=False)


_IDENTITIES = 2**63 - 1


# ---- settle -----------------------------------------------------------------------------------------


def settle(
    held: Sequence[Delivery], settlements: Iterable[Settlement], now: int, terms: Terms, cursor: int = 0
) -> Change:
    """Settle parts of what one token holds. `held` are that token's deliveries, lowest offset first.

    What is asked for but not held comes back in `missing`: the store then looks whether it is settled
    already (a repeated ack, harmless) or in other hands (a late one, refused).
    """
    wanted = {(s.first, s.last): s for s in settlements}
    cuts = _carve(held, wanted)
    put: list[Delivery] = []
    unplaced: list[Span] = []
    settled = 0
    for span, piece in cuts.inside:
        after = _apply(piece, wanted[span], now, terms)
        if after is None:
            settled += piece.size
            continue
        put.append(after)
        if after is piece:
            unplaced.append((piece.first, piece.last))
    return Change(
        cursor=cursor,
        drop=tuple(cuts.touched),
        put=(*put, *cuts.outside),
        leaving=tuple(d for d in put if d.stamp is not None),
        settled=settled,
        unplaced=tuple(unplaced),
        missing=tuple(cuts.missing),
    )


def _apply(piece: Delivery, settlement: Settlement, now: int, terms: Terms) -> Delivery | None:
    """What becomes of a settled piece: None when it is done with, the piece itself when it must stay.

    It stays when that was its last attempt and the settlement does not say where it goes then: the
    caller repeats the settlement with a stamp.
    """
    if settlement.kind is Kind.ACK:
        return None
    if settlement.kind is Kind.RELEASE:
        return _waiting(piece, settlement, spent=piece.spent, failures=piece.failures)
    until = now + terms.mover_ms
    if settlement.kind is Kind.MOVE:
        assert settlement.stamp is not None, "a move says where to"
        moved = replace(piece, spent=piece.spent + 1, reason=settlement.reason)
        return _stamped(moved, settlement.stamp, until)
    retried = _waiting(piece, settlement, spent=piece.spent + 1, failures=piece.failures + 1)
    if retried.failures < terms.max_attempts:
        return retried
    return piece if settlement.stamp is None else _stamped(retried, settlement.stamp, until)


def _waiting(piece: Delivery, settlement: Settlement, *, spent: int, failures: int) -> Delivery:
    """Back in nobody's hands. Somebody lived to hand it back, so it is no suspect any more."""
    return replace(
        piece,
        token=NOBODY,
        holder="",
        visible_at=settlement.visible_at,
        spent=spent,
        failures=failures,
        suspect=False,
        alone=False,
        reason=settlement.reason or piece.reason,
    )


def extend(held: Sequence[Delivery], spans: Iterable[Span], until: int, cursor: int = 0) -> Change:
    """Move the lease of the given spans; the rest of `held` keeps its own."""
    cuts = _carve(held, spans)
    moved = (replace(piece, visible_at=until) for _, piece in cuts.inside)
    return Change(
        cursor=cursor,
        drop=tuple(cuts.touched),
        put=(*moved, *cuts.outside),
        missing=tuple(cuts.missing),
    )


def seize(
    cursor: int, rows: Sequence[Delivery], spans: Iterable[Span], now: int, ask: Ask, terms: Terms
) -> Change:
    """Take exactly these offsets, wherever they are in the queue, as far as nobody holds them now.

    `rows` are the deliveries that overlap the spans. What is passed over on the way waits for its turn;
    a stamped delivery whose mover went away comes back in `leaving`.
    """
    wanted = [(first, min(last, ask.end - 1)) for first, last in spans if first < ask.end]
    loose = [d for d in rows if d.token == NOBODY or d.visible_at <= now]
    stuck = tuple(replace(d, visible_at=now + terms.mover_ms) for d in loose if d.stamp is not None)
    free = [d for d in loose if d.stamp is None]
    reach = max((last for _, last in wanted), default=-1)
    passed = [Delivery(cursor, reach, now)] if reach >= cursor else []
    cuts = _carve(free + passed, wanted)
    granted = tuple(
        replace(piece, token=ask.token, holder=ask.member, visible_at=now + terms.lease_ms, alone=False)
        for _, piece in cuts.inside
    )
    touched = (first for first in cuts.touched if first < cursor)
    return Change(
        cursor=max(cursor, reach + 1),
        drop=(*touched, *(d.first for d in stuck)),
        put=(*granted, *cuts.outside, *stuck),
        granted=granted,
        leaving=stuck,
        missing=tuple(cuts.missing),
    )


# ---- cutting ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Cuts:
    inside: list[tuple[Span, Delivery]] = field(default_factory=list)  # wanted, with the span that wants it
    outside: list[Delivery] = field(default_factory=list)  # what remains of deliveries that were cut
    touched: list[int] = field(default_factory=list)  # `first` of deliveries that were cut
    missing: list[Span] = field(default_factory=list)  # wanted, but not there


def _carve(rows: Sequence[Delivery], wanted: Iterable[Span]) -> _Cuts:
    """Cut the wanted spans out of `rows` (disjoint, lowest first). Of overlapping spans the first wins."""
    cuts = _Cuts()
    row, at = 0, rows[0].first if rows else 0  # offsets of rows[row] below `at` are cut already
    for span in sorted(wanted):
        position = span[0]
        while position <= span[1]:
            while row < len(rows) and rows[row].last < position:
                _close(cuts, rows[row], at)
                row += 1
                at = rows[row].first if row < len(rows) else at
            start = max(position, at) if row < len(rows) else span[1] + 1
            if start > position:
                cuts.missing.append((position, min(start - 1, span[1])))
            if start > span[1]:
                break
            stop = min(span[1], rows[row].last)
            if not cuts.touched or cuts.touched[-1] != rows[row].first:
                cuts.touched.append(rows[row].first)
            if at < start:
                cuts.outside.append(rows[row].part(at, start - 1))
            cuts.inside.append((span, rows[row].part(start, stop)))
            at = position = stop + 1
    if row < len(rows):
        _close(cuts, rows[row], at)
    return cuts


def _close(cuts: _Cuts, row: Delivery, at: int) -> None:
    """Keep the rest of a delivery that was cut."""
    if cuts.touched and cuts.touched[-1] == row.first and at <= row.last:
        cuts.outside.append(row.part(at, row.last))


# ---- spans ------------------------------------------------------------------------------------------


def covered(spans: Iterable[Span], by: Iterable[Delivery]) -> Iterator[Span]:
    """The parts of `spans` that lie in the given deliveries."""
    deliveries = list(by)
    for first, last in spans:
        for delivery in deliveries:
            low, high = max(first, delivery.first), min(last, delivery.last)
            if low <= high:
                yield (low, high)
