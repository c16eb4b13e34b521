"""A shared group under the lock of its progress: what a poll is handed, and what is settled.

It loads the few deliveries that a decision needs, lets `model.delivery` decide, and writes the change. What
is handed out again, or leaves for another topic, must be flushed (I8): then the verb is run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from ....model.delivery import delivery, settlement
from ....model.delivery.delivery import Ask, Kind, Settlement
from ...contract import Granted, Group, Settled
from . import ordered
from .locked import Locked

__all__ = ["poll", "settle"]

_SPENT = attrgetter("spent")
_SOON = (Kind.RETRY, Kind.RELEASE)  # what others may be handed afterwards
_DUE_ROWS = 64  # deliveries looked at in one poll


def poll(locked: Locked, group: Group, ask: Ask, log_start: int, waited_ms: int | None) -> Granted:
    lease_ms = group.settings.lease_ms
    if locked.row.holder.until:  # the group was ordered
        ordered.leave_order(locked)
    locked.skip_to(log_start)
    if again := locked.held(ask.token):
        return locked.hand_out_again(again, lease_ms)
    looks = locked.looks and not ask.fresh
    due = locked.where("visible_at <= ?", locked.now, limit=_DUE_ROWS) if looks else []
    before, safe = locked.row.cursor, locked.safe(due, lease_ms)
    change = delivery.poll(before, safe, locked.now, ask, group.terms)
    if change.leaving or any(map(_SPENT, change.granted)):
        locked.must_flush()
    if waited_ms is not None and change.cursor > before:
        locked.note_wait(waited_ms, change.cursor - before)
    if change.cursor != before or change.drop:
        locked.apply(change)
    if looks and len(due) < _DUE_ROWS:
        locked.look_up_due()
    next_due = locked.row.next_due
    if len(safe) < len(due) and not change.granted:  # else whoever waits would ask again at once
        next_due = locked.due_when_safe(lease_ms)
    until = locked.now + lease_ms
    return Granted(
        change.granted, change.leaving, change.unplaced, next_due, change.draining, until=until
    )  # fmt: skip


def settle(locked: Locked, group: Group, token: int, settlements: Sequence[Settlement]) -> Settled:
    mine = locked.held(token)
    change = settlement.settle(mine, settlements, locked.now, group.terms, locked.row.cursor)
    if change.leaving:
        locked.must_flush()
    lost = locked.in_other_hands(change.missing, token)
    if change.drop:
        locked.apply(change)
    for one in settlements:
        if one.kind in _SOON:
            locked.announce()
            break
    return Settled(lost, change.leaving, change.unplaced)
