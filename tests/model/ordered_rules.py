"""Whether a verb of an ordered group did what the rules say, message by message, no ranges.

Written from the rules alone: it compares the whole picture before a verb with the one after it. It does not
predict how much a poll hands out; it says whether what was handed out was allowed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from postroom.model.delivery.delivery import (
    NOBODY,
    Delivery,
    Holder,
    Kind,
    Line,
    OrderedAsk,
    Settlement,
    Span,
)
from postroom.store.contract import Granted, Settled

__all__ = ["FAR", "LEASE_MS", "MAX_HOLD_MS", "MOVER_MS", "Limits", "Picture", "check_poll", "check_settle"]

LEASE_MS = 1000
MOVER_MS = 10_000
MAX_HOLD_MS = 5_000
FAR = 2**62


@dataclass(frozen=True)
class Picture:
    """All there is of a group's progress in its partition."""

    cursor: int
    end: int
    committed: int
    settled: int
    holder: Holder
    deliveries: Sequence[Delivery]
    recalled: bool = False
    lines: Sequence[Line] = ()

    def by_offset(self) -> dict[int, Delivery]:
        rows: dict[int, Delivery] = {}
        for row in self.deliveries:
            for offset in offsets([row]):
                assert offset not in rows, "two deliveries overlap"
                assert offset < self.cursor, "a delivery above the cursor"
                rows[offset] = row
        return rows


@dataclass
class Limits:
    """What the group is set to."""

    max_attempts: int
    stop: bool


def offsets(spans: Iterable[Span | Delivery]) -> list[int]:
    pairs = ((s.first, s.last) if isinstance(s, Delivery) else s for s in spans)
    return [offset for first, last in pairs for offset in range(first, last + 1)]


# ---- poll -------------------------------------------------------------------------------------------


def check_poll(
    before: Picture,
    after: Picture,
    now: int,
    safe_from: int,
    ask: OrderedAsk,
    reply: Granted,
    limits: Limits,
) -> None:
    holder = before.holder
    if _must_be_refused(before, now, safe_from, ask):
        assert reply.holder == holder, "two holders (I5)"
        assert not reply.deliveries and after == before
        return
    assert reply.holder is None, "a free partition was refused"
    repeated = ask.expects is None and holder.token == ask.token  # its lease may end a little later (I6)
    until = {now + LEASE_MS, holder.until + 1} if repeated else {now + LEASE_MS}
    assert after.holder in [Holder(ask.token, ask.member, end) for end in until]
    taken_over = holder.token != NOBODY and holder.until <= now and ask.expects is None
    _check_counts(before, after, holder if taken_over else None)
    _check_order(before, after, ask, reply)
    _check_suspects(now, ask, reply)
    _check_leaving(before, after, now, ask, reply, limits)
    _check_life(before, ask, reply)


def _must_be_refused(before: Picture, now: int, safe_from: int, ask: OrderedAsk) -> bool:
    holder = before.holder
    if ask.expects is not None:  # it says that it holds the partition
        return holder.token != ask.token or ask.expects > before.cursor
    stranger = holder.token not in (NOBODY, ask.token)
    return stranger and (holder.until > now or now < safe_from)


def _lapsed(row: Delivery, holder: Holder | None) -> bool:
    """Whether a lapsed holder may have been handling it."""
    return (
        holder is not None
        and row.stamp is None
        and row.token == holder.token
        and row.visible_at <= holder.until
    )


def _check_counts(before: Picture, after: Picture, lapsed: Holder | None) -> None:
    """What a lapsed holder may have handled has spent an attempt, and is a suspect, in halves (I14)."""
    rows = after.by_offset()
    for offset, old in before.by_offset().items():
        if (new := rows.get(offset)) is None:
            continue  # settled as it was handed out
        expired = _lapsed(old, lapsed)
        counted = expired and old.alone and old.size == 1
        assert (new.spent, new.failures) == (old.spent + expired, old.failures + counted)
        if expired:
            assert new.size <= (old.size + 1) // 2, "an expired range is handed out whole"
        if new.stamp is None and new.visible_at < FAR:
            assert new.suspect == (old.suspect or expired)
            assert expired or new.visible_at == old.visible_at, "its not-before is gone (I5)"


def _check_order(before: Picture, after: Picture, ask: OrderedAsk, reply: Granted) -> None:
    """Ascending, within the budget, nothing passed over, nothing that it has received already (I6)."""
    granted = offsets(reply.deliveries)
    assert granted == sorted(set(granted))
    assert len(granted) <= max(1, ask.messages) or any(d.visible_at == FAR for d in reply.deliveries)
    assert all(d.stamp is None and d.token == ask.token for d in reply.deliveries)
    old, new = before.by_offset(), after.by_offset()
    for offset in granted:
        assert offset in old or offset >= before.cursor, "handed out after it was settled"
        assert ask.expects is None or offset >= ask.expects, "sent again, though it was received"
        if ask.on_delivery:
            assert offset not in new or new[offset].visible_at == FAR, "at most once"
    reach = max((*granted, after.cursor - 1 if after.cursor > before.cursor else -1))
    for offset, row in new.items():
        if offset <= reach and row.stamp is None:
            assert row.token == ask.token, f"{offset} was passed over"
        assert row.stamp is not None or row.token in (NOBODY, ask.token)
        assert not row.alone or row.last >= (ask.expects or 0), "it asks for more, and is alone"
    assert after.cursor == max(before.cursor, max(granted, default=-1) + 1), "the cursor jumps"
    assert all(o in old or o in granted for o in new), "out of nowhere"
    if not ask.on_delivery:
        assert old.keys() <= new.keys(), "a poll has lost a message"


