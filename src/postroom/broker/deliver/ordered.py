"""Polls of ordered groups: who holds which partition, and what its holder is handed (R14, R22, R23).

Blocking code, run in worker threads. Puts together what others decide: `model.assignment` says which
partitions a member should hold, `model.ordered` (behind the store's verbs) who holds them and what is handed
out. The topic's partitions and those of the group's retry topic are shared among the members alike.

Must never trust what it remembers: members are remembered for a second, to plan with, and everything else is
read anew. A plan made on old members is mended by the next one; a partition is only ever taken by the store's
verb. Nothing is written for partitions that are held already and have nothing new: heartbeats renew those.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from ...config import DEFAULTS, Limits
from ...endpoint.values import Grant, PollRequest
from ...errors import GateClosed, StoreError, StoreUnavailable, UnknownGroup, UnknownTopic
from ...model.delivery.delivery import NOBODY, OrderedAsk
from ...model.delivery.ordered import Plan, plan
from ...model.frozen import dataclass
from ...model.topology.route import Range
from ...store.contract import Bounds, Granted, Group, Member, Peek, Store, Topic
from ..topology.catalog_cache import CatalogCache, Source
from .handed import Departure, Fresh, Handed, PollBudget, lease_of, new_stamp
from .readable import fitted, has_due, has_new
from .shared import Deliveries, is_of_a_shard, rotated

__all__ = ["OrderedDeliveries"]

_STRANGER = "\0"  # whoever holds a partition under the asker's name, but with another token


@dataclass(frozen=True, slots=True)
class _PartitionView:
    """A partition, as a poll sees it."""

    topic: Topic
    group: Group  # the one that reads it
    piece: Range
    bounds: Bounds
    peek: Peek | None  # None: never polled

    @property
    def id(self) -> int:
        return self.piece.partition_id

    @property
    def token(self) -> int:
        return NOBODY if self.peek is None else self.peek.holder.token

    def held_by(self, request: PollRequest) -> bool:
        return self.token == request.token

    def recalled(self, request: PollRequest) -> bool:
        """Whether what the asker has received of it is out of date: somebody decided about what stopped."""
        if self.peek is None or not self.peek.recalled or not self.held_by(request):
            return False
        return dict(request.positions).get(self.id, -1) >= 0

    def holder(self, request: PollRequest, now: int) -> str | None:
        """The member that holds it now; None: it is free, or its holder's lease has passed."""
        if self.peek is None or self.token == NOBODY:
            return None
        if self.held_by(request):
            return request.member
        if self.peek.holder.until <= now:
            return None
        return _STRANGER if self.peek.holder.member == request.member else self.peek.holder.member


