"""The verbs of ordered groups, on a locked progress row: load, let `model.ordered` decide, write.

The row's holder is the only lease (I5). A poll reads no delivery at all while its asker goes on from the
cursor; it looks at everything that is unsettled only when `next_due` says so: a mover went away, a stopped
message was restarted, or something went out alone. A change of holder, a redelivery and a stamp are flushed;
renewals are not (I8).
"""

from __future__ import annotations

from collections.abc import Sequence

from ....model.delivery import ordered
from ....model.delivery.delivery import (
    NOBODY,
    Change,
    Delivery,
    Holder,
    Kind,
    OrderedAsk,
    Settlement,
    Span,
    Stamp,
    cut,
    received,
    renewed,
    widened,
)
from ....model.delivery.ordered import FAR, Claim
from ....model.delivery.settlement import uncovered
from ...contract import Granted, Group, Settled
from .locked import Locked

__all__ = [
    "drop",
    "extend",
    "give_back",
    "hand_over",
    "leave_order",
    "poll",
    "restart",
    "settle",
    "skip",
    "unpark",
]

_MORE_ROWS = 64  # looked at in one poll beyond what its budget needs: what leaves costs nothing of it
_STAYS = "stamp_producer IS NULL"
_UNSEEN = f"""(({_STAYS} AND (last_offset >= ? OR token = 0 OR alone = 1))
               OR (stamp_producer IS NOT NULL AND visible_at <= ?))"""


def poll(locked: Locked, group: Group, ask: OrderedAsk, waited_ms: int | None) -> Granted:
    until = locked.now + group.settings.lease_ms
    if ask.expects is None and locked.row.holder.token == ask.token:  # its first answer was lost
        until = renewed(until, locked.row.holder.until)
    if not _claimed(locked, group, ask):
        return Granted((), holder=locked.row.holder)
    locked.hold(Holder(ask.token, ask.member, until))
    if ask.expects is None:  # it receives everything
        locked.row.recalled = 0
    looks = locked.looks
    rows, all_known = _unreceived(locked, ask, looks)
    before = locked.row.cursor
    recalled = bool(locked.row.recalled)
    change = ordered.poll(before, rows, locked.now, ask, group.terms, all_known=all_known, recalled=recalled)
    if change.leaving or any(d.spent for d in change.put if d.token == ask.token):
        locked.must_flush()
    if waited_ms is not None and change.cursor > before:
        locked.note_wait(waited_ms, change.cursor - before)
    if change.drop or change.put or change.cursor != before:
        locked.apply(change)
    if looks and all_known and not change.recall:
        locked.look_up_due()
    if any(d.alone for d in change.granted):
        locked.look_at(locked.now)  # the next poll ends that
    return Granted(
        change.granted,
        change.leaving,
        change.unplaced,
        locked.row.next_due,
        change.draining,
        recall=change.recall,
        lines=tuple(locked.lines()) if ask.expects is None else (),
        until=until,
    )


def _claimed(locked: Locked, group: Group, ask: OrderedAsk) -> bool:
    """Return whether the asker holds the partition now; if it does so anew, what others had of it is free."""
    holder, now = locked.row.holder, locked.now
    claim = ordered.claim(holder, ask, now, locked.row.cursor)
    if claim is Claim.TAKES_OVER:  # when the server was started costs a look
        safe_from = locked.safe_from(group.settings.lease_ms)
        claim = ordered.claim(holder, ask, now, locked.row.cursor, safe_from)
    if claim is Claim.REFUSED:
        return False
    if claim is Claim.HOLDS:
        return True
    locked.must_flush()
    if claim is Claim.TAKES_OVER:
        locked.apply(ordered.lapse(locked.held(holder.token), holder.until, now, locked.row.cursor))
    elif not holder.until:  # nobody ever held it: the group may have been shared until now
        strangers = locked.where(f"token <> 0 AND {_STAYS}")
        locked.apply(ordered.hand_over(strangers, locked.row.cursor))
        locked.look_up_due()
    return True


def _unreceived(locked: Locked, ask: OrderedAsk, looks: bool) -> tuple[list[Delivery], bool]:
    """Return what the asker has not received, lowest first, and whether that is all of it."""
    limit = max(1, ask.messages) + _MORE_ROWS
    row = locked.row
    expects = row.lowest if ask.expects is None else ask.expects
    if looks:
        rows = locked.where(_UNSEEN, expects, locked.now, limit=limit)
    elif expects < row.cursor:
        rows = locked.reaching(expects, row.cursor, _STAYS, limit=limit)
    else:
        return [], True
    return rows, len(rows) < limit


def settle(locked: Locked, group: Group, token: int, settlements: Sequence[Settlement]) -> Settled:
    """Return what the token has: all that the holder has received, or what a mover was told to move."""
    parks = [s for s in settlements if s.kind is Kind.PARK]
    if parks:
        if locked.row.holder.token != token:
            return Settled(tuple((s.first, s.last) for s in settlements))
        settlements = [s for s in settlements if s.kind is not Kind.PARK]
        _park(locked, parks)
    if locked.row.holder.token == token:
        held = [row for row in locked.near([(s.first, s.last) for s in settlements]) if row.token == token]
    else:  # whatever it names
        held = locked.held(token)
    change = ordered.settle(held, settlements, locked.now, group.terms, locked.row.cursor)
    if change.leaving or any(d.visible_at >= FAR for d in change.kept):
        locked.must_flush()
    lost = locked.in_other_hands(change.missing, token)
    if change.drop:
        locked.apply(change)
    return Settled(lost, change.leaving, change.unplaced, change.kept)


