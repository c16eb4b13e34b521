"""What becomes of deliveries: settled, extended, or taken out of their turn.

Like `model.delivery`, whose words it uses: pure functions over the few deliveries a decision needs. A part
that is cut out of a delivery leaves the rest as it was, except that a fragment was not held alone.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from .delivery import (
    MOVED_TOGETHER,
    NOBODY,
    Ask,
    Change,
    Delivery,
    Kind,
    Settlement,
    Span,
    Terms,
    in_moves,
    set_aside,
    stamped,
)

__all__ = ["Becomes", "becomes", "covered", "extend", "seize", "settle", "uncovered", "within"]

Becomes = Callable[[Delivery, Settlement, int, Terms], Delivery | None]
"""What becomes of a settled piece; see `becomes`, which decides it for groups in mode "shared"."""


def becomes(piece: Delivery, settlement: Settlement, now: int, terms: Terms) -> Delivery | None:
    """Return what becomes of a settled piece: None when it is done with, the piece itself when it must stay.

    It stays when that was its last attempt and the settlement does not say where it goes then: the
    caller repeats the settlement with a stamp.
    """
    if settlement.kind is Kind.ACK:
        return None
    if settlement.kind is Kind.RELEASE:
        spent = piece.spent + int(settlement.shown)
        return _waiting(piece, settlement, spent=spent, failures=piece.failures)
    until = now + terms.mover_ms
    if settlement.kind is Kind.MOVE:
        assert settlement.stamp is not None, "a move says where to"
        moved = replace(piece, spent=piece.spent + 1, reason=settlement.reason)
        return stamped(moved, settlement.stamp, until)
    if settlement.kind is Kind.LANE:
        assert settlement.stamp is not None, "a move says where to"
        return set_aside(piece, settlement.stamp, until)
    retried = _waiting(piece, settlement, spent=piece.spent + 1, failures=piece.failures + 1)
    if retried.failures + settlement.used < terms.max_attempts:
        return retried if settlement.later is None else stamped(retried, settlement.later, until)
    return piece if settlement.stamp is None else stamped(retried, settlement.stamp, until)


def settle(
    held: Sequence[Delivery],
    settlements: Iterable[Settlement],
    now: int,
    terms: Terms,
    cursor: int = 0,
    becomes: Becomes = becomes,
) -> Change:
    """Settle parts of what one token holds. `held` are that token's deliveries, lowest offset first.

    What is asked for but not held comes back in `missing`: the store then looks whether it is settled
    already (a repeated ack, harmless) or in other hands (a late one, refused).
    """
    wanted = {(s.first, s.last): s for s in settlements}
    cuts = _carve(held, wanted)
    put: list[Delivery] = []
    kept: list[Delivery] = []
    unplaced: list[Span] = []
    settled = 0
    for span, piece in cuts.inside:
        after = becomes(piece, wanted[span], now, terms)
        if after is None:
            settled += piece.size
            continue
        if after.stamp is not None and piece.size > MOVED_TOGETHER:
            put += _moved(piece, wanted[span], now, terms, becomes)
            continue
        put.append(after)
        if after is piece:
            unplaced.append((piece.first, piece.last))
        elif after.stamp is None and after.token != NOBODY:
            kept.append(after)
    return Change(
        cursor=cursor,
        drop=tuple(cuts.touched),
        put=(*put, *cuts.outside),
        leaving=tuple(d for d in put if d.stamp is not None),
        settled=settled,
        unplaced=tuple(unplaced),
        kept=tuple(kept),
        missing=tuple(cuts.missing),
    )


def _moved(
    piece: Delivery, settlement: Settlement, now: int, terms: Terms, becomes: Becomes
) -> Iterator[Delivery]:
    """A long piece that leaves goes in parts, each under an identity of its own (I12)."""
    for part in in_moves(piece):
        own = settlement
        if settlement.kind is Kind.LANE and settlement.stamp is not None:  # else all parts would go as one
            identity = settlement.stamp.producer_id + part.first
            own = replace(settlement, stamp=replace(settlement.stamp, producer_id=identity))
        after = becomes(part, own, now, terms)
        assert after is not None, "the whole of it leaves"
        yield after


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


def within(span: Span, rows: Sequence[Delivery]) -> Sequence[Delivery]:
    """Return those of the deliveries (disjoint, lowest first) that have an offset in the span."""
    low = bisect_left(rows, span[0], key=lambda row: row.last)
    return rows[low : bisect_right(rows, span[1], key=lambda row: row.first)]


def covered(spans: Iterable[Span], by: Iterable[Delivery]) -> Iterator[Span]:
    """The parts of `spans` that lie in the given deliveries (disjoint, lowest first), each once."""
    deliveries, upto = list(by), -1
    for first, last in sorted(spans):
        first = max(first, upto + 1)
        for delivery in within((first, last), deliveries):
            yield (max(first, delivery.first), min(last, delivery.last))
        upto = max(upto, last)


def uncovered(span: Span, by: Iterable[Delivery]) -> Iterator[Span]:
    """The parts of a span that lie in none of the given deliveries (disjoint, lowest first)."""
    first, last = span
    for delivery in by:
        if delivery.last < first or delivery.first > last:
            continue
        if delivery.first > first:
            yield (first, delivery.first - 1)
        first = delivery.last + 1
    if first <= last:
        yield (first, last)
