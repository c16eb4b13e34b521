"""Leases that end later than any that is given now: of a clock that was set back since (I26).

Whoever holds them may be gone, and nobody would get their messages before the clock has caught up. So they
are cut to what a lease is now: who lives renews it, and what the others had comes again after one lease.
What waits for its time in nobody's hands is left as it is: that may be far away.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import DEFAULTS
from ..model.delivery import NOBODY, Change, Holder
from ..model.ordered import FAR
from .contract import Group
from .locked import Locked
from .session import Transaction

__all__ = ["CUT_MEMBERS", "FAR_MEMBERS", "cut", "member_ms", "stray_places"]

_SLACK_MS = 1_000  # clocks of two readings of one moment
_PLACES = f"""SELECT partition_id FROM postroom_deliveries
              WHERE group_id = ? AND token <> {NOBODY} AND visible_at > ? AND visible_at < {FAR}
              UNION SELECT partition_id FROM postroom_progress WHERE group_id = ? AND holder_until > ?"""
FAR_MEMBERS = "SELECT 1 FROM postroom_members WHERE group_id = ? AND until_ms > ?"
CUT_MEMBERS = "UPDATE postroom_members SET until_ms = ? WHERE group_id = ? AND until_ms > ?"


def _longest(group: Group) -> int:
    """Movers hold what they move for a time of their own."""
    return max(group.settings.lease_ms, group.terms.mover_ms) + _SLACK_MS


def stray_places(tx: Transaction, group: Group) -> set[int]:
    later = tx.now_ms() + _longest(group)
    return {int(place) for (place,) in tx.all(_PLACES, group.id, later, group.id, later)}


def cut(locked: Locked, group: Group) -> int:
    """Returns how many leases of a partition were cut."""
    until, later = locked.now + group.settings.lease_ms, locked.now + _longest(group)
    holder, found = locked.row.holder, 0
    if holder.until > later:
        locked.hold(Holder(holder.token, holder.member, until))
        found = 1
    held = locked.where("token <> ? AND visible_at > ? AND visible_at < ?", NOBODY, later, FAR)
    if group.settings.mode == "ordered":  # the holder's is the only lease; of its messages it is a not-before
        held = [one for one in held if one.stamp is not None]
    if held:
        put = tuple(replace(one, visible_at=until) for one in held)
        locked.apply(Change(locked.row.cursor, drop=tuple(one.first for one in held), put=put))
        locked.look_up_due()
    if held or found:
        locked.announce()
    return found + len(held)


def member_ms(group: Group) -> int:
    """How long a member is live that was heard now."""
    return DEFAULTS.member_ttl_factor * group.settings.lease_ms + _SLACK_MS
