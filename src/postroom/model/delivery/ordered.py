"""Ordered groups: who holds a partition, and what its holder is handed. Every decision is made here.

A partition of an ordered group has one holder at a time; its lease is the only one (I5). A delivery has the
holder's token once the holder has received it, and nobody's before; `visible_at` gates nothing: it is the
not-before that travels with the message, while its key waits in the holder's hands.

Like `model.delivery`, whose words it uses: pure functions over the deliveries a decision needs, no clock,
no randomness, no database. Rules kept here:
- a live holder is never replaced; what a lapsed one had received, and may have been handling, expired (I14);
- nothing is handed out past a delivery that the holder has not received, nor past a suspect that waits: the
  store cannot see keys, so offset order is the order of every key (I5, R22);
- what the holder says it has not received is sent again before the cursor moves (I6);
- a failing message holds its key until its attempts or its time are used up: then it leaves for the dead
  letters, or it is stopped, for all to see, until it is restarted (I10, R23).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum

from ..frozen import dataclass
from . import settlement
from .delivery import (
    NOBODY,
    WENT_AWAY,
    Change,
    Delivery,
    Holder,
    Kind,
    OrderedAsk,
    Settlement,
    Span,
    Stamp,
    Terms,
    expire,
    halve,
    stamped,
)

__all__ = [
    "FAR",
    "Claim",
    "Plan",
    "claim",
    "drop",
    "hand_over",
    "lapse",
    "part_ways",
    "plan",
    "poll",
    "restart",
    "settle",
    "skip",
]


FAR = 2**62
"""The not-before of a stopped message."""


class Claim(Enum):
    """A member's poll means this for the partition."""

    HOLDS = "it holds the partition"
    TAKES = "nobody holds it: the asker does from now on"
    TAKES_OVER = "its holder's lease has passed: the asker holds it from now on"
    REFUSED = "the asker does not hold it"


def claim(holder: Holder, ask: OrderedAsk, now: int, cursor: int, safe_from: int = 0) -> Claim:
    """Decide who has the partition after this poll. No lapsed lease is taken over before `safe_from` (I8).

    Whoever expects something says that it holds the partition. If it does not, or if a crash has forgotten
    what it was handed, what it has is worth nothing: it is refused, drops it, and asks anew. A holder that
    comes back late goes on if it still has what it received; if it does not, that expired like anybody's.
    """
    lapsed = holder.until <= now
    if ask.expects is not None:
        return Claim.HOLDS if holder.token == ask.token and ask.expects <= cursor else Claim.REFUSED
    if holder.token == NOBODY:
        return Claim.TAKES
    if holder.token == ask.token:
        return Claim.TAKES_OVER if lapsed else Claim.HOLDS
    return Claim.TAKES_OVER if lapsed and now >= safe_from else Claim.REFUSED


# ---- the end of a holder ----------------------------------------------------------------------------


def lapse(received: Iterable[Delivery], until: int, now: int, cursor: int = 0) -> Change:
    """A lease that ended at `until` is taken over. `received` are the former holder's deliveries.

    What was not to be handled before `until` cannot have been at work: it just waits on.
    """
    pieces: list[Delivery] = []
    rows = list(received)
    for row in rows:
        pieces.extend((_loose(row),) if row.visible_at > until else halve(_expired(row, now)))
    return Change(cursor=cursor, drop=tuple(row.first for row in rows), put=tuple(pieces))


def _expired(row: Delivery, now: int) -> Delivery:
    """A suspect. It has waited for empty hands since now."""
    loose = expire(row)
    counted = loose.failures > row.failures
    return replace(loose, visible_at=now, failing_since=_since(row, now) if counted else row.failing_since)


def _since(row: Delivery, now: int) -> int:
    return row.failing_since or now


def hand_over(received: Iterable[Delivery], cursor: int = 0) -> Change:
    """The holder gives the partition up: the next one receives everything that is unsettled."""
    rows = list(received)
    return Change(cursor=cursor, drop=tuple(row.first for row in rows), put=tuple(map(_loose, rows)))


def _loose(row: Delivery) -> Delivery:
    return replace(row, token=NOBODY, holder="", alone=False)


