"""Progress: cursors, deliveries and members, in an area of its own.

Each verb locks the progress row of its group and partition first (I1), loads the few deliveries the
decision needs, lets `model.delivery` (or `model.ordered`) decide, and writes the change. What must be
flushed is known only once it is decided (I8): the verb then starts over with a flushed transaction. Other
processes are told where somebody may now be handed something; not of acks, first hand-outs and heartbeats.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ....config import DEFAULTS, Limits, StoreTuning
from ....errors import GateClosed, StoreUnavailable
from ....model.delivery import settlement
from ....model.delivery.delivery import (
    NOBODY,
    Ask,
    Change,
    Delivery,
    Holder,
    Kind,
    Line,
    OrderedAsk,
    Settlement,
    Span,
    Stamp,
)
from ....model.delivery.ordered import FAR
from ...contract import Backlog, Catalog, Granted, Group, Member, Origin, Peek, Settled, Visit, Visited
from ..lists import blanks, padded, parts
from ..log.lookups import GONE, area_of, reading_log
from ..session import Area, Session, Transaction, empties, verbs
from . import ordered, shared
from .locked import (
    DELIVERY,
    ROW,
    UNSETTLED,
    Locked,
    NeedsFlushError,
    NeedsStartError,
    ProgressRow,
    held_under,
    lines_of,
    lock,
    lock_each,
    reset_meanwhile,
    stopped_below,
)
from .usage import log_start_of, measure
from .user_transaction import Guest, Joining

__all__ = ["SqlProgress"]


# Leases that end later than any that is given now: of a clock that was set back since (I26).
#
# Whoever holds them may be gone, and nobody would get their messages before the clock has caught up. So
# they are cut to what a lease is now: who lives renews it, and what the others had comes again after one
# lease. What waits for its time in nobody's hands is left as it is: that may be far away.

_PLACES = f"""SELECT partition_id FROM postroom_deliveries
              WHERE group_id = ? AND token <> {NOBODY} AND visible_at > ? AND visible_at < {FAR}
              UNION SELECT partition_id FROM postroom_progress WHERE group_id = ? AND holder_until > ?"""
_FAR_MEMBERS = "SELECT 1 FROM postroom_members WHERE group_id = ? AND until_ms > ?"
_CUT_MEMBERS = "UPDATE postroom_members SET until_ms = ? WHERE group_id = ? AND until_ms > ?"


def _longest(tuning: StoreTuning, group: Group) -> int:
    """Movers hold what they move for a time of their own."""
    return max(group.settings.lease_ms, group.terms.mover_ms) + tuning.clock_slack_ms


def _strays(tx: Transaction, group: Group) -> set[int]:
    later = tx.now_ms() + _longest(tx.dialect.tuning, group)
    return {int(place) for (place,) in tx.all(_PLACES, group.id, later, group.id, later)}


def _cut(locked: Locked, group: Group) -> int:
    """Returns how many leases of a partition were cut."""
    until, later = locked.now + group.settings.lease_ms, locked.now + _longest(locked.tuning, group)
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


def _member_ms(group: Group, limits: Limits) -> int:
    """Return for how long a member is live that was heard now."""
    return limits.member_ttl_factor * group.settings.lease_ms + limits.tuning.store.clock_slack_ms


T = TypeVar("T")

_ENTER = """INSERT INTO postroom_members (group_id, name, client, joined_at, until_ms)
            VALUES (?, ?, ?, ?, ?)"""
_THERE = "SELECT group_id, name FROM postroom_members WHERE group_id IN ({marks})"
_GROUPS = (1, 16, 256)  # asked for at once
_RENEW = "UPDATE postroom_members SET until_ms = ? WHERE group_id = ? AND name = ?"
_MEMBERS = """SELECT group_id, name, client, joined_at, until_ms FROM postroom_members
              WHERE group_id = ? AND until_ms >= ? ORDER BY joined_at, name"""
_MEMBERS_OF = """SELECT group_id, name, client, joined_at, until_ms FROM postroom_members
                 WHERE until_ms >= ? AND group_id IN ({marks}) ORDER BY joined_at, name"""
_DEAD = "{what} FROM postroom_members WHERE until_ms < ?"
_DUES = """SELECT group_id, MIN(next_due) FROM postroom_progress
           WHERE next_due IS NOT NULL{more} GROUP BY group_id"""
_LOOK = """SELECT partition_id, next_new, next_due, lowest, drained, recalled, parked,
                  holder_token, holder, holder_until
           FROM postroom_progress WHERE group_id = ? AND generation = ?"""
_EDGES = """SELECT p.state, p.next_offset, COALESCE(t.log_start, 0) FROM postroom_partitions p
            LEFT JOIN postroom_trims t ON t.partition_id = p.id WHERE p.id = ?"""
_LAST = """SELECT 1 FROM postroom_deliveries
           WHERE group_id = ? AND partition_id = ? AND first_offset >= ? AND last_offset = ?"""
_FENCE = "DELETE FROM postroom_{table} WHERE group_id = ? AND partition_id = ?"
_HELD_BY = """SELECT partition_id FROM postroom_deliveries WHERE token = ? AND group_id = ?
              UNION SELECT partition_id FROM postroom_progress WHERE holder_token = ? AND group_id = ?"""

_Unsettled = tuple[int | None, int, int, int, Sequence[tuple[Any, ...]]]


@verbs
class SqlProgress:
    def __init__(self, session: Session, catalog: Catalog, limits: Limits = DEFAULTS) -> None:
        self._session = session
        self._limits = limits
        self._catalog = catalog
        self._joining = Joining(session, limits)
        self.is_drained: Callable[[Group, int], bool] = self.drain  # of predecessors, wherever they are
        self.fence_all: Callable[[Group, Sequence[int]], None] = self.fence  # successors, wherever they are

    # ---- deliveries ----

    def peek(self, group: Group, partition_ids: Sequence[int]) -> dict[int, Peek]:
        wanted = set(partition_ids)
        with self._session.read(Area.PROGRESS) as tx:
            rows = tx.all(_LOOK, group.id, group.generation)
        return {
            place: Peek(cursor, due, Holder(*holder), lowest, bool(drained), bool(recalled), parked)
            for place, cursor, due, lowest, drained, recalled, parked, *holder in rows
            if place in wanted
        }

    def dues(self, of: Collection[int] | None = None) -> dict[int, int]:
        found: dict[int, int] = {}
        with self._session.read(Area.PROGRESS) as tx:
            for some in [None] if of is None else parts(sorted(of)):
                more = "" if some is None else f" AND group_id IN ({blanks(len(some))})"
                found.update(tx.all(_DUES.format(more=more), *(some or ())))
        return found

    def started_ms(self) -> int:
        with self._session.read(Area.PROGRESS) as tx:
            return tx.started_ms()

    def held_by(self, group_id: int, token: int) -> set[int]:
        with self._session.read(Area.PROGRESS) as tx:
            return {row[0] for row in tx.all(_HELD_BY, token, group_id, token, group_id)}

    def poll(
        self, group: Group, partition_id: int, ask: Ask, *, log_start: int = 0, waited_ms: int | None = None
    ) -> Granted:
        return self._locked(
            group,
            partition_id,
            lambda one: shared.poll(one, group, ask, log_start, waited_ms),
            flush=ask.on_delivery,
        )

    def settle(
        self, group: Group, partition_id: int, token: int, settlements: Sequence[Settlement]
    ) -> Settled:
        settle = _settling(group)
        return self._locked(group, partition_id, lambda locked: settle(locked, group, token, settlements))

    def visit(self, group: Group, visits: Sequence[Visit]) -> list[Visited | StoreUnavailable]:
        settle = _settling(group)

        def decide(each: Mapping[int, Locked]) -> list[Visited | StoreUnavailable]:
            found: list[Visited | StoreUnavailable] = []
            for visit in visits:
                locked, ask = each[visit.partition_id], visit.ask
                settled = tuple([settle(locked, group, token, some) for token, some in visit.settles])
                granted = shared.poll(locked, group, ask, visit.log_start, visit.waited_ms) if ask else None
                found.append(Visited(settled, granted))
            return found

        flush, ids, tokens = False, [], []
        for visit in visits:
            ids.append(visit.partition_id)
            tokens += [(visit.partition_id, token) for token, _ in visit.settles]
            if visit.ask is not None:
                flush = flush or visit.ask.on_delivery
                tokens.append((visit.partition_id, visit.ask.token))
        return self._each_locked(group, sorted(ids), decide, flush, tokens)

    def ack_within(self, guest: Guest, group: Group, partition_id: int, token: int, offset: int) -> bool:
        return self._joining.ack(guest, group, partition_id, token, offset)

    def extend(self, group: Group, partition_id: int, token: int, spans: Sequence[Span]) -> tuple[Span, ...]:
        def decide(locked: Locked) -> tuple[Span, ...]:
            if group.settings.mode == "ordered":
                return ordered.extend(locked, group, token, spans)
            until = locked.now + group.settings.lease_ms
            change = settlement.extend(locked.held(token), spans, until, locked.row.cursor)
            if change.drop:
                locked.apply(change)
            return change.missing

        return self._locked(group, partition_id, decide)

    def give_back(self, group: Group, partition_id: int, token: int, until: int) -> int:
        def decide(locked: Locked) -> int:
            if group.settings.mode == "ordered":
                return ordered.give_back(locked, token, until)
            held = [d for d in locked.held(token) if d.visible_at == until]
            back = [Settlement(Kind.RELEASE, d.first, d.last, visible_at=locked.now) for d in held]
            if held:
                locked.apply(settlement.settle(held, back, locked.now, group.terms, locked.row.cursor))
                locked.announce()
            return sum(d.size for d in held)

        return self._locked(group, partition_id, decide)

    def poll_ordered(
        self,
        group: Group,
        partition_id: int,
        ask: OrderedAsk,
        *,
        log_start: int = 0,
        waited_ms: int | None = None,
    ) -> Granted:
        def decide(locked: Locked) -> Granted:
            locked.skip_to(log_start)
            return ordered.poll(locked, group, ask, waited_ms)

        return self._locked(group, partition_id, decide, flush=ask.on_delivery)

    def hand_over(self, group: Group, partition_id: int, token: int) -> None:
        self._locked(group, partition_id, lambda locked: ordered.hand_over(locked, token))

    def lines(self, group: Group, partition_id: int) -> list[Line]:
        with self._session.read(Area.PROGRESS) as tx:
            return lines_of(tx, group.id, partition_id)

    def unpark(
        self,
        group: Group,
        partition_id: int,
        token: int,
        member: str,
        line_id: int,
        spans: Sequence[Span],
        upto: int,
        *,
        on_delivery: bool = False,
    ) -> Granted:
        def decide(locked: Locked) -> Granted:
            return ordered.unpark(locked, group, token, member, line_id, spans, upto, on_delivery)

        return self._locked(group, partition_id, decide, flush=on_delivery)

    def stopped(self, group: Group, partition_id: int, *, limit: int, after: int = -1) -> list[Delivery]:
        key = (group.id, partition_id)
        origin = self._catalog.origin_of(*key)
        with self._session.read(Area.PROGRESS) as tx:
            raw = tx.one(ROW, *key)
            if raw is None or raw[0] < origin.since:
                return []
            return stopped_below(tx, key, ProgressRow.of(raw).lowest, after, limit)

    def restart_stopped(self, group: Group, partition_id: int, spans: Sequence[Span] | None = None) -> int:
        return self._locked(group, partition_id, lambda locked: ordered.restart(locked, spans))

    def skip_stopped(
        self, group: Group, partition_id: int, stamp: Stamp, spans: Sequence[Span] | None = None
    ) -> tuple[Delivery, ...]:
        return self._locked(group, partition_id, lambda locked: ordered.skip(locked, group, stamp, spans))

    def drop_stopped(self, group: Group, partition_id: int, spans: Sequence[Span] | None = None) -> int:
        return self._locked(group, partition_id, lambda locked: ordered.drop(locked, spans))

    def seize(self, group: Group, partition_id: int, ask: Ask, spans: Sequence[Span]) -> Granted:
        def decide(locked: Locked) -> Granted:
            rows = [d for d in locked.near(spans) if any(d.first <= b and d.last >= a for a, b in spans)]
            change = settlement.seize(locked.row.cursor, rows, spans, locked.now, ask, group.terms)
            locked.apply(change)
            locked.announce()
            return Granted(change.granted, change.leaving)

        return self._locked(group, partition_id, decide, flush=True) if spans else Granted(())

    def _locked(
        self, group: Group, partition_id: int, decide: Callable[[Locked], T], *, flush: bool = False
    ) -> T:
        return self._each_locked(group, [partition_id], lambda each: decide(each[partition_id]), flush)

    def _each_locked(
        self,
        group: Group,
        partition_ids: Sequence[int],
        decide: Callable[[Mapping[int, Locked]], T],
        flush: bool,
        tokens: Sequence[tuple[int, int]] = (),
    ) -> T:
        """Decide in one transaction. All lock rows in the same order: none waits for one that waits for it.

        `tokens`, by partition: what they hold is needed."""
        origins: dict[int, Origin] = {}
        while True:
            try:
                with self._session.write(Area.PROGRESS, flush=flush) as tx:
                    raws, in_flight = lock_each(tx, group.id, partition_ids, tokens)
                    rows = zip(partition_ids, raws, strict=True)
                    each = {
                        one: Locked(tx, group, one, raw, origins.get(one), flush, in_flight)
                        for one, raw in rows
                    }
                    decided = decide(each)
                    for locked in each.values():
                        locked.save()
                    return decided
            except NeedsFlushError:
                flush = True
            except NeedsStartError as found:
                origins[found.partition_id] = self._origin(group, found)

    def _origin(self, group: Group, untouched: NeedsStartError) -> Origin:
        """Return where a partition begins that was not touched in this generation, if it may begin."""
        partition_id, before = untouched.partition_id, untouched.generation
        origin = self._catalog.origin_of(group.id, partition_id)
        if origin.generation != group.generation:
            raise reset_meanwhile(group) from None
        if group.settings.mode == "ordered":
            self._pass_gate(group, partition_id)
            if before is not None and before < origin.since:
                self._fence_successors(group, partition_id)
        return origin

    # ---- the gate (I10) ----

    def _pass_gate(self, group: Group, partition_id: int) -> None:
        """Progress of an ordered group begins in a partition once everything before it is settled.

        The progress row that is made then is what says so, for ever: nobody asks again.
        """
        before = self._catalog.topic(group.topic).route.predecessors.get(partition_id, ())
        if not all(self.is_drained(group, one) for one in before):
            raise GateClosed(
                f"group {group.name!r} of topic {group.topic!r} has not settled all that comes before this "
                "partition; it opens by itself",
                partition_id=partition_id,
            )

    def _fence_successors(self, group: Group, partition_id: int) -> None:
        """Before a partition is read again, nobody goes on in those that follow it (I10)."""
        route = self._catalog.topic(group.topic).route
        after = route.descendants(partition_id)
        self.fence_all(group, [p.partition_id for p in reversed(route.partitions) if p.partition_id in after])

    def drain(self, group: Group, partition_id: int) -> bool:
        with self._session.read(self._session.stored_in(area_of(self._session, partition_id))) as tx:
            row = tx.one(_EDGES, partition_id)
        if row is None or row[0] in GONE:
            return True
        state, end, log_start = row

        def decide(locked: Locked) -> bool:
            locked.skip_to(log_start)
            if not locked.row.drained and locked.row.committed >= end:
                locked.must_flush()
                locked.drained()
            return bool(locked.row.drained)

        try:
            return state == "sealed" and self._locked(group, partition_id, decide)
        except GateClosed:
            return False

    def restamp(self, group: Group, partition_id: int, leaving: Delivery, stamp: Stamp) -> Delivery | None:
        again = replace(leaving, stamp=stamp)

        def decide(locked: Locked) -> Delivery | None:
            found = [d for d in locked.near([(leaving.first, leaving.last)]) if d.first == leaving.first]
            if not found or (found[0].token, found[0].stamp) != (leaving.token, leaving.stamp):
                return None
            locked.apply(Change(locked.row.cursor, drop=(leaving.first,), put=(again,)))
            return again

        return self._locked(group, partition_id, decide, flush=True)

    def leaving(self, group: Group, partition_id: int, token: int) -> list[Delivery]:
        with self._session.read(Area.PROGRESS) as tx:
            return held_under(tx, group.id, partition_id, token)

    def fence(self, group: Group, partition_ids: Sequence[int]) -> None:
        between = replace(group, generation=group.generation - 1)
        origins = {one: self._catalog.origin_of(group.id, one) for one in partition_ids}
        with self._session.write(Area.PROGRESS) as tx:
            for partition_id, origin in origins.items():
                row = lock(tx, (group.id, partition_id))
                if row is None or row[0] >= group.generation:  # its holder has begun in this generation
                    continue
                if row[0] >= origin.since:
                    locked = Locked(tx, between, partition_id, row, origin, flush=True)
                    ordered.hand_over(locked, locked.row.holder.token)
                    locked.save()
                    continue
                for table in ("progress", "deliveries", "parked"):
                    tx.do(_FENCE.format(table=table), group.id, partition_id)

    # ---- measures ----

    def committed(self, group_id: int, partition_id: int) -> int | None:
        with self._session.read(Area.PROGRESS) as tx:
            row = tx.one(ROW, group_id, partition_id)
        if row is None or row[0] < self._catalog.origin_of(group_id, partition_id).since:
            return None
        return ProgressRow.of(row).committed

    def backlog(
        self, group: Group, partition_ids: Sequence[int], *, open_spans: int = 0, open_from: int = 0
    ) -> list[Backlog]:
        return [self._backlog(group, one, (open_spans, open_from)) for one in partition_ids]

    def _backlog(self, group: Group, partition_id: int, open_spans: tuple[int, int]) -> Backlog:
        key = (group.id, partition_id)
        with reading_log(self._session, partition_id) as tx:
            log_start = log_start_of(tx, partition_id)
        row, found = self._looked(key, group.generation, log_start, open_spans)
        if row is None:
            origin = self._catalog.origin_of(*key)
            row, found = self._looked(key, origin.since, log_start, open_spans)
            row = row or ProgressRow(group.generation, origin.start, origin.start, None)
        lowest, unsettled, stopped, since, rows = found
        row.cursor = max(row.cursor, log_start)  # what was trimmed is passed over by the next poll
        lowest = min((at for at in (lowest, row.parked_from) if at is not None), default=None)
        committed = row.cursor if lowest is None else max(log_start, min(lowest, row.cursor))
        unsettled += row.parked
        spans = tuple((max(r[0], log_start), r[1]) for r in rows)
        with reading_log(self._session, partition_id) as tx:
            measured = measure(tx, partition_id, row, committed, unsettled, spans)
            age_ms = max(0, tx.now_ms() - since) if stopped and since else 0
        if measured.sealed and unsettled:  # the control batch may be in somebody's hands: it is no message
            with self._session.read(Area.PROGRESS) as tx:
                control = tx.one(_LAST, *key, row.lowest, measured.end - 1)
            unsettled -= int(control is not None)
        return replace(
            measured, stopped=stopped, stopped_age_ms=age_ms, unsettled=unsettled, parked=row.parked
        )

    def _looked(
        self, key: tuple[int, int], since: int, log_start: int, open_spans: tuple[int, int]
    ) -> tuple[ProgressRow | None, _Unsettled]:
        """The row, unless it is of an earlier generation than this, and what is unsettled."""
        with self._session.read(Area.PROGRESS) as tx:
            raw = tx.one(ROW, *key)
            row = ProgressRow.of(raw) if raw is not None and raw[0] >= since else None
            return row, _unsettled(tx, key, row, log_start, open_spans)

    # ---- groups ----

    def rewind(self, group: Group, partition_ids: Sequence[int]) -> None:
        for partition_id in partition_ids:
            self._locked(group, partition_id, Locked.announce, flush=True)

    def cut_leases(self, group: Group, partition_ids: Sequence[int]) -> int:
        with self._session.read(Area.PROGRESS) as tx:
            stray = _strays(tx, group)
            far = tx.one(_FAR_MEMBERS, group.id, tx.now_ms() + _member_ms(group, self._limits))
        if far is not None:
            with self._session.write(Area.PROGRESS, flush=False) as tx:
                until = tx.now_ms() + _member_ms(group, self._limits)
                tx.do(_CUT_MEMBERS, until, group.id, until)
        return sum(
            self._locked(group, place, lambda locked: _cut(locked, group))
            for place in partition_ids
            if place in stray
        )

    @empties
    def forget(self, group_id: int) -> None:
        with self._session.write(Area.PROGRESS) as tx:
            for table in ("progress", "deliveries", "parked", "members", "activity", "lanes", "lane_counts"):
                tx.do(f"DELETE FROM postroom_{table} WHERE group_id = ?", group_id)
            tx.announce(Area.PROGRESS)

    # ---- members ----

    def join(self, group_id: int, member: str, client: str, ttl_ms: int) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            now = tx.now_ms()
            if not tx.run(_RENEW, now + ttl_ms, group_id, member):
                tx.do(_ENTER, group_id, member, client, now, now + ttl_ms)
                tx.do("DELETE FROM postroom_members WHERE group_id = ? AND until_ms < ?", group_id, now)

    def renew_each(self, members: Sequence[tuple[int, str, int]]) -> list[tuple[int, str]]:
        asked = sorted(members)
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            there: set[tuple[int, str]] = set()
            for some in padded(sorted({group_id for group_id, _, _ in asked}), _GROUPS):
                there.update(tx.all(_THERE.format(marks=blanks(len(some))), *some))
            now = tx.now_ms()
            tx.many(_RENEW, [(now + ttl, *who) for *who, ttl in asked if tuple(who) in there])
        return [(group_id, name) for group_id, name, _ in asked if (group_id, name) not in there]

    def leave(self, group_id: int, member: str) -> None:
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            tx.do("DELETE FROM postroom_members WHERE group_id = ? AND name = ?", group_id, member)
            tx.announce(Area.PROGRESS)

    def members(self, group_id: int) -> list[Member]:
        with self._session.read(Area.PROGRESS) as tx:
            return [Member(*row) for row in tx.all(_MEMBERS, group_id, tx.now_ms())]

    def members_of(self, group_ids: Collection[int]) -> dict[int, list[Member]]:
        found: dict[int, list[Member]] = {}
        with self._session.read(Area.PROGRESS) as tx:
            for some in parts(sorted(group_ids)):
                sql = _MEMBERS_OF.format(marks=blanks(len(some)))
                for row in tx.all(sql, tx.now_ms(), *some):
                    found.setdefault(row[0], []).append(Member(*row))
        return found

    def forget_dead(self, since_ms: int) -> int:
        with self._session.read(Area.PROGRESS) as tx:  # mostly there are none, and nothing is written
            if tx.one(_DEAD.format(what="SELECT 1") + " LIMIT 1", since_ms) is None:
                return 0
        with self._session.write(Area.PROGRESS, flush=False) as tx:
            return tx.run(_DEAD.format(what="DELETE"), since_ms)


def _settling(group: Group) -> Callable[[Locked, Group, int, Sequence[Settlement]], Settled]:
    return ordered.settle if group.settings.mode == "ordered" else shared.settle


def _unsettled(
    tx: Transaction,
    key: tuple[int, int],
    row: ProgressRow | None,
    log_start: int,
    open_spans: tuple[int, int],
) -> _Unsettled:
    """The lowest unsettled offset; how many messages are unsettled, how many of them stopped, and since when
    at the earliest; and the first rows: so many, from an offset on."""
    if row is None:
        return None, 0, 0, 0, ()
    found = tx.one(UNSETTLED, log_start, log_start, FAR, FAR, *key, row.lowest, log_start)
    lowest, unsettled, stopped, since = found or (None, 0, 0, 0)
    where = " AND last_offset >= ? ORDER BY first_offset LIMIT ?"
    limit, first = open_spans
    rows = tx.all(DELIVERY + where, *key, row.lowest, max(log_start, first), limit) if limit else ()
    return lowest, int(unsettled or 0), int(stopped or 0), int(since or 0), rows
