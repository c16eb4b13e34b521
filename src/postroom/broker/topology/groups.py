"""Groups: made, joined, changed, reset and forgotten. Blocking use cases, run in worker threads.

A group in mode "broadcast" has settings and no progress: each member has a group of its own beside it, named
`group@member` (R11), and whatever is done to the broadcast group is done to those. A member without a name
begins at the end, and its group is forgotten when it leaves or is idle for long. That a group is used is
written down once a minute, so that groups nobody uses can be told (R44). Must never forget a group under a
live member: one that is about to expire is retired first, and who meets a retired one begins anew.

A reset by offsets moves the partitions that they name; in all others the group stays where it is, with what
is in flight there or waits for a retry. An offset that is not there is refused, with those that are: nothing
is clamped in silence. Must never rewind a partition of an ordered group while somebody goes on in those that
follow it: they are fenced first, and wait until it is read again (I10).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

from ...config import Limits
from ...endpoint.values import GroupInfo, MemberInfo, PartitionReset, ResetPlan
from ...errors import (
    GateClosed,
    GroupExists,
    GroupLive,
    InvalidSetting,
    StoreBusy,
    StoreUnavailable,
    UnknownGroup,
    UnknownTopic,
)
from ...model.delivery.delivery import Span
from ...model.policy.bounds import make_room
from ...model.policy.settings import GroupSettings, GroupWish, Start
from ...model.topology.names import (
    base_of,
    check_broadcast,
    check_client,
    check_group,
    check_member,
    dead_topic,
    is_unnamed,
    member_group,
    retry_topic,
    slow_topic,
)
from ...model.topology.route import Route
from ...store.contract import Backlog, Group, Store
from .catalog_cache import CatalogCache, is_base
from .kafka_groups import KafkaReaders

__all__ = ["Groups", "Members", "Resets", "moved"]


_FEW = 1000
_TOGETHER = 500  # renewed in one transaction
_NEVER = -(2**62)

_Who = tuple[int, str]


@dataclass(slots=True)
class _CachedGroup:
    group: Group
    heard: int = _NEVER
    renewed: int = _NEVER

    @property
    def due_ms(self) -> int:
        """A beat renews it after so long."""
        lease = self.group.settings.lease_ms
        return lease // 4 if self.group.settings.mode == "ordered" else lease * 3 // 4

    def is_older(self, now: int, ms: int) -> bool:
        return abs(now - self.renewed) >= ms


class Members:
    """Who is live: members enter at once, and are renewed together.

    A member beats three times a lease and is live for two: most beats change nothing. One that is due to be
    renewed takes along all that were heard since they were renewed, in one transaction, so that thousands of
    idle members cost a few transactions each lease. In ordered groups each beat counts, since partitions are
    shared among members heard of within a lease. Must never bring back a member that left: who is not there
    is entered by its own next beat only. `used` is told of groups
    that have live members, as often as they are renewed. Blocking, called from any thread.
    """

    def __init__(self, store: Store, limits: Limits, used: Callable[[Group], None]) -> None:
        self._store, self._limits, self._used = store, limits, used
        self._lock = threading.Lock()
        self._known: dict[_Who, _CachedGroup] = {}
        self._crowded = _FEW  # so many are known: time to forget those that are silent

    def enter(self, group: Group, member: str, client: str) -> None:
        """Or renew it, now."""
        now = self._store.now_ms()
        self._store.progress.join(group.id, member, client, self._ttl_ms(group))
        with self._lock:
            if len(self._known) >= self._crowded:  # members that died here, and nobody beats any more
                self._forget_silent(now)
                self._crowded = max(_FEW, 2 * len(self._known))
            self._known[group.id, member] = _CachedGroup(group, now, now)
        self._used(group)

    def leave(self, group: Group, member: str) -> None:
        with self._lock:
            self._known.pop((group.id, member), None)
        self._store.progress.leave(group.id, member)

    def heard(self, group: Group, member: str, client: str) -> None:
        """A member has beaten."""
        who, now = (group.id, member), self._store.now_ms()
        with self._lock:
            known = self._known.get(who)
            if known is not None and not known.is_older(now, self._ttl_ms(group)):
                known.group, known.heard = group, now
                if not known.is_older(now, known.due_ms):
                    return
                due = self._due(now)
            else:
                due = {}
        if not due or who in self._renew(due, now):
            self.enter(group, member, client)

    def _ttl_ms(self, group: Group) -> int:
        return self._limits.member_ttl_factor * group.settings.lease_ms

    def _due(self, now: int) -> dict[_Who, int]:
        """Those to be renewed, and when they were before; they count as renewed from here on."""
        due: dict[_Who, int] = {}
        for who, known in list(self._known.items()):
            if known.heard > known.renewed and known.is_older(now, known.due_ms // 2):
                due[who], known.renewed = known.renewed, now
            elif known.is_older(now, 2 * self._ttl_ms(known.group)):
                del self._known[who]  # nobody has heard of it for long
        return due

    def _forget_silent(self, now: int) -> None:
        for who, known in list(self._known.items()):
            if known.is_older(now, 2 * self._ttl_ms(known.group)):
                del self._known[who]

    def _renew(self, due: dict[_Who, int], now: int) -> set[_Who]:
        """Returns who is not there any more."""
        missing: set[_Who] = set()
        try:
            for some in _parts(sorted(due)):
                missing.update(self._store.progress.renew_each(self._until(some, now)))
        except BaseException:
            self._restore(due)
            raise
        self._restore(dict.fromkeys(missing, _NEVER))
        with self._lock:
            groups = {who[0]: self._known[who].group for who in due if who in self._known}
        for group in groups.values():
            self._used(group)
        return missing

    def _until(self, some: list[_Who], now: int) -> list[tuple[int, str, int]]:
        """From when they were heard."""
        with self._lock:
            known = [(who, self._known[who]) for who in some if who in self._known]
        return [(*who, self._ttl_ms(one.group) - max(0, now - one.heard)) for who, one in known]

    def _restore(self, renewed: dict[_Who, int]) -> None:
        with self._lock:
            for who, moment in renewed.items():
                if who in self._known:
                    self._known[who].renewed = moment


def _parts(items: list[_Who]) -> Iterator[list[_Who]]:
    for at in range(0, len(items), _TOGETHER):
        yield items[at : at + _TOGETHER]


_log = logging.getLogger("postroom.broker")

_MOST_TOUCHED = 20_000  # groups of which is known when that was written down; else it is once more
_TRIES = 5  # a group that is retired again and again while somebody joins it


class Groups:
    def __init__(
        self,
        store: Store,
        catalog: CatalogCache,
        limits: Limits,
        drop_topic: Callable[[str], None],
        resets: Resets,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._limits = limits
        self._drop_topic = drop_topic
        self._resets = resets
        self._kafka = KafkaReaders(store)
        self._used_ms = limits.tuning.broker.group_used_ms
        self.members = Members(store, limits, self._used)
        self._touched: dict[int, int] = {}  # when this process last wrote that it uses a group

    # ---- members ----

    def subscribe(
        self, topic: str, name: str, wish: GroupWish, member: str, client: str, named: bool
    ) -> GroupInfo:
        check_group(name)
        check_member(member)
        check_client(client)
        for _ in range(_TRIES):
            group, made = self._found_or_made(topic, name, wish.new)
            if not self._in_use(group):
                continue
            wish.check(group.settings, topic=topic, group=name)
            own, new = self._of_member(group, member, named) if is_base(group) else (group, made)
            if own is group or self._in_use(own):
                self.members.enter(own, member, client)
                fresh = new or (own is not group and named and self._has_settled_nothing(own))
                return replace(self.info(own), made=made, fresh=fresh)
        raise StoreBusy(f"group {name!r} of topic {topic!r} was forgotten while it was joined; join it again")

    def _has_settled_nothing(self, group: Group) -> bool:
        """Since it was made, or reset. Whoever made it may have died before it heard so, and comes again."""
        for piece in self._store.catalog.topic(group.topic).route.partitions:
            place = piece.partition_id
            try:
                committed = self._store.progress.committed(group.id, place)
            except StoreUnavailable:
                continue  # its shard is away; the others will do
            if committed is not None and committed != self._store.catalog.start_of(group.id, place)[1]:
                return False
        return True

    def _in_use(self, group: Group) -> bool:
        """It will not expire now. False: it was about to, and is gone."""
        if self._touch(group):
            return True
        self.forget(group)
        return False

    def _found_or_made(
        self, topic: str, name: str, settings: Callable[[], GroupSettings]
    ) -> tuple[Group, bool]:
        """The group, and whether it was made just now."""
        try:
            return self._store.catalog.group(topic, name), False
        except UnknownGroup:
            pass
        try:
            return self._make(topic, name, settings()), True
        except GroupExists:  # another consumer was faster
            return self._store.catalog.group(topic, name), False

    def _make(self, topic: str, name: str, settings: GroupSettings) -> Group:
        if settings.mode == "broadcast" and base_of(name) is None:
            check_broadcast(name)
        settings.start.check_past(self._store.now_ms())
        self._kafka.refuse_taken(self._store.catalog.topic(topic), name)
        group = self._store.catalog.create_group(topic, name, settings)
        self._catalog.forget()
        if base_of(name) is None:
            _log.info("%s", settings.news(topic, name))
            self._note_clamped(group)
        return group

    def _note_clamped(self, group: Group) -> None:
        """Offsets that are not there were moved to what is: say so."""
        if not group.settings.start.offsets:
            return
        route = self._store.catalog.topic(group.topic).route
        for number, offset in group.settings.start.offsets:
            start = self._store.catalog.start_of(group.id, route.readable(number).partition_id)[1]
            if start != offset:
                _log.warning(
                    "group %s of %s starts at offset %d of partition %d, and not at %d, which is not there",
                    group.name, group.topic, start, number, offset,
                )  # fmt: skip

    def _of_member(self, group: Group, member: str, named: bool) -> tuple[Group, bool]:
        settings = group.settings if named else self._unnamed(group.settings)
        name = member_group(group.name, member, named=named)
        own, made = self._found_or_made(group.topic, name, lambda: settings)
        if group.paused and not own.paused:
            own = self._store.catalog.alter_group(own.topic, own.name, own.settings, True)
            self._catalog.forget()
        return own, made

    def _unnamed(self, settings: GroupSettings) -> GroupSettings:
        return replace(settings, start=Start("latest"), expires_ms=self._limits.unnamed_member_ms)

    def _used(self, group: Group) -> None:
        """It has a live member."""
        if self._store.now_ms() - self._touched.get(group.id, 0) >= self._used_ms:
            self._touch(group)

    def _touch(self, group: Group) -> bool:
        make_room(self._touched, _MOST_TOUCHED)
        self._touched[group.id] = self._store.now_ms()
        return self._store.usage.touch(group.id)

    def unsubscribe(self, topic: str, name: str, member: str) -> None:
        try:
            group = self._catalog.group(topic, name)
            self.members.leave(group, member)
            self._touch(group)
            self._touched.pop(group.id, None)
            if (base := base_of(name)) is not None:
                self._touch(self._catalog.group(topic, base))
            if is_unnamed(name):
                self.forget(group)
        except (UnknownTopic, UnknownGroup):
            pass  # it was deleted, and its members with it

    # ---- settings ----

    def create(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        group = self._make(topic, check_group(name), wish.new())
        return replace(self.info(group), made=True, fresh=True)

    def alter(self, topic: str, name: str, wish: GroupWish) -> GroupInfo:
        """Change the group, and with it the groups on its own topics."""
        for group in self._native(topic, name):
            self._alter(group, wish)
            for own in (retry_topic(topic, group.name), slow_topic(topic, group.name)):
                try:
                    self._alter(self._store.catalog.group(own, group.name), wish)
                except (UnknownTopic, UnknownGroup):
                    pass  # nothing was redriven, or set aside, yet
        return self._changed(topic, name)

    def _alter(self, group: Group, wish: GroupWish) -> None:
        settings = wish.over(group.settings)
        wish.check_use(settings.mode)
        if is_unnamed(group.name):
            settings = replace(settings, expires_ms=group.settings.expires_ms)
        self._store.catalog.alter_group(group.topic, group.name, settings, group.paused)

    def pause(self, topic: str, name: str, paused: bool) -> GroupInfo:
        for group in self._native(topic, name):
            self._store.catalog.alter_group(topic, group.name, group.settings, paused)
        return self._changed(topic, name)

    def reset(self, topic: str, name: str, start: Start, force: bool, dry_run: bool) -> ResetPlan:
        try:
            groups = self._with_members(topic, name)
        except UnknownGroup as error:
            return self._reset_kafka(topic, name, start, force, dry_run, error)
        route = self._store.catalog.topic(topic).route
        if dry_run:
            lines = self._resets.plan(route, groups, start)
        else:
            self._refuse_live(groups, "reset", force)
            lines = self._resets.run(route, groups, start)
        info = self._changed(topic, name)
        given = {field.name: getattr(info, field.name) for field in fields(info)}
        return ResetPlan(**given, partitions=tuple(lines), dry_run=dry_run)

    def _reset_kafka(
        self, topic: str, name: str, start: Start, force: bool, dry_run: bool, unknown: UnknownGroup
    ) -> ResetPlan:
        """A group of Kafka clients; if there is none, the error stands."""
        found = self._store.catalog.topic(topic)
        try:
            moved = self._resets.resolved(found.route, start)
            return self._kafka.reset(found, name, start, moved, force=force, dry_run=dry_run)
        except UnknownGroup:
            raise unknown from None

    def delete(self, topic: str, name: str, force: bool) -> None:
        try:
            groups = self._with_members(topic, name)
        except UnknownGroup as error:
            try:
                self._kafka.delete(self._store.catalog.topic(topic), name, force=force)
            except UnknownGroup:
                raise error from None
            return
        self._refuse_live(groups, "deleted", force)
        for group in reversed(groups):
            self.forget(group)

    def forget(self, group: Group) -> None:
        """The group, its progress and its own topics; may be cut at any point and done again."""
        for own in (dead_topic, retry_topic, slow_topic):
            try:
                self._drop_topic(own(group.topic, group.name))
            except UnknownTopic:
                pass
        try:
            self._store.catalog.delete_group(group.topic, group.name, only=group.id)
        except (UnknownTopic, UnknownGroup):
            pass  # somebody else was faster
        self._store.progress.forget(group.id)
        self._touched.pop(group.id, None)
        self._catalog.forget()

    def _native(self, topic: str, name: str) -> list[Group]:
        self._kafka.refuse_taken(self._store.catalog.topic(topic), name)
        return self._with_members(topic, name)

    def _with_members(self, topic: str, name: str) -> list[Group]:
        """The group; of a broadcast group also those of its members."""
        group = self._store.catalog.group(topic, name)
        if not is_base(group):
            return [group]
        return [group, *(g for g in self._store.catalog.groups(topic) if base_of(g.name) == name)]

    def _refuse_live(self, groups: Iterable[Group], what: str, force: bool) -> None:
        groups = list(groups)
        live = [m for group in groups for m in self._store.progress.members(group.id)]
        if live and not force:
            topic, name = groups[0].topic, groups[0].name
            names = ", ".join(m.name for m in live[:3])
            raise GroupLive(
                f"group {name!r} of topic {topic!r} is in use by {len(live)} member(s) ({names}); "
                f"stop them, or pass force=True: then it is {what} at once, and they lose their leases",
                topic=topic,
                group=name,
            )

    # ---- listing ----

    def _changed(self, topic: str, name: str) -> GroupInfo:
        self._catalog.forget()
        return self.info(self._store.catalog.group(topic, name))

    def info(self, group: Group) -> GroupInfo:
        listed = self._infos(self._with_members(group.topic, group.name) if is_base(group) else [group])
        return listed[0]

    def of_topic(self, topic: str) -> list[GroupInfo]:
        found = self._infos(self._store.catalog.groups(topic))
        return [*found, *self._kafka.of_topic(self._store.catalog.topic(topic))]

    def _infos(self, groups: Iterable[Group]) -> list[GroupInfo]:
        """A broadcast group shows the members of all, and is as idle as the one that was used last."""
        groups = list(groups)
        ids = [group.id for group in groups]
        seen, now = self._store.usage.seen(ids), self._store.now_ms()
        live = self._store.progress.members_of(ids)
        members: dict[str, list[MemberInfo]] = {}
        used: dict[str, int] = {}
        for group in groups:
            found = [MemberInfo(m.name, m.client, m.joined_at, m.until) for m in live.get(group.id, ())]
            for name in {group.name, base_of(group.name) or group.name}:
                members.setdefault(name, []).extend(found)
                used[name] = max(used.get(name, 0), seen.get(group.id, group.created_at))
        return [
            GroupInfo(
                topic=g.topic,
                name=g.name,
                settings=g.settings,
                paused=g.paused,
                generation=g.generation,
                created_at=g.created_at,
                members=tuple(members[g.name]),
                idle_ms=None if members[g.name] else max(0, now - used[g.name]),
            )
            for g in groups
        ]


def moved(cursor: int, end: int, sealed: bool, unsettled: Iterable[Span], to: int) -> tuple[int, int]:
    """How many messages come again, and how many are skipped, when a group goes on at `to`.

    Everything below `cursor` was handed out, and is settled but for the `unsettled` ranges. The control batch
    that seals a partition is no message.
    """
    last = end - int(sealed)
    cursor, to = min(cursor, last), min(to, last)
    ranges = [(first, min(final, last - 1)) for first, final in unsettled if first < last]
    below = sum(min(final, to - 1) - first + 1 for first, final in ranges if first < to)
    above = sum(final - max(first, to) + 1 for first, final in ranges if final >= to)
    return max(0, cursor - to) - above, below + max(0, to - cursor)


_ALL = 2**31 - 1  # unsettled ranges, however many there are


class Resets:
    """`resolve`: what a start comes to in a topic, by partition id."""

    def __init__(self, store: Store, resolve: Callable[[str, Start], dict[int, int]]) -> None:
        self._store = store
        self._resolve = resolve

    def plan(self, route: Route, groups: Sequence[Group], start: Start) -> list[PartitionReset]:
        """What a reset would do now, a line for each group and partition."""
        self._check(route, start)
        found = self._resolve(route.topic, start)
        named = _named(route, start)
        after = {one: offset for one, offset in found.items() if one in named}
        return self._lines(route, groups, self._positions(route, groups), lambda _: after)

    def run(self, route: Route, groups: Sequence[Group], start: Start) -> list[PartitionReset]:
        """Reset these groups; the lines say what was done."""
        self._check(route, start)
        before = self._positions(route, groups)
        after: dict[int, dict[int, int]] = {}
        for group in groups:
            again = self._store.catalog.reset_group(route.topic, group.name, start)
            if not is_base(group):
                self._rewind(again, route, start)
                named = _named(route, start)
                after[group.id] = {one: self._store.catalog.start_of(group.id, one)[1] for one in named}
        return self._lines(route, groups, before, lambda group: after[group.id])

    def resolved(self, route: Route, start: Start) -> dict[int, int]:
        """What a start comes to, by partition id. InvalidSetting for one that is not there."""
        self._check(route, start)
        return self._resolve(route.topic, start)

    def _check(self, route: Route, start: Start) -> None:
        start.check_past(self._store.now_ms(), name="to")
        pieces = {piece.partition: piece.partition_id for piece in route.partitions}
        unknown = sorted(number for number, _ in start.offsets if number not in pieces)
        if unknown:
            raise InvalidSetting(
                f"topic {route.topic!r} has no partition {unknown[0]}; it has "
                f"{', '.join(str(number) for number in sorted(pieces))}",
                topic=route.topic,
            )
        for number, offset in start.offsets:
            bounds = self._store.log.bounds([pieces[number]])[pieces[number]]
            where = f"partition {number} of topic {route.topic!r}"
            if offset > bounds.end:
                raise InvalidSetting(
                    f"{where} ends at offset {bounds.end}, and {offset} is beyond it: choose {bounds.end} "
                    "(its end) or less",
                    topic=route.topic,
                )
            if offset < bounds.start:
                raise InvalidSetting(
                    f"{where} begins at offset {bounds.start}, and {offset} is not kept any more: choose "
                    f"{bounds.start} (its beginning) or more",
                    topic=route.topic,
                )

    # ---- moving ----

    def _rewind(self, group: Group, route: Route, start: Start) -> None:
        """What follows a partition that is moved first; it opens when it is its turn again (I10)."""
        places = [piece.partition_id for piece in route.partitions]
        named = _named(route, start)
        fenced: set[int] = set()
        if group.settings.mode == "ordered":
            fenced = {one for place in named for one in route.descendants(place)}
            self._store.progress.fence(group, [p for p in reversed(places) if p in fenced])
        self._store.progress.rewind(group, [p for p in places if p in named and p not in fenced])
        for place in places:  # as they are: they would follow with their next poll
            if place not in named and place not in fenced:
                with suppress(GateClosed, StoreUnavailable):
                    self._store.progress.rewind(group, [place])

    # ---- telling ----

    def _positions(self, route: Route, groups: Sequence[Group]) -> Mapping[int, list[Backlog]]:
        there = self._store.present(piece.partition_id for piece in route.partitions)
        progress = self._store.progress
        return {g.id: progress.backlog(g, there, open_spans=_ALL) for g in groups if not is_base(g)}

    def _lines(
        self,
        route: Route,
        groups: Sequence[Group],
        before: Mapping[int, list[Backlog]],
        after: Callable[[Group], Mapping[int, int]],
    ) -> list[PartitionReset]:
        numbers = {piece.partition_id: piece.partition for piece in route.partitions}
        found = []
        for group in groups:
            for was in before.get(group.id, ()):
                to = after(group).get(was.partition_id)
                if to is None and was.sealed and was.committed >= was.end:
                    continue  # read to its end, and left there
                found.append(_line(group.name, numbers[was.partition_id], was, to))
        return sorted(found, key=lambda line: (line.group, line.partition))


def _line(group: str, partition: int, was: Backlog, to: int | None) -> PartitionReset:
    """`to` None: the group stays there."""
    if to is None:
        return PartitionReset(group, partition, was.committed, was.committed, 0, 0, moved=False)
    again, skipped = moved(was.cursor, was.end, was.sealed, was.open, to)
    return PartitionReset(group, partition, was.committed, to, again, skipped)


def _named(route: Route, start: Start) -> set[int]:
    """The partitions that are moved, by id."""
    numbers = {number for number, _ in start.offsets}
    return {p.partition_id for p in route.partitions if start.kind != "offsets" or p.partition in numbers}