def part_ways(rows: Iterable[Delivery], holder: Holder, now: int, cursor: int = 0) -> Change:
    """The group is shared from now on. What the last holder may be handling is left to it for its lease."""
    deliveries = list(rows)
    return Change(
        cursor=cursor,
        drop=tuple(row.first for row in deliveries),
        put=tuple(_shared(row, holder, now) for row in deliveries),
    )


def _shared(row: Delivery, holder: Holder, now: int) -> Delivery:
    if row.visible_at >= FAR:
        return replace(_loose(row), visible_at=now)
    if row.token == NOBODY or row.visible_at > holder.until:
        return _loose(row)
    return replace(row, visible_at=holder.until)


# ---- poll -------------------------------------------------------------------------------------------


def poll(
    cursor: int,
    rows: Iterable[Delivery],
    now: int,
    ask: OrderedAsk,
    terms: Terms,
    *,
    all_known: bool = True,
    recalled: bool = False,
) -> Change:
    """Hand the holder what it has not received, lowest offset first, then new messages.

    If it is `recalled`, what it has received of a key that stopped is not what there is any more: it is told
    to hand the partition over. Whoever has received nothing of the partition simply receives what there is.

    `rows` are unsettled deliveries, lowest offset first: at least those from `ask.expects` on, those in
    nobody's hands or alone, and those whose mover went away. The store may pass only the first of them; then
    not `all_known`, and the cursor stays.
    """
    if recalled and ask.expects is not None:
        return Change(cursor, recall=True)
    draft = _Draft(cursor, now, ask, terms)
    for row in rows:
        draft.consider(row)
    if all_known and not draft.closed:
        draft.advance()
    return draft.change()


