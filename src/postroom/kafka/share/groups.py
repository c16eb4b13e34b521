"""Share groups as Kafka clients see them: a name over several topics, with configs; on each topic a group in
mode "shared".

Every group in that mode is a share group to them, whoever made it. A name that no group here can have is kept
beside the group that stands for it. Configs may be set before there is a group: they are what it is made with
on each topic, and a change of the lease or of the attempts reaches those that are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from ...broker.served import Servable
from ...broker.topology.catalog_cache import Listed
from ...config import DEFAULTS, WireTuning
from ...errors import GroupExists, InvalidSetting, LimitReached, PermissionDenied, PostroomError, UnknownGroup
from ...model.policy.fair_shares import FairShares
from ...model.policy.settings import GroupWish, Start
from ...model.topology.names import base_of, is_internal, share_group
from ...store.contract import Group
from ...store.contract.kafka import ShareGroup
from ..apis import Code, code_of
from .sessions import ShareError

__all__ = ["GroupConfig", "ShareGroups", "SharedByName", "wish_of"]

_MOST = 10_000  # share groups of a queue that Kafka clients may make; and those with a config or another name
_START, _LEASE, _ATTEMPTS = (
    "share.auto.offset.reset",
    "share.record.lock.duration.ms",
    "share.delivery.count.limit",
)
_LATEST, _EARLIEST = "latest", "earliest"
_OTHERS = ""  # whoever made a group, if it is not known
_KAFKAS_ATTEMPTS = 5  # Kafka's own default: its clients count with it
_MOST_ATTEMPTS = 10_000
_STRING, _INT = 2, 3  # types of a config


class GroupConfig(NamedTuple):
    """A config, as admin clients are told."""

    name: str
    value: str
    type: int
    own: bool = False  # somebody has set it
    fixed: bool = False


def wish_of(configs: Mapping[str, str]) -> GroupWish:
    """The settings of a group with these configs. What is not among them is as with Kafka: it begins at
    the end, and a message is delivered five times."""
    lease = configs.get(_LEASE)
    return GroupWish(
        mode="shared",
        start=Start("earliest" if configs.get(_START) == _EARLIEST else "latest"),
        lease_ms=None if lease is None else int(lease),
        max_attempts=int(configs.get(_ATTEMPTS, _KAFKAS_ATTEMPTS)),
    )


def _checked(name: str, value: str) -> str:
    """The value of a config. InvalidSetting if it cannot be that."""
    if name == _START:
        if value not in (_LATEST, _EARLIEST):
            raise InvalidSetting(f"{name}={value!r}: choose {_EARLIEST!r} or {_LATEST!r}")
        return value
    low, high = (
        (DEFAULTS.tuning.wire.kafka_shortest_lease_ms, DEFAULTS.longest_lease_ms)
        if name == _LEASE
        else (1, _MOST_ATTEMPTS)
    )
    if name not in (_LEASE, _ATTEMPTS):
        raise InvalidSetting(
            f"a share group has no config {name!r} here; set {_START}, {_LEASE}, {_ATTEMPTS}"
        )
    if not (value.isascii() and value.isdecimal() and len(value) < 20 and low <= int(value) <= high):
        raise InvalidSetting(f"{name}={value!r}: a whole number from {low} to {high}")
    return str(int(value))


def _shared(listed: Listed) -> dict[str, list[Group]]:
    """The groups in mode "shared" on topics of users, by name."""
    found: dict[str, list[Group]] = {}
    for group in (one for groups in listed.groups.values() for one in groups):
        own = is_internal(group.topic) or base_of(group.name) is not None or group.name.startswith("_")
        if group.settings.mode == "shared" and not own:
            found.setdefault(group.name, []).append(group)
    return found


class SharedByName:
    """The groups in mode "shared", by name, for all connections of a broker.

    Sorted out once for as long as nothing changes: a request may name thousands of groups (I22). Who has made
    which is known for as long as the broker lives, so that no principal makes more than half of what is left.
    """

    def __init__(self, broker: Servable) -> None:
        self._broker = broker
        self._listed: Listed | None = None
        self._named: dict[str, list[Group]] = {}
        self._made_by: dict[str, str] = {}  # principals, by the names of groups

    async def get(self) -> Mapping[str, list[Group]]:
        listed: Listed = await self._broker.in_thread(self._broker.listing.look)
        if self._listed is not listed:
            self._listed, self._named = listed, _shared(listed)
        return self._named

    async def check_room(self, name: str, principal: str) -> None:
        """LimitReached if it is a new one, and that principal may make no more."""
        there = await self.get()
        if name in there:
            return
        if len(self._made_by) > 2 * _MOST:  # of groups that are gone, or were never made
            self._made_by = {one: who for one, who in self._made_by.items() if one in there}
        shares = FairShares()
        for one in there:
            shares.take(self._made_by.get(one, _OTHERS), 1)
        if not shares.room(principal, _MOST):
            raise LimitReached(
                f"there are {len(there):,} share groups of {_MOST:,}, and a client makes no more than half "
                "of what others leave: delete some that nobody needs"
            )
        self._made_by[name] = principal


class ShareGroups:
    """The share groups, for one connection. `permit`: operation and topic (None: the queue); `who`: the
    client's principal."""

    def __init__(
        self,
        broker: Servable,
        permit: Callable[[str, str | None], None],
        who: Callable[[], str],
        tuning: WireTuning,
        shared: SharedByName,
    ) -> None:
        self._broker, self._permit, self._who, self._tuning = broker, permit, who, tuning
        self._shared = shared

    async def all(self) -> dict[str, list[Group]]:
        """Every share group, by the name that Kafka clients know, and the groups that it is on topics."""
        kept = await self._broker.in_thread(self._broker.store.kafka_groups.share_groups)
        names = {share_group(one.name): one.name for one in kept}
        found: dict[str, list[Group]] = {}
        for native, groups in (await self._shared.get()).items():
            found[names.get(native, native)] = groups
        return found

    async def of(self, name: str) -> list[Group]:
        """The groups that a share group is on topics."""
        return (await self._shared.get()).get(share_group(name), [])

    def check(self, operation: str, groups: Iterable[Group]) -> None:
        """ShareError unless the client may do so on every topic of the group; of none, on the queue."""
        try:
            self._check_each(operation, groups)
        except PermissionDenied as error:
            raise ShareError(Code.GROUP_AUTHORIZATION_FAILED, str(error)) from None

    async def make(self, topic: str, name: str, wish: GroupWish | None = None) -> None:
        """See to it that the group is there on a topic, with its configs, or as somebody wishes.

        GroupConflict if a group of Kafka's other kind has the name; LimitReached if there are too many.
        """
        store, native = self._broker.store, share_group(name)
        try:
            await self._broker.in_thread(store.catalog.group, topic, native)
            return
        except UnknownGroup:
            pass
        await self._shared.check_room(native, self._who())
        kept = await self._broker.in_thread(store.kafka_groups.share_group, name)
        if kept is None and native != name:
            await self._keep(ShareGroup(name, {}))
        configs = {} if kept is None else kept.configs
        try:
            await self._broker.create_group(topic, native, wish or wish_of(configs))
        except GroupExists:
            pass  # somebody else was faster

    async def _keep(self, group: ShareGroup) -> None:
        """Keep a name and its configs; names whose groups are gone make room for it."""
        kept, in_thread = self._broker.store.kafka_groups, self._broker.in_thread
        if await in_thread(kept.put_share_group, group, _MOST):
            return
        there = await self._shared.get()
        for one in await in_thread(kept.share_groups):
            if not one.configs and share_group(one.name) not in there:
                await in_thread(kept.drop_share_group, one.name)
        if not await in_thread(kept.put_share_group, group, _MOST):
            raise LimitReached(f"{_MOST:,} share groups have a config, or a name of Kafka's: delete some")

    # ---- deleting ----

    async def delete(self, name: str) -> int:
        """Forget a group on all its topics; returns Kafka's code."""
        try:
            groups = await self.of(name)
            kept = await self._broker.in_thread(self._broker.store.kafka_groups.share_group, name)
            if not groups and kept is None:
                return Code.GROUP_ID_NOT_FOUND
            self.check("delete_group", groups)
            for group in groups:
                await self._broker.delete_group(group.topic, group.name, False)
            await self._broker.in_thread(self._broker.store.kafka_groups.drop_share_group, name)
            return Code.NONE
        except ShareError as error:
            return error.code
        except PostroomError as error:
            return code_of(error)

    # ---- configs ----

    async def configs(self, name: str) -> list[GroupConfig]:
        """Every config of a share group, whether it is there or not."""
        groups = await self.of(name)
        self._check_each("groups", groups)
        kept = await self._broker.in_thread(self._broker.store.kafka_groups.share_group, name)
        own = {} if kept is None else dict(kept.configs)
        if groups:  # what it is made of by now
            settings = groups[0].settings
            own |= {_LEASE: str(settings.lease_ms), _ATTEMPTS: str(settings.max_attempts)}
        tuning = self._tuning
        defaults = {
            _START: _LATEST, _LEASE: str(DEFAULTS.lease_ms), _ATTEMPTS: str(_KAFKAS_ATTEMPTS),
        }  # fmt: skip
        found = [
            GroupConfig(one, own.get(one, value), _STRING if one == _START else _INT, own=one in own)
            for one, value in defaults.items()
        ]
        return [
            *found,
            GroupConfig("share.heartbeat.interval.ms", str(tuning.kafka_share_beat_ms), _INT, fixed=True),
            GroupConfig("share.isolation.level", "read_uncommitted", _STRING, fixed=True),
            GroupConfig("share.session.timeout.ms", str(tuning.kafka_share_session_ms), _INT, fixed=True),
        ]

    async def alter(self, name: str, asked: Mapping[str, str | None], *, validate_only: bool) -> None:
        """Set configs; None is the default. InvalidSetting says what cannot be."""
        if not 0 < len(name) <= 249:
            raise InvalidSetting("a share group has a name of 1 to 249 characters")
        groups = await self.of(name)
        self._check_each("alter_group", groups)
        kept = await self._broker.in_thread(self._broker.store.kafka_groups.share_group, name)
        configs = {} if kept is None else dict(kept.configs)
        for one, value in asked.items():
            configs[one] = _checked(one, _default(one) if value is None else value)
            if value is None:
                del configs[one]
        if validate_only:
            return
        await self._keep(ShareGroup(name, configs))
        wish = wish_of(configs)
        changed = GroupWish(
            lease_ms=wish.lease_ms or DEFAULTS.lease_ms if _LEASE in asked else None,
            max_attempts=wish.max_attempts if _ATTEMPTS in asked else None,
        )
        for group in groups if changed != GroupWish() else ():
            await self._broker.alter_group(group.topic, group.name, changed)

    def _check_each(self, operation: str, groups: Iterable[Group]) -> None:
        topics: list[str | None] = [group.topic for group in groups]
        for topic in topics or [None]:
            self._permit(operation, topic)


def _default(name: str) -> str:
    known: dict[str, Any] = {_START: _LATEST, _LEASE: DEFAULTS.lease_ms, _ATTEMPTS: _KAFKAS_ATTEMPTS}
    return str(known.get(name, ""))