class OrderedDeliveries:
    def __init__(
        self, store: Store, catalog: CatalogCache, deliveries: Deliveries, limits: Limits = DEFAULTS
    ) -> None:
        self._ttl_factor = limits.member_ttl_factor
        self._fresh_s = limits.tuning.broker.members_fresh_s
        self._check_ms = limits.tuning.broker.members_check_ms
        self._store = store
        self._catalog = catalog
        self._deliveries = deliveries
        self._lock = threading.Lock()
        self._members: dict[int, tuple[float, list[Member]]] = {}  # by group, and when they were looked at
        self._turn = 0  # partitions take turns at being first

    # ---- poll ----

    def poll(self, request: PollRequest) -> Handed:
        return self._deliveries.by_fresh_catalog(self._poll, request)

    def _poll(self, request: PollRequest) -> Handed:
        sources = self._catalog.sources(request.topic, request.group)
        started_ms = self._store.progress.started_ms()
        places = [place for source in sources for place in self._places(source)]
        now = self._store.now_ms()
        decided = self._plan(request, sources[0][1], places, now)
        held = [partition_id for partition_id, _ in request.positions]
        # Acks that a crash forgot (I8) are settled for the asker, and would wait in its hands for ever.
        survived = not held or started_ms == request.started_ms
        mine = {place.id for place in places if place.held_by(request)}
        away = {*held} - {*self._store.present(held)}  # nobody can say who holds them
        ended = {p for p in held if any(self._deliveries.unread.drained(group, p) for _, group in sources)}
        give_up = [*(decided.give_up if survived else (p for p in held if p not in away)), *ended]
        give_up += (place.id for place in places if place.recalled(request))  # also of one who wants nothing
        giving_up = {*request.giving_up}
        handed = Handed(
            started_ms=started_ms,
            next_due=_look_again(places, request, now, self._check_ms),
            revoked=tuple(p for p in dict.fromkeys(give_up) if p not in giving_up),
            lost=tuple(p for p in held if p not in mine and p not in ended and p not in away),
            watchful=len(mine) < len(places),
        )
        if survived and request.messages and not handed.lost and not self._deliveries.paused(request):
            try:
                self._hand_out(request, places, decided, handed, now)
            except StoreError:
                if not handed.grants:
                    raise  # and else what was granted before is handed over
        return handed

    def _places(self, source: Source) -> list[_PartitionView]:
        """Those that are open to the group, and not read to their sealed end (I10)."""
        topic, group = source
        unread = self._deliveries.unread
        pieces = unread.partitions(topic.route, group)
        ids = self._store.present(piece.partition_id for piece in pieces)
        bounds = self._store.log.bounds(ids)
        peeks = self._store.progress.peek(group, ids)
        wanted = unread.look(topic.route, group, bounds, peeks)
        return [
            _PartitionView(topic, group, piece, bounds[piece.partition_id], peeks.get(piece.partition_id))
            for piece in pieces
            if piece.partition_id in wanted
        ]

    def _hand_out(
        self, request: PollRequest, places: Sequence[_PartitionView], decided: Plan, handed: Handed, now: int
    ) -> None:
        """What is free first, as the plan allows: a backlog must not keep it free. Then what is held."""
        dead = self._catalog.dead_letters(request.topic, request.group)
        look = PollBudget(request, dead, request.messages, request.bytes, request.empty_handed)
        positions = dict(request.positions)
        by_id = {place.id: place for place in places}
        room = decided.room
        for partition_id in decided.claim:
            if room and not look.full:
                room -= self._claim(by_id[partition_id], look, handed, now)
        self._turn += 1
        mine = [p for p in places if p.held_by(request) and p.id not in decided.give_up]
        for place in rotated(mine, self._turn):
            position = positions.get(place.id, -1)
            if not look.full and _worth_polling(place, position, now):
                granted = self._poll_partition(place, look, None if position < 0 else position, now)
                self._hand(place, look, granted, handed, position)

    def _claim(self, place: _PartitionView, look: PollBudget, handed: Handed, now: int) -> bool:
        try:
            granted = self._poll_partition(place, look, None, now)
        except GateClosed:  # what it follows is not drained after all
            return False
        except StoreUnavailable as error:
            if not is_of_a_shard(error):
                raise
            return False  # it, or where the group starts in it, is away
        if granted.holder is not None:  # somebody was faster
            return False
        handed.fresh.append(Fresh(place.group, place.id, granted.until))
        self._hand(place, look, granted, handed, None)
        return True

    def _poll_partition(
        self, place: _PartitionView, look: PollBudget, expects: int | None, now: int
    ) -> Granted:
        peek = place.peek or self._deliveries.first_peek(place.group, place.id, {place.id: place.bounds})
        start = place.bounds.start
        cursor = start if peek is None else max(peek.cursor, start)
        fresh = cursor < place.bounds.end
        look.batches = self._deliveries.read(place.id, cursor, look.messages, look.bytes) if fresh else []
        ask = partial(_ask, look, cursor, expects, again=peek is not None and peek.lowest < peek.cursor)
        verb = self._store.progress.poll_ordered
        return self._deliveries.poll_partition(verb, place.group, place.id, place.bounds, look, ask, now)

    def _hand(
        self, place: _PartitionView, look: PollBudget, granted: Granted, handed: Handed, position: int | None
    ) -> None:
        """Put a grant into the answer. `position` is what the asker expected; None: the partition is new."""
        if granted.holder is not None:
            handed.lost += (place.id,)
            look.full = True
            return
        if granted.draining:
            handed.draining = look.full = True  # nothing more is looked at then
        if granted.recall and place.id not in (*look.request.giving_up, *handed.revoked):
            handed.revoked += (place.id,)  # somebody decided about what stopped: its next holder receives all
        if granted.leaving:
            handed.departures.append(Departure(place.group, place.piece.partition, place.id, granted.leaving))
        fits = fitted(self._deliveries.read, place.id, granted.deliveries, look.batches, look.most_bytes)
        leases = tuple(lease_of(d) for d in fits.deliveries)
        following = leases[-1].last + 1 if leases else self._read_so_far(place, granted)
        if leases or position is None or following > position:
            number = place.piece.partition
            handed.grants.append(
                Grant(place.topic.name, number, place.id, leases, fits.batches, following, granted.lines)
            )
            look.spend(leases, fits.batches)
        look.full = look.full or bool(fits.left)  # its holder has not received them: they come again (I6)

    def _read_so_far(self, place: _PartitionView, granted: Granted) -> int:
        """Where a holder stands that was handed nothing: at the cursor, unless something keeps it back."""
        if granted.draining or granted.unplaced or granted.recall or place.peek is None:
            return -1
        return max(place.peek.cursor, place.bounds.start)

    # ---- members ----

    def _plan(self, request: PollRequest, group: Group, places: Sequence[_PartitionView], now: int) -> Plan:
        """Whoever let a lease pass, or has not been heard of for a lease, is not counted on any more."""
        silent_ms = (self._ttl_factor - 1) * group.settings.lease_ms
        passed = {
            place.peek.holder.member
            for place in places
            if place.peek is not None and place.token not in (NOBODY, request.token)
            if place.peek.holder.until <= now
        }
        live = {m.name for m in self._live(group) if m.until - silent_ms > now}
        holders = {p.id: name for p in places if (name := p.holder(request, now)) is not None}
        return plan([place.id for place in places], holders, live - passed, request.member)

    def _live(self, group: Group) -> list[Member]:
        with self._lock:
            looked_at, members = self._members.get(group.id, (0.0, []))
        if time.monotonic() - looked_at > self._fresh_s:
            members = self._store.progress.members(group.id)
            with self._lock:
                self._members[group.id] = (time.monotonic(), members)
        return members

    @property
    def remembers_members(self) -> bool:
        return bool(self._members)

    def forget_members(self) -> None:
        """Somebody may have come or gone elsewhere."""
        with self._lock:
            self._members.clear()

    # ---- holders ----

    def joined(self, topic: str, group: str) -> list[int]:
        """Somebody joined or left here: plan anew. Returns the groups that are concerned."""
        self.forget_members()
        return [reader.id for _, reader in self._catalog.sources(topic, group)]

    def hand_over(self, topic: str, group: str, token: int, partition_ids: Sequence[int]) -> list[int]:
        """End the holder's lease on these; returns the groups that are concerned."""
        sources = self._catalog.sources(topic, group)
        readers = {r.partition_id: reader for source, reader in sources for r in source.route.partitions}
        present = self._store.present(p for p in dict.fromkeys(partition_ids) if p in readers)
        for partition_id in present:  # of the others the lease ends by itself
            with suppress(GateClosed):  # the group was reset: nobody holds it
                self._hand_over(readers[partition_id], partition_id, token)
        return [reader.id for _, reader in sources]

    def _hand_over(self, group: Group, partition_id: int, token: int) -> None:
        hand_over = self._store.progress.hand_over
        self._deliveries.by_fresh_group(group, lambda known: hand_over(known, partition_id, token))

    def leave(self, topic: str, group: str, member: str) -> list[int]:
        """A member goes: hand over what it holds still. Returns the groups that are concerned."""
        try:
            sources = self._catalog.sources(topic, group)
        except (UnknownTopic, UnknownGroup):
            return []  # deleted, and its progress with it
        if sources[0][1].settings.mode != "ordered":
            return []
        for place in (place for source in sources for place in self._places(source)):
            if place.peek is not None and place.token != NOBODY and place.peek.holder.member == member:
                self._hand_over(place.group, place.id, place.token)
        return self.joined(topic, group)


def _ask(look: PollBudget, cursor: int, expects: int | None, *, again: bool) -> OrderedAsk:
    return OrderedAsk(
        member=look.request.member,
        token=look.request.token,
        messages=look.most_messages(again),
        end=look.reach(cursor),
        expects=expects,
        empty_handed=look.empty_handed,
        on_delivery=look.request.on_delivery,
        dead=new_stamp(look.dead),
    )


def _worth_polling(place: _PartitionView, position: int, now: int) -> bool:
    """Something is new, was not received yet, or is due to leave or to come again."""
    if place.peek is None:
        return True
    return position != place.peek.cursor or has_new(place.peek, place.bounds) or has_due(place.peek, now)


def _look_again(places: Sequence[_PartitionView], request: PollRequest, now: int, check_ms: int) -> int:
    """When a poll that waits looks again: a holder's lease may have passed then, or somebody joined."""
    leases = [
        place.peek.holder.until
        for place in places
        if place.peek is not None and place.token != NOBODY and not place.held_by(request)
    ]
    return min([now + check_ms, *(until for until in leases if until > now)])