class _Draft:
    """A poll under way: the change so far and what is left of the budget."""

    def __init__(self, cursor: int, now: int, ask: OrderedAsk, terms: Terms) -> None:
        self.cursor, self.now, self.ask, self.terms = cursor, now, ask, terms
        self.left = max(1, ask.messages)
        self.drop: list[int] = []
        self.put: list[Delivery] = []
        self.granted: list[Delivery] = []
        self.leaving: list[Delivery] = []
        self.unplaced: list[Span] = []
        self.settled = 0
        self.closed = False  # nothing further on goes out in this poll
        self.draining = self.recall = False

    def consider(self, row: Delivery) -> None:
        if row.stamp is not None:
            if row.visible_at <= self.now:
                self._leave(row, replace(row, visible_at=self._moved_by))
            return
        first = self._wanted_from(row)
        if first > row.last and row.alone:  # whoever asks for more has it in company from now on
            self._replace(row, replace(row, alone=False))
        if self.closed or first > row.last:
            return
        if row.token == NOBODY and self.ask.expects is not None and row.last < self.ask.expects:
            self.closed = self.recall = True  # it was restarted
            return
        if row.failures >= self.terms.max_attempts and row.visible_at < FAR:
            self._give_up(row, first)
        elif row.suspect:
            self._grant_suspect(row, first)
        else:
            self._grant(row, first, alone=False)

    def _wanted_from(self, row: Delivery) -> int:
        """The first offset that the holder has not received; behind the row if it has received it all."""
        if row.token == NOBODY or self.ask.expects is None:
            return row.first
        return max(row.first, self.ask.expects)

    def _give_up(self, row: Delivery, first: int) -> None:
        since = _since(row, self.now)
        piece = replace(row.part(first, row.last), reason=row.reason or WENT_AWAY, failing_since=since)
        if self.terms.stop:
            piece = _stopped(self._received(piece))
            self._replace(row, piece)
            self._hand_out(piece)
        elif self.ask.dead is not None:
            self._leave(row, stamped(piece, self.ask.dead, self._moved_by))
        else:
            self.unplaced.append((piece.first, piece.last))
            self.closed = True  # until it has left, its key waits

    def _grant_suspect(self, row: Delivery, first: int) -> None:
        """A suspect goes out alone, to a member that handles nothing else; until then its key waits.

        If no hands were empty for a whole lease, it goes out with others; its expiry then counts for
        nothing, so no innocent is harmed. To empty hands it never does: a poisonous message would kill
        them again and again, and never be counted.
        """
        if self.ask.empty_handed and not self.granted:
            self._grant(row, first, alone=True)
            self.closed = True
        elif not self.ask.empty_handed and self.now - row.visible_at >= self.terms.lease_ms:
            self._grant(row, first, alone=False)
        else:
            self.closed = self.draining = True

    def _grant(self, row: Delivery, first: int, *, alone: bool) -> None:
        """Hand out the row from `first` on, as far as the budget goes."""
        last = min(row.last, self._reach(first))
        self.closed = self.closed or last < row.last
        if last < first:
            return
        piece = self._received(row.part(first, last), alone=alone)
        if self.ask.on_delivery and piece.visible_at < FAR:
            self._replace(row, piece, settled=True)
        elif row.token == NOBODY or alone != row.alone:
            self._replace(row, piece)
        self._hand_out(piece)

    def _reach(self, first: int) -> int:
        """The last offset that may go out. One message always may: nothing is stuck by a budget (I17)."""
        if first >= self.ask.end:
            return first - 1 if self.granted else first
        return min(first + self.left, self.ask.end) - 1

    def _received(self, piece: Delivery, *, alone: bool = False) -> Delivery:
        return replace(piece, token=self.ask.token, holder=self.ask.member, alone=alone)

    def _hand_out(self, piece: Delivery) -> None:
        self.granted.append(piece)
        self.left -= piece.size
        self.closed = self.closed or self.left <= 0

    def _replace(self, row: Delivery, piece: Delivery, *, settled: bool = False) -> None:
        """Put a piece in its place in the row; what lies before and behind it stays as it was."""
        before = [row.part(row.first, piece.first - 1)] if row.first < piece.first else []
        behind = [row.part(piece.last + 1, row.last)] if piece.last < row.last else []
        self.drop.append(row.first)
        self.put.extend((*before, *behind) if settled else (*before, piece, *behind))
        self.settled += piece.size if settled else 0

    @property
    def _moved_by(self) -> int:
        return self.now + self.terms.mover_ms

    def _leave(self, row: Delivery, moving: Delivery) -> None:
        self._replace(row, moving)
        self.leaving.append(moving)

    def advance(self) -> None:
        last = min(self.ask.end, self.cursor + self.left) - 1
        if last < self.cursor or self.left <= 0:
            return
        piece = self._received(Delivery(self.cursor, last, 0))
        self.cursor = last + 1
        if self.ask.on_delivery:
            self.settled += piece.size
        else:
            self.put.append(piece)
        self.granted.append(piece)

    def change(self) -> Change:
        return Change(
            cursor=self.cursor,
            drop=tuple(self.drop),
            put=tuple(self.put),
            granted=tuple(self.granted),
            leaving=tuple(self.leaving),
            settled=self.settled,
            unplaced=tuple(self.unplaced),
            draining=self.draining,
            recall=self.recall,
        )


# ---- settle -----------------------------------------------------------------------------------------


def settle(
    held: Sequence[Delivery], settlements: Iterable[Settlement], now: int, terms: Terms, cursor: int = 0
) -> Change:
    """Settle parts of what the holder has received. Retried and released ones stay in its hands: `kept`."""
    return settlement.settle(held, settlements, now, terms, cursor, _becomes)


def _becomes(piece: Delivery, verdict: Settlement, now: int, terms: Terms) -> Delivery | None:
    if verdict.kind in (Kind.ACK, Kind.MOVE):
        return settlement.becomes(piece, verdict, now, terms)
    if piece.visible_at > now:  # it waits for its time: told so before, and the reply was lost
        return replace(piece)
    waits = replace(
        piece,
        visible_at=verdict.visible_at,
        suspect=False,  # somebody lived to hand it back
        alone=False,
        reason=verdict.reason or piece.reason,
    )
    if verdict.kind is Kind.RELEASE:
        return waits
    failed = replace(
        waits, spent=piece.spent + 1, failures=piece.failures + 1, failing_since=_since(piece, now)
    )
    held_ms = failed.visible_at - failed.failing_since
    if failed.failures < terms.max_attempts and held_ms <= terms.max_hold_ms:
        return failed
    if terms.stop:
        return _stopped(failed)
    return piece if verdict.stamp is None else stamped(failed, verdict.stamp, now + terms.mover_ms)