def _park(locked: Locked, parks: Sequence[Settlement]) -> None:
    """Lines claim more. What they claim is acked in this very transaction, and is not settled by that."""
    for one in parks:
        assert one.line is not None, "whoever parks says what"
        line = received(one.line, locked.row.cursor)
        before = next(iter(locked.lines(one.line.id)), None)
        after = None if line is None else widened(before, line)
        if line is not None and after is not None:
            locked.change_line(before, after)
            locked.row.settled -= line.messages


def unpark(
    locked: Locked,
    group: Group,
    token: int,
    member: str,
    line_id: int,
    spans: Sequence[Span],
    upto: int,
    on_delivery: bool,
) -> Granted:
    """The next of a line: these offsets are its key's, and it was looked through up to `upto`.

    Its first messages may be deliveries of the holder already, since the answer to an earlier request was
    lost (I6): then they are handed over once more. Nobody's token: the group is shared now, and anybody is
    to receive them. What the holder has not received comes before: until then there is nothing (`draining`).
    """
    if locked.row.holder.token != token:
        return Granted((), holder=locked.row.holder)
    line = next(iter(locked.lines(line_id)), None)
    rows = locked.near(spans)
    again = tuple(
        row.part(max(row.first, first), min(row.last, last))
        for first, last in spans
        for row in rows
        if row.token == token != NOBODY and row.first <= last and row.last >= first
    )
    if line is None:
        return Granted(again)
    if token != NOBODY and locked.where(f"token = 0 AND {_STAYS} AND first_offset < ?", line.first, limit=1):
        return Granted(again, draining=True)  # it may be of the same key, and comes first (I5)
    claimed = ((max(first, line.first), min(last, line.last)) for first, last in spans)
    fresh = [
        Delivery(*span, locked.now if token == NOBODY else 0, token, member)
        for first, last in claimed
        if first <= last
        for span in uncovered((first, last), rows)
    ]
    taken = sum(d.size for d in fresh)
    if fresh:
        change = Change(locked.row.cursor, put=() if on_delivery else tuple(fresh))
        locked.apply(change)
        locked.row.settled += taken if on_delivery else 0
    locked.change_line(line, cut(line, upto, taken))
    return Granted(tuple(sorted((*again, *fresh), key=lambda d: d.first)))


def extend(locked: Locked, group: Group, token: int, spans: Sequence[Span]) -> tuple[Span, ...]:
    holder = locked.row.holder
    if holder.token != token:
        return tuple(spans)
    locked.hold(Holder(token, holder.member, locked.now + group.settings.lease_ms))
    return ()


def give_back(locked: Locked, token: int, until: int) -> int:
    """Hand the partition over if its lease is the very one that was granted (I6)."""
    if locked.row.holder.until != until or locked.row.holder.token != token:
        return 0
    given = sum(d.size for d in locked.held(token))
    hand_over(locked, token)
    return given


def hand_over(locked: Locked, token: int) -> None:
    if locked.row.holder.token != token or token == NOBODY:
        return
    locked.must_flush()
    locked.apply(ordered.hand_over(locked.held(token), locked.row.cursor))
    locked.hold(Holder(until=locked.now))
    locked.announce()


# ---- what stopped (R23) ----

Spans = Sequence[Span] | None


def restart(locked: Locked, spans: Spans) -> int:
    stopped = _stopped(locked)
    change = ordered.restart(stopped, locked.now, locked.row.cursor, spans)
    _operate(locked, stopped, change)
    return sum(d.size for d in change.put if d.visible_at < FAR)


def skip(locked: Locked, group: Group, stamp: Stamp, spans: Spans) -> tuple[Delivery, ...]:
    stopped, until = _stopped(locked), locked.now + group.terms.mover_ms
    change = ordered.skip(stopped, stamp, until, locked.row.cursor, spans)
    _operate(locked, stopped, change)
    return change.leaving


def drop(locked: Locked, spans: Spans) -> int:
    stopped = _stopped(locked)
    change = ordered.drop(stopped, locked.row.cursor, spans)
    _operate(locked, stopped, change)
    return change.settled


def _stopped(locked: Locked) -> list[Delivery]:
    return locked.where("visible_at >= ?", FAR)


def _operate(locked: Locked, stopped: Sequence[Delivery], change: Change) -> None:
    """A holder that has received any of it is recalled: what it has of the key is not what there is."""
    if not change.drop:
        return
    locked.must_flush()
    locked.apply(change)
    holder = locked.row.holder.token
    if holder != NOBODY and any(d.token == holder for d in stopped if d.first in change.drop):
        locked.row.recalled = 1
    locked.look_at(locked.now)
    locked.announce()


def leave_order(locked: Locked) -> None:
    """The group is shared from now on: each delivery has its own lease again."""
    if not locked.row.holder.until:
        return
    locked.must_flush()
    rows = locked.where(_STAYS)
    locked.apply(ordered.part_ways(rows, locked.row.holder, locked.now, locked.row.cursor))
    locked.look_up_due()
    locked.hold(Holder())