def _check_suspects(now: int, ask: OrderedAsk, reply: Granted) -> None:
    """A suspect goes out alone, unless no hands were empty for a whole lease (I14)."""
    for delivery in reply.deliveries:
        if delivery.alone:
            assert ask.empty_handed and reply.deliveries == (delivery,) and delivery.suspect
        elif delivery.suspect:
            assert not ask.empty_handed, "a suspect in company, though hands were empty"
            assert now - delivery.visible_at >= LEASE_MS, "a suspect in company"


def _check_leaving(
    before: Picture, after: Picture, now: int, ask: OrderedAsk, reply: Granted, limits: Limits
) -> None:
    old, new = before.by_offset(), after.by_offset()
    for moving in reply.leaving:
        for offset in offsets([moving]):
            was, row = old[offset], new[offset]
            assert row.stamp is not None and row.token == row.stamp.producer_id == moving.token
            assert row.visible_at == now + MOVER_MS
            if was.stamp is not None:
                assert was.stamp == row.stamp, "resumed under another identity (I12)"
                assert was.visible_at <= now, "taken from a live mover"
            else:
                assert row.failures >= limits.max_attempts and not limits.stop, "an innocent leaves (I14)"
                assert ask.dead is not None
    stamped = [o for o, row in new.items() if row.stamp is not None and old[o].stamp is None]
    assert set(stamped) <= set(offsets(reply.leaving)), "stamped, and nobody was told"
    for span in reply.unplaced:
        assert ask.dead is None and not limits.stop
        assert all(new[o].failures >= limits.max_attempts for o in offsets([span]))
        assert all(o < span[0] for o in offsets(reply.deliveries)), "an exhausted message was passed over"
    for offset in offsets(reply.deliveries):
        if (sent := new.get(offset)) is not None:
            assert sent.failures < limits.max_attempts or sent.visible_at == FAR
            if sent.visible_at == FAR and old[offset].visible_at < FAR:
                assert limits.stop and sent.failures >= limits.max_attempts


def _check_life(before: Picture, ask: OrderedAsk, reply: Granted) -> None:
    """Something is handed out if there is something: nothing is stuck (I17)."""
    open_rows = {o: row for o, row in before.by_offset().items() if row.stamp is None}
    wanted = [o for o in open_rows if o >= (ask.expects or 0)]
    restarted = [o for o, row in open_rows.items() if o < (ask.expects or 0) and row.token == NOBODY]
    recalled = before.recalled and ask.expects is not None and ask.token == before.holder.token
    told = bool(restarted) or recalled
    assert reply.recall == told, "the holder is told of what was restarted, and of nothing else"
    if wanted or before.cursor < ask.end:
        withheld = reply.unplaced or reply.draining or reply.recall
        assert reply.deliveries or reply.leaving or withheld, "withheld"
    if reply.draining:
        assert not ask.empty_handed or reply.deliveries, "nobody is to drain"


# ---- settle -----------------------------------------------------------------------------------------


def check_settle(
    before: Picture,
    after: Picture,
    now: int,
    token: int,
    settlements: Sequence[Settlement],
    reply: Settled,
    limits: Limits,
) -> None:
    old, new = before.by_offset(), after.by_offset()
    found: dict[str, list[int]] = {"lost": [], "kept": [], "leaving": [], "unplaced": []}
    acked: list[int] = []
    for settlement in settlements:
        for offset in offsets([(settlement.first, settlement.last)]):
            row = old.get(offset)
            if row is None or row.token != token:
                found["lost"] += [offset] if row is not None or offset >= before.cursor else []
            elif settlement.kind is Kind.ACK:
                assert offset not in new
                acked.append(offset)
            else:
                found[_fate(row, new[offset], settlement, now, limits)].append(offset)
    assert {name: sorted(offsets(getattr(reply, name))) for name in found} == found
    assert after.settled - before.settled == len(acked), "not settled exactly once"
    touched = {o for s in settlements for o in offsets([(s.first, s.last)]) if o not in found["lost"]}
    for offset in old.keys() | new.keys():
        if offset not in touched:
            assert _state(old[offset]) == _state(new[offset]), "changed, though nobody asked"


def _fate(old: Delivery, new: Delivery, settlement: Settlement, now: int, limits: Limits) -> str:
    """Where a message that was not acked belongs now; checks that it went there."""
    if settlement.kind is Kind.MOVE:
        return _left(old, new, now)
    assert new.token == old.token or new.stamp is not None
    if old.visible_at > now:  # it waits already: said twice
        assert _state(new) == _state(old)
        return "kept"
    if settlement.kind is Kind.RELEASE:
        assert (new.spent, new.failures) == (old.spent, old.failures), "a release counts"
        assert new.visible_at == settlement.visible_at and not new.suspect
        return "kept"
    since = old.failing_since or now
    over = old.failures + 1 >= limits.max_attempts or settlement.visible_at - since > MAX_HOLD_MS
    if over and not limits.stop:
        if settlement.stamp is None:
            assert _state(new) == _state(old)
            return "unplaced"
        return _left(old, new, now)
    assert (new.spent, new.failures, new.failing_since) == (old.spent + 1, old.failures + 1, since)
    assert new.visible_at == (FAR if over else settlement.visible_at) and not new.suspect
    return "kept"


def _left(old: Delivery, new: Delivery, now: int) -> str:
    assert new.stamp is not None and new.token == new.stamp.producer_id
    assert (new.spent, new.visible_at) == (old.spent + 1, now + MOVER_MS)
    return "leaving"


def _state(row: Delivery) -> tuple[object, ...]:
    return (row.visible_at, row.token, row.spent, row.failures, row.suspect, row.stamp, row.failing_since)