def _stopped(row: Delivery) -> Delivery:
    return replace(row, visible_at=FAR, suspect=False, alone=False)


# ---- what stopped (R23) -----------------------------------------------------------------------------


def restart(
    stopped: Iterable[Delivery], now: int, cursor: int = 0, spans: Iterable[Span] | None = None
) -> Change:
    """Stopped messages begin anew, in nobody's hands; with `spans` those alone.

    Their holder does not expect them any more: whatever it asks for, it is told to hand the partition over,
    and the next holder receives everything (I6).
    """

    def fresh(piece: Delivery) -> Delivery:
        return replace(_loose(piece), failures=0, failing_since=0, visible_at=now)

    return _operated(stopped, spans, cursor, fresh)


def skip(
    stopped: Iterable[Delivery],
    stamp: Stamp,
    until: int,
    cursor: int = 0,
    spans: Iterable[Span] | None = None,
) -> Change:
    """Stopped messages leave for the dead letters, as they are; a mover has until then to move them (I12)."""
    return _operated(stopped, spans, cursor, lambda piece: stamped(piece, stamp, until))


def drop(stopped: Iterable[Delivery], cursor: int = 0, spans: Iterable[Span] | None = None) -> Change:
    """Stopped messages are settled: the group has nothing to do with them any more."""
    return _operated(stopped, spans, cursor, lambda piece: None)


def _operated(
    stopped: Iterable[Delivery],
    spans: Iterable[Span] | None,
    cursor: int,
    becomes: Callable[[Delivery], Delivery | None],
) -> Change:
    rows = list(stopped)
    wanted = [(row.first, row.last) for row in rows] if spans is None else spans
    verdicts = [Settlement(Kind.ACK, first, last) for first, last in wanted]
    terms = Terms(lease_ms=0, max_attempts=0)  # people decide, and not the group
    return settlement.settle(rows, verdicts, 0, terms, cursor, lambda piece, *_: becomes(piece))


# ---- assignment: each member of an ordered group decides by one rule which partitions it should have ----
# There is no leader and nothing is agreed upon. Each member looks at who holds what, computes the same
# shares as everybody else, and acts for itself alone: whoever holds more than its share gives the surplus
# up, whoever holds less may claim what nobody holds. The store's lock decides who gets a partition that
# two claim.
#
#     partitions 1 2 3 4 5, members a b c; a holds all of them
#     a: its share is 2, gives up 3 4 5
#     b: its share is 2, claims two of 3 4 5         c: its share is 1, claims the last
#
# Must never let two members act on each other's partitions: a plan names only what is free and what is
# one's own. What is done on an old view does no lasting harm: the next look mends it (R14, R23).


@dataclass(frozen=True, slots=True)
class Plan:
    claim: tuple[int, ...] = ()  # free partitions, in the order in which to try them
    room: int = 0  # how many of them to take at most
    give_up: tuple[int, ...] = ()  # held beyond the share


def plan(partitions: Collection[int], holders: Mapping[int, str], members: Collection[str], me: str) -> Plan:
    """Decide what `me` should do now. `holders` has the assigned partitions; the others are free.

    A holder that is no member keeps what it holds until it hands it over or its lease ends.
    """
    held: dict[str, list[int]] = {name: [] for name in (*members, me)}
    for partition in sorted(partitions):
        if (holder := holders.get(partition)) in held:
            held[holder].append(partition)
    ranked = sorted(held, key=lambda name: (-len(held[name]), name))
    rank = ranked.index(me)
    share, rest = divmod(len(partitions), len(ranked))
    share += rank < rest  # whoever holds most keeps one more: the fewest moves
    mine = held[me]
    free = sorted(partition for partition in partitions if partition not in holders)
    room = max(0, min(share - len(mine), len(free)))
    return Plan(_from(free, rank, len(ranked)) if room else (), room, tuple(mine[share:]))


def _from(free: list[int], rank: int, members: int) -> tuple[int, ...]:
    """Members begin at different places, so that those who claim at once seldom meet."""
    at = rank * len(free) // members
    return tuple(free[at:] + free[:at])
